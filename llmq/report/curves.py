"""Series of numbers over steps, tokens and hours, as the logs of runs have them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import check_readable
from llmq.base.records import elements
from llmq.report.json_log import is_undone, without_undone

SMOOTHING = 10  # steps to each side

AXES = {
    "step": "step",
    "tokens": "tokens",
    "hours": "hours of steps, without validations and checkpoints",
}
"""The x-axis may count these, and is labelled so."""

# By title, in their order: of a step's record a number, of a GPU's a reading.
_OF_STEP: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "loss (nats per token)": lambda r: r["loss"],
    "learning rate": lambda r: r.get("lr"),
    "gradient norm": lambda r: r.get("norm"),
    "tokens per second": lambda r: _rate(r),
}
LOSS = next(iter(_OF_STEP))
_OF_LOSS = {  # of losses that have them, in records of steps and of evaluations
    "pairs preferred as they should be": "accuracy",
    "margin of rewards": "margin",
    "reward of chosen answers": "reward_chosen",
    "reward of rejected answers": "reward_rejected",
    "divergence from reference or teacher (nats)": "kl",
    "part of tokens that meet the busiest expert": "router_busiest",
    "entropy of routers (nats)": "router_entropy",
}
_OF_GPU = {"GPU power (W)": ("power", 1000), "GPU clock (MHz)": ("clock", 1)}
_SMOOTH = {LOSS, "gradient norm", "tokens per second"}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one run in one panel.

    panel: its title. label: what is shown, without the run's name. points: few ones that are drawn
    as points, too. smooth: they are drawn faintly below their mean. x: by axis, as many numbers as
    y; both F64, NaN where the log has null.
    """

    panel: str
    label: str
    x: dict[str, np.ndarray]
    y: np.ndarray
    points: bool = False
    smooth: bool = False


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log that count, also of one that is being written.

    DataError where it cannot be read or has nothing to plot.
    """
    try:
        check_readable(path)
        data = path.read_bytes()
        records = [json.loads(t) for t, _ in elements(str(path), BytesIO(data), 0, growing=True)]
    except OSError as error:
        raise DataError(f"cannot read the log '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not a log of llmq train: {error}") from None
    except DataError:
        raise DataError(
            f"'{path}' is not a log of llmq train: it holds no array of records"
        ) from None
    points = [r for r in records if r.get("log") in ("step", "eval")]
    if not points:
        raise DataError(f"'{path}' has nothing to plot: no step was made")
    for r in points:
        # A loss of null was not finite; one that is missing is an error.
        if type(r.get("step")) is not int or not isinstance(r.get("loss", ""), float | int | None):
            raise DataError(
                f"'{path}' is not a log of llmq train: a record of {r['log']} has step "
                f"{r.get('step')!r} and loss {r.get('loss')!r}, not numbers"
            )
    return without_undone(r for r in records if "log" in r and type(r.get("step")) is int)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean over a window of SMOOTHING values to each side, fewer at the ends, NaN left out."""
    finite = np.isfinite(values)
    window = np.ones(2 * SMOOTHING + 1)
    inside = slice(SMOOTHING, SMOOTHING + len(values))
    total = np.convolve(np.where(finite, values, 0.0), window)[inside]
    count = np.convolve(finite.astype(float), window)[inside].round()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


class _Clock:
    """The time at which each step was done: tokens and hours by step. Steps before the log's first
    one count as many tokens as that one, and have no time.
    """

    def __init__(self, steps: Iterable[dict[str, Any]]):
        """steps: their records, in order."""
        records = list(steps)
        self._steps = np.array([r["step"] for r in records], int)
        tokens = np.array([r.get("step_tokens", 0) for r in records], float)
        hours = np.array([r.get("duration_ms", 0) / 3.6e6 for r in records], float)
        before = tokens[0] * self._steps[0] if records else 0.0
        self._done = {
            "tokens": before + np.concatenate(([0.0], np.cumsum(tokens))),
            "hours": np.concatenate(([0.0], np.cumsum(hours))),
        }

    def x(self, records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        """The position of each record by axis; one that a step has written is at its end."""
        steps = np.array([r["step"] for r in records], int)
        of_step = [is_undone(r, r["step"]) for r in records]
        made = np.searchsorted(self._steps, steps + np.array(of_step, int), "left")
        return {"step": steps.astype(float)} | {n: done[made] for n, done in self._done.items()}


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of their steps; of several of a step the last one counts."""
    found = {r["step"]: r for r in records}
    return [found[step] for step in sorted(found)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _rate(r: dict[str, Any]) -> float | None:
    ms = r.get("duration_ms")
    return 1000 * r["step_tokens"] / ms if ms and "step_tokens" in r else None


def series_of(records: list[dict[str, Any]]) -> list[Series]:
    """All that a log has to show, in the order of the panels. records: of read_log."""
    by_log: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        by_log.setdefault(r["log"], []).append(r)
    steps = _by_step(by_log.get("step", []))
    clock, found = _Clock(steps), []

    def add(panel: str, label: str, of: list[dict], y: list[Any], **drawn: bool) -> None:
        values = np.array([_number(value) for value in y], float)
        if len(values) and (panel == LOSS or np.isfinite(values).any()):
            drawn["points"] = drawn.get("points", False) or len(values) == 1
            found.append(Series(panel, label, clock.x(of), values, **drawn))

    def add_named(of: list[dict], panel: Callable[[dict], str], value: str, label: str) -> None:
        """One series for each panel and name of these records."""
        for key in dict.fromkeys((panel(r), r.get("name")) for r in of):
            own = _by_step(r for r in of if (panel(r), r.get("name")) == key)
            named = " ".join(filter(None, (label, key[1])))
            add(key[0], named, own, [r.get(value) for r in own], points=True)

    for panel, value in _OF_STEP.items():
        add(panel, "training", steps, [value(r) for r in steps], smooth=panel in _SMOOTH)
        if panel == LOSS:
            add_named(by_log.get("eval", []), lambda _: LOSS, "loss", "evaluation")
            add_named(by_log.get("task", []), lambda r: str(r.get("metric")), "value", "")
    for panel, field in _OF_LOSS.items():
        add(panel, "training", steps, [r.get(field) for r in steps], smooth=True)
        of_field = [r for r in by_log.get("eval", []) if field in r]
        add_named(of_field, lambda _, panel=panel: panel, field, "evaluation")
    for panel, (field, unit) in _OF_GPU.items():
        for rank in sorted({r.get("rank", 0) for r in by_log.get("gpu", [])}):
            of_rank = _by_step(r for r in by_log["gpu"] if r.get("rank", 0) == rank)
            of_rank = [r for r in of_rank if r.get(field, -1) != -1]  # the card tells it
            add(panel, f"GPU {rank}", of_rank, [_number(r[field]) / unit for r in of_rank])
    return found
