"""Tables of a head and rows: for a terminal, in Markdown and in CSV.

`str` gives the text of a cell. Only CSV text ends with a newline.
"""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Cells = Sequence[Any]


def markdown_table(head: Sequence[str], rows: Iterable[Cells]) -> str:
    """Return a Markdown table; "" without rows."""
    rows = list(rows)
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def labelled(facts: Mapping[str, str | None], width: int) -> list[str]:
    """Return terminal lines " Name: fact"; facts that are None are left out. width: characters of
    name, colon and blanks."""
    return [f"  {name + ':':{width}}{fact}" for name, fact in facts.items() if fact is not None]


def csv_table(head: Sequence[str], rows: Iterable[Cells]) -> str:
    """Return CSV text. Booleans are spelled as in option files; None gives an empty cell."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow([str(c).lower() if isinstance(c, bool) else c for c in row])
    return file.getvalue()


def terminal_table(
    head: Sequence[str], rows: Iterable[Cells], *, right: Collection[int] = (), indent: int = 0
) -> str:
    """Return a table that rich has aligned, with columns two blanks apart. Lines are never cut to
    the terminal's width, because programs read them.

    right: indices of right-aligned columns. indent: blanks before each line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for place, name in enumerate(head):
        at = "right" if place in right else "left"
        drawn.add_column(Text(name), justify=at, no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    file = io.StringIO()
    Console(file=file, width=100_000, color_system=None, legacy_windows=False).print(drawn)
    return "\n".join(" " * indent + line.rstrip() for line in file.getvalue().splitlines())
