"""The JSON log is valid whatever happens; numbers and lines have llm.q's shapes."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.errors import LlmqError
from llmq.base.result import Result
from llmq.report.json_log import JsonLog
from llmq.report.views import PlainView
from llmq.run.metrics import Reporter, count_tokens, duration, tokens_per_second

NUMBERS = {"lse_max": 9.0, "lse_mean": 7.0, "loss_1k": 3.5}
RESULT = Result(loss=3.25, tokens=100, norm=0.123456789, numbers=NUMBERS)


# ------------------------------------------------------------------------------------------------
# The log


def test_log_is_valid_after_every_record(tmp_path):
    path = tmp_path / "logs" / "run.json"
    log = JsonLog(path)
    assert json.loads(path.read_text()) == []
    for step in range(3):
        log.write("step", step, loss=step / 3, text='"\\\n\u2028 é \ud800')
        assert len(json.loads(path.read_text())) == step + 1
    log.close()
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("[", "]", 5)
    assert all(line.startswith('  {"log": "step", "time": "20') for line in lines[1:-1])


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = JsonLog(tmp_path / "run.json")
    log.write("x", 0, a=math.nan, b=[math.inf, {"c": -math.inf}], path=Path("a/b"), t=(1, 2.5))
    log.close()
    (record,) = json.loads((tmp_path / "run.json").read_text())
    assert record["a"] is None
    assert record["b"] == [None, {"c": None}]
    assert (record["path"], record["t"]) == ("a/b", [1, 2.5])
    assert re.fullmatch(r"\d{4}(-\d\d){2} \d\d(:\d\d){2}\.\d{9}", record["time"])


def test_values_that_json_lacks_are_an_error_and_leave_it_valid(tmp_path):
    log = JsonLog(tmp_path / "run.json")
    log.write("x", 0)
    with pytest.raises(TypeError):
        log.write("x", 1, array=np.zeros(2))
    log.write("x", 2)
    assert [r["step"] for r in json.loads((tmp_path / "run.json").read_text())] == [0, 2]


def test_append_goes_on_and_otherwise_the_log_is_replaced(tmp_path):
    path = tmp_path / "run.json"
    for append, expected in ((True, [0]), (True, [0, 0]), (False, [0]), (True, [0, 0])):
        log = JsonLog(path, append=append)
        log.write("x", 0)
        log.close()
        assert [r["step"] for r in json.loads(path.read_text())] == expected
    path.write_text("")
    JsonLog(path, append=True).close()
    assert json.loads(path.read_text()) == []


@pytest.mark.parametrize("content", ["x", "[\n  {}\n", '[\n  {"a": 1', "{}\n"])
def test_what_is_no_log_is_not_continued(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(LlmqError, match="is not a complete log"):
        JsonLog(path, append=True)
    assert path.read_text() == content


@pytest.mark.parametrize("lost", [1, 3, 40, 200])
@pytest.mark.parametrize("behind", [b"", b"\0" * 100, b"\n\0\0"])
def test_a_torn_log_is_continued_behind_its_last_whole_record(tmp_path, capsys, lost, behind):
    """A machine that stops leaves it so: cut off anywhere, or with zeros for what was not kept."""
    path = tmp_path / "run.json"
    log = JsonLog(path)
    for step in range(5):
        log.write("step", step, text="x" * 30)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost] + behind)
    kept = whole[:-lost].count(b"}")
    log = JsonLog(path, append=True)
    log.write("step", 9)
    log.close()
    assert [r["step"] for r in json.loads(path.read_text())] == [*range(kept), 9]
    assert path.read_bytes().startswith(whole[: whole.rindex(b"}", 0, -lost) + 1])
    err = capsys.readouterr().err
    said = f"ended in the middle of a record: cut back to its {kept} whole ones"
    assert (said in err and err.count("\n") == 1) or (lost == 1 and not behind and err == "")


def test_a_log_whose_first_record_is_torn_is_begun_anew(tmp_path, capsys):
    path = tmp_path / "run.json"
    log = JsonLog(path)
    log.write("step", 0, text="x" * 30)
    log.close()
    whole = path.read_bytes()
    for kept in (1, 2, 4, 8, 40, whole.index(b"}")):
        path.write_bytes(whole[:kept] + b"\0" * (kept % 3))
        log = JsonLog(path, append=True)
        log.write("step", 9)
        log.close()
        assert [r["step"] for r in json.loads(path.read_text())] == [9]
        said = "ended in the middle of its first record: begun anew\n"
        assert capsys.readouterr().err.endswith(said)


def test_a_log_that_is_damaged_in_the_middle_is_not_cut(tmp_path):
    path = tmp_path / "run.json"
    log = JsonLog(path)
    for step in range(5):
        log.write("step", step)
    log.close()
    content = path.read_bytes().replace(b'"step": 2', b'"step: 2').removesuffix(b"]\n")
    path.write_bytes(content)
    with pytest.raises(LlmqError, match="what comes after 2 records is damaged: move it away"):
        JsonLog(path, append=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", ["x", '{"a": 1}\n', "\x93NUMPY"])
def test_another_file_is_not_overwritten(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(LlmqError, match="is no log and is not overwritten: choose another --log"):
        JsonLog(path)
    assert path.read_text() == content


def test_a_pipe_is_no_place_for_a_log(tmp_path):
    """The end of the array is written again and again."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LlmqError, match="pipe' cannot hold a log: it is no file on a disk"):
        JsonLog(tmp_path / "pipe")


