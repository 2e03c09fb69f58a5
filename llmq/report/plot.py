"""Curves of logs over steps, tokens or hours; `llmq plot` draws logs on a page, as a picture or as
HTML."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors, replacing
from llmq.base.run_id import RunId
from llmq.options.loss_params import POLICIES
from llmq.options.option_types import PREFERENCES
from llmq.report.json_log import LogReader, as_written, is_undone, without_undone

SMOOTHING = 0.6  # weight of the previous mean; TensorBoard's default

AXES = {
    "step": "step",
    "tokens": "tokens",
    "hours": "hours of steps, without validations and checkpoints",
}
"""Labels of the possible x-axes."""

LOSS = "loss (nats per token)"
# Panels by title, in order, with the function that reads the panel's number from a `step` record.
_OF_STEP: dict[str, Callable[[dict[str, Any]], float | None]] = {
    LOSS: lambda r: r["loss"],
    "learning rate": lambda r: r.get("lr"),
    "gradient norm": lambda r: r.get("norm"),
    "tokens per second": lambda r: _rate(r),
}
_OF_LOSS = {  # fields that some losses write to `step` and `eval` records
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
    """The points of a run in one panel.

    panel: title of the panel. label: name within the run, such as "evaluation". points: True to
    mark each value. smooth: True to draw the values faintly below their moving mean. x: positions
    F64 (N,) by axis. y: values F64 (N,), NaN where the log has null.
    """

    panel: str
    label: str
    x: dict[str, np.ndarray]
    y: np.ndarray
    points: bool = False
    smooth: bool = False


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log without undone steps; the log may still grow.

    Raises LlmqError for a log that cannot be read or has nothing to plot.
    """
    records = without_undone(LogReader(path).new_records())
    points = [r for r in records if r["log"] in ("step", "eval")]
    if not points:
        raise DataError(f"'{path}' has nothing to plot: no step was made")
    for r in points:
        # A null loss was not finite; a missing loss is an error.
        if not isinstance(r.get("loss", ""), float | int | None):
            raise DataError(
                f"'{path}' is not a log of llmq train: a record of {r['log']} at step {r['step']} "
                f"has loss {r.get('loss')!r}, not a number"
            )
    return records


def smoothed(
    values: np.ndarray, weight: float = SMOOTHING, counts: np.ndarray | None = None
) -> np.ndarray:
    """Return the exponential mean as in TensorBoard, without bias at the start: the first mean is
    the first value.

    values: the logged values, F64 (N,). weight: weight of the previous mean, 0 to below 1. counts:
    number of logged values for which each value stands (default 1). A value that is not finite
    gives NaN and does not enter later means. Returns F64 (N,).
    """
    means, mean, remaining = np.full(len(values), np.nan), 0.0, 1.0
    for index, value in enumerate(values):
        if np.isfinite(value):
            kept = weight ** (1 if counts is None else counts[index])
            remaining *= kept
            mean += (1 - kept) / (1 - remaining) * (value - mean)
            means[index] = mean
    return means


def loss_panel(records: list[dict[str, Any]]) -> str:
    """Return the title of the panel of a run's loss; losses in different units get different
    panels."""
    options = {r.get("name"): r.get("value") for r in records if r["log"] == "option"}
    loss = options.get("loss", "ce")
    if loss in (*PREFERENCES, "kto"):
        return f"{loss} loss (per {'answer' if loss == 'kto' else 'pair'})"
    if loss in ("kd", "weighted"):
        return f"{loss} loss (nats per token)"
    if loss in POLICIES:
        return f"{loss} loss"
    return "loss (nats per document)" if options.get("num-labels", "none") != "none" else LOSS


