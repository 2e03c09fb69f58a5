"""The files of a report: what is read of an earlier one, what is added, and how it is written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import prepare_report, write_file
from llmq.base.json_file import read_json
from llmq.base.locks import lock_beside, locked
from llmq.bench.page import page
from llmq.bench.report import as_csv, markdown
from llmq.bench.sweep_file import Row, identity

Report = dict[str, Any]
"""`machine`; `invocations`, the commands that made it; `runs`; `left`, how many are still to be
made; `running`, the options of the one that is being made."""

_KEYS = ("machine", "invocations", "runs")
_WRITTEN = {".md": markdown, ".csv": as_csv, ".html": page}  # what is made of it
_SUFFIXES = (".json", *_WRITTEN)
PAGE_SECONDS = 30  # between two pages of a sweep that goes on: drawing one takes a second or more


class ReportFile:
    """OUT.json, which is all there is to know, and what is made of it: OUT.md, .csv, .html."""

    def __init__(self, out: Path):
        self.out = out
        self.path = self._with(".json")
        self._drawn = -math.inf

    def _with(self, suffix: str) -> Path:
        return Path(f"{self.out}{suffix}")

    def reserved(self) -> AbstractContextManager[None]:
        """Nobody else writes it meanwhile. LlmqError if somebody does, or it cannot be written."""
        prepare_report("--out", self.out, *_SUFFIXES)
        return locked(lock_beside(self.path), "--out", self.path)

    def read(self, flag: str) -> Report | None:
        """None if there is none. ConfigError names the flag."""
        return read_report(self.path, flag) if self.path.exists() else None

    def write(self, report: Report, *, stopped: bool = False) -> None:
        """Each file is replaced at once, and is on the disk: JSON first, the others follow it,
        but not to say that a run has begun.

        stopped: no run follows, though some are left. Else the page is drawn now and then only.
        """
        write_file(self.path, json.dumps(report, indent=1) + "\n")
        if report["running"] is not None:
            return
        goes_on = report["left"] and not stopped
        for suffix, written in _WRITTEN.items():
            if suffix == ".html":
                if goes_on and time.monotonic() < self._drawn + PAGE_SECONDS:
                    continue
                self._drawn = time.monotonic()
            text = written(report).encode(errors="backslashreplace")  # a path need not be UTF-8
            write_file(self._with(suffix), text.decode())


def read_report(path: Path, flag: str) -> Report:
    """A report that was written. ConfigError, which names the flag, if the file is none."""
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
        for written in _WRITTEN.values():  # which must not fail after hours of further runs
            written(found)
        return found
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{flag}: {path} is not a report of llmq bench ({error!r})") from None


def _check_speed(result: dict[str, Any]) -> None:
    """ValueError where a speed is none: what is compared with it would be none either."""
    for value in (result["tokens_per_second"], *result["step_seconds"]):
        if not 0 < value < math.inf:
            raise ValueError(f"a speed or a time of a step is {value}")


def differences(one: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    """In what two machines of reports differ; the device first. A value that is not known is
    equal."""
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


def merge(earlier: Report, later: Report) -> Report:
    """The runs of both reports, of equal ones the later, but a measured one before a failed one."""
    again = {identity(run["options"]) for run in later["runs"]}
    measured = {identity(run["options"]) for run in later["runs"] if run["status"] == "ok"}
    first = len(earlier["invocations"])
    runs = [
        run
        for run in earlier["runs"]
        if identity(run["options"]) not in (measured if run["status"] == "ok" else again)
    ]
    runs += [run | {"invocation": run["invocation"] + first} for run in later["runs"]]
    before = [{"machine": earlier["machine"]} | i for i in earlier["invocations"]]
    invocations = before + later["invocations"]
    used = sorted({run["invocation"] for run in runs})
    return {
        "machine": later["machine"] or earlier["machine"],
        "invocations": [invocations[index] for index in used] or later["invocations"],
        "runs": [run | {"invocation": used.index(run["invocation"])} for run in runs],
        "left": later["left"],
        "running": later["running"],
    }


def in_order(report: Report, order: list[Row]) -> Report:
    """The runs of a sweep in its order, and behind them what else the report has."""
    places: dict[Hashable, int] = {identity(row): place for place, row in enumerate(order)}
    runs = sorted(report["runs"], key=lambda r: places.get(identity(r["options"]), len(places)))
    return report | {"runs": runs}
