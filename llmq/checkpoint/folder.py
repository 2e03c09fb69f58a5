"""The folder of a run's checkpoints: what is in it, whether that is whole, and how it goes.

Links are the user's: what they point to is read, but neither changed nor deleted. Several processes
that see the same files each hash a share of them; a file is hashed once, as long as it is the same.
"""

import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.files import (
    disk_errors,
    make_directory,
    open_file,
    read_errors,
    retired_path,
    sync_directory,
)
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.source_model import HASH_THREADS
from llmq.runtime.world import World

SHARED_SECONDS = 10.0  # until a file of one machine is seen by all, on a network's file system
_UNFINISHED = re.compile(r"step_\d{8,}(\.\d+)?\.tmp")
_OWN_FILE = re.compile(r"(.+\.shard_\d+_of_\d+\.safetensors|[^.].*\.json)(\.tmp)?|\..+\.llmq-tmp")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def unfinished(directory: Path, step: int) -> Path:
    return checkpoint_path(directory, step).with_suffix(".tmp")


def discard(directory: Path, step: int) -> None:
    """Remove an unfinished checkpoint, which nobody may be writing; nothing else of its name."""
    path = unfinished(directory, step)
    if _is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def check_shared(directory: Path, world: World, seconds: float = SHARED_SECONDS) -> None:
    """ConfigError unless all processes of a run see the same directory of checkpoints, by a file
    that the first process leaves there for a moment. All processes call this function. DiskError
    where the directory cannot be written."""
    if not world.several:
        return
    name = world.share(f".llmq-{secrets.token_hex(8)}")
    try:
        world.on_first(lambda: _leave(directory / name))
        world.each(lambda: _expect(directory / name, world, seconds))
    finally:
        if world.first:
            with suppress(OSError):
                (directory / name).unlink()


def _leave(path: Path) -> None:
    with disk_errors(path.parent):
        make_directory(path.parent)
        path.touch()


def _expect(path: Path, world: World, seconds: float) -> None:
    with disk_errors(path.parent):
        make_directory(path.parent)  # a network's client may remember that it was not there
    end = time.monotonic() + seconds
    while path.name not in (entry.name for entry in entries(path.parent)):  # which asks a server
        if time.monotonic() > end:
            raise ConfigError(
                f"--checkpoint-dir: '{path.parent}' is another directory here than for "
                f"{world.process_name(0)}: a run over several machines needs one that "
                "all of them share"
            )
        time.sleep(0.05)


def entries(directory: Path) -> list[Path]:
    """The content of a directory, sorted; nothing where there is none.

    LlmqError if it cannot be listed: what is in it must not pass for missing.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise LlmqError(f"cannot list '{directory}': {error.strerror}") from error


def is_complete(path: Path) -> bool:
    """Whether a directory is a complete checkpoint. LlmqError if that cannot be found out."""
    try:
        return stat.S_ISREG(os.stat(path / MANIFEST).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise LlmqError(f"cannot look into '{path}': {error.strerror}") from error


def leftovers(directory: Path) -> list[Path]:
    """The rests of saves that were interrupted, or of deletions; so none may be under way.

    That is known by its name and by what is in it.
    """
    found = [path for path in entries(directory) if _is_unfinished(path)]
    complete = [path for path in entries(directory) if re.fullmatch(r"step_\d{8,}", path.name)]
    replaced = [retired_path(path) for path in complete if is_complete(path)]
    return sorted(found + [path for path in replaced if is_complete(path) and _is_own(path)])


def _is_unfinished(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is not None and _is_own(path)


def _is_own(path: Path) -> bool:
    """Whether it is a directory, and no link to one, with nothing but files of a checkpoint."""
    try:
        with os.scandir(path) as found:
            return not path.is_symlink() and all(
                (entry.is_file(follow_symlinks=False) or not os.path.lexists(entry.path))
                and _OWN_FILE.fullmatch(entry.name)
                for entry in found
            )
    except OSError:
        return False


def check_own(path: Path) -> None:
    """Before a checkpoint is written there: FileExistsError if something else has that name.

    Other ranks may be writing into it. A checkpoint that is complete may be replaced.
    """
    if path.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is a link")
    replaced = _UNFINISHED.fullmatch(path.name) is None and is_complete(path)
    if not replaced and path.exists() and not _is_own(path) and path.exists():
        raise FileExistsError(errno.EEXIST, "it is no folder of a checkpoint's: move it away")


def move(path: Path, target: Path) -> None:
    """Move a checkpoint or a file. Raises OSError. It has both names until the new one is on the
    disk, if there are hard links: else a loss of power might leave neither."""
    linked = target.parent != path.parent and _link(path, target)
    if not linked:
        os.rename(path, target)
    sync_directory(target.parent)
    if linked and path.is_dir() and not path.is_symlink():
        delete([path])
    elif linked:
        path.unlink()
    if os.path.lexists(path):
        raise OSError(errno.EBUSY, f"'{path}' cannot be removed")
    sync_directory(path.parent)


def _link(path: Path, target: Path) -> bool:
    """Give a file or a checkpoint's files a second name; False where that does not go."""
    try:
        if path.is_symlink() or not path.is_dir():
            os.link(path, target, follow_symlinks=False)
            return True
        if os.path.lexists(_deleting(path)):
            return False
        target.mkdir()
    except OSError:
        return False
    try:
        # The manifest last: it makes a checkpoint of them.
        for name in sorted(os.listdir(path), key=lambda name: (name == MANIFEST, name)):
            os.link(path / name, target / name, follow_symlinks=False)
        sync_directory(target)
    except OSError:
        shutil.rmtree(target)
        return False
    return True


