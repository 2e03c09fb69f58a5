"""Whether a checkpoint is whole: all its files, with their checksums.

Several processes that see the same files each hash a share of them. A file is hashed once, as long
as it is the same.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import open_file
from llmq.checkpoint.folder import is_complete
from llmq.checkpoint.hf import HASH_THREADS
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.runtime.processes import Processes, processes


def problem_of(path: Path, group: Processes | None = None) -> str | None:
    """Why a checkpoint cannot be read, None if it is whole: all files, with their checksums.

    All processes of the group call it, and get the same; None: all of the run.
    """
    group = processes() if group is None else group
    files, view, problem = _look(path)
    seen = group.gather((view, problem))
    problem = _first(group, [text for _, text in seen])
    if problem is not None:
        return problem
    views = [other for other, _ in seen]
    for index, (manifest, *_) in enumerate(views):
        if manifest != views[0][0]:
            return (
                f"'{path}' is not the same checkpoint on machine '{group.machines[0]}' and on "
                f"machine '{group.machines[index]}'"
            )
    alike = [index for index, other in enumerate(views) if other == view]
    damage = _damage(path, files[alike.index(group.index) :: len(alike)])
    return _first(group, group.gather(damage))


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


def _first(group: Processes, problems: Sequence[str | None]) -> str | None:
    """The first of them, with its machine if it is not that of all."""
    for index, problem in enumerate(problems):
        if problem is not None:
            alike = all(other == problem for other in problems)
            return problem if alike else f"machine '{group.machines[index]}': {problem}"
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
    try:
        found = os.stat(path)
        return _digest(path, (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    except OSError as error:
        raise LlmqError(f"cannot read '{path}': {error.strerror}") from error


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: Path, _: tuple[int, ...]) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
