"""TensorBoard and Weights & Biases: records of a run's log beside the run, and of its file."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import TENSORS, EventAccumulator

from llmq.base.errors import DataError, LlmqError
from llmq.commands.cli import _run
from llmq.report import json_log, sinks
from llmq.report.json_log import JsonLog, LogReader
from llmq.report.sinks import numbers, text
from tests.runs import make_workplace, records, signal_after, train

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TIME = START.strftime("%Y-%m-%d %H:%M:%S.250000000")
NAMES = {"step": "train", "eval": "eval"}


def step_fields(loss: float = 5.0) -> dict:
    return {"step_tokens": 64, "duration_ms": 20, "loss": loss, "norm": 1.0, "lr": 1e-3}


def write_run(log: JsonLog, steps, done: bool = True, **fields) -> None:
    """Write the log of a run that makes these steps; the loss of step s is 5 - s / 10."""
    log.write("cmd", 0, cmd=["llmq", "train", "--name", "a b"], resumed_at=0)
    log.write("option", 0, name="steps", value=len(steps))
    log.write("option", 0, name="cuda-graphs", value=True)
    log.write("dataset", 0, split="train", files=["a.bin"], tokens=9, seed=1)
    for step in steps:
        log.write("step", step, **step_fields(5 - step / 10), **fields)
    if done:
        log.write("info", steps[-1] + 1, type="message", message="Done. validation loss   4.0")
        log.write("info", steps[-1] + 1, type="message", message="Saving model to `out`")


def events(folder: Path) -> EventAccumulator:
    """The values that TensorBoard shows of the event files in a folder."""
    assert any(folder.iterdir())
    return EventAccumulator(str(folder), size_guidance={TENSORS: 0}).Reload()


def series(found: EventAccumulator, name: str) -> list[tuple[float, int, float]]:
    """(time, step, value) of each point."""
    return [(e.wall_time, e.step, e.tensor_proto.float_val[0]) for e in found.Tensors(name)]


def shown(found: EventAccumulator, name: str) -> str:
    return found.Tensors(name)[0].tensor_proto.string_val[0].decode()


@pytest.fixture
def log(tmp_path) -> JsonLog:
    log = JsonLog(tmp_path / "log.json")
    yield log
    log.close()


@pytest.fixture
def wandb(monkeypatch) -> SimpleNamespace:
    """Stands in for the package; keeps what it is called with."""
    kept = SimpleNamespace(logged=[], config={}, finished=0, started=None)

    def init(**options):
        kept.started = options
        return SimpleNamespace(
            log=lambda values, step: kept.logged.append((step, values)),
            config=SimpleNamespace(update=lambda new, allow_val_change: kept.config.update(new)),
            finish=lambda: setattr(kept, "finished", kept.finished + 1),
            url=getattr(kept, "url", None),
        )

    kept.init, kept.__spec__ = init, object()
    monkeypatch.setitem(sys.modules, "wandb", kept)
    return kept


@pytest.fixture
def after(monkeypatch):
    """after(f, g, ...): these are called instead of the waits between looks at the log."""

    def replace(*calls):
        left = list(calls)
        # The module's own name: other threads of the process wait, too.
        clock = SimpleNamespace(sleep=lambda seconds: left.pop(0)(), time=time.time)
        monkeypatch.setattr(sinks, "time", clock)
        return left

    return replace


# ------------------------------------------------------------------------------------------------
# A real run


def test_tensorboard_has_what_the_run_has_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=4, eval_every_n_steps=2) == 0
    capsys.readouterr()
    assert _run(["watch", "log.json", "--tensorboard", "runs", "--name", "mine"]) == 0
    written = json.loads(Path("log.json").read_text())
    assert capsys.readouterr().out == f"sent {len(written)} records of 'log.json'\n"
    found = events(Path("runs/mine"))
    checked = 0
    for kind, name in [
        ("step", "loss"),
        ("step", "norm"),
        ("step", "lr"),
        ("step", "lse_mean"),
        ("eval", "loss"),
        ("eval", "loss_1k"),
    ]:
        expected = []
        for r in written:
            if r["log"] == kind:
                at = datetime.fromisoformat(r["time"]).replace(tzinfo=UTC).timestamp()
                expected.append((at, r["step"], float(np.float32(r[name]))))
        assert series(found, f"{NAMES[kind]}/{name}") == expected
        checked += len(expected)
    assert checked == 4 * 4 + 2 * 2
    assert [shlex.split(shown(found, "cmd"))] == [r["cmd"] for r in written if r["log"] == "cmd"]
    assert "| seq-len | 16 |" in shown(found, "options").splitlines()
    assert "eval.bin" in shown(found, "dataset-eval")
    plugin = found.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and b"seq-len" in plugin.content
    (stats,) = (r["stats"] for r in written if r["log"] == "allocator")
    sizes = {row["name"]: row["device"] / 2**20 for row in stats}
    assert series(found, "gpu_memory/Weights")[0][1:] == (0, float(np.float32(sizes["Weights"])))


TENSORBOARD = {"tensorboard": "tb", "save_training_state": True}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def test_a_run_and_its_continuations_are_one_run_in_tensorboard(workplace, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signal_after(patch, 3)
        assert train(**TENSORBOARD, steps=5, ckpt_interval=2) == 130
    losses = [r["loss"] for r in records("step")]
    assert [p[1] for p in series(events(Path("tb/log")), "train/loss")] == [0, 1, 2, 3]
    again = {"steps": 4, "continue": "2", "learning_rate": 0.05}
    assert train(**TENSORBOARD | again) == 0
    assert "WARNING" not in capsys.readouterr().out
    points = series(events(Path("tb/log")), "train/loss")
    assert [step for _, step, _ in points] == [0, 1, 2, 3]
    assert [value for *_, value in points] == pytest.approx(
        losses[:2] + [r["loss"] for r in records("step")][4:], rel=1e-6
    )  # TensorBoard keeps F32
    assert list(Path("tb").iterdir()) == [Path("tb/log")]
    assert _run(["watch", "log.json", "--tensorboard", "tb", "--name", "afterwards"]) == 0
    afterwards = events(Path("tb/afterwards"))
    assert series(afterwards, "train/loss") == points
    assert afterwards.Tags() == events(Path("tb/log")).Tags()


def test_wandb_follows_a_run(workplace, wandb, capsys):
    wandb.url = "https://w"
    assert train(steps=2, wandb="project") == 0
    assert wandb.started["project"] == "project" and wandb.started["resume"] == "allow"
    losses = [(step, v["train/loss"]) for step, v in wandb.logged if "train/loss" in v]
    assert losses == [(r["step"], r["loss"]) for r in records("step")]
    assert wandb.config["seq-len"] == 16 and wandb.finished == 1
    assert capsys.readouterr().out.count("Weights & Biases: https://w\n") == 1


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_sink_that_fails_is_one_line_and_the_run_goes_on(workplace, wandb, capsys, where):
    def fail(*args, **kwargs):
        raise RuntimeError("no key:\nlog in")

    if where == "init":
        wandb.init = fail
    else:
        start = wandb.init
        wandb.init = lambda **options: SimpleNamespace(**vars(start(**options)) | {"log": fail})
    assert train(steps=2, wandb="p", tensorboard="tb") == 0
    out, err = capsys.readouterr()
    line = "WARNING: --wandb: no key: log in: the run goes on without it"
    assert out.count(line) == 1 and "Done. validation loss" in out and err == ""
    assert [r["message"] for r in records("info") if line in r.get("message", "")] == [line]
    assert len(series(events(Path("tb/log")), "train/loss")) == 2
    assert wandb.finished == (where == "log")


def test_a_sink_that_fails_at_once_takes_no_record_from_the_next(workplace, wandb, capsys):
    """The warning is a record, too; the first record, which says whose log it is, comes first."""
    assert train(steps=1, tensorboard="data/eval.bin", wandb="p") == 0
    (begun, *_) = records("cmd")
    assert wandb.started["id"] == begun["run"]["id"]


def test_a_place_that_cannot_be_written_is_one_line(workplace, capsys):
    assert train(steps=1, tensorboard="data/eval.bin") == 0
    assert "WARNING: --tensorboard: cannot write into 'data/eval" in capsys.readouterr().out


def test_the_end_of_a_sink_that_fails_is_a_warning(workplace, wandb, capsys):
    def fail():
        raise RuntimeError("offline")

    start = wandb.init
    wandb.init = lambda **options: SimpleNamespace(**vars(start(**options)) | {"finish": fail})
    assert train(steps=1, wandb="p") == 0
    assert "warning: --wandb: offline" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_said_before_the_first_step(
    workplace, library, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, library, None)
    assert train(steps=1, **{library: "x"}) == 2
    out, err = capsys.readouterr()
    assert err == f"error: --{library}: there is no library {library}: pip install {library}\n"
    assert out == "" and not Path("log.json").exists()


def test_a_sink_needs_no_file_of_the_log(workplace):
    assert train(steps=1, log_file="/dev/null", tensorboard="tb") == 0
    assert len(series(events(Path("tb/null")), "train/loss")) == 1


# ------------------------------------------------------------------------------------------------
# Names and units

GPU = {"id": 3, "rank": 2, "clock": 1980, "fan": -1, "power": 183_500, "power_limit": 700_000}
GPU |= {"temperature": 39, "throttle": "idle", "dram_free": 3 * 2**20, "pcie_rx": 2**19}
ROW = {"managed": 0, "pageable": 0}
NUMBERS = [
    (
        "step",
        {**step_fields(), "communication": 2.5},
        {
            "train/loss": 5.0,
            "train/norm": 1.0,
            "train/lr": 1e-3,
            "train/duration_ms": 20,
            "train/communication": 2.5,
            "train/tokens_per_second": 3200.0,
        },
    ),
    (
        "eval",
        {"eval_tokens": 32, "duration_ms": 0, "loss": 4.0},
        {"eval/loss": 4.0, "eval/duration_ms": 0},
    ),
    (
        "gpu",
        GPU,
        {
            "gpu2/clock": 1980,
            "gpu2/power": 183.5,
            "gpu2/power_limit": 700,
            "gpu2/temperature": 39,
            "gpu2/dram_free": 3,
            "gpu2/pcie_rx": 0.5,
        },
    ),
    ("gpu", {"id": 0, "power": 1000}, {"gpu0/power": 1}),  # an older log
    (
        "gpu",
        {"rank": 1, "power_max": 2000, "dram_free_min": 2**21, "samples": 9, "reasons": {"a": 3}},
        {"gpu1/power_max": 2, "gpu1/dram_free_min": 2},
    ),
    (
        "cpu",
        {"rank": 0, "util": 30, "util_max": -1, "memory_used": 2**22},
        {"cpu0/util": 30, "cpu0/memory_used": 4},
    ),
    (
        "abs-maxes",
        {"abs_maxes": [{"name": "act.ln1.0", "value": 2.5}, {"name": "grad.qkv.0", "value": 3}]},
        {"abs_maxes/act.ln1.0": 2.5, "abs_maxes/grad.qkv.0": 3},
    ),
    (
        "allocator",
        {
            "stats": [
                {"name": "Adam M", "device": 2**20, "pinned": 0, **ROW},
                {"name": "Master", "device": 0, "pinned": 3 * 2**19, **ROW},
            ]
        },
        {"gpu_memory/Adam M": 1, "host_memory/Master": 1.5},
    ),
    (
        "sol",
        {"rank": 0, "blocks": 3, "lm_head": 2, "attention": 1, "tps": 9, "bf16_peak": 989.4},
        {"flops_per_token/blocks": 3, "flops_per_token/lm_head": 2, "flops_per_token/attention": 1},
    ),
    (
        "info",
        {
            "type": "time-breakdown",
            "gpu": 1,
            "breakdown": [
                {"step": 0, "fwd": 1.0, "head": 0.5, "bwd": 2.0},
                {"step": 1, "fwd": 2.0, "head": 0.25, "bwd": 4.0},
                {"opt": 8.0},
            ],
        },
        {"gpu1/fwd_ms": 3.0, "gpu1/head_ms": 0.75, "gpu1/bwd_ms": 6.0, "gpu1/opt_ms": 8.0},
    ),
    ("info", {"type": "message", "message": "Done."}, {}),
    ("cmd", {"cmd": ["llmq"]}, {}),
    ("what-comes-later", {"value": 1}, {}),
]


@pytest.mark.parametrize(("kind", "fields", "expected"), NUMBERS)
def test_names_and_units(kind, fields, expected):
    assert numbers({"log": kind, "time": 1.0, "step": 7, **fields}) == expected


@pytest.mark.parametrize("kind", ["step", "abs-maxes"])
def test_null_is_nan(kind):
    named = {"abs_maxes": [{"name": "a", "value": None}]}
    found = numbers({"log": kind, **step_fields(), "loss": None, **named})
    assert math.isnan(found[{"step": "train/loss", "abs-maxes": "abs_maxes/a"}[kind]])


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("cmd", {"cmd": ["llmq", "--name", "a b"]}, ("cmd", "llmq --name 'a b'")),
        ("dataset", {"split": "eval", "seed": 1}, ("dataset-eval", {"split": "eval", "seed": 1})),
        ("gpu-model", {"rank": 1, "name": "H"}, ("gpu-model-1", {"rank": 1, "name": "H"})),
        ("links", {"links": [{"kind": "direct"}]}, ("links", [{"kind": "direct"}])),
        ("fast-products", {"fast_products": {"p": True}}, ("fast-products", {"p": True})),
        ("choices", {"choices": {"p": "a"}}, ("choices", {"p": "a"})),
        ("step", step_fields(), None),
    ],
)
def test_texts(kind, fields, expected):
    assert text({"log": kind, "time": 1.0, "step": 0, **fields}) == expected


# ------------------------------------------------------------------------------------------------
# Weights & Biases


# ------------------------------------------------------------------------------------------------
# A log that grows


def test_every_part_of_a_log_is_read_once(log, tmp_path):
    """Wherever the file is cut off, and with the rest of it later."""
    write_run(log, range(2), message='a "quoted" { and [ \\')
    data = log.path.read_bytes()
    whole = list(LogReader(log.path).new_records())
    assert len(whole) == 8 and whole[4]["loss"] == 5.0
    part = tmp_path / "part.json"
    part.write_bytes(data)
    for size in range(len(data) + 1):
        os.truncate(part, size)
        reader = LogReader(part)
        first = list(reader.new_records())
        with part.open("ab") as file:
            file.write(data[size:])
        assert first + list(reader.new_records()) == whole, size
        assert list(reader.new_records()) == []


def test_a_record_that_is_written_in_the_middle_of_a_read(log, monkeypatch):
    write_run(log, range(2))
    calls, real = [], json_log.elements

    def torn(*args, **kwargs):
        calls.append(args)
        for count, element in enumerate(real(*args, **kwargs)):
            if len(calls) == 1 and count == 3:
                raise DataError("no array")
            yield element

    monkeypatch.setattr(json_log, "elements", torn)
    reader = LogReader(log.path, retry=0)
    assert [r["log"] for r in reader.new_records()] == [
        *["cmd", "option", "option", "dataset", "step", "step", "info", "info"]
    ]
    assert len(calls) == 2


def test_following_until_the_run_is_done(log, tmp_path, wandb, after):
    """A run that is killed and continued, and makes two steps again, before it is done.

    TensorBoard shows those that count; W&B takes no step after a later one.
    """
    write_run(log, range(3), done=False)
    for step in (3, 4):
        log.write("eval", step, eval_tokens=9, duration_ms=1, loss=10.0 * step)  # before the step
        log.write("step", step, **step_fields(5 - step / 10))

    def write_half():
        with open(log.path, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b',\n  {"log": "step", "time')

    def go_on():
        with open(log.path, "r+b") as file:
            file.seek(log._end - 3)
            file.write(b"\n]\n")
            file.truncate()
        again = JsonLog(log.path, append=True)
        again.write("cmd", 0, cmd=["again"], resumed_at=3)
        for step in range(3, 7):
            again.write("step", step, **step_fields(50 + step))
        again.write("info", 7, type="message", message="Done. No validation")
        again.close()

    left = after(lambda: None, write_half, go_on)
    runs = tmp_path / "runs"
    args = ["watch", str(log.path), "--tensorboard", str(runs)]
    assert _run([*args, "--wandb", "p"]) == 0
    assert left == []
    found = events(runs / "log")
    first = [(step, float(np.float32(5 - step / 10))) for step in range(5)]
    again = [(step, 50 + step) for step in range(7)]
    assert [point[1:] for point in series(found, "train/loss")] == first[:3] + again[3:]
    assert [point[1:] for point in series(found, "eval/loss")] == [(3, 30.0)]
    losses = [(s, v["train/loss"]) for s, v in wandb.logged if "train/loss" in v]
    assert losses == [(s, pytest.approx(loss)) for s, loss in first + again[5:]]
    assert wandb.config["steps"] == 3, "the options are those of the first run"
    assert len(found.Tensors("cmd")) == 1
    assert _run([*args, "--name", "afterwards", "--interval", "0"]) == 0
    afterwards = events(runs / "afterwards")
    for name in ("train/loss", "eval/loss"):
        assert series(afterwards, name) == series(found, name)


def test_one_run_in_tensorboard_and_wandb_through_continuations(log, tmp_path, wandb, capsys):
    """The run has an identity: `watch` once more goes on in the same places."""
    runs = tmp_path / "runs"
    args = ["watch", str(log.path), "--interval", "0", "--tensorboard", str(runs), "--wandb", "p"]
    run = {"id": "0123456789ab", "name": "mine"}
    log.write("cmd", 0, cmd=["llmq"], run=run, resumed_at=0)
    for step in range(5):
        log.write("step", step, **step_fields(step))
    assert _run(args) == 0
    assert wandb.started["id"] == run["id"] and wandb.started["resume"] == "allow"
    log.write("cmd", 0, cmd=["llmq"], run=run, resumed_at=2)
    log.write("step", 2, **step_fields(20))
    start, logged = wandb.init, wandb.logged
    wandb.init = lambda **options: SimpleNamespace(**vars(start(**options)), starting_step=5)
    logged.clear()
    assert _run(args) == 0
    assert [point[1:] for point in series(events(runs / "log"), "train/loss")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]
    assert logged == []
    log.write("step", 3, **step_fields(30))
    log.write("step", 4, **step_fields(40))
    log.write("step", 5, **step_fields(50))
    assert _run(args) == 0
    assert [step for step, _ in logged] == [5]
    assert len(series(events(runs / "log"), "train/loss")) == 6
    other = JsonLog(log.path)
    other.write("cmd", 0, cmd=["llmq"], run=run | {"id": "another"}, resumed_at=0)
    other.write("step", 0, **step_fields(7))
    other.close()
    assert _run(args) == 0, "another run whose log has the same name gets a directory of its own"
    assert series(events(runs / "log-another"), "train/loss")[0][1:] == (0, 7.0)
    capsys.readouterr()
    assert _run([*args, "--name", "log"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_sent(log, tmp_path, wandb, capsys, monkeypatch):
    write_run(log, range(3), done=False)

    def interrupt(seconds):
        assert seconds == 7
        raise KeyboardInterrupt

    monkeypatch.setattr(sinks.time, "sleep", interrupt)
    args = ["--tensorboard", str(tmp_path / "runs"), "--wandb", "p", "--interval", "7"]
    assert _run(["watch", str(log.path), *args]) == 130
    assert capsys.readouterr() == ("", "")
    assert len(series(events(tmp_path / "runs" / "log"), "train/loss")) == 3
    assert (len(wandb.logged), wandb.finished) == (3, 1)


# ------------------------------------------------------------------------------------------------
# What is wrong


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the log '{log}': No such file or directory"),
        ("", "'{log}' has no records yet"),
        ("[\n]\n", "'{log}' has no records yet"),
        ("loss: 5", "'{log}' is not a log of llmq train: what comes after 0 records, from byte 0"),
        (
            '[{"log": "x", "step": 0, "time": "TIME"},\n\0\0\0',
            "what comes after 1 records, from byte 65 on, is no record",
        ),
        (
            '[{"log": "step", "step": 3, "time": "TIME", "duration_ms": 5}]',
            "its record of step at step 3 is not as it should be (KeyError('step_tokens'))",
        ),
        ('[{"log": "abs-maxes", "step": 3, "time": "TIME", "abs_maxes": 5}]', "(TypeError("),
        ('[{"log": "cmd", "step": 3, "time": "TIME", "cmd": 5, "resumed_at": 0}]', "(TypeError("),
        ('[{"log": "cmd", "step": 0, "time": "TIME", "resumed_at": "soon"}]', "after 0 records"),
        ('[{"log": "cmd", "step": 0, "time": "TIME", "resumed_at": null}]', "after 0 records"),
    ],
)
def test_what_is_no_log(tmp_path, capsys, content, message):
    path, runs = tmp_path / "log.json", tmp_path / "runs"
    if content is not None:
        path.write_text(content.replace("TIME", TIME))
    assert _run(["watch", str(path), "--tensorboard", str(runs), "--interval", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and message.replace("{log}", str(path)) in err


def test_where_to_send_it(log, tmp_path, capsys):
    write_run(log, range(1))
    assert _run(["watch", str(log.path)]) == 2
    assert capsys.readouterr().err == (
        "error: nowhere to send the log to: give --tensorboard DIR or --wandb PROJECT\n"
    )
    (tmp_path / "file").write_text("")
    assert _run(["watch", str(log.path), "--tensorboard", str(tmp_path / "file")]) == 2
    assert "file' is not a directory, choose another one\n" in capsys.readouterr().err
    args = ["watch", str(log.path), "--tensorboard", str(tmp_path / "runs")]
    assert _run(args) == 0
    assert _run([*args, "--name", "other"]) == 0
    capsys.readouterr()
    assert _run(args) == 2
    assert capsys.readouterr().err == (
        f"error: '{tmp_path / 'runs' / 'log'}' holds a run already: delete it or change --name\n"
    )


def test_a_library_that_is_missing_is_one_line(log, capsys, monkeypatch):
    write_run(log, range(1))
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert _run(["watch", str(log.path), "--wandb", "runs"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --wandb: ") and err.endswith(": pip install wandb\n")


def test_a_full_disk_is_one_line(log, tmp_path, capsys, monkeypatch):
    write_run(log, range(1))
    full = open("/dev/full", "wb")  # noqa: SIM115
    monkeypatch.setattr(sinks, "open", lambda *_: full, raising=False)
    assert _run(["watch", str(log.path), "--tensorboard", str(tmp_path / "runs")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the disk is full, writing") and err.count("\n") == 1


def test_the_reader_wants_the_log_that_it_knows(log):
    write_run(log, range(1))
    reader = LogReader(log.path)
    assert len(list(reader.new_records())) == 7
    log.path.write_bytes(b"")
    with pytest.raises(LlmqError, match="has been replaced"):
        list(reader.new_records())


def test_watching_from_before_the_first_record(log, tmp_path, after):
    """The first record says whose log it is."""
    run = {"id": "0123456789ab", "name": "mine"}
    done = {"type": "message", "message": "Done. No validation"}

    def begin():
        log.write("cmd", 0, cmd=["llmq"], run=run, resumed_at=0)
        log.write("step", 0, **step_fields())

    left = after(lambda: None, begin, lambda: log.write("info", 1, **done))
    args = ["watch", str(log.path), "--tensorboard", str(tmp_path / "runs")]
    assert _run(args) == 0
    assert left == []
    assert _run(args) == 0, "it is the same run"
    assert len(series(events(tmp_path / "runs" / "log"), "train/loss")) == 1
