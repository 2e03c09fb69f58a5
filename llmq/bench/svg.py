"""Pictures in SVG as text: bars, points and heat maps with axes. Sizes are in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

WIDTH = 900
SMALL = 560  # of points and heat maps
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 20, 40  # around what is drawn
LABELS = 380  # of bars
LINE = 20  # of a bar and of a row of a heat map
LETTERS = 52  # of a label
CELL = 92  # width of a heat map's column


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


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One element; `_` in a name stands for `-`, and at its end for nothing."""
    told = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{told}>{content}</{tag}>"


def _shown(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, **attributes: Any) -> str:
    """One line of text."""
    return element("text", escape(content), x=x, y=y, **attributes)


def number(value: float) -> str:
    """For people: 153.1k, 0.25."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers between two others."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def bars(rows: Sequence[Bar | str]) -> str:
    """One below the other, with their spread as a line; a text is a heading."""
    most = max((row.high for row in rows if isinstance(row, Bar)), default=1.0)
    scale = (WIDTH - LABELS - 130) / most
    parts = []
    for place, row in enumerate(rows):
        y = place * LINE
        if isinstance(row, str):
            parts.append(text(0, y + 15, row, class_="head"))
            continue
        short = row.label if len(row.label) <= LETTERS else row.label[: LETTERS - 1] + "…"
        middle = y + LINE / 2
        ends = (LABELS + row.low * scale, LABELS + row.high * scale)
        size = {"x": LABELS, "y": y + 3, "width": row.value * scale, "height": LINE - 6}
        drawn = [
            element("title", escape(f"{row.label}: {row.text}")),
            text(LABELS - 8, y + 15, short, class_="label"),
            element("rect", class_="bar", fill=row.color, **size),
            element("line", class_="spread", x1=ends[0], x2=ends[1], y1=middle, y2=middle),
            text(max(LABELS + row.value * scale, ends[1]) + 6, y + 15, row.text, class_="axis"),
        ]
        parts.append(element("g", "".join(drawn)))
    return _svg(WIDTH, len(rows) * LINE, parts)


def points(found: Sequence[Point], x_name: str, y_name: str, *, diagonal: bool = False) -> str:
    """Both axes begin at 0. diagonal: a line where both are equal, and equal axes."""
    x1 = 1.08 * max(point.x for point in found) or 1.0
    y1 = 1.08 * max(point.y for point in found) or 1.0
    if diagonal:
        x1 = y1 = max(x1, y1)
    height = 400
    right, bottom = SMALL - RIGHT, height - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x1 * (right - LEFT), bottom - y / y1 * (bottom - TOP)

    parts = []
    for x in ticks(0, x1, 6):
        at, _ = place(x, 0)
        parts.append(element("line", class_="grid", x1=at, x2=at, y1=TOP, y2=bottom))
        parts.append(text(at, bottom + 15, number(x), class_="axis", text_anchor="middle"))
    for y in ticks(0, y1, 7):
        _, at = place(0, y)
        parts.append(element("line", class_="grid", x1=LEFT, x2=right, y1=at, y2=at))
        parts.append(text(LEFT - 6, at + 4, number(y), class_="axis", text_anchor="end"))
    parts.append(text(right, height - 6, x_name, class_="axis", text_anchor="end"))
    parts.append(text(4, 11, y_name, class_="axis"))
    if diagonal:
        (xa, ya), (xb, yb) = place(0, 0), place(x1, y1)
        parts.append(element("line", class_="equal", x1=xa, x2=xb, y1=ya, y2=yb))
    for point in found:
        cx, cy = place(point.x, point.y)
        tip = element("title", escape(point.tip))
        parts.append(element("circle", tip, class_="point", cx=cx, cy=cy, r=5, fill=point.color))
    return _svg(SMALL, height, parts)


def heat_map(columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[Cell]]) -> str:
    """cells: by row, then by column. The lightest is the least of them, the darkest the most."""
    values = [cell.value for line in cells for cell in line if cell.value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    left, line = 150, LINE + 8
    parts = [
        text(left + (n + 0.5) * CELL, 15, name[:14], class_="axis", text_anchor="middle")
        for n, name in enumerate(columns)
    ]
    for place, (name, of_row) in enumerate(zip(rows, cells, strict=True)):
        y = LINE + place * line
        parts.append(text(left - 8, y + 18, name[:22], class_="axis", text_anchor="end"))
        for n, cell in enumerate(of_row):
            x, share = left + n * CELL, 0.0
            if cell.value is not None:
                share = (cell.value - low) / (high - low) if high > low else 0.5
            color = "#f4f4f4" if cell.value is None else _blue(share)
            size = {"x": x, "y": y, "width": CELL - 2, "height": line - 2}
            at = {"text_anchor": "middle", "fill": "#fff" if share > 0.6 else "#222"}
            drawn = [
                element("title", escape(cell.tip)),
                element("rect", class_="cell", fill=color, **size),
                text(x + CELL / 2 - 1, y + 18, cell.text, **at),
            ]
            parts.append(element("g", "".join(drawn)))
    return _svg(left + CELL * len(columns), LINE + line * len(rows), parts)


def _blue(share: float) -> str:
    """From light (0) to dark (1)."""
    light, dark = (222, 235, 247), (8, 81, 156)
    mixed = (round(a + share * (b - a)) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _svg(width: float, height: float, parts: list[str]) -> str:
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return element("svg", "\n".join(parts), **size)
