"""Tuning chooses the fastest of several ways to run the same work on a GPU.

First all candidates are timed briefly. Then the best candidates are timed for longer, by turns,
fewer in each round, because a card under load lowers its clock and another candidate may then be
fastest. Slow candidates are timed only once, because a single run of the fifty algorithms of a
large LM head's product already takes seconds. A file keeps the choices, which all ranks of a
process share.
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

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # values of cudaMemcpyKind
LOOK = 3  # number of first timed runs of a candidate that takes less than LONG_MS
LONG_MS = 1.0
FINALISTS = (10, 5, 3, 2)  # number of candidates, the fastest so far, in each further round
# milliseconds for which a finalist runs; 20 such runs for each of 15 products take 2.4 s
ROUND_MS = 8.0
# milliseconds; for faster work the first runs decide, because longer tuning would not pay
WORTH_MS = 0.05
MIN_GAIN = 0.99  # to win, a later candidate must take less than this share of the best time so far

Candidate = TypeVar("Candidate")


class Unsupported(RuntimeError):
    """A library cannot compute some work on this device with any of the requested algorithms."""


def fastest(
    cuda: Any,
    stream: int,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], None],
    refused: type[Exception],
    kept: Sequence[Tensor] = (),
) -> Candidate | None:
    """Return the candidate that takes the least time; ties go to the first, and None means that all
    were refused. cuda: CuPy's runtime module. run: function that enqueues one run of a candidate on
    the stream, or raises `refused`. kept: tensors to which a run adds; their content is restored
    afterwards. The call waits for the stream."""
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
            run(candidate)  # the first run loads the code
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
    """The choices of one rank, used by the rank's thread with its GPU current. A file keeps the
    choices together with the algorithms of products. The first choice that a rank publishes holds
    for all ranks, so that all GPUs of a run, and later runs, use the same kernels. chosen: name of
    the way that was taken, for each work so far."""

    def __init__(self, machine: str, *, cuda: Any, cache_path: Path | None):
        """machine: name of the GPU and releases of the libraries, for which a choice is valid.
        cuda: CuPy's CUDA runtime. cache_path: the file of choices, or None."""
        self._machine = machine
        self._cuda = cuda
        self._file = algorithm_file(cache_path)
        self.chosen: dict[str, str] = {}

    def run(self, stream: int, work: str, ways: Ways, kept: tuple[Tensor, ...]) -> None:
        """Enqueue the work once. The first call times every way on the stream and waits for the
        stream. work, ways, kept: see Device.choose. Raises RuntimeError inside a graph capture if
        the work is not timed yet."""
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
        # if all were refused, running the first way raises the reason
        best = best or next(iter(ways))
        return names.get(self._file.publish(key, best.encode(), instead_of=remembered), best)


FORMAT = 3
# sizeof(cublasLtMatmulAlgo_t), plain data that is valid for one cuBLASLt version
ALGORITHM_BYTES = 64
CHOICE_BYTES = ALGORITHM_BYTES + 1  # the last byte is 1 if FP8 products accumulate fast, else 0
CHECK_BYTES = 4  # bytes of the CRC of an entry in the file


class AlgorithmFile:
    """The results of tuning, shared by the ranks of a process and, through a file, by processes.
    All ranks and every later run must use the same algorithm, so the first result published for a
    key stays. path: path of the file; None keeps results in memory. An unreadable file counts as
    empty. A file of another user (see `read_own`), or a file that cannot be written, causes a
    warning."""

    def __init__(self, path: Path | None):
        self.path = path
        self._lock = threading.Lock()
        self._known = self._read()

    def get(self, key: str) -> bytes | None:
        """Return the algorithm that was published for the key; None if there is none."""
        with self._lock:
            return self._known.get(key)

    def publish(self, key: str, algorithm: bytes, instead_of: bytes | None) -> bytes:
        """Offer an algorithm for the key; return the algorithm to use, which is another rank's if
        that rank published first. instead_of: the caller's result of `get`, which the offer
        replaces unless another rank has already replaced it."""
        with self._lock:
            if self._known.get(key) != instead_of:
                return self._known[key]
            self._known[key] = algorithm
            if self.path is not None:
                self._merge(key, instead_of)
            return self._known[key]

    def _merge(self, key: str, instead_of: bytes | None) -> None:
        """Write the key to the file, to which other processes may have added keys, even this
        key."""
        try:
            with _locked(self.path.parent):
                on_disk = self._read()
                if on_disk.get(key, instead_of) != instead_of:
                    self._known[key] = on_disk[key]
                # Algorithms in use here stay, and algorithms that other processes have replaced
                # stay on disk.
                self._write(self._known | on_disk | {key: self._known[key]})
                self._known = on_disk | self._known
        except OSError as error:
            folder, reason = self.path.parent, error.strerror
            line = f"what was tuned is not kept in {folder} ({reason}); set LLMQ_CACHE_DIR"
            warn(f"{line} to a folder that can be written")
            self.path = None  # later results are not written

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
    """Return the file's entry of a key, with a CRC because damaged bytes might be a valid
    algorithm."""
    return algorithm + zlib.crc32(key.encode() + algorithm).to_bytes(CHECK_BYTES, "little")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within the block, keep other processes from writing algorithm files in the folder. Raises
    OSError if the folder cannot be made or opened."""
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
    """Return the AlgorithmFile of this path, which all callers in the process share."""
    with _files_lock:
        if path not in _files:
            _files[path] = AlgorithmFile(path)
        return _files[path]
