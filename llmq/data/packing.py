"""Packing: cut documents into pieces of at most a sequence's length, and fill rows by best fit.

Best-fit decreasing: from the longest piece to the shortest, each piece goes into the row with the
least room that is enough, or into a new row. All pieces of one length are placed at once, so the
time depends on the number of different lengths, not on the number of documents. Each epoch shuffles
the documents among pieces of equal length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of documents, each of at most seq_len tokens; arrays (n,).

    file: int32, number of the file. start: int64, position in the file. length: int32, tokens.
    goes_on: bool, True if the document has a token behind the piece, the target of the piece's last
    token. first: int32, tokens of the first document of a pair; 0 for a single document. documents:
    number of documents. cut: number of documents longer than seq_len.
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
        """The pieces for which `chosen`, bool (n,), is True."""
        names = ("file", "start", "length", "goes_on", "first")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @property
    def tokens(self) -> int:
        return int(self.length.sum(dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """Checksums of all arrays, as text."""
        arrays = (self.file, self.start, self.length, self.goes_on)
        arrays += (self.first,) if self.first.any() else ()
        return " ".join(str(zlib.crc32(array)) for array in arrays)


def cut_documents(file: int, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Pieces:
    """Pieces of documents of one file, each of seq_len tokens, with a shorter last piece. starts,
    lengths: first token and number of tokens of each document, int64 (n,). Every token but a
    document's first is the target of one token of one piece. A single last token is no piece,
    because it has no target."""
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
    """Pieces of pairs of documents of one file, a piece for each pair. starts, lengths: first token
    and number of tokens of each pair, int64 (n,). first: tokens of each pair's first document,
    (n,)."""
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
    """Pieces of all `parts` together; no pieces for no parts."""
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
    """Rows of pieces, which are numbered from the longest to the shortest. slots: int32 (n,), the
    pieces of row 0, then the pieces of row 1, …. edges: int64 (rows + 1,), the place in slots where
    each row begins."""

    slots: np.ndarray
    edges: np.ndarray

    def __len__(self) -> int:
        return len(self.edges) - 1


def best_fit(lengths: np.ndarray, seq_len: int) -> Rows:
    """Rows of seq_len tokens, filled with pieces of these lengths (n,), 1 to seq_len each."""
    counts = np.bincount(lengths, minlength=seq_len + 1)
    row_of = np.empty(len(lengths), np.int32)
    filler = _Filler(seq_len, row_of)
    for length in np.flatnonzero(counts)[::-1].tolist():
        filler.place(length, int(counts[length]))
    slots = np.argsort(row_of, kind="stable").astype(np.int32)
    edges = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=filler.rows))])
    return Rows(slots, edges.astype(np.int64))


class _Filler:
    """Fills rows with pieces; keeps rows by the room that is left in a row."""

    def __init__(self, seq_len: int, row_of: np.ndarray) -> None:
        """row_of: receives the row of each piece, in the order in which pieces are placed."""
        self.seq_len, self.row_of = seq_len, row_of
        self.rows = self._placed = 0
        self._with_room: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]
        self._rooms = 0  # bit r is set where _with_room[r] holds rows

    def place(self, length: int, count: int) -> None:
        """Place `count` pieces of this length; no longer piece may follow."""
        while count:
            fitting = self._rooms >> length
            if fitting:  # take rows with the least room that is enough
                room = length + (fitting & -fitting).bit_length() - 1
                rows = self._take(room)
            else:
                room = self.seq_len
                new = -(-count // (room // length))
                rows = np.arange(self.rows, self.rows + new, dtype=np.int32)
                self.rows += new
            # A row with a new piece has the least room: the next piece of this length goes there.
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