def test_unwritable_places(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "log.json", tmp_path):
        with pytest.raises(LlmqError, match="cannot write"):
            JsonLog(path)


def test_null_device_is_a_log():
    log = JsonLog(Path("/dev/null"))
    log.write("x", 0)
    log.write("x", 1)
    log.close()
    assert Path("/dev/null").is_char_device(), "it was neither replaced nor moved"


class FullDisk:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        end = self.file.seek(0, os.SEEK_CUR) + len(data)
        beyond = max(end - self.file.seek(0, os.SEEK_END), 0)
        self.file.seek(end - len(data))
        if beyond > self.room > 0:
            data = data[: len(data) - beyond + self.room]
            self.room = 0
        elif beyond > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= min(beyond, self.room)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 2, 30])
def test_full_disk_leaves_a_valid_log_that_is_completed_later(tmp_path, room, capsys):
    path = tmp_path / "run.json"
    log = JsonLog(path)
    log.write("x", 0)
    before = path.read_bytes()
    file = log._file
    for step in (1, 4):  # two times with the disk full, each is warned of once
        log._file = FullDisk(file, room)
        log.write("x", step)
        log.write("x", step + 1)
        assert path.read_bytes() == before
        warning = f"warning: cannot write the log '{path}' (No space left on device): "
        err = capsys.readouterr().err
        assert err.startswith(warning) and err.count("\n") == 1
        log._file = file
        log.write("x", step + 2)
        assert [r["step"] for r in json.loads(path.read_text())] == list(range(step + 3))
        before = path.read_bytes()
    log.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("room", [0, 1000])
def test_what_the_disk_refused_is_written_at_the_end_or_said_to_be_missing(tmp_path, room, capsys):
    path = tmp_path / "run.json"
    log = JsonLog(path)
    log._file = FullDisk(log._file, 0)
    log.write("x", 0)
    log.write("x", 1)
    capsys.readouterr()
    log._file.room = room
    log.close()
    missing = f"warning: '{path}' lacks its last 2 records: No space left on device\n"
    assert capsys.readouterr().err == ("" if room else missing)
    assert len(json.loads(path.read_text())) == (2 if room else 0)


def logging(path):
    """A log of the records cmd, 1, 2."""
    log = JsonLog(path)
    log.write("cmd", 0, run="mine", resumed_at=0)
    log.write("step", 1)
    log.write("step", 2)
    return log


def steps_of(path):
    return [(r["log"], r["step"]) for r in json.loads(path.read_text())]


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_log_that_vanishes_is_begun_anew(tmp_path, capsys, with_folder):
    """With the record that says whose it is."""
    path = tmp_path / "logs" / "run.json"
    log = logging(path)
    path.unlink()
    if with_folder:
        path.parent.rmdir()
    log.write("step", 3)
    log.write("step", 4)
    log.close()
    assert steps_of(path) == [("cmd", 0), ("step", 3), ("step", 4)]
    warning = f"warning: the log '{path}' vanished: begun anew in '{path}'\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(("length", "left"), [(0, 1), (30, 1), (-1, 3), (-20, 2)])
