"""Files and directories that appear only when they are complete and on the disk; locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llmq.base.errors import DiskError, DiskFull, LlmqError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a one-line DiskError about writing `path`.

    DiskFull where that is why.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk is full, writing '{path}': free some space or choose another directory"
            ) from error
        raise DiskError(f"cannot write '{path}': {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open file that becomes `path` when the block ends; if it raises, `path` stays as it was.

    LlmqError where the disk is full or refuses.
    """
    with disk_errors(path), _completing(path, path.with_name(path.name + ".tmp")) as file:
        yield file


@contextmanager
def _completing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """`replacing`, by way of the file `temporary`. Raises OSError."""
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str) -> None:
    """Replace the file `path` by this text in UTF-8, all of it or nothing. Raises LlmqError."""
    with replacing(path) as file:
        file.write(content.encode())


def write_shared(path: Path, data: bytes) -> None:
    """Replace a file that other processes may read and write meanwhile, all of it or nothing.

    Makes its folder where there is none. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _completing(path, path.with_name(f".tmp-{uuid.uuid4().hex}")) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries (names, not contents) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_directory(temporary: Path, path: Path) -> None:
    """Give a directory, whose files are on the disk, its name. Raises OSError.

    A directory of that name is replaced. The system cannot do that in one step: for a moment it is
    called `path`.old, where it stays complete if the machine stops right then.
    """
    sync_directory(temporary)
    old = retired_path(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    try:
        os.rename(temporary, path)
    except BaseException:
        if old.exists():
            os.rename(old, path)
        raise
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def retired_path(path: Path) -> Path:
    """Where a directory lies while `publish_directory` puts another one in its place."""
    return path.with_name(path.name + ".old")


@contextmanager
def staged_directory(path: Path, replaces: tuple[str, ...]) -> Iterator[Path]:
    """An empty directory whose files appear in `path` when the block ends, not if it raises.

    A new `path` appears all at once. An existing one may be a mount point and may hold other
    things, so it stays and receives the files one by one. `replaces` are the patterns of files that
    go, if the new ones do not overwrite them; the first is the name of the file that makes the
    directory valid: it goes before anything else changes and the new one arrives last. The old
    files are touched only when all new ones are on the disk. Raises LlmqError.
    """
    path = path.resolve()
    fresh = not path.exists()
    staging = path.with_name(path.name + ".tmp") if fresh else path / ".tmp"
    with disk_errors(path):
        try:
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
            staging.mkdir(parents=True)
            yield staging
            _sync_files(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        # From here on the new files are complete, and stay where they are if this fails.
        if fresh:
            os.rename(staging, path)
            sync_directory(path.parent)
        else:
            _move_files(staging, path, replaces)


def _sync_files(directory: Path) -> None:
    """Force the files of a flat directory and its entries to the disk."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _move_files(source: Path, target: Path, replaces: tuple[str, ...]) -> None:
    last = replaces[0]
    names = {path.name for path in source.iterdir()}
    (target / last).unlink(missing_ok=True)
    for pattern in replaces:
        for old in target.glob(pattern):
            if old.name not in names:
                old.unlink()
    for name in sorted(names, key=lambda name: name == last):
        os.replace(source / name, target / name)
    source.rmdir()
    sync_directory(target)


# ------------------------------------------------------------------------------------------------
# Before writing


def check_writable(flag: str, directory: Path) -> None:
    """Find out now, not after hours, that nothing can be written there: LlmqError names the flag.

    The directory need not exist yet.
    """
    existing = next(p for p in (directory, *directory.parents) if os.path.lexists(p))
    missing = directory.parts[len(existing.parts) :]
    if not os.path.exists(existing):
        problem = f"'{existing}' is a link to what does not exist"
    elif not existing.is_dir():
        problem = f"'{existing}' is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"'{existing}' is not writable"
    elif any(len(os.fsencode(f"{p}.tmp")) > os.pathconf(existing, "PC_NAME_MAX") for p in missing):
        problem = "the name is too long"
    else:
        return
    raise LlmqError(f"{flag}: cannot write into '{directory}': {problem}, choose another one")


@contextmanager
def locked(path: Path, flag: str, target: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block; LlmqError where another process does.

    flag, target: what is locked, for the message. The system ends the lock together with the
    process, however that ends: a file that is left behind means nothing. Where the file system has
    no locks or the file cannot be made, the block runs without one.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    descriptor = _lock(path, flag, target)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock(path: Path, flag: str, target: Path) -> int | None:
    """The descriptor that holds the lock, None where there are no locks."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the last holder has just removed the folder, too
            continue
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(descriptor).st_nlink > 0  # else its last holder has just removed it
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LlmqError(
                f"{flag}: '{target}' is in use by {owner or 'another process'}: wait for it to "
                "end, or choose another one"
            ) from None
        except OSError:  # as network file systems may say
            os.close(descriptor)
            with suppress(OSError):
                path.unlink()
            return None
        if held:
            with suppress(OSError):  # the disk is full
                os.ftruncate(descriptor, 0)
                os.pwrite(
                    descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
                )
            return descriptor
        os.close(descriptor)
