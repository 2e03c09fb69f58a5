"""`llmq bench --compare A B`: which runs of one report are faster in another one.

The repeats of a run are its sample: of two runs Welch's interval for the difference of the means of
log(seconds a step) says between which changes of speed the real one lies, with 95 %. An interval on
both sides of 0 shows no difference. The repeats are of one process and one card: what another
process, day or card would change is not in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.bench.report import full_title, shared_flags
from llmq.bench.report_file import Report, differences, read_report
from llmq.bench.sweep_file import identity
from llmq.report.tables import Markdown

INSIDE = 0.95  # of the real changes lie in their interval
SAME, UNKNOWN = "no difference to be seen", "one repeat: unknown"


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a speed: as a part of the earlier one, and its interval; None where a run has
    one repeat.

    The interval is of the geometric means, the change too.
    """

    part: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.low is None or self.high is None:
            return UNKNOWN
        if self.low <= 0 <= self.high:
            return SAME
        return "faster" if self.part > 0 else "slower"


def change(one: Sequence[float], other: Sequence[float]) -> Change:
    """From seconds a step of the repeats of one run to those of another."""
    logs = [[math.log(seconds) for seconds in repeats] for repeats in (one, other)]
    gain = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if min(len(one), len(other)) < 2:
        return Change(math.expm1(gain), None, None)
    errors = [statistics.variance(values) / len(values) for values in logs]
    total = sum(errors)
    half = 0.0
    if total > 0:
        freedom = total**2 / sum(
            error**2 / (len(values) - 1) for error, values in zip(errors, logs, strict=True)
        )
        half = _quantile(freedom) * math.sqrt(total)
    return Change(math.expm1(gain), math.expm1(gain - half), math.expm1(gain + half))


def _quantile(freedom: float) -> float:
    """Student's two-sided quantile, of whole degrees of freedom: the next lower ones are wider.

    With x = sqrt(freedom) * tan(angle) the density is a power of the angle's cosine.
    """
    whole = max(int(freedom + 1e-9), 1)
    angles = np.linspace(0, math.pi / 2 * min(1.0, 20 / math.sqrt(whole)), 20_001)
    density = np.cos(angles) ** (whole - 1)
    inside = np.cumsum((density[1:] + density[:-1]) / 2)
    angle = np.interp(INSIDE, inside / inside[-1], angles[1:])
    return math.sqrt(whole) * math.tan(angle)


def run_compare(one: Path, other: Path) -> None:
    """Print what has changed from one report to the other. ConfigError if a file is none."""
    reports = [read_report(path, "--compare") for path in (one, other)]
    print("\n".join(comparison(reports[0], reports[1], (str(one), str(other)))))


def comparison(one: Report, other: Report, names: tuple[str, str]) -> list[str]:
    """The lines of Markdown."""
    keyed = [{_key(run): run for run in report["runs"]} for report in (one, other)]
    both = [key for key in keyed[0] if key in keyed[1]]
    shared = shared_flags([*one["runs"], *other["runs"]]) if one["runs"] or other["runs"] else {}
    rows, changes, notes = [], [], []
    for key in both:
        runs = [of[key] for of in keyed]
        called = full_title(runs[0], shared)
        failed = [(n, r) for n, r in zip(names, runs, strict=True) if r["status"] != "ok"]
        notes += [f"- {called}: {run['status']} in {name}" for name, run in failed]
        if failed:
            continue
        results = [run["result"] for run in runs]
        found = change(*(result["step_seconds"] for result in results))
        changes.append(found)
        speeds = [f"{result['tokens_per_second']:,.0f}" for result in results]
        rows.append([called, *speeds, *_spelled(found)])
    for name, own, of in ((names[0], *keyed), (names[1], *keyed[::-1])):
        notes += [
            f"- {full_title(run, shared)}: only in {name}"
            for key, run in own.items()
            if key not in of
        ]
    blocks = [f"From {names[0]} to {names[1]}", _machines(one, other)]
    if shared:
        blocks.append(f"All runs: {' '.join(shared.values())}")
    if rows:
        heads = ["run", "tok/s before", "tok/s after", "change", "95 % of it between", "verdict"]
        blocks += [Markdown().table(heads, rows), _summary(changes)]
    else:
        blocks.append("No run was measured in both.")
    blocks.append("\n".join(notes))
    return "\n\n".join(block for block in blocks if block).splitlines()


def _key(run: dict[str, Any]) -> Hashable:
    """The key by which a run is matched: its options, and how many GPUs there were."""
    return identity(run["options"]), run.get("gpus")


def _spelled(found: Change) -> list[str]:
    between = ""
    if found.low is not None and found.high is not None:
        between = f"{found.low:+.1%} … {found.high:+.1%}"
    return [f"{found.part:+.1%}", between, found.verdict]


def _machines(one: Report, other: Report) -> str:
    """Differences, other than llmq's code, that may have changed the speed."""
    lines = [f"- {line}" for line in differences(one["machine"], other["machine"])]
    cards = [((r["machine"] or {}).get("gpu") or {}).get("uuid") for r in (one, other)]
    if all(cards) and cards[0] != cards[1]:
        lines.append("- another card of the same kind" if not lines else "- another card")
    return "\n".join(["They differ in:", *lines]) if lines else ""


def _summary(changes: Sequence[Change]) -> str:
    verdicts = [found.verdict for found in changes]
    shown = {v: f"with {v}" if v in (SAME, UNKNOWN) else v for v in verdicts}
    counted = [f"{verdicts.count(v)} {told}" for v, told in shown.items()]
    mean = math.expm1(statistics.fmean(math.log1p(found.part) for found in changes))
    told = f"{', '.join(counted)}; all together {mean:+.1%} (geometric mean)."
    return f"{told}\ntok/s: the median of the repeats; change: of their geometric means."
