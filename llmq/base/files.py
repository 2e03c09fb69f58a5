"""Files and directories that appear only when they are complete and on the disk.

A file that is not complete has a name of our own, `.NAME.llmq-tmp`, beside what it becomes. Nothing
else is ever overwritten or removed on the way, and no link is followed to what it points to.
"""

import errno
import glob
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from llmq.base.errors import ConfigError, DataError, DiskError, LlmqError


class Closing:
    """Something that a `with` block closes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a one-line DiskError about writing `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"the disk is full, writing '{path}': free some space or choose another directory"
            ) from error
        raise DiskError(f"cannot write '{path}': {error.strerror or error}") from error


@contextmanager
def read_errors(what: Path | str, kind: type[LlmqError] = DataError) -> Iterator[None]:
    """Turn an OSError inside the block into a one-line error about reading this file; what: words
    for it, where its path alone does not say enough."""
    try:
        yield
    except OSError as error:
        named = f"'{what}'" if isinstance(what, Path) else what
        raise kind(f"cannot read {named}: {error.strerror}") from error


_REPLACEABLE = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)  # the last one is refused by the system


def temporary_path(path: Path) -> Path:
    """The place of a file or directory until it is complete."""
    return path.with_name(f".{path.name}.llmq-tmp")


def free_name(path: Path, why: str) -> Path:
    """The first free path of path.why-1, path.why-2, …; a path that ends in .why-N already gets
    another N alone, so that names do not grow."""
    name = re.sub(rf"\.{why}-\d+$", "", path.name)
    names = (path.with_name(f"{name}.{why}-{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open file that becomes `path` when the block ends; if it raises, `path` stays as it was.
    LlmqError where the disk is full or refuses, and for a pipe or a device."""
    if os.path.lexists(path) and stat.S_IFMT(os.lstat(path).st_mode) not in _REPLACEABLE:
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")
    with disk_errors(path), _completing(path, temporary_path(path)) as file:
        yield file


@contextmanager
def _completing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """`replacing`, by way of the file `temporary`. Raises OSError."""
    temporary.unlink(missing_ok=True)  # of a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # else the reason would be hidden
            temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str) -> None:
    """Replace the file `path` by this text in UTF-8, all of it or nothing. Raises LlmqError."""
    with replacing(path) as file:
        file.write(content.encode())


def write_shared(path: Path, data: bytes) -> None:
    """Replace a file that other processes may read and write meanwhile, all of it or nothing. Makes
    its folder where there is none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _completing(path, path.with_name(f".{uuid.uuid4().hex}.llmq-tmp")) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries (names, not contents) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it, which a loss of power then leaves there. OSError."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        with suppress(PermissionError):  # of a folder that can be written and not read
            sync_directory(made.parent)


def publish_directory(temporary: Path, path: Path) -> None:
    """Give a directory, whose files are on the disk, its name, in place of one that has it.
    OSError. For a moment the old one is called `path`.llmq-old, under which it is complete if the
    machine stops then."""
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
    """The place of a directory while `publish_directory` puts another one in its place."""
    return path.with_name(path.name + ".llmq-old")


@contextmanager
def staged_directory(
    path: Path, replaces: tuple[str, ...], owner: str | None = None
) -> Iterator[Path]:
    """An empty directory whose files appear in `path` when the block ends, not if it raises.
    LlmqError.

    A new `path` appears all at once; an existing one, which may be a mount point, receives the
    files one by one, when all are on the disk. `replaces` are patterns of files that go, if not
    overwritten; the first names the file that makes the directory valid: it goes first and arrives
    last. owner: the file that says whose the others are, which arrives first.
    """
    path = path.resolve()
    fresh = not path.exists()
    staging = temporary_path(path) if fresh else path / ".llmq-tmp"
    with disk_errors(path):
        try:
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
            make_directory(staging.parent)
            staging.mkdir()
            yield staging
            sync_files(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        # From here on the new files are complete, and stay where they are if this fails.
        if fresh:
            os.rename(staging, path)
            sync_directory(path.parent)
        else:
            _move_files(staging, path, replaces, owner)


def file_names(directory: Path) -> set[str]:
    """Relative POSIX paths of all files in a directory, and in directories inside."""
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def sync_files(directory: Path) -> None:
    """Force the files and entries of a directory, and of directories inside, to the disk."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _move_files(source: Path, target: Path, replaces: tuple[str, ...], owner: str | None) -> None:
    # A loss of power may leave any of the names that were changed since the last sync.
    last = replaces[0]
    names = file_names(source)
    (target / last).unlink(missing_ok=True)
    sync_directory(target)
    for pattern in replaces:
        for old in target.glob(pattern):
            if old.relative_to(target).as_posix() not in names:
                old.unlink()
    for name in sorted(names, key=lambda name: (name == last, name != owner, name)):
        if name == last:
            sync_directory(target)
        (target / name).parent.mkdir(exist_ok=True)
        os.replace(source / name, target / name)
        if name == owner:
            sync_directory(target)
    shutil.rmtree(source)
    sync_directory(target)


