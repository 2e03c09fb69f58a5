"""[Allocator State]: the memory of a run by category, for people and for programs."""

from __future__ import annotations

from typing import Any

from llmq.base.dtypes import MIB
from llmq.base.tier import TIERS
from llmq.plan.plan import Usage


def allocator_rows(usage: Usage, others: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """[Allocator State] for programs: bytes of each category by kind of memory.

    others: rows that are not the trainer's, such as "Free", and their device memory.
    """
    rows = []
    for name in dict.fromkeys(name for place in TIERS for name in usage.categories[place]):
        device, *host = (usage.categories[place].get(name, 0) for place in TIERS)
        rows.append(_row(name, device, sum(host)))
    return rows + [_row(name, size, 0) for name, size in (others or {}).items()]


def _row(name: str, device: int, pinned: int) -> dict[str, Any]:
    """In llm.q's columns, two of which are never used here."""
    return {"name": name, "device": device, "managed": 0, "pinned": pinned, "pageable": 0}


def allocator_table(usage: Usage, others: dict[str, int] | None = None) -> list[str]:
    """The lines of [Allocator State], in MiB: rows as above, then the stack at its highest."""
    lines = [f" {'in MiB':>17}  Device | Managed | Pinned "]
    for row in allocator_rows(usage, others):
        device, managed, pinned = (row[kind] // MIB for kind in ("device", "managed", "pinned"))
        lines.append(f"  {row['name']:>16}: {device:6d} | {managed:7d} | {pinned:6d} ")
    stack = [(name, size // MIB) for name, size in usage.stack if size >= MIB]
    if stack:
        lines.append("")
    return lines + [f"  {'stack.' + name:>16}: {size:6d} " for name, size in stack]
