"""When a run writes checkpoints, what a failed one costs, and what asks for one."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmq.base.signals import OutOfTime
from llmq.options.options_io import make_config
from llmq.run import lifecycle, requests
from llmq.run.requests import Requests
from tests.runs import at_step, make_workplace, records, signal_after, train

SHORT = {"eval_file": "none", "batch_size": 1, "grad_accumulation": 1}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def kept():
    return sorted(int(path.name[5:]) for path in Path("ckpt").glob("step_*"))


def failing(patch, *steps, then=lambda: None):
    """Checkpoints of these steps cannot be forced to the disk the first time; then() is called."""
    real, left = os.fsync, set(steps)

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        broken = {step for step in left if f"step_{step:08d}" in path}
        if broken:
            left.difference_update(broken)
            then()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    patch.setattr("llmq.base.files.os.fsync", fsync)


BACKGROUND = pytest.mark.parametrize("background", [False, True])


@BACKGROUND
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_disk_that_breaks_does_not_end_the_run(gpus, background, monkeypatch, capsys):
    failing(monkeypatch, 2)
    more = {"gpus": gpus, "ckpt_background": background}
    assert train(**SHORT, **more, steps=4, ckpt_interval=1) == 0
    out, err = capsys.readouterr()
    assert "WARNING: no checkpoint of step 2: cannot write 'ckpt/step_00000002.tmp" in out
    assert "Input/output error" in out and err == ""
    assert kept() == [1, 3]


def test_a_signal_tries_at_once_what_has_failed(monkeypatch):
    failing(monkeypatch, 2, then=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(**SHORT, steps=9, ckpt_interval=2) == 128 + signal.SIGTERM
    assert kept() == [2]


@BACKGROUND
def test_older_ones_stay_until_the_new_one_was_read_back(background, monkeypatch, capsys):
    """A flipped byte on its way to the disk, of which no call of the system tells."""
    calls = []

    def damage(path):
        calls.append(path.name)
        if path.name == "step_00000008":
            file = path / "adam.m.shard_000_of_001.safetensors"
            content = bytearray(file.read_bytes())
            content[-3] ^= 4
            file.write_bytes(content)

    monkeypatch.setattr(lifecycle, "forget_pages", damage)
    options = SHORT | {"ckpt_interval": 2, "ckpt_keep_n": 1, "ckpt_background": background}
    assert train(**options, steps=9) == 0
    out = capsys.readouterr().out
    assert calls == [f"step_{step:08d}" for step in (2, 4, 6, 8)]
    assert "WARNING: the checkpoint of step 8 could not be read back, older ones stay: " in out
    assert kept() == [2, 4, 6, 8]
    calls.clear()
    monkeypatch.setattr(lifecycle, "forget_pages", lambda path: calls.append(path.name))
    assert train(**options, steps=13, **{"continue": ""}) == 0
    out, err = capsys.readouterr()
    assert "Loading checkpoint 6" in out and "passed over checkpoint 'ckpt/step_00000008'" in err
    assert calls[0] == "step_00000008" and kept() == [2, 10, 12], "2 is about to be a good one"


@pytest.mark.parametrize("ask", ["signal", "file"])
def test_a_checkpoint_that_is_asked_for(ask, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGUSR1)
    if ask == "signal":
        signal_after(monkeypatch, 2, signal.SIGUSR1)
    else:
        monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)
        touch_after(monkeypatch, 2)
    assert train(**SHORT, steps=5) == 0
    assert kept() == [3]
    assert not Path("ckpt/save-now").exists()
    what = "SIGUSR1" if ask == "signal" else "'ckpt/save-now'"
    assert f"A checkpoint, as {what} asks for" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGUSR1) == before


def touch_after(monkeypatch, step):
    def touch(loop):
        Path("ckpt").mkdir(exist_ok=True)
        Path("ckpt/save-now").touch()

    at_step(monkeypatch, step, touch)


def test_checkpoints_by_the_clock():
    assert train(**SHORT, steps=3, ckpt_every_minutes=1e-9, ckpt_keep_n=0) == 0
    assert kept()[-2:] == [1, 2]


class Clock:
    def __init__(self, patch):
        self.now = 1000.0
        patch.setattr(time, "monotonic", lambda: self.now)


def asked(clock, of, seconds):
    clock.now += seconds
    return of.for_checkpoint()


def test_minutes_count_from_the_last_attempt(monkeypatch):
    clock = Clock(monkeypatch)
    of = Requests(make_config({"ckpt-every-minutes": 10}), 0, clock.now)
    assert asked(clock, of, 599) is None
    assert asked(clock, of, 1) == "--ckpt-every-minutes"
    of.save_took(30.0)
    assert asked(clock, of, 599) is None
    assert asked(clock, of, 1) == "--ckpt-every-minutes"


def test_the_end_leaves_time_for_a_checkpoint(monkeypatch):
    clock = Clock(monkeypatch)
    of = Requests(
        make_config({"max-hours": 1}), 100 * 10**8, clock.now
    )  # 100 seconds, as long as unknown
    clock.now += 3600 - 150 - 2
    assert not of.for_end()
    of.save_took(200.0)  # longer than thought
    assert of.for_end()
    clock.now -= 1000
    assert of.for_end(), "a run does not change its mind"
    quick = Requests(make_config({"max-hours": 1}), 0, clock.now)
    quick.on_step(SimpleNamespace(ms=60_000.0))
    clock.now += 3600 - 3 * 60 - 2 - 1
    assert not quick.for_end()
    clock.now += 2
    assert quick.for_end()
    assert not Requests(make_config({}), 10**15, clock.now).for_end()
    for background in (False, True):  # where one may be under way there is time for two
        of = Requests(
            make_config({"max-hours": 1, "ckpt-background": background}), 100 * 10**8, clock.now
        )
        clock.now += 3600 - 2 * 150 - 2 + 1
        assert of.for_end() == background


def test_max_hours_ends_with_a_checkpoint(capsys):
    assert train(**SHORT, steps=3, max_hours=1e-6) == OutOfTime.STATUS == 75
    assert kept() == [0]
    assert "Stopped by --max-hours after 0 steps; go on with --continue" in capsys.readouterr().out
    assert not Path("out").exists()
    assert train(**SHORT, steps=3, max_hours=1, **{"continue": ""}) == 0
    assert [r["step"] for r in records("step")] == [0, 1, 2]
