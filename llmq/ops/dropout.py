"""Dropout whose choice depends on seed, step, sequence of the step, and place in the sequence.

So a pass that is repeated chooses the same, and it does not matter which rank or micro-step has a
sequence.
"""

from llmq.base.dtypes import I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
PER_THREAD = 8  # elements

_REST = (
    "const T* x, const i32* scalars, u32 threshold, f32 scale, u32 salt, i64 per_sequence, i64 n"
)
DROPOUT = Kernel("dropout.cu", "dropout", args=f"T* out, {_REST}")
# The same entry; declared apart because it reads what it adds to.
DROPOUT_ADD = Kernel("dropout.cu", "dropout", args=f"inout T* out, {_REST}")


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
    if x.size % (sequences * PER_THREAD):
        raise ValueError(
            f"dropout: x must have {sequences} sequences of a multiple of {PER_THREAD} elements, "
            f"got {x.size}"
        )
    threshold = min(round(probability * 2**32), 2**32 - 1)
    rest = (threshold, 1.0 / (1.0 - probability), salt, x.size // sequences, x.size)
    dev.launch(
        DROPOUT_ADD if add else DROPOUT,
        ceil_div(x.size, THREADS * PER_THREAD),
        THREADS,
        (out, x, scalars, *rest),
        consts={"ADD": int(add)},
    )
