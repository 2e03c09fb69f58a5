"""Choosing the fastest of several ways to run the same work on a GPU.

All candidates are timed briefly. Then the best are timed again for longer, in turns, fewer in each
round: a card under load runs at a lower clock than an idle card, and another candidate may be
fastest. Candidates that take long are timed once: running the fifty algorithms of a large LM head's
product once takes seconds. A file keeps the choices, and the ranks of a process share it.
"""

import contextlib
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmq.base.errors import ConfigError, warn
from llmq.base.files import read_own, write_shared
from llmq.base.stopwatch import START
from llmq.base.tensor import Tensor

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
LOOK = 3  # number of first timed runs of a candidate faster than LONG_MS
LONG_MS = 1.0
FINALISTS = (10, 5, 3, 2)  # number of candidates, the best so far, in each further round
ROUND_MS = 8.0  # time of one finalist; 20 such runs for each of 15 products take 2.4 s
WORTH_MS = 0.05  # for faster work the first runs decide: longer tuning would not pay
MIN_GAIN = 0.99  # a later candidate must take less than this share of the best one's time

Candidate = TypeVar("Candidate")


class Unsupported(RuntimeError):
    """A library cannot compute some work here, with any of the requested algorithms."""


def fastest(
    cuda: Any,
    stream: int,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], None],
    refused: type[Exception],
    kept: Sequence[Tensor] = (),
) -> Candidate | None:
    """Return the candidate that takes the least time, the first if several are equal; None if all
    are refused. cuda: CuPy's runtime module. run: enqueues one run of a candidate on the stream, or
    raises `refused`. kept: tensors that a run adds to; their content is restored afterwards. Waits
    for the stream."""
    saved = [np.empty(tensor.nbytes, np.uint8) for tensor in kept]
    for copy, tensor in zip(saved, kept, strict=True):
        cuda.memcpyAsync(copy.ctypes.data, tensor.ptr, tensor.nbytes, DEVICE_TO_HOST, stream)
    events = [cuda.eventCreate(), cuda.eventCreate()]

    def milliseconds(candidate: Candidate, count: int) -> float:
        cuda.eventRecord(events[0], stream)
        for _ in range(count):
            run(candidate)
        cuda.eventRecord(events[1], stream)
        cuda.eventSynchronize(events[1])
        return cuda.eventElapsedTime(*events) / count

    first: dict[int, float] = {}
    for index, candidate in enumerate(candidates):
        try:
            run(candidate)  # loads the code
        except refused:
            continue
        cuda.streamSynchronize(stream)
        ms = milliseconds(candidate, 1)
        first[index] = ms if ms >= LONG_MS else milliseconds(candidate, LOOK)
    totals = first
    long_look = len(first) > 1 and min(first.values()) >= WORTH_MS
    for count in FINALISTS if long_look else ():
        best_so_far = sorted(totals, key=totals.get)[:count]
        totals = {index: totals[index] for index in sorted(best_so_far)}
        for index in best_so_far:
            runs = max(1, round(ROUND_MS / first[index]))
            totals[index] += milliseconds(candidates[index], runs)
    for event in events:
        cuda.eventDestroy(event)
    for copy, tensor in zip(saved, kept, strict=True):
        cuda.memcpyAsync(tensor.ptr, copy.ctypes.data, tensor.nbytes, HOST_TO_DEVICE, stream)
    cuda.streamSynchronize(stream)
    best = None
    for index, total in totals.items():
        if best is None or total < totals[best] * MIN_GAIN:
            best = index
    return None if best is None else candidates[best]


Ways = dict[str, Callable[[], None]]


