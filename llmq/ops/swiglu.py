"""SwiGLU: up * silu(gate), the activation of Llama- and Qwen-class MLPs."""

from __future__ import annotations

from llmq.ops.common import VECTOR_BYTES, abs_max_consts, expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Tensor

THREADS = 256
VECTORS = 2  # 16-byte vectors per thread; VECTORS in cu/swiglu.cu

FORWARD = Kernel(
    "swiglu.cu",
    "swiglu_forward",
    args="T* out, const T* up_gate, i64 rows, i32 F, inout f32*? abs_max",
)
BACKWARD = Kernel(
    "swiglu.cu",
    "swiglu_backward",
    args="T* d_up_gate, const T* d_out, const T* up_gate, i64 rows, i32 F, inout f32*? abs_max",
)


def grid(size: int, itemsize: int) -> int:
    """Blocks for `size` output elements: every thread handles VECTORS vectors of 16 bytes."""
    return ceil_div(size * itemsize, VECTOR_BYTES * THREADS * VECTORS)


def forward(dev: Device, out: Tensor, up_gate: Tensor, *, abs_max: Tensor | None = None) -> None:
    """out = up * gate * sigmoid(gate), computed in F32.

    Args (T is BF16 or F32):
        out      out    T (*S, F)    F a multiple of 16 bytes
        up_gate  in     T (*S, 2F)   [up | gate] along the last dimension
        abs_max  inout  F32 (1,)     or None; raised to the largest |out|

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    rows, F = _check("swiglu.forward", "out", out, up_gate)
    dev.launch(
        FORWARD,
        grid(out.size, out.dtype.itemsize),
        THREADS,
        (out, up_gate, rows, F, abs_max),
        consts=abs_max_consts("swiglu.forward", abs_max),
    )


def backward(
    dev: Device,
    d_up_gate: Tensor,
    d_out: Tensor,
    up_gate: Tensor,
    *,
    abs_max: Tensor | None = None,
) -> None:
    """The gradient of forward: d_up = d_out * silu(gate), d_gate = d_out * up * silu'(gate).

    Args (T is BF16 or F32):
        d_up_gate  out    T (*S, 2F)   [d_up | d_gate]; may be up_gate itself
        d_out      in     T (*S, F)
        up_gate    in     T (*S, 2F)
        abs_max    inout  F32 (1,)     or None; raised to the largest |d_up_gate|

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    rows, F = _check("swiglu.backward", "d_out", d_out, up_gate)
    expect("swiglu.backward", "d_up_gate", d_up_gate, up_gate.dtype, up_gate.shape)
    dev.launch(
        BACKWARD,
        grid(d_out.size, d_out.dtype.itemsize),
        THREADS,
        (d_up_gate, d_out, up_gate, rows, F, abs_max),
        consts=abs_max_consts("swiglu.backward", abs_max),
    )


def _check(op: str, name: str, narrow: Tensor, up_gate: Tensor) -> tuple[int, int]:
    expect_float(op, name, narrow)
    F = narrow.shape[-1]
    if F * narrow.dtype.itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: {name} must have rows of a multiple of 16 bytes, got {F} elements")
    expect(op, "up_gate", up_gate, narrow.dtype, (*narrow.shape[:-1], 2 * F))
    return narrow.size // F, F
