"""Plots of a sweep: tokens/s against memory, and a heat map for each pair of options."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmq.base.console import printable
from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError
from llmq.bench.sweep_file import value_of
from llmq.report.plot import COLORS

HEAT_MAPS = 6  # most heat maps for a model
SPEED = "tokens per second"
CELL = 0.36  # height of a heat map's row in inches
LETTERS = 22  # longest name of a row or column, in characters
Run = dict[str, Any]


class HeatMap(NamedTuple):
    """The highest speed, in tokens per second, for each pair of values of two options. speeds: None
    if nothing was measured. tried: True for pairs with a run, even if the run failed or did not
    fit."""

    title: str
    columns: list[str]
    rows: list[str]
    speeds: list[list[float | None]]
    tried: list[list[bool]]


def number(value: float, _place: int = 0) -> str:
    """Return a number as text for console and axes: 153.1k, 0.25."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def figure_of(report: dict[str, Any]) -> Any:
    """Return the picture of a report as a matplotlib Figure; None if nothing was measured."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = report["runs"]
    measured = [run for run in runs if run["status"] == "ok"]
    if not measured:
        return None
    maps = heat_maps(runs, list(dict.fromkeys(run["model"] for run in measured)))
    heights = [4.0, *(0.9 + CELL * len(each.rows) for each in maps)]
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(10, sum(heights)), dpi=100, layout="constrained")
        places = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        _draw_speeds(figure.add_subplot(places[0]), measured)
        for place, each in enumerate(maps, start=1):
            _draw_map(figure.add_subplot(places[place]), each)
    return figure


def _draw_speeds(axes: Any, runs: Sequence[Run]) -> None:
    """Draw speed against memory, in a color for each model; both axes begin at 0."""
    for index, model in enumerate(dict.fromkeys(run["model"] for run in runs)):
        results = [run["result"] for run in runs if run["model"] == model]
        memory = [(r["memory"]["used"] or r["memory"]["planned"]) / GIB for r in results]
        speeds = [result["tokens_per_second"] for result in results]
        axes.plot(memory, speeds, "o", color=COLORS[index % len(COLORS)], label=_shown(model))
    axes.set(xlabel="memory, GiB", ylabel=SPEED)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(number)
    axes.grid(color="#ddd")
    axes.legend()


def _draw_map(axes: Any, heat: HeatMap) -> None:
    """Draw a heat map: the darker a cell, the higher the speed."""
    measured = [speed for line in heat.speeds for speed in line if speed is not None]
    low, high = min(measured, default=0.0), max(measured, default=1.0)
    values = [[low if speed is None else speed for speed in line] for line in heat.speeds]
    hidden = [[float(speed is not None) for speed in line] for line in heat.speeds]
    margin = (high - low or 1.0) / 4
    axes.imshow(
        values, cmap="Blues", vmin=low - margin, vmax=high + margin, alpha=hidden, aspect="auto"
    )
    for y, line in enumerate(heat.speeds):
        for x, speed in enumerate(line):
            text = number(speed) if speed is not None else "✗" if heat.tried[y][x] else ""
            dark = speed is not None and speed > (low + 2 * high) / 3
            axes.text(x, y, text, ha="center", va="center", color="white" if dark else "#222")
    axes.set_xticks(range(len(heat.columns)), [_shown(name) for name in heat.columns])
    axes.set_yticks(range(len(heat.rows)), [_shown(name) for name in heat.rows])
    axes.tick_params(length=0)
    axes.set_title(_shown(heat.title, 200), fontsize="medium")


def _shown(text: str, letters: int = LETTERS) -> str:
    """Return text without characters that fonts lack: control characters and lone surrogates become
    escapes."""
    return printable(text).encode(errors="backslashreplace").decode()[:letters]


# ------------------------------------------------------------------------------------------------
# Heat maps


def heat_maps(runs: Sequence[Run], models: Sequence[str]) -> list[HeatMap]:
    """Return the heat maps of each model, for pairs of options that take several values. A cell
    shows the fastest run over all other options."""
    found = []
    for model in models:
        of_model = [run for run in runs if run["model"] == model]
        options = dict.fromkeys(itertools.chain(*(run["options"] for run in of_model)))
        values = {n: [_value(run, n) for run in of_model] for n in options if n != "model"}
        several = [name for name, taken in values.items() if len({*taken}) > 1]
        pairs = itertools.combinations(several, 2)
        pairs = [p for p in pairs if len({*zip(*(values[n] for n in p), strict=True)}) > 3]
        for one, other in pairs[:HEAT_MAPS]:
            columns, rows = _in_order(values[one]), _in_order(values[other])
            cells: dict[tuple[str, str], list[Run]] = {}
            for run, *place in zip(of_model, values[one], values[other], strict=True):
                cells.setdefault(tuple(place), []).append(run)
            title = f"{model}: best {SPEED} by --{one} (columns) and --{other} (rows)"
            speeds = [[_fastest(cells.get((x, y), [])) for x in columns] for y in rows]
            tried = [[(x, y) in cells for x in columns] for y in rows]
            found.append(HeatMap(title, columns, rows, speeds, tried))
    return found


def _value(run: Run, name: str) -> str:
    """Return an option's value, spelled as in an option file."""
    try:
        value = value_of(run["options"], name)
    except (KeyError, ConfigError):  # only another version knows the option
        value = run["options"].get(name, "default")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_order(values: Sequence[str]) -> list[str]:
    """Return distinct values: numbers ascending, other values in order of appearance."""
    once = dict.fromkeys(values)
    try:
        return sorted(once, key=float)
    except ValueError:
        return list(once)


def _fastest(runs: Sequence[Run]) -> float | None:
    """Return the highest tokens per second of `runs`; None if no run was measured."""
    speeds = [run["result"]["tokens_per_second"] for run in runs if run["status"] == "ok"]
    return max(speeds, default=None)
