"""Attention's masks, the kernels' tiles, and the division of the heads over several calls of
backward.

The workspace of cuDNN's backward grows with the square of the sequence length, for every query head
of one call (`llmq.runtime.cudnn.backward_workspace_bytes`). Sequences and heads are therefore
divided into parts, one for each call; with more parts than sequences, a call computes some heads of
one sequence. If there is at most one part per key/value head, a call computes whole key/value heads
with all their query heads. More parts split the query heads of each key/value head, and the
gradients from several calls are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from llmq.base.dtypes import F32, DType
from llmq.base.tensor import Tensor
from llmq.runtime.arena import align_up
from llmq.runtime.kernel import ceil_div


def sees_all_before(window: int | None, seq_len: int) -> bool:
    """True if a window hides no key of a sequence. window: number of keys; None: no window."""
    return window is None or window >= seq_len


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The mask of all attention kernels: each query sees keys up to its own position, perhaps
    fewer. starts: I32 (B, T), the first position of each token's document, non-decreasing in a row;
    None: each row is one document. window: number of keys that a query sees, including the key at
    its own position; None: all."""

    starts: Tensor | None = None
    window: int | None = None

    def within(self, op: str, seq_len: int, backends: tuple[str, ...]) -> AttentionMask:
        """Return the mask, with window=None if the window hides no key. Raises ValueError if the
        mask is invalid."""
        if self.starts is not None and "cudnn" in backends:
            raise ValueError(f"{op}: the cudnn backend knows no documents within a sequence")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{op}: window must be at least 1, got {self.window}")
        whole = sees_all_before(self.window, seq_len)
        return AttentionMask(self.starts, None if whole else self.window)

    @property
    def masked(self) -> bool:
        """True if queries do not see all keys up to their own."""
        return self.starts is not None or self.window is not None

    def args(self, seq_len: int) -> tuple[Tensor | None, int]:
        return self.starts, seq_len if self.window is None else self.window

    def rows(self, start: int, stop: int) -> AttentionMask:
        """Return the mask of sequences `start` to `stop` - 1 of the batch."""
        return AttentionMask(
            None if self.starts is None else self.starts.rows(start, stop), self.window
        )

    def pairs(self, seq_len: int) -> int:
        """Return twice the number of (query, key) pairs in a sequence; the pair of a query with the
        key at its own position counts half. Pairs hidden by document boundaries count too, because
        a plan does not know the documents."""
        window = seq_len if self.window is None else self.window
        return window * (2 * seq_len - window)


ALL = AttentionMask()
"""The causal mask: every query sees all keys up to its own."""


class HeadGroup(NamedTuple):
    """The heads that one call computes: `count` query heads starting at `first`, and `kv_count`
    key/value heads starting at `first_kv`."""

    first: int
    count: int
    first_kv: int
    kv_count: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.count, self.kv_count


def split(batch: int, chunks: int) -> tuple[int, int]:
    """Return the number of sequences that one call computes, and the number of parts into which a
    sequence's heads are divided."""
    return ceil_div(batch, chunks), ceil_div(chunks, batch)


def splits_query_heads(num_kv_heads: int, parts: int) -> bool:
    """True if this number of parts splits the query heads of a key/value head."""
    return parts > num_kv_heads


def head_groups(num_heads: int, num_kv_heads: int, parts: int) -> list[HeadGroup]:
    """Return groups of a sequence's heads, at least `parts` of them. The sizes of groups differ by
    at most one head. parts: a number up to num_heads."""
    group = num_heads // num_kv_heads
    if not splits_query_heads(num_kv_heads, parts):
        spans = _spans(num_kv_heads, parts)
        return [HeadGroup(first * group, n * group, first, n) for first, n in spans]
    return [
        HeadGroup(kv_head * group + first, n, kv_head, 1)
        for kv_head in range(num_kv_heads)
        for first, n in _spans(group, ceil_div(parts, num_kv_heads))
    ]


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    """Return (first, count) of each part of `count` heads."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def divisions(batch: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Return numbers of parts worth trying, ascending: divisors of the batch size, then multiples
    of the batch size. Each number makes the heads of a call fewer than the number before."""
    numbers = [n for n in range(1, batch + 1) if batch % n == 0]
    heads = num_heads
    for parts in range(2, num_heads + 1):
        groups = head_groups(num_heads, num_kv_heads, parts)
        largest = max(group.count for group in groups)
        if largest < heads:
            numbers.append(batch * len(groups))
            heads = largest
    return numbers