def test_a_log_that_shrinks_goes_on_behind_its_last_whole_record(tmp_path, capsys, length, left):
    path = tmp_path / "run.json"
    log = logging(path)
    os.truncate(path, length % path.stat().st_size)
    log.write("step", 3)
    log.close()
    records = [("cmd", 0), ("step", 1), ("step", 2)]
    assert steps_of(path) == [*records[:left], ("step", 3)]
    assert capsys.readouterr().err.count("warning: ") == (length != -1)


def test_a_log_whose_place_other_files_take(tmp_path, capsys):
    log = logging(tmp_path / "run.json")
    for step in range(3, 6):
        (tmp_path / "other").write_text("of somebody")
        os.replace(tmp_path / "other", log.path)
        log.write("step", step)
    log.close()
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["run.json", *(f"run.json.new-{n}" for n in (1, 2, 3))]
    assert (tmp_path / "run.json").read_text() == "of somebody"
    assert "has been replaced by another file: begun anew in" in capsys.readouterr().err
    assert steps_of(tmp_path / "run.json.new-3") == [("cmd", 0), ("step", 5)]


KILLED = """
import sys
from pathlib import Path
from llmq.report.json_log import JsonLog
log = JsonLog(Path(sys.argv[1]))
for step in range(10**9):
    log.write("step", step, text="x" * (step % 20000))
    if step == 100:
        print("ready", flush=True)
"""


def test_log_is_valid_after_a_kill(tmp_path):
    path = tmp_path / "run.json"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    records = json.loads(path.read_text())
    assert [r["step"] for r in records] == list(range(len(records)))
    assert len(records) > 100


# ------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "   0k"), (1999, "   1k"), (999_999, " 999k"), (1_000_000, " 1.0M"),
        (19_900_000, "19.9M"), (20_000_000, "  20M"), (999_999_999, " 999M"), (10**9, " 1.0B"),
        (2 * 10**10, "  20B"), (999 * 10**9, " 999B"), (10**12, " 1.0T"), (3 * 10**13, "  30T"),
    ],
)  # fmt: skip
def test_token_counts(count, shown):
    assert count_tokens(count) == shown


@pytest.mark.parametrize(
    ("tokens", "ms", "shown"),
    [
        (100, 0.5, "-"), (512, 1000, "  512"), (99_999, 1000, "99999"), (100_000, 1000, " 100k"),
        (524_288, 401, "1307k"),
    ],
)  # fmt: skip
def test_speeds(tokens, ms, shown):
    assert tokens_per_second(tokens, ms) == shown


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(0.9, "    0 ms"), (1234.6, " 1234 ms"), (99_999, "99999 ms"), (100_000, "  100  s")],
)
def test_durations(ms, shown):
    assert duration(ms) == shown


class Lines:
    """A View that keeps everything."""

    brief = False

    def __init__(self):
        self.lines, self.bold, self.states, self.closed = [], [], [], False

    def line(self, text, *, bold=False):
        self.lines.append(text)
        if bold:
            self.bold.append(text)

    def progress(self, **state):
        self.states.append(state)

    def close(self):
        self.closed = True


@pytest.fixture
def reporter(tmp_path):
    return Reporter(JsonLog(tmp_path / "log.json"), Lines(), total_steps=40)


def logged(reporter):
    return json.loads(reporter.log.path.read_text())


def train_step(reporter, step, result, ms=1.0, tokens=1, sol=None, epoch=(0, 0.05)):
    done = SimpleNamespace(step=step, result=result, lr=1e-3, ms=ms, epoch=epoch)
    reporter.train_step(done, tokens, sol)


def test_the_history_of_reports_is_json(reporter, tmp_path):
    for loss in (1.5, math.nan):
        for step in range(60):
            train_step(reporter, step, replace(RESULT, loss=loss), epoch=(0, 0.5))
        history = json.loads(json.dumps(reporter.history, allow_nan=False))
        other = Reporter(JsonLog(tmp_path / "other.json"), Lines(), total_steps=40)
        other.history = history
        assert other.history == history
    assert history["losses_since_evaluation"] == [None, 120]


