"""`llmq train --restarts`: which ends are crashes, and how the next attempt begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmq.base.errors import MachineError
from llmq.base.signals import SUPERVISED, FirstSignal, OutOfTime
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.run import restarts
from llmq.run.requests import Requests
from llmq.run.restarts import in_words, is_crash, supervise
from tests.runs import flags, make_workplace, records, train

# Stands for `llmq train`: notes its arguments, and does what the test wants of this attempt.
CHILD = """
import json, os, pathlib, signal, sys, time
with open("calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
action = json.loads(os.environ["ACTIONS"])[len(open("calls").readlines()) - 1]
for path in action.get("write", []):
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(str(time.time_ns()))
if "wait" in action:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    open("waits", "w").close()
    time.sleep(20)
if "kill" in action:
    os.kill(os.getpid(), action["kill"])
os._exit(action.get("exit", 0))
"""
LOG, STEP = "logs/x.json", "ckpt/x/step_00000010/checkpoint.json"
CRASH = {"kill": int(signal.SIGKILL)}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(monkeypatch, *actions, count=2, pauses=(0.01, 300.0), **options):
    """The status, and what each attempt got beside what all of them get."""
    monkeypatch.setenv("ACTIONS", json.dumps(actions))
    config = make_config({"name": "x", "log-file": LOG, "model": "tiny"} | options)
    status = supervise([sys.executable, "-S", "-c", CHILD, "own"], config, count, pauses)
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    assert all(call[:3] == ["own", "--restarts=0", f"--log-file={LOG}"] for call in calls)
    return status, [call[3:] for call in calls]


def test_what_is_a_crash():
    crashes = (1, MachineError.STATUS, 134, 137, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
    assert all(map(is_crash, crashes))
    ends = (0, 2, 75, 130, 143, 129, -signal.SIGTERM, -signal.SIGINT)
    assert not any(map(is_crash, ends))
    assert in_words(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert in_words(1) == "ended with status 1" and "driver" in in_words(71)


@pytest.mark.parametrize("status", [0, 2, 75, 143])
def test_other_ends_are_passed_on(monkeypatch, status):
    assert run(monkeypatch, {"exit": status}) == (status, [[]])


def test_it_goes_on_from_its_own_checkpoint(monkeypatch, capfd):
    first = CRASH | {"write": [LOG, STEP]}
    status, calls = run(monkeypatch, first, {"exit": 1}, {}, **{"overwrite": True})
    on = ["--no-overwrite", "--continue=latest", "--no-new-data"]
    assert (status, calls) == (0, [[], on, on])
    assert capfd.readouterr().err.splitlines() == [
        "warning: the run was killed by SIGKILL; it goes on from its newest good checkpoint in 0 s "
        "(2 times at most)",
        "warning: the run ended with status 1; it goes on from its newest good checkpoint in 0 s "
        "(once more)",
    ]


def test_what_was_there_before_is_not_its_own(monkeypatch):
    """A run that crashes before it moves an older one aside must not continue that one."""
    for path in (LOG, STEP):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text("of another run")
    begun = CRASH | {"write": [LOG]}
    status, calls = run(monkeypatch, CRASH, begun, {"exit": 3}, overwrite=True)
    assert (status, calls) == (3, [[], [], ["--no-overwrite", "--continue=latest"]])


def test_a_continued_run_begins_again_where_it_did(monkeypatch):
    """A continued run without a checkpoint of its own begins where it did, with --new-data too."""
    options = {"continue": "10", "new-data": True}
    begun = CRASH | {"write": [LOG]}
    _, calls = run(monkeypatch, begun, begun | {"write": [STEP]}, {}, **options)
    assert calls[1] == [] and calls[2][-1] == "--no-new-data"


def test_it_gives_up_and_pauses_grow(monkeypatch, capfd):
    paused = []
    monkeypatch.setattr(restarts._Run, "sleeps", lambda self, pause: paused.append(pause))
    actions = [*[CRASH] * 4, CRASH | {"write": [STEP]}, *[CRASH] * 2]
    status, _ = run(monkeypatch, *actions, count=6, pauses=(5.0, 15.0))
    assert status == 128 + signal.SIGKILL
    assert paused == [5.0, 10.0, 15.0, 15.0, 5.0, 10.0], "from the first on where it got further"
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: the run was killed by SIGKILL; it was started 7 times, see --restarts"
    )


def test_the_hours_are_those_of_all_attempts(monkeypatch, capfd):
    """A job's time is not longer for a crash."""
    status, calls = run(monkeypatch, CRASH, {}, **{"max-hours": 1e-9})
    assert (status, calls) == (OutOfTime.STATUS, [[]])
    told = "error: the run was killed by SIGKILL; --max-hours leaves no time to start it again"
    assert capfd.readouterr().err.splitlines()[-1] == told
    config = make_config({"max-hours": 1})
    monkeypatch.setenv(SUPERVISED, str(time.monotonic() - 3590))
    assert not Requests(config, 0, time.monotonic()).for_end()
    monkeypatch.setenv(SUPERVISED, str(time.monotonic() - 3599))  # 2 seconds are for the end
    assert Requests(config, 0, time.monotonic()).for_end()


def when(path, then):
    def wait():
        while not Path(path).exists():
            time.sleep(0.01)
        then()

    threading.Thread(target=wait, daemon=True).start()


def test_signals_are_passed_on(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    when("waits", lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, calls = run(monkeypatch, {"wait": True})
    assert (status, len(calls)) == (128 + signal.SIGTERM, 1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_in_a_pause_ends_it(monkeypatch, capfd):
    when(LOG, lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGINT)))
    status, calls = run(monkeypatch, {"write": [LOG], "exit": 1}, pauses=(20.0, 300.0))
    assert (status, len(calls)) == (128 + signal.SIGINT, 1)
    assert capfd.readouterr().err.endswith("\nStopped by SIGINT; go on with --continue\n")


def test_a_signal_that_comes_twice_is_one_where_a_parent_passes_it_on(monkeypatch):
    """A job's end is told to all processes; the parent tells it to the run again."""
    monkeypatch.setenv(SUPERVISED, "1")
    first = FirstSignal()
    with first:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert first.signum == signal.SIGINT
        first._since -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


class Nvml:
    """One GPU that has errors. Everything that is not here is 0, or a function that does
    nothing."""

    NVMLError = IndexError
    nvmlEventTypeXidCriticalError = 8

    def __init__(self):
        self.errors, self.counted = [], 3

    def __getattr__(self, name):
        return 0 if name.startswith("NVML") else lambda *_: None

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlEventSetCreate(self):
        return self.errors

    def nvmlDeviceGetTotalEccErrors(self, *_):
        return self.counted

    def nvmlEventSetWait_v2(self, errors, _):
        return SimpleNamespace(eventType=8, eventData=errors.pop())


def test_errors_of_gpus_are_named(monkeypatch, capfd):
    nvml = Nvml()
    monkeypatch.setattr(restarts, "open_nvml", lambda: nvml)
    gpus = restarts._gpus()
    assert restarts._new_errors(gpus) == []
    nvml.errors += [79, 79]
    nvml.counted += 2
    assert restarts._new_errors(gpus) == [
        "GPU 0: Xid 79, the GPU has fallen off the bus",
        "GPU 0: 2 uncorrectable memory errors (ECC)",
    ]
    assert restarts._new_errors(gpus) == []
    nvml.errors.append(48)
    monkeypatch.setattr(restarts, "_gpus", lambda: gpus)
    run(monkeypatch, CRASH, {})
    assert "killed by SIGKILL; GPU 0: Xid 48, an uncorrectable" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------
# Real runs

# Kills the first attempt in the middle of a step.
KILLS = """
import os, signal, sys
if "--restarts=0" in sys.argv and not os.path.exists("killed"):
    from llmq.run.loop import Loop
    real = Loop.step
    def step(self):
        if self.trainer.steps_done == 3:
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        real(self)
    Loop.step = step
"""


def test_a_killed_run_ends_as_one_that_was_not(tmp_path, monkeypatch, capfd):
    make_workplace(tmp_path)
    options = {"eval_file": "none", "steps": 5, "ckpt_interval": 2, "overwrite": None}
    options |= {"batch_size": 1, "grad_accumulation": 1}
    assert train(**options, out_dir="whole", checkpoint_dir="other", log_file="whole.json") == 0
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(KILLS)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{root}")
    command = ["train", *flags(**options), "--restarts=2"]
    monkeypatch.setattr(sys, "argv", ["llmq", *command])
    assert _run(command) == 0
    assert Path("killed").exists()
    assert "warning: the run was killed by SIGKILL; it goes on" in capfd.readouterr().err
    files = [Path(folder) / "model.safetensors" for folder in ("out", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    logs = [records("step", log) for log in ("log.json", "whole.json")]
    losses = [{r["step"]: r["loss"] for r in log} for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 5, "one log"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--restarts=1", "--dry-run"], "--restarts: a plan is not started again"),
        (["--restarts=1", "--config=/dev/null"], "--restarts: '/dev/null' cannot be read again"),
        (["--restarts=1", "--batch-size=0"], "--batch-size: must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_started_again(args, message, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    assert _run(["train", "--model=tiny", *args]) == 2
    assert message in capsys.readouterr().err
