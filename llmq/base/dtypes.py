"""Dtypes of tensors' elements, and their constants."""

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

MIB = 1 << 20
GIB = 1 << 30

E4M3_MAX = 448.0  # largest finite E4M3 value, S.1111.110
E5M2_MAX = 57344.0  # largest finite E5M2 value, S.11110.11
# Sums of FP16, whose maximum is 65,504, can hold 64 products of codes up to 30.
E4M3_HALF_MAX, HALF_TERMS = 30.0, 64
I8_MAX = 127  # largest code; code -128 is unused, so that the range is symmetric


@dataclass(frozen=True, slots=True, eq=False)  # equality is identity, which is fast in every launch
class DType:
    """The element type of a tensor. name: the word for the dtype in kernels and options. label: the
    word for the dtype in reports. itemsize: bytes of one element."""

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
# E4M3_HALF is E4M3 limited to E4M3_HALF_MAX, so that products may sum in FP16. NumPy's float8_e4m3
# has the same bits as E4M3 for values up to 240.
E4M3_HALF = _dtype("e4m3_half", "F8_E4M3_HALF", ml_dtypes.float8_e4m3)
E5M2 = _dtype("e5m2", "F8_E5M2", ml_dtypes.float8_e5m2)
I32 = _dtype("i32", "I32", np.int32)
I64 = _dtype("i64", "I64", np.int64)
I8 = _dtype("i8", "I8", np.int8)
U8 = _dtype("u8", "U8", np.uint8)
# bytes of codes and their scales; formats/nf4.py has the layout
NF4 = _dtype("nf4", "NF4", np.uint8)
MXFP4 = _dtype("mxfp4", "MXFP4", np.uint8)  # bytes; formats/mxfp4.py has the layout
NVFP4 = _dtype("nvfp4", "NVFP4", np.uint8)  # bytes; formats/nvfp4.py has the layout
# bytes; formats/e4m3_blocks.py has the layout
E4M3_BLOCKS = _dtype("e4m3-blocks", "F8_E4M3_BLOCKS", np.uint8)
# used only in products; formats/ternary.py has the layout
TERNARY = _dtype("ternary", "TERNARY", np.int8)

FP8_MAX = {E4M3: E4M3_MAX, E4M3_HALF: E4M3_HALF_MAX, E5M2: E5M2_MAX}
FP8 = tuple(FP8_MAX)
DTYPES = {d.name: d for d in (F64, F32, BF16, *FP8, I32, I64, I8, U8)}

# The dtypes that a user may choose, by option value ("fp32", "bf16", ...).
OPTION_DTYPES = {"fp32": F32, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "nf4": NF4, "int8": I8}
OPTION_DTYPES |= {dtype.name: dtype for dtype in (MXFP4, NVFP4, E4M3_BLOCKS, TERNARY)}


def parse_dtype(option: str) -> DType:
    """Return the dtype of a canonical option value; KeyError for any other value."""
    return OPTION_DTYPES[option]


# StepScalars: values that change between launches live in device memory, so that captured graphs
# can be replayed. Before each micro-step the host writes 16 words, except the last two words, which
# the kernel global_norm writes. `struct StepScalars` in cu/common.cuh declares the same layout for
# CUDA.
STEP_SCALARS_WORDS = 16
STEP_SCALARS = np.dtype(
    [
        ("lr", np.float32),
        ("beta1_correction", np.float32),  # 1 / (1 - beta1^t)
        ("beta2_correction", np.float32),  # 1 / (1 - beta2^t)
        ("grad_clip", np.float32),  # largest gradient norm after clipping; 0: no clipping
        ("seed", np.uint32),
        ("step", np.uint32),
        ("micro_step", np.uint32),
        # a step whose norm or loss is above the limit makes no update; 0: none
        ("norm_limit", np.float32),
        ("loss_limit", np.float32),
        # Sequence b of a micro-batch has the number first_sequence + b * stride among all sequences
        # of the step on all ranks.
        ("first_sequence", np.uint32),
        ("sequence_stride", np.uint32),
        ("reserved", np.uint32, 3),
        ("grad_scale", np.float32),  # clip factor divided by the number of target tokens
        ("skip_update", np.uint32),  # 1 if the gradient norm is not finite or is beyond a limit
    ]
)
assert STEP_SCALARS.itemsize == 4 * STEP_SCALARS_WORDS


class Limits(NamedTuple):
    """The limits of a step's gradient norm and mean loss; a step beyond a limit makes no update,
    and 0 means no limit. The values are exact in F32, so that host and device agree."""

    norm: float = 0.0
    loss: float = 0.0


NO_LIMITS = Limits()

# STATS are the statistics of one optimizer step, stored as F64 on the device. The loss, fp8_scale
# and global_norm add to the statistics, and the trainer reads the sums one step late. Gradients are
# divided by count; the reported loss is loss / count. `exposed` is the number of milliseconds in
# which the main stream waited for other ranks. The sums that a loss declares follow
# (`llmq.model.losses`).
STATS = ("loss", "count", "norm_squared", "norm", "saturated", "exposed")
STAT = {name: index for index, name in enumerate(STATS)}
# the statistics that cross_entropy adds
TOKEN_STATS = (*STATS, "loss_1k", "tokens_1k", "lse_sum", "lse_max")
