"""RMSNorm of value heads without weights; values may be made from the keys."""

from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

_QKV = "T[batch,seq_len,num_heads + 2*num_kv_heads,Hd]"
_RSTD, _PRODUCT = "f32[batch,seq_len,num_kv_heads]", "T[tokens,(num_heads + num_kv_heads)*Hd]"
_SIZES, _RULES = "i64 tokens, i32 num_heads, i32 num_kv_heads", {"gpu": "Hd % 8"}


FORWARD = Kernel(
    "attention/value_norm.cu",
    "value_norm_forward",
    f"inout {_QKV} qkv, out {_RSTD} rstd, {_PRODUCT}? product, f32 eps, {_SIZES}",
    **_RULES,
)
BACKWARD = Kernel(
    "attention/value_norm.cu",
    "value_norm_backward",
    f"out {_PRODUCT}? d_product, inout {_QKV} d_qkv, {_QKV} qkv, {_RSTD} rstd, {_SIZES}",
    **_RULES,
)

THREADS = 256


def _sizes(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
    """Numbers of tokens, query heads and key heads."""
    batch, seq_len, _ = FORWARD.dims(qkv=qkv, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return batch * seq_len, num_heads, num_kv_heads


def _launch(
    dev: Device,
    kernel: Kernel,
    args: tuple,
    qkv: Tensor,
    sizes: tuple[int, int, int],
    *,
    keys: bool,
) -> None:
    """Launch a warp for each value head. keys: True if values are made from keys, which needs a
    warp for each query head, too. sizes: the result of _sizes."""
    tokens, num_heads, num_kv_heads = sizes
    heads, head_dim = num_kv_heads + (num_heads if keys else 0), qkv.shape[-1]
    vectors = ceil_div(head_dim * qkv.dtype.itemsize, 32 * VECTOR_BYTES)  # vectors of a lane
    consts = {"HEAD_DIM": head_dim, "KEYS": int(keys), "VECTORS": vectors}
    blocks = ceil_div(32 * tokens * heads, THREADS)
    dev.launch(kernel, blocks, THREADS, args, consts=consts, cost=BESIDE_ATTENTION)


def forward(
    dev: Device,
    qkv: Tensor,
    rstd: Tensor,
    product: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Normalize the value heads in qkv.

        value = T(rstd * x)        rstd = 1 / sqrt(mean(x^2) + eps)

    product: (B*T, (Hq+Hkv)*Hd), query and key heads, which are copied to qkv; x is the key. None:
    qkv already has all heads, and x is the value.
    """
    sizes = _sizes(qkv, num_heads, num_kv_heads)
    args = (qkv, rstd, product, eps, *sizes)
    _launch(dev, FORWARD, args, qkv, sizes, keys=product is not None)


def backward(
    dev: Device,
    d_product: Tensor | None,
    d_qkv: Tensor,
    qkv: Tensor,
    rstd: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Turn gradients of normalized values into gradients of x.

        d_x = T(rstd * (d_value - value * mean(d_value * value)))

    qkv, rstd: the results of forward. d_product: gradient of forward's product: query heads are
    copied from d_qkv, and d_x is added to its key heads. None: value heads of d_qkv become d_x.
    """
    sizes = _sizes(qkv, num_heads, num_kv_heads)
    args = (d_product, d_qkv, qkv, rstd, *sizes)
    _launch(dev, BACKWARD, args, qkv, sizes, keys=d_product is not None)
