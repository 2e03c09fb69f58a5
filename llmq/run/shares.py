"""Shares of the ranks in a step (--share): measured, and the micro-batches dealt by them."""

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

WARM_UP, MEASURED = 2, 5  # first steps, and the steps behind them whose times choose the shares


class Shares(Callback):
    """Shares of this process's ranks. rates: micro-batches that they compute in the same time;
    None: equal shares, and with --share auto not known yet."""

    def __init__(self, config: TrainConfig, machine: Machine, plan: Plan):
        """plan: of the config. If the GPUs differ, and `llmq rig` has measured each kind here, the
        plan's times of a micro-step choose the shares; else those of the first steps."""
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
        """Micro-batches of each rank, in a step of `count` for each on average."""
        return apportion(count * len(self._devices), self.rates or [1.0] * len(self._devices))

    def deal(self, of_ranks: Sequence[Sequence[Batch]]) -> list[list[tuple[int, Batch]]]:
        """Deal micro-batches by shares, with their numbers as in `rings.scalars_of`. of_ranks: the
        micro-batches of an equal division. A rank gets a part of all of them in the order of
        ranks."""
        count = self._accumulation
        edges = [0, *accumulate(self.of(len(of_ranks[0])))]
        placed = [(r * count + i, b) for r, own in enumerate(of_ranks) for i, b in enumerate(own)]
        return [
            [(place - rank * count, batch) for place, batch in placed[first:end]]
            for rank, (first, end) in enumerate(pairwise(edges))
        ]

    def on_step(self, step: StepDone) -> None:
        """Note how long each rank worked for its equal share of a step; choose shares once there
        are enough of these times."""
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
        """Tell the shares, now or once they are measured."""
        self._tell = tell
        if self.rates is not None:
            tell(self._line)

    @property
    def _line(self) -> str:
        shares = self.of(self._accumulation)
        return f"Shares of the GPUs: {shown(shares)} of a step's {sum(shares)} micro-batches"

    def state(self) -> dict[str, Any]:
        """Shares and their GPUs, in JSON types, for `load`; {} if all are equal so far."""
        if self.rates is None:
            return {}
        return {"shares": {"rates": [*self.rates], "gpus": self._devices}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with the shares of a checkpoint, instead of measuring, if they are of these
        GPUs."""
        shares = state.get("shares", {})
        if self.measures and shares.get("gpus") == self._devices:
            self._choose(shares["rates"])
