"""Documents become pieces of at most a sequence's length, and pieces rows, by best fit.

Best-fit decreasing: from the longest piece to the shortest, each goes into the row in which it
leaves the least room, or into a new one. Pieces of one length are alike, so rows are filled for all
of a length at once: the time depends on the number of lengths and kinds of rows, not of documents.
Each epoch draws anew which document of a length comes where.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Parts of documents, each of at most seq_len tokens; arrays of (n,).

    file: int32, its number; start: int64, the position in it; length: int32, in tokens. goes_on:
    bool, whether the document has a token behind the piece, which its last token then predicts.
    first: int32, of a pair of documents the tokens of the first one; 0: it is one document.
    documents: how many; cut: those that have several pieces or lost their last token as an input.
    """

    file: np.ndarray
    start: np.ndarray
    length: np.ndarray
    goes_on: np.ndarray
    first: np.ndarray
    documents: int
    cut: int

    def __len__(self) -> int:
        return len(self.length)

    def only(self, chosen: np.ndarray) -> Pieces:
        """The pieces where `chosen` (n,) bool is True."""
        names = ("file", "start", "length", "goes_on", "first")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @property
    def tokens(self) -> int:
        return int(self.length.sum(dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """Checksums of all arrays."""
        arrays = (self.file, self.start, self.length, self.goes_on)
        arrays += (self.first,) if self.first.any() else ()
        return " ".join(str(zlib.crc32(array)) for array in arrays)


def cut_documents(file: int, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Pieces:
    """Cut documents of one file into pieces of seq_len tokens and a last one of the rest. starts,
    lengths: (n,) int64. Every token but a document's first is predicted by one token of one piece.
    A document's last token that would be alone is no piece: it has nothing to predict."""
    counts = -(-np.maximum(lengths - 1, 0) // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(document)) - first[document]) * seq_len
    left = lengths[document] - offset
    length = np.minimum(left, seq_len)
    return Pieces(
        file=np.full(len(document), file, np.int32),
        start=starts[document] + offset,
        length=length.astype(np.int32),
        goes_on=left > length,
        first=np.zeros(len(document), np.int32),
        documents=len(lengths),
        cut=int((lengths > seq_len).sum()),
    )


def whole_pairs(file: int, starts: np.ndarray, lengths: np.ndarray, first: np.ndarray) -> Pieces:
    """Pairs of documents of one file, each of which is one piece. starts, lengths: (n,) int64, of
    both together. first: (n,), tokens of the first document."""
    return Pieces(
        file=np.full(len(starts), file, np.int32),
        start=starts,
        length=lengths.astype(np.int32),
        goes_on=np.zeros(len(starts), bool),
        first=first.astype(np.int32),
        documents=2 * len(starts),
        cut=0,
    )


def joined(parts: Sequence[Pieces]) -> Pieces:
    """All pieces of several parts, of which there may be none."""
    types = {
        "file": np.int32,
        "start": np.int64,
        "length": np.int32,
        "goes_on": bool,
        "first": np.int32,
    }
    columns = (
        np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])
        for name, dtype in types.items()
    )
    return Pieces(*columns, sum(p.documents for p in parts), sum(p.cut for p in parts))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The pieces of each row; pieces are numbered from the longest to the shortest. slots: (n,)
    int32, the pieces of row 0, then those of row 1, …; edges: (rows + 1,) int64, the place in it
    where each row begins."""

    slots: np.ndarray
    edges: np.ndarray

    def __len__(self) -> int:
        return len(self.edges) - 1


def best_fit(lengths: np.ndarray, seq_len: int) -> Rows:
    """Fill rows of seq_len tokens with pieces of these lengths (n,), 1 to seq_len each."""
    counts = np.bincount(lengths, minlength=seq_len + 1)
    row_of = np.empty(len(lengths), np.int32)
    filler = _Filler(seq_len, row_of)
    for length in np.flatnonzero(counts)[::-1].tolist():
        filler.place(length, int(counts[length]))
    slots = np.argsort(row_of, kind="stable").astype(np.int32)
    edges = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=filler.rows))])
    return Rows(slots, edges.astype(np.int64))


class _Filler:
    """Rows that are being filled, ordered by the room that is left in them."""

    def __init__(self, seq_len: int, row_of: np.ndarray) -> None:
        """row_of: gets the row of each piece, in the order in which pieces are placed."""
        self.seq_len, self.row_of = seq_len, row_of
        self.rows = self._placed = 0
        self._with_room: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]
        self._rooms = 0  # bit r is set where _with_room[r] holds rows

    def place(self, length: int, count: int) -> None:
        """Place `count` pieces of this length; no longer piece may follow."""
        while count:
            fitting = self._rooms >> length
            if fitting:  # the least room that is enough
                room = length + (fitting & -fitting).bit_length() - 1
                rows = self._take(room)
            else:
                room = self.seq_len
                new = -(-count // (room // length))
                rows = np.arange(self.rows, self.rows + new, dtype=np.int32)
                self.rows += new
            # After a piece its row has the least room, so the next one of this length goes there.
            each = room // length
            full = min(len(rows), count // each)
            self._emit(np.repeat(rows[:full], each))
            self._put(room - each * length, rows[:full])
            count, rows = count - full * each, rows[full:]
            if 0 < count < each and len(rows):
                self._emit(np.repeat(rows[:1], count))
                self._put(room - count * length, rows[:1])
                count, rows = 0, rows[1:]
            self._put(room, rows)

    def _emit(self, rows: np.ndarray) -> None:
        self.row_of[self._placed : self._placed + len(rows)] = rows
        self._placed += len(rows)

    def _take(self, room: int) -> np.ndarray:
        rows = self._with_room[room].pop()
        if not self._with_room[room]:
            self._rooms &= ~(1 << room)
        return rows

    def _put(self, room: int, rows: np.ndarray) -> None:
        if len(rows) and room:
            self._with_room[room].append(rows)
            self._rooms |= 1 << room
