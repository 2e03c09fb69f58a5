"""Which sequence comes where in an epoch: plain arithmetic, without reading data.

An epoch has parts, which come in a random order; so do the sequences in each part. A place is
(epoch, part, sequence). In llm.q's order the parts are the files. With packed documents or weighted
files there is one part, in which sources take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmq.base.errors import DataError
from llmq.data.order import FILE_ORDER, epoch_order
from llmq.data.reader import Span
from llmq.data.sources import FileWindows, Source


class EpochPlan(Protocol):
    """For any number of threads.

    counts: sequences of each part, by its number.
    """

    counts: list[int]

    def parts(self, seed: int, epoch: int) -> np.ndarray:
        """The numbers of the parts, in the order of this epoch."""

    def spans(self, seed: int, epoch: int, place: int, index: int) -> list[Span]:
        """The index-th sequence of the part that comes at this place of the epoch."""

    def lengths(self, seed: int, epoch: int, place: int) -> np.ndarray:
        """Tokens of each sequence of that part, without padding, in this order."""

    def tokens(self) -> int:
        """Of an epoch, without padding."""


class FilesInTurn:
    """llm.q's order: each epoch shuffles the files, and the windows inside each file."""

    def __init__(self, windows: FileWindows) -> None:
        self._windows, self.counts = windows, windows.counts

    def parts(self, seed: int, epoch: int) -> np.ndarray:
        """See EpochPlan."""
        return epoch_order(len(self.counts), seed, epoch, FILE_ORDER)

    def spans(self, seed: int, epoch: int, place: int, index: int) -> list[Span]:
        """See EpochPlan."""
        file = int(self.parts(seed, epoch)[place])
        order = epoch_order(self.counts[file], seed, epoch, place)
        return [self._windows.span(file, int(order[index]))]

    def lengths(self, seed: int, epoch: int, place: int) -> np.ndarray:
        """See EpochPlan."""
        file = int(self.parts(seed, epoch)[place])
        lengths = self._windows.lengths(file)
        if not self._windows.tail[file]:  # all are alike, so that their order need not be made
            return lengths
        return lengths[epoch_order(self.counts[file], seed, epoch, place)]

    def tokens(self) -> int:
        """See EpochPlan."""
        return sum(int(self._windows.lengths(i).sum()) for i in range(len(self.counts)))


class Mixture:
    """Sources that take turns, each with its share of the epoch, spread evenly over it.

    An epoch has as many sequences as all sources together. A source goes through its own
    sequences in passes: where an epoch ends in the middle of one, the next epoch goes on there. So
    no sequence is seen again before all of its source have been.

    shares: sequences of each source in an epoch.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        """weights: of each source, more than 0; they need not add up to 1."""
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
        """See EpochPlan."""
        return np.zeros(1, np.int32)

    def spans(self, seed: int, epoch: int, place: int, index: int) -> list[Span]:
        """See EpochPlan."""
        turn = index if self._turns is None else int(self._turns[index])
        which = int(np.searchsorted(self._edges, turn, side="right")) - 1
        source = self.sources[which]
        done = epoch * self.shares[which] + turn - int(self._edges[which])
        return source.spans(seed, *divmod(done, source.count))

    def lengths(self, seed: int, epoch: int, place: int) -> np.ndarray:
        """See EpochPlan."""
        of_sources = []
        for source, share in zip(self.sources, self.shares, strict=True):
            first, start = divmod(epoch * share, source.count)
            last = (epoch * share + share - 1) // source.count
            passes = [source.lengths(seed, number) for number in range(first, last + 1)]
            of_sources.append(np.concatenate(passes)[start : start + share])
        in_order = np.concatenate(of_sources)
        return in_order if self._turns is None else in_order[self._turns]

    def tokens(self) -> int:
        """See EpochPlan. Of sources that an epoch does not see as a whole on the average."""
        pairs = zip(self.sources, self.shares, strict=True)
        return sum(round(source.tokens * share / source.count) for source, share in pairs)


def shares_of(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a number in these proportions, by largest remainders: no share is off by 1 or more.

    DataError where a share is nothing.
    """
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
