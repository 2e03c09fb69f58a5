"""Experts that no token meets are named: nothing trains them, and they take memory for nothing.

Routers that never chose an expert rarely begin to: its router's row gets next to no gradient, and
its matrices none. The load-balancing loss (`--router-aux-loss`) is what brings it back.
"""

from __future__ import annotations

import numpy as np

from llmq.run.events import Member, StepDone
from llmq.run.metrics import Reporter
from llmq.run.rank import Rank
from llmq.run.trainer import Trainer

STEPS = 1000
"""So many steps in a row have to leave an expert out."""
SHOWN = 8
"""At most so many experts are named in a line."""


class IdleExperts(Member):
    """Looks at the counts of routers, which are on the devices, every so many steps.

    It says nothing of models without experts.
    """

    def __init__(self, trainer: Trainer, reporter: Reporter, every: int = STEPS):
        self._trainer, self._reporter, self._every = trainer, reporter, every
        self._before: np.ndarray | None = None

    def after_step(self, done: StepDone) -> None:
        """Waits for the devices where it looks."""
        if self._trainer.model.experts is None or (done.number + 1) % self._every:
            return
        counts = self._counts()
        idle = np.argwhere(counts == (0 if self._before is None else self._before))
        self._before = counts
        if len(idle):
            layers = [i for i in range(self._trainer.model.num_layers) if self._has(i)]
            names = [f"{expert} of layer {layers[layer]}" for layer, expert in idle[:SHOWN]]
            more = f" and {len(idle) - SHOWN} more" * (len(idle) > SHOWN)
            self._reporter.message(
                f"WARNING: no token has met {len(idle)} of {counts.size} experts in the last "
                f"{self._every} steps: {', '.join(names)}{more}; see --router-aux-loss",
                done.step,
            )

    def _has(self, layer: int) -> bool:
        return self._trainer.model.has_experts(layer)

    def _counts(self) -> np.ndarray:
        """int64 (layers with experts, E): the tokens of all ranks since the run began."""
        experts = self._trainer.model.experts.count

        def counts(rank: Rank) -> np.ndarray:
            return rank.dev.download(rank.step.model.balance.totals)[:, :experts]

        return np.sum(self._trainer.ranks.everywhere("counts of experts", counts), axis=0)