def test_lines_of_a_terminal_fit_into_80_columns(reporter):
    reporter.view.brief = True
    large = replace(RESULT, loss=123.456789, norm=1.23456789e-12)
    for step, result, ms in ((7, RESULT, 12.0), (99_999, large, 1e9)):
        train_step(reporter, step, result, ms=ms, tokens=10**9, sol=99.9)
        reporter.evaluation(step, result, ms, 10**9)
        reporter.evaluation(step, result, ms, 10**9, "prose")
    assert all(len(line) <= 80 for line in reporter.view.lines)
    first, second = reporter.view.lines[:2]
    loss = f"{RESULT.loss:8.4f}"
    assert first.startswith(f"[T] step     7 | loss {loss} | norm ") and first.endswith(" tok/s")
    assert second.startswith(f"[V] step     7 | eval {loss} | train {RESULT.loss:9f} | ")
    assert logged(reporter)[0]["loss"] == RESULT.loss  # all of it


def test_ways_that_were_chosen(reporter):
    reporter.choices(0, {}, {})
    assert reporter.view.lines == []
    chosen = {"attention.forward 2x64": "cudnn", "attention.backward 2x64": "native"}
    chosen |= {"matmul_fp8 a": "block-scaled", "matmul_fp8 b": "per-tensor"}
    chosen |= {"matmul_fp8 c": "block-scaled"}
    reporter.choices(3, {"a": True, "b": False, "d": True}, chosen)
    assert reporter.view.lines == [
        "  fast accumulation: 1 of 2 fp8 products that may",  # "a" does not run as one of them
        "  attention.forward: cudnn",
        "  attention.backward: native",
        "  matmul_fp8: 2 block-scaled, 1 per-tensor",
    ]
    reporter.close()
    fast, record = logged(reporter)
    assert fast["fast_products"] == {"b": False, "d": True}
    assert (record["log"], record["step"], record["choices"]) == ("choices", 3, chosen)


def test_lines_of_steps(reporter):
    train_step(reporter, 7, RESULT, ms=61.5, tokens=4096, epoch=(0, 0.175))
    train_step(reporter, 8, RESULT, ms=123456.0, tokens=10**8, sol=45.678, epoch=(1, 0.2))
    assert reporter.view.lines == [
        "[T] step     7 [17.5%] | time:    61 ms | norm   0.123457 | loss   3.250000 | tps 66601"
        " | run 20.0%",
        "[T] step     8 [20.0%] | time:   123  s | norm   0.123457 | loss   3.250000 | tps  810k"
        " | sol 45.7% | run 22.5%",
    ]
    assert reporter.view.states[0] == {
        "step": 8, "loss": 3.25, "norm": RESULT.norm, "lr": 1e-3, "ms": 61.5, "tokens": 4096
    }  # fmt: skip
    record = logged(reporter)[0]
    del record["time"]
    assert record == {
        "log": "step", "step": 7, "step_tokens": 4096, "trained_tokens": RESULT.tokens,
        "epoch": 0.175,
        "duration_ms": 61, "norm": RESULT.norm, "loss": 3.25, "lr": 1e-3, "lse_max": 9.0,
        "lse_mean": 7.0, "loss_1k": 3.5, "saturated": 0,
    }  # fmt: skip


def test_saturated_elements_are_reported(reporter):
    train_step(reporter, 3, replace(RESULT, saturated=12))
    assert reporter.view.lines[-1] == "Elements beyond their delayed fp8 scales: 12"
    message, step = logged(reporter)[-2:]
    assert (message["step"], message["message"]) == (3, reporter.view.lines[-1])
    assert step["saturated"] == 12


def test_line_of_an_evaluation_has_the_mean_of_the_steps_before(reporter):
    for loss in (1.0, 2.0):
        train_step(reporter, 0, replace(RESULT, loss=loss))
    masked = replace(RESULT, loss=math.nan, tokens=0)  # has no loss
    train_step(reporter, 1, masked)
    assert "| loss       none | tps" in reporter.view.lines[-1]
    assert "loss" not in reporter.view.states[-1] and logged(reporter)[-1]["loss"] is None
    assert reporter.history["steps_without_targets"] == reporter.without_targets == 1
    reporter.evaluation(2, RESULT, ms=100.0, tokens=5000)
    line = "[V] step     2 [ 5.0%] | time:   100 ms | eval   3.250000 | train  1.500000 | tps 50000"
    line += " | run 5.0%"
    assert reporter.view.lines[-1] == line
    assert reporter.view.bold == [line]
    reporter.evaluation(2, RESULT, ms=100.0, tokens=5000)
    assert reporter.view.lines[-1] == line.replace("| train  1.500000 ", "")  # without steps
    assert reporter.view.states[-1] == {"scores": {"eval": 3.25}}
    assert logged(reporter)[-1]["eval_tokens"] == 5000


