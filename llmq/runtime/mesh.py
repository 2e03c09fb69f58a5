"""The mesh of a run's ranks: named axes, and the place of one rank on each axis."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

# Axes along which ranks read different sequences; along "context" they divide sequences.
DATA = ("replica", "batch")
# The axes of the ranks that together hold one replica of the state, each rank its shard.
SHARD = ("batch", "context")


class Mesh:
    """Named axes and their sizes, outermost first: neighbours on the last axis are consecutive
    ranks. All code that counts, orders or divides ranks asks the mesh. Methods take names of axes,
    in any order; "shard" stands for all axes of SHARD, and no name for all axes. ValueError for an
    unknown axis. axes: size of each axis, by name. rank: this rank, counted through all axes.
    groups: this rank's end of each group of collectives, by axes; llmq.comm.connect fills this
    dictionary."""

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
        """Return the mesh of a run, with replicas of the run's state, each divided into shards.
        shards: number of shards, a divisor of world_size; None: a shard for each rank. context:
        number of ranks that divide a sequence, a divisor of shards."""
        shards = shards or world_size
        sizes = {"replica": world_size // shards, "batch": shards // context, "context": context}
        return cls(sizes, rank)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """Return the ranks along these axes, in order, with this rank's place on all other axes."""
        return self._ranks[self.named(names)]

    def size(self, *names: str) -> int:
        """Return the number of ranks along these axes."""
        return len(self.ranks(*names))

    def index(self, *names: str) -> int:
        """Return this rank's place among the ranks along these axes."""
        return self.ranks(*names).index(self.rank)

    def group(self, *names: str) -> Any:
        """Return this rank's end of the collectives along these axes, a Comm. RuntimeError before
        they are connected."""
        chosen = self.named(names)
        if chosen not in self.groups:
            raise RuntimeError(f"mesh: nothing connects the ranks along {', '.join(chosen)}")
        return self.groups[chosen]

    @property
    def waits_for(self) -> str | None:
        """The name of the ranks for which this rank's thread waits now, for diagnosis; None: the
        thread does not wait."""
        return next((end.waits_for for end in self.groups.values() if end.waits_for), None)

    def close(self) -> None:
        for end in self.groups.values():
            end.close()

    def named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return these axes, or all, in the mesh's order."""
        if "shard" in names and "shard" not in self.axes:
            names = (*SHARD, *(name for name in names if name != "shard"))
        if unknown := [name for name in names if name not in self.axes]:
            raise ValueError(f"mesh: {', '.join(unknown)} is no axis of {self.axes}")
        return tuple(name for name in self.axes if name in names or not names)
