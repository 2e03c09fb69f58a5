"""Locks that keep processes from writing to the same place."""

import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmq.base.errors import LlmqError
from llmq.base.files import make_directory

LOCK = ".llmq-lock"
"""The lock file inside a directory."""

_MARK = b"llmq: "  # by which a lock file is known for ours; an empty one holds nothing to lose
_OWNER_BYTES = 1000
_OWNER = re.compile(rb"llmq: process (\d+) on (.*)\n")
_TRIES = 1000


def lock_beside(path: Path) -> Path:
    """The lock file of what may be replaced itself, or is no directory."""
    return path.with_name(f".{path.name}{LOCK}")


@contextmanager
def locked(path: Path, flag: str, target: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block; LlmqError where another process does, or
    something else has that name. flag, target: what is locked, for the message.

    The system ends the lock together with the process: a file that is left behind means nothing. If
    the lock file cannot be made, the target itself is locked if it is there; a file system without
    locks has none.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    descriptor = _lock_file(path, flag, target)
    is_ours = descriptor is not None
    if descriptor is None:
        descriptor = _lock_target(flag, target)
    try:
        yield
    finally:
        if is_ours:
            with suppress(OSError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def holder(path: Path) -> tuple[int, str] | None:
    """The process that holds the lock file `path`, and its machine; None where there is no lock.
    One that was killed has left it. Nothing is locked for this, so it is in nobody's way."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file, suppress(OSError):
        match = _OWNER.fullmatch(file.read(_OWNER_BYTES))
        if match is not None:
            return int(match[1]), match[2].decode(errors="replace")
    return None


def _lock_file(path: Path, flag: str, target: Path) -> int | None:
    """The descriptor that holds the lock; None where there are no locks, or no such file."""
    for _ in range(_TRIES):
        try:
            make_directory(path.parent)  # what is written there must not vanish with it
            descriptor = _open(path, flag)
        except FileNotFoundError:  # the last holder has just removed the folder, too
            continue
        except OSError:
            return None
        if not _held(descriptor, flag, target):  # as network file systems may say
            with suppress(OSError):
                path.unlink()
            return None
        if os.fstat(descriptor).st_nlink > 0:  # else its last holder has just removed it
            with suppress(OSError):  # the disk is full
                os.ftruncate(descriptor, 0)
                owner = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.pwrite(descriptor, _MARK + owner.encode(), 0)
            return descriptor
        os.close(descriptor)
    return None  # as in /proc, which takes no files


def _open(path: Path, flag: str) -> int:
    """A descriptor of the lock file, new or old. LlmqError if something else has its name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stranger = f"{flag}: '{path}' is no lock of llmq's: move it away"
    if path.is_symlink():
        raise LlmqError(stranger)
    descriptor = os.open(path, flags, 0o666)
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not is_file or not _is_ours(os.pread(descriptor, _OWNER_BYTES + 1, 0)):
        os.close(descriptor)
        raise LlmqError(stranger)
    return descriptor


def _is_ours(content: bytes) -> bool:
    """Whether it is what a lock file holds, or what a loss of power leaves of that: a part, or as
    many zeros."""
    torn = len(content) <= _OWNER_BYTES and _MARK.startswith(content.rstrip(b"\0"))
    return torn or content.startswith(_MARK)


def _lock_target(flag: str, target: Path) -> int | None:
    """The descriptor that locks what is there itself; None if nothing is, or it takes no lock."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return descriptor if _held(descriptor, flag, target) else None


def _held(descriptor: int, flag: str, target: Path) -> bool:
    """Whether it holds the lock now; it is closed where there are no locks. LlmqError where another
    process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        owner = b""
        with suppress(OSError):  # a directory
            owner = os.pread(descriptor, _OWNER_BYTES, 0)
        os.close(descriptor)
        owner = owner.removeprefix(_MARK) if owner.startswith(_MARK) else b""
        who = owner.decode(errors="replace").strip() or "another process"
        raise LlmqError(
            f"{flag}: '{target}' is in use by {who}: wait for it to end, or choose another one"
        ) from None
    except OSError:
        os.close(descriptor)
        return False
