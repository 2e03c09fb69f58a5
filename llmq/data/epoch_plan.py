"""The order of the sequences of an epoch: arithmetic, without reading data.

An epoch has parts in a random order, and each part has sequences in a random order. A place is
(epoch, part, sequence). By default an epoch is one part, in which the sequences of all files are
shuffled together; sources with weights alternate in this part. In llm.q's order the parts are
files. Sequences are windows of files, or rows of packed documents.

Orders are computed from seeds alone. llm.q's order uses Philox and libstdc++'s random engine and
shuffle. The order of all windows uses a Feistel network, which needs no array. The orders of packed
documents and of weighted files use sorted hashes.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from llmq.base.errors import DataError
from llmq.data.document_index import DocumentIndex
from llmq.data.packing import Pieces, best_fit
from llmq.data.reader import Span
from llmq.data.tokens import TokenFile


def philox_4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four random 32-bit words for one counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF
        c2, c3 = (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# ------------------------------------------------------------------------------------------------
# The order of llm.q


_LEHMER = 2**31 - 1  # modulus of std::default_random_engine in libstdc++


def shuffled(n: int, engine_seed: int) -> np.ndarray:
    """Permutation of 0..n-1, int32 (n,), as std::ranges::shuffle of libstdc++ makes it from an
    engine's seed: element i is swapped with a random element of 0..i, for i = 1, 2, …. While n * n
    fits into the engine's range, one draw serves two elements."""
    state, order = engine_seed % _LEHMER or 1, list(range(n))

    def draw(end: int) -> int:
        """Number below `end` by std::uniform_int_distribution, which drops draws beyond a multiple
        of `end`."""
        nonlocal state
        scale = (_LEHMER - 2) // end
        while True:
            state = state * 16807 % _LEHMER
            if state <= end * scale:
                return (state - 1) // scale

    def swap(i: int, j: int) -> None:
        order[i], order[j] = order[j], order[i]

    if (_LEHMER - 2) // max(n, 1) < n:
        for i in range(1, n):
            swap(i, draw(i + 1))
        return np.array(order, np.int32)
    if n > 1 and n % 2 == 0:  # a draw for element 1 alone
        swap(1, draw(2))
    for i in range(1 + (n % 2 == 0), n, 2):
        first, second = divmod(draw((i + 1) * (i + 2)), i + 2)
        swap(i, first)
        swap(i + 1, second)
    return np.array(order, np.int32)


T = TypeVar("T")
FILE_ORDER = 0x73653753  # second counter word of the file shuffle; the i-th file's chunks use i


def remembered(make: Callable[..., T], most: int) -> Callable[..., T]:
    """Function `make` with a cache of its last `most` results. A lock makes threads wait for a
    result instead of computing the result again: ranks ask for a result at about the same time."""
    cached, lock = functools.lru_cache(most)(make), threading.Lock()

    def of(*given: int) -> T:
        with lock:
            return cached(*given)

    return of


def _epoch_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """Permutation, int32 (n,), of n files if `which` is FILE_ORDER, else of the n chunks of file
    number `which`."""
    word = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, 0, 0))[0]
    order = shuffled(n, word)
    order.flags.writeable = False
    return order


epoch_order = remembered(_epoch_order, 8)


# ------------------------------------------------------------------------------------------------
# An order by hashes


def hashed_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """Permutation of 0..n-1, int64 (n,), by sorting `hashes`; not cached."""
    return np.argsort(hashes(n, seed, epoch, which))


def hashes(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """Distinct random numbers for 0..n-1, uint32 (n,); n: at most 2^32. Every step is a bijection,
    so no two numbers are equal, and sorting gives the same order on every machine."""
    words = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, _HASHED, 0))
    x = np.arange(n, dtype=np.uint32)
    for word, multiplier in zip(words, _MULTIPLIERS, strict=True):
        x ^= np.uint32(word)
        x ^= x >> np.uint32(16)
        x *= np.uint32(multiplier)
    x ^= x >> np.uint32(15)
    return x


_HASHED = 0x6B636170  # third counter word, 0 in llm.q's orders
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B, 0x85EBCA6B, 0xC2B2AE35)  # odd, from well-known hashes


