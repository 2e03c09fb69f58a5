"""The predictions of every run of a sweep before the first one starts, and how long they take.

The plans are made by a child process (llmq/bench/plan_runs.py), which has ended before anything is
measured: this one loads no CUDA.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmq.base.errors import warn
from llmq.bench.child import run_watched

PLANNER = (sys.executable, "-m", "llmq.bench.plan_runs")
LIMIT = 300  # seconds for the plan of one run

Prediction = dict[str, Any]
"""The prediction of one run, as llmq/bench/plan_runs.py writes it."""


def predict(runs: list[dict[str, Any]]) -> tuple[list[Prediction], dict[str, Any] | None]:
    """The prediction of each run, and the machine. A child that fails is reported, and nothing is
    known."""
    with tempfile.TemporaryDirectory(prefix="llmq-bench-") as folder:
        path, alive = Path(folder) / "result.json", Path(folder) / "alive"
        text = json.dumps({"runs": runs, "parent": os.getpid()})
        status = run_watched([*PLANNER, str(path), str(alive)], text, alive, LIMIT)
        if path.exists():
            result = json.loads(path.read_text())
            return result["runs"], result["machine"]
    warn([f"the runs cannot be planned: the process that does it ended with {status}"])
    return [{}] * len(runs), None


class Forecast:
    """How long runs take, from the plan's predictions and from the runs that are over.

    counted: steps of one run. For the CPU the plan only says how runs compare, so that there
    nothing is known before the first one is over.
    """

    START = 30.0  # seconds beside the steps, before a run has shown how many it takes

    def __init__(self, counted: int):
        self._counted = counted
        self._walls: list[float] = []
        self._starts: list[float] = []
        self._ratios: list[float] = []

    def finished(self, prediction: Prediction, wall: float, step_seconds: float) -> None:
        """A run took so long, and each of its steps so long."""
        self._walls.append(wall)
        self._starts.append(max(wall - self._counted * step_seconds, 0.0))
        if prediction.get("step_seconds"):
            self._ratios.append(step_seconds / prediction["step_seconds"])

    def seconds(self, prediction: Prediction) -> float | None:
        """The seconds of one run; None: nothing is known."""
        predicted = prediction.get("step_seconds")
        if predicted is None or not (self._ratios or prediction["on_gpu"]):
            return statistics.fmean(self._walls) if self._walls else None
        ratio = statistics.median(self._ratios) if self._ratios else 1.0
        start = statistics.median(self._starts) if self._starts else self.START
        return start + self._counted * ratio * predicted

    def left(self, predictions: Iterable[Prediction]) -> str:
        """For people, of all these; "" where that is not known."""
        each = [self.seconds(prediction) for prediction in predictions]
        if not each or None in each:
            return ""
        total = sum(each)
        for seconds, unit in ((1, "s"), (60, "min")):
            if total < 90 * seconds:
                return f", about {total / seconds:.0f} {unit} left"
        return f", about {total / 3600:.1f} h left"
