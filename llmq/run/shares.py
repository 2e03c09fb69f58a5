"""Shares of the ranks in a step (--share): measures the shares, and deals micro-batches
accordingly."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from llmq.base.batch import Batch
from llmq.base.callback import Callback, StepDone
from llmq.base.shares import AUTO, apportion, shown
from llmq.options.cards import cards_here
from llmq.options.options import TrainConfig
from llmq.plan.plan import Plan
from llmq.plan.shares import speeds, times_of
from llmq.runtime.machine import Machine

WARM_UP, MEASURED = 2, 5  # number of ignored first steps, then number of measured steps


class Shares(Callback):
    """Deals the micro-batches of a step to this process's ranks by shares. rates: micro-batches
    that each rank computes in the same time; None: equal shares (--share auto: shares are not
    measured yet)."""

    def __init__(self, config: TrainConfig, machine: Machine, plan: Plan):
        """plan: the plan of `config`. With --share auto, shares follow the plan's times of a
        micro-step if `llmq rig` has measured each kind of GPU here. Without measurements by `llmq
        rig`, shares follow the times of the first steps."""
        self._accumulation = config.grad_accumulation
        self._devices = [spec.name for spec in machine.specs]
        several = len(self._devices) > 1 and self._accumulation > 1
        self.rates: Sequence[float] | None = config.shares
        self.measures = several and config.share == AUTO
        self._found: list[list[float]] = []
        self._tell: Callable[[str], None] = lambda line: None
        cards = cards_here(machine.specs) if self.measures else ()
        if cards and all(card.measured is not None and card.error is None for card in cards):
            self._choose(speeds(times_of(plan, cards)))

    def of(self, count: int) -> list[int]:
        """Return the number of micro-batches of each rank, in a step with a mean of `count` per
        rank."""
        return apportion(count * len(self._devices), self.rates or [1.0] * len(self._devices))

    def deal(self, of_ranks: Sequence[Sequence[Batch]]) -> list[list[tuple[int, Batch]]]:
        """Deal micro-batches by shares. of_ranks: equally many micro-batches by rank. Each rank
        gets a consecutive part of all micro-batches. Returns (number, batch) pairs by rank;
        `rings.scalars_of` takes the number."""
        count = self._accumulation
        edges = [0, *accumulate(self.of(len(of_ranks[0])))]
        placed = [(r * count + i, b) for r, own in enumerate(of_ranks) for i, b in enumerate(own)]
        return [
            [(place - rank * count, batch) for place, batch in placed[first:end]]
            for rank, (first, end) in enumerate(pairwise(edges))
        ]

    def on_step(self, step: StepDone) -> None:
        """Note each rank's working time for its equal share of a step; after MEASURED steps choose
        the shares."""
        if not self.measures or step.number < WARM_UP:
            return
        working = (max(step.ms - waits, 1e-3 * step.ms) for waits in step.result.waits)
        self._found.append([1 / ms for ms in working])
        if len(self._found) == MEASURED:
            self._choose([median(of_rank) for of_rank in zip(*self._found, strict=True)])

    def _choose(self, rates: Sequence[float]) -> None:
        self.measures, self.rates = False, rates
        self.rates = self.of(self._accumulation)
        self._tell(self._line)

    def announce(self, tell: Callable[[str], None]) -> None:
        """Pass a line about the shares to `tell`, now or once the shares are measured."""
        self._tell = tell
        if self.rates is not None:
            tell(self._line)

    @property
    def _line(self) -> str:
        shares = self.of(self._accumulation)
        return f"Shares of the GPUs: {shown(shares)} of a step's {sum(shares)} micro-batches"

    def state(self) -> dict[str, Any]:
        """Return the shares and the names of the GPUs, as JSON values, for `load`; {} without
        rates."""
        if self.rates is None:
            return {}
        return {"shares": {"rates": [*self.rates], "gpus": self._devices}}

    def load(self, state: dict[str, Any]) -> None:
        """Use the shares of a checkpoint instead of measuring, if the GPUs are the same."""
        shares = state.get("shares", {})
        if self.measures and shares.get("gpus") == self._devices:
            self._choose(shares["rates"])