def _clock(steps: list[dict[str, Any]]) -> Callable[[list[dict[str, Any]]], dict[str, np.ndarray]]:
    """Return a function from records to the records' positions by axis. steps: the log's `step`
    records, in order.

    A record that a step has written lies at the step's end. Steps before the log's first step count
    as many tokens as the first step, and no time.
    """
    numbers = np.array([r["step"] for r in steps], int)
    tokens = np.array([r.get("step_tokens", 0) for r in steps], float)
    hours = np.array([r.get("duration_ms", 0) / 3.6e6 for r in steps], float)
    before = tokens[0] * numbers[0] if steps else 0.0
    sums = {
        "tokens": before + np.concatenate(([0.0], np.cumsum(tokens))),
        "hours": np.concatenate(([0.0], np.cumsum(hours))),
    }

    def x(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        step = np.array([r["step"] for r in records], int)
        of_step = [is_undone(r, r["step"]) for r in records]
        made = np.searchsorted(numbers, step + np.array(of_step, int), "left")
        return {"step": step.astype(float)} | {name: total[made] for name, total in sums.items()}

    return x


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records in the order of steps; of several records of a step, only the last
    counts."""
    found = {r["step"]: r for r in records}
    return [found[step] for step in sorted(found)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _rate(r: dict[str, Any]) -> float | None:
    ms = r.get("duration_ms")
    return 1000 * r["step_tokens"] / ms if ms and "step_tokens" in r else None


def series_of(records: list[dict[str, Any]]) -> list[Series]:
    """Return all series of a log, in the order of panels. records: result of read_log."""
    by_log: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        by_log.setdefault(r["log"], []).append(r)
    steps = _by_step(by_log.get("step", []))
    x, found, loss = _clock(steps), [], loss_panel(records)

    def add(panel: str, label: str, rows: list[dict], y: list[Any], **drawn: bool) -> None:
        values = np.array([_number(value) for value in y], float)
        if len(values) and (panel == loss or np.isfinite(values).any()):
            drawn["points"] = drawn.get("points", False) or len(values) == 1
            found.append(Series(panel, label, x(rows), values, **drawn))

    def add_named(rows: list[dict], panel: Callable[[dict], str], value: str, label: str) -> None:
        """Add a series to the plot for each pair of panel and name in `rows`."""
        for key in dict.fromkeys((panel(r), r.get("name")) for r in rows):
            named_rows = _by_step(r for r in rows if (panel(r), r.get("name")) == key)
            named = " ".join(filter(None, (label, key[1])))
            add(key[0], named, named_rows, [r.get(value) for r in named_rows], points=True)

    for title, value in _OF_STEP.items():
        panel = loss if title == LOSS else title
        add(panel, "training", steps, [value(r) for r in steps], smooth=title in _SMOOTH)
        if title == LOSS:
            add_named(by_log.get("eval", []), lambda _: loss, "loss", "evaluation")
            add_named(by_log.get("task", []), lambda r: str(r.get("metric")), "value", "")
    for panel, field in _OF_LOSS.items():
        add(panel, "training", steps, [r.get(field) for r in steps], smooth=True)
        of_field = [r for r in by_log.get("eval", []) if field in r]
        add_named(of_field, lambda _, panel=panel: panel, field, "evaluation")
    rollouts = _by_step(by_log.get("rollout", []))
    for field in ("reward", "reward_std", "length"):
        add(f"{field} of samples", "rollouts", rollouts, [r.get(field) for r in rollouts])
    for panel, (field, unit) in _OF_GPU.items():
        for rank in sorted({r.get("rank", 0) for r in by_log.get("gpu", [])}):
            of_rank = _by_step(r for r in by_log["gpu"] if r.get("rank", 0) == rank)
            of_rank = [r for r in of_rank if r.get(field, -1) != -1]  # -1: the card cannot tell
            add(panel, f"GPU {rank}", of_rank, [_number(r[field]) / unit for r in of_rank])
    return found


# ------------------------------------------------------------------------------------------------


MAX_POINTS = 3000  # points of a series, more than a screen has columns
TEMPLATE = Path(__file__).with_name("plot.html")
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
COLORS += ("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def thinned(values: np.ndarray) -> np.ndarray:
    """Return indices of the values to draw: all values if few, else the lowest and the highest
    value of each interval."""
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


def _averages(values: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and counts of the finite values between kept indices, both F64."""
    starts = np.concatenate(([0], kept[:-1] + 1))
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(float), starts)
    totals = np.add.reduceat(np.where(finite, values, 0.0), starts)
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan), counts


