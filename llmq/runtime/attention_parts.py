"""The keys that attention sees, and how its work is cut: into tiles, and backward into parts.

The library's workspace of backward grows with the square of the sequence length for every query
head that one call computes (`llmq.runtime.cudnn.backward_workspace_bytes`). Parts beyond one for
each sequence divide heads: whole key/value heads with their query heads first, whose gradients stay
where they are in one call; then the query heads of each key/value head, whose parts of its
gradients have to be added up.
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
    """Whether a window, None without one, hides no key of a sequence."""
    return window is None or window >= seq_len


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys up to their own that queries see, for all of attention's kernels. starts: I32 (B,
    T), the first position of the document of each, None: all are of one. They never fall along a
    row. window: how many keys, the query's own included; None: all."""

    starts: Tensor | None = None
    window: int | None = None

    def within(self, op: str, seq_len: int, backends: tuple[str, ...]) -> AttentionMask:
        """Without a window that every query's keys fit into. ValueError if wrong."""
        if self.starts is not None and "cudnn" in backends:
            raise ValueError(f"{op}: the cudnn backend knows no documents within a sequence")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{op}: window must be at least 1, got {self.window}")
        whole = sees_all_before(self.window, seq_len)
        return AttentionMask(self.starts, None if whole else self.window)

    @property
    def masked(self) -> bool:
        """Whether there is more to it than that keys come before their query."""
        return self.starts is not None or self.window is not None

    def args(self, seq_len: int) -> tuple[Tensor | None, int]:
        return self.starts, seq_len if self.window is None else self.window

    def rows(self, start: int, stop: int) -> AttentionMask:
        """The mask of these sequences of the batch."""
        return AttentionMask(
            None if self.starts is None else self.starts.rows(start, stop), self.window
        )

    def pairs(self, seq_len: int) -> int:
        """Twice the pairs of query and key, where a query's own key counts half. Pairs that
        documents hide are not known here, and not taken off."""
        window = seq_len if self.window is None else self.window
        return window * (2 * seq_len - window)


ALL = AttentionMask()
"""Every query sees all keys up to its own."""


class HeadGroup(NamedTuple):
    """Heads that one call computes: query heads from `first`, key/value heads from `first_kv`."""

    first: int
    count: int
    first_kv: int
    kv_count: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.count, self.kv_count


def split(batch: int, chunks: int) -> tuple[int, int]:
    """Sequences that are computed at a time, and parts of the heads of one that are."""
    return ceil_div(batch, chunks), ceil_div(chunks, batch)


def splits_query_heads(num_kv_heads: int, parts: int) -> bool:
    """Whether so many parts divide the query heads of one key/value head."""
    return parts > num_kv_heads


def head_groups(num_heads: int, num_kv_heads: int, parts: int) -> list[HeadGroup]:
    """Groups of a sequence's heads, at least `parts`; sizes of groups differ by one at the most.
    parts: up to num_heads."""
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
    """First of each part, and how many it has."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def divisions(batch: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of parts, ascending: each one's calls compute fewer heads than those before it.
    Divisors of the batch, then multiples of it."""
    found = [n for n in range(1, batch + 1) if batch % n == 0]
    heads = num_heads
    for parts in range(2, num_heads + 1):
        groups = head_groups(num_heads, num_kv_heads, parts)
        largest = max(group.count for group in groups)
        if largest < heads:
            found.append(batch * len(groups))
            heads = largest
    return found


# Bytes of tiles with which a multiprocessor that has 100 KiB of shared memory takes two blocks:
# half of it, less what the driver takes and what kernels have beside tiles.
HALF_SHARED = (50 << 10) - 1024 - 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work. A thread block owns `own` rows (queries in the forward, keys or
    queries in the backward) and walks over the other side in steps of `step` rows. shared: bytes of
    dynamic shared memory. stages: how many steps it holds at once. split_keys: dK and dV are the
    work of different blocks."""

    own: int
    step: int
    threads: int
    shared: int
    stages: int = 1
    split_keys: bool = False


def in_tiles(head_dim: int) -> int:
    """Elements of a row of a tile: zeros follow those of a head up to a multiple of 16, one step of
    the tensor cores' inner dimension."""
    return align_up(head_dim, 16)


def _row_bytes(head_dim: int) -> int:
    """The bytes of a row of BF16 in shared memory (attention_mma.cuh)."""
    return 2 * (head_dim if head_dim % 64 == 0 else head_dim + 8)


def forward_tiles(dtype: DType, head_dim: int, masked: bool = False) -> Tiles:
    """Tiles of attention_forward: shared memory holds the queries and one step's keys, values.
    masked: as compile_consts."""
    head_dim = in_tiles(head_dim)
    large = head_dim > 128
    if dtype == F32:
        own, step = (32, 16) if large else (64, 32)
        return Tiles(own, step, 256, (own + 2 * step) * (head_dim + 4) * 4 + own * (step + 4) * 4)
    # 32 queries a warp: each key fragment that is read from shared memory is used twice. Larger
    # heads leave registers for fewer scores, and then for fewer queries.
    own = 64 if large else 128
    step = 64 if head_dim <= (64 if masked else 80) else 32
    return Tiles(own, step, 128, (own + 2 * step) * _row_bytes(head_dim))


def backward_tiles(
    dtype: DType, head_dim: int, masked: bool = False, small_shared: bool = False
) -> Tiles:
    """Tiles of attention_backward_tiles: shared memory holds two tiles of owned rows and two of
    each step, for BF16 with the step's statistics. small_shared: as DeviceSpec has it."""
    head_dim = in_tiles(head_dim)
    large = head_dim > 128
    if dtype == F32:
        own, step = (16, 16) if large else (32, 32) if head_dim > 96 else (64, 32)
        rows = 2 * own + 2 * step
        shared = rows * (head_dim + 4) * 4 + own * (step + 4) * 4
        return Tiles(own, step, 256, shared)
    # Tiles are as large as registers allow for two sums of own rows, or for one.
    own = 128 if head_dim <= 64 and not masked else 64
    step, stages = (16, 1) if large else (32, 2)
    stage = 2 * step * (_row_bytes(head_dim) + 4)
    shared = 2 * own * _row_bytes(head_dim) + stages * stage
    if small_shared and shared > HALF_SHARED >= shared - stage:
        stages, shared = 1, shared - stage  # one block copies while the other one multiplies
    return Tiles(own, step, 128, shared, stages, split_keys=large)


def compile_consts(
    dtype: DType, head_dim: int, masked: bool = False, small_shared: bool = False
) -> dict[str, int]:
    """The compile-time constants of attention.cu: the same for all its entries. masked: queries see
    less than all that is before them. small_shared: as DeviceSpec has it."""
    backward = backward_tiles(dtype, head_dim, masked, small_shared)
    consts = {
        "HEAD_DIM": head_dim,
        "MASKED": int(masked),
        "BACKWARD_STAGES": backward.stages,
        "SPLIT_KEYS": int(backward.split_keys),
    }
    for name, tiles in (
        ("FORWARD", forward_tiles(dtype, head_dim, masked)),
        ("BACKWARD", backward),
    ):
        consts[f"{name}_OWN"] = tiles.own
        consts[f"{name}_STEP"] = tiles.step
        consts[f"{name}_THREADS"] = tiles.threads
    return consts
