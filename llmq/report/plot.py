"""`llmq plot`: the curves of one or more logs on one page, as a picture or in HTML."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors, replacing
from llmq.report.curves import AXES, LOSS, Series, read_log, series_of, smoothed

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


FORMATS = (".png", ".svg", ".pdf", ".html")
COLUMNS = 2  # of the panels below the loss
MARKERS = "os^Dv*"

Runs = dict[str, list[Series]]
"""The records that are drawn, by the name of the run."""


def _names(logs: list[Path]) -> Iterator[str]:
    """A name for each log: that of the file, with its folder where two are the same."""
    stems = [path.stem for path in logs]
    for path, stem in zip(logs, stems, strict=True):
        yield stem if stems.count(stem) == 1 else str(path)


def read_runs(logs: list[Path], x: str) -> Runs:
    """The series of each log. DataError if one cannot be read, or does not have this axis."""
    if len(set(logs)) < len(logs):
        raise ConfigError("a log is given twice")
    runs = {}
    for name, path in zip(_names(logs), logs, strict=True):
        try:
            runs[name] = series_of(read_log(path))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:100]
            raise DataError(
                f"'{path}' is not a log of llmq train: a record is not as llmq writes it ({reason})"
            ) from error
        if not any(series.x[x].any() for series in runs[name]) and x != "step":
            raise DataError(f"--x {x}: '{path}' does not say how many {x} its steps took")
    return runs


def panels_of(runs: Runs) -> list[str]:
    """Their titles, the loss first; each kind of number that a log has brings its own."""
    orders = [list(dict.fromkeys(s.panel for s in series)) for series in runs.values()]
    most = max(orders, key=len)
    return [*most, *dict.fromkeys(p for order in orders for p in order if p not in most)]


def _escaped(name: str) -> str:
    """A label in which matplotlib gives `$` and a first `_` no meaning."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _draw(axes: Any, runs: Runs, panel: str, x: str) -> None:
    """One panel: what is smoothed also faintly as it was."""
    for number, (name, all_series) in enumerate(runs.items()):
        color = f"C{number % 10}"  # matplotlib's names of its ten colours
        for nth, series in enumerate(s for s in all_series if s.panel == panel):
            label = _escaped(name)
            if series.points or panel == LOSS:
                label = _escaped(f"{name}: {series.label}")
            if series.points:
                style = f"{MARKERS[nth % len(MARKERS)]}--"
                axes.plot(series.x[x], series.y, style, color=color, label=label, markersize=4)
                continue
            if series.smooth:
                axes.plot(series.x[x], series.y, color=color, alpha=0.25, linewidth=0.8)
            drawn = smoothed(series.y) if series.smooth else series.y
            axes.plot(series.x[x], drawn, color=color, label=label if nth == 0 else None)
    axes.set_title(_escaped(panel), fontsize="medium")
    axes.grid(alpha=0.3)


def figure_of(runs: Runs, x: str) -> Any:
    """All panels on one page: the loss over the whole width, the others below it."""
    from matplotlib.figure import Figure

    first, *others = panels_of(runs)
    rows = -(-len(others) // COLUMNS)
    figure = Figure(figsize=(10, 5 + 2.5 * rows), dpi=100, layout="constrained")
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=[2, *[1] * rows])
    places = [grid[0, :], *(grid[1 + n // COLUMNS, n % COLUMNS] for n in range(len(others)))]
    for panel, place in zip((first, *others), places, strict=True):
        axes = figure.add_subplot(place)
        _draw(axes, runs, panel, x)
        axes.set_xlabel(AXES[x], fontsize="small")
        labels = axes.get_legend_handles_labels()[1]
        if panel == first or any(": " in label for label in labels):
            axes.legend(fontsize="small")
    return figure


def output(out: Path | None, html: bool, overwrite: bool = False) -> Path:
    """The file to write; without a name one that is not there, or that may be overwritten.

    ConfigError for an unknown kind, a picture where a page is wanted, and a file that is there.
    """
    if out is None:
        suffix = "html" if html else "png"
        others = (f"loss-{number}.{suffix}" for number in itertools.count(2))
        names = map(Path, itertools.chain([f"loss.{suffix}"], others))
        return next(path for path in names if overwrite or not os.path.lexists(path))
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out: '{out}' must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if html and out.suffix.lower() != ".html":
        raise ConfigError(f"--html: writes a page, but --out '{out}' is a picture: leave one out")
    if out.is_file() and not overwrite:
        raise ConfigError(f"--out: '{out}' is there already: add --overwrite, or give another name")
    return out


def run_plot(
    logs: list[Path],
    out: Path | None = None,
    x: str = "step",
    html: bool = False,
    overwrite: bool = False,
) -> None:
    """Draw what the logs have: losses, evaluations, tasks, learning rate, norm, speed, GPUs.

    out: by its suffix one of FORMATS; None: loss.png, or loss.html with `html`, or with a
    number if that is there. x: of AXES. overwrite: what is there.
    """
    if x not in AXES:
        raise ConfigError(f"--x: expected {' or '.join(AXES)}, got {x!r}")
    out = output(out, html, overwrite)
    runs = read_runs(logs, x)
    kind = out.suffix[1:].lower()
    figure = None if kind == "html" else figure_of(runs, x)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        if figure is None:
            file.write(page(runs, panels_of(runs), x).encode())
        else:
            figure.savefig(file, format=kind)
    print(f"wrote {out}")
