"""Places that outputs go to: standard output without room, one place for two processes, and a log
that others replace. The cases are of the machine in foreign.py."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from llmq.run.loop import Loop
from tools.faults.child import Ended, run
from tools.faults.machine import Problems
from tools.faults.place import (
    command,
    copy,
    hashed,
    inside,
    left_behind,
    train,
)

_NEW = {"out_dir": "new", "checkpoint_dir": "new-ckpt", "log_file": "new.json"}
_SAMPLE = ["sample", "out", "--prompt", "a", "--max-new-tokens", "4", "--device", "cpu"]
_GGUF = ["export", "talks", "--format", "gguf", "--dtype", "fp16", "--out"]
PRINTING = [
    ["show", "data/named/train*.bin", "--tokenizer", "tok"], ["check", "out"], ["check", "ckpt"],
    _SAMPLE, ["train", "--help"],
    ["plan", "--model", "tiny", "--from-scratch", "--device", "cpu"], train(**_NEW),
    ["export", "out", "--out", "new"], [*_GGUF, "new.gguf"],
    ["merge", "out", "adapter", "--out", "new"],
    ["eval", "out", "--task", "arc=arc.jsonl", "--device", "cpu"], ["top", "log.json", "--once"],
    ["tokenize", "text.txt", "--tokenizer", "tok", "--workers", "1", "--out", "data/again"],
    ["score", "out", "data/train-0.bin", "--out", "scores", "--device", "cpu", "--seq-len", "16",
     "--document-separator", "10"],
    ["plot", "log.json", "--html"],
]  # fmt: skip
TOGETHER = {  # the files that one of two processes writes, by its command
    "export": (["export", "out", "--out", "new"], "new/*"),
    "export of a checkpoint": (
        ["export", "--checkpoint-dir", "ckpt", "--out", "out", "--dtype", "fp32"],
        "out/*.safetensors",
    ),
    "export, gguf": ([*_GGUF, "new.gguf"], "*.gguf"),
    "merge": (["merge", "out", "adapter", "--out", "new"], "new/*"),
    "tokenize": (PRINTING[12], "data/again/*.bin"),
    "score": (PRINTING[13], "scores/*"),
    "train": (train(**_NEW), "new/*.safetensors"),
    "train --continue": (
        train(steps=8, eval_file="data/eval.bin", **{"continue": ""}),
        "out/*.safetensors",
    ),
}


def no_room(root: Path, rng: random.Random) -> tuple[str, None, Problems]:
    """Print to a device that is full, or to a pipe that nobody reads: one line, or none."""
    args, kind = rng.choice(PRINTING), rng.choice(("full", "pipe"))

    def call() -> int:
        if kind == "full":
            descriptor = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, descriptor = os.pipe()
            os.close(reader)
        os.dup2(descriptor, 1)
        status = command(*args)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        return status

    ended = run(inside(root, call))
    errors = ended.text.count("error: ")
    problems = [] if ended.status == 1 else ended.problems
    if ended.status not in ((0, 2) if kind == "full" else (0, 1)):
        problems.append(("traceback", f"status {ended.status}: {ended.text[-300:]}"))
    if errors != (ended.status == 2):
        problems.append(("traceback", f"{errors} errors: {ended.text[-300:]}"))
    return f"{kind}, {' '.join(args[:2])}", None, problems + left_behind(root)


def together(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Start the same command twice: one succeeds, and the other does, too, or is refused."""
    name = rng.choice(list(TOGETHER))
    args, result = TOGETHER[name]
    alone = copy(root, root.with_name("alone"))
    problems = run(inside(alone, partial(command, *args))).problems
    want = hashed(alone, (result,))
    shutil.rmtree(alone)
    seconds = rng.choice((0.0, 0.0, rng.uniform(0, 0.3)))

    def call() -> int:
        other = os.fork()
        if other == 0:
            time.sleep(seconds)
        status = command(*args)
        if other == 0:
            sys.stdout.flush()
            os._exit(status)
        _, code = os.waitpid(other, 0)
        (root / "statuses").write_text(f"{status} {os.waitstatus_to_exitcode(code)}")
        return status

    ended = run(inside(root, call))
    statuses = (root / "statuses").read_text() if (root / "statuses").exists() else "none"
    if statuses not in ("0 0", "0 2", "2 0"):
        problems.append(("lost", f"the statuses are {statuses}: {ended.text[-300:]}"))
    found = hashed(root, (result,))
    problems += [("changed", f"'{n}' is another") for n in want if found.get(n) != want[n]]
    return f"{name}, {seconds:.2f} s apart", ended, problems + left_behind(root)


_TWICE = re.compile(r".*\.(new|old|damaged)-\d+.*\.\1-\d+.*")


def replaced_log(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Replace or damage the log of a run again and again: its name does not grow."""
    steps, how, ended = 6, [], None
    for _ in range(rng.randrange(2, 5)):
        steps, kind = steps + 2, rng.choice(("replaced", "damaged", "another run"))
        logs = sorted(root.glob("log.json*"), key=lambda path: path.stat().st_mtime)
        args = ["train", "--continue", "--checkpoint-dir=ckpt", f"--steps={steps}"]
        if kind == "damaged":
            logs[-1].write_bytes(rng.randbytes(90))
        elif kind == "another run":
            args = train(log_file=logs[-1].name, overwrite="", train_seed=steps)
            steps = 6
        at = rng.randrange(steps) if kind == "replaced" else -1

        def call(args: list[str] = args, at: int = at) -> int:
            real = Loop.step

            def step(loop: Loop) -> None:
                path = loop.reporter.log.path
                if loop.trainer.steps_done >= at >= 0 and path.exists():
                    path.unlink()
                    path.write_text("another")
                real(loop)

            Loop.step = step
            return command(*args)

        ended = run(inside(root, call))
        how.append(kind)
        if ended.problems or ended.status:
            break
    names = [path.name for path in root.iterdir()]
    problems = [("left", f"the name '{n}' has grown") for n in names if _TWICE.fullmatch(n)]
    if ended.status:
        problems.append(("lost", f"it does not go on: {ended.text[-300:]}"))
    return ", ".join(how), ended, problems
