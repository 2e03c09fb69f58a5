"""The pictures of a sweep's page: bars, points and heat maps by matplotlib, as SVG in HTML.

The mouse on a bar, a point or a cell shows a <title>, which matplotlib's SVG does not have.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from llmq.base.console import printable

WIDTH = 900  # pixels, as all sizes here
SMALL = 560  # of points
LINE = 20  # of a bar
CELL = (92, 28)
LABELS = 380  # left of bars
LETTERS = 52  # of a label
_INCH = 96  # pixels of a browser
_SVG = "http://www.w3.org/2000/svg"
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "llmq", "text.parse_math": False, "font.size": 9}


class Bar(NamedTuple):
    """value: its length; low, high: of its spread; text: behind it; label: before it."""

    label: str
    value: float
    low: float
    high: float
    text: str
    color: str


class Point(NamedTuple):
    """tip: what it says when the mouse is on it."""

    x: float
    y: float
    color: str
    tip: str


class Cell(NamedTuple):
    """value: by which it is coloured; None: nothing was measured there."""

    value: float | None
    text: str
    tip: str


def number(value: float, _place: int = 0) -> str:
    """For people and for axes: 153.1k, 0.25."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def bars(rows: Sequence[Bar | str]) -> str:
    """One below the other, with their spread as a line; a text is a heading."""
    most = max((row.high for row in rows if isinstance(row, Bar)), default=1.0)

    def draw(axes: Any, tips: _Tips) -> None:
        axes.set(xlim=(0, most), ylim=(len(rows), 0))
        axes.axis("off")
        step = most / (WIDTH - LABELS - 130)  # of a pixel
        for place, row in enumerate(rows):
            at = {"y": place + 0.5, "va": "center"}
            if isinstance(row, str):
                axes.text(-LABELS * step, s=_shown(row), weight="bold", **at)
                continue
            short = row.label if len(row.label) <= LETTERS else row.label[: LETTERS - 1] + "…"
            axes.text(-8 * step, s=_shown(short), ha="right", **at)
            (bar,) = axes.barh(place + 0.5, row.value, 0.7, color=row.color)
            axes.plot([row.low, row.high], [place + 0.5] * 2, color="#222", lw=1.5, clip_on=False)
            axes.text(max(row.value, row.high) + 6 * step, s=_shown(row.text), **at)
            tips.add(bar, "bar", f"{row.label}: {row.text}")

    return _picture((WIDTH, len(rows) * LINE), (LABELS, 0, 130, 0), draw)


def points(found: Sequence[Point], x_name: str, y_name: str, *, diagonal: bool = False) -> str:
    """Both axes begin at 0. diagonal: a line where both are equal, and equal axes."""
    ends = [1.08 * max(values) or 1.0 for values in list(zip(*found, strict=True))[:2]]
    ends = [max(ends)] * 2 if diagonal else ends

    def draw(axes: Any, tips: _Tips) -> None:
        axes.set(xlim=(0, ends[0]), ylim=(0, ends[1]), xlabel=x_name, ylabel=y_name)
        axes.grid(color="#ddd")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(number)
        if diagonal:
            (line,) = axes.plot([0, ends[0]], [0, ends[1]], "--", color="#999")
            tips.add(line, "equal", "equal")
        for point in found:
            (dot,) = axes.plot(point.x, point.y, "o", color=point.color, clip_on=False)
            tips.add(dot, "point", point.tip)

    return _picture((SMALL, 400), (70, 40, 16, 12), draw)


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
