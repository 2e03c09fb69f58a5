"""The best checkpoint of a run (--keep-best): its value, its note, and the early stop."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError
from llmq.base.files import disk_errors, json_object, values_of, write_file
from llmq.base.run_id import RunId
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.store import own_checkpoints
from llmq.runtime.processes import processes

NOTE = "best.json"
_HIGHER = ("acc", "acc_norm")  # metrics of which more is better


class Measurement(NamedTuple):
    """A metric's value. kind: of data, how many, and in sequences of which length, in words; only
    values of one kind are compared. final: of the evaluation at the end of a run, which takes
    everything."""

    value: float
    kind: str
    final: bool = False


Measured = dict[str, Measurement]
"""Measurements by the metric's name."""


class BestValue(NamedTuple):
    """The best value of a kind, and the step of its checkpoint."""

    step: int
    value: float
    kind: str


class Best:
    """The best value of a metric so far, and the early stop of a run that finds no better one.

    The first of equal values counts, NaN never. A value of another kind begins a new search, but
    that of a run's end, which counts only where the kind is the same. The record of a checkpoint
    (`state`) holds the best as of that step, its own value included, so that a complete checkpoint
    is never without its value; the note `best.json` follows from the record.

    metric None: nothing is kept. known: None: no best yet. stale: measurements in a row without a
    gain; of them `patience` end the run, 0: none do. proposed: a gain whose checkpoint is not
    complete yet.
    """

    def __init__(self, metric: str | None, directory: Path, metrics: list[str], patience: int = 0):
        """metrics: all of the run; ConfigError if there is none of this name."""
        if metric is not None and metric not in metrics:
            names = ", ".join(metrics) or "none: give --eval-file or --eval-task"
            of_loss = ", as --stop-after needs" * (patience > 0 and metric == "loss")
            raise ConfigError(
                f"--keep-best: the run measures no {metric!r}{of_loss}; there are {names}"
            )
        self.metric, self.directory, self.patience = metric, directory, patience
        self.known: BestValue | None = None
        self.proposed: BestValue | None = None
        self.stale, self._at = 0, -1

    @property
    def step(self) -> int | None:
        return None if self.known is None else self.known.step

    @property
    def exhausted(self) -> str | None:
        """The reason to end the run early; None without one."""
        if not 0 < self.patience <= self.stale:
            return None
        than = "a finite number"
        if self.known is not None:
            than = f"better than {self.known.value:.6g} of step {self.step}"
        many = f"the last {self.stale} measurements (--stop-after {self.patience})"
        return f"{self.metric} has not been {than} in {many}"

    def __str__(self) -> str:
        return f"{self.metric} {self.known.value:.6g} at step {self.known.step}"

    # -- measurements ----------------------------------------------------------------------------

    def begins_anew(self, measured: Measured) -> str | None:
        """The line on a search that begins anew, because the metric is of another kind now; None:
        the search goes on."""
        now = measured.get(self.metric)
        if now is None or now.final or self.known is None or now.kind == self.known.kind:
            return None
        return (
            f"{self.metric} is measured on {now.kind} now, and was on {self.known.kind}: the best "
            f"is looked for anew ({self.known.value:.6g} at step {self.known.step} counts no more)"
        )

    def take(self, step: int, measured: Measured) -> bool:
        """Count the measurement of a step, once. True for a gain, which is proposed from now on:
        call `accept` when its checkpoint is complete, or `drop`."""
        found = measured.get(self.metric)
        if found is None:
            return False
        known, (value, kind, final) = self.known, found
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
        """There is no checkpoint of what was proposed."""
        self.proposed = None

    def accept(self, run: RunId) -> None:
        """The checkpoint of what was proposed is complete. All processes call it; DiskError where
        this cannot be noted beside the checkpoint."""
        self.known, self.proposed = self.proposed, None
        self._write_note(run)

    # -- what is written -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The best of this moment in JSON's types, for the record of a checkpoint."""
        best = self.proposed or self.known
        counted = {"metric": self.metric, "stale": self.stale, "at": self._at}
        return counted | ({} if best is None else best._asdict())

    def load(self, state: Any) -> None:
        """Take what `state` gave for the same metric, else begin anew; `resume` comes next."""
        self.known, self.proposed, self.stale, self._at = None, None, 0, -1
        counted = values_of(state, metric=str, stale=int, at=int) if state else None
        if counted is not None and counted[0] == self.metric:
            self.known, (_, self.stale, self._at) = _best_value(state), counted

    def resume(self, run: RunId, steps_done: int) -> None:
        """Compare what was loaded with the note and the checkpoints that are there, and note the
        result. The note may be newer: a checkpoint's evaluation can follow it. Nothing counts that
        comes after the steps done. All processes call it; DiskError as of `accept`."""
        if self.metric is None:
            return
        where = (self.directory, run)
        note, there = processes().on_first(lambda: (_noted(*where), own_checkpoints(*where)))
        noted = _best_value(note) if note.get("metric") == self.metric else None
        best = _newest([self.known, noted], [step for step in there if step <= steps_done])
        if best is None or best != self.known:  # then the count is not that of this best
            self.stale, self._at = 0, self._at if best is None else best.step
        self.known = best
        if best != noted:
            self._write_note(run, noted)

    def _write_note(self, run: RunId, noted: BestValue | None = None) -> None:
        """Write the note, or remove the one that says `noted` where nothing is known."""

        def write() -> None:
            path = self.directory / NOTE
            if self.known is not None:
                note = {"metric": self.metric, **self.known._asdict(), "run": run.record()}
                write_file(path, json.dumps(note, indent=2) + "\n")
            elif noted is not None:
                with disk_errors(path):
                    path.unlink()

        processes().on_first(write)