def test_sections_blocks_and_messages(reporter, monkeypatch):
    clock = iter([10.0, 11.9994, 20.0, 22.7])
    monkeypatch.setattr("llmq.run.metrics.time.perf_counter", lambda: next(clock))
    with reporter.section("Loading", 3):
        pass
    with reporter.section("Saving"):
        pass
    reporter.block("Title", ["  a", "  b"])
    reporter.message("Hello", 5)
    assert reporter.view.lines == [
        "Loading ...", "  done in 1999 ms", "", "Saving ...", "  done in 2 s", "",
        "[Title]", "  a", "  b", "", "Hello",
    ]  # fmt: skip
    infos = [(r["step"], r["message"], r.get("duration_ms")) for r in logged(reporter)]
    assert infos == [(3, "Loading", 1999), (0, "Saving", 2699), (5, "Hello", None)]


def test_a_section_that_fails_is_not_done(reporter):
    with pytest.raises(ValueError, match="no"), reporter.section("Loading"):
        raise ValueError("no")
    assert reporter.view.lines == ["Loading ..."]
    assert logged(reporter) == []


def test_options_that_are_not_as_usual_are_aligned(reporter):
    """The log has all."""
    rows = [("a", True), ("long-name", 1e-5), ("b", "x"), ("a-usual-name", 3)]
    reporter.options(rows, {"a": False, "a-usual-name": 3})
    assert reporter.view.lines == [
        "[Options]", "  a        : true", "  long-name: 1e-05", "  b        : x", ""
    ]  # fmt: skip
    assert [r["value"] for r in logged(reporter)] == [True, 1e-5, "x", 3]


def test_many_files_are_not_all_listed(reporter):
    files = [SimpleNamespace(path=Path(f"{i}.bin"), num_tokens=10**6 + i) for i in range(13)]
    loader = SimpleNamespace(
        files=files,
        total_tokens=13 * 10**6,
        seed=5,
        data=SimpleNamespace(record=dict),
        state=lambda: {"file_index": 2, "chunk_index": 7},
    )
    reporter.dataset({"train": loader})
    assert reporter.view.lines[:3] == [
        "[Dataset]", " train: 13.0M tokens", "   0.bin :    1000000"
    ]  # fmt: skip
    assert reporter.view.lines[-3:] == ["   9.bin :    1000009", "   ... and 3 more files", ""]
    (record,) = logged(reporter)
    assert len(record["files"]) == 13
    assert (record["file_index"], record["chunk_index"], record["seed"]) == (2, 7, 5)


@pytest.mark.parametrize("shown", [False, True])
def test_sensors_are_logged_and_said_unless_the_view_shows_them(reporter, shown):
    reporter.view.shows_sensors = shown
    reporter.sensors("gpu", 25, 3, {"id": 0, "power": 5}, "gpu  3", "power 5 W")
    (record,) = logged(reporter)
    assert (record["log"], record["step"], record["rank"], record["power"]) == ("gpu", 25, 3, 5)
    said = [] if shown else ["[G] step    25 [gpu  3] | power 5 W"]
    assert reporter.view.lines == said
    reporter.close()
    assert reporter.view.closed


def test_plain_view_is_bold_on_terminals_only(capsys, monkeypatch):
    view = PlainView()
    view.line("[V]", bold=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    view.line("[V]", bold=True)
    view.line("[T]")
    view.progress(step=1)
    view.close()
    assert capsys.readouterr().out == "[V]\n\033[1m[V]\033[22m\n[T]\n"


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


BROKEN = {"No space left on device": lambda: "/dev/full", "Broken pipe": broken_pipe}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_console_that_cannot_be_written_is_given_up(reason, both, capsys, monkeypatch):
    with open(BROKEN[reason](), "w") as stdout, open(BROKEN[reason](), "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        if both:
            monkeypatch.setattr(sys, "stderr", stderr)
        view = PlainView()
        view.line("[T]")
        view.line("[V]", bold=True)  # and the end of both, which flushes as the exit does
    warning = f"warning: cannot write standard output ({reason}): training goes on without it\n"
    assert capsys.readouterr().err == ("" if both else warning)
