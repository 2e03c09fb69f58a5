"""The folder of a run's checkpoints: list, verify, move and delete checkpoints.

Symbolic links belong to the user: their targets are read, but neither changed nor deleted.
Processes that see the same files share the work of hashing. A file's digest is reused as long as
the file's size and times stay the same.
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

SHARED_SECONDS = 10.0  # within which all machines of a network file system see a new file
_UNFINISHED = re.compile(r"step_\d{8,}(\.\d+)?\.tmp")
_OWN_FILE = re.compile(r"(.+\.shard_\d+_of_\d+\.safetensors|[^.].*\.json)(\.tmp)?|\..+\.llmq-tmp")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def unfinished(directory: Path, step: int) -> Path:
    return checkpoint_path(directory, step).with_suffix(".tmp")


def discard(directory: Path, step: int) -> None:
    """Remove the unfinished checkpoint of a step. No rank may be writing the checkpoint. A folder
    or link of the user with the same name stays."""
    path = unfinished(directory, step)
    if _is_own(path):
        shutil.rmtree(path, ignore_errors=True)


def check_shared(directory: Path, world: World, seconds: float = SHARED_SECONDS) -> None:
    """ConfigError unless all processes of a run see the same directory of checkpoints: the first
    process creates a file, and the others wait until the file is visible. All processes call this
    function. DiskError if the directory cannot be written."""
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
        make_directory(path.parent)  # a network client may have cached that the folder is missing
    end = time.monotonic() + seconds
    while path.name not in (entry.name for entry in entries(path.parent)):  # listing asks a server
        if time.monotonic() > end:
            raise ConfigError(
                f"--checkpoint-dir: '{path.parent}' is another directory here than for "
                f"{world.process_name(0)}: a run over several machines needs one that "
                "all of them share"
            )
        time.sleep(0.05)


def entries(directory: Path) -> list[Path]:
    """Return the paths in a directory, sorted; [] if the directory does not exist.

    LlmqError if the directory cannot be listed: its files must not count as missing.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise LlmqError(f"cannot list '{directory}': {error.strerror}") from error


def is_complete(path: Path) -> bool:
    """True if a directory has a checkpoint.json, which is written last. LlmqError if the directory
    cannot be read."""
    try:
        return stat.S_ISREG(os.stat(path / MANIFEST).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise LlmqError(f"cannot look into '{path}': {error.strerror}") from error


def leftovers(directory: Path) -> list[Path]:
    """Return the folders that interrupted saves or deletions have left. No save may be under way.

    A folder's name and content tell whether an interrupted save or deletion has left it.
    """
    unfinished = [path for path in entries(directory) if _is_unfinished(path)]
    complete = [path for path in entries(directory) if re.fullmatch(r"step_\d{8,}", path.name)]
    replaced = [retired_path(path) for path in complete if is_complete(path)]
    return sorted(unfinished + [path for path in replaced if is_complete(path) and _is_own(path)])


def _is_unfinished(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is not None and _is_own(path)


def _is_own(path: Path) -> bool:
    """True for a directory, not a link, that contains nothing but files of a checkpoint."""
    try:
        with os.scandir(path) as content:
            return not path.is_symlink() and all(
                (entry.is_file(follow_symlinks=False) or not os.path.lexists(entry.path))
                and _OWN_FILE.fullmatch(entry.name)
                for entry in content
            )
    except OSError:
        return False


def check_own(path: Path) -> None:
    """FileExistsError if the path, to which a checkpoint is to be written, belongs to the user: a
    link, or a folder with other files.

    Other ranks may be writing into the folder. A complete checkpoint may be replaced.
    """
    if path.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is a link")
    replaced = _UNFINISHED.fullmatch(path.name) is None and is_complete(path)
    if not replaced and path.exists() and not _is_own(path) and path.exists():
        raise FileExistsError(errno.EEXIST, "it is no folder of a checkpoint's: move it away")


def move(path: Path, target: Path) -> None:
    """Move a checkpoint or a file; OSError if that fails. With hard links the old name stays until
    the new name is on the disk, so that a power failure cannot lose both."""
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
    """Hard-link a file, or the files of a checkpoint, to the target; False if not possible."""
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
        # The manifest last, because a folder with a manifest counts as a checkpoint.
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
    """Delete directories of checkpoints; return the deleted directories, and warn of each that
    stays. A directory is renamed first, so that half a checkpoint never counts as complete."""
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
        except FileNotFoundError:  # another process has deleted the directory
            continue
        except OSError as error:
            warn(f"cannot delete '{path}' ({error.strerror or error}): it stays")
        else:
            gone.append(path)
    return gone


# ------------------------------------------------------------------------------------------------


def problem_of(path: Path, world: World = World()) -> str | None:
    """Return the reason why a checkpoint cannot be used; None if all files have the right
    checksums.

    All processes of the world call this function, and all get the same result.
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
    """Drop a checkpoint's files from the page cache, if the system can, so that the next read comes
    from the disk."""
    with suppress(OSError, AttributeError, ConfigError):
        for file in path.iterdir():
            with open_file(file) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def looks_whole(path: Path) -> bool:
    """True if this process sees all files of a checkpoint in their recorded sizes."""
    return _look(path)[2] is None


def _look(path: Path) -> tuple[list[dict[str, Any]], tuple[str, str], str | None]:
    """Read a checkpoint's manifest and stat its files. Return the manifest's entries of files, the
    view, and a problem or None. A view is a digest of the manifest and a digest of the files'
    inodes and times. Processes that see the same files have equal views."""
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
    """Return inode and times of each file; LlmqError if a file is missing or has another size.
    files: entries of the manifest."""
    seen, missing = [], []
    for entry in files:
        file = path / entry["name"]
        try:
            status = os.stat(file)
        except (FileNotFoundError, UnicodeEncodeError):  # a lone surrogate is in no file's name
            missing.append(file)
            continue
        except OSError as error:
            raise LlmqError(f"cannot read '{file}': {error.strerror}") from error
        if status.st_size != entry["bytes"]:
            raise LlmqError(
                f"checkpoint file '{file}' has {status.st_size} bytes instead of {entry['bytes']}; "
                "use another checkpoint"
            )
        seen.append((status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    if missing:
        raise LlmqError(f"checkpoint file '{missing[0]}' is missing; use another checkpoint")
    return seen


def _first(world: World, problems: Sequence[str | None]) -> str | None:
    """Return the first problem, with the machine's name unless all processes have the same problem;
    None if there is none. problems: one for each process."""
    for index, problem in enumerate(problems):
        if problem is not None:
            alike = all(other == problem for other in problems)
            return problem if alike else f"machine '{world.machines[index]}': {problem}"
    return None


# ------------------------------------------------------------------------------------------------
# Checksums


def _damage(path: Path, files: Sequence[dict[str, Any]]) -> str | None:
    """Return the first problem with a file's checksum; None if all agree. files: entries of the
    manifest."""
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
    """Return the SHA-256 of a file in hex, cached by path, inode, size and times. LlmqError if a
    read fails."""
    with read_errors(path, LlmqError):
        status = os.stat(path)
        return _digest(
            path, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: Path, _: tuple[int, ...]) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
