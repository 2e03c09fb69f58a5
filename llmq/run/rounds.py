"""How many batches of an evaluation the ranks take: all as many, also if it is cut short."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

from llmq.runtime.processes import processes
from llmq.runtime.world import World


class Rounds:
    """The batches of an evaluation, of which all ranks take as many, also if it is cut short.

    Otherwise those with fewer would miss the collectives of the others.
    """

    def __init__(
        self,
        world: World,
        count: int,
        stopped: Callable[[], bool],
        seconds: float = math.inf,
    ):
        """stopped: asked before each batch. Once it says yes, ranks only catch up; then `cut` is
        true. After so many seconds they do so too, but not before the first batch. Where ranks are
        of several processes, all of them decide before each round what the others do, too.
        """
        self.cut, self._short = False, False
        self._count, self._stopped = count, stopped
        self._end = time.monotonic() + seconds
        self._taken = dict.fromkeys(world.local, 0)
        self._several = world.several
        self._decided = 0  # rounds that all processes have agreed on
        self._lock = threading.Lock()

    def of(self, rank: int) -> Iterator[None]:
        """One item for every batch that the rank, one of this process, is to take."""
        while self._another(rank):
            yield

    def _another(self, rank: int) -> bool:
        with self._lock:
            if not self._short:
                self._decide(self._taken[rank], self._stopped(), time.monotonic() > self._end)
            if self._taken[rank] == self._count:
                return False
            self._taken[rank] += 1
            return True

    def _decide(self, taken: int, cut: bool, late: bool) -> None:
        """Whether it goes on, for a rank that has taken so many. cut, late: as this process sees
        it now."""
        if self._several:
            if taken < self._decided:
                return
            self._decided += 1
            answers = processes().gather((cut, late))
            cut, late = (any(answer[i] for answer in answers) for i in (0, 1))
        self.cut = cut
        most = max(self._taken.values())
        self._short = cut or (late and 0 < most < self._count)
        self._count = most if self._short else self._count
