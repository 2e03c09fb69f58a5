"""Checkpoints that all processes write and read, also where each machine has a part on its disk.

    a: ckpt/run/step_00000100/weights.shard_000_of_002.safetensors …, checkpoint.json
    b: ckpt/run/step_00000100/weights.shard_001_of_002.safetensors …, checkpoint.json

The manifests are the same: `machines` in them says who wrote which ranks' files. So all parts in
one directory are the checkpoint as one machine writes it, which machines read wherever it lies.
"""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import (
    disk_errors,
    make_directory,
    publish_directory,
    replace_directory,
    replacing,
    retired_path,
    write_file,
)
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    Content,
    FileEntry,
    content_of,
)
from llmq.checkpoint.disks import Disks
from llmq.checkpoint.folder import checkpoint_path, is_complete
from llmq.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from llmq.checkpoint.safetensors_file import HashingSink, SafetensorsFile
from llmq.checkpoint.verify import part_of, problem_of
from llmq.runtime.processes import processes
from llmq.runtime.world import World

PIECE_BYTES = 64 << 20  # of a file that goes from one machine to another, at a time


# ------------------------------------------------------------------------------------------------
# Writing


def commit_together(
    writer: CheckpointWriter, manifest: Manifest, files: list[FileEntry], disks: Disks, world: World
) -> Path:
    """Make a checkpoint visible, on all disks when it is complete on all of them; its path.

    All processes call it when all have written. Where a disk refuses, nothing of the checkpoint is
    left on any of them, and what it would have replaced stays: DiskError in all.
    """
    group = processes()
    if not disks.apart:
        return group.on_first(lambda: writer.commit(manifest, files))
    machines = disks.names(world)
    document = group.on_first(lambda: writer.document(manifest, files, machines))

    def on_each(act: Callable[[], None], undo: Callable[[], None]) -> None:
        try:
            disks.each(act)
        except BaseException:
            if disks.leads:
                undo()
            raise

    def replace() -> None:
        with disk_errors(writer.path):
            replace_directory(writer.temporary, writer.path)

    on_each(lambda: writer.finish(document), writer.discard)
    on_each(replace, lambda: _retract(writer))
    if disks.leads:
        shutil.rmtree(retired_path(writer.path), ignore_errors=True)
    return writer.path


def _retract(writer: CheckpointWriter) -> None:
    """What was made visible here, but not everywhere, goes, and what it has replaced returns."""
    with suppress(OSError):
        if not writer.temporary.exists():
            os.rename(writer.path, writer.temporary)
        if retired_path(writer.path).exists():
            os.rename(retired_path(writer.path), writer.path)
    writer.discard()


# ------------------------------------------------------------------------------------------------
# Reading


def bring_manifest(path: Path, disks: Disks, own: Path) -> None:
    """Have checkpoint.json of a checkpoint on all disks, as a part of it without any files.

    All processes call it. own: the run's directory of checkpoints, which disks is about;
    ConfigError where a machine lacks a checkpoint of another one.
    """
    group = processes()
    there = group.together(lambda: is_complete(path))
    if all(there):
        return
    first = there.index(True)
    text = (path / MANIFEST).read_text() if group.index == first else None
    text = group.gather(text)[first]

    def bring() -> None:
        if is_complete(path):
            return
        if path.parent.resolve() != own.resolve():
            raise ConfigError(
                f"--continue: '{path}' is on machine '{group.machines[first]}', and not on machine "
                f"'{group.machines[group.index]}': copy at least its {MANIFEST} there"
            )
        if disks.leads:
            temporary = path.with_name(path.name.partition(".")[0] + ".tmp")
            with disk_errors(temporary):
                make_directory(temporary)
                write_file(temporary / MANIFEST, text)
                publish_directory(temporary, path)

    group.each(bring)