def check_readable(path: Path) -> None:
    """ConfigError for a pipe or a device: it may never end. OSError if there is nothing. A pipe of
    the shell's, as <(command) makes, is one that somebody writes to."""
    mode = os.stat(path).st_mode
    of_shell = str(path).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (of_shell and stat.S_ISFIFO(mode))):
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without a buffer. ConfigError for anything else, which is
    neither opened nor waited for, also where it has just taken the file's place. OSError."""
    check_readable(path)
    return open(path, "rb", buffering=0, opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` refuses a folder
        os.close(descriptor)
        raise ConfigError(f"'{path}' is no file: give a file")
    return descriptor


def read_own(path: Path) -> bytes:
    """The content of a file in a cache, which may be code. ConfigError for one of another user in a
    folder that others than its owner may write to: anybody may have put it there. OSError."""
    folder = os.stat(path.parent).st_mode
    with open_file(path) as file:
        owners = {os.fstat(file.fileno()).st_uid, os.lstat(path).st_uid}
        if owners - {os.geteuid(), 0} and folder & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"'{path}' is a file of another user in a folder that others may write to: set "
                "LLMQ_CACHE_DIR to a folder of your own"
            )
        return file.readall()


# ------------------------------------------------------------------------------------------------
# Before writing


def check_writable(flag: str, directory: Path) -> None:
    """Find out now, not after hours, that nothing can be written there: LlmqError names the flag.
    The directory need not exist yet."""
    existing = next(p for p in (directory, *directory.parents) if os.path.lexists(p))
    missing = directory.parts[len(existing.parts) :]
    longest = (temporary_path(Path(name)).name for name in missing)
    if not os.path.exists(existing):
        problem = f"'{existing}' is a link to what does not exist"
    elif not existing.is_dir():
        problem = f"'{existing}' is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"'{existing}' is not writable"
    elif any(len(os.fsencode(n)) > os.pathconf(existing, "PC_NAME_MAX") for n in longest):
        problem = "the name is too long"
    else:
        try:  # the super-user may write anywhere, but not on every file system
            with tempfile.TemporaryFile(dir=existing, prefix=".llmq-", suffix=".llmq-tmp"):
                return
        except OSError as error:
            problem = f"'{existing}' takes no files ({error.strerror})"
    raise LlmqError(f"{flag}: cannot write into '{directory}': {problem}, choose another one")


def report_path(text: str | Path) -> Path:
    """--out of a report. ConfigError where it ends in a slash, which a Path forgets: a folder."""
    if str(text).endswith("/"):
        raise ConfigError(f"--out: '{text}' is a folder: give the name of a report in it")
    return Path(text)


def prepare_report(flag: str, out: Path, *suffixes: str) -> list[Path]:
    """The files of a report, OUT and each suffix; makes their folder. LlmqError names the flag.
    Called before minutes or hours of measurements, which could not be written in the end."""
    if out.name in ("", ".."):
        raise ConfigError(f"{flag}: '{out}' is a folder: give the name of a report in it")
    check_writable(flag, out.parent)
    paths = [out.with_name(out.name + suffix) for suffix in suffixes]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with suppress(FileNotFoundError):
                os.lstat(temporary_path(path))  # which says so where the name is too long
            with suppress(FileNotFoundError):
                if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise ConfigError(f"{flag}: '{path}' is no file: choose another name")
    return paths


def expand_pattern(pattern: str | Path) -> list[Path]:
    """The paths that a glob pattern with `~`, `{a,b}`, `*`, `?`, `[…]` names, sorted, once each. A
    name that exists is taken literally, so that special characters in it do no harm."""
    literal = Path(os.path.expanduser(pattern))  # pathlib's raises if there is no such user
    if literal.exists():
        return [literal]
    names: set[str] = set()
    for alternative in _expand_braces(os.fspath(pattern)):
        names.update(glob.glob(os.path.expanduser(alternative), recursive=True))
    return [Path(name) for name in sorted(names, key=os.fsencode)]


def _expand_braces(pattern: str) -> list[str]:
    """`a{b,c{d,e}}` -> ab, acd, ace, some twice. Braces without a partner or a comma stand for
    themselves."""
    found = _INNERMOST.search(pattern)
    if found is None:
        return [pattern]
    begin, end = pattern[: found.start()], pattern[found.end() :]
    return [each for part in found[1].split(",") for each in _expand_braces(begin + part + end)]


_INNERMOST = re.compile(r"\{([^{}]*,[^{}]*)\}")


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8. ConfigError where it is a pipe or a device, else what
    reading and parsing raise: OSError, ValueError, RecursionError."""
    check_readable(path)
    return json.loads(path.read_text("utf-8"))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    return content if isinstance(content, dict) else {}


def values_of(content: dict[str, Any], **kinds: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Take an object's fields, each as the type of its name makes it; None where one is missing or
    is no such value."""
    try:
        return tuple(kind(content[name]) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, OverflowError):  # int() of infinity
        return None
