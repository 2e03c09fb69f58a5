"""Files and directories that appear only when they are complete and on the disk.

An incomplete file has a name of our own, `.NAME.llmq-tmp`, beside its future path. No other file is
overwritten or removed meanwhile, and no link is followed.
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
    """An object that a `with` block closes at its end."""

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
    """Turn an OSError inside the block into a one-line error about reading a file. what: the file's
    path, or words if the path alone is not enough."""
    try:
        yield
    except OSError as error:
        named = f"'{what}'" if isinstance(what, Path) else what
        raise kind(f"cannot read {named}: {error.strerror}") from error


_REPLACEABLE = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)  # the system refuses the last one


def temporary_path(path: Path) -> Path:
    """Return the path of a file or directory while it is incomplete."""
    return path.with_name(f".{path.name}.llmq-tmp")


def free_name(path: Path, why: str) -> Path:
    """Return the first free path of path.why-1, path.why-2, …. If the path ends in .why-N, only N
    changes, so that names do not grow."""
    name = re.sub(rf"\.{why}-\d+$", "", path.name)
    names = (path.with_name(f"{name}.{why}-{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield an open file that becomes `path` when the block ends; if the block raises, `path` is
    unchanged. LlmqError if the disk is full or refuses, or `path` is a pipe or a device."""
    if os.path.lexists(path) and stat.S_IFMT(os.lstat(path).st_mode) not in _REPLACEABLE:
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")
    with disk_errors(path), _completing(path, temporary_path(path)) as file:
        yield file


@contextmanager
def _completing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """Do as `replacing`, through the file `temporary`. Raises OSError."""
    temporary.unlink(missing_ok=True)  # left by a killed process
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
        with suppress(OSError):  # another error would hide the reason
            temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str) -> None:
    """Replace the file `path` by this text in UTF-8, completely or not at all. Raises LlmqError."""
    with replacing(path) as file:
        file.write(content.encode())


def write_shared(path: Path, data: bytes) -> None:
    """Replace a file that other processes may read and write meanwhile, completely or not at all.
    Makes a missing folder. Raises OSError."""
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
    """Make a directory and its missing parents, which survive a loss of power. Raises OSError."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        with suppress(PermissionError):  # the folder is writable but not readable
            sync_directory(folder.parent)


def publish_directory(temporary: Path, path: Path) -> None:
    """Rename a directory, whose files are on the disk, to `path`, in place of an existing one. For
    a moment the old directory is called `path`.llmq-old, and is complete under this name if the
    machine stops then. Raises OSError."""
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
    """Return the old directory's path while `publish_directory` replaces it."""
    return path.with_name(path.name + ".llmq-old")


