"""`llmq train` in several processes, on the CPU, through MPI: same bits, and how it ends."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest

from llmq.base.errors import LlmqError, MachineError
from llmq.base.signals import OutOfTime
from llmq.checkpoint.manifest import read_manifest
from llmq.commands.cli import _run
from llmq.run.trainer import Trainer
from llmq.runtime.mpi import wait_for_reader
from tests.covering import covering
from tests.mpi import ENVIRONMENT, case, machines, run, start
from tests.run.test_evaluations import EVERYTHING, OPTIONS, write_questions
from tests.run.test_guard import ROLLBACK
from tests.run.test_training import digests, measured
from tests.runs import flags, make_workplace, records, train, write_tokens

pytest.importorskip("mpi4py")

PLACES = ("log_file", "out_dir", "checkpoint_dir")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/train-3.bin"), 30, seed=5)


def places(name: str) -> dict[str, str]:
    """The places where a run writes."""
    return {"log_file": f"{name}.json", "out_dir": name, "checkpoint_dir": f"{name}-ckpt"}


def same_bits(name: str, other: str, step: int, written: str = "model.safetensors") -> None:
    """Checkpoint, export and log of two runs on as many ranks. written: the export's weights."""
    paths = [Path(f"{each}-ckpt/step_{step:08d}") for each in (name, other)]
    files = [sorted(p.name for p in path.glob("*.safetensors")) for path in paths]
    assert files[0] == files[1]
    assert digests(paths[0], files[0]) == digests(paths[1], files[0]), name
    first, second = (read_manifest(path / "checkpoint.json") for path in paths)
    assert first["data-loader"] == second["data-loader"]
    assert digests(name, [written]) == digests(other, [written])
    assert measured(f"{name}.json") == measured(f"{other}.json"), name


ROWS = covering(
    {"level": level, "recompute": recompute, "numbers": numbers, "steps": steps, "ranks": ranks}
    for level, recompute, numbers, steps, ranks in product(
        (1, 2, 3), (False, True), ("fp32", "e4m3"), (1, 3), ((1, 1), (3, 1))
    )
)


def options_of(row: dict) -> dict[str, object]:
    """The options of a row of ROWS, without the number of ranks."""
    options = {"steps": 3, "save_training_state": True, "eval_every_n_steps": 2, "batch_size": 1}
    options |= {"zero_level": row["level"], "grad_accumulation": row["steps"]}
    options |= {"recompute_block": row["recompute"], "eval_num_steps": 1, "shard_over": "world"}
    if row["numbers"] == "e4m3":
        options |= {"model_dtype": "bf16", "matmul_dtype": "e4m3", "all_to_all_reduce": True}
    return options


@pytest.mark.slow
def test_bits_do_not_depend_on_how_ranks_are_spread_over_processes():
    """Or over machines, of which one may have more."""
    cases = []
    for i, row in enumerate(ROWS):
        own = [[f"--gpus={count}"] for count in row["ranks"]]
        cases.append(case(own=own, **options_of(row), **places(f"two-{i}")))
    status, out, err = run(2, *cases, places=machines("a", "b"))
    assert (status, err) == (0, "")
    assert [line for line in out if line.startswith("status")].count("status of process 0: 0") == (
        len(ROWS)
    )
    for i, row in enumerate(ROWS):
        assert train(gpus=sum(row["ranks"]), **options_of(row), **places(f"one-{i}")) == 0
        same_bits(f"one-{i}", f"two-{i}", 3)


def test_adapters_of_several_processes():
    """Adapters beside a model in codes that processes divide; and adapters and norms, resumed."""
    assert train(steps=0, out_dir="weights", tokenizer=None) == 0
    Path("weights/model.safetensors").rename("model/model.safetensors")
    options = {"steps": 4, "save_training_state": True, "batch_size": 1, "from_scratch": None}
    options |= {"lora_rank": 4, "eval_file": "none"}
    codes = options | {"lora_dropout": 0.25, "base_dtype": "nf4", "zero_level": 3}
    norms = options | {"train": "norms"}
    own = [["--gpus=2"], ["--gpus=1"]]
    status, _, err = run(
        2,
        case(own=own, **codes, **places("codes")),
        case(own=own, **norms | {"steps": 2}, **places("norms")),
        case(own=own, **norms, **places("norms"), **{"continue": ""}),
    )
    assert (status, err) == (0, "")
    for name, row in (("codes", codes), ("norms", norms)):
        assert train(gpus=3, **row, **places(f"one-{name}")) == 0
        same_bits(f"one-{name}", name, 4, "adapter_model.safetensors")


