"""Checkpoints that are written while training goes on: the same files, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from llmq.checkpoint.checkpoint import CheckpointWriter
from llmq.checkpoint.states import read_verdict
from llmq.run import lifecycle, saving
from tests.run.test_guard import exploding
from tests.runs import at_step, make_workplace, records, signal_after, train

SHORT = {"eval_file": "none", "batch_size": 1, "grad_accumulation": 1, "ckpt_background": True}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def kept():
    return sorted(int(path.name[5:]) for path in Path("ckpt").glob("step_*[0-9]"))


def contents(folder):
    """The contents of all checkpoints: the files, and what manifests say but for names and times of
    the run."""
    found = {}
    for path in sorted(Path(folder).glob("step_*/*")):
        name = f"{path.parent.name}/{path.name}"
        found[name] = path.read_bytes()
        if path.name == "checkpoint.json":
            document = json.loads(found[name])
            del document["sha256"], document["run"]["id"]
            for option in ("ckpt_background", "checkpoint_dir", "out_dir", "log_file"):
                del document["options"][option]
            found[name] = document
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"model_dtype": "bf16", "opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"},
        {"gpus": 2, "zero_level": 3, "offload_master": True, "offload_opt_m": True},
        {
            "matmul_dtype": "e4m3",
            "fp8_recipe": "delayed",
            "model_dtype": "bf16",
            "guard": "skip",
        },
        {"eval_every_n_steps": 1, "eval_file": "data/eval.bin", "keep_best": "loss"},
    ],
    ids=["8-bit", "sharded", "fp8", "best"],
)
def test_the_files_are_those_of_a_save_that_waits(options, capsys):
    options = SHORT | options | {"steps": 5, "save_training_state": True, "ckpt_keep_n": 0}
    other = {"checkpoint_dir": "other", "out_dir": "other-out", "log_file": "other.json"}
    assert train(**options, ckpt_interval=2) == 0
    assert train(**options | other | {"ckpt_background": False}, ckpt_interval=2) == 0
    assert set(kept()) >= {2, 4, 5}
    assert contents("ckpt") == contents("other")
    assert len(contents("ckpt")) >= 3 * 4
    losses = [[r["loss"] for r in records("step", log)] for log in ("log.json", "other.json")]
    assert losses[0] == losses[1]
    if "keep_best" in options:
        notes = [json.loads(Path(d, "best.json").read_text()) for d in ("ckpt", "other")]
        assert notes[0]["step"] == notes[1]["step"] and notes[0]["value"] == notes[1]["value"]
    assert capsys.readouterr().err == ""


class Gate:
    """Holds what is written of these steps back until it is opened."""

    def __init__(self, patch, *steps):
        self.open, self.held = threading.Event(), threading.Event()
        real = CheckpointWriter.write

        def write(writer, *args):
            if writer.step in steps:
                self.held.set()
                assert self.open.wait(20), "nobody has opened the gate"
            return real(writer, *args)

        patch.setattr(CheckpointWriter, "write", write)


def test_steps_go_on_while_a_checkpoint_is_written(monkeypatch, capsys):
    """And it holds the state of the step at which it was begun."""
    assert train(**SHORT | {"ckpt_background": False}, steps=6, ckpt_interval=2) == 0
    os.rename("ckpt", "first")
    capsys.readouterr()
    gate = Gate(monkeypatch, 2)

    def later(run):
        assert gate.held.wait(20) and run.lifecycle.writing == 2
        assert kept() == []
        gate.open.set()

    at_step(monkeypatch, 3, later)
    assert train(**SHORT, steps=6, ckpt_interval=2) == 0
    assert contents("ckpt") == contents("first")
    out = capsys.readouterr().out
    begun = out.index("saving checkpoint to `ckpt` in the background")
    assert (
        begun < out.index("[T] step     2") < out.index("The checkpoint of step 2 was written in")
    )


def test_a_verdict_that_comes_while_a_checkpoint_is_written(monkeypatch):
    """A verdict is noted once the checkpoint is complete."""
    exploding(monkeypatch, 22)
    gate = Gate(monkeypatch, 22)
    at_step(monkeypatch, 24, lambda run: gate.open.set())
    assert train(**SHORT, steps=26, ckpt_interval=22) == 0
    assert read_verdict(Path("ckpt/step_00000022")).good is False


def open_after(gate, seconds):
    threading.Timer(seconds, gate.open.set).start()


def test_an_interval_that_is_too_short_waits_and_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(lifecycle, "SHORT_WAIT", 0.05)
    gate = Gate(monkeypatch, 1, 2)
    at_step(monkeypatch, 1, lambda run: open_after(gate, 0.2))
    assert train(**SHORT, steps=4, ckpt_interval=1, ckpt_keep_n=0) == 0
    found = re.findall(
        r"WARNING: step 2 has waited (\S+) s for the checkpoint of step 1, which took (\S+) s",
        out := capsys.readouterr().out,
    )
    ((waited, took),) = found
    assert out.count("has waited") == 1 and 0.1 <= float(waited) <= float(took)
    assert kept() == [1, 2, 3]


@pytest.mark.parametrize("failing", [False, True])
def test_a_signal_in_the_middle_of_a_write(failing, monkeypatch, capsys):
    """The checkpoint under way is finished; then the last step is saved."""
    gate = Gate(monkeypatch, 2)
    signal_after(monkeypatch, 2, signal.SIGTERM)
    at_step(monkeypatch, 2, lambda run: open_after(gate, 0.1))
    if failing:
        failing_fsync(monkeypatch, "step_00000002")
    assert train(**SHORT, steps=5, ckpt_interval=2) == 128 + signal.SIGTERM
    assert kept() == ([3] if failing else [2, 3])
    assert ("WARNING: no checkpoint of step 2: " in capsys.readouterr().out) == failing


def failing_fsync(patch, name):
    """Files in a folder of this name cannot be forced to the disk."""
    real = os.fsync

    def fsync(descriptor):
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    patch.setattr("llmq.base.files.os.fsync", fsync)


@pytest.mark.parametrize("at", ["write", "commit"])
def test_a_last_checkpoint_that_is_lost_is_an_error(at, monkeypatch, capsys):
    name = "step_00000002.tmp/.adam.v" if at == "write" else "step_00000002.tmp/.checkpoint"
    failing_fsync(monkeypatch, name)
    assert train(**SHORT, steps=2, ckpt_interval=1, save_training_state=True) == 2
    out, err = capsys.readouterr()
    assert "WARNING: no checkpoint of step 2: " in out and kept() == [1]
    assert err.startswith("error: cannot write 'ckpt/step_00000002.tmp") and err.count("\n") == 1
    assert Path("out/model.safetensors").is_file(), "the model is exported all the same"


def test_a_second_interrupt_gives_it_up(monkeypatch):
    gate = Gate(monkeypatch, 2)

    def interrupt(run):
        assert gate.held.wait(20)
        open_after(gate, 0.1)
        raise KeyboardInterrupt

    at_step(monkeypatch, 3, interrupt)
    assert train(**SHORT, steps=5, ckpt_interval=2) == 128 + signal.SIGINT
    assert not list(Path("ckpt").glob("*"))


def test_a_copy_that_never_ends_does_not_keep_a_failed_run(monkeypatch):
    """A GPU that hangs makes such a copy."""
    monkeypatch.setattr(saving, "PATIENCE", 0.1)
    monkeypatch.setattr("llmq.state.pieces.Snapshot.is_done", lambda self: False)

    def fail(run):
        raise RuntimeError("as the test wants it")

    at_step(monkeypatch, 3, fail)
    with pytest.raises(RuntimeError, match="as the test wants it"):
        train(**SHORT, steps=5, ckpt_interval=2)
    assert not list(Path("ckpt").glob("*"))


# ------------------------------------------------------------------------------------------------
# Kills

CALLS = ("open", "replace", "rename", "fsync", "mkdir", "unlink", "rmdir")


def dying_child(options, call):
    """The status of a run in a process of its own that dies at one of its calls in the thread that
    writes, and how many of them there were; nothing of it is told to this process."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = iter(range(10**9))

    def counted(real):
        def run(*args, **more):
            writes = threading.current_thread() is not threading.main_thread()
            if writes and next(calls) == call:
                os._exit(9)
            return real(*args, **more)

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    os._exit(train(**options))


def test_killed_at_any_file_operation_of_the_writer(monkeypatch):
    """A committed checkpoint is whole, and the run goes on to the same bits."""
    options = SHORT | {"steps": 4, "save_training_state": True, "ckpt_keep_n": 1}
    options |= {"ckpt_interval": 1}
    assert train(**options) == 0
    last = [name for name in contents("ckpt") if name.startswith("step_00000004/adam")]
    expected, statuses = {name: contents("ckpt")[name] for name in last}, []
    for call in range(3, 10**6, 47):
        for folder in ("ckpt", "out"):
            shutil.rmtree(folder, ignore_errors=True)
        statuses.append(dying_child(options | {"log_file": "dead.json"}, call))
        if statuses[-1] == 0:
            break
        assert statuses[-1] == 9
        assert train(**options, **{"continue": ""}) == 0
        assert not list(Path("ckpt").glob("*.tmp"))
        assert {name: contents("ckpt")[name] for name in last} == expected, call
    assert len(statuses) > 3
