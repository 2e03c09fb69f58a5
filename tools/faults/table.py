"""Tallies as JSON, which later runs add to, and as a table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tools.faults.machine import CATEGORIES, Tally


def merge(path: Path, tally: Tally) -> None:
    """Add a tally to a file; one of the same machine and seed is replaced only by adding up."""
    records = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*records, tally.record()], indent=1) + "\n")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each machine and kind, and one for all of a machine."""
    lines = ["| machine | what | tried | bad | " + " | ".join(CATEGORIES) + " |"]
    lines.append("| --- | --- |" + " --- |" * (2 + len(CATEGORIES)))
    titles = dict.fromkeys(record["title"] for record in records)
    for title in titles:
        tried: Counter[str] = Counter()
        bad: dict[str, Counter[str]] = {}
        for record in records:
            if record["title"] != title:
                continue
            tried.update(record["tried"])
            for kind, counts in record["bad"].items():
                bad.setdefault(kind, Counter()).update(counts)
        total = sum(bad.values(), Counter())
        rows = [(kind, tried[kind], bad[kind]) for kind in sorted(tried)]
        for kind, count, of in [("all", tried.total(), total), *rows]:
            numbers = [count, of["bad"], *(of[category] for category in CATEGORIES)]
            name = f"**{title}**" if kind == "all" else ""
            lines.append(f"| {name} | {kind} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return "\n".join(lines) + "\n"
