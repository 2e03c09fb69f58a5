"""Child processes that are ended when they show no more progress."""

import os
import signal
import sys
import time

import pytest

from llmq.bench.child import KEPT_LINES, run_child, watched

TOUCHING = "import pathlib, sys, time; alive = pathlib.Path(sys.argv[1])\n"


def run(tmp_path, code: str, limit: float, text: str = "") -> int | None:
    alive = tmp_path / "alive"
    return watched([sys.executable, "-c", code, str(alive)], text, alive, limit).status


@pytest.mark.parametrize("limit", [0, 60])
def test_input_output_and_status(tmp_path, limit, capfd):
    code = "import sys, time; time.sleep(0.3); print(len(sys.stdin.read())); sys.exit(3)"
    assert run(tmp_path, code, limit, "x" * 1_000_000) == 3  # more than a pipe holds
    assert capfd.readouterr() == ("", "1000000\n")


@pytest.mark.parametrize("by", ["os.kill(os.getpid(), 2)", "signal.raise_signal(2)"])
def test_a_child_leaves_ctrl_c_to_its_parent_from_its_first_import_on(tmp_path, by, capfd):
    assert run(tmp_path, f"import os, signal; {by}; print('goes on')", 60) == 0
    assert capfd.readouterr().err == "goes on\n"
    with pytest.raises(KeyboardInterrupt):  # who gets it as ever
        signal.raise_signal(signal.SIGINT)


def test_a_child_that_ends_without_reading(tmp_path):
    assert run(tmp_path, "import os; os._exit(4)", 60, "x" * 1_000_000) == 4


def test_a_child_that_makes_progress_is_left_alone(tmp_path):
    code = TOUCHING + "for _ in range(12): alive.touch(); time.sleep(0.25)"
    assert run(tmp_path, code, 2) == 0


def test_a_child_that_hangs_says_where_and_is_ended(tmp_path, capfd):
    code = TOUCHING + (
        "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)\n"
        "print(__import__('os').getpid(), flush=True)\n"
        "def stuck(): time.sleep(1000)\n"
        "stuck()"
    )
    assert run(tmp_path, code, 2) is None
    pid, *trace = capfd.readouterr().err.splitlines()
    assert any(line.endswith(" in stuck") for line in trace)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_no_child_outlives_an_interrupted_parent(tmp_path, capfd, monkeypatch):
    def interrupted(*args):
        monkeypatch.undo()
        while not (started := capfd.readouterr().err):
            time.sleep(0.1)
        pids.append(int(started))
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr("llmq.bench.child.subprocess.Popen.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", 60)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_process_that_cannot_be_made_is_a_failed_run(monkeypatch):
    def nothing_left(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("llmq.bench.child.subprocess.Popen", nothing_left)
    outcome = run_child({"model": "tiny"}, 1, 1)
    message = "no process can be made: Cannot allocate memory"
    assert outcome == {"status": "failed", "message": message}


def test_the_last_words_are_few(tmp_path, capfd):
    code = "print('x' * 20_000); [print('line', n, flush=True) for n in range(100)]"
    alive = tmp_path / "alive"
    ended = watched([sys.executable, "-c", code], "", alive, 60)
    assert ended == (0, False, [f"line {n}" for n in range(100 - KEPT_LINES, 100)])
    assert len(capfd.readouterr().err) > 20_000  # and all of it is passed on
