"""How the ranks of a run are spread over processes and machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class World:
    """Ranks are counted through: those of the first process, then those of the second, and so on.

    counts: ranks of each process. machines: the name of each process's machine. index: this
    process. Without arguments one process with one rank.
    """

    counts: tuple[int, ...] = (1,)
    machines: tuple[str, ...] = ("",)
    index: int = 0

    @classmethod
    def of(cls, size: int) -> World:
        """One process with so many ranks."""
        return cls(counts=(size,))

    @cached_property
    def size(self) -> int:
        """Ranks of all processes."""
        return sum(self.counts)

    @cached_property
    def base(self) -> int:
        """The first rank of this process."""
        return sum(self.counts[: self.index])

    @property
    def count(self) -> int:
        """Ranks of this process."""
        return self.counts[self.index]

    @property
    def local(self) -> range:
        """The ranks of this process."""
        return range(self.base, self.base + self.count)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(p for p, count in enumerate(self.counts) for _ in range(count))

    @cached_property
    def ranks_here(self) -> int:
        """Ranks on this machine, of all its processes."""
        here = self.machines[self.index]
        pairs = zip(self.counts, self.machines, strict=True)
        return sum(count for count, machine in pairs if machine == here)

    @property
    def num_machines(self) -> int:
        """How many different machines there are."""
        return len(set(self.machines))

    def name(self, rank: int) -> str:
        """Of a rank, for messages: with its machine where there are several processes."""
        if len(self.counts) == 1:
            return f"rank {rank}"
        return f"rank {rank} on machine '{self.machines[self.processes[rank]]}'"