@contextmanager
def staged_directory(
    path: Path, replaces: tuple[str, ...], owner: str | None = None
) -> Iterator[Path]:
    """Yield an empty directory whose files appear in `path` when the block ends; not if it raises.
    Raises LlmqError.

    A new `path` appears all at once. An existing one, which may be a mount point, receives the
    files one by one, when all are on the disk. replaces: patterns of old files to remove, if not
    overwritten. The first pattern names the file that makes the directory valid: it is removed
    first and arrives last. owner: the file that says to whom the others belong; it arrives first.
    """
    path = path.resolve()
    fresh = not path.exists()
    staging = temporary_path(path) if fresh else path / ".llmq-tmp"
    with disk_errors(path):
        try:
            shutil.rmtree(staging, ignore_errors=True)  # left by a killed run
            make_directory(staging.parent)
            staging.mkdir()
            yield staging
            sync_files(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        # From here on the new files are complete, and stay where they are after an error.
        if fresh:
            os.rename(staging, path)
            sync_directory(path.parent)
        else:
            _move_files(staging, path, replaces, owner)


def file_names(directory: Path) -> set[str]:
    """Return relative POSIX paths of all files in a directory, recursively."""
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def sync_files(directory: Path) -> None:
    """Force the files and entries of a directory to the disk, recursively."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _move_files(source: Path, target: Path, replaces: tuple[str, ...], owner: str | None) -> None:
    # A loss of power may undo any renames since the last sync.
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
    """Raise ConfigError for a pipe or a device, which may never end, and OSError if there is no
    such path. Pipes of the shell, such as <(command), are allowed: a process writes to them."""
    mode = os.stat(path).st_mode
    of_shell = str(path).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (of_shell and stat.S_ISFIFO(mode))):
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. ConfigError for anything else, even if it has
    just taken the file's place; it is neither opened nor waited for. Raises OSError."""
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
    """Return the content of a file in a cache, which may be code. ConfigError if another user owns
    the file in a folder that others may write to: anybody may have put it there. Raises OSError."""
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
    """Raise LlmqError, naming the flag, if a directory is not writable; called before hours of
    work. The directory need not exist yet."""
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
        try:  # root may write anywhere, but not on every file system
            with tempfile.TemporaryFile(dir=existing, prefix=".llmq-", suffix=".llmq-tmp"):
                return
        except OSError as error:
            problem = f"'{existing}' takes no files ({error.strerror})"
    raise LlmqError(f"{flag}: cannot write into '{directory}': {problem}, choose another one")


def report_path(text: str | Path) -> Path:
    """Return --out of a report. ConfigError if it ends in a slash, which a Path forgets: a
    folder."""
    if str(text).endswith("/"):
        raise ConfigError(f"--out: '{text}' is a folder: give the name of a report in it")
    return Path(text)


def prepare_report(flag: str, out: Path, *suffixes: str) -> list[Path]:
    """Return the files of a report, OUT with each suffix, and make their folder. LlmqError names
    the flag. Call this before long measurements, whose results must be writable in the end."""
    if out.name in ("", ".."):
        raise ConfigError(f"{flag}: '{out}' is a folder: give the name of a report in it")
    check_writable(flag, out.parent)
    paths = [out.with_name(out.name + suffix) for suffix in suffixes]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with suppress(FileNotFoundError):
                os.lstat(temporary_path(path))  # raises if the name is too long
            with suppress(FileNotFoundError):
                if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise ConfigError(f"{flag}: '{path}' is no file: choose another name")
    return paths


def expand_pattern(pattern: str | Path) -> list[Path]:
    """Return the paths that match a glob pattern with `~`, `{a,b}`, `*`, `?`, `[…]`, sorted, once
    each. An existing name is taken literally, even with special characters."""
    literal = Path(os.path.expanduser(pattern))  # Path.expanduser raises for an unknown user
    if literal.exists():
        return [literal]
    names: set[str] = set()
    for alternative in _expand_braces(os.fspath(pattern)):
        names.update(glob.glob(os.path.expanduser(alternative), recursive=True))
    return [Path(name) for name in sorted(names, key=os.fsencode)]


def _expand_braces(pattern: str) -> list[str]:
    """Expand `a{b,c{d,e}}` to ab, acd, ace, some twice. Braces without a partner or a comma are
    literal."""
    match = _INNERMOST.search(pattern)
    if match is None:
        return [pattern]
    begin, end = pattern[: match.start()], pattern[match.end() :]
    return [each for part in match[1].split(",") for each in _expand_braces(begin + part + end)]


_INNERMOST = re.compile(r"\{([^{}]*,[^{}]*)\}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file in UTF-8. ConfigError for a pipe or a device; otherwise the
    errors of reading and parsing: OSError, ValueError, RecursionError."""
    check_readable(path)
    return json.loads(path.read_text("utf-8"))


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no readable object."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    return content if isinstance(content, dict) else {}


def values_of(content: dict[str, Any], **kinds: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Return the fields of an object, each converted by the type given under its name; None if a
    field is missing or does not convert."""
    try:
        return tuple(kind(content[name]) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, OverflowError):  # int() of infinity
        return None