class Choices:
    """The choices of one rank, for the rank's thread with its GPU current. A file keeps the
    choices, as it keeps algorithms of products. The first choice that a rank publishes holds for
    all ranks, so that all GPUs of a run, and later runs, use the same kernels. chosen: name of the
    way taken for each piece of work so far."""

    def __init__(self, machine: str, *, cuda: Any, cache_path: Path | None):
        """machine: name of the GPU and the releases of libraries for which a choice holds. cuda:
        CuPy's CUDA runtime. cache_path: see CublasLt."""
        self._machine = machine
        self._cuda = cuda
        self._file = algorithm_file(cache_path)
        self.chosen: dict[str, str] = {}

    def run(self, stream: int, work: str, ways: Ways, kept: tuple[Tensor, ...]) -> None:
        """Enqueue the work once. The first call times every way on the stream, and waits for the
        stream. work, ways, kept: see Device.choose. RuntimeError inside a graph capture if the work
        is not timed yet."""
        name = self.chosen.get(work)
        if name is None:
            name = self.chosen[work] = self._choose(stream, work, ways, kept)
        ways[name]()

    @START.part("choosing kernels")
    def _choose(self, stream: int, work: str, ways: Ways, kept: tuple[Tensor, ...]) -> str:
        key = f"{self._machine}, {work}: {' or '.join(ways)}"
        names = {name.encode(): name for name in ways}
        remembered = self._file.get(key)
        if remembered in names:
            return names[remembered]
        if self._cuda.streamIsCapturing(stream):
            raise RuntimeError(
                f"{work} was not seen before this graph capture, in which it cannot be timed; run "
                "it once outside of the graph, or switch tuning off"
            )
        best = fastest(self._cuda, stream, list(ways), lambda name: ways[name](), Unsupported, kept)
        best = best or next(iter(ways))  # all were refused: running the first way raises the reason
        return names.get(self._file.publish(key, best.encode(), instead_of=remembered), best)


FORMAT = 3
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t): plain data, valid for one cuBLASLt version
CHOICE_BYTES = ALGORITHM_BYTES + 1  # the last byte: 1 if FP8 products accumulate fast, else 0
CHECK_BYTES = 4  # CRC of an entry in the file


class AlgorithmFile:
    """Results of tuning, shared by the ranks of a process and, on disk, by processes. All ranks
    must run the same algorithm, and so must every later run of a command: so the first result
    published for a key stays. path: the file; None: results stay in memory. An unreadable file
    counts as empty. A file of another user (`read_own`) or one that cannot be written causes a
    warning."""

    def __init__(self, path: Path | None):
        self.path = path
        self._lock = threading.Lock()
        self._known = self._read()

    def get(self, key: str) -> bytes | None:
        """Return the algorithm published for the key; None without one."""
        with self._lock:
            return self._known.get(key)

    def publish(self, key: str, algorithm: bytes, instead_of: bytes | None) -> bytes:
        """Offer an algorithm; return the algorithm to use, which is another rank's if that rank was
        earlier. instead_of: the caller's result of `get`; the offer replaces it, unless another
        rank has done so."""
        with self._lock:
            if self._known.get(key) != instead_of:
                return self._known[key]
            self._known[key] = algorithm
            if self.path is not None:
                self._merge(key, instead_of)
            return self._known[key]

    def _merge(self, key: str, instead_of: bytes | None) -> None:
        """Write the key to disk, where other processes may have added keys, or the same key."""
        try:
            with _locked(self.path.parent):
                on_disk = self._read()
                if on_disk.get(key, instead_of) != instead_of:
                    self._known[key] = on_disk[key]
                # Keep algorithms in use here, and on disk also replacements by other processes.
                self._write(self._known | on_disk | {key: self._known[key]})
                self._known = on_disk | self._known
        except OSError as error:
            folder, reason = self.path.parent, error.strerror
            line = f"what was tuned is not kept in {folder} ({reason}); set LLMQ_CACHE_DIR"
            warn(f"{line} to a folder that can be written")
            self.path = None  # no further attempts

    def _read(self) -> dict[str, bytes]:
        if self.path is None:
            return {}
        try:
            content = json.loads(read_own(self.path))
            if content["format"] != FORMAT:
                return {}
            entries = {str(k): bytes.fromhex(v) for k, v in content["algorithms"].items()}
        except ConfigError as error:
            warn(str(error))
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
        known = {key: entry[:-CHECK_BYTES] for key, entry in entries.items()}
        return {key: v for key, v in known.items() if _entry(key, v) == entries[key]}

    def _write(self, known: dict[str, bytes]) -> None:
        algorithms = {k: _entry(k, v).hex() for k, v in sorted(known.items())}
        text = json.dumps({"format": FORMAT, "algorithms": algorithms}, indent=1)
        write_shared(self.path, text.encode() + b"\n")


def _entry(key: str, algorithm: bytes) -> bytes:
    """Return the file's entry of a key, with a CRC, because damaged bytes might be a valid
    algorithm."""
    return algorithm + zlib.crc32(key.encode() + algorithm).to_bytes(CHECK_BYTES, "little")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing algorithm files in the folder within the block. OSError if
    the folder cannot be made or opened."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_files: dict[Path | None, AlgorithmFile] = {}
_files_lock = threading.Lock()


def algorithm_file(path: Path | None) -> AlgorithmFile:
    """Return the process's only AlgorithmFile for the path."""
    with _files_lock:
        if path not in _files:
            _files[path] = AlgorithmFile(path)
        return _files[path]
