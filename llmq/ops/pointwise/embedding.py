"""Token (and learned position) embeddings, and their deterministic gradients."""

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import expect_accumulator, expect_float, expect_multiple
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
SORT_THREADS = 1024
# Constants of cu/pointwise/embedding.cu: channels per thread, channels and sorted tokens that one
# warp sums, and chunks of them for which one block finishes what it must.
WIDTH = 8
SLICE = 32 * WIDTH
CHUNK = 32
FINISH_CHUNKS = 4

FORWARD = Kernel(
    "pointwise/embedding.cu",
    "embedding_forward",
    args="T* out, const i32* tokens, const T* weight, const T*? position_weight, "
    "i64 n, i32 seq_len, i32 C, i32 first_position, const i32*? starts, f32 scale",
)
SORT = Kernel(
    "pointwise/embedding.cu",
    "embedding_sort",
    args="i32* order, i32* spare, const i32* tokens, i32 n, i32 vocab, i32 buckets",
)
BACKWARD = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward",
    args="inout G* d_weight, f32* partial, const T* d_out, const i32* tokens, "
    "const i32* order, const i32* scalars, i32 n, i32 C, f32 scale, i32 padding, i32 first_id, "
    "i32 rows, u32 salt",
)
FINISH = Kernel(
    "pointwise/embedding.cu",
    "embedding_finish",
    args="inout G* d_weight, const f32* partial, const i32* tokens, const i32* order, "
    "const i32* scalars, i32 n, i32 C, f32 scale, i32 padding, i32 first_id, i32 rows, u32 salt",
)
BACKWARD_POSITIONS = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward_positions",
    args="inout G* d_position, const T* d_out, const i32* scalars, i32 positions, i32 batch, "
    "i32 seq_len, i32 C, i32 accumulate, u32 salt",
)
BACKWARD_DOCUMENTS = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward_documents",
    args="inout G* d_position, const T* d_out, const i32* starts, const i32* scalars, "
    "i32 positions, i32 batch, i32 seq_len, i32 C, i32 accumulate, u32 salt",
)


def num_buckets(n: int) -> int:
    """Blocks that sort n tokens: a power of two, at most 128, at least about 128 tokens each."""
    return min(128, 1 << (ceil_div(n, 128) - 1).bit_length())


