"""What a checkpoint keeps of a run beside its state: reports, evaluations and the guard."""

from __future__ import annotations

from operator import index
from typing import Any

from llmq.train.between_steps import Evaluations
from llmq.train.guard import Guard
from llmq.train.metrics import Reporter


class History:
    """Of one run."""

    def __init__(self, reporter: Reporter, evaluations: Evaluations, guard: Guard):
        self.reporter, self.evaluations, self.guard = reporter, evaluations, guard

    def state(self) -> dict[str, Any]:
        """In JSON's types."""
        own = {"done_at": self.evaluations.done_at, "guard": self.guard.state}
        return self.reporter.history | own

    def load(self, history: dict[str, Any]) -> None:
        """Take what `state` gave, but for the guard's part; {}: of the beginning.

        TypeError, ValueError or AttributeError where it is something else.
        """
        total, count = history.get("losses_since_evaluation", (0.0, 0))
        total = None if total is None else float(total)
        self.reporter.history = history | {"losses_since_evaluation": [total, index(count)]}
        self.evaluations.done_at = {n: index(s) for n, s in history.get("done_at", {}).items()}
