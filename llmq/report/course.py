"""The course of a run in its log, through any number of continuations.

A run that goes on from an earlier checkpoint than its last step undoes the steps since then: the
log keeps their records, a curve has each step once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_OF_STEPS = {
    "step",
    "gpu",
    "cpu",
    "abs-maxes",
    "fast-products",
    "choices",
}  # step s writes them; others: between


class Course:
    """Follows the records of a log."""

    def __init__(self) -> None:
        self._newest = -1  # step

    def back_to(self, record: dict[str, Any]) -> int | None:
        """How many steps count as done from this record on, if it undoes others; else None."""
        step = None
        if record["log"] == "step":
            step, after = record["step"], record["step"]
        elif record["log"] == "cmd":  # logs of older versions do not say it
            step = record.get("resumed_at")
            after = self._newest if step is None else step - 1
        if step is None:
            return None
        back = step if step <= self._newest else None
        self._newest = after if back is not None else max(self._newest, after)
        return back


def is_undone(record: dict[str, Any], steps: int) -> bool:
    """Whether a record is about what going back to so many done steps undoes."""
    of_step = record["log"] in _OF_STEPS or record.get("type") == "time-breakdown"
    return record["step"] >= steps if of_step else record["step"] > steps


def without_undone(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a log without those of undone steps."""
    course, kept = Course(), []
    for record in records:
        back = course.back_to(record)
        if back is not None:
            kept = [r for r in kept if not is_undone(r, back)]
        kept.append(record)
    return kept
