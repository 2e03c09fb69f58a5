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
"""The name of the lock file inside a directory."""

_MARK = b"llmq: "  # our lock files begin with this mark; an empty file may be overwritten too
_OWNER_BYTES = 1000
_OWNER = re.compile(rb"llmq: process (\d+) on (.*)\n")
_TRIES = 1000


def lock_beside(path: Path) -> Path:
    """Return the lock file beside a path that may be replaced or that is no directory."""
    return path.with_name(f".{path.name}{LOCK}")


@contextmanager
def locked(path: Path, flag: str, target: Path) -> Iterator[None]:
    """Hold the lock file `path` during the `with` block. Raises LlmqError if another process holds
    the lock, or if a file that is no lock has this name. flag, target: option and path that are
    locked, for the message.

    The system releases the lock when the process ends, so a leftover file locks nothing. If the
    lock file cannot be made, an existing target itself is locked. On a file system without locks,
    nothing is locked.
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
    lock. A killed process may have left the file. The call itself locks nothing."""
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
    """Return the descriptor of the file that holds the lock; None if the file system has no locks
    or takes no such file."""
    for _ in range(_TRIES):
        try:
            make_directory(path.parent)  # files written there must survive a loss of power
            descriptor = _open(path, flag)
        except FileNotFoundError:  # the last holder has removed the folder meanwhile
            continue
        except OSError:
            return None
        if not _held(descriptor, flag, target):  # some network file systems have no locks
            with suppress(OSError):
                path.unlink()
            return None
        # 0 links: the last holder has removed the file meanwhile
        if os.fstat(descriptor).st_nlink > 0:
            with suppress(OSError):  # a full disk loses only the holder's name
                os.ftruncate(descriptor, 0)
                owner = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.pwrite(descriptor, _MARK + owner.encode(), 0)
            return descriptor
        os.close(descriptor)
    return None  # some folders, such as /proc, take no files


def _open(path: Path, flag: str) -> int:
    """Return a descriptor of the lock file, which is made if it is missing. Raises LlmqError if a
    file that is no lock has this name."""
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
    """True if the content is a lock file's, or if a loss of power left only a part of a lock file
    or zeros."""
    torn = len(content) <= _OWNER_BYTES and _MARK.startswith(content.rstrip(b"\0"))
    return torn or content.startswith(_MARK)


def _lock_target(flag: str, target: Path) -> int | None:
    """Return the descriptor that locks the target itself; None if the target is absent or cannot be
    locked."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return descriptor if _held(descriptor, flag, target) else None


def _held(descriptor: int, flag: str, target: Path) -> bool:
    """True if the descriptor now holds the lock. The descriptor is closed if the file system has no
    locks. Raises LlmqError if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        owner = b""
        with suppress(OSError):  # a directory takes no text
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
