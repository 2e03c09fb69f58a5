"""Locks that keep processes from writing to the same path."""

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

_MARK = b"llmq: "  # start of our lock files; an empty file may be overwritten, too
_OWNER_BYTES = 1000
_OWNER = re.compile(rb"llmq: process (\d+) on (.*)\n")
_TRIES = 1000


def lock_beside(path: Path) -> Path:
    """Return the lock file of a path that may be replaced or is no directory."""
    return path.with_name(f".{path.name}{LOCK}")


@contextmanager
def locked(path: Path, flag: str, target: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block. LlmqError if another process holds it, or the
    name belongs to something else. flag, target: the locked thing, for the message.

    The system releases the lock when the process ends: a leftover file means nothing. If the lock
    file cannot be made, an existing target itself is locked. On a file system without locks nothing
    is locked.
    """
    new_folders = [folder for folder in path.parents if not folder.exists()]
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
        for folder in new_folders:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def holder(path: Path) -> tuple[int, str] | None:
    """Return the process that holds the lock file `path`, and its machine; None if there is no
    lock. A killed process may have left the file. Nothing is locked for the question."""
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
    """Return the descriptor that holds the lock; None if there are no locks, or no such file."""
    for _ in range(_TRIES):
        try:
            make_directory(path.parent)  # files written there must survive a loss of power
            descriptor = _open(path, flag)
        except FileNotFoundError:  # the last holder has just removed the folder
            continue
        except OSError:
            return None
        if not _held(descriptor, flag, target):  # no locks, as on some network file systems
            with suppress(OSError):
                path.unlink()
            return None
        if os.fstat(descriptor).st_nlink > 0:  # else its last holder has just removed the file
            with suppress(OSError):  # the disk is full
                os.ftruncate(descriptor, 0)
                owner = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.pwrite(descriptor, _MARK + owner.encode(), 0)
            return descriptor
        os.close(descriptor)
    return None  # the folder takes no files, such as /proc


def _open(path: Path, flag: str) -> int:
    """Return a descriptor of the lock file, new or old. LlmqError if the name is not a lock's."""
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
    """True if the content is a lock file's, or what a loss of power leaves: a part of it, or
    zeros."""
    torn = len(content) <= _OWNER_BYTES and _MARK.startswith(content.rstrip(b"\0"))
    return torn or content.startswith(_MARK)


def _lock_target(flag: str, target: Path) -> int | None:
    """Return the descriptor that locks the target itself; None if it is absent or unlockable."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return descriptor if _held(descriptor, flag, target) else None


def _held(descriptor: int, flag: str, target: Path) -> bool:
    """True if the descriptor holds the lock now. Closes the descriptor if there are no locks.
    LlmqError if another process has the lock."""
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
