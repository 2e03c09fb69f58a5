"""Operations on each element of a tensor alone: sums of two, other formats, one value,
random values, dropout, moving averages."""

from llmq.base.dtypes import F32, I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, expect_float, expect_multiple, expect_part
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

ADD = Kernel("pointwise/elementwise.cu", "add", args="T* out, const T* a, const T* b, i64 n")
CONVERT = Kernel("pointwise/elementwise.cu", "convert", args="D* out, const S* x, i64 n")
FILL = Kernel("pointwise/elementwise.cu", "fill", args="T* x, f32 value, i64 n")


def add(dev: Device, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[i] = a[i] + b[i], rounded to nearest.

    Args:
        out   out  T  any shape   F32 or BF16; may be a or b
        a     in   T  the same
        b     in   T  the same
    """
    expect_float("add", "a", a)
    expect("add", "b", b, a.dtype, a.shape)
    expect("add", "out", out, a.dtype, a.shape)
    dev.launch(ADD, ceil_div(a.size, THREADS * PER_THREAD), THREADS, (out, a, b, a.size))


def convert(dev: Device, out: Tensor, x: Tensor) -> None:
    """out[i] = x[i] in out's dtype, rounded to nearest.

    Args:
        out   out  F32 or BF16, any shape
        x     in   F32 or BF16, the same shape
    """
    expect("convert", "out", out, None, x.shape)
    expect_float("convert", "out", out)
    expect_float("convert", "x", x)
    dev.launch(CONVERT, ceil_div(x.size, THREADS * PER_THREAD), THREADS, (out, x, x.size))


def fill(dev: Device, x: Tensor, value: float) -> None:
    """x[i] = value, rounded to x's dtype.

    Args:
        x   out  F32 or BF16, any shape
    """
    expect_float("fill", "x", x)
    dev.launch(FILL, ceil_div(x.nbytes, VECTOR_BYTES * THREADS), THREADS, (x, float(value), x.size))


# -- Normally distributed random numbers, for initial weights

PER_COUNTER = 4  # elements: one Philox call

RANDOM_NORMAL = Kernel(
    "pointwise/elementwise.cu",
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
    counters = ceil_div(first_index % PER_COUNTER + out.size, PER_COUNTER)
    seeds = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    args = (out, float(std), *seeds, first_index, out.size)
    dev.launch(RANDOM_NORMAL, ceil_div(counters, THREADS), THREADS, args)


# -- Dropout: whoever repeats a pass or has a sequence, on any rank, chooses the same elements

_REST = (
    "const T* x, const i32* scalars, u32 threshold, f32 scale, u32 salt, i64 per_sequence, i64 n"
)
DROPOUT = Kernel("pointwise/elementwise.cu", "dropout", args=f"T* out, {_REST}")
# The same entry; declared apart because it reads what it adds to.
DROPOUT_ADD = Kernel("pointwise/elementwise.cu", "dropout", args=f"inout T* out, {_REST}")


def dropout(
    dev: Device,
    out: Tensor,
    x: Tensor,
    scalars: Tensor,
    *,
    probability: float,
    salt: int,
    sequences: int,
    add: bool = False,
) -> None:
    """out = x / (1 - probability) where an element stays, else 0; with add: added to out.

    An element's random number follows from the step's seed and number, the salt, its sequence's
    number in the step (scalars: first_sequence + sequence_stride * its number here), and its place
    there. The gradient of x is the same function of that of out.

    Args (contiguous):
        out       out, with add inout   T   x's shape   F32 or BF16; may be x
        x         in   T    sequences times as many elements as one has, a multiple of 8 each
        scalars   in   I32  (16,)   StepScalars
        probability    that an element becomes 0: in [0, 1)
        salt           distinguishes tensors
    """
    expect_float("dropout", "x", x)
    expect("dropout", "out", out, x.dtype, x.shape)
    expect("dropout", "scalars", scalars, I32, (STEP_SCALARS_WORDS,))
    if not 0 <= probability < 1:
        raise ValueError(f"dropout: probability must be in [0, 1), got {probability}")
    if x.size % sequences:
        raise ValueError(f"dropout: x must have {sequences} sequences, got {x.size} elements")
    expect_multiple("dropout", dev, "a sequence's size", x.size // sequences, PER_THREAD)
    threshold = min(round(probability * 2**32), 2**32 - 1)
    rest = (threshold, 1.0 / (1.0 - probability), salt, x.size // sequences, x.size)
    dev.launch(
        DROPOUT_ADD if add else DROPOUT,
        ceil_div(x.size, THREADS * PER_THREAD),
        THREADS,
        (out, x, scalars, *rest),
        consts={"ADD": int(add)},
    )


# -- A moving average of weights, and its exchange with them while it is used in their place

AVERAGE_THREADS = 128

AVERAGE = Kernel(
    "pointwise/elementwise.cu",
    "average_update",
    args="inout f32* average, const P* param, const i32* scalars, f32 decay, i64 n",
)
EXCHANGE = Kernel(
    "pointwise/elementwise.cu",
    "average_exchange",
    args="inout f32* average, inout P* param, i32 back, i64 n",
)


def average(dev: Device, average: Tensor, param: Tensor, scalars: Tensor, decay: float) -> None:
    """average += (1 - d) * (param - average), with d = min(decay, (1 + step) / (10 + step)).

    A smaller decay at the start lets the average forget the first weights. Nothing changes when
    scalars.skip_update is set.

    Args (contiguous; n a positive multiple of 128):
        average  inout  F32 (n,)
        param    in     F32 or BF16 (n,)
        scalars  in     I32 (16,)          StepScalars: step, skip_update
    """
    n = expect_part("average", {"average": average, "param": param}, scalars)
    expect("average", "average", average, F32, (n,))
    args, blocks = (average, param, scalars, decay, n), ceil_div(n, AVERAGE_THREADS * PER_THREAD)
    dev.launch(AVERAGE, blocks, AVERAGE_THREADS, args, cost=Cost(flops=3 * n))


def exchange_average(dev: Device, average: Tensor, param: Tensor, *, back: bool) -> None:
    """Put the average, rounded to nearest, in the place of param; with back give both back.

    Both ways no bit is lost, and no memory is needed: until they are given back, average is no
    number that anybody else can use.

    Args (contiguous; n a positive multiple of 128):
        average  inout  F32 (n,)
        param    inout  F32 or BF16 (n,)
    """
    n = expect_part("average", {"average": average, "param": param})
    expect("average", "average", average, F32, (n,))
    args = (average, param, int(back), n)
    dev.launch(EXCHANGE, ceil_div(n, AVERAGE_THREADS * PER_THREAD), AVERAGE_THREADS, args)
