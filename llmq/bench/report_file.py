"""Files of a bench report: functions read an earlier report, continue it, write it, and compare two
reports.

`llmq bench --compare A B` compares the medians of the repeats of equal runs. Repeats whose ranges
overlap show no difference. The ranges of repeats say nothing about other processes, days or cards.
"""

import json
import math
import statistics
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError
from llmq.base.files import prepare_report, read_json, replacing, write_file
from llmq.base.locks import lock_beside, locked
from llmq.bench.picture import figure_of
from llmq.bench.report import as_csv, full_title, markdown, shared_flags
from llmq.bench.sweep_file import Row, identity
from llmq.report.tables import markdown_table

Report = dict[str, Any]
"""A report as a dict: `machine`; `invocations`, the commands that made the report; `runs`; `left`,
the number of missing runs; `running`, the options of the current run, or None."""

_KEYS = ("machine", "invocations", "runs")
_WRITTEN = {".md": markdown, ".csv": as_csv}  # renderings of the report, besides the picture
_SUFFIXES = (".json", *_WRITTEN, ".png")
DRAW_SECONDS = 30  # least seconds between two pictures, as drawing takes a second or more


class ReportFile:
    """Reads and writes the report OUT.json and the renderings OUT.md, OUT.csv and OUT.png."""

    def __init__(self, out: Path):
        self.out = out
        self.path = self._with(".json")
        self._drawn = -math.inf

    def _with(self, suffix: str) -> Path:
        return Path(f"{self.out}{suffix}")

    def reserved(self) -> AbstractContextManager[None]:
        """Lock the report for this process. Raises LlmqError if another process holds the lock or
        the path cannot be written."""
        prepare_report("--out", self.out, *_SUFFIXES)
        return locked(lock_beside(self.path), "--out", self.path)

    def read(self, flag: str) -> Report | None:
        """Return the report; None if the file does not exist. Raises ConfigError, which names the
        flag, if the file is no report."""
        return read_report(self.path, flag) if self.path.exists() else None

    def write(self, report: Report, *, stopped: bool = False) -> None:
        """Write JSON (fsync), then Markdown and CSV unless a run has just begun; each file is
        replaced atomically. The picture is drawn at the end, and before the end at most once in
        DRAW_SECONDS. stopped: True if the sweep ends although some runs are missing."""
        write_file(self.path, json.dumps(report, indent=1) + "\n")
        if report["running"] is not None:
            return
        for suffix, written in _WRITTEN.items():
            text = written(report).encode(errors="backslashreplace")  # paths may not be UTF-8
            write_file(self._with(suffix), text.decode())
        if report["left"] and not stopped and time.monotonic() < self._drawn + DRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        figure = figure_of(report)
        if figure is not None:
            with replacing(self._with(".png")) as file:
                figure.savefig(file, format="png")


def read_report(path: Path, flag: str) -> Report:
    """Read and check a report. Raises ConfigError, which names the flag, if the file is no
    report."""
    try:
        report = read_json(path)
        rest = {"left": report.get("left", 0), "running": report.get("running")}
        found = {key: report[key] for key in _KEYS} | rest
        for run in found["runs"]:
            identity(run["options"]), found["invocations"][run["invocation"]]
            if run["status"] == "ok":
                _check_speed(run["result"])
        if found["running"] is not None:
            identity(found["running"])
        differences(found["machine"], found["machine"])
        for written in (*_WRITTEN.values(), figure_of):  # fail now, not at the end of a sweep
            written(found)
        return found
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{flag}: {path} is not a report of llmq bench ({error!r})") from None


def _check_speed(result: dict[str, Any]) -> None:
    """Raise ValueError for speeds or step times that are not finite and positive, because such
    numbers cannot be compared."""
    for value in (result["tokens_per_second"], *result["step_seconds"]):
        if not 0 < value < math.inf:
            raise ValueError(f"a speed or a time of a step is {value}")


