"""The script of each process of tests/mpi.py: `llmq train` once for each of some cases.

A case has "flags", "own" (further flags by process), "machines" (by process a name, which is also
the folder that it runs in) and a "fault" or null: "process" (null: all), the "step" before which it
happens, and "what" happens. The first process prints each status.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmq.base.errors import DataError, warn
from llmq.commands.cli import _run
from llmq.data.loader import DataLoader
from llmq.model.step import Step
from llmq.run.loop import Loop
from llmq.run.trainer import Trainer

INDEX = int(os.environ["OMPI_COMM_WORLD_RANK"])
PLACES = json.loads(sys.argv[2])  # environment of each process, or nothing


def fail_in_a_rank(*_: Any, **__: Any) -> None:
    raise RuntimeError("as the test wants it")


def refuse_to_write(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def damaged(*_: Any, **__: Any) -> None:
    raise DataError("'data/train-0.bin' is damaged")


def end_soon(signum: int) -> Callable[[], None]:
    """A signal after a random time, which may be at any moment of a step."""
    pause = float(os.environ.get("FAULT_PAUSE", "0"))
    return lambda: threading.Timer(pause, os.kill, [os.getpid(), signum]).start()


def explode() -> None:
    """Three steps of a far too high learning rate."""
    real, left = Trainer.enqueue_step, iter(range(3))

    def enqueue_step(self: Trainer, *args: Any, lr: float, **more: Any) -> int:
        return real(self, *args, lr=lr if next(left, None) is None else 3000 * lr, **more)

    Trainer.enqueue_step = enqueue_step


FAULTS: dict[str, Callable[[], None]] = {
    "kill": end_soon(signal.SIGKILL),
    "stop": end_soon(signal.SIGSTOP),
    "save": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "explode": explode,
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: setattr(Step, "update", fail_in_a_rank),
    "disk full": lambda: setattr(os, "fsync", refuse_to_write),
    "no names": lambda: setattr(os, "rename", refuse_to_write),
    "damaged": lambda: setattr(DataLoader, "next_batch", damaged),
    "warn": lambda: warn("this process is unwell"),
    "hang": lambda: setattr(Step, "update", lambda step, kind: time.sleep(1000)),
}


@contextmanager
def with_fault(fault: dict[str, Any] | None) -> Iterator[None]:
    """Within the block it happens, if it is one of this process."""
    real, real_batch, real_calls = Loop.step, DataLoader.next_batch, (os.fsync, os.rename)

    happened = []

    def step(self: Loop) -> None:
        here = fault is not None and fault["process"] in (INDEX, None)
        if here and self.trainer.steps_done == fault["step"] and not happened:
            happened.append(fault)
            FAULTS[fault["what"]]()
        real(self)

    Loop.step = step
    try:
        yield
    finally:
        Loop.step, DataLoader.next_batch = real, real_batch
        os.fsync, os.rename = real_calls


@contextmanager
def on_machine(names: list[str]) -> Iterator[None]:
    """Within the block this process is on the machine of its name, if it has one."""
    if not names:
        yield
        return
    os.environ["LLMQ_MACHINE"] = names[INDEX]
    with contextlib.chdir(names[INDEX]):
        yield
    del os.environ["LLMQ_MACHINE"]


def main() -> None:
    """All cases, one after the other."""
    os.environ.update(PLACES[INDEX] if PLACES else {})
    for case in json.loads(sys.argv[1]):
        own = case["own"][INDEX] if case["own"] else []
        with on_machine(case["machines"]), with_fault(case["fault"]):
            try:
                status = _run(["train", *case["flags"], *own])
            except SystemExit as end:
                status = end.code
        print(f"status of process {INDEX}: {status}", flush=True)


if __name__ == "__main__":
    main()
