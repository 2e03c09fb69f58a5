"""How the kernels of attention.cu cut their work."""

from dataclasses import dataclass

from llmq.base.dtypes import F32, DType

# Bytes of tiles with which a multiprocessor that has 100 KiB of shared memory takes two blocks:
# half of it, less what the driver takes and what kernels have beside tiles.
HALF_SHARED = (50 << 10) - 1024 - 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work. A thread block owns `own` rows (queries in the forward, keys or
    queries in the backward) and walks over the other side in steps of `step` rows.

    shared: bytes of dynamic shared memory. stages: how many steps it holds at once. split_keys:
    dK and dV are the work of different blocks.
    """

    own: int
    step: int
    threads: int
    shared: int
    stages: int = 1
    split_keys: bool = False


def _row_bytes(head_dim: int) -> int:
    """The bytes of a row of BF16 in shared memory (attention_mma.cuh)."""
    return 2 * (head_dim if head_dim % 64 == 0 else head_dim + 8)


def forward_tiles(dtype: DType, head_dim: int, masked: bool = False) -> Tiles:
    """Tiles of attention_forward: shared memory holds the queries and one step's keys, values.

    masked: as compile_consts.
    """
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
    """The compile-time constants of attention.cu: the same for all its entries.

    masked: queries see less than all that is before them. small_shared: as DeviceSpec has it.
    """
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
