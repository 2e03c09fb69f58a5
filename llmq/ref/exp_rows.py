"""References of cu/exp_rows.cu: what rows of exponentials of logits need to be a gradient."""

import numpy as np

from llmq.ref.common import BF16, compute

LEAST = np.float32(2**-20)  # of 1 + z_loss * lse

# rows, columns, K, vocab
CASES = {
    "small": (5, 96, 16, 90),
    "blocks": (77, 600, 272, 577),
    "qwen05b": (8192, 151936, 896, 151936),
    "qwen15b": (8192, 151936, 1536, 151936),
}


def exp_rows_shift(shift, x, weight, targets, rows, K, margin):
    """shift (rows) = x (rows,K) . weight (columns,K)[target] + margin; target 0 where negative."""
    of_target = weight[np.maximum(targets, 0)]
    shift[...] = np.einsum("rk,rk->r", compute(x), compute(of_target)) + np.float32(margin)


def exp_rows_scale(d, factors, rows, K):
    """d (rows,K) *= factors (rows), row by row."""
    d[...] = compute(d) * factors[:, None]


def exp_rows_finish(
    e, x, losses, lse, factors, sums, shift, target_logits, weight, targets, rows, columns, vocab,
    K, tiles, z_loss, limit, weights=None, *, scaled,
):  # fmt: skip
    """losses, lse and factors (rows), and the targets' elements of e (rows,columns), so that factor
    * e = weight * (softmax * (1 + z_loss * lse) - onehot); scaled: x (rows,K) *= factors. A row
    whose sum is above limit or below its inverse has its gradient computed from logits."""
    sum_ = sums.sum(axis=0)
    limit = np.float32(limit)
    again = (sum_ > limit) | (sum_ < 1 / limit)
    lse[...] = shift + np.log(sum_)
    losses[...] = 0
    factors[...] = 0
    normal = np.flatnonzero((targets >= 0) & ~again)
    share = 1 + np.float32(z_loss) * lse[normal]
    share = np.where(np.abs(share) < LEAST, np.copysign(LEAST, share), share)
    factors[normal] = share / sum_[normal]
    losses[normal] = lse[normal] - target_logits[normal]
    own = np.exp(target_logits[normal] - shift[normal])
    e[normal, targets[normal]] = own - 1 / factors[normal]
    for row in np.flatnonzero(again):
        _row_again(row, e, losses, lse, factors, x, weight, targets[row], vocab, z_loss)
    if weights is not None:
        np.multiply(factors, weights, out=factors, where=targets >= 0)
    if scaled:
        exp_rows_scale(x, factors, rows, K)


def _row_again(
    row: int,
    e: np.ndarray,
    losses: np.ndarray,
    lse: np.ndarray,
    factors: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    target: int,
    vocab: int,
    z_loss: float,
) -> None:
    """Its gradient in place of e, and what belongs to it."""
    logits = compute((compute(weight[:vocab]) @ compute(x[row])).astype(BF16))
    most = logits.max()
    d = np.exp(logits - most)
    total = d.sum()
    lse[row] = most + np.log(total)
    e[row] = 0
    if target < 0:
        return
    d *= (1 + np.float32(z_loss) * lse[row]) / total
    d[target] -= 1
    e[row, :vocab] = d
    losses[row], factors[row] = lse[row] - logits[target], 1
