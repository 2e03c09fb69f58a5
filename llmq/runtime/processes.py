"""The processes of a run: one, or several that a launcher of MPI has started.

Every process runs the whole program, and all make the same calls of what is here in the same order.
The first one prints, logs, and does what is done once. Without a launcher, or with a single
process, nothing of MPI is imported, and everything here returns at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from llmq.base.errors import LlmqError

if TYPE_CHECKING:  # --help does not wait for NumPy
    import numpy as np

    from llmq.runtime.workers import RankPool

T = TypeVar("T")

# Launchers tell by these how many processes they have started: Open MPI's mpirun, those of MPICH
# and Intel MPI, MVAPICH's, srun. (SLURM_NTASKS is also set in a batch script, which is one
# process.)
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher has started; 1 without one."""
    found = (environment.get(name, "") for name in SIZES)
    return max((int(text) for text in found if text.isdecimal()), default=1)


class Outcome(NamedTuple):
    """The result of a function, or the error that it raised."""

    value: Any
    error: BaseException | None


class Processes:
    """The processes of a run, seen from one of them. This class: there is only one. index: of this
    process. count: of all. machines: name of each one's machine."""

    index, count = 0, 1
    machines: tuple[str, ...] = ("",)

    def start_heartbeat(self, seconds: float) -> None:
        """See from now on that all processes answer and go on. seconds: --watchdog; 0: never."""

    def watch(self, pool: RankPool, waits: Callable[[int], bool]) -> None:
        """From now on the ranks of this process are those of the pool."""

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and logs."""
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by process, which all get."""
        return [value]

    def share(self, value: T) -> T:
        """The first process's value."""
        return value

    def together(self, fn: Callable[[], T]) -> list[T]:
        """Return fn's result in each process; if it raises an LlmqError in one, all raise that."""
        return [fn()]

    def each(self, fn: Callable[[], T]) -> T:
        """Return fn's result in this process; if it raises an LlmqError in one, all raise that."""
        return fn()

    def gather_arrays(
        self, parts: list[tuple[int, np.ndarray]], *, to_all: bool = True
    ) -> list[tuple[int, np.ndarray]]:
        """Numbered arrays of all processes, by process; all get them, or only the first does."""
        return parts

    def on_first(self, fn: Callable[[], T]) -> T:
        """Return fn's result in the first process, the only one that calls it; or raise its
        error."""
        return fn()


ALONE = Processes()
_current = ALONE


def processes() -> Processes:
    """Those of this run: what MPI is initialized for is a matter of the whole process."""
    return _current


def set_processes(new: Processes) -> None:
    global _current
    _current = new


def refuse_several(what: str, instead: str = "start it without mpirun or srun") -> None:
    """LlmqError if a launcher has started several processes for what works in one."""
    count = launched()
    if count > 1:
        raise LlmqError(f"{what} works in one process, and {count} were started: {instead}")