def differences(one: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    """Return differences between two reports' machines, a text for each, the device first. Unknown
    values count as equal."""
    if one is None or other is None:
        return []
    found = []
    if one["device"] != other["device"]:
        found.append(f"device {one['device']}, {other['device']}")
    drivers = [(machine["gpu"] or {}).get("driver") for machine in (one, other)]
    if all(drivers) and drivers[0] != drivers[1]:
        found.append(f"driver {drivers[0]}, {drivers[1]}")
    versions = [machine["versions"] for machine in (one, other)]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        old, new = (v.get(name, "none") for v in versions)
        if old != new:
            found.append(f"{name} {old}, {new}")
    return found


def continued(earlier: Report, later: Report) -> Report:
    """Return an earlier report with a later sweep's runs appended. A later run replaces an equal
    earlier run."""
    again = {identity(run["options"]) for run in later["runs"]}
    first = len(earlier["invocations"])
    runs = [run for run in earlier["runs"] if identity(run["options"]) not in again]
    runs += [run | {"invocation": run["invocation"] + first} for run in later["runs"]]
    invocations = [{"machine": earlier["machine"]} | i for i in earlier["invocations"]]
    invocations += later["invocations"] if later["runs"] or not invocations else []
    machine = later["machine"] or earlier["machine"]
    return later | {"machine": machine, "invocations": invocations, "runs": runs}


def in_order(report: Report, order: list[Row]) -> Report:
    """Return the report with the sweep's runs in the order of `order`, then all other runs."""
    places: dict[Hashable, int] = {identity(row): place for place, row in enumerate(order)}
    runs = sorted(report["runs"], key=lambda r: places.get(identity(r["options"]), len(places)))
    return report | {"runs": runs}


SAME, UNKNOWN = "no difference to be seen", "one repeat: unknown"


class Change(NamedTuple):
    """A change of speed between two runs. part: relative change of speed. verdict: words about the
    change, from the repeats."""

    part: float
    verdict: str


def change(one: Sequence[float], other: Sequence[float]) -> Change:
    """Compare two runs by the seconds per step of the repeats. Returns the relative change of the
    median speed, and the verdict."""
    part = statistics.median(one) / statistics.median(other) - 1
    if min(len(one), len(other)) < 2:
        return Change(part, UNKNOWN)
    if max(min(one), min(other)) <= min(max(one), max(other)):
        return Change(part, SAME)
    return Change(part, "faster" if part > 0 else "slower")


def run_compare(one: Path, other: Path) -> None:
    """Print the changes from one report to the other. Raises ConfigError if a file is no report."""
    reports = [read_report(path, "--compare") for path in (one, other)]
    print("\n".join(comparison(reports[0], reports[1], (str(one), str(other)))))


def comparison(one: Report, other: Report, names: tuple[str, str]) -> list[str]:
    """Return the comparison of two reports as lines of Markdown."""
    keyed = [{_key(run): run for run in report["runs"]} for report in (one, other)]
    both = [key for key in keyed[0] if key in keyed[1]]
    shared = shared_flags([*one["runs"], *other["runs"]]) if one["runs"] or other["runs"] else {}
    rows, notes = [], []
    for key in both:
        runs = [of[key] for of in keyed]
        called = full_title(runs[0], shared)
        failed = [(n, r) for n, r in zip(names, runs, strict=True) if r["status"] != "ok"]
        notes += [f"- {called}: {run['status']} in {name}" for name, run in failed]
        if failed:
            continue
        results = [run["result"] for run in runs]
        found = change(*(result["step_seconds"] for result in results))
        speeds = [f"{result['tokens_per_second']:,.0f}" for result in results]
        rows.append([called, *speeds, f"{found.part:+.1%}", found.verdict])
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
        heads = ["run", "tok/s before", "tok/s after", "change", "verdict"]
        blocks.append(markdown_table(heads, rows))
    else:
        blocks.append("No run was measured in both.")
    blocks.append("\n".join(notes))
    return "\n\n".join(block for block in blocks if block).splitlines()


def _key(run: dict[str, Any]) -> Hashable:
    """Return the key by which runs are matched: options and number of GPUs."""
    return identity(run["options"]), run.get("gpus")


def _machines(one: Report, other: Report) -> str:
    """Return differences outside llmq's code that may have changed the speed, as Markdown; "" if
    there are no differences."""
    lines = [f"- {line}" for line in differences(one["machine"], other["machine"])]
    cards = [((r["machine"] or {}).get("gpu") or {}).get("uuid") for r in (one, other)]
    if all(cards) and cards[0] != cards[1]:
        lines.append("- another card of the same kind" if not lines else "- another card")
    return "\n".join(["They differ in:", *lines]) if lines else ""
