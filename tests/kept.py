"""The runs of `llmq bench` whose reports are kept under benchmarks/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def kept_runs() -> list[tuple[str, str, dict[str, Any]]]:
    """Of each that succeeded on a GPU: the name of its report, the device, the run."""
    found = []
    for path in sorted(BENCHMARKS.glob("*.json")):
        report = json.loads(path.read_text())
        device = (report.get("machine") or {}).get("device")  # peers.json has none
        if device:
            found += [(path.stem, device, run) for run in report["runs"] if run["status"] == "ok"]
    return found
