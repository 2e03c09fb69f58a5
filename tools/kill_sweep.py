"""Kill `llmq bench` at random moments, and go on with --resume each time.

    python tools/kill_sweep.py --kills 20

Sweeps small models on the CPU, ends the driver with SIGKILL after a random time, and starts it
again, so many times; then lets it end. Everything in the report must stay as it was, no process may
be left over, and the table must have the runs of a sweep that nobody disturbed. Exits 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SWEEP = """\
device: cpu
from-scratch: true
model: [tiny, tiny-gpt2]
model-dtype: fp32
grad-accumulation: 1
runs:
- {batch-size: 1, seq-len: 64, recompute-block: [false, true]}
- {batch-size: 2, seq-len: 32, recompute-block: [false, true]}
- {batch-size: 4, seq-len: 16}
"""
LEFT_OVER = 10  # seconds in which the children of a killed driver have to end
LONGEST = 0.4  # of an undisturbed sweep: when a kill comes at the latest
DRIVER = [sys.executable, "-m", "llmq"]


def start(driver: list[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """The sweep, or the next part of it, in a process group of its own."""
    command = [*driver, "bench", "--config", str(folder / "sweep.yaml"), "--out"]
    command += [str(folder / name), "--resume", "--timed-steps", "1", "--repeats", "2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"TMPDIR": str(folder)}  # where a killed one leaves its files
    return subprocess.Popen(command, start_new_session=True, env=environment, **quiet)


def runs(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Those of the report, in its order, by their options."""
    path = folder / f"{name}.json"
    if not path.exists():
        return {}
    report = json.loads(path.read_text())  # which is whole at any time
    return {json.dumps(run["options"], sort_keys=True): run for run in report["runs"]}


def gone(group: int) -> bool:
    """Whether a killed driver has left no process."""
    deadline = time.monotonic() + LEFT_OVER
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def kill_once(driver: list[str], folder: Path, moment: float) -> str:
    """Start, kill after so many seconds, and look at what is there; what happened."""
    before = runs(folder, "killed")
    process = start(driver, folder, "killed")
    try:
        if process.wait(moment):
            raise SystemExit("the sweep fails")
        finished(folder)
        return "it had ended, and begins again"
    except subprocess.TimeoutExpired:
        pass
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if not gone(process.pid):
        raise SystemExit(f"a child outlived the driver that was killed after {moment:.2f} s")
    after = runs(folder, "killed")
    check_kept(before, after)
    return f"killed after {moment:.2f} s with {len(after)} runs, {len(after) - len(before)} new"


def check_kept(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Exits if a run that was on the disk is not there any more as it was."""
    for key, run in before.items():
        found = after.get(key, {})
        if {**run, "invocation": 0} != {**found, "invocation": 0}:
            raise SystemExit(f"the run {key} has changed: {run} is now {found}")


def finished(folder: Path) -> None:
    """Exits if the sweep that was killed is not the one that was not; removes its report."""
    killed, plain = runs(folder, "killed"), runs(folder, "plain")
    told = [[(key, run["status"]) for key, run in of.items()] for of in (plain, killed)]
    if told[0] != told[1]:
        raise SystemExit(f"the tables differ: {told[0]} and {told[1]}")
    print(f"the same {len(plain)} runs in the same order", flush=True)
    (folder / "killed.json").unlink()


def check(kills: int, seed: int, driver: list[str] = DRIVER, sweep: str = SWEEP) -> None:
    """The whole test, in a folder that is removed. driver: `llmq`. sweep: the file's text."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="llmq-kill-") as name:
        folder = Path(name)
        (folder / "sweep.yaml").write_text(sweep)
        begun = time.monotonic()
        if start(driver, folder, "plain").wait():
            raise SystemExit("the sweep fails where nobody disturbs it")
        longest = LONGEST * (time.monotonic() - begun)
        for number in range(kills):
            print(f"{number:3}: {kill_once(driver, folder, rng.uniform(0, longest))}", flush=True)
        before = runs(folder, "killed")
        if start(driver, folder, "killed").wait():
            raise SystemExit("the sweep fails after the last kill")
        check_kept(before, runs(folder, "killed"))
        finished(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check(args.kills, args.seed)


if __name__ == "__main__":
    main()
