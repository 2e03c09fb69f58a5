"""AdamW on a flat slab of parameters, with stochastically rounded BF16 or 8-bit state.

8-bit moments are E4M3 codes with an F32 scale for SCALE_BLOCK neighbours: m = code * scale and
v = (code * scale)^2.

- The root of v is stored: E4M3 covers a range of 2^18, so that gradients of elements that share a
  scale can differ by a factor of up to 1e5. If v were stored, the factor would be the root of 1e5.
- Codes are rounded stochastically, because a step changes v by less than the distance of two codes.
  With rounding to nearest, roots would not move: in a stationary state a root would stay at 2.2
  times the right value with beta2 = 0.95, and at 0.4 times with beta2 = 0.999.
- The second moment never becomes 0: its smallest code is 1. An element whose root is below 2^-18 of
  the block's largest root takes too small steps; with code 0 its steps could have any size.
- A scale is the smallest power of two with which the block's largest number is at most 448: codes
  of unchanged numbers do not change with the scale, and scaling is exact.

In a stationary state rounding adds noise. The noise of the root of v has a standard deviation of
12 % of the root with beta2 = 0.95 and 15 % with beta2 = 0.999, beside 11 % and 1 % from averaging
few gradients. The noise of m is 9 % of m's own standard deviation.
"""

from llmq.base.tensor import Tensor
from llmq.ops.common import expect_scale
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 128
PER_THREAD = 8  # elements of a thread: one 16-byte access of BF16, two accesses of F32

ADAMW = Kernel(
    "update/adamw.cu",
    "adamw",
    "inout P[n] param, out bf16[n]? work, G[n] grad, inout M[n] m, inout V[n] v, "
    "inout f32[n//128]? m_scale, inout f32[n//128]? v_scale, i64[num_segments,2] segments, "
    "i32 num_segments, i32[16] scalars, f32 one_minus_beta1, f32 one_minus_beta2, f32 epsilon, "
    "f32 weight_decay, f32 lr_scale, u32 salt, i64 first, i64 n",
    where="n % 128, n >= 1, first % 128, first >= 0",
    types="M=f32|bf16|e4m3, V=f32|bf16|e4m3",
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
    lr_scale: float = 1.0,
    first: int = 0,
    m_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Run one AdamW step on a slab with several parameters, one after another, or on a part of it.

        g = grad_scale * grad
        m = m + (1 - beta1) * (g - m)           v = v + (1 - beta2) * (g * g - v)
        param = param - lr * (m * beta1_correction / (sqrt(v) * sqrt(beta2_correction) + epsilon)
                              + weight_decay * param)

    Computed in F32; param uses this step's m and v before rounding. BF16 and E4M3 results are
    rounded stochastically: eight neighbours share a hash, from which practically independent bits
    are made. If scalars.skip_update is set, nothing changes. A part, which starts at element
    `first` of the slab, gets the same bits as in an update of the whole slab.

    work: out, param rounded to nearest; or None. grad: unscaled sum over tokens. m, v: first and
    second moment, zero at the start; if E4M3, codes of m and of the root of v, with scales.
    segments: (end element, 1 if the parameter decays, else 0) for each parameter; ends are
    ascending multiples of 128, counted from the start of the slab, and the last end is at least
    first + n. Segments are not checked, because their values are in device memory. scalars:
    StepScalars. salt: distinguishes this slab's random numbers. lr_scale: factor of scalars.lr.
    """
    expect_scale("adamw", "m", m, m_scale)
    expect_scale("adamw", "v", v, v_scale)
    n = param.size
    hyper = (1.0 - beta1, 1.0 - beta2, float(epsilon), float(weight_decay), float(lr_scale))
    tensors = (param, work, grad, m, v, m_scale, v_scale, segments)
    args = (*tensors, segments.shape[0], scalars, *hyper, salt, first, n)
    dev.launch(ADAMW, ceil_div(n, THREADS * PER_THREAD), THREADS, args, cost=Cost(flops=16 * n))