def open_together(path: Path) -> CheckpointReader:
    """The reader of a checkpoint that all processes have verified; LlmqError, which all get.

    Its manifest is on all machines. Of files that are on others it knows what they hold.
    """
    problem = problem_of(path)
    if problem is not None:
        raise LlmqError(problem)
    group = processes()
    document = group.each(lambda: read_manifest(path / MANIFEST))
    parts = group.together(lambda: part_of(path, document))
    own: dict[str, Content] = {}
    if any(part.here != part.every for part in parts):
        for index, entry in enumerate(document["files"]):
            if next(i for i, part in enumerate(parts) if part.here >> index & 1) == group.index:
                own[entry["name"]] = _content_at(path / entry["name"])
        own = _merged(own)
    here = parts[group.index].here
    for index, entry in enumerate(document["files"]):
        if here >> index & 1:
            own.pop(entry["name"], None)
    return group.each(lambda: CheckpointReader(path, own))


def _content_at(path: Path) -> Content:
    file = SafetensorsFile(path)
    try:
        return content_of(file)
    finally:
        file.close()


def _merged(own: dict[str, Content]) -> dict[str, Content]:
    """Those of all processes."""
    packed = processes().gather(zlib.compress(pickle.dumps(own)))
    return {
        name: content
        for data in packed
        for name, content in pickle.loads(zlib.decompress(data)).items()
    }


# ------------------------------------------------------------------------------------------------
# Files of other machines


class _Way(NamedTuple):
    """A file that goes from one process to another."""

    entry: FileEntry
    source: int
    target: int


@contextmanager
def collected(reader: CheckpointReader, names: set[str], directory: Path) -> Iterator[None]:
    """Within the block these files, which the ranks of this process read, are here.

    All processes call it. directory: of the run's checkpoints, where they lie meanwhile. An error
    in one process is none in the others, and has to end them.
    """
    group = processes()
    wanted = group.gather(names)
    if not any(wanted):
        yield
        return
    document = read_manifest(reader.path / MANIFEST)
    masks = [part.here for part in group.gather(part_of(reader.path, document))]
    ways = []
    for index, entry in enumerate(FileEntry(**entry) for entry in document["files"]):
        holders = [i for i, mask in enumerate(masks) if mask >> index & 1]
        for target, files in enumerate(wanted):
            if entry.name in files:
                ways.append(_Way(entry, holders[target % len(holders)], target))
    folder = checkpoint_path(directory, reader.step).with_suffix(f".{group.index}.tmp")
    try:
        if names:
            with disk_errors(folder):
                make_directory(folder)
        for turn in range(1, group.count):
            _exchange(reader.path, folder, ways, turn)
        for name in names:
            reader.add(folder / name)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(path: Path, folder: Path, ways: Sequence[_Way], turn: int) -> None:
    """Receive what comes from so many processes further on, and send as many back.

    So every process does both at a time, piece by piece, and none waits for a third one.
    """
    me, count = processes().index, processes().count
    comes = [w for w in ways if w.target == me and w.source == (me + turn) % count]
    goes = [w for w in ways if w.source == me and w.target == (me - turn) % count]
    receiving, sending = _received(folder, comes), _sent(path, goes)
    while True:
        into, out = next(receiving, None), next(sending, None)
        if into is None and out is None:
            return
        source, target = (me + turn) % count, (me - turn) % count
        requests = processes().begin(
            sends=[] if out is None else [(target, 0, out)],
            receives=[] if into is None else [(source, 0, into)],
        )
        processes().finish(requests, processes().check)


def _sizes(entry: FileEntry) -> Iterator[int]:
    for start in range(0, entry.bytes, PIECE_BYTES):
        yield min(PIECE_BYTES, entry.bytes - start)


def _sent(path: Path, ways: Sequence[_Way]) -> Iterator[np.ndarray]:
    for entry, _, _ in ways:
        with open(path / entry.name, "rb") as file:
            for size in _sizes(entry):
                yield np.frombuffer(file.read(size), np.uint8)


def _received(folder: Path, ways: Sequence[_Way]) -> Iterator[np.ndarray]:
    """Buffers, each of which is full when the next one is asked for. LlmqError."""
    for entry, source, _ in ways:
        with replacing(folder / entry.name) as file:
            sink = HashingSink(file)
            for size in _sizes(entry):
                piece = np.empty(size, np.uint8)
                yield piece
                sink.write(piece.data)
            if sink.digest.hexdigest() != entry.sha256:
                machine = processes().machines[source]
                raise LlmqError(f"'{entry.name}' of machine '{machine}' came damaged: try again")
