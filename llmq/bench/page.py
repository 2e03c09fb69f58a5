"""The page of a sweep: its speeds as pictures, in one file that loads nothing and runs nothing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError
from llmq.bench.pictures import Bar, Cell, Point, bars, heat_map, number, points
from llmq.bench.report import full_title, shared_flags, table_of
from llmq.bench.sweep_file import value_of
from llmq.report.plot_html import COLORS
from llmq.report.tables import Html

HEAT_MAPS = 6  # of one model
SPEED = "tokens per second"

_PAGE = """\
<!DOCTYPE html>
<!-- Written by `llmq bench`. It loads nothing, and runs nothing. -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'">
<title>llmq bench</title>
<style>
  body {{ font: 13px system-ui, sans-serif; margin: 12px; color: #222; background: #fff; }}
  h1 {{ font-size: 16px; }}
  h2 {{ font-size: 13px; margin: 18px 0 4px; }}
  svg {{ display: block; max-width: 100%; height: auto; }}
  table {{ border-collapse: collapse; }}
  th, td {{ padding: 2px 8px; border: 1px solid #ddd; text-align: left; }}
  pre {{ white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""

Run = dict[str, Any]


def page(report: dict[str, Any]) -> str:
    """The whole page: sections that have nothing to show are left out."""
    runs = report["runs"]
    measured = [run for run in runs if run["status"] == "ok"]
    sections = []
    if measured:
        shared = shared_flags(runs)
        models = dict.fromkeys(run["model"] for run in measured)
        colors = {model: COLORS[n % len(COLORS)] for n, model in enumerate(models)}
        what = f"{SPEED}, median of the repeats; the line: from their least to their most"
        sections.append(("speed", f"Speed: {what}", _speeds(measured, colors)))
        sections.append(("memory", "Speed against memory", _memory(measured, shared, colors)))
        predicted = [run for run in measured if run["result"].get("predicted")]
        if predicted:
            drawn = _predicted(predicted, shared, colors)
            sections.append(("predicted", "Measured against predicted", drawn))
        sections += _heat_maps(runs, list(models))
        sections.append(("table", "Table", Html().table(*table_of(report))))
    if missing := [run for run in runs if run["status"] != "ok"]:
        sections.append(("missing", "Without a speed", _missing(missing, shared_flags(runs))))
    sections.append(("commands", "Commands", _commands(report)))
    body = [
        f'<section id="{name}"><h2>{escape(title)}</h2>\n{content}</section>'
        for name, title, content in sections
    ]
    machine = report["machine"]
    title = "llmq bench" if machine is None else f"llmq bench: {machine['device']}"
    return _PAGE.format(title=escape(title), body="\n".join(body))


def _text(lines: Sequence[str]) -> str:
    return "<pre>" + escape("\n".join(lines)) + "</pre>"


def _commands(report: dict[str, Any]) -> str:
    lines = [f"{i['command']}  ({i['date']})" for i in report["invocations"]]
    if left := report.get("left"):
        lines.append(f"{left} runs are still to be made")
    return _text(lines)


def _speeds(runs: Sequence[Run], colors: dict[str, str]) -> str:
    """Bars, those of a model together, with the flags in which they differ."""
    rows: list[Bar | str] = []
    for model, color in colors.items():
        rows.append(model)
        of_model = [run for run in runs if run["model"] == model]
        shared = shared_flags(of_model)
        for run in of_model:
            result = run["result"]
            tokens = result["tokens_per_second"] * statistics.median(result["step_seconds"])
            speeds = [tokens / seconds for seconds in result["step_seconds"]]
            told = f"{number(result['tokens_per_second'])} ± {result['spread']:.1%}"
            label = full_title(run, shared).removeprefix(f"{model} ")
            spread = (min(speeds), max(speeds))
            rows.append(Bar(label, result["tokens_per_second"], *spread, told, color))
    return bars(rows)


def _memory(runs: Sequence[Run], shared: dict[str, str], colors: dict[str, str]) -> str:
    found = []
    for run in runs:
        memory = run["result"]["memory"]
        size = (memory["used"] or memory["planned"]) / GIB
        speed = run["result"]["tokens_per_second"]
        tip = f"{full_title(run, shared)}: {number(speed)}, {size:.2f} GiB"
        found.append(Point(size, speed, colors[run["model"]], tip))
    return _legend(colors) + points(found, "memory, GiB", SPEED)


def _predicted(runs: Sequence[Run], shared: dict[str, str], colors: dict[str, str]) -> str:
    found = []
    for run in runs:
        guess, speed = run["result"]["predicted"], run["result"]["tokens_per_second"]
        told = f"{number(speed)}, predicted {number(guess)} ({guess / speed - 1:+.1%})"
        tip = f"{full_title(run, shared)}: {told}"
        found.append(Point(guess, speed, colors[run["model"]], tip))
    drawn = points(found, f"predicted {SPEED}", f"measured {SPEED}", diagonal=True)
    return _legend(colors) + drawn


def _legend(colors: dict[str, str]) -> str:
    entries = [f'<span style="color:{c}">■ {escape(m)}</span>' for m, c in colors.items()]
    return f"<p>{' '.join(entries)}</p>"


def _missing(runs: Sequence[Run], shared: dict[str, str]) -> str:
    lines = [f"{full_title(run, shared)}: {run['status']}: {run['message']}" for run in runs]
    return _text(lines)


# ------------------------------------------------------------------------------------------------
# Heat maps


def _heat_maps(runs: Sequence[Run], models: Sequence[str]) -> list[tuple[str, str, str]]:
    """Maps of each model, for pairs of options that take several values; the best of all other
    options counts."""
    found = []
    for model in models:
        of_model = [run for run in runs if run["model"] == model]
        names = dict.fromkeys(itertools.chain(*(run["options"] for run in of_model)))
        several = [n for n in names if n != "model" and len(_values(of_model, n)) > 1]
        pairs = [p for p in itertools.combinations(several, 2) if len(_used(of_model, p)) > 3]
        for one, other in pairs[:HEAT_MAPS]:
            title = f"{model}: best {SPEED} by --{one} (columns) and --{other} (rows)"
            place = f"heat-{len(found)}"
            found.append((place, title, _heat_map(of_model, one, other)))
    return found


def _used(runs: Sequence[Run], names: tuple[str, str]) -> set[tuple[str, ...]]:
    """The pairs of values that these two options take."""
    return {tuple(_value(run, name) for name in names) for run in runs}


def _value(run: Run, name: str) -> str:
    """A value as an option file has it."""
    try:
        value = value_of(run["options"], name)
    except (KeyError, ConfigError):  # of another version
        value = run["options"].get(name, "default")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(runs: Sequence[Run], name: str) -> list[str]:
    """All that an option takes: numbers by size, others as they come."""
    values = dict.fromkeys(_value(run, name) for run in runs)
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def _heat_map(runs: Sequence[Run], one: str, other: str) -> str:
    columns, rows = _values(runs, one), _values(runs, other)
    cells = [[_cell(runs, {one: x, other: y}) for x in columns] for y in rows]
    return heat_map(columns, rows, cells)


def _cell(runs: Sequence[Run], values: dict[str, str]) -> Cell:
    """The fastest of the runs with these values, or why there is none."""
    here = [run for run in runs if all(_value(run, n) == v for n, v in values.items())]
    ok = [run for run in here if run["status"] == "ok"]
    if not ok:
        why = ", ".join(dict.fromkeys(run["status"] for run in here))
        return Cell(None, "✗" if here else "", why or "no run")
    best = max(ok, key=lambda run: run["result"]["tokens_per_second"])
    speed = best["result"]["tokens_per_second"]
    return Cell(speed, number(speed), full_title(best, {}))
