"""Whether a checkpoint is whole, as far as one process or all of them together see it.

Of one that lies apart each machine has a part, and all have the same checkpoint.json. What several
processes see of one disk each of them hashes a share of. A file is hashed once, as long as it is
the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import LlmqError
from llmq.checkpoint.base_id import HASH_THREADS
from llmq.checkpoint.folder import is_complete
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.runtime.processes import Processes, processes


class Part(NamedTuple):
    """What a process sees of a checkpoint. manifest: its checksum. here: bit i is set if its i-th
    file is there, in its size; every: the bits of all. view: by which processes know that they see
    the same disk.
    """

    manifest: str
    here: int
    every: int
    view: str


def part_of(path: Path, document: dict[str, Any]) -> Part:
    """document: what checkpoint.json of this directory says. LlmqError if a file of another size is
    there."""
    here, seen = 0, []
    for index, entry in enumerate(document["files"]):
        file = path / entry["name"]
        try:
            found = os.stat(file)
        except (FileNotFoundError, UnicodeEncodeError):  # half a character is in no name
            continue
        except OSError as error:
            raise LlmqError(f"cannot read '{file}': {error.strerror}") from error
        if found.st_size != entry["bytes"]:
            raise LlmqError(
                f"checkpoint file '{file}' has {found.st_size} bytes instead of {entry['bytes']}; "
                "use another checkpoint"
            )
        here |= 1 << index
        seen.append((entry["name"], found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    view = hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
    return Part(document["sha256"], here, (1 << len(document["files"])) - 1, view)


def looks_whole(parts: Iterable[Part | None]) -> bool:
    """Whether these are parts of one checkpoint, and all of it, going by names and sizes."""
    there = [part for part in parts if part is not None]
    together = functools.reduce(int.__or__, (part.here for part in there), 0)
    return len({part.manifest for part in there}) == 1 and together == there[0].every


def seen_part(path: Path) -> Part | None:
    """What this process sees; None where there is none, or it is damaged."""
    try:
        return part_of(path, read_manifest(path / MANIFEST))
    except LlmqError:
        return None


def problem_of(path: Path, group: Processes | None = None) -> str | None:
    """Why a checkpoint cannot be read, None if it is whole: all files, with their checksums.

    All processes of the group call it, and get the same; None: all of the run.
    """
    group = processes() if group is None else group
    document, part, problem = _look(path)
    seen = group.gather((part, problem))
    parts = [found for found, _ in seen]
    problem = _first(group, [text for _, text in seen])
    if problem is not None:
        return problem
    if document is not None:
        problem = _gap(group, path, document, parts)
        alike = [
            i for i, other in enumerate(parts) if other is not None and other.view == part.view
        ]
        if problem is None:
            problem = damage(path, _share(document, part, alike.index(group.index), len(alike)))
    elif not any(parts):
        return f"'{path}' is not a complete checkpoint: it has no {MANIFEST}"
    return _first(group, group.gather(problem))


def hash_share(path: Path, index: int, count: int) -> None:
    """Hash what `problem_of` asks the index-th of so many processes for, which all see one disk.

    In any thread, without the others; then `problem_of` reads none of these files once more. It
    also tells what is wrong.
    """
    with suppress(LlmqError):
        document = read_manifest(path / MANIFEST)
        damage(path, _share(document, part_of(path, document), index, count))


def _share(document: dict[str, Any], part: Part, index: int, count: int) -> list[dict[str, Any]]:
    """Of the files that are here, those that one of several processes hashes."""
    here = [entry for i, entry in enumerate(document["files"]) if part.here >> i & 1]
    return here[index::count]


def _look(path: Path) -> tuple[dict[str, Any] | None, Part | None, str | None]:
    """Manifest and part of a checkpoint, or what is wrong with them."""
    try:
        if not is_complete(path) and not os.path.lexists(path / MANIFEST):
            return None, None, None
        document = read_manifest(path / MANIFEST)
        return document, part_of(path, document), None
    except LlmqError as error:
        return None, None, str(error)


def _first(group: Processes, problems: Sequence[str | None]) -> str | None:
    """With its machine, if it is not that of all."""
    for index, problem in enumerate(problems):
        if problem is not None:
            alike = all(other == problem for other in problems)
            return problem if alike else f"machine '{group.machines[index]}': {problem}"
    return None


def _gap(
    group: Processes, path: Path, document: dict[str, Any], parts: Sequence[Part | None]
) -> str | None:
    """What of a checkpoint is nowhere."""
    machines = group.machines
    there = {i: part for i, part in enumerate(parts) if part is not None}
    first = min(there)
    for index, part in there.items():
        if part.manifest != there[first].manifest:
            return (
                f"'{path}' is not the same checkpoint on machine '{machines[first]}' and on "
                f"machine '{machines[index]}'"
            )
    if looks_whole(parts):
        return None
    together = functools.reduce(int.__or__, (part.here for part in there.values()))
    lacking = [e for i, e in enumerate(document["files"]) if not together >> i & 1]
    away = absent_machines(document, together)
    if away and all(written_on(document, entry) in away for entry in lacking):
        names = ", ".join(f"'{name}'" for name in away)
        if set(away) <= set(machines):  # it stopped before all had made theirs visible
            return f"'{path}' is a part of a checkpoint, of which machine {names} has nothing"
        return (
            f"'{path}' is a part of a checkpoint: what machine {names} wrote is not here: copy it "
            "into this directory, or start the run on that machine, too"
        )
    return f"checkpoint file '{path / lacking[0]['name']}' is missing; use another checkpoint"


def written_on(document: dict[str, Any], entry: dict[str, Any]) -> str | None:
    """The machine on which a file of a checkpoint that lies apart was written; else None."""
    machines = document["distributed"].get("machines")
    return machines and machines[entry["rank"]]


def absent_machines(document: dict[str, Any], here: int) -> list[str]:
    """Those that have written files of which none is here. here: as of a part."""
    files = document["files"]
    of_all = {written_on(document, entry) for entry in files}
    present = {written_on(document, e) for i, e in enumerate(files) if here >> i & 1}
    return sorted(of_all - present - {None})


# ------------------------------------------------------------------------------------------------
# Checksums


def damage(path: Path, entries: Sequence[dict[str, Any]]) -> str | None:
    """Of these files, why one of them is not what it was."""
    try:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = list(pool.map(lambda entry: digest_of_file(path / entry["name"]), entries))
    except LlmqError as error:
        return str(error)
    for entry, digest in zip(entries, digests, strict=True):
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
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
