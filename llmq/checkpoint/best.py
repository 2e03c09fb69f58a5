"""The best checkpoint of a run (--keep-best), its note best.json, and the early stop."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.callback import Callback
from llmq.base.errors import ConfigError
from llmq.base.files import disk_errors, json_object, values_of, write_file
from llmq.base.run_id import RunId
from llmq.checkpoint.store import own_checkpoints
from llmq.runtime.world import World

NOTE = "best.json"
_HIGHER = ("acc", "acc_norm")  # metrics whose higher values are better


class Measurement(NamedTuple):
    """A metric's value. kind: the evaluation data in words, with number of items and sequence
    length; only values of the same kind are comparable. final: True for the evaluation on all data
    at the end of a run."""

    value: float
    kind: str
    final: bool = False


Measured = dict[str, Measurement]
"""Measurements by name of the metric."""


class BestValue(NamedTuple):
    """The best value of a metric, the step of its checkpoint, and its kind (see Measurement)."""

    step: int
    value: float
    kind: str


class Best:
    """The best value of a metric so far, and the early stop of a run that finds no better one.

    If values are equal the first counts; NaN never counts. A value of another kind begins a new
    search, except the final value of a run, which counts only if its kind is the same. The record
    of a checkpoint (`state`) holds the best value up to the checkpoint's step, this step's own
    value included. So a complete checkpoint never lacks its value. The note `best.json` follows
    from the record.

    metric: name of the metric; None: keep no best. known: the best so far, or None. proposed: a
    better value whose checkpoint is not complete yet. stale: number of measurements in a row
    without a gain. patience: the number of stale measurements that ends the run, 0 for no early
    stop.
    """

    def __init__(
        self,
        metric: str | None,
        directory: Path,
        metrics: list[str],
        patience: int = 0,
        world: World = World(),
    ):
        """metrics: names of all metrics of the run. world: the processes of the run. ConfigError if
        `metric` is not in `metrics`."""
        if metric is not None and metric not in metrics:
            names = ", ".join(metrics) or "none: give --eval-file or --eval-task"
            of_loss = ", as --stop-after needs" * (patience > 0 and metric == "loss")
            raise ConfigError(
                f"--keep-best: the run measures no {metric!r}{of_loss}; there are {names}"
            )
        self.metric, self.directory, self.patience = metric, directory, patience
        self._world = world
        self.known: BestValue | None = None
        self.proposed: BestValue | None = None
        self.stale, self._at = 0, -1

    @property
    def step(self) -> int | None:
        return None if self.known is None else self.known.step

    def __str__(self) -> str:
        return f"{self.metric} {self.known.value:.6g} at step {self.known.step}"

    # -- measurements ----------------------------------------------------------------------------

    def begins_anew(self, measured: Measured) -> str | None:
        """Return a line for the log if the metric's measurement has another kind now, so that the
        search begins anew; None if the search goes on."""
        now = measured.get(self.metric)
        if now is None or now.final or self.known is None or now.kind == self.known.kind:
            return None
        return (
            f"{self.metric} is measured on {now.kind} now, and was on {self.known.kind}: the best "
            f"is looked for anew ({self.known.value:.6g} at step {self.known.step} counts no more)"
        )

    def take(self, step: int, measured: Measured) -> bool:
        """Count a step's measurement, once. Return True for a gain, which becomes `proposed`; then
        the caller calls `accept` when the step's checkpoint is complete, or `drop`."""
        measurement = measured.get(self.metric)
        if measurement is None:
            return False
        known, (value, kind, final) = self.known, measurement
        same = known is not None and kind == known.kind
        if math.isfinite(value) and (
            known is None or (self._is_better(value) if same else not final)
        ):
            self.proposed = BestValue(step, value, kind)
            self.stale, self._at = 0, step
            return True
        if not final and self._at != step:
            self.stale, self._at = self.stale + 1, step
        return False

    def _is_better(self, value: float) -> bool:
        higher = self.metric.split("/")[-1] in _HIGHER
        return value > self.known.value if higher else value < self.known.value

    def drop(self) -> None:
        """Forget the proposed best, which has no checkpoint."""
        self.proposed = None

    def accept(self, run: RunId) -> None:
        """Make the proposed best, whose checkpoint is complete, the known best. All processes call
        this method. DiskError if the note cannot be written."""
        self.known, self.proposed = self.proposed, None
        self._write_note(run)

    # -- record and note -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The best and the count of stale measurements as JSON, for the record of a checkpoint."""
        best = self.proposed or self.known
        counted = {"metric": self.metric, "stale": self.stale, "at": self._at}
        return counted | ({} if best is None else best._asdict())

    def load(self, state: Any) -> None:
        """Load a `state`, or begin anew if it is of another metric. The caller then calls
        `resume`."""
        self.known, self.proposed, self.stale, self._at = None, None, 0, -1
        counted = values_of(state, metric=str, stale=int, at=int) if state else None
        if counted is not None and counted[0] == self.metric:
            self.known, (_, self.stale, self._at) = _best_value(state), counted

    def resume(self, run: RunId, steps_done: int) -> None:
        """Choose between the loaded best and the best in the note, by the checkpoints on disk, and
        write the note. The note may be newer, because an evaluation can follow its step's
        checkpoint. A best of a step after `steps_done` does not count. All processes call this
        method. DiskError as in `accept`."""
        if self.metric is None:
            return
        note, on_disk = self._world.on_first(
            lambda: (_noted(self.directory, run), own_checkpoints(self.directory, run))
        )
        noted = _best_value(note) if note.get("metric") == self.metric else None
        best = _newest([self.known, noted], [step for step in on_disk if step <= steps_done])
        if best is None or best != self.known:  # the loaded count belongs to another best
            self.stale, self._at = 0, self._at if best is None else best.step
        self.known = best
        if best != noted:
            self._write_note(run, noted)

    def _write_note(self, run: RunId, noted: BestValue | None = None) -> None:
        """Write the note of the known best. Without a known best remove the note, if there is one.
        noted: the best in the note."""

        def write() -> None:
            path = self.directory / NOTE
            if self.known is not None:
                note = {"metric": self.metric, **self.known._asdict(), "run": run.record()}
                write_file(path, json.dumps(note, indent=2) + "\n")
            elif noted is not None:
                with disk_errors(path):
                    path.unlink()

        self._world.on_first(write)


