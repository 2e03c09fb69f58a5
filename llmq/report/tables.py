"""Tables: the same head and rows for a terminal, in Markdown and CSV.

Cells are shown as `str` shows them. No text has a newline at its end but that of CSV.
"""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Cells = Sequence[Any]


def markdown_table(head: Sequence[str], rows: Iterable[Cells]) -> str:
    """Nothing at all where there are no rows."""
    rows = list(rows)
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def labelled(facts: Mapping[str, str | None], width: int) -> list[str]:
    """Lines of a terminal, "  Name:   fact", without those that are None. width: of a name, its
    colon and the blanks behind it."""
    return [f"  {name + ':':{width}}{fact}" for name, fact in facts.items() if fact is not None]


def csv_table(head: Sequence[str], rows: Iterable[Cells]) -> str:
    """True and false are spelled as in option files, and None is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow([str(c).lower() if isinstance(c, bool) else c for c in row])
    return file.getvalue()


def terminal_table(
    head: Sequence[str], rows: Iterable[Cells], *, right: Collection[int] = (), indent: int = 0
) -> str:
    """Columns that rich has aligned, two blanks apart. They are never cut to the terminal's width:
    a program that reads them finds them whole.

    right: places of columns whose cells stand at the right. indent: blanks before each line.
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