def kept(name: str) -> list[tuple]:
    """The measurements of a run beside its steps, in order."""
    kinds = {"eval": ("loss",), "task": ("name", "metric", "value"), "sample": ("prompt", "text")}
    return [
        (kind, record["step"], *(record[key] for key in keys))
        for kind, keys in kinds.items()
        for record in records(kind, f"{name}.json")
    ]


def test_validations_tasks_and_samples_of_several_processes(capfd):
    write_questions()
    options = OPTIONS | {"keep_best": "loss", "ckpt_keep_n": 1, "save_training_state": True}
    options |= {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed"}
    own = [["--gpus=2", *EVERYTHING], ["--gpus=1", *EVERYTHING]]
    status, _, err = run(2, case(own=own, **options | places("two")))
    assert status == 0 and "error" not in err, err
    assert _run(["train", *flags(gpus=3, **options | places("one")), *EVERYTHING]) == 0
    assert kept("one") == kept("two") and len(kept("one")) > 10
    same_bits("one", "two", 4)
    assert sorted(os.listdir("one-ckpt")) == sorted(os.listdir("two-ckpt"))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_another_number_of_processes():
    options = {"steps": 8, "save_training_state": True, "batch_size": 1, "eval_every_n_steps": 3}
    assert train(gpus=3, **options, **places("whole")) == 0
    parts = options | places("parts")
    stopped = {"process": 1, "step": 2, "what": "terminate"}
    status, out, err = run(2, case(stopped, own=[["--gpus=2"], ["--gpus=1"]], **parts))
    assert "Stopped by SIGTERM after 3 steps; go on with --continue" in out
    assert status in (0, 143) and "error" not in err
    assert os.listdir("parts-ckpt") == ["step_00000003"]
    stopped = {"process": 0, "step": 5, "what": "terminate"}
    status, out, err = run(
        3,
        case(stopped, gpus=1, **parts, **{"continue": ""}),
        case({"process": 1, "step": 6, "what": "warn"}, gpus=1, **parts, **{"continue": ""}),
    )
    assert "Stopped by SIGTERM after 6 steps; go on with --continue" in out
    assert re.findall("warning: process 1 on machine '.*': this process is unwell\n", err)
    same_bits("whole", "parts", 8)
    assert train(gpus=3, **options | places("parts") | {"steps": 9}, **{"continue": ""}) == 0


def test_several_processes_agree_on_rollbacks_and_checkpoints():
    """A signal of one process, the first one's clock, and a guard that goes back; checkpoints that
    are written in the background are the same, too."""
    guarded = ROLLBACK | {"steps": 30, "ckpt_interval": 5, "ckpt_keep_n": 3}
    bad = {"process": None, "step": 24, "what": "explode"}
    asked = {"steps": 4, "batch_size": 1, "ckpt_interval": 0, "eval_file": "none"}
    _, out, err = run(
        2,
        case({"process": 1, "step": 1, "what": "save"}, gpus=1, **asked, **places("asked")),
        case(gpus=1, max_hours=0.0001, **asked, **places("late")),
        case(bad, gpus=1, **guarded, **places("two"), ckpt_background=True),
    )
    ends = [int(line.split()[-1]) for line in out if line.startswith("status of process 0")]
    assert ends == [0, OutOfTime.STATUS, 0] and "error" not in err, err
    assert os.listdir("asked-ckpt") == ["step_00000002"]
    assert any("A checkpoint, as SIGUSR1 asks for" in line for line in out)
    assert os.listdir("late-ckpt") == ["step_00000000"]
    assert run(1, case(bad, gpus=2, **guarded, **places("one")))[0] == 0
    assert [r["action"] for r in records("guard", "two.json")].count("rollback") == 1
    assert sorted(os.listdir("one-ckpt")) == sorted(os.listdir("two-ckpt"))
    same_bits("one", "two", 30)


def test_what_differs_is_found_before_the_first_step():
    options = {"steps": 2, "gpus": 1}
    other = Path("other")
    make_workplace_beside(other)
    status, _, err = run(
        2,
        case(own=[[], ["--learning-rate=0.5"]], **options),
        case(own=[[], ["--train-file=other/train-*.bin"]], **options),
        case(own=[[], ["--gpus=-1"]], **options),
    )
    errors = [line for line in err.splitlines() if line.startswith("error")]
    assert len(errors) == 3, err
    assert re.match(
        "error: --learning-rate must be the same .*0.01 in .*0.5 in process 1", errors[0]
    )
    assert "--train-file must be the same" in errors[1]
    assert re.match("error: process 1 on machine '.*': --gpus: must be at least 0", errors[2])
    assert status == 0 and not Path("ckpt/step_00000002").exists()


def make_workplace_beside(folder: Path) -> None:
    folder.mkdir()
    for path in Path("data").glob("*.bin"):
        (folder / path.name).write_bytes(path.read_bytes())


def test_a_full_disk_and_damaged_data_of_one_process():
    options = {"gpus": 1, "save_training_state": True, "ckpt_interval": 2, "steps": 5}
    full = {"process": 1, "step": 1, "what": "disk full"}
    damaged = {"process": 1, "step": 3, "what": "damaged"}
    nameless = {"process": 0, "step": 1, "what": "no names"}
    _, out, err = run(
        2,
        case(full, **options, **places("full"), debug_time_breakdown=""),
        case(damaged, **options, **places("damaged"), ckpt_background=True),
        case(full, **options, **places("behind"), ckpt_background=True),
        case(nameless, **options, **places("nameless"), ckpt_background=True),
    )
    warnings = [line for line in out if line.startswith("WARNING: no checkpoint of step 2")]
    assert len(warnings) == 3, out
    assert len([line for line in err.splitlines() if line.startswith("error")]) == 4, err
    parts = [r for r in records("info", "full.json") if r["type"] == "time-breakdown"]
    assert [(r["step"], r["gpu"]) for r in parts] == [
        (s, rank) for s in range(5) for rank in (0, 1)
    ]
    assert "process 1 on machine" in err and "'data/train-0.bin' is damaged" in err
    assert len(records("step", "full.json")) == 5, "the run goes on"
    assert len(records("step", "behind.json")) == 5
    for name in ("full", "behind", "nameless"):
        assert list(Path(f"{name}-ckpt").glob("step_*")) == []
    assert sorted(os.listdir("damaged-ckpt")) == ["step_00000002", "step_00000003"]


def test_what_works_in_one_process_says_so(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for command in (["tokenize", "x"], ["train", "--auto"], ["train", "--dry-run"], ["plan"]):
        assert _run(command) == 2
        assert re.match("error: .* works in one process, and 2 were st", capsys.readouterr().err)
    with pytest.raises(LlmqError, match=r"llmq.Trainer works in one process"):
        Trainer(model="tiny", from_scratch=True)


def test_a_launcher_of_another_mpi():
    environment = os.environ | ENVIRONMENT | {"SLURM_STEP_NUM_TASKS": "2"}
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-m", "llmq", "train", *flags()],
        env=environment | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 2
    assert "error: 2 processes were started, but MPI sees 1: the launcher" in found.stderr


def test_what_has_been_written_is_read_before_an_abort():
    read, write = os.pipe()
    os.set_blocking(read, False)
    reader = threading.Timer(0.1, os.read, (read, 3))
    with open(read, "rb", 0) as other, open(write, "w") as stream:
        print("why", end="", file=stream, flush=True)
        reader.start()
        wait_for_reader(stream, time.monotonic() + 60)
        assert other.read() is None, "nothing is left"
        reader.join()
        print("why", end="", file=stream, flush=True)
        wait_for_reader(stream, time.monotonic())
    wait_for_reader(io.StringIO(), time.monotonic() + 60)


@pytest.mark.parametrize("what", ["kill", "stop", "raise", "hang"])
def test_what_ends_one_process_ends_all(what):
    options = {"gpus": 2, "steps": 10**6, "batch_size": 1, "watchdog": 2}
    process = start(2, case({"process": 1, "step": 3, "what": what}, **options))
    _, err = process.communicate(timeout=60)
    ends = {"kill": 128 + signal.SIGKILL, "raise": 1}  # those of a run in one process
    assert process.returncode == ends.get(what, MachineError.STATUS) != LlmqError.STATUS
    lines = [line.strip() for line in err.splitlines()]
    errors = [line for line in lines if line.startswith("error:")]
    if what == "stop":
        assert re.match("error: process 1 on machine '.*' has not answered .* rank 2: ", *errors)
    elif what == "raise":
        assert re.match("error: as the test wants it .raised by rank [23] on machine '", *errors)
    elif what == "hang":
        assert re.match("error: no rank has made progress .* rank [23] of process 1 on", *errors)
    else:
        assert "signal 9" in err
