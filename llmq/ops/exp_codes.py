"""What fp8 codes of exponentials of logits need beside them to be the gradient of a cross-entropy.

With e = exp(logits - shift), as `llmq.ops.matmul_exp_codes` leaves its codes, a row's gradient is
factor * e, but of its target, where e is 0 and the gradient is a number of its own.
"""

from __future__ import annotations

import math

from llmq.base.dtypes import BF16, E4M3, E5M2, E5M2_MAX, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import WARP, expect_fp8_multiples
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
BLOCK_ROWS = 32
CODES_TILE = 128  # rows and columns of turn; CodesTile in cu/fp8.cuh
AGAIN = 4096.0  # the sum of a row's exponentials when they are computed again

SHIFT = Kernel(
    "exp_codes.cu",
    "exp_codes_shift",
    args="f32* shift, const e4m3* x, few const e4m3* weight, const f32* scale_x, "
    "const f32* scale_weight, const i32* targets, i32 rows, i32 K",
)
FINISH = Kernel(
    "exp_codes.cu",
    "exp_codes_finish",
    args="f32* losses, f32* lse, f32* factors, f32* own, i32* masks, inout f32* shift, "
    "const f32* sums, const f32* target_logits, const i32* targets, i32 rows, i32 tiles, "
    "f32 z_loss, f32 largest, f32 again",
)
GATHER = Kernel(
    "exp_codes.cu",
    "exp_codes_gather",
    args="few i32* listed, few e4m3* listed_x, const i32* masks, few const e4m3* x, i32 rows, "
    "i32 K",
)
INPUT = Kernel(
    "exp_codes.cu",
    "exp_codes_input",
    args="inout bf16* d, const f32* factors, const f32* own, few const e4m3* weight, "
    "const f32* scale_weight, const i32* targets, i32 rows, i32 K",
)
TURN = Kernel(
    "exp_codes.cu",
    "exp_codes_turn",
    args="e5m2* turned, const e5m2* codes, const f32* factors, const f32* own, "
    "const i32* targets, i32 rows, i32 columns, f32 over_scale",
)


def num_masks(rows: int) -> int:
    """Words with a bit for each row."""
    return ceil_div(rows, BLOCK_ROWS)