def _deleting(path: Path) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.tmp")


def delete(paths: Iterable[Path]) -> list[Path]:
    """Delete directories of checkpoints; returns those that are gone, and warns of the others. Each
    is renamed first, so that half a checkpoint is never taken for a whole one."""
    gone = []
    for path in paths:
        try:
            if path.is_symlink():
                raise OSError(0, "it is a link")
            unfinished = path
            if not _UNFINISHED.fullmatch(path.name):
                unfinished = _deleting(path)
                os.rename(path, unfinished)
            shutil.rmtree(unfinished)
        except FileNotFoundError:  # somebody else was faster
            continue
        except OSError as error:
            warn(f"cannot delete '{path}' ({error.strerror or error}): it stays")
        else:
            gone.append(path)
    return gone


# ------------------------------------------------------------------------------------------------


def problem_of(path: Path, world: World = World()) -> str | None:
    """Why a checkpoint cannot be read; None if it is whole: all files, with their checksums.

    All processes of the world call this function, and get the same result.
    """
    files, view, problem = _look(path)
    seen = world.gather((view, problem))
    problem = _first(world, [text for _, text in seen])
    if problem is not None:
        return problem
    views = [other for other, _ in seen]
    for index, (manifest, *_) in enumerate(views):
        if manifest != views[0][0]:
            return (
                f"'{path}' is not the same checkpoint on machine '{world.machines[0]}' and on "
                f"machine '{world.machines[index]}'"
            )
    alike = [index for index, other in enumerate(views) if other == view]
    damage = _damage(path, files[alike.index(world.index) :: len(alike)])
    return _first(world, world.gather(damage))


def forget_pages(path: Path) -> None:
    """Have the system drop what it holds in memory of a checkpoint's files, if it can: then they
    are read from the disk."""
    with suppress(OSError, AttributeError, ConfigError):
        for file in path.iterdir():
            with open_file(file) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def looks_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there in their sizes, as this process sees it."""
    return _look(path)[2] is None


def _look(path: Path) -> tuple[list[dict[str, Any]], tuple[str, str], str | None]:
    """The files of a checkpoint; the checksum of its manifest, and one that is the same where the
    files are the same ones; what is wrong with it."""
    try:
        if not is_complete(path) and not os.path.lexists(path / MANIFEST):
            raise LlmqError(f"'{path}' is not a complete checkpoint: it has no {MANIFEST}")
        document = read_manifest(path / MANIFEST)
        seen = repr(_stats(path, document["files"]))
    except LlmqError as error:
        return [], ("", ""), str(error)
    view = (document["sha256"], hashlib.sha256(seen.encode()).hexdigest()[:16])
    return document["files"], view, None


def _stats(path: Path, files: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Inode and times of each file; LlmqError if one is missing, or of another size."""
    seen, missing = [], []
    for entry in files:
        file = path / entry["name"]
        try:
            found = os.stat(file)
        except (FileNotFoundError, UnicodeEncodeError):  # half a character is in no name
            missing.append(file)
            continue
        except OSError as error:
            raise LlmqError(f"cannot read '{file}': {error.strerror}") from error
        if found.st_size != entry["bytes"]:
            raise LlmqError(
                f"checkpoint file '{file}' has {found.st_size} bytes instead of {entry['bytes']}; "
                "use another checkpoint"
            )
        seen.append((found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    if missing:
        raise LlmqError(f"checkpoint file '{missing[0]}' is missing; use another checkpoint")
    return seen


def _first(world: World, problems: Sequence[str | None]) -> str | None:
    """The first problem, with the machine's name unless all processes have the same problem."""
    for index, problem in enumerate(problems):
        if problem is not None:
            alike = all(other == problem for other in problems)
            return problem if alike else f"machine '{world.machines[index]}': {problem}"
    return None


# ------------------------------------------------------------------------------------------------
# Checksums


def _damage(path: Path, files: Sequence[dict[str, Any]]) -> str | None:
    """Why one of these files is not what it was."""
    try:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = list(pool.map(lambda entry: digest_of_file(path / entry["name"]), files))
    except LlmqError as error:
        return str(error)
    for entry, digest in zip(files, digests, strict=True):
        if digest != entry["sha256"]:
            file = path / entry["name"]
            return f"checkpoint file '{file}' is damaged: wrong checksum; use another checkpoint"
    return None


def digest_of_file(path: Path) -> str:
    """SHA-256, known as long as the file has the same size and times. LlmqError."""
    with read_errors(path, LlmqError):
        found = os.stat(path)
        return _digest(path, (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: Path, _: tuple[int, ...]) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
