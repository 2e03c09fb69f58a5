"""How the ranks of a run are spread over machines, processes and GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class World:
    """Ranks are counted through: machine by machine, of each process by process.

    counts: ranks of each process. machines: the name of each process's machine; processes of a
    machine follow each other. index: this process. Without arguments one process with one rank.
    """

    counts: tuple[int, ...] = (1,)
    machines: tuple[str, ...] = ("",)
    index: int = 0

    @classmethod
    def of(cls, size: int) -> World:
        """One process with so many ranks."""
        return cls(counts=(size,))

    @classmethod
    def like(cls, size: int, machines: int) -> World:
        """So many ranks, divided equally among machines with a process each."""
        return cls((size // machines,) * machines, tuple(map(str, range(machines))))

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return len(self.counts) > 1

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
        return self.ranks_of_machines[self.machines[self.index]]

    @cached_property
    def ranks_of_machines(self) -> dict[str, int]:
        """How many ranks each machine has, by name and in their order."""
        found = dict.fromkeys(self.machines, 0)
        for count, machine in zip(self.counts, self.machines, strict=True):
            found[machine] += count
        return found

    @property
    def num_machines(self) -> int:
        """How many different machines there are."""
        return len(self.ranks_of_machines)

    def name(self, rank: int) -> str:
        """The name of a rank, for messages: with its machine where there are several processes."""
        if not self.several:
            return f"rank {rank}"
        return f"rank {rank} on machine '{self.machines[self.processes[rank]]}'"
