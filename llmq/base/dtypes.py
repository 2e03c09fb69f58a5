"""Dtypes of tensors' elements, and their constants."""

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

MIB = 1 << 20
GIB = 1 << 30

E4M3_MAX = 448.0  # largest finite E4M3 value, S.1111.110
E5M2_MAX = 57344.0  # largest finite E5M2 value, S.11110.11
# Half precision, whose maximum is 65,504, holds the sum of 64 products of codes up to 30.
E4M3_HALF_MAX, HALF_TERMS = 30.0, 64
I8_MAX = 127  # largest code; -128 is unused, so that the range is symmetric


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity in every launch
class DType:
    """One element type. name: the word in kernels and options. label: the word in reports.
    itemsize: bytes."""

    name: str
    label: str
    numpy: np.dtype
    itemsize: int

    def __repr__(self) -> str:
        return self.label


def _dtype(name: str, label: str, numpy: object) -> DType:
    numpy = np.dtype(numpy)
    return DType(name, label, numpy, numpy.itemsize)


F64 = _dtype("f64", "F64", np.float64)
F32 = _dtype("f32", "F32", np.float32)
BF16 = _dtype("bf16", "BF16", ml_dtypes.bfloat16)
E4M3 = _dtype("e4m3", "F8_E4M3", ml_dtypes.float8_e4m3fn)
# E4M3 with values up to E4M3_HALF_MAX. NumPy's type has the same bits up to 240.
E4M3_HALF = _dtype("e4m3_half", "F8_E4M3_HALF", ml_dtypes.float8_e4m3)
E5M2 = _dtype("e5m2", "F8_E5M2", ml_dtypes.float8_e5m2)
I32 = _dtype("i32", "I32", np.int32)
I64 = _dtype("i64", "I64", np.int64)
I8 = _dtype("i8", "I8", np.int8)
U8 = _dtype("u8", "U8", np.uint8)
NF4 = _dtype("nf4", "NF4", np.uint8)  # bytes of codes and their scales, see formats/nf4.py
MXFP4 = _dtype("mxfp4", "MXFP4", np.uint8)  # like NF4, see formats/mxfp4.py
NVFP4 = _dtype("nvfp4", "NVFP4", np.uint8)  # see formats/nvfp4.py
E4M3_BLOCKS = _dtype("e4m3-blocks", "F8_E4M3_BLOCKS", np.uint8)  # see formats/e4m3_blocks.py
TERNARY = _dtype("ternary", "TERNARY", np.int8)  # only for products, see formats/ternary.py

FP8_MAX = {E4M3: E4M3_MAX, E4M3_HALF: E4M3_HALF_MAX, E5M2: E5M2_MAX}
FP8 = tuple(FP8_MAX)
DTYPES = {d.name: d for d in (F64, F32, BF16, *FP8, I32, I64, I8, U8)}

# Dtypes that a user may choose, by option value ("fp32", "bf16", ...).
OPTION_DTYPES = {"fp32": F32, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "nf4": NF4, "int8": I8}
OPTION_DTYPES |= {dtype.name: dtype for dtype in (MXFP4, NVFP4, E4M3_BLOCKS, TERNARY)}


def parse_dtype(option: str) -> DType:
    """Return the dtype of a canonical option value; KeyError for any other value."""
    return OPTION_DTYPES[option]


# Values that change between launches live in device memory, so that captured graphs can be
# replayed. The host writes 16 words before each micro-step, except the last two, which global_norm
# writes. The CUDA side of this layout is `struct StepScalars` in cu/common.cuh.
STEP_SCALARS_WORDS = 16
STEP_SCALARS = np.dtype(
    [
        ("lr", np.float32),
        ("beta1_correction", np.float32),  # 1 / (1 - beta1^t)
        ("beta2_correction", np.float32),  # 1 / (1 - beta2^t)
        ("grad_clip", np.float32),  # 0: off
        ("seed", np.uint32),
        ("step", np.uint32),
        ("micro_step", np.uint32),
        ("norm_limit", np.float32),  # a step beyond this or loss_limit makes no update; 0: none
        ("loss_limit", np.float32),
        # Sequence b of a micro-batch has number first + b * stride in the step of all ranks.
        ("first_sequence", np.uint32),
        ("sequence_stride", np.uint32),
        ("reserved", np.uint32, 3),
        ("grad_scale", np.float32),  # clip factor / number of target tokens
        ("skip_update", np.uint32),  # 1 when the gradient norm is not finite, or beyond a limit
    ]
)
assert STEP_SCALARS.itemsize == 4 * STEP_SCALARS_WORDS


class Limits(NamedTuple):
    """Limits of a step's gradient norm and mean loss: a step beyond a limit makes no update. 0: no
    limit. Values are exact in F32, so that host and device agree."""

    norm: float = 0.0
    loss: float = 0.0


NO_LIMITS = Limits()

# Statistics of one optimizer step, F64 on the device. The loss, fp8_scale and global_norm add to
# them, and the trainer reads them one step late. Gradients are divided by count; the reported loss
# is loss / count. exposed: milliseconds in which the main stream waited for other ranks. A loss's
# own sums follow (`llmq.model.losses`).
STATS = ("loss", "count", "norm_squared", "norm", "saturated", "exposed")
STAT = {name: index for index, name in enumerate(STATS)}
TOKEN_STATS = (*STATS, "loss_1k", "tokens_1k", "lse_sum", "lse_max")  # of cross_entropy
