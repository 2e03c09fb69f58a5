"""Exchange of tokens for heads among the ranks that divide sequences (--context-parallel).

Each of N ranks has T tokens of each sequence, with all heads. For attention every rank gets all N*T
tokens with its share of the heads, and returns the results (DeepSpeed-Ulysses, arXiv:2309.14509).
If there are fewer key heads than ranks, several ranks get the same key head, and the parts of its
gradient are added up.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.pointwise.elementwise import copy_columns
from llmq.options.groups.batch import BatchOptions
from llmq.runtime.device import Device

PARTS = "heads of all ranks"  # scratch (B*N*T, F'): for each sequence, a part for each rank


class HeadColumns(NamedTuple):
    """Heads side by side in a row: `count` of `width` columns each."""

    count: int
    width: int


class _Columns(NamedTuple):
    """`count` columns of one rank's heads, which begin at column `all` of rows of all heads, and at
    column `own` of rows of the rank's heads. adds: True if an earlier rank has the same head."""

    all: int
    own: int
    count: int
    adds: bool


class HeadExchange:
    """The exchange on one rank. Rows of the rank's tokens are (B*T, F), rows of its heads (B*N*T,
    F')."""

    def __init__(self, dev: Device, batch: BatchOptions):
        self.dev, self.ranks = dev, batch.context_parallel
        self.B, self.T = batch.batch_size, batch.local_seq_len

    def width(self, heads: Sequence[HeadColumns]) -> int:
        """F', the number of columns of the rank's share of `heads`."""
        return sum(part.count for part in self._columns(heads, 0))

    def _columns(self, heads: Sequence[HeadColumns], rank: int) -> Iterator[_Columns]:
        of_all = of_own = 0
        for count, width in heads:
            own, first = max(count // self.ranks, 1), rank * count // self.ranks
            adds = count < self.ranks and (rank - 1) * count // self.ranks == first
            yield _Columns(of_all + first * width, of_own, own * width, adds)
            of_all, of_own = of_all + count * width, of_own + own * width

    @contextmanager
    def to_heads(self, out: Tensor | None, heads: Sequence[HeadColumns]) -> Iterator[Tensor | None]:
        """Yield rows of tokens (B*T, F) for the caller to fill; at the end they are exchanged into
        out (B*N*T, F'). With one rank, or without out, yield out itself."""
        if self.ranks == 1 or out is None:
            yield out
            return
        with self.dev.scratch(PARTS, out.shape, out.dtype) as parts:
            shape = (self.B * self.T, sum(count * width for count, width in heads))
            with self.dev.scratch("rows of tokens", shape, out.dtype) as x:
                yield x
                for tokens, part, rank in self._each(x, parts):
                    for columns in self._columns(heads, rank):
                        at = (columns.own, columns.all)
                        copy_columns(self.dev, part, tokens, columns.count, at)
            self._exchange(out, parts)

    def to_tokens(self, temps: ExitStack, x: Tensor, heads: Sequence[HeadColumns]) -> Tensor:
        """Exchange x (B*N*T, F') into rows of tokens (B*T, F): scratch of `temps`, or x with one
        rank."""
        if self.ranks == 1:
            return x
        shape = (self.B * self.T, sum(count * width for count, width in heads))
        out = temps.enter_context(self.dev.scratch("rows of tokens", shape, x.dtype))
        with self.dev.scratch(PARTS, x.shape, x.dtype) as parts:
            self._exchange(parts, x)
            for tokens, part, rank in self._each(out, parts):
                for columns in self._columns(heads, rank):
                    at = (columns.all, columns.own)
                    copy_columns(self.dev, tokens, part, columns.count, at, add=columns.adds)
        return out

    def own_rows(self, temps: ExitStack, x: Tensor, heads: Sequence[HeadColumns]) -> Tensor:
        """Copy the rows of this rank's heads from x (rows of all heads, ...): scratch of `temps`,
        or x with one rank. heads: a width is a number of rows of x."""
        if self.ranks == 1:
            return x
        shape = (self.width(heads), *x.shape[1:])
        out = temps.enter_context(self.dev.scratch("rows of own heads", shape, x.dtype))
        for own, of_all in self._own_spans(out, x, heads):
            self.dev.copy(own, of_all)
        return out

    @contextmanager
    def own_gradient(self, to: Accumulator, heads: Sequence[HeadColumns]) -> Iterator[Accumulator]:
        """Yield the Accumulator of the gradient of `own_rows`; at the end its rows go to `to`.
        Other ranks' rows become 0 unless `to` accumulates."""
        if self.ranks == 1:
            yield to
            return
        with ExitStack() as temps:
            own_rows = self.own_rows(temps, to.tensor, heads)
            yield to._replace(tensor=own_rows)
            if not to.accumulate:
                self.dev.zero(to.tensor)
            for own, of_all in self._own_spans(own_rows, to.tensor, heads):
                self.dev.copy(of_all, own)

    def _own_spans(
        self, own: Tensor, of_all: Tensor, heads: Sequence[HeadColumns]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in self._columns(heads, self.dev.mesh.index("context")):
            to, of = rows.own + rows.count, rows.all + rows.count
            yield own.rows(rows.own, to), of_all.rows(rows.all, of)

    def _each(self, tokens: Tensor, parts: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield for each sequence and rank: the sequence's rows of `tokens`, the rank's rows (T,
        F') of `parts`, and the rank."""
        for row in range(self.B):
            own = tokens.rows(row * self.T, (row + 1) * self.T)
            for rank in range(self.ranks):
                first = (row * self.ranks + rank) * self.T
                yield own, parts.rows(first, first + self.T), rank

    def _exchange(self, out: Tensor, x: Tensor) -> None:
        size, group = self.ranks * self.T, self.dev.mesh.group("context")
        for first in range(0, self.B * size, size):
            to, of = (tensor.rows(first, first + size) for tensor in (out, x))
            group.exchange(to.view(to.size), of.view(of.size))
