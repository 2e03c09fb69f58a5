"""Normally distributed random numbers, for initial weights."""

from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD = 4  # elements: one Philox call

RANDOM_NORMAL = Kernel(
    "random.cu",
    "random_normal",
    args="T* out, f32 std, u32 seed_low, u32 seed_high, i64 first_index, i64 n",
)


def normal(dev: Device, out: Tensor, std: float, seed: int, first_index: int = 0) -> None:
    """out[i] ~ N(0, std^2); element i depends only on the seed and first_index + i.

    So the pieces of a tensor that several ranks fill are those of the whole tensor.

    Args:
        out           out  F32 or BF16, any shape
        std           standard deviation
        seed          64 bits
        first_index   place of out's first element in the whole tensor, >= 0
    """
    expect_float("random", "out", out)
    if first_index < 0:
        raise ValueError(f"random: first_index must be at least 0, got {first_index}")
    counters = ceil_div(first_index % PER_THREAD + out.size, PER_THREAD)
    seeds = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    args = (out, float(std), *seeds, first_index, out.size)
    dev.launch(RANDOM_NORMAL, ceil_div(counters, THREADS), THREADS, args)
