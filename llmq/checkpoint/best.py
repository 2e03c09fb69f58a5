"""--keep-best: which checkpoint of a run is the best one, noted beside the checkpoints."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import write_file
from llmq.base.json_file import json_object, values_of
from llmq.base.run_id import RunId
from llmq.checkpoint.store import checkpoints_by_name
from llmq.runtime.processes import processes

NOTE = "best.json"
_HIGHER = ("acc", "acc_norm")  # metrics of which more is better

Measured = dict[str, tuple[float, int]]
"""Metrics by name, each with how much it was measured on: tokens or items."""


class Best:
    """The best value of a metric so far, and the step of its checkpoint; step None: none yet.

    metric None: nothing is kept. The first of equal values counts, and NaN never does. Only values
    that were measured on as much are compared: the last validation of a run takes all sequences,
    the others --eval-num-steps batches.
    """

    def __init__(self, metric: str | None, directory: Path, known: list[str]):
        """known: all metrics of the run; ConfigError if there is none of this name."""
        if metric is not None and metric not in known:
            names = ", ".join(known) or "none: give --eval-file or --eval-task"
            raise ConfigError(f"--keep-best: the run measures no {metric!r}; there are {names}")
        self.metric, self.directory = metric, directory
        self.step: int | None = None
        self._value, self._size = math.nan, 0

    def resume(self, run: RunId, steps_done: int) -> None:
        """Take what an earlier part of the run has noted, if its checkpoint is still there.

        Where steps are made again that come before it, it is forgotten. All processes call it.
        """
        note = processes().on_first(lambda: self._noted(run, steps_done))
        self.step, self._value, self._size = note or (None, self._value, self._size)

    def _noted(self, run: RunId, steps_done: int) -> tuple[int, float, int] | None:
        """Step, value and size."""
        note = json_object(self.directory / NOTE)
        found = _noted_best(note)
        if found is None or found[3] != self.metric or not run.owns(_owner(note)):
            return None
        there = found[0] <= steps_done and found[0] in checkpoints_by_name(self.directory)
        return found[:3] if there else None

    def improves(self, measured: Measured) -> bool:
        """Whether the metric is among these numbers, and better than before."""
        value, size = measured.get(self.metric, (math.nan, 0))
        if not math.isfinite(value):
            return False
        if self.step is None:
            return True
        higher = self.metric.split("/")[-1] in _HIGHER
        better = value > self._value if higher else value < self._value
        return better and size == self._size

    def note(self, measured: Measured, step: int, run: RunId) -> None:
        """The checkpoint of this step, which is there, is the best from now on. All processes call
        it; DiskError where it cannot be noted."""
        self.step, (self._value, self._size) = step, measured[self.metric]
        note = {
            "metric": self.metric,
            "value": self._value,
            "size": self._size,
            "step": step,
            "run": run.record(),
        }
        text = json.dumps(note, indent=2) + "\n"
        processes().on_first(lambda: write_file(self.directory / NOTE, text))


def note_is_damaged(directory: Path) -> bool:
    """Whether something lies in the place of the note of the best checkpoint that is none."""
    path = directory / NOTE
    if not path.is_file():
        return os.path.lexists(path)
    note = json_object(path)
    return _owner(note) is None and _noted_best(note) is None


def _noted_best(note: dict[str, Any]) -> tuple[int, float, int, str] | None:
    """Step, value, size and metric; None where it does not say all of them."""
    return values_of(note, step=int, value=float, size=int, metric=str)


def best_owner(directory: Path) -> RunId | None:
    """Whose note of the best checkpoint it is; None where it does not say so."""
    return _owner(json_object(directory / NOTE))


def _owner(note: dict[str, Any]) -> RunId | None:
    return RunId.of(note.get("run"))
