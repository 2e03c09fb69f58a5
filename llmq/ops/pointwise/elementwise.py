"""Elementwise operations: sums, products, conversions, random values, dropout, moving averages."""

from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
PER_THREAD = 8  # elements of a thread

ADD = Kernel("pointwise/elementwise.cu", "add", "out T[*n] out, T[*n] a, T[*n] b, i64 n")
SCALE = Kernel("pointwise/elementwise.cu", "scale", "out T[*n] out, T[*n] x, T[1] by, i64 n")
MULTIPLY = Kernel(
    "pointwise/elementwise.cu",
    "multiply",
    "out T[rows,out_columns] out, T[rows,a_columns] a, T[rows,b_columns] b, i64 rows, "
    "i32 channels, i32 out_first, i32 a_first, i32 b_first, i32 out_columns, i32 a_columns, "
    "i32 b_columns",
    where="out_first + channels <= out_columns, a_first + channels <= a_columns, "
    "b_first + channels <= b_columns",
    gpu="channels % 8, out_first % 8, a_first % 8, b_first % 8, out_columns % 8, a_columns % 8, "
    "b_columns % 8",
)
_COPY = (
    "T[rows,out_columns] out, T[rows,x_columns] x, i64 rows, i32 channels, i32 out_first, "
    "i32 x_first, i32 out_columns, i32 x_columns, i32 width"
)
_COPIED = {
    "where": "out_first + channels <= out_columns, x_first + channels <= x_columns",
    "gpu": "channels % width, out_first % width, x_first % width, out_columns % width, "
    "x_columns % width",
}
COPY_COLUMNS = Kernel("pointwise/elementwise.cu", "copy_columns", f"out {_COPY}", **_COPIED)
# The same entry has its own declaration for addition, because addition also reads out.
ADD_COLUMNS = Kernel("pointwise/elementwise.cu", "copy_columns", f"inout {_COPY}", **_COPIED)
CONVERT = Kernel("pointwise/elementwise.cu", "convert", "out D[*n] out, S[*n] x, i64 n")
FILL = Kernel("pointwise/elementwise.cu", "fill", "out T[*n] x, f32 value, i64 n")