def _drawn(series: Series, run: str, color: str) -> dict[str, Any]:
    """Return a series as JSON values. If points are left out, the page smooths `averages`, weighted
    by `counts`; if all points are kept, the page smooths `y`."""
    kept = thinned(series.y)
    averages = counts = None
    if series.smooth and len(kept) < len(series.y):
        averages, counts = map(_rounded, _averages(series.y, kept))
    return {
        "panel": series.panel,
        "run": run,
        "label": series.label,
        "color": color,
        "points": series.points,
        "smooth": series.smooth,
        "x": {axis: _rounded(values[kept]) for axis, values in series.x.items()},
        "y": _rounded(series.y[kept]),
        "averages": averages,
        "counts": counts,
    }


def page(runs: dict[str, list[Series]], panels: list[str], x: str, smoothing: float) -> str:
    """Return the HTML page. panels: titles of the panels, in order. x, smoothing: initial settings
    of the page."""
    colors = {run: COLORS[number % len(COLORS)] for number, run in enumerate(runs)}
    data = {
        "x": x,
        "smoothing": smoothing,
        "axes": AXES,
        "panels": panels,
        "runs": colors,
        "series": [_drawn(s, run, colors[run]) for run, of in runs.items() for s in of],
    }
    # `</` and `<!--` would end or hide the script.
    content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("__DATA__", content, 1)


FORMATS = (".png", ".svg", ".pdf", ".html")
COLUMNS = 2  # columns of panels below the loss
MARKERS = "os^Dv*"
RAW_ALPHA = 0.4
LINES = ("-", "--", ":", "-.")
LEGEND_LETTERS = 120  # letters in a legend row of run names

Runs = dict[str, list[Series]]
"""Series by the name of the run."""


