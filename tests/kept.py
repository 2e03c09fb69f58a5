"""The runs of `llmq bench` whose reports are kept under benchmarks/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.predicted import date_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def kept(name: str) -> Path:
    """The file or folder of this name, whatever card and day it is of."""
    (path,) = BENCHMARKS.glob(f"*/*/{name}")
    return path


def kept_reports() -> list[Path]:
    """The JSON of each."""
    paths = sorted(BENCHMARKS.glob("*/*/*.json"), key=lambda path: path.name)
    return [path for path in paths if "invocations" in json.loads(path.read_text())]


# Defaults that were others when the reports were made: of all runs before this time, and those that
# adapters did not have yet.
NEW_DEFAULTS = "2026-11-26 13"
_EARLIER = {"recompute-swiglu": False, "lmhead-chunks": 1}
_EARLIER_ADAPTERS = _EARLIER | {"recompute-norm": False}


def kept_runs() -> list[tuple[str, str, dict[str, Any]]]:
    """The runs that succeeded on a GPU: each one's report's name, the device, the run with its
    date."""
    found = []
    for path in kept_reports():
        report = json.loads(path.read_text())
        device = (report["machine"] or {}).get("device")
        if device:
            runs = [run for run in report["runs"] if run["status"] == "ok"]
            for run in runs:
                adapts = "lora-rank" in run["options"]
                earlier = dict(_EARLIER_ADAPTERS if adapts else _EARLIER)
                if not {"recompute-ffn", "recompute-block"}.isdisjoint(run["options"]):
                    earlier = {"lmhead-chunks": 1}  # the others follow
                if date_of(report, run) < NEW_DEFAULTS:
                    run["options"] = earlier | run["options"]
            found += [(path.stem, device, run | {"date": date_of(report, run)}) for run in runs]
    return found
