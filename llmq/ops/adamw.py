"""AdamW on a flat slab of parameters, with stochastically rounded BF16 state."""

from __future__ import annotations

from llmq.dtypes import BF16, F32, I32, I64, STEP_SCALARS_WORDS
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Tensor

THREADS = 256
PER_THREAD = 8  # elements: one 16-byte access of BF16, two of F32
SEGMENT_MULTIPLE = 128  # elements; no thread's elements belong to two parameters

ADAMW = Kernel(
    "adamw.cu",
    "adamw",
    args="inout P* param, bf16*? work, const G* grad, inout M* m, inout V* v, "
    "const i64* segments, i32 num_segments, const i32* scalars, f32 one_minus_beta1, "
    "f32 one_minus_beta2, f32 epsilon, f32 weight_decay, u32 salt, i64 n",
)


def update(
    dev: Device,
    param: Tensor,
    work: Tensor | None,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    segments: Tensor,
    scalars: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    salt: int,
) -> None:
    """One AdamW step on a slab that holds several parameters one after another.

        g = grad_scale * grad
        m = m + (1 - beta1) * (g - m)           v = v + (1 - beta2) * (g * g - v)
        param = param - lr * (m * beta1_correction / (sqrt(v * beta2_correction) + epsilon)
                              + weight_decay * param)

    All in F32; param uses the m and v of this step before they are rounded. BF16 param, m and v
    are rounded stochastically, with independent bits for each element of each. Nothing changes
    when scalars.skip_update is set.

    Args (contiguous; n a positive multiple of 128):
        param     inout  F32 or BF16 (n,)
        work      out    BF16 (n,)   param rounded to nearest, or None
        grad      in     F32 or BF16 (n,)   unscaled sum over tokens
        m, v      inout  F32 or BF16 (n,)   first and second moment
        segments  in     I64 (S,2)   [end element, 1 if it decays else 0] of each parameter,
                                     ends ascending multiples of 128, the last one n
        scalars   in     I32 (16,)   StepScalars: lr, corrections, seed, step, grad_scale,
                                     skip_update
        salt      distinguishes this slab's random numbers

    Cost:    reads and writes param, m, v, reads grad, writes work, once; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape. Segments are not checked:
             their values are in device memory.
    """
    n = param.size
    for name, tensor in (("param", param), ("grad", grad), ("m", m), ("v", v)):
        expect("adamw", name, tensor, None, (n,))
        if tensor.dtype not in (F32, BF16):
            raise TypeError(f"adamw: {name} must be F32 or BF16, got {tensor.dtype.label}")
    if work is not None:
        expect("adamw", "work", work, BF16, (n,))
    expect("adamw", "segments", segments, I64, (segments.shape[0], 2))
    expect("adamw", "scalars", scalars, I32, (STEP_SCALARS_WORDS,))
    if n == 0 or n % SEGMENT_MULTIPLE:
        raise ValueError(
            f"adamw: param.size must be a positive multiple of {SEGMENT_MULTIPLE}, got {n}"
        )
    hyper = (1.0 - beta1, 1.0 - beta2, float(epsilon), float(weight_decay))
    args = (param, work, grad, m, v, segments, segments.shape[0], scalars, *hyper, salt, n)
    dev.launch(ADAMW, ceil_div(n, THREADS * PER_THREAD), THREADS, args, flops=16 * n)
