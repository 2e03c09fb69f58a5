"""The page of a sweep: curves and heat maps of its speeds, SVG of matplotlib in one file that loads
nothing and runs nothing. The mouse on a point or a cell shows a <title>."""

import io
import itertools
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple
from xml.etree import ElementTree

from llmq.base.console import printable
from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError
from llmq.bench.report import full_title, shared_flags
from llmq.bench.sweep_file import value_of
from llmq.report.plot import COLORS

WIDTH = 560  # pixels, as all sizes here
LINE = 20  # above cells
CELL = (92, 28)
_INCH = 96  # pixels of a browser
_SVG = "http://www.w3.org/2000/svg"
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "llmq", "text.parse_math": False, "font.size": 9}


def number(value: float, _place: int = 0) -> str:
    """For people and for axes: 153.1k, 0.25."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


class Cell(NamedTuple):
    """value: by which it is coloured; None: nothing was measured there."""

    value: float | None
    text: str
    tip: str


def heat_map(columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[Cell]]) -> str:
    """cells: by row, then by column. The lightest is the least of them, the darkest the most."""
    values = [cell.value for line in cells for cell in line if cell.value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)

    def draw(axes: Any, tips: _Tips) -> None:
        from matplotlib import colormaps
        from matplotlib.patches import Rectangle

        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        axes.set_xticks([n + 0.5 for n in range(len(columns))], [_shown(n[:14]) for n in columns])
        axes.set_yticks([n + 0.5 for n in range(len(rows))], [_shown(name[:22]) for name in rows])
        axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
        for y, of_row in enumerate(cells):
            for x, cell in enumerate(of_row):
                color, share = "#f4f4f4", 0.0
                if cell.value is not None:
                    share = (cell.value - low) / (high - low) if high > low else 0.5
                    color = colormaps["Blues"](0.1 + 0.8 * share)
                box = axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white"))
                tips.add(box, "cell", cell.tip)
                middle = {
                    "ha": "center",
                    "va": "center",
                    "color": "#fff" if share > 0.6 else "#222",
                }
                axes.text(x + 0.5, y + 0.5, _shown(cell.text), **middle)

    size = (150 + CELL[0] * len(columns), LINE + CELL[1] * len(rows))
    return _picture(size, (150, 0, 0, LINE), draw)


class _Tips:
    """The texts that parts of a picture show, and their classes."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[str, str]] = {}

    def add(self, artist: Any, kind: str, text: str) -> None:
        name = f"{kind}-{len(self.by_id)}"
        artist.set_gid(name)
        self.by_id[name] = kind, _shown(text)


def _shown(text: str) -> str:
    """Without what XML and fonts know nothing of: control characters, half characters."""
    return printable(text).encode(errors="backslashreplace").decode()


