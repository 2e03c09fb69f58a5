"""What an epoch is made of: windows of files, or rows into which documents were packed.

A source has `count` sequences and gives any of them in any pass, an order that follows from (seed,
pass) alone. No data is read for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from llmq.data.document_index import DocumentIndex
from llmq.data.order import hashed_order, hashes
from llmq.data.packing import Pieces, best_fit
from llmq.data.reader import Span
from llmq.data.split import Split
from llmq.data.tokens import TokenFile

T = TypeVar("T")
_NO_ENDS = np.empty(0, np.int64)
_PASSES = 3  # that are remembered: one ends while the next one begins, and validations


class Source(Protocol):
    """Sequences that a run passes over, again and again. For any number of threads.

    count: how many; tokens: those in them, without padding.
    """

    count: int
    tokens: int

    def spans(self, seed: int, number: int, index: int) -> list[Span]:
        """The sequence with this index in the pass of this number."""

    def lengths(self, seed: int, number: int) -> np.ndarray:
        """Tokens of each sequence of a pass, (count,)."""


class FileWindows:
    """Windows of seq_len tokens in each file; the one behind each is its last target.

    counts, first: by file, how many windows, and the number of the first of them in the file.
    tail: by file, tokens of a shorter one behind them, 0 for none.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        split: Split | None,
        indices: Sequence[DocumentIndex] | None = None,
        *,
        tails: bool = False,
    ) -> None:
        """indices: the documents of each file, if they matter. tails: add a shorter last window."""
        self.seq_len, self._indices = seq_len, indices
        self.counts = [max(file.num_tokens - 1, 0) // seq_len for file in files]
        self.first, self.tail = [0] * len(files), [0] * len(files)
        full = self.counts
        if split is not None:
            self.first, self.counts = split.of(full)
        for i, file in enumerate(files if tails else ()):
            left = file.num_tokens - 1 - full[i] * seq_len
            if left > 0 and (split is None or self.counts[i] > 0):
                self.counts[i], self.tail[i] = self.counts[i] + 1, left

    def length(self, file: int, index: int) -> int:
        """Tokens of a window; index: among those of this file."""
        last = index == self.counts[file] - 1
        return self.tail[file] if last and self.tail[file] else self.seq_len

    def lengths(self, file: int) -> np.ndarray:
        """Of all windows of a file."""
        out = np.full(self.counts[file], self.seq_len, np.int64)
        if self.tail[file]:
            out[-1] = self.tail[file]
        return out

    def span(self, file: int, index: int) -> Span:
        """A window; index: among those of this file."""
        length = self.length(file, index)
        start = (self.first[file] + index) * self.seq_len
        ends = _NO_ENDS
        if self._indices is not None:
            offsets = self._indices[file].offsets
            inside = np.searchsorted(offsets, (start, start + length), side="right")
            ends = offsets[slice(*inside)] - start
        return Span(file, start, length, True, ends)


class WindowSource:
    """The windows of some files as one source."""

    def __init__(self, windows: FileWindows, files: Sequence[int], which: int) -> None:
        """which: number of the source, so that each has an order of its own."""
        self._windows, self._files, self._which = windows, list(files), which
        self._edges = np.cumsum([0, *(windows.counts[i] for i in files)])
        self.count = int(self._edges[-1])
        self.tokens = sum(int(windows.lengths(i).sum()) for i in files)
        self._order = remembered(self._make_order)

    def _make_order(self, seed: int, number: int) -> np.ndarray:
        return hashed_order(self.count, seed, number, self._which)

    def spans(self, seed: int, number: int, index: int) -> list[Span]:
        """See Source."""
        chosen = int(self._order(seed, number)[index])
        i = int(np.searchsorted(self._edges, chosen, side="right")) - 1
        return [self._windows.span(self._files[i], chosen - int(self._edges[i]))]

    def lengths(self, seed: int, number: int) -> np.ndarray:
        """See Source."""
        of_files = [self._windows.lengths(i) for i in self._files]
        return np.concatenate(of_files)[self._order(seed, number)]


class PackedSource:
    """Documents in rows: as many in each as fit, or one."""

    def __init__(self, pieces: Pieces, seq_len: int, which: int, *, alone: bool) -> None:
        """alone: one piece in each row."""
        self.pieces, self._seq_len, self._which = pieces, seq_len, which
        self._rows = None if alone else best_fit(pieces.length, seq_len)
        self.count = len(pieces) if alone else len(self._rows)
        self.tokens = pieces.tokens
        self._pass = remembered(self._make_pass)

    def _make_pass(self, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the rows, and of the pieces that fill them: the longest first."""
        rows = hashed_order(self.count, seed, number, 2 * self._which)
        if self._rows is None:
            return rows, _NO_ENDS
        missing = np.uint64(self._seq_len) - self.pieces.length.astype(np.uint64)
        numbers = hashes(len(self.pieces), seed, number, 2 * self._which + 1)
        pieces = np.argsort(missing << np.uint64(32) | numbers).astype(np.uint32)
        return rows.astype(np.uint32), pieces

    def spans(self, seed: int, number: int, index: int) -> list[Span]:
        """See Source."""
        rows, order = self._pass(seed, number)
        if self._rows is None:
            return self._spans(rows[index : index + 1])
        row = int(rows[index])
        slots = self._rows.slots[self._rows.edges[row] : self._rows.edges[row + 1]]
        return self._spans(order[slots])

    def _spans(self, chosen: np.ndarray) -> list[Span]:
        p = self.pieces
        columns = (column[chosen].tolist() for column in (p.file, p.start, p.length, p.goes_on))
        return [
            Span(file, start, length, goes_on, () if goes_on else (length,))
            for file, start, length, goes_on in zip(*columns, strict=True)
        ]

    def lengths(self, seed: int, number: int) -> np.ndarray:
        """See Source."""
        rows, order = self._pass(seed, number)
        if self._rows is None:
            return self.pieces.length[rows].astype(np.int64)
        in_slots = self.pieces.length[order[self._rows.slots]].astype(np.int64)
        return np.add.reduceat(in_slots, self._rows.edges[:-1])[rows]


def remembered(make: Callable[[int, int], T]) -> Callable[[int, int], T]:
    """A function of (seed, pass) that keeps its last results, and makes each for all threads."""
    cached, lock = functools.lru_cache(maxsize=_PASSES)(make), threading.Lock()

    def of(seed: int, number: int) -> T:
        with lock:
            return cached(seed, number)

    return of
