"""Exponentials of logits become the gradient of a cross-entropy with these factors of their rows.

With e = exp(logits - shift), as `ops.matmul_fused.exp` leaves it, a row's gradient is factor * e,
once the target's element has been changed. It is never stored: the product with the weight has its
rows multiplied by the factors afterwards, and that with x has those of x multiplied before.
"""

import math

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import WARP, launch_weighted
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
FINISH_ROWS = 32  # of one block
MULTIPLE = 8  # of K and of columns: one 16-byte access

# shift is the target's logit and so much more: what is less likely than e^(SHIFT_MARGIN - 87) is 0.
SHIFT_MARGIN = 32.0
# Rows whose sum of exponentials is not between 1 / LIMIT and LIMIT are computed again. Far enough
# from what is infinite for 1 / factor too.
LIMIT = math.exp(70.0)

SHIFT = Kernel(
    "exp_rows.cu",
    "exp_rows_shift",
    args="f32* shift, const bf16* x, sparse const bf16* weight, const i32* targets, i32 rows, "
    "i32 K, f32 margin",
)
FINISH = Kernel(
    "exp_rows.cu",
    "exp_rows_finish",
    args="sparse inout bf16* e, inout bf16* x, f32* losses, f32* lse, f32* factors, "
    "const f32* sums, const f32* shift, const f32* target_logits, sparse const bf16* weight, "
    "const i32* targets, i32 rows, i32 columns, i32 vocab, i32 K, i32 tiles, f32 z_loss, f32 limit",
)
SCALE = Kernel(
    "exp_rows.cu", "exp_rows_scale", args="inout bf16* d, const f32* factors, i32 rows, i32 K"
)


def shift(dev: Device, shift: Tensor, x: Tensor, weight: Tensor, targets: Tensor) -> None:
    """shift = x @ weight[target] + SHIFT_MARGIN, of masked rows with column 0.

    The sum of a row's exponentials is then exp(loss - SHIFT_MARGIN), which is in range for any loss
    of a model that has learned something or nothing.

    Args:
        shift    out  F32   (rows,)
        x        in   BF16  (rows, K)     K a multiple of 8
        weight   in   BF16  (columns, K)
        targets  in   I32   (rows,)       ids of columns; negative: masked

    Targets are not checked.
    """
    op = "exp_rows.shift"
    rows, K = _check(op, x, weight)
    expect(op, "shift", shift, F32, (rows,))
    expect(op, "targets", targets, I32, (rows,))
    blocks = ceil_div(rows, THREADS // WARP)
    dev.launch(SHIFT, blocks, THREADS, (shift, x, weight, targets, rows, K, SHIFT_MARGIN))


def finish(
    dev: Device,
    e: Tensor,
    x: Tensor,
    losses: Tensor,
    lse: Tensor,
    factors: Tensor,
    sums: Tensor,
    shift: Tensor,
    target_logits: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    z_loss: float,
    *,
    scale_x: bool,
    limit: float = LIMIT,
    weights: Tensor | None = None,
) -> None:
    """Losses; factor * e becomes softmax(logits) * (1 + z_loss * lse) - onehot(target), times the
    row's weight.

    scale_x: x is multiplied by the factors, for the gradient of the weight, e^T @ x.

    Args (e, sums and target_logits as `matmul_fused.exp` leaves them, of this shift):
        e              inout  BF16  (rows, N)   the target's element is changed; all of a row whose
                                                sum is not between 1 / limit and limit
        x              inout  BF16  (rows, K)   K a multiple of 8; with scale_x times factors
        losses         out    F32   (rows,)     lse - logit of the target; 0 for masked rows
        lse            out    F32   (rows,)     log-sum-exp of the row, also for masked rows
        factors        out    F32   (rows,)     0 for masked rows
        sums           in     F32   (tiles, rows)
        shift          in     F32   (rows,)
        target_logits  in     F32   (rows,)     not read of masked rows
        weight         in     BF16  (N, K)
        targets        in     I32   (rows,)     ids in [0, vocab_size); negative: masked
        weights        in     F32   (rows,)     or None: all are 1; losses and lse have none

    Cost:    sums read, x read and written; a row that is computed again reads all of weight.
    Targets are not checked.
    """
    op = "exp_rows.finish"
    (rows, K), columns = _check(op, x, weight), weight.shape[0]
    expect(op, "e", e, BF16, (rows, columns))
    vectors = {"losses": losses, "lse": lse, "factors": factors, "shift": shift}
    for name, tensor in (vectors | {"target_logits": target_logits}).items():
        expect(op, name, tensor, F32, (rows,))
    expect(op, "targets", targets, I32, (rows,))
    expect(op, "sums", sums, F32, (*sums.shape[:1], rows))
    if columns % MULTIPLE or not 0 < vocab_size <= columns:
        raise ValueError(
            f"{op}: vocab_size must be in [1, {columns}], this a multiple of {MULTIPLE}, "
            f"got {vocab_size}"
        )
    results, operands = (e, x, losses, lse, factors), (sums, shift, target_logits, weight, targets)
    sizes = (rows, columns, vocab_size, K, sums.shape[0], z_loss, limit)
    if weights is not None:
        expect(op, "weights", weights, F32, (rows,))
    args, consts = (*results, *operands, *sizes), {"SCALED": int(scale_x)}
    launch_weighted(dev, FINISH, ceil_div(rows, FINISH_ROWS), THREADS, args, consts, weights)


def scale(dev: Device, d: Tensor, factors: Tensor) -> None:
    """d = d * factors, row by row.

    Args:
        d        inout  BF16  (rows, K)   K a multiple of 8
        factors  in     F32   (rows,)
    """
    op = "exp_rows.scale"
    rows, K = _matrix(op, "d", d)
    expect(op, "factors", factors, F32, (rows,))
    dev.launch(SCALE, ceil_div(rows, THREADS // WARP), THREADS, (d, factors, rows, K))


def _check(op: str, x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Rows and K."""
    rows, K = _matrix(op, "x", x)
    expect(op, "weight", weight, BF16, (weight.shape[0], K))
    return rows, K


def _matrix(op: str, name: str, x: Tensor) -> tuple[int, int]:
    expect(op, name, x, BF16, x.shape)
    if len(x.shape) != 2 or x.shape[1] % MULTIPLE:
        raise ValueError(f"{op}: {name} must be (rows, K), K a multiple of {MULTIPLE}: {x!r}")
    rows, K = x.shape
    return rows, K
