"""A few faults of each machine of tools/faults, always the same; there are more with --seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINES = {
    "Kills": 6,
    "Write errors": 6,
    "Loss of power": 40,
    "Damaged files": 16,
    "Odd options": 24,
    "Divergences": 3,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By machine what was tried and what was bad, of one process: its start takes seconds."""
    report = tmp_path_factory.mktemp("faults") / "found"
    command = [sys.executable, "-m", "tools.faults", "--quick", "--report", str(report)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600
    )
    kept = report.with_suffix(".json")
    assert kept.exists(), ended.stdout + ended.stderr
    return {each["title"]: each for each in json.loads(kept.read_text())["faults"]}


@pytest.mark.slow
@pytest.mark.parametrize("title", MACHINES)
def test_faults_are_survived(found, title):
    assert sum(found[title]["tried"].values()) == MACHINES[title]
    assert found[title]["worst"] == []
