"""The processes of a run and their ranks: a single process, or several processes started by an MPI
launcher.

Every process runs the whole program. The first process prints, logs, and does work that must be
done only once. Without a launcher, or with a single process, MPI is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from llmq.base.errors import LlmqError

if TYPE_CHECKING:  # --help must not wait for the import of NumPy
    import numpy as np

T = TypeVar("T")

# SIZES has the variables in which launchers give the number of processes: Open MPI's mpirun, MPICH
# and Intel MPI, MVAPICH, and srun. (SLURM_NTASKS cannot be used: Slurm also sets it in a batch
# script, which is a single process.)
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that the launcher has started; 1 without a launcher."""
    counts = (environment.get(name, "") for name in SIZES)
    return max((int(text) for text in counts if text.isdecimal()), default=1)


def refuse_several(what: str, instead: str = "start it without mpirun or srun") -> None:
    """Raise LlmqError if a launcher has started several processes for work that needs a single
    process. what, instead: the work and the advice, for the message."""
    count = launched()
    if count > 1:
        raise LlmqError(f"{what} works in one process, and {count} were started: {instead}")


class Outcome(NamedTuple):
    """The result of a function, or the error that the function raised."""

    value: Any
    error: BaseException | None


@dataclass(frozen=True)
class World:
    """The processes and ranks of a run, and the place of this process among all.

    Ranks are numbered machine by machine, and within a machine process by process. All processes
    must call the methods from `gather` to `gather_arrays` in the same order.

    counts: number of ranks of each process; 1 until `choose_machine` divides the devices. machines:
    name of the machine of each process; processes of a machine are adjacent. index: number of this
    process. mpi: the `llmq.runtime.mpi.Mpi` through which processes exchange values; None with one
    process, or in a plan. World() without arguments is one process with one rank.
    """

    counts: tuple[int, ...] = (1,)
    machines: tuple[str, ...] = ("",)
    index: int = 0
    mpi: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, size: int) -> World:
        """Return a world of one process with `size` ranks."""
        return cls(counts=(size,))

    @classmethod
    def like(cls, size: int, machines: int) -> World:
        """Return a world of `size` ranks, divided equally among machines with one process each."""
        return cls((size // machines,) * machines, tuple(map(str, range(machines))))

    # -- processes -------------------------------------------------------------------------------

    @property
    def several(self) -> bool:
        """True if there is more than one process."""
        return len(self.counts) > 1

    @property
    def first(self) -> bool:
        """True if this process prints and logs."""
        return self.index == 0

    @property
    def machine(self) -> str:
        """The name of this process's machine."""
        return self.machines[self.index]

    def process_name(self, index: int) -> str:
        """The name of a process, for messages."""
        return f"process {index} on machine '{self.machines[index]}'"

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the processes' order; every process gets the
        list."""
        return [value] if self.mpi is None else self.mpi.gather(value)

    def share(self, value: T) -> T:
        """Return the first process's value; every process gets the value."""
        return value if self.mpi is None else self.mpi.share(value)

    def together(self, fn: Callable[[], T]) -> list[T]:
        """Call fn in every process; return the results of all processes. If fn raises an LlmqError
        in one process, all processes raise the error."""
        if self.mpi is None:
            return [fn()]
        outcomes = self.gather(_outcome(fn))
        for index, outcome in enumerate(outcomes):
            if outcome.error is not None:
                alike = all(str(o.error) == str(outcome.error) for o in outcomes)
                raise self._agreed(outcome.error, None if alike else index)
        return [outcome.value for outcome in outcomes]

    def each(self, fn: Callable[[], T]) -> T:
        """Call fn in every process; return this process's result, which need not be picklable. If
        fn raises an LlmqError in one process, all processes raise the error."""
        results = []
        self.together(lambda: results.append(fn()))
        return results[0]

    def on_first(self, fn: Callable[[], T]) -> T:
        """Call fn in the first process only; every process returns the result of fn, or raises the
        LlmqError of fn."""
        if self.mpi is None:
            return fn()
        outcome = self.share(_outcome(fn) if self.first else None)
        if outcome.error is not None:
            raise self._agreed(outcome.error, None)
        return outcome.value

    def gather_arrays(
        self, parts: list[tuple[int, np.ndarray]], *, to_all: bool = True
    ) -> list[tuple[int, np.ndarray]]:
        """Return the numbered arrays of all processes, in the processes' order. to_all: True to
        return all arrays in every process; False to return them only in the first process."""
        return parts if self.mpi is None else self.mpi.gather_arrays(parts, to_all=to_all)

    def _agreed(self, error: BaseException, index: int | None) -> BaseException:
        """Return the error that all processes raise together. index: the only process that raised
        the error; None if all did."""
        if index is not None and isinstance(error, LlmqError):
            error = type(error)(f"{self.process_name(index)}: {error.headline}", error.details)
        error.agreed = True
        return error

    # -- ranks -----------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """Return the number of ranks of all processes."""
        return sum(self.counts)

    @cached_property
    def base(self) -> int:
        """Return the number of the first rank of this process."""
        return sum(self.counts[: self.index])

    @property
    def count(self) -> int:
        """Return the number of ranks of this process."""
        return self.counts[self.index]

    @property
    def local(self) -> range:
        """Return the ranks of this process."""
        return range(self.base, self.base + self.count)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """Return the process of each rank."""
        return tuple(p for p, count in enumerate(self.counts) for _ in range(count))

    @cached_property
    def ranks_here(self) -> int:
        """Return the number of ranks of all processes on this machine."""
        return self.ranks_of_machines[self.machine]

    @cached_property
    def ranks_of_machines(self) -> dict[str, int]:
        """Return the number of ranks of each machine by name, in order."""
        counts = dict.fromkeys(self.machines, 0)
        for count, machine in zip(self.counts, self.machines, strict=True):
            counts[machine] += count
        return counts

    @property
    def num_machines(self) -> int:
        return len(self.ranks_of_machines)

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages. With several processes the name includes the
        machine."""
        if not self.several:
            return f"rank {rank}"
        return f"rank {rank} on machine '{self.machines[self.processes[rank]]}'"


def _outcome(fn: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(fn(), None)
    except LlmqError as error:
        return Outcome(None, error)
