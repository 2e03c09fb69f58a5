"""Rates of the directories of `--offload-dir`: several large direct writes or reads at a time, as
optimizer updates make."""

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llmq.bench.child import Job
from llmq.runtime.files import BUFFER_BYTES, CHUNK, DEPTH, Files

SIZE = 8 << 30  # bytes of scratch files, more than the memory within a disk
SECONDS = 20.0  # longest measurement of one direction


def rate(move: Callable[[int, int, np.ndarray], Any], files: Files, size: int, seconds: float):
    """Return the GB/s of moving chunks between slots and files, repeatedly from start to end."""
    begin = time.monotonic()

    def run(first: int) -> int:
        moved, chunk = 0, first
        while time.monotonic() - begin < seconds:
            move(chunk * CHUNK % size, CHUNK, files.slots[first])
            moved, chunk = moved + CHUNK, chunk + DEPTH
        return moved

    with ThreadPoolExecutor(DEPTH) as pool:
        moved = sum(pool.map(run, range(DEPTH)))
    return moved / (time.monotonic() - begin) / 1e9


def measure(job: Job, *, folders: Sequence[str], size: int = SIZE, **_: Any) -> None:
    """Measure disk rates, the part `disk` of `llmq rig`. The result has `read` and `write`, GB/s of
    all directories together."""
    buffers = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
    files = Files([Path(folder) for folder in folders], size, buffers)
    for slot in files.slots:  # a disk may compress zeros
        slot[:] = np.random.default_rng(0).integers(0, 256, slot.size, np.uint8)
    seconds = min(SECONDS, job.left / 2)
    found = {"write": rate(files.write, files, size, seconds)}
    found["read"] = rate(files.read, files, size, seconds)
    job.note(found)
    files.close()
