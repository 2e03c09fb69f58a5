"""Which processes of a run see the same directory of checkpoints.

On a file system that all machines share, all do. Where the directory is one of each machine, the
checkpoints lie apart: every machine has a part of each, what its own ranks have written.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmq.base.errors import DiskError
from llmq.base.files import disk_errors, make_directory
from llmq.runtime.processes import ALONE, Processes, processes
from llmq.runtime.world import World

T = TypeVar("T")

SHARED_SECONDS = 20.0  # until a file of one process is seen by all, on a network's file system
# File systems of one machine, on which a file is there for all its processes at once.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"}


@dataclass(frozen=True)
class Disks:
    """of: by process, the first process that sees the same directory. Without arguments all see
    one. alone: only this process looks, and none waits for it, as in a thread of the first one."""

    of: tuple[int, ...] = (0,)
    alone: bool = False

    @property
    def group(self) -> Processes:
        """Those that look together."""
        return ALONE if self.alone else processes()

    @property
    def apart(self) -> bool:
        """Whether there are several."""
        return len(set(self.of)) > 1

    @property
    def leads(self) -> bool:
        """Whether this process is the first one of its disk: what is done once on each, it does."""
        index = self.group.index
        return self.of[index] == index if self.apart else index == 0

    @property
    def place(self) -> tuple[int, int]:
        """Which one this process is of those that see its disk, and how many they are."""
        index = self.group.index
        if not self.apart:
            return index, self.group.count
        beside = [process for process, of in enumerate(self.of) if of == self.of[index]]
        return beside.index(index), len(beside)

    def each(self, fn: Callable[[], T]) -> list[T]:
        """What fn returns on each disk, in order, by its first process.

        All processes call this and get them; if fn raises an LlmqError on one, all raise that.
        """
        if not self.apart:
            return [self.group.on_first(fn)]
        found = self.group.together(lambda: fn() if self.leads else None)
        return [found[index] for index in sorted(set(self.of))]

    def here(self, fn: Callable[[], T]) -> T | None:
        """As `each`, but what fn returns stays where it was called; None in other processes."""
        kept: list[T | None] = []
        self.each(lambda: kept.append(fn()))
        return kept[0] if kept else None

    def lines(self, directory: Path, world: World) -> list[str]:
        """What to say of them."""
        if not self.apart:
            return []
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(self.names(world)))
        return [f"Checkpoints lie apart: '{directory}' is one of each machine, {names}"]

    def names(self, world: World) -> tuple[str, ...] | None:
        """By rank, where its part of a checkpoint lies; None if all of it lies together."""
        if not self.apart:
            return None
        leaders = sorted(set(self.of))
        machines = [world.machines[leader] for leader in leaders]
        by_leader = {
            leader: name if machines.count(name) == 1 else f"{name}, process {leader}"
            for leader, name in zip(leaders, machines, strict=True)
        }
        return tuple(by_leader[self.of[process]] for process in world.processes)


ONE_DISK = Disks()
HERE = Disks(alone=True)


def find_disks(directory: Path) -> Disks:
    """By what each process leaves in it for a moment, and which of these it sees.

    Of a network's file system others may see a file some seconds later. DiskError where it cannot
    be written.
    """
    group = processes()
    if group.count == 1:
        return Disks()
    own = f".llmq-{secrets.token_hex(8)}"
    try:
        names = group.together(lambda: _leave(directory, own))
        seen = group.gather(sum(1 << names.index(name) for name in _wait_for(directory, names)))
    finally:
        with suppress(OSError):
            (directory / own).unlink(missing_ok=True)
    return Disks(joined(seen))


def joined(seen: Sequence[int]) -> tuple[int, ...]:
    """Disks.of, from the processes whose files each process sees: bit i is the i-th one's.

    That one of two sees the other's is enough: a file may come late.
    """
    of = list(range(len(seen)))
    for one in range(len(seen)):
        for other in range(one):
            if of[one] == one and (seen[one] >> other | seen[other] >> one) & 1:
                of[one] = of[other]
    return tuple(of)


def _leave(directory: Path, name: str) -> str:
    with disk_errors(directory):
        make_directory(directory)
        (directory / name).touch()
    return name


def _wait_for(directory: Path, names: list[str]) -> set[str]:
    """Those of the names that are in a directory, when all are or none can come any more."""
    seconds = 0.0 if _is_local(directory) else SHARED_SECONDS
    end = time.monotonic() + seconds
    while True:
        try:
            found = set(os.listdir(directory)).intersection(names)  # which asks a network's server
        except OSError as error:
            raise DiskError(f"cannot list '{directory}': {error.strerror}") from error
        if len(found) == len(names) or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _is_local(directory: Path) -> bool:
    """Whether a directory surely lies on a file system of this machine alone."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    whole, best, kind = os.path.realpath(directory), "", ""
    for line in mounts:
        _, place, name, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        inside = place == "/" or whole == place or whole.startswith(place + "/")
        if inside and len(place) >= len(best):
            best, kind = place, name
    return kind in _LOCAL
