"""`train --tensorboard` and `--wandb`: what is sent beside a run, and that it cannot hurt it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmq.base.locks import locked
from llmq.run import watcher
from llmq.run.loop import Loop
from tests.runs import make_workplace, records, signal_after, train
from tests.test_watch import events, series

TENSORBOARD = {"tensorboard": "tb", "save_training_state": True}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def test_a_run_and_its_continuations_are_one_run_in_tensorboard(monkeypatch, capsys):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensorboard": "data/eval.bin"}, "WARNING: --tensorboard: cannot write into 'data/eval"),
        pytest.param(
            {"wandb": "p"},
            "WARNING: --wandb: ",
            marks=pytest.mark.skipif(find_spec("wandb") is None, reason="is refused without it"),
        ),
    ],
)
def test_what_fails_is_one_line_and_the_run_goes_on(monkeypatch, capsys, options, message):
    """Found while it runs, or at its end."""
    real = Loop.step

    def slow(self):
        real(self)
        if self.trainer.steps_done == 1:
            next(m for m in self.members if isinstance(m, watcher.Watcher))._process.wait()

    monkeypatch.setattr(Loop, "step", slow)
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    assert train(steps=2, **options) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if message in line]
    assert len(lines) == 1 and lines[0].endswith(": the run goes on without it")
    assert "Done. validation loss" in out and err == ""
    assert [r["step"] for r in records("step")] == [0, 1]
    assert lines[0] in [r.get("message") for r in records("info")]


def test_a_process_that_cannot_start(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert train(steps=1, tensorboard="tb") == 0
    assert "WARNING: --tensorboard: Cannot allocate memory: the run" in capsys.readouterr().out


@pytest.fixture
def hanging(monkeypatch):
    """Watchers that go on for a while when the run has ended."""
    program = "import sys, time; print('at https://x', flush=True); sys.stdin.read(); "
    command, real = [sys.executable, "-c", program + "time.sleep(0.5)"], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real(command, **options))


def test_what_takes_long_is_left_to_itself(hanging, capsys):
    """The end of a run waits only a little; a run that is killed closes the pipe, too."""
    one = watcher.Watcher("--wandb", Path("log.json"), "p", None)
    process = one._process
    one.close(0.01)
    out, err = capsys.readouterr()
    assert out in ("", "at https://x\n")
    assert err == f"warning: --wandb: process {process.pid} goes on sending the log\n"
    assert process.wait(10) == 0


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_said_before_the_first_step(library, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    assert train(steps=1, **{library: "x"}) == 2
    out, err = capsys.readouterr()
    assert err == f"error: --{library}: there is no library {library}: pip install {library}\n"
    assert out == "" and not Path("log.json").exists()


def test_a_log_that_cannot_be_read_again(capsys):
    assert train(steps=1, log_file="/dev/null", tensorboard="tb") == 0
    assert "--tensorboard has no effect with --log-file /dev/null" in capsys.readouterr().err
    assert not Path("tb").exists()


def test_the_process_holds_no_lock(hanging):
    """A run that continues at once is not refused because the last one's watcher still sends."""
    lock = Path(".log.json.llmq-lock"), "--log-file", Path("log.json")
    with locked(*lock):
        one = watcher.Watcher("--tensorboard", Path("log.json"), "p", None)
    assert one._process.poll() is None
    with locked(*lock):
        pass
    one.close()
