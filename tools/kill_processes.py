"""Kill a process of a run in several processes at random moments, and go on each time.

    python tools/kill_processes.py --kills 30

Starts `llmq train` on the CPU under mpirun, ends one of its processes with SIGKILL after a random
time, and starts it again with --continue, so many times; then lets it end. Nothing may hang, every
end must be one, and the model must be that of a run that nobody disturbed. Exits 1 if not.
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
STEPS = 400


def start(name: str, processes: int, *extra: str) -> subprocess.Popen:
    """A run in a folder of its own name, or the next part of it."""
    options = {"gpus": 1, "steps": STEPS, "batch_size": 1, "save_training_state": True}
    options |= {"ckpt_interval": 10, "ckpt_keep_n": 2, "watchdog": 10}
    options |= {"eval_every_n_steps": 25, "eval_num_steps": 1, "overwrite": None}
    options |= {"checkpoint_dir": f"{name}-ckpt", "out_dir": name, "log_file": f"{name}.json"}
    command = [mpirun(), "-n", str(processes), sys.executable, "-m", "llmq", "train"]
    root = str(Path(__file__).parents[1])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": root}
    return subprocess.Popen(
        [*command, *flags(**options), *extra],
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
    """Of a launcher, those at the ends: the processes of the run."""
    below = children(pid)
    return [p for child in below for p in (descendants(child) or [child])]


def kill_once(name: str, processes: int, rng: random.Random, longest: float) -> str:
    """Start, kill one after a random time, and wait for the end; what happened."""
    run = start(name, processes, "--continue")
    time.sleep(rng.uniform(0.0, longest))
    alive = descendants(run.pid)
    if run.poll() is not None or not alive:
        run.wait(HANG_SECONDS)
        return "nothing was there to kill"
    victim = rng.choice(alive)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    run.communicate(timeout=HANG_SECONDS)
    if run.returncode == 0:
        return "the run was just over"
    while left := [pid for pid in alive if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() - killed > HANG_SECONDS:
            raise SystemExit(f"processes {left} are left")
        time.sleep(0.1)
    return f"status {run.returncode} after {time.monotonic() - killed:.1f} s"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds before a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(make_workplace(Path(folder)))
        for number in range(given.kills):
            print(number, kill_once("killed", given.processes, rng, given.longest), flush=True)
        for name, extra in (("killed", ["--continue"]), ("whole", [])):
            run = start(name, given.processes, *extra)
            _, err = run.communicate()
            if run.returncode != 0:
                raise SystemExit(f"'{name}' ended with {run.returncode}: {err}")
        models = [Path(name, "model.safetensors").read_bytes() for name in ("killed", "whole")]
        if models[0] != models[1]:
            raise SystemExit("the models differ")
        print("the models are the same")


if __name__ == "__main__":
    main()
