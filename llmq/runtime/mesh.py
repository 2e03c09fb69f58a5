"""The axes that the ranks of a run are laid out along, and where one rank is on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

# Along these ranks read different sequences. An axis that divides a sequence is none of them.
DATA = ("replica", "shard")


class Mesh:
    """Named axes and their sizes, the outermost first: along the last one ranks are neighbours.
    Whatever is counted, ordered or divided among ranks asks here, by the names of axes in any
    order; without a name all axes are meant. ValueError for an axis that there is not. axes: sizes
    by name. rank: this one, counted through all axes. groups: this rank's ends of the collectives
    by axes, which llmq.comm.connect gives it."""

    def __init__(self, axes: Mapping[str, int], rank: int = 0):
        self.axes, self.rank = dict(axes), rank
        self.groups: dict[tuple[str, ...], Any] = {}
        grid = np.arange(np.prod(list(axes.values()))).reshape(*axes.values())
        if not 0 <= rank < grid.size:
            raise ValueError(f"mesh: rank {rank} is none of the {grid.size} of {self.axes}")
        place = dict(zip(axes, np.unravel_index(rank, grid.shape), strict=True))
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}
        for names in (names for n in range(len(axes)) for names in combinations(axes, n + 1)):
            at = tuple(slice(None) if name in names else place[name] for name in axes)
            self._ranks[names] = tuple(grid[at].ravel().tolist())

    @classmethod
    def of(cls, world_size: int = 1, rank: int = 0, shards: int | None = None) -> Mesh:
        """The axes of a run: replicas of its state, and the shards that each is divided into.
        shards: a divisor of world_size; None: each rank has one of its own."""
        shards = shards or world_size
        return cls({"replica": world_size // shards, "shard": shards}, rank)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """The ranks along these axes, in their order: on the others they are where this one is."""
        return self._ranks[self._chosen(names)]

    def size(self, *names: str) -> int:
        """How many ranks there are along these axes."""
        return len(self.ranks(*names))

    def index(self, *names: str) -> int:
        """The place of this rank among those along these axes."""
        return self.ranks(*names).index(self.rank)

    def group(self, *names: str) -> Any:
        """This rank's end of the collectives among the ranks along these axes, a Comm. RuntimeError
        before they are connected."""
        chosen = self._chosen(names)
        if chosen not in self.groups:
            raise RuntimeError(f"mesh: nothing connects the ranks along {', '.join(chosen)}")
        return self.groups[chosen]

    @property
    def waits_for(self) -> str | None:
        """Whom the rank's thread is waiting for now, for diagnosis; None: for nobody."""
        return next((end.waits_for for end in self.groups.values() if end.waits_for), None)

    def close(self) -> None:
        for end in self.groups.values():
            end.close()

    def _chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """These axes, or all, in their order."""
        if unknown := [name for name in names if name not in self.axes]:
            raise ValueError(f"mesh: {', '.join(unknown)} is no axis of {self.axes}")
        return tuple(name for name in self.axes if name in names or not names)