def forward(
    dev: Device,
    out: Tensor,
    tokens: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    first_position: int = 0,
    scale: float = 1.0,
    starts: Tensor | None = None,
) -> None:
    """out[b, t] = X(weight[tokens[b, t]] * scale) (+ position_weight[p]).

    p = first_position + t - starts[b, t]. scale: rounded to X.

    Args (X is BF16 or F32):
        out              out  X   (B, T, C)   C a multiple of 8 (on a GPU)
        tokens           in   I32 (B, T)      ids in [0, Vp)
        weight           in   X   (Vp, C)
        position_weight  in   X   (P, C) or None; first_position + T <= P
        starts           in   I32 (B, T) or None; where each one's document starts, None: 0

    Ids are not checked.
    """
    op = "embedding.forward"
    B, T, C = _check(op, dev, "out", out, tokens)
    scale = _rounded(scale, out)
    expect(op, "weight", weight, out.dtype, (weight.shape[0], C))
    if position_weight is not None:
        P = position_weight.shape[0]
        expect(op, "position_weight", position_weight, out.dtype, (P, C))
        if not 0 <= first_position <= P - T:
            raise ValueError(
                f"{op}: positions [{first_position}, {first_position + T}) are outside of [0, {P})"
            )
    if starts is not None:
        expect(op, "starts", starts, I32, (B, T))
    dev.launch(
        FORWARD,
        ceil_div(B * T, THREADS // 32),
        THREADS,
        (out, tokens, weight, position_weight, B * T, T, C, first_position, starts, scale),
    )


def backward(
    dev: Device,
    d_weight: Accumulator,
    d_out: Tensor,
    tokens: Tensor,
    scale: float = 1.0,
    padding: int | None = None,
    first_id: int = 0,
    vocab: int | None = None,
) -> None:
    """d_weight[id - first_id] += scale * sum of d_out[b, t] over all (b, t) with tokens[b, t] ==
    id.

    Sums in F32, in the order of (b, t). Rows of ids that do not occur stay as they are, and so does
    that of `padding`, torch's padding_idx. Ids of which d_weight has no row have no gradient.
    scale: as in forward. vocab: larger than any id; None: as many as there are rows.

    Args (X is BF16 or F32, G is BF16 or F32):
        d_weight  inout  Accumulator G (R, C), accumulate must be True
        d_out     in     X   (B, T, C)   C a multiple of 8 (on a GPU)
        tokens    in     I32 (B, T)      ids in [0, vocab)

    Workspace: 8 bytes a token, and C / 4 bytes a token for the sums of frequent ids.
    Ids are not checked.
    """
    op = "embedding.backward"
    B, T, C = _check(op, dev, "d_out", d_out, tokens)
    n, rows, scale = B * T, d_weight.tensor.shape[0], _rounded(scale, d_out)
    weight, accumulate, scalars, salt = d_weight
    expect_accumulator(op, "d_weight", d_weight, (rows, C))
    if not accumulate:
        raise ValueError(f"{op}: d_weight must accumulate, or rows of absent ids stay undefined")
    of_rows = (n, C, scale, -1 if padding is None else padding, first_id, rows, salt)
    vocab = first_id + rows if vocab is None else vocab
    buckets, chunks = num_buckets(n), ceil_div(n, CHUNK)
    slices = ceil_div(C, SLICE)
    with (
        dev.scratch("embedding token order", (n,), I32) as order,
        dev.scratch("embedding partial sums", (chunks, 2, C), F32) as partial,
    ):
        with dev.scratch("embedding sort", (n,), I32) as spare:
            dev.launch(SORT, buckets, SORT_THREADS, (order, spare, tokens, n, vocab, buckets))
        dev.launch(
            BACKWARD,
            ceil_div(chunks * slices, THREADS // 32),
            THREADS,
            (weight, partial, d_out, tokens, order, scalars, *of_rows),
        )
        dev.launch(
            FINISH,
            (ceil_div(chunks, FINISH_CHUNKS), slices),
            THREADS,
            (weight, partial, tokens, order, scalars, *of_rows),
        )


def backward_positions(
    dev: Device, d_position: Accumulator, d_out: Tensor, starts: Tensor | None = None
) -> None:
    """d_position[p] = sum of d_out[b, t] where t - starts[b, t] = p, in the order of (b, t).

    Rows >= T are zeroed unless accumulating.

    Args (X is BF16 or F32, G is BF16 or F32):
        d_position  inout  Accumulator G (P, C), P >= T
        d_out       in     X (B, T, C)   C a multiple of 8 (on a GPU)
        starts      in     I32 (B, T) or None: 0
    """
    op = "embedding.backward_positions"
    B, T, C = _check(op, dev, "d_out", d_out, None)
    target, accumulate, scalars, salt = d_position
    P = target.shape[0]
    expect_accumulator(op, "d_position", d_position, (P, C))
    if T > P:
        raise ValueError(f"{op}: d_position must have at least {T} rows, got {P}")
    rows = T if accumulate else P
    sizes = (rows, B, T, C, int(accumulate), salt)
    if starts is not None:
        expect(op, "starts", starts, I32, (B, T))
        dev.launch(
            BACKWARD_DOCUMENTS,
            ceil_div(rows * ceil_div(C, SLICE), THREADS // 32),
            THREADS,
            (target, d_out, starts, scalars, *sizes),
        )
        return
    dev.launch(
        BACKWARD_POSITIONS,
        ceil_div(rows * C, WIDTH * THREADS),
        THREADS,
        (target, d_out, scalars, *sizes),
    )


def _rounded(scale: float, x: Tensor) -> float:
    """In the format of x, as HF has it."""
    return float(np.float32(scale).astype(x.dtype.numpy))


def _check(
    op: str, dev: Device, name: str, x: Tensor, tokens: Tensor | None
) -> tuple[int, int, int]:
    expect_float(op, name, x)
    if len(x.shape) != 3:
        raise ValueError(f"{op}: {name} must be (B, T, C), got shape {x.shape}")
    expect_multiple(op, dev, "C", x.shape[2], WIDTH)
    if tokens is not None:
        expect(op, "tokens", tokens, I32, x.shape[:2])
    return x.shape
