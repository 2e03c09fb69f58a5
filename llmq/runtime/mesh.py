"""The mesh of a run's ranks has named axes, on each of which a rank has a place."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

# DATA: ranks along these axes read different sequences; ranks along "context" divide each sequence.
DATA = ("replica", "batch")
# SHARD: the ranks along these axes together hold one replica of the state, each rank a shard.
SHARD = ("batch", "context")


class Mesh:
    """Named axes and their sizes, outermost first, so that neighbours on the last axis are
    consecutive ranks. All code that counts, orders or divides ranks calls the mesh. Methods take
    names of axes in any order; "shard" stands for all axes of SHARD, and no name for all axes. An
    unknown axis raises ValueError. axes: the size of each axis by name. rank: number of this rank
    among all ranks. groups: the collectives in which this rank takes part, by names of axes;
    llmq.comm.connect fills this dictionary."""

    def __init__(self, axes: Mapping[str, int], rank: int = 0):
        self.axes, self.rank = dict(axes), rank
        self.groups: dict[tuple[str, ...], Any] = {}
        grid = np.arange(np.prod(list(axes.values()))).reshape(*axes.values())
        if not 0 <= rank < grid.size:
            raise ValueError(f"mesh: rank {rank} is none of the {grid.size} of {self.axes}")
        place = dict(zip(axes, np.unravel_index(rank, grid.shape), strict=True))
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}
        for names in (names for n in range(len(axes)) for names in combinations(axes, n + 1)):
            index = tuple(slice(None) if name in names else place[name] for name in axes)
            self._ranks[names] = tuple(grid[index].ravel().tolist())

    @classmethod
    def of(
        cls, world_size: int = 1, rank: int = 0, shards: int | None = None, context: int = 1
    ) -> Mesh:
        """Return the mesh of a run that has replicas of its state, each divided into shards.
        shards: number of shards, a divisor of world_size; None: a shard for each rank. context:
        number of ranks that divide a sequence, a divisor of shards."""
        shards = shards or world_size
        sizes = {"replica": world_size // shards, "batch": shards // context, "context": context}
        return cls(sizes, rank)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """Return the ranks along these axes, in order; on all other axes they share this rank's
        place."""
        return self._ranks[self.named(names)]

    def size(self, *names: str) -> int:
        """Return the number of ranks along these axes."""
        return len(self.ranks(*names))

    def index(self, *names: str) -> int:
        """Return this rank's place among the ranks along these axes."""
        return self.ranks(*names).index(self.rank)

    def group(self, *names: str) -> Any:
        """Return the object (a Comm) by which this rank takes part in collectives along these axes.
        Raises RuntimeError before llmq.comm.connect has connected the ranks."""
        chosen = self.named(names)
        if chosen not in self.groups:
            raise RuntimeError(f"mesh: nothing connects the ranks along {', '.join(chosen)}")
        return self.groups[chosen]

    @property
    def waits_for(self) -> str | None:
        """The name of the ranks for which this rank's thread is waiting, for diagnosis; None if the
        thread does not wait."""
        return next((end.waits_for for end in self.groups.values() if end.waits_for), None)

    def close(self) -> None:
        for end in self.groups.values():
            end.close()

    def named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return these axes in the mesh's order; without names, all axes."""
        if "shard" in names and "shard" not in self.axes:
            names = (*SHARD, *(name for name in names if name != "shard"))
        if unknown := [name for name in names if name not in self.axes]:
            raise ValueError(f"mesh: {', '.join(unknown)} is no axis of {self.axes}")
        return tuple(name for name in self.axes if name in names or not names)
