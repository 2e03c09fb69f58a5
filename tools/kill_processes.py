"""Kill a process of a run in several processes at random moments, and go on each time.

    python tools/kill_processes.py --kills 30 > benchmarks/cpu/$(date +%F)/kills.md

Starts `llmq train` on the CPU under mpirun, ends one of its processes with SIGKILL after a random
time, and starts it again with --continue, so many times; then lets it end. Nothing may hang, every
end must be one, and the model must be that of a run that nobody disturbed. Prints a table; exits 1
if not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.mpi import ENVIRONMENT, mpirun
from tests.runs import flags, make_workplace

HANG_SECONDS = 60  # after a kill


def start(name: str, processes: int, steps: int, *extra: str) -> subprocess.Popen:
    """A run whose places have this name, or the next part of it."""
    options = {"gpus": 1, "steps": steps, "batch_size": 1, "save_training_state": True}
    options |= {"ckpt_interval": 10, "ckpt_keep_n": 2, "watchdog": 10}
    options |= {"eval_every_n_steps": 25, "eval_num_steps": 1, "overwrite": None}
    options |= {"checkpoint_dir": f"{name}-ckpt", "out_dir": name, "log_file": f"{name}.json"}
    command = [mpirun(), "-n", str(processes), sys.executable, "-m", "llmq", "train"]
    command += [*flags(**options), *extra]
    root = str(Path(__file__).parents[1])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": root}
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def children(pid: int) -> list[int]:
    """The processes that a launcher has started, which are not itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(path.name))
    return found


def descendants(pid: int) -> list[int]:
    """The processes of the run: those at the ends below a launcher."""
    below = children(pid)
    return [p for child in below for p in (descendants(child) or [child])]


def newest(name: str) -> int:
    """The step of the newest checkpoint; 0 without one."""
    found = Path(f"{name}-ckpt").glob("step_*[0-9]")
    return max((int(path.name.removeprefix("step_")) for path in found), default=0)


def kill_once(
    name: str, processes: int, steps: int, rng: random.Random, longest: float
) -> list[str]:
    """Start, kill one after a random time, and wait for the end: cells of the table."""
    before, after = str(newest(name)), rng.uniform(0.0, longest)
    run = start(name, processes, steps, "--continue")
    time.sleep(after)
    alive = sorted(descendants(run.pid))
    cells = [before, f"{after:.1f} s"]
    if run.poll() is not None or not alive:
        run.communicate(timeout=HANG_SECONDS)
        return [*cells, "-", "nothing was there to kill", "-"]
    place = rng.randrange(len(alive))
    os.kill(alive[place], signal.SIGKILL)
    killed = time.monotonic()
    run.communicate(timeout=HANG_SECONDS)
    while left := [pid for pid in alive if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() - killed > HANG_SECONDS:
            raise SystemExit(f"processes {left} are left")
        time.sleep(0.1)
    if run.returncode == 0:
        raise SystemExit("a run whose process was killed ended with 0")
    return [*cells, str(place), str(run.returncode), f"{time.monotonic() - killed:.1f} s"]


def row(cells: list[str]) -> str:
    """One line of the table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds before a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help="more than are made in that time")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    print(f"Written by `tools/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}`.\n")
    print(row(["kill", "went on from step", "killed after", "process", "status", "all ended in"]))
    print(row(["---:"] * 6), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(make_workplace(Path(folder)))
        for number in range(1, given.kills + 1):
            cells = kill_once("killed", given.processes, given.steps, rng, given.longest)
            print(row([str(number), *cells]), flush=True)
        for name, extra in (("killed", ["--continue"]), ("whole", [])):
            run = start(name, given.processes, given.steps, *extra)
            _, err = run.communicate()
            if run.returncode != 0:
                raise SystemExit(f"'{name}' ended with {run.returncode}: {err}")
        names = ("killed", "whole")
        models = [Path(name, "model.safetensors").read_bytes() for name in names]
        if models[0] != models[1]:
            raise SystemExit("the models differ")
        print(f"\nThe model after {given.steps} steps is that of a run that nobody disturbed.")


if __name__ == "__main__":
    main()
