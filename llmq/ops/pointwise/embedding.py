"""Embeddings of tokens and learned positions, and their deterministic gradients."""

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
SORT_THREADS = 1024
# Constants of cu/pointwise/embedding.cu.
WIDTH = 8  # channels of a thread
SLICE = 32 * WIDTH  # channels of a warp
CHUNK = 32  # sorted tokens that a warp sums
FINISH_CHUNKS = 4  # chunks that a block finishes

FORWARD = Kernel(
    "pointwise/embedding.cu",
    "embedding_forward",
    "out T[batch,seq_len,C] out, i32[batch,seq_len] tokens, sparse T[vocab,C] weight, "
    "T[positions,C]? position_weight, i64 n, i32 seq_len, i32 C, "
    "i32[batch,seq_len]? starts, f32 scale",
    where="seq_len <= positions",
    gpu="C % 8",
)
SORT = Kernel(
    "pointwise/embedding.cu",
    "embedding_sort",
    "out i32[n] order, out i32[n] spare, i32[*n] tokens, i32 n, i32 vocab, i32 buckets",
)
BACKWARD = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward",
    "inout G[rows,C] d_weight, out f32[chunks,2,C] partial, T[*n,C] d_out, i32[*n] tokens, "
    "i32[n] order, i32[16] scalars, i32 n, i32 C, f32 scale, i32 padding, i32 first_id, "
    "i32 rows, u32 salt",
    gpu="C % 8",
)
FINISH = Kernel(
    "pointwise/embedding.cu",
    "embedding_finish",
    "inout G[rows,C] d_weight, f32[chunks,2,C] partial, i32[*n] tokens, i32[n] order, "
    "i32[16] scalars, i32 n, i32 C, f32 scale, i32 padding, i32 first_id, i32 rows, u32 salt",
)
BACKWARD_POSITIONS = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward_positions",
    "inout G[P,C] d_position, T[batch,seq_len,C] d_out, i32[16] scalars, i32 positions, i32 batch, "
    "i32 seq_len, i32 C, i32 accumulate, u32 salt",
    where="seq_len <= P",
    gpu="C % 8",
)
BACKWARD_DOCUMENTS = Kernel(
    "pointwise/embedding.cu",
    "embedding_backward_documents",
    "inout G[P,C] d_position, T[batch,seq_len,C] d_out, i32[batch,seq_len] starts, "
    "i32[16] scalars, i32 positions, i32 batch, i32 seq_len, i32 C, i32 accumulate, u32 salt",
    where="seq_len <= P",
    gpu="C % 8",
)


def num_buckets(n: int) -> int:
    """Number of thread blocks that sort n tokens: a power of two, at most 128. A block has about
    128 tokens or more."""
    return min(128, 1 << (ceil_div(n, 128) - 1).bit_length())


def forward(
    dev: Device,
    out: Tensor,
    tokens: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    scale: float = 1.0,
    starts: Tensor | None = None,
) -> None:
    """out[b, t] = T(weight[tokens[b, t]] * scale) (+ position_weight[t - starts[b, t]]).

    scale: rounded to out's dtype. starts: position where each token's document starts, negative for
    a document that began before these tokens; None: 0. Ids are not checked.
    """
    B, T, C = FORWARD.dims(out=out)
    scale = _rounded(scale, out)
    dev.launch(
        FORWARD,
        ceil_div(B * T, THREADS // 32),
        THREADS,
        (out, tokens, weight, position_weight, B * T, T, C, starts, scale),
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
    """d_weight[id - first_id] += scale * sum of d_out[b, t] over (b, t) with tokens[b, t] == id.

    Terms are added in F32, in the order of (b, t). Rows of absent ids and row `padding` (torch's
    padding_idx) stay as they are. Ids without a row in d_weight have no gradient. scale: see
    forward. vocab: a number larger than any id, not checked; None: first_id + rows. d_weight must
    accumulate.

    Workspace: 8 bytes per token, and C / 4 bytes per token for the sums of frequent ids.
    """
    (n, C), scale = BACKWARD.dims(d_out=d_out), _rounded(scale, d_out)
    weight, accumulate, scalars, salt = d_weight
    rows = weight.shape[0]
    if not accumulate:
        raise ValueError(
            "embedding.backward: d_weight must accumulate, or rows of absent ids stay undefined"
        )
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
    """d_position[p] = or += sum of d_out[b, t] over (b, t) with t - starts[b, t] = p, in order.

    Rows >= T are zeroed unless d_position accumulates. starts: see forward.
    """
    B, T, C = BACKWARD_POSITIONS.dims(d_out=d_out)
    target, accumulate, scalars, salt = d_position
    P = target.shape[0]
    rows = T if accumulate else P
    sizes = (rows, B, T, C, int(accumulate), salt)
    if starts is not None:
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
    """Return scale rounded to the dtype of x, as in HF."""
    return float(np.float32(scale).astype(x.dtype.numpy))
