"""Trained factors, one for each expert, by which weights of choices are multiplied."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import finish_column_sum
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256

FORWARD = Kernel(
    "experts/expert_scale.cu",
    "expert_scale_forward",
    "out f32[S,top_k] out, f32[S,top_k] weights, T[E] scale, i32[S,top_k] chosen, i64 n",
)
BACKWARD = Kernel(
    "experts/expert_scale.cu",
    "expert_scale_backward",
    "inout f32[S,top_k] d_weights, out f32[1,E] d_scale, f32[S,top_k] weights, T[E] scale, "
    "i32[R] order, i32[E+1] starts",
    where="R == S*top_k",
)


def forward(dev: Device, out: Tensor, weights: Tensor, scale: Tensor, chosen: Tensor) -> None:
    """out[s, k] = weights[s, k] * scale[chosen[s, k]], in F32.

    scale: (E,). chosen: I32 (S, top_k), see `route.route`.
    """
    n = weights.size
    dev.launch(FORWARD, ceil_div(n, THREADS), THREADS, (out, weights, scale, chosen, n))


def backward(
    dev: Device,
    d_weights: Tensor,
    d_scale: Accumulator | None,
    weights: Tensor,
    scale: Tensor,
    order: Tensor,
    starts: Tensor,
) -> None:
    """Turn gradients of forward's results into gradients of its weights, in place.

        d_scale[e] = or += sum over choices of e of d_weights * weights     d_weights *= scale[e]

    order, starts: see `expert_rows.sort_rows`. d_scale: None if this gradient is not wanted.

    Cost:    three reads and a write of 4 bytes for each choice, one expert per block.
    """
    E = scale.size
    with dev.scratch("d_expert_scale", (1, E), F32) as partial:
        args = (d_weights, partial, weights, scale, order, starts)
        dev.launch(BACKWARD, E, THREADS, args)
        finish_column_sum(dev, d_scale, partial)
