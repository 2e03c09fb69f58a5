"""Matrix product; a library call on CUDA (llmq/runtime/cublaslt.py), NumPy's BLAS on the host."""

from __future__ import annotations

from llmq.dtypes import BF16, F32, U8
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect
from llmq.runtime.tensor import Tensor

_REST = "u8* workspace, i64 M, i64 N, i64 K, i32 trans_a, i32 trans_b, i32 accumulate"
MATMUL = Kernel("matmul", "matmul", args=f"D* out, const S* a, const S* b, const D*? bias, {_REST}")
# The same entry; declared apart because it reads what it adds to.
MATMUL_ACCUMULATE = Kernel(
    "matmul", "matmul", args=f"inout D* out, const S* a, const S* b, const D*? bias, {_REST}"
)


def matmul(
    dev: Device,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Row-major out = op(a) @ op(b) [+ bias | + out], summed in F32.

    Args (contiguous, two dimensions):
        out         out  F32 or BF16 (M,N)   read too when accumulate; F32 if a, b are F32
        a           in   F32 or BF16 (M,K)   (K,M) if trans_a
        b           in   as a        (K,N)   (N,K) if trans_b
        bias        in   as out      (N,)    or None; added to every row; not with accumulate,
                                             where cuBLASLt would round a BF16 sum twice

    Cost:    2*M*N*K FLOPs; one library call with dev.spec.library_workspace bytes of scratch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    for name, tensor in (("out", out), ("a", a), ("b", b)):
        if len(tensor.shape) != 2:
            raise ValueError(f"matmul: {name} must have 2 dimensions, got {tensor.shape}")
        if tensor.dtype not in (F32, BF16):
            raise TypeError(f"matmul: {name} must be F32 or BF16, got {tensor.dtype.label}")
    if a.dtype == F32 and out.dtype != F32:
        raise TypeError("matmul: out must be F32 where a is F32, got BF16")
    M, N = out.shape
    K = a.shape[0] if trans_a else a.shape[1]
    expect("matmul", "a", a, None, (K, M) if trans_a else (M, K))
    expect("matmul", "b", b, a.dtype, (N, K) if trans_b else (K, N))
    if bias is not None:
        if accumulate:
            raise ValueError("matmul: bias and accumulate exclude each other")
        expect("matmul", "bias", bias, out.dtype, (N,))
    sizes = (M, N, K, int(trans_a), int(trans_b), int(accumulate))
    with dev.scratch("matmul_workspace", (dev.spec.library_workspace,), U8) as workspace:
        dev.launch(
            MATMUL_ACCUMULATE if accumulate else MATMUL,
            1,  # the library chooses its own grid and block
            1,
            (out, a, b, bias, workspace, *sizes),
            flops=2 * M * N * K,
        )