# HALF_SHARED is the largest tile memory of a thread block if two blocks share a multiprocessor's
# 100 KiB: half of it, less 1024 bytes for the driver and 256 bytes for other data of the kernel.
HALF_SHARED = (50 << 10) - 1024 - 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of an attention kernel. A thread block owns `own` rows (queries in forward, keys
    or queries in backward) and visits the rows of the other kind in steps of `step` rows. shared:
    bytes of dynamic shared memory. stages: number of steps whose rows lie in shared memory at the
    same time. split_keys: True if different thread blocks compute dK and dV."""

    own: int
    step: int
    threads: int
    shared: int
    stages: int = 1
    split_keys: bool = False


def in_tiles(head_dim: int) -> int:
    """Return the length of a tile's row in elements: the head size rounded up to a multiple of 16,
    one step of the tensor cores' inner dimension."""
    return align_up(head_dim, 16)


def _row_bytes(head_dim: int) -> int:
    """Return the bytes of a BF16 row in shared memory (attention_mma.cuh)."""
    return 2 * (head_dim if head_dim % 64 == 0 else head_dim + 8)


def forward_tiles(
    dtype: DType, head_dim: int, masked: bool = False, small_shared: bool = False
) -> Tiles:
    """Return the tiles of attention_forward, whose shared memory holds the queries and the keys and
    values of one step. masked, small_shared: see compile_consts."""
    head_dim = in_tiles(head_dim)
    large, shares = head_dim > 128, head_dim > 256
    if dtype == F32:
        own, step = (16, 16) if shares else (32, 16) if large else (64, 32)
        return Tiles(own, step, 256, (own + 2 * step) * (head_dim + 4) * 4 + own * (step + 4) * 4)
    # With 32 queries, a warp uses each key fragment that was read from shared memory twice. Larger
    # heads leave fewer registers for scores, and therefore have fewer queries.
    own = 64 if large else 128
    step = 16 if shares and small_shared else 64 if head_dim <= (64 if masked else 80) else 32
    # two warps share 16 rows, and each warp sums half of the columns
    threads = 256 if shares else 128
    return Tiles(own, step, threads, (own + 2 * step) * _row_bytes(head_dim))


def backward_tiles(
    dtype: DType, head_dim: int, masked: bool = False, small_shared: bool = False
) -> Tiles:
    """Return the tiles of attention_backward_tiles, whose shared memory holds two tiles of owned
    rows, two tiles of each step, and in BF16 the step's statistics. masked, small_shared: see
    compile_consts."""
    head_dim = in_tiles(head_dim)
    large = head_dim > 128
    if dtype == F32:
        own, step = (16, 16) if large else (32, 32) if head_dim > 96 else (64, 32)
        rows = 2 * own + (1 if head_dim > 256 else 2) * step
        shared = rows * (head_dim + 4) * 4 + own * (step + 4) * 4
        return Tiles(own, step, 256, shared)
    # Tiles are as large as registers allow; a thread block sums dK and dV, or only one of the two
    # with split_keys.
    own = 128 if head_dim <= 64 and not masked else 32 if head_dim > 256 else 64
    step, stages = (16 if head_dim > 256 else 32, 1) if large else (32, 2)
    stage = 2 * step * (_row_bytes(head_dim) + 4)
    shared = 2 * own * _row_bytes(head_dim) + stages * stage
    if small_shared and shared > HALF_SHARED >= shared - stage:
        stages, shared = 1, shared - stage  # one thread block copies while the other multiplies
    return Tiles(own, step, 128, shared, stages, split_keys=large)


def compile_consts(
    dtype: DType,
    head_dim: int,
    masked: bool = False,
    small_shared: bool = False,
    softcap: int = 0,
) -> dict[str, int]:
    """Return the compile-time constants of attention.cu, which are the same for all its entry
    points. masked: True if some queries do not see all keys before their own position.
    small_shared: see DeviceSpec. softcap: the cap of scores; 0: no cap."""
    backward = backward_tiles(dtype, head_dim, masked, small_shared)
    consts = {
        "HEAD_DIM": head_dim,
        "MASKED": int(masked),
        "BACKWARD_STAGES": backward.stages,
        "SPLIT_KEYS": int(backward.split_keys),
        # With small_shared the tiles leave no shared memory through which warps could exchange
        # parts of scores.
        "SCORE_PARTS": 2 if head_dim > 256 and head_dim % 128 == 0 and not small_shared else 1,
    }
    for name, tiles in (
        ("FORWARD", forward_tiles(dtype, head_dim, masked, small_shared)),
        ("BACKWARD", backward),
    ):
        consts[f"{name}_OWN"] = tiles.own
        consts[f"{name}_STEP"] = tiles.step
        consts[f"{name}_THREADS"] = tiles.threads
    return consts | ({"SOFTCAP": softcap} if softcap else {})