class EarlyStopping(Callback):
    """Ends a run whose last `Best.patience` measurements brought no gain (--stop-after)."""

    def __init__(self, best: Best):
        self._best = best

    @property
    def stop(self) -> str | None:
        best = self._best
        if not 0 < best.patience <= best.stale:
            return None
        than = "a finite number"
        if best.known is not None:
            than = f"better than {best.known.value:.6g} of step {best.step}"
        many = f"the last {best.stale} measurements (--stop-after {best.patience})"
        return f"{best.metric} has not been {than} in {many}"


def recorded_best(
    document: dict[str, Any], directory: Path, steps: Collection[int]
) -> BestValue | None:
    """Return the best of a run by its newest manifest and its note; None without --keep-best.
    document: content of the manifest. directory: the folder with the note. steps: steps of the
    run's checkpoints on disk."""
    metric = document["options"].get("keep_best")
    recorded = document["run"]["state"].get("history", {}).get("best")
    records = [recorded, _noted(directory, RunId.of(document["run"]))]
    known = [r for r in records if isinstance(r, dict) and r.get("metric") == metric]
    return _newest([_best_value(record) for record in known], steps) if metric else None


def _noted(directory: Path, run: RunId) -> dict[str, Any]:
    """Return the content of this run's note; {} without a note of this run."""
    note = json_object(directory / NOTE)
    return note if run.owns(_owner(note)) else {}


def _best_value(record: dict[str, Any]) -> BestValue | None:
    """Return the best in a note or a checkpoint's record; None if a field is missing or the value
    is not finite."""
    fields = values_of(record, step=int, value=float, kind=str)
    return BestValue(*fields) if fields is not None and math.isfinite(fields[1]) else None


def _newest(bests: list[BestValue | None], steps: Collection[int]) -> BestValue | None:
    """Return the newest best whose checkpoint is on disk; None without one. steps: steps of the
    checkpoints on disk."""
    saved = [best for best in bests if best is not None and best.step in steps]
    return max(saved, key=lambda best: best.step, default=None)


def note_is_damaged(directory: Path) -> bool:
    """True if best.json exists but cannot be read as the note of a best checkpoint."""
    path = directory / NOTE
    if not path.is_file():
        return os.path.lexists(path)
    note = json_object(path)
    return _owner(note) is None and _best_value(note) is None


def best_owner(directory: Path) -> RunId | None:
    """Return the id of the run that wrote best.json; None if best.json cannot be read."""
    return _owner(json_object(directory / NOTE))


def _owner(note: dict[str, Any]) -> RunId | None:
    return RunId.of(note.get("run"))