def shift(
    dev: Device,
    shift: Tensor,
    x: Tensor,
    weight: Tensor,
    scale_x: Tensor,
    scale_weight: Tensor,
    targets: Tensor,
) -> None:
    """shift = scale_x * scale_weight * (x @ weight[target]), rounded to BF16; masked: of column 0.

    The sum of a row's exponentials is then exp(loss), of which E5M2 has all that counts up to a
    loss of 11, and beyond if no single one is above its largest number.

    Args:
        shift         out  F32   (rows,)
        x             in   E4M3  (rows, K)     K a multiple of 16
        weight        in   E4M3  (columns, K)
        scale_x       in   F32   (1,)
        scale_weight  in   F32   (1,)
        targets       in   I32   (rows,)       ids of columns; negative: masked

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape. Targets are not checked.
    """
    op = "exp_codes.shift"
    rows, K = x.shape
    expect_fp8_multiples(op, rows, K)
    expect(op, "x", x, E4M3, (rows, K))
    expect(op, "weight", weight, E4M3, (weight.shape[0], K))
    expect(op, "shift", shift, F32, (rows,))
    expect(op, "scale_x", scale_x, F32, (1,))
    expect(op, "scale_weight", scale_weight, F32, (1,))
    expect(op, "targets", targets, I32, (rows,))
    args = (shift, x, weight, scale_x, scale_weight, targets, rows, K)
    dev.launch(SHIFT, ceil_div(rows, THREADS // WARP), THREADS, args)


def finish(
    dev: Device,
    losses: Tensor,
    lse: Tensor,
    factors: Tensor,
    own: Tensor,
    masks: Tensor,
    shift: Tensor,
    sums: Tensor,
    target_logits: Tensor,
    targets: Tensor,
    z_loss: float,
    *,
    largest: float = E5M2_MAX,
) -> None:
    """Losses, and what makes codes of exponentials the gradient
    softmax(logits) * (1 + z_loss * lse) - onehot(target).

    Args (sums and target_logits as `matmul_exp_codes.forward` leaves them, of this shift):
        losses         out    F32  (rows,)   lse - logit of the target; 0 for masked rows; infinite
                                             where it is more than 88
        lse            out    F32  (rows,)   log-sum-exp, also for masked rows, but see losses
        factors        out    F32  (rows,)   of codes; 0 for masked rows
        own            out    F32  (rows,)   the gradient of the target's logit; 0 for masked rows
        masks          out    I32  (num_masks(rows),)   bits of the rows whose codes must be made
                                             again, since a tile has a sum above `largest`
        shift          inout  F32  (rows,)   of these: with which their sum is AGAIN, as `factors`
                                             has it
        sums           in     F32  (tiles, rows)
        target_logits  in     F32  (rows,)   not read of masked rows
        targets        in     I32  (rows,)   negative: masked

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "exp_codes.finish"
    rows = losses.shape[0]
    vectors = {"losses": losses, "lse": lse, "factors": factors, "own": own, "shift": shift}
    for name, tensor in (vectors | {"target_logits": target_logits}).items():
        expect(op, name, tensor, F32, (rows,))
    expect(op, "masks", masks, I32, (num_masks(rows),))
    expect(op, "sums", sums, F32, (*sums.shape[:1], rows))
    expect(op, "targets", targets, I32, (rows,))
    results = (losses, lse, factors, own, masks, shift)
    args = (*results, sums, target_logits, targets, rows, sums.shape[0], z_loss, largest, AGAIN)
    dev.launch(FINISH, num_masks(rows), THREADS, args)


def gather(dev: Device, listed: Tensor, listed_x: Tensor, masks: Tensor, x: Tensor) -> None:
    """The rows whose bits are set, and theirs of x, one after the other: next to nothing for none.

    Args:
        listed    out  I32  (1 + rows,)   how many, and which; nothing is written beyond these
        listed_x  out  E4M3 (rows, K)     the same
        masks     in   I32  (num_masks(rows),)
        x         in   E4M3 (rows, K)     K a multiple of 16

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "exp_codes.gather"
    rows, K = x.shape
    expect_fp8_multiples(op, rows, K)
    expect(op, "x", x, E4M3, (rows, K))
    expect(op, "listed", listed, I32, (1 + rows,))
    expect(op, "listed_x", listed_x, E4M3, (rows, K))
    expect(op, "masks", masks, I32, (num_masks(rows),))
    dev.launch(GATHER, num_masks(rows), THREADS, (listed, listed_x, masks, x, rows, K))


def input_gradient(
    dev: Device,
    d: Tensor,
    factors: Tensor,
    own: Tensor,
    weight: Tensor,
    scale_weight: Tensor,
    targets: Tensor,
) -> None:
    """d = factors * d + own * scale_weight * weight[target], row by row; 0 in masked rows.

    Args:
        d             inout  BF16  (rows, K)     codes of exponentials times weight; K a multiple
                                                 of 16
        factors       in     F32   (rows,)       as `finish` leaves them
        own           in     F32   (rows,)
        weight        in     E4M3  (columns, K)
        scale_weight  in     F32   (1,)
        targets       in     I32   (rows,)       negative: masked

    Raises: TypeError for a wrong dtype, ValueError for a wrong shape. Targets are not checked.
    """
    op = "exp_codes.input_gradient"
    rows, K = d.shape
    expect_fp8_multiples(op, rows, K)
    expect(op, "d", d, BF16, (rows, K))
    expect(op, "factors", factors, F32, (rows,))
    expect(op, "own", own, F32, (rows,))
    expect(op, "weight", weight, E4M3, (weight.shape[0], K))
    expect(op, "scale_weight", scale_weight, F32, (1,))
    expect(op, "targets", targets, I32, (rows,))
    args = (d, factors, own, weight, scale_weight, targets, rows, K)
    dev.launch(INPUT, ceil_div(rows, THREADS // WARP), THREADS, args)


def turn(
    dev: Device,
    turned: Tensor,
    codes: Tensor,
    factors: Tensor,
    own: Tensor,
    targets: Tensor,
    scale: float,
) -> None:
    """The gradient of logits / scale as transposed codes, rounded twice but for its targets.

    Args:
        turned   out  E5M2 (columns, rows)
        codes    in   E5M2 (rows, columns)   of exponentials, 0 where a target is
        factors  in   F32  (rows,)           as `finish` leaves them; not above 65504 * scale
        own      in   F32  (rows,)
        targets  in   I32  (rows,)           negative: masked
        scale                                a power of two

    Cost:    codes read once, turned written; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape or scale.
    """
    op = "exp_codes.turn"
    rows, columns = codes.shape
    expect_fp8_multiples(op, rows, columns)
    expect(op, "codes", codes, E5M2, (rows, columns))
    expect(op, "turned", turned, E5M2, (columns, rows))
    expect(op, "factors", factors, F32, (rows,))
    expect(op, "own", own, F32, (rows,))
    expect(op, "targets", targets, I32, (rows,))
    if math.frexp(scale)[0] != 0.5:
        raise ValueError(f"{op}: scale must be a power of two, got {scale}")
    blocks = (ceil_div(columns, CODES_TILE), ceil_div(rows, CODES_TILE))
    dev.launch(
        TURN, blocks, THREADS, (turned, codes, factors, own, targets, rows, columns, 1.0 / scale)
    )