def _noted(directory: Path, run: RunId) -> dict[str, Any]:
    """The note of this run; {} without one."""
    note = json_object(directory / NOTE)
    return note if run.owns(_owner(note)) else {}


def _best_value(record: dict[str, Any]) -> BestValue | None:
    """The best in a note or a checkpoint's record; None where one does not say all of it."""
    found = values_of(record, step=int, value=float, kind=str)
    return BestValue(*found) if found is not None and math.isfinite(found[1]) else None


def _newest(found: list[BestValue | None], there: Collection[int]) -> BestValue | None:
    """The newest of these bests whose checkpoint is there."""
    bests = [best for best in found if best is not None and best.step in there]
    return max(bests, key=lambda best: best.step, default=None)


def exported_best(newest: Path) -> tuple[Path, BestValue] | None:
    """The checkpoint that a run exports as its best, and its value; None where the run exports its
    last one, or knows no best. newest: a checkpoint of the run, beside which the others lie."""
    document = read_manifest(newest / MANIFEST)
    metric, export = (document["options"].get(name) for name in ("keep_best", "export"))
    if metric is None or export == "last":
        return None
    run = RunId.of(document["run"])
    note, there = _noted(newest.parent, run), own_checkpoints(newest.parent, run)
    recorded = document["run"]["state"].get("history", {}).get("best")
    records = [r for r in (recorded, note) if isinstance(r, dict) and r.get("metric") == metric]
    best = _newest([_best_value(record) for record in records], there)
    return None if best is None else (there[best.step], best)


def note_is_damaged(directory: Path) -> bool:
    """Whether something lies in the place of the note of the best checkpoint that is none."""
    path = directory / NOTE
    if not path.is_file():
        return os.path.lexists(path)
    note = json_object(path)
    return _owner(note) is None and _best_value(note) is None


def best_owner(directory: Path) -> RunId | None:
    return _owner(json_object(directory / NOTE))


def _owner(note: dict[str, Any]) -> RunId | None:
    return RunId.of(note.get("run"))
