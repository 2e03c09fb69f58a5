"""Exchange of tokens for heads among the ranks that divide sequences (--context-parallel).

Each of N ranks has T tokens of each sequence, with all heads. For attention every rank gets all N*T
tokens with its share of the heads, and returns the results (DeepSpeed-Ulysses, arXiv:2309.14509).
Where heads do not divide by N, ranks get the same key head several times, and heads of zeros
(`HeadShares`). The parts of a repeated head's gradient are added up.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple

from llmq.arch.head_shares import Shares
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.pointwise.elementwise import add, copy_columns
from llmq.options.groups.batch import BatchOptions
from llmq.runtime.device import Device

PARTS = "heads of all ranks"  # scratch (B*N*T, F'): for each sequence, a part for each rank


class HeadColumns(NamedTuple):
    """Heads side by side in a row: `count` of `width` columns each. of: each rank's heads."""

    count: int
    width: int
    of: Shares


class _Run(NamedTuple):
    """Neighbouring heads, or columns, of one rank: `count` from `all` on in rows of all heads, and
    from `own` on in rows of the rank's heads. adds: True if an earlier rank, or an earlier place on
    this rank, has the same head."""

    all: int
    own: int
    count: int
    adds: bool


@cache
def _runs(of: Shares, rank: int) -> tuple[_Run, ...]:
    """The heads of a rank that are not zeros, in as few runs as possible."""
    before = {head for heads in of[:rank] for head in heads}
    runs: list[_Run] = []
    for own, head in enumerate(of[rank]):
        if head is None:
            continue
        last, run = runs[-1] if runs else None, _Run(head, own, 1, head in before)
        before.add(head)
        ends = last and (last.all + last.count, last.own + last.count, last.adds)
        if ends == (run.all, run.own, run.adds):
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(run)
    return tuple(runs)


def _columns(heads: Sequence[HeadColumns], rank: int) -> Iterator[_Run]:
    """Yield the columns of a rank's heads."""
    of_all = of_own = 0
    for count, width, of in heads:
        for run in _runs(of, rank):
            at = (of_all + run.all * width, of_own + run.own * width)
            yield _Run(*at, run.count * width, run.adds)
        of_all, of_own = of_all + count * width, of_own + len(of[rank]) * width


def _has_zeros(heads: Sequence[HeadColumns]) -> bool:
    """True if some rank has heads of zeros."""
    return any(None in rank for part in heads for rank in part.of)


class HeadExchange:
    """The exchange on one rank. Rows of the rank's tokens are (B*T, F), rows of its heads (B*N*T,
    F')."""

    def __init__(self, dev: Device, batch: BatchOptions):
        self.dev, self.ranks = dev, batch.context_parallel
        self.B, self.T = batch.batch_size, batch.local_seq_len

    def width(self, heads: Sequence[HeadColumns]) -> int:
        """F', the number of columns of the rank's share of `heads`."""
        return sum(len(part.of[0]) * part.width for part in heads)

    def _tokens_shape(self, heads: Sequence[HeadColumns]) -> tuple[int, int]:
        """(B*T, F)."""
        return self.B * self.T, sum(part.count * part.width for part in heads)

    @contextmanager
    def to_heads(self, out: Tensor | None, heads: Sequence[HeadColumns]) -> Iterator[Tensor | None]:
        """Yield rows of tokens (B*T, F) for the caller to fill; at the end they are exchanged into
        out (B*N*T, F'). With one rank, or without out, yield out itself."""
        if self.ranks == 1 or out is None:
            yield out
            return
        with self.dev.scratch(PARTS, out.shape, out.dtype) as parts:
            shape = self._tokens_shape(heads)
            with self.dev.scratch("rows of tokens", shape, out.dtype) as x:
                yield x
                if _has_zeros(heads):
                    self.dev.zero(parts)
                for tokens, part, rank in self._each(x, parts):
                    for columns in _columns(heads, rank):
                        at = (columns.own, columns.all)
                        copy_columns(self.dev, part, tokens, columns.count, at)
            self._exchange(out, parts)

    def to_tokens(self, temps: ExitStack, x: Tensor, heads: Sequence[HeadColumns]) -> Tensor:
        """Exchange x (B*N*T, F') into rows of tokens (B*T, F): scratch of `temps`, or x with one
        rank. Columns of heads that no rank has are left to the caller."""
        if self.ranks == 1:
            return x
        shape = self._tokens_shape(heads)
        out = temps.enter_context(self.dev.scratch("rows of tokens", shape, x.dtype))
        with self.dev.scratch(PARTS, x.shape, x.dtype) as parts:
            self._exchange(parts, x)
            for tokens, part, rank in self._each(out, parts):
                for columns in _columns(heads, rank):
                    at = (columns.all, columns.own)
                    copy_columns(self.dev, tokens, part, columns.count, at, add=columns.adds)
        return out

    def own_rows(self, temps: ExitStack, x: Tensor, heads: Sequence[HeadColumns]) -> Tensor:
        """Copy the rows of this rank's heads from x (rows of all heads, ...): scratch of `temps`,
        or x with one rank. heads: a width is a number of rows of x."""
        return x if self.ranks == 1 else self._own_rows(temps, x, heads, repeats=True)

    def _own_rows(
        self, temps: ExitStack, x: Tensor, heads: Sequence[HeadColumns], *, repeats: bool
    ) -> Tensor:
        """repeats: False for zeros in place of heads that the rank has at an earlier place."""
        shape = (self.width(heads), *x.shape[1:])
        out = temps.enter_context(self.dev.scratch("rows of own heads", shape, x.dtype))
        spans = [
            (own, of_all)
            for own, of_all, again in self._own_spans(out, x, heads)
            if repeats or not again
        ]
        if sum(own.shape[0] for own, _ in spans) < shape[0]:
            self.dev.zero(out)
        for own, of_all in spans:
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
            own_rows = self._own_rows(temps, to.tensor, heads, repeats=False)
            yield to._replace(tensor=own_rows)
            if not to.accumulate:
                self.dev.zero(to.tensor)
            for own, of_all, again in self._own_spans(own_rows, to.tensor, heads):
                if again:
                    add(self.dev, of_all, of_all, own)
                else:
                    self.dev.copy(of_all, own)

    def _own_spans(
        self, own: Tensor, of_all: Tensor, heads: Sequence[HeadColumns]
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield rows of `own`, the same heads' rows of `of_all`, and True if this rank has these
        heads at an earlier place, too."""
        rank = self.dev.mesh.index("context")
        alone = [part._replace(of=(part.of[rank],)) for part in heads]
        for rows in _columns(alone, 0):
            to, of = rows.own + rows.count, rows.all + rows.count
            yield own.rows(rows.own, to), of_all.rows(rows.all, of), rows.adds

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