def add(dev: Device, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[i] = a[i] + b[i], rounded to nearest. out may be a or b."""
    dev.launch(ADD, ceil_div(a.size, THREADS * PER_THREAD), THREADS, (out, a, b, a.size))


def scale(dev: Device, out: Tensor, x: Tensor, by: Tensor) -> None:
    """out[i] = x[i] * by[0], rounded to nearest. out may be x."""
    dev.launch(SCALE, ceil_div(x.size, THREADS * PER_THREAD), THREADS, (out, x, by, x.size))


def multiply(
    dev: Device, out: Tensor, a: Tensor, b: Tensor, channels: int, at: tuple[int, int, int]
) -> None:
    """out[r, i + c] = a[r, j + c] * b[r, k + c] for all c < channels, rounded to nearest.

    at: (i, j, k). Other columns of out stay as they are. out may be a if i = j, or b if i = k.
    """
    rows, *columns = MULTIPLY.dims(out=out, a=a, b=b)
    blocks = ceil_div(rows * channels, THREADS * PER_THREAD)
    dev.launch(MULTIPLY, blocks, THREADS, (out, a, b, rows, channels, *at, *columns))


def copy_columns(
    dev: Device, out: Tensor, x: Tensor, channels: int, at: tuple[int, int], *, add: bool = False
) -> None:
    """out[r, i + c] = x[r, j + c] for all c < channels; with add, += rounded to nearest.

    at: (i, j). Other columns of out stay as they are. Where a number of columns is no multiple of
    8, each thread copies one element in place of 8, which is slower.
    """
    kernel = ADD_COLUMNS if add else COPY_COLUMNS
    rows, *columns = kernel.dims(out=out, x=x)
    sizes = (channels, *at, *columns)
    width = 1 if any(size % PER_THREAD for size in sizes) else PER_THREAD
    blocks, args = ceil_div(rows * channels, THREADS * width), (out, x, rows, *sizes, width)
    dev.launch(kernel, blocks, THREADS, args, consts={"ADD": int(add)})


def convert(dev: Device, out: Tensor, x: Tensor) -> None:
    """out[i] = x[i] in out's dtype, rounded to nearest."""
    dev.launch(CONVERT, ceil_div(x.size, THREADS * PER_THREAD), THREADS, (out, x, x.size))


def fill(dev: Device, x: Tensor, value: float) -> None:
    """x[i] = value, rounded to x's dtype."""
    dev.launch(FILL, ceil_div(x.nbytes, VECTOR_BYTES * THREADS), THREADS, (x, float(value), x.size))


# -- Normally distributed random numbers, for initial weights

PER_COUNTER = 4  # elements from one Philox call

RANDOM_NORMAL = Kernel(
    "pointwise/elementwise.cu",
    "random_normal",
    "out T[*n] out, f32 std, u32 seed_low, u32 seed_high, i64 first_index, i64 n",
    where="first_index >= 0",
)


def normal(dev: Device, out: Tensor, std: float, seed: int, first_index: int = 0) -> None:
    """out[i] ~ N(0, std^2), a function of seed (64 bits) and first_index + i.

    first_index: element of a whole tensor at which out begins, so that ranks fill their shards with
    the tensor's elements.
    """
    counters = ceil_div(first_index % PER_COUNTER + out.size, PER_COUNTER)
    seeds = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    args = (out, float(std), *seeds, first_index, out.size)
    dev.launch(RANDOM_NORMAL, ceil_div(counters, THREADS), THREADS, args)


# -- Dropout: the same elements in a repeated pass, and for a sequence on any rank

_ARGS = (
    "T[*n] out, T[*n] x, i32[16] scalars, u32 threshold, f32 scale, u32 salt, i64 per_sequence, "
    "i64 n"
)
_RULES = {"where": "n % per_sequence", "gpu": "per_sequence % 8"}
DROPOUT = Kernel("pointwise/elementwise.cu", "dropout", f"out {_ARGS}", **_RULES)
# The same entry has its own declaration for addition, because addition also reads out.
DROPOUT_ADD = Kernel("pointwise/elementwise.cu", "dropout", f"inout {_ARGS}", **_RULES)


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
    """out = x / (1 - probability) for kept elements, 0 for others; with add, += instead of =.

    An element's random number is a function of the step's seed and number, the salt, the number of
    its sequence in the step (scalars: first_sequence + sequence_stride * local number), and its
    index in the sequence. The gradient of x is the same function of the gradient of out.

    out may be x. probability: probability that an element becomes 0. salt: distinguishes tensors.
    sequences: number of sequences in x.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"dropout: probability must be in [0, 1), got {probability}")
    if x.size % sequences:
        raise ValueError(f"dropout: x must have {sequences} sequences, got {x.size} elements")
    threshold = min(round(probability * 2**32), 2**32 - 1)
    per_sequence = x.size // sequences
    dev.launch(
        DROPOUT_ADD if add else DROPOUT,
        ceil_div(x.size, THREADS * PER_THREAD),
        THREADS,
        (out, x, scalars, threshold, 1.0 / (1.0 - probability), salt, per_sequence, x.size),
        consts={"ADD": int(add)},
    )


# -- Moving average of weights, and its exchange with the weights

AVERAGE_THREADS = 128

AVERAGE = Kernel(
    "pointwise/elementwise.cu",
    "average_update",
    "inout f32[n] average, P[n] param, i32[16] scalars, f32 decay, i64 n",
    where="n % 128, n >= 1",
)
EXCHANGE = Kernel(
    "pointwise/elementwise.cu",
    "average_exchange",
    "inout f32[n] average, inout P[n] param, i32 back, i64 n",
    where="n % 128, n >= 1",
)


def average(dev: Device, average: Tensor, param: Tensor, scalars: Tensor, decay: float) -> None:
    """average += (1 - d) * (param - average), with d = min(decay, (1 + step) / (10 + step)).

    The smaller decay at the start lets the average forget the first weights. If scalars.skip_update
    is set, average stays as it is.
    """
    n = average.size
    args, blocks = (average, param, scalars, decay, n), ceil_div(n, AVERAGE_THREADS * PER_THREAD)
    dev.launch(AVERAGE, blocks, AVERAGE_THREADS, args, cost=Cost(flops=3 * n))


def exchange_average(dev: Device, average: Tensor, param: Tensor, *, back: bool) -> None:
    """Replace param by the average, rounded to nearest; with back, restore param and average.

    The exchange is lossless and needs no more memory. Between the two calls average holds bits of
    both tensors, and must not be read.
    """
    args, n = (average, param, int(back), average.size), average.size
    dev.launch(EXCHANGE, ceil_div(n, AVERAGE_THREADS * PER_THREAD), AVERAGE_THREADS, args)
