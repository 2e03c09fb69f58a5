"""Differences between two records of tools/fingerprint.py, grouped by the fields that differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

MISSING = "nothing"
SHOWN = 6  # maximum lines of a group, and maximum fields in its heading
# Names of fields that hold planned sizes.
SIZES = re.compile(r"\b(memory|sizes)\.|_bytes$|stack\.\d+\.bytes$|log\.\d+\.stats\.")

Record = dict[str, dict[str, Any]]
Difference = tuple[str, Any, Any]


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts in a fingerprint, with their paths of keys."""
    if isinstance(value, dict | list) and value:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from fields(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the fields of one run that differ, with both values."""
    a, b = dict(fields(old)), dict(fields(new))
    pairs = ((field, a.get(field, MISSING), b.get(field, MISSING)) for field in {**a, **b})
    return [(field, x, y) for field, x, y in pairs if repr(x) != repr(y)]  # NaN != NaN


def is_smaller(difference: Difference) -> bool:
    """True if the difference is a planned size that became smaller."""
    field, x, y = difference
    return bool(SIZES.search(field)) and isinstance(x, int) and isinstance(y, int) and y < x


def unproven(old: Record, new: Record) -> dict[str, str]:
    """Return runs that prove nothing, by name, with the reason: missing in one record, or
    failed."""
    found = {}
    for run in sorted(old.keys() | new.keys()):
        sides = {"the old record": old.get(run), "the new record": new.get(run)}
        wrong = [f"is not in {where}" for where, side in sides.items() if side is None]
        wrong += [
            f"failed in {where}: {side['error']}"
            for where, side in sides.items()
            if side is not None and "error" in side
        ]
        if wrong:
            found[run] = ", ".join(wrong)
    return found


def grouped(found: dict[str, list[Difference]]) -> list[str]:
    """Lines on runs and their differences; runs that differ in the same fields stand together.
    Numbers in field names, such as those of steps, do not count."""
    groups: defaultdict[tuple[str, ...], dict[str, list[Difference]]] = defaultdict(dict)
    for run, parts in found.items():
        names = dict.fromkeys(re.sub(r"\b\d+\b", "*", field) for field, _, _ in parts)
        groups[tuple(names)][run] = parts
    lines = []
    for names, runs in sorted(groups.items(), key=lambda group: -len(group[1])):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines.append(f"  {len(runs)} run{'s' * (len(runs) > 1)}: {', '.join(names[:SHOWN])}{more}")
        for run, parts in [*runs.items()][:SHOWN]:
            (field, x, y), others = parts[0], len(parts) - 1
            more = f" and {others} more" if others else ""
            lines.append(f"    {run}: {field}: {x!r} -> {y!r}{more}")
        lines += [f"    {run}" for run in [*runs][SHOWN:]]
    return lines


def compare(old: Record, new: Record, allowed: Sequence[str] = ()) -> int:
    """Print the differences, with fewer planned bytes in a separate section; return the number of
    runs that differ.

    allowed: patterns of run names, with * and ?; differences of these runs are shown and do not
    count. A pattern that matches no difference raises SystemExit, because the name may be wrong.
    """
    problems = unproven(old, new)
    found = {run: differences(old[run], new[run]) for run in old.keys() & new.keys()}
    found = {run: found[run] for run in sorted(found) if found[run] and run not in problems}

    def may(run: str) -> bool:
        return any(fnmatchcase(run, pattern) for pattern in allowed)

    for pattern in allowed:
        if not any(fnmatchcase(run, pattern) for run in [*problems, *found]):
            raise SystemExit(f"--allow: no run that differs is called {pattern!r}")
    counted = {run: parts for run, parts in found.items() if not may(run)}
    fewer = {run: parts for run, parts in counted.items() if all(map(is_smaller, parts))}
    others = {run: parts for run, parts in counted.items() if run not in fewer}
    unsaid = [f"  {run} {why}" for run, why in problems.items() if not may(run)]
    let = [f"  {run}" for run in sorted([*problems, *found]) if may(run)]
    sections = {
        f"Missing or failed ({len(unsaid)})": unsaid,
        f"Different ({len(others)})": grouped(others),
        f"Fewer planned bytes ({len(fewer)})": grouped(fewer),
        f"Allowed ({len(let)})": let,
    }
    for title, lines in sections.items():
        if lines:
            print(f"{title}:", *lines, sep="\n")
    count = len(unsaid) + len(counted)
    same = len(old.keys() | new.keys()) - count - len(let)
    print(f"{same} runs are identical" + (f", {count} are not" if count else ""))
    return count
