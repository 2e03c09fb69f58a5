"""The file of tuned algorithms and other choices, shared by the ranks of a process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from llmq.base.errors import ConfigError, warn
from llmq.base.files import read_own, write_shared

FORMAT = 3
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t): plain data, valid for one cuBLASLt version
CHOICE_BYTES = ALGORITHM_BYTES + 1  # and whether FP8 products accumulate fast: 0 or 1
CHECK_BYTES = 4  # of an entry of the file


class AlgorithmFile:
    """The results of tuning, shared by the ranks of a process and, on disk, by processes.

    All ranks must run the same algorithm, and every run of a command the same as the last: the
    first one published for a key stays. path None: in memory only. A file that cannot be read is
    treated as empty; one of another user (`read_own`) and one that cannot be written are warned of.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._lock = threading.Lock()
        self._known = self._read()

    def get(self, key: str) -> bytes | None:
        """The algorithm of the key, None if there is none."""
        with self._lock:
            return self._known.get(key)

    def publish(self, key: str, algorithm: bytes, instead_of: bytes | None) -> bytes:
        """Offer an algorithm; returns the one to use, another's if that came first.

        instead_of: what `get` returned, and what is replaced if it is still there.
        """
        with self._lock:
            if self._known.get(key) != instead_of:
                return self._known[key]
            self._known[key] = algorithm
            if self.path is not None:
                self._merge(key, instead_of)
            return self._known[key]

    def _merge(self, key: str, instead_of: bytes | None) -> None:
        """Put the key on disk, where other processes may have added others, or the same one."""
        try:
            with _locked(self.path.parent):
                there = self._read()
                if there.get(key, instead_of) != instead_of:
                    self._known[key] = there[key]
                # An algorithm that is already used here stays; what others have replaced on disk
                # does, too.
                self._write(self._known | there | {key: self._known[key]})
                self._known = there | self._known
        except OSError as error:
            folder, reason = self.path.parent, error.strerror
            line = f"what was tuned is not kept in {folder} ({reason}); set LLMQ_CACHE_DIR"
            warn([f"{line} to a folder that can be written"])
            self.path = None  # no further attempts

    def _read(self) -> dict[str, bytes]:
        if self.path is None:
            return {}
        try:
            content = json.loads(read_own(self.path))
            if content["format"] != FORMAT:
                return {}
            found = {str(k): bytes.fromhex(v) for k, v in content["algorithms"].items()}
        except ConfigError as error:
            warn([str(error)])
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
        known = {key: entry[:-CHECK_BYTES] for key, entry in found.items()}
        return {key: v for key, v in known.items() if _entry(key, v) == found[key]}

    def _write(self, known: dict[str, bytes]) -> None:
        algorithms = {k: _entry(k, v).hex() for k, v in sorted(known.items())}
        text = json.dumps({"format": FORMAT, "algorithms": algorithms}, indent=1)
        write_shared(self.path, text.encode() + b"\n")


def _entry(key: str, algorithm: bytes) -> bytes:
    """The file's entry of a key: damaged bytes could be another algorithm that runs, too."""
    return algorithm + zlib.crc32(key.encode() + algorithm).to_bytes(CHECK_BYTES, "little")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing files of this kind there. Raises OSError."""
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
    """The process's one AlgorithmFile for the path."""
    with _files_lock:
        if path not in _files:
            _files[path] = AlgorithmFile(path)
        return _files[path]
