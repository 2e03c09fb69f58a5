"""How fast the host is: its memory, its products, and the disk of a folder."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.dtypes import MIB
from llmq.rig.child import Job

PIECE = 16 * MIB  # of what is written to the disk at a time
PRODUCT = 1024  # rows and columns
SHARE = 0.3  # of the time for each measurement


def measure(job: Job, *, disk: str, disk_mib: int = 2048, memory_mib: int = 256, **_: Any) -> None:
    """The part: `memory` GB/s read and written by all threads, `product` GFLOP/s in F32, and of
    the disk `write` and `read` GB/s. disk: a folder; nothing stays there.
    """
    found: dict[str, Any] = {}
    seconds = job.left
    found["memory"] = memory_rate(SHARE / 2 * seconds, memory_mib)
    found["product"] = product_rate(SHARE / 2 * seconds)
    job.note(found)
    found["disk"] = disk_rates(Path(disk), disk_mib, SHARE * seconds)
    job.note(found)


def memory_rate(seconds: float, mib: int, threads: int | None = None) -> float:
    """GB/s of copies by as many threads as there are CPUs, at most 16, read and written."""
    threads = threads or min(os.cpu_count() or 1, 16)
    size = max(mib * MIB // threads, MIB)
    copied, start = [0] * threads, threading.Barrier(threads)
    ends = [0.0] * threads

    def work(index: int) -> None:
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        start.wait()
        begin = time.perf_counter()
        while copied[index] == 0 or time.perf_counter() - begin < seconds:
            np.copyto(target, source)
            copied[index] += 2 * size
        ends[index] = time.perf_counter() - begin

    _all(work, threads)
    return sum(n / t for n, t in zip(copied, ends, strict=True)) / 1e9


def product_rate(seconds: float, size: int = PRODUCT) -> float:
    """GFLOP/s of NumPy's matrix products."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    out = np.empty_like(a)
    np.matmul(a, a, out=out)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        np.matmul(a, a, out=out)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - begin) / 1e9


def disk_rates(folder: Path, mib: int, seconds: float) -> dict[str, float]:
    """GB/s written, with all of it on the disk at the end, and read without the system's cache as
    far as it can be had. Writes as much as the time and a tenth of the free space allow.
    """
    size = min(mib * MIB, shutil.disk_usage(folder).free // 10) // PIECE * PIECE
    if size == 0:
        return {}
    piece = mmap.mmap(-1, PIECE)  # at the start of a page, as direct reads want it
    piece.write(np.random.default_rng(0).bytes(PIECE))
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name to stay by if we are killed
        begin, written = time.perf_counter(), 0
        while written == 0 or (written < size and time.perf_counter() - begin < seconds):
            written += os.write(file.fileno(), piece)
            os.fdatasync(file.fileno())
        write = written / (time.perf_counter() - begin) / 1e9
        read = _read_rate(file.fileno(), piece, seconds)
    return {"write": write, "read": read, "bytes": written}


def _read_rate(descriptor: int, piece: mmap.mmap, seconds: float) -> float:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:  # a file system that has no direct reads
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        if (got := os.readv(descriptor, [piece])) == 0:
            break
        count += got
    return count / (time.perf_counter() - begin) / 1e9


def _all(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
