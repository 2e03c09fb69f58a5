"""Tables: the same head and rows for a terminal, in Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

Cells = Sequence[Any]


class TableSink(Protocol):
    """A function that makes text of a table."""

    def table(self, head: Sequence[str], rows: Iterable[Cells]) -> str:
        """The text. Cells are shown as `str` shows them."""


class Markdown:
    """Without a newline at the end, and nothing at all where there are no rows."""

    def table(self, head: Sequence[str], rows: Iterable[Cells]) -> str:
        rows = list(rows)
        lines = [head, ["---"] * len(head), *rows] if rows else []
        return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


class Csv:
    """True and false are spelled as in option files, and None is empty."""

    def table(self, head: Sequence[str], rows: Iterable[Cells]) -> str:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for row in rows:
            writer.writerow([str(c).lower() if isinstance(c, bool) else c for c in row])
        return file.getvalue()


class Html:
    """A <table>."""

    def table(self, head: Sequence[str], rows: Iterable[Cells]) -> str:
        lines = [self._line("th", head), *(self._line("td", row) for row in rows)]
        return "<table>\n" + "\n".join(lines) + "\n</table>"

    @staticmethod
    def _line(tag: str, cells: Cells) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


@dataclass(frozen=True, slots=True)
class Terminal:
    """Columns that rich has aligned, two blanks apart, without a newline at the end. They are never
    cut to the terminal's width: a program that reads them finds them whole.

    right: places of columns whose cells stand at the right. indent: blanks before each line.
    """

    right: Collection[int] = ()
    indent: int = 0

    def table(self, head: Sequence[str], rows: Iterable[Cells]) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for place, name in enumerate(head):
            at = "right" if place in self.right else "left"
            drawn.add_column(Text(name), justify=at, no_wrap=True)
        for row in rows:
            drawn.add_row(*(Text(str(cell)) for cell in row))
        file = io.StringIO()
        Console(file=file, width=100_000, color_system=None, legacy_windows=False).print(drawn)
        lines = file.getvalue().splitlines()
        return "\n".join(" " * self.indent + line.rstrip() for line in lines)
