"""The page of `llmq plot --html`: numbers and what draws them in one file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from llmq.report.curves import AXES, Series, smoothed

MAX_POINTS = 3000  # of a series: more than a screen has columns
TEMPLATE = Path(__file__).with_name("plot.html")
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
COLORS += ("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def thinned(values: np.ndarray) -> np.ndarray:
    """The indices of many values to keep: of neighbours the lowest and the highest; all if few."""
    count = len(values)
    if count <= MAX_POINTS:
        return np.arange(count)
    edges = np.linspace(0, count, MAX_POINTS // 2 + 1).astype(int)
    kept = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        part = values[start:stop]
        if np.isfinite(part).any():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in values]


def _drawn(series: Series, run: str, color: str) -> dict[str, Any]:
    """In JSON's types: `mean` is drawn where the series is smooth, `y` faintly below it."""
    kept = thinned(series.y)
    return {
        "panel": series.panel,
        "run": run,
        "label": series.label,
        "color": color,
        "points": series.points,
        "x": {axis: _rounded(values[kept]) for axis, values in series.x.items()},
        "y": _rounded(series.y[kept]),
        "mean": _rounded(smoothed(series.y)[kept]) if series.smooth else None,
    }


def page(runs: dict[str, list[Series]], panels: list[str], x: str) -> str:
    """The whole page. panels: titles in order. x: the axis that it begins with."""
    colors = {run: COLORS[number % len(COLORS)] for number, run in enumerate(runs)}
    data = {
        "x": x,
        "axes": AXES,
        "panels": panels,
        "runs": colors,
        "series": [_drawn(s, run, colors[run]) for run, of in runs.items() for s in of],
    }
    # In a script, `</` and `<!--` would end it or hide it.
    content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("__DATA__", content, 1)
