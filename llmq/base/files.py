"""Files and directories are published only when they are complete and on the disk.

An incomplete file is called `.NAME.llmq-tmp` and lies beside its future path. Until then no other
file is overwritten or removed, and no symbolic link is followed.
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
    """An object whose `close` a `with` block calls at its end."""

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
    path, or words if the path alone would not explain the error."""
    try:
        yield
    except OSError as error:
        named = f"'{what}'" if isinstance(what, Path) else what
        raise kind(f"cannot read {named}: {error.strerror}") from error


_REPLACEABLE = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)  # rename raises for a directory


def temporary_path(path: Path) -> Path:
    """Return the path under which a file or directory is written until it is complete."""
    return path.with_name(f".{path.name}.llmq-tmp")


def free_name(path: Path, why: str) -> Path:
    """Return the first unused path among path.why-1, path.why-2, …. If the path already ends in
    .why-N, only N changes, so that names do not grow."""
    name = re.sub(rf"\.{why}-\d+$", "", path.name)
    names = (path.with_name(f"{name}.{why}-{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield an open file that is renamed to `path` when the block ends; if the block raises, `path`
    is unchanged. Raises LlmqError if the disk is full or refuses the write, or if `path` is a pipe
    or a device."""
    if os.path.lexists(path) and stat.S_IFMT(os.lstat(path).st_mode) not in _REPLACEABLE:
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")
    with disk_errors(path), _completing(path, temporary_path(path)) as file:
        yield file


@contextmanager
def _completing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """Yield a file as `replacing` does, written under the name `temporary`. Raises OSError if the
    file cannot be written."""
    temporary.unlink(missing_ok=True)  # a killed process has left this file
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
        with suppress(OSError):  # a second error would hide the first
            temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str) -> None:
    """Replace the file `path` by this text in UTF-8, completely or not at all. Raises LlmqError if
    that fails."""
    with replacing(path) as file:
        file.write(content.encode())


def write_shared(path: Path, data: bytes) -> None:
    """Replace a file, which other processes may read and write at the same time, completely or not
    at all. A missing folder is made. Raises OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _completing(path, path.with_name(f".{uuid.uuid4().hex}.llmq-tmp")) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries (file names, not contents) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, which then survive a loss of power. Raises OSError
    if that fails."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        with suppress(PermissionError):  # the folder can be written but not read, so not synced
            sync_directory(folder.parent)


def publish_directory(temporary: Path, path: Path) -> None:
    """Rename a directory, whose files are on the disk, to `path`, replacing an existing directory.
    For a moment the old directory is called `path`.llmq-old; if the machine stops at this moment,
    the old directory is complete under that name. Raises OSError if that fails."""
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
    """Return the path of the old directory while `publish_directory` replaces it."""
    return path.with_name(path.name + ".llmq-old")


@contextmanager
def staged_directory(
    path: Path, replaces: tuple[str, ...], owner: str | None = None
) -> Iterator[Path]:
    """Yield an empty directory whose files are moved into `path` when the block ends without an
    exception. Raises LlmqError if the files cannot be written.

    If `path` does not exist, the whole directory is renamed at once. An existing `path`, which may
    be a mount point, receives the files one by one, after all are on the disk. replaces: patterns
    of old files that are removed unless a new file overwrites them. The first pattern names the
    file that makes the directory valid: this file is removed first and arrives last. owner: name of
    the file that says which run wrote the other files; this file arrives first.
    """
    path = path.resolve()
    fresh = not path.exists()
    staging = temporary_path(path) if fresh else path / ".llmq-tmp"
    with disk_errors(path):
        try:
            shutil.rmtree(staging, ignore_errors=True)  # a killed run has left this directory
            make_directory(staging.parent)
            staging.mkdir()
            yield staging
            sync_files(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        # From this line on the new files are complete, and stay in place after an error.
        if fresh:
            os.rename(staging, path)
            sync_directory(path.parent)
        else:
            _move_files(staging, path, replaces, owner)


def file_names(directory: Path) -> set[str]:
    """Return the relative POSIX paths of all files in a directory and its subdirectories."""
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def sync_files(directory: Path) -> None:
    """Force the files and entries of a directory and its subdirectories to the disk."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _move_files(source: Path, target: Path, replaces: tuple[str, ...], owner: str | None) -> None:
    # A loss of power may undo every rename since the last sync, in any order.
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
    """Raise ConfigError for a pipe or a device, which may never end, and OSError if the path does
    not exist. Pipes of the shell, such as <(command), are allowed because a process writes to
    them."""
    mode = os.stat(path).st_mode
    of_shell = str(path).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (of_shell and stat.S_ISFIFO(mode))):
        raise ConfigError(f"'{path}' is a pipe or a device: give a file")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for unbuffered reading. Raises ConfigError for a pipe or device, even if
    it replaced the file a moment ago; such a path is neither opened nor waited for. Raises OSError
    if the file cannot be opened."""
    check_readable(path)
    return open(path, "rb", buffering=0, opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` itself raises for a folder
        os.close(descriptor)
        raise ConfigError(f"'{path}' is no file: give a file")
    return descriptor


def read_own(path: Path) -> bytes:
    """Return the content of a file in a cache, which may be executable code. Raises ConfigError if
    another user owns the file in a folder that others may write to, because anybody may have put
    the file there. Raises OSError if the file cannot be read."""
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
# Checks before writing


def check_writable(flag: str, directory: Path) -> None:
    """Raise LlmqError, which names the flag, if a directory is not writable; call this before hours
    of work. The directory may be missing."""
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
        try:  # permissions do not tell: root may write everywhere except on read-only file systems
            with tempfile.TemporaryFile(dir=existing, prefix=".llmq-", suffix=".llmq-tmp"):
                return
        except OSError as error:
            problem = f"'{existing}' takes no files ({error.strerror})"
    raise LlmqError(f"{flag}: cannot write into '{directory}': {problem}, choose another one")


def report_path(text: str | Path) -> Path:
    """Return the path that --out gives for a report. Raises ConfigError if the text ends in a
    slash, which names a folder and which Path would drop."""
    if str(text).endswith("/"):
        raise ConfigError(f"--out: '{text}' is a folder: give the name of a report in it")
    return Path(text)


def prepare_report(flag: str, out: Path, *suffixes: str) -> list[Path]:
    """Return the files of a report, which are `out` with each suffix, and make their folder. Raises
    LlmqError, which names the flag, if a file cannot be written. Call this before long
    measurements, whose results must be writable in the end."""
    if out.name in ("", ".."):
        raise ConfigError(f"{flag}: '{out}' is a folder: give the name of a report in it")
    check_writable(flag, out.parent)
    paths = [out.with_name(out.name + suffix) for suffix in suffixes]
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with suppress(FileNotFoundError):
                os.lstat(temporary_path(path))  # lstat raises if the name is too long
            with suppress(FileNotFoundError):
                if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise ConfigError(f"{flag}: '{path}' is no file: choose another name")
    return paths


def expand_pattern(pattern: str | Path) -> list[Path]:
    """Return the sorted paths, without repeats, that match a glob pattern with `~`, `{a,b}`, `*`,
    `?`, `[…]`. A pattern that is the name of an existing file is taken literally."""
    literal = Path(os.path.expanduser(pattern))  # Path.expanduser raises for an unknown user
    if literal.exists():
        return [literal]
    names: set[str] = set()
    for alternative in _expand_braces(os.fspath(pattern)):
        names.update(glob.glob(os.path.expanduser(alternative), recursive=True))
    return [Path(name) for name in sorted(names, key=os.fsencode)]


def _expand_braces(pattern: str) -> list[str]:
    """Expand `a{b,c{d,e}}` to ab, acd and ace; results may repeat. Braces without a partner or a
    comma are literal."""
    match = _INNERMOST.search(pattern)
    if match is None:
        return [pattern]
    begin, end = pattern[: match.start()], pattern[match.end() :]
    return [each for part in match[1].split(",") for each in _expand_braces(begin + part + end)]


_INNERMOST = re.compile(r"\{([^{}]*,[^{}]*)\}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file in UTF-8. Raises ConfigError for a pipe or a device, and
    OSError, ValueError or RecursionError if reading or parsing fails."""
    check_readable(path)
    return json.loads(path.read_text("utf-8"))


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file has no readable object."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    return content if isinstance(content, dict) else {}


def values_of(content: dict[str, Any], **kinds: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Return the fields of an object, each converted by the function given under the field's name;
    None if a field is missing or does not convert."""
    try:
        return tuple(kind(content[name]) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, OverflowError):  # int(inf) raises OverflowError
        return None