class Permutation:
    """Random permutation of the numbers 0..n-1, 1 <= n <= 2^64, computed place by place in constant
    memory: a Feistel network on the least power of two that is at least n. A result of n or more
    goes through the network again (cycle walking).

    Each round changes one half of the bits by a hash of the other half. The inverse permutation
    runs the same rounds backwards.
    """

    __slots__ = ("_low", "_masks", "_rounds", "n")

    def __init__(self, n: int, seed: int, epoch: int, which: int) -> None:
        """seed: uint64. epoch, which: uint32; which: number of the source. Other values give an
        unrelated order."""
        bits = (n - 1).bit_length()
        self.n, self._low = n, bits // 2
        self._masks = (1 << bits - self._low) - 1, (1 << self._low) - 1
        key, keys = (seed & 0xFFFFFFFF, seed >> 32), []
        for i in range(_ROUNDS // 2):
            words = philox_4x32(key, (epoch, which, _NETWORK, i))
            keys += [words[0] << 32 | words[1], words[2] << 32 | words[3]]
        self._rounds = [(number % 2 == 0, key) for number, key in enumerate(keys)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        """The number at a place."""
        return self._walk(place, self._rounds)

    def place_of(self, number: int) -> int:
        """The place of a number."""
        return self._walk(number, self._rounds[::-1])

    def _walk(self, x: int, rounds: Sequence[tuple[bool, int]]) -> int:
        high_mask, low_mask = self._masks
        while True:
            high, low = x >> self._low, x & low_mask
            for on_high, key in rounds:
                if on_high:
                    high ^= _mixed(low + key) & high_mask
                else:
                    low ^= _mixed(high + key) & low_mask
            x = high << self._low | low
            if x < self.n:
                return x


_ROUNDS = 12  # rounds: 4 make long orders uniform, but 8 were too few for orders of 5
_NETWORK = 0x66656973  # third counter word of networks, as _HASHED of hashes


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014), a bijection on 64 bits."""
    x &= _64_BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _64_BITS
    return x ^ x >> 31


_64_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a split of the sequences of files; the last sequences of files are held out.
    fraction: share of held-out sequences, 0 < fraction < 1, at least one sequence. held_out: True
    for the held-out sequences, False for the rest."""

    fraction: float
    held_out: bool

    def of(self, chunks: Sequence[int]) -> tuple[list[int], list[int]]:
        """For each file, the index of this side's first sequence, and the number of this side's
        sequences. chunks: number of sequences of each file on both sides."""
        held, total = [], 0
        for count in chunks:
            before, total = int(total * self.fraction), total + count
            held.append(int(total * self.fraction) - before)
        if total > 0 and not any(held):
            last = max(i for i, count in enumerate(chunks) if count)
            held[last] = 1
        rest = [count - some for count, some in zip(chunks, held, strict=True)]
        return (rest, held) if self.held_out else ([0] * len(rest), rest)


# ------------------------------------------------------------------------------------------------
# Sources of sequences


_NO_ENDS = np.empty(0, np.int64)
_PASSES = 3  # cached passes: two of training, as one begins while another ends, one of validation


class FileWindows:
    """Windows of seq_len tokens in each file; the token behind a window is its last target.

    counts: number of windows of each file. first: number of each file's first window. tail: tokens
    of each file's shorter last window, 0 for none.
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
        """split: side of a split of the windows; None: all windows. indices: documents of each
        file, for ends of spans; None: spans without ends. tails: True to add a shorter last window
        to each file."""
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

    def lengths(self, file: int) -> np.ndarray:
        """Tokens of each window of a file, int64 (windows,)."""
        out = np.full(self.counts[file], self.seq_len, np.int64)
        if self.tail[file]:
            out[-1] = self.tail[file]
        return out

    def tokens(self, files: Sequence[int] | None = None) -> int:
        """Number of tokens in the windows of these files; None: of all files."""
        numbers = range(len(self.counts)) if files is None else files
        full = sum(self.counts[i] for i in numbers) * self.seq_len
        return full - sum(self.seq_len - self.tail[i] for i in numbers if self.tail[i])

    def span(self, file: int, index: int) -> Span:
        """Window `index` of a file."""
        is_tail = self.tail[file] and index == self.counts[file] - 1
        length = self.tail[file] if is_tail else self.seq_len
        start = (self.first[file] + index) * self.seq_len
        ends = _NO_ENDS
        if self._indices is not None:
            offsets = self._indices[file].offsets
            inside = np.searchsorted(offsets, (start, start + length), side="right")
            ends = offsets[slice(*inside)] - start
        return Span(file, start, length, True, ends)


class WindowSource:
    """Source of sequences: the windows of some files. The order of a pass is computed from (seed,
    pass) alone. Threads may share a source. count: number of sequences. tokens: number of tokens,
    without padding."""

    def __init__(
        self, windows: FileWindows, files: Sequence[int], which: int, *, sorts: bool = False
    ) -> None:
        """which: number of the source; each number has an order of its own. sorts: True to make the
        order by sorting hashes, int64 (count,) in memory, False to use a Permutation."""
        self._windows, self._files, self._which = windows, list(files), which
        self._make_permutation = hashed_order if sorts else Permutation
        self._edges = np.cumsum([0, *(windows.counts[i] for i in files)])
        self.count = int(self._edges[-1])
        self.tokens = windows.tokens(files)
        self._order = remembered(self._make_order, _PASSES)

    def _make_order(self, seed: int, number: int) -> Permutation | np.ndarray:
        return self._make_permutation(self.count, seed, number, self._which)

    def spans(self, seed: int, number: int, index: int) -> list[Span]:
        """Sequence `index` of pass `number`."""
        chosen = int(self._order(seed, number)[index])
        i = int(np.searchsorted(self._edges, chosen, side="right")) - 1
        return [self._windows.span(self._files[i], chosen - int(self._edges[i]))]

    def lengths(self, seed: int, number: int) -> np.ndarray:
        """Tokens of each sequence of a pass, int64 (count,)."""
        order, windows = self._order(seed, number), self._windows
        if not isinstance(order, Permutation):
            return np.concatenate([windows.lengths(i) for i in self._files])[order]
        out = np.full(self.count, windows.seq_len, np.int64)
        for i, edge in zip(self._files, self._edges[1:].tolist(), strict=True):
            if windows.tail[i]:  # the file's last window is shorter
                out[order.place_of(edge - 1)] = windows.tail[i]
        return out


class PackedSource:
    """Source of sequences: rows of documents, as many in a row as fit, or one. Has the attributes
    and methods of WindowSource."""

    def __init__(self, pieces: Pieces, seq_len: int, which: int, *, alone: bool) -> None:
        """alone: True for one piece in each row."""
        self.pieces, self._seq_len, self._which = pieces, seq_len, which
        self._rows = None if alone else best_fit(pieces.length, seq_len)
        self.count = len(pieces) if alone else len(self._rows)
        self.tokens = pieces.tokens
        self._pass = remembered(self._make_pass, _PASSES)

    def _make_pass(self, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the rows, and order of the pieces that fill rows, the longest piece first."""
        rows = hashed_order(self.count, seed, number, 2 * self._which)
        if self._rows is None:
            return rows, _NO_ENDS
        missing = np.uint64(self._seq_len) - self.pieces.length.astype(np.uint64)
        numbers = hashes(len(self.pieces), seed, number, 2 * self._which + 1)
        pieces = np.argsort(missing << np.uint64(32) | numbers).astype(np.uint32)
        return rows.astype(np.uint32), pieces

    def spans(self, seed: int, number: int, index: int) -> list[Span]:
        rows, order = self._pass(seed, number)
        if self._rows is None:
            return spans_of(self.pieces, rows[index : index + 1])
        row = int(rows[index])
        slots = self._rows.slots[self._rows.edges[row] : self._rows.edges[row + 1]]
        return spans_of(self.pieces, order[slots])

    def lengths(self, seed: int, number: int) -> np.ndarray:
        rows, order = self._pass(seed, number)
        if self._rows is None:
            return self.pieces.length[rows].astype(np.int64)
        in_slots = self.pieces.length[order[self._rows.slots]].astype(np.int64)
        return np.add.reduceat(in_slots, self._rows.edges[:-1])[rows]


SequenceSource = WindowSource | PackedSource


def spans_of(pieces: Pieces, chosen: np.ndarray) -> list[Span]:
    """Spans of the pieces with these numbers, one behind the other."""
    names = ("file", "start", "length", "goes_on", "first")
    columns = (getattr(pieces, name)[chosen].tolist() for name in names)
    return [
        Span(file, start, length, goes_on, (first,) * (first > 0) + (length,) * (not goes_on))
        for file, start, length, goes_on, first in zip(*columns, strict=True)
    ]


# ------------------------------------------------------------------------------------------------
# Plans


class FilesInTurn:
    """Plan in llm.q's order: each epoch shuffles the files, and the windows of each file. Threads
    may share a plan. counts: number of sequences of each part."""

    def __init__(self, windows: FileWindows) -> None:
        self._windows, self.counts = windows, windows.counts

    def parts(self, seed: int, epoch: int) -> np.ndarray:
        """Numbers of the parts in the order of an epoch, int32 (parts,)."""
        return epoch_order(len(self.counts), seed, epoch, FILE_ORDER)

    def spans(self, seed: int, epoch: int, place: int, index: int) -> list[Span]:
        """Sequence `index` of the part at a place of the epoch."""
        file = int(self.parts(seed, epoch)[place])
        order = epoch_order(self.counts[file], seed, epoch, place)
        return [self._windows.span(file, int(order[index]))]

    def lengths(self, seed: int, epoch: int, place: int) -> np.ndarray:
        """Tokens of each sequence of the part at a place, without padding, int64 (sequences,)."""
        file = int(self.parts(seed, epoch)[place])
        lengths = self._windows.lengths(file)
        if not self._windows.tail[file]:  # all windows are equally long
            return lengths
        return lengths[epoch_order(self.counts[file], seed, epoch, place)]

    def tokens(self) -> int:
        """Number of tokens of an epoch without padding; the mean over epochs if epochs end inside a
        pass of a source."""
        return self._windows.tokens()


class Mixture:
    """Plan in which sources alternate, each with a share that is spread evenly over the epoch. Has
    the attributes and methods of FilesInTurn.

    An epoch has as many sequences as all sources together. A source's sequences come in passes,
    which continue from epoch to epoch: a sequence is repeated only after all sequences of its
    source. shares: number of sequences of each source in an epoch.
    """

    def __init__(self, sources: Sequence[SequenceSource], weights: Sequence[float]) -> None:
        """weights: relative weights of the sources, each above 0; they need not sum to 1."""
        self.sources = list(sources)
        self.shares = shares_of(sum(source.count for source in sources), weights)
        self.counts = [sum(self.shares)]
        self._edges = np.cumsum([0, *self.shares])
        self._turns: np.ndarray | None = None
        if len(sources) > 1:
            # The j-th of n sequences stands at (j + 1/2) / n of the epoch.
            at = np.concatenate([(np.arange(n) + 0.5) / n for n in self.shares])
            self._turns = np.argsort(at, kind="stable").astype(np.uint32)

    def parts(self, seed: int, epoch: int) -> np.ndarray:
        return np.zeros(1, np.int32)

    def spans(self, seed: int, epoch: int, place: int, index: int) -> list[Span]:
        turn = index if self._turns is None else int(self._turns[index])
        which = int(np.searchsorted(self._edges, turn, side="right")) - 1
        source = self.sources[which]
        done = epoch * self.shares[which] + turn - int(self._edges[which])
        return source.spans(seed, *divmod(done, source.count))

    def lengths(self, seed: int, epoch: int, place: int) -> np.ndarray:
        of_sources = []
        for source, share in zip(self.sources, self.shares, strict=True):
            first, start = divmod(epoch * share, source.count)
            last = (epoch * share + share - 1) // source.count
            passes = [source.lengths(seed, number) for number in range(first, last + 1)]
            of_sources.append(np.concatenate(passes)[start : start + share])
        in_order = np.concatenate(of_sources)
        return in_order if self._turns is None else in_order[self._turns]

    def tokens(self) -> int:
        pairs = zip(self.sources, self.shares, strict=True)
        return sum(round(source.tokens * share / source.count) for source, share in pairs)


EpochPlan = FilesInTurn | Mixture


def shares_of(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` in the proportions of weights, by largest remainders: each share is off by
    less than 1. DataError for a share of 0."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    if 0 in shares and len(shares) > 1:
        weight = weights[shares.index(0)]
        raise DataError(
            f"--train-file: the weight {weight:g} of {sum(weights):g} is less than one of the "
            f"{total} sequences of an epoch: use a larger one, or leave the file out"
        )
    return shares
