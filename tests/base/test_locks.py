"""Locks: who holds one, what remains of it, and what is never taken for one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.base import locks
from llmq.base.errors import LlmqError
from llmq.base.locks import lock_beside, locked


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


HOLDER = """
import sys, time
from pathlib import Path
from llmq.base.locks import locked
with locked(Path(sys.argv[1]), "--x", Path("there")):
    print(flush=True)
    time.sleep(60)
"""


def test_a_lock_names_its_process_and_ends_with_it(tmp_path):
    lock = tmp_path / "new" / "er" / ".lock"
    args = [sys.executable, "-c", HOLDER, lock]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(LlmqError) as refusal, locked(lock, "--out", tmp_path / "x"):
            pass
        owner = f"process {process.pid} on {socket.gethostname()}"
        assert str(refusal.value) == (
            f"--out: '{tmp_path / 'x'}' is in use by {owner}: wait for it to end, or choose "
            "another one"
        )
        process.kill()
    assert lock.exists()
    with locked(lock, "--out", tmp_path):
        assert lock.read_text() == f"llmq: process {os.getpid()} on {socket.gethostname()}\n"
    assert listing(tmp_path / "new" / "er") == []


def test_a_lock_takes_its_folders_away(tmp_path):
    for kept in ([], ["file"]):
        with locked(tmp_path / "a" / "b" / ".lock", "--out", tmp_path):
            for name in kept:
                (tmp_path / "a" / name).touch()
        assert listing(tmp_path) == (["a"] if kept else [])


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    lock, flock = tmp_path / ".lock", fcntl.flock
    calls = []

    def late(descriptor, operation):
        if not calls:
            lock.unlink()  # between our opening it and locking it
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(lock, "--out", tmp_path):
        assert len(calls) == 2
        with pytest.raises(LlmqError, match="in use"), locked(lock, "--out", tmp_path):
            pass


def test_where_there_are_no_locks(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / ".lock", "--out", tmp_path):
        pass

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path / ".lock", "--out", tmp_path), locked(tmp_path / ".lock", "-", tmp_path):
        pass
    assert listing(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "pipe"])
def test_what_is_no_lock_is_neither_locked_nor_changed(tmp_path, kind):
    lock, other = lock_beside(tmp_path / "out"), tmp_path / "other"
    other.write_text("of somebody")
    if "link" in kind:
        lock.symlink_to(other if kind == "link" else tmp_path / "nothing")
    elif kind == "file":
        lock.write_text("[package]")
    else:
        os.mkfifo(lock)
    before = listing(tmp_path)
    message = f"^--out: '{lock}' is no lock of llmq's: move it away$"
    with pytest.raises(LlmqError, match=message), locked(lock, "--out", tmp_path / "out"):
        pass
    assert listing(tmp_path) == before
    assert other.read_text() == "of somebody"
    assert kind != "file" or lock.read_text() == "[package]"


@pytest.mark.parametrize("is_directory", [True, False])
def test_where_no_lock_file_can_be_made_the_target_is_locked(tmp_path, monkeypatch, is_directory):
    """The directory may be a read-only one."""

    def read_only(path, flag):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(locks, "_open", read_only)
    target = tmp_path / "out"
    target.mkdir() if is_directory else target.write_text("[]")
    lock = lock_beside(target)
    message = f"^--out: '{target}' is in use by another process: "
    with (
        locked(lock, "--out", target),
        pytest.raises(LlmqError, match=message),
        locked(lock, "--out", target),
    ):
        pass
    with locked(lock, "--out", target):
        pass
    assert listing(tmp_path) == ["out"]


def test_a_place_that_takes_no_files_does_not_hang():
    entered = []
    for path in (Path("/proc/x"), Path("/proc/x/y")):
        with locked(lock_beside(path), "--out", path):
            entered.append(path)
    assert len(entered) == 2


@pytest.mark.parametrize("left", [b"", b"llm", b"\0" * 27, b"llmq: pro\0\0\0"])
def test_what_a_loss_of_power_leaves_of_a_lock_is_taken(tmp_path, left):
    lock = lock_beside(tmp_path / "out")
    lock.write_bytes(left)
    with locked(lock, "--out-dir", tmp_path / "out"):
        assert lock.read_bytes().startswith(b"llmq: process ")
    assert not lock.exists()