def _names(logs: dict[Path, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield a name for each log: its run's name, or the file's stem if two logs share the run's
    name. If two logs also share the stem, the name is the path."""
    stems = [path.stem for path in logs]
    owners = [RunId.of(records[0].get("run")) for records in logs.values()]
    names = [stem if run is None else run.name for run, stem in zip(owners, stems, strict=True)]
    for path, name in zip(logs, names, strict=True):
        if names.count(name) == 1:
            yield name
        else:
            yield path.stem if stems.count(path.stem) == 1 else str(path)


def read_runs(logs: list[Path], x: str) -> Runs:
    """Return the series of each log. Raises DataError if a log cannot be read or lacks this axis,
    ConfigError if a log is given twice."""
    if len(set(logs)) < len(logs):
        raise ConfigError("a log is given twice")
    records, runs = {}, {}
    for path in logs:
        with as_written(path, "a record"):
            records[path] = read_log(path)
    for name, path in zip(_names(records), logs, strict=True):
        with as_written(path, "a record"):
            runs[name] = series_of(records[path])
        if not any(series.x[x].any() for series in runs[name]) and x != "step":
            raise DataError(f"--x {x}: '{path}' does not say how many {x} its steps took")
    return runs


def panels_of(runs: Runs) -> list[str]:
    """Return the titles of all panels, losses first."""
    orders = [list(dict.fromkeys(s.panel for s in series)) for series in runs.values()]
    most = max(orders, key=len)
    losses = [order[0] for order in orders if order]  # `series_of` begins with the loss
    return list(dict.fromkeys((*losses, *most, *(p for order in orders for p in order))))


def _escaped(name: str) -> str:
    """Return a label in which matplotlib gives no meaning to `$` and a leading `_`."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _draw(axes: Any, runs: Runs, panel: str, x: str, smoothing: float) -> None:
    """Draw a panel of the picture. Each run has a color, each label a marker or line style; smooth
    series are also drawn faintly without smoothing."""
    labels = list(dict.fromkeys(s.label for of in runs.values() for s in of if s.panel == panel))
    handles = {}
    for number, all_series in enumerate(runs.values()):
        for series in (s for s in all_series if s.panel == panel):
            nth = labels.index(series.label)
            style = {"color": COLORS[number % len(COLORS)], "linestyle": LINES[nth % len(LINES)]}
            if series.points:
                style |= {"marker": MARKERS[nth % len(MARKERS)], "linestyle": "--", "markersize": 4}
            if series.smooth:
                faint = style | {"alpha": RAW_ALPHA, "linewidth": 1.0}
                axes.plot(series.x[x], series.y, **faint)
            drawn = smoothed(series.y, smoothing) if series.smooth else series.y
            (line,) = axes.plot(series.x[x], drawn, **style)
            handles[series.label] = copy(line)
            handles[series.label].set_color("#444")  # a color of no run
    axes.set_title(_escaped(panel), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.ticklabel_format(useOffset=False)
    axes.set_xlabel(AXES[x], fontsize="small")
    if len(labels) > 1:
        axes.legend(
            [handles[label] for label in labels],
            map(_escaped, labels),
            loc="upper left",
            bbox_to_anchor=(1, 1),
            fontsize="small",
            frameon=False,
        )


def _places(grid: Any, count: int) -> list[Any]:
    """Return the grid cells of the panels. The first panel takes a whole row. If the other panels
    do not fill the last row, the last panel takes this row."""
    places = [grid[0, :], *(grid[1 + n // COLUMNS, n % COLUMNS] for n in range(count - 1))]
    if (count - 1) % COLUMNS:
        places[-1] = grid[-1, :]
    return places


def figure_of(runs: Runs, x: str, smoothing: float = SMOOTHING) -> Any:
    """Return the matplotlib Figure of all panels: the loss over the whole width, other panels below
    the loss, run names at the top."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = panels_of(runs)
    rows = -(-(len(panels) - 1) // COLUMNS)
    figure = Figure(figsize=(10, 5 + 2.5 * rows), dpi=100, layout="constrained")
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=[2, *[1] * rows])
    for panel, place in zip(panels, _places(grid, len(panels)), strict=True):
        _draw(figure.add_subplot(place), runs, panel, x, smoothing)
    patches = [Patch(color=COLORS[n % len(COLORS)]) for n in range(len(runs))]
    columns = max(1, LEGEND_LETTERS // (6 + max(map(len, runs))))
    names = [_escaped(name) for name in runs]
    figure.legend(patches, names, loc="outside upper center", ncols=min(columns, len(runs)))
    return figure


def output(out: Path | None, html: bool, overwrite: bool = False) -> Path:
    """Return the path to write. Without a name, return the first free default, or with `overwrite`
    the default itself.

    Raises ConfigError for an unknown suffix, for a picture with `html`, and for an existing file
    without `overwrite`.
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
    smoothing: float = SMOOTHING,
) -> None:
    """Draw the curves of logs: losses, evaluations, tasks, learning rate, norm, speed, GPUs.

    out: path with a suffix of FORMATS; None: loss.png, or loss.html with `html`, with a number
    added if the file exists. x: one of AXES. overwrite: True to replace an existing file.
    smoothing: weight of `smoothed`.
    """
    if x not in AXES:
        raise ConfigError(f"--x: expected {' or '.join(AXES)}, got {x!r}")
    out = output(out, html, overwrite)
    runs = read_runs(logs, x)
    kind = out.suffix[1:].lower()
    figure = None if kind == "html" else figure_of(runs, x, smoothing)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        if figure is None:
            file.write(page(runs, panels_of(runs), x, smoothing).encode())
        else:
            figure.savefig(file, format=kind)
    print(f"wrote {out}")