def _picture(
    size: tuple[float, float],
    margins: tuple[float, float, float, float],
    draw: Callable[[Any, _Tips], None],
) -> str:
    """An <svg> for HTML. size: width, height; margins around the axes: left, below, right, above.

    draw: onto the axes of matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    (width, height), (left, below, right, above) = size, margins
    tips, file = _Tips(), io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(width / _INCH, height / _INCH))
        place = (left, below, width - left - right, height - below - above)
        draw(figure.add_axes([x / size[n % 2] for n, x in enumerate(place)]), tips)
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        kind, text = tips.by_id.get(element.get("id", ""), ("", ""))
        if kind:
            del element.attrib["id"]  # the page has several pictures
            element.set("class", kind)
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = text
            element.insert(0, title)
    # In HTML no other prefixes mean anything.
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


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
    shared, sections = shared_flags(runs) if runs else {}, []
    if measured:
        models = dict.fromkeys(run["model"] for run in measured)
        colors = {model: COLORS[n % len(COLORS)] for n, model in enumerate(models)}
        drawn = _points(measured, shared, colors, _gib, "memory, GiB", "{:.2f} GiB".format)
        sections.append(("memory", "Speed against memory", drawn))
        predicted = [run for run in measured if run["result"].get("predicted")]
        if predicted:
            drawn = _points(predicted, shared, colors, lambda run: run["result"]["predicted"])
            sections.append(("predicted", "Measured against predicted", drawn))
        sections += _heat_maps(runs, list(models))
    body = [
        f'<section id="{name}"><h2>{escape(title)}</h2>\n{content}</section>'
        for name, title, content in sections
    ]
    machine = report["machine"]
    title = "llmq bench" if machine is None else f"llmq bench: {machine['device']}"
    return _PAGE.format(title=escape(title), body="\n".join(body))


def _gib(run: Run) -> float:
    memory = run["result"]["memory"]
    return (memory["used"] or memory["planned"]) / GIB


def _points(
    runs: Sequence[Run],
    shared: dict[str, str],
    colors: dict[str, str],
    x_of: Callable[[Run], float],
    x_name: str = "",
    told: Callable[[float], str] | None = None,
) -> str:
    """Speeds against a number of the runs; both axes begin at 0. told: that number for people;
    None: it is a predicted speed, and there is a line where both are equal."""
    found = [(x_of(run), run["result"]["tokens_per_second"], run) for run in runs]
    ends = [1.08 * max(values) or 1.0 for values in list(zip(*found, strict=True))[:2]]
    ends = ends if told else [max(ends)] * 2

    def draw(axes: Any, tips: _Tips) -> None:
        names = (x_name, SPEED) if told else (f"predicted {SPEED}", f"measured {SPEED}")
        axes.set(xlim=(0, ends[0]), ylim=(0, ends[1]), xlabel=names[0], ylabel=names[1])
        axes.grid(color="#ddd")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(number)
        if not told:
            (line,) = axes.plot([0, ends[0]], [0, ends[1]], "--", color="#999")
            tips.add(line, "equal", "equal")
        for x, speed, run in found:
            (dot,) = axes.plot(x, speed, "o", color=colors[run["model"]], clip_on=False)
            behind = told(x) if told else f"predicted {number(x)} ({x / speed - 1:+.1%})"
            tips.add(dot, "point", f"{full_title(run, shared)}: {number(speed)}, {behind}")

    entries = [f'<span style="color:{c}">■ {escape(m)}</span>' for m, c in colors.items()]
    return f"<p>{' '.join(entries)}</p>" + _picture((WIDTH, 400), (70, 40, 16, 12), draw)


# ------------------------------------------------------------------------------------------------
# Heat maps


def _heat_maps(runs: Sequence[Run], models: Sequence[str]) -> list[tuple[str, str, str]]:
    """Maps of each model, for pairs of options that take several values; the best of all other
    options counts."""
    found = []
    for model in models:
        of_model = [run for run in runs if run["model"] == model]
        options = dict.fromkeys(itertools.chain(*(run["options"] for run in of_model)))
        values = {n: [_value(run, n) for run in of_model] for n in options if n != "model"}
        several = [name for name, taken in values.items() if len({*taken}) > 1]
        pairs = itertools.combinations(several, 2)
        pairs = [p for p in pairs if len({*zip(*(values[n] for n in p), strict=True)}) > 3]
        for one, other in pairs[:HEAT_MAPS]:
            title = f"{model}: best {SPEED} by --{one} (columns) and --{other} (rows)"
            columns, rows = _in_order(values[one]), _in_order(values[other])
            at: dict[tuple[str, str], list[Run]] = {}
            for run, *place in zip(of_model, values[one], values[other], strict=True):
                at.setdefault(tuple(place), []).append(run)
            cells = [[_cell(at.get((x, y), [])) for x in columns] for y in rows]
            found.append((f"heat-{len(found)}", title, heat_map(columns, rows, cells)))
    return found


def _value(run: Run, name: str) -> str:
    """A value as an option file has it."""
    try:
        value = value_of(run["options"], name)
    except (KeyError, ConfigError):  # of another version
        value = run["options"].get(name, "default")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_order(values: Sequence[str]) -> list[str]:
    """Each once: numbers by size, others as they come."""
    once = dict.fromkeys(values)
    try:
        return sorted(once, key=float)
    except ValueError:
        return list(once)


def _cell(runs: Sequence[Run]) -> Cell:
    """The fastest of these runs, or why there is none."""
    ok = [run for run in runs if run["status"] == "ok"]
    if not ok:
        why = ", ".join(dict.fromkeys(run["status"] for run in runs))
        return Cell(None, "✗" if runs else "", why or "no run")
    best = max(ok, key=lambda run: run["result"]["tokens_per_second"])
    speed = best["result"]["tokens_per_second"]
    return Cell(speed, number(speed), full_title(best, {}))
