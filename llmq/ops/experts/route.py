"""Routers of experts: which of them a row goes to, and what keeps them in balance.

For a row of logits l, with p = softmax(l) over all experts and s = p, or s = sigmoid(l):

    chosen    the top_k experts of largest s + bias; of equal ones, those of lowest number
    weights   scale * s[chosen], with `renormalize` divided by the sum of s[chosen]

A softmax over the chosen logits alone is a softmax that is renormalized.

The load-balancing loss is that of Switch Transformer (arXiv:2101.03961, eq. 4 to 6), as
load_balancing_loss_func of transformers has it, over the rows of all layers together; the z-loss is
ST-MoE's (arXiv:2202.08906, eq. 5):

    aux = E * sum over e of (rows of e / n) * (sum of p[:, e] / n)        z = sum of lse^2 / n

n: rows of all layers; rows of e: how often it was chosen, a constant where gradients are concerned.
Rows of filler count nowhere, as padding of an attention mask in transformers. Both losses are added
to the loss of a micro-batch, a mean over its targets.
"""

from llmq.base.dtypes import F32, F64, I32, I64
from llmq.base.tensor import Tensor
from llmq.ops.common import WARP, expect_float
from llmq.ref.experts.route import sums_size
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
MAX_EXPERTS = 512  # a lane has every 32nd of a row
BLOCKS = 4  # of a multiprocessor, at most: each one adds its sums to memory

KINDS = ("softmax", "sigmoid")

ROUTE = Kernel(
    "experts/route.cu",
    "route",
    args="i32* chosen, f32* weights, inout i64*? sums, const f32* logits, const f32*? bias, "
    "const i32*? targets, i32 rows, i32 E, i32 top_k, f32 scale",
)
BACKWARD = Kernel(
    "experts/route.cu",
    "route_backward",
    args="D* d_logits, const f32* d_weights, const f32*? of_experts, const f32* logits, "
    "const i32* chosen, const f32*? factors, const i32*? targets, i32 rows, i32 E, i32 top_k, "
    "f32 scale",
)
BALANCE = Kernel(
    "experts/route.cu",
    "route_balance",
    args="f32* factors, inout f64* losses, inout i64* totals, inout i64* sums, "
    "const i32* targets, const f32*? by, i32 layers, i32 E, i32 rows, f64 aux, f64 z",
)


def route(
    dev: Device,
    chosen: Tensor,
    weights: Tensor,
    logits: Tensor,
    *,
    kind: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    sums: Tensor | None = None,
    targets: Tensor | None = None,
) -> None:
    """Choose top_k experts for each row. NaN in a row is nobody's choice, and makes it NaN.

    Args:
        chosen   out    I32 (S, top_k)  by falling score; all different, also where logits are NaN
        weights  out    F32 (S, top_k)
        logits   in     F32 (S, E)      E at most 512, top_k at most 32
        kind                            "softmax" or "sigmoid": what s is
        bias     in     F32 (E,)        or None; decides about the choice, not about weights
        sums     inout  I64 (2 E + 4,)  or None; is added: rows by expert,
                                        probabilities by expert in 2^-32, rows, entropies in 2^-32,
                                        lse^2 in 2^-20, rows whose logits are not finite, which
                                        probabilities, entropies and squares leave out
        targets  in     I32 (S,)        or None; of sums, which leave out rows of FILLER_TARGET

    Cost:    logits read once. Sums are integers: the same in any order.
    """
    op = "route"
    S, E, top_k = _check(op, kind, logits, chosen)
    expect(op, "weights", weights, F32, (S, top_k))
    if bias is not None:
        expect(op, "bias", bias, F32, (E,))
    if sums is not None:
        expect(op, "sums", sums, I64, (sums_size(E),))
    if targets is not None:
        expect(op, "targets", targets, I32, (S,))
    consts = _consts(kind, E, renormalize) | {"SUMS": int(sums is not None)}
    blocks = min(ceil_div(S, THREADS // WARP), BLOCKS * dev.spec.num_sms)
    args = (chosen, weights, sums, logits, bias, targets, S, E, top_k, scale)
    dev.launch(ROUTE, blocks, THREADS, args, consts=consts)


def route_backward(
    dev: Device,
    d_logits: Tensor,
    d_weights: Tensor,
    logits: Tensor,
    chosen: Tensor,
    *,
    kind: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    of_experts: Tensor | None = None,
    factors: Tensor | None = None,
    targets: Tensor | None = None,
) -> None:
    """d_logits from the gradients of the weights, and of both losses where there are factors.

    Args:
        d_logits   out  F32 or BF16 (S, E)
        d_weights  in   F32 (S, top_k)
        logits     in   F32 (S, E)      as of route, and so is the rest
        chosen     in   I32 (S, top_k)
        of_experts in   F32 (S, E)      or None; is added to d_weights, of the chosen ones
        factors    in   F32 (E + 1,)    or None; what `balance` has made
        targets    in   I32 (S,)        or None; as of route: rows of FILLER_TARGET have no losses
    """
    op = "route_backward"
    S, E, top_k = _check(op, kind, logits, chosen)
    expect_float(op, "d_logits", d_logits)
    expect(op, "d_logits", d_logits, None, (S, E))
    expect(op, "d_weights", d_weights, F32, (S, top_k))
    if of_experts is not None:
        expect(op, "of_experts", of_experts, F32, (S, E))
    if factors is not None:
        expect(op, "factors", factors, F32, (E + 1,))
    if targets is not None:
        expect(op, "targets", targets, I32, (S,))
    consts = _consts(kind, E, renormalize) | {"FACTORS": int(factors is not None)}
    args = (d_logits, d_weights, of_experts, logits, chosen, factors, targets, S, E, top_k, scale)
    blocks = ceil_div(S, THREADS // WARP)
    dev.launch(BACKWARD, blocks, THREADS, args, consts=consts)


def balance(
    dev: Device,
    factors: Tensor,
    losses: Tensor,
    totals: Tensor,
    sums: Tensor,
    targets: Tensor,
    by: Tensor | None = None,
    *,
    aux: float,
    z: float,
) -> None:
    """Between the forward and the backward pass of a micro-batch: both losses, and of them what
    route_backward adds; how the routers do; the sums go into totals and become 0.

    Gradients are of losses that are summed over targets, as all of a step are before they are
    divided by the number of its targets.

    Args:
        factors  out    F32 (E + 1,)       of p by expert, then of lse
        losses   inout  F64 (4,)           is added, times the targets: aux and z, the mean entropy
                                           of routers, and the largest part of the rows of a layer
                                           that one expert has
        totals   inout  I64 (L, 2 E + 4)   is added: sums
        sums     inout  I64 (L, 2 E + 4)   of each layer, as of route
        targets  in     I32 (S,)           negative: none
        by       in     F32 (S,)           or None, all are 1: the weights of targets, by whose sum
                                           all of a step is divided, and gradients are multiplied
        aux, z                             the coefficients of both losses, of which there may be
                                           none
    """
    op = "balance"
    E = factors.size - 1
    expect(op, "factors", factors, F32, (E + 1,))
    expect(op, "losses", losses, F64, (4,))
    shape = (sums.shape[0], sums_size(E))
    expect(op, "sums", sums, I64, shape)
    expect(op, "totals", totals, I64, shape)
    expect(op, "targets", targets, I32, (targets.size,))
    if by is not None:
        expect(op, "by", by, F32, (targets.size,))
    args = (factors, losses, totals, sums, targets, by, sums.shape[0], E, targets.size, aux, z)
    dev.launch(BALANCE, 1, THREADS, args)


def _check(op: str, kind: str, logits: Tensor, chosen: Tensor) -> tuple[int, int, int]:
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if len(logits.shape) != 2 or len(chosen.shape) != 2:
        raise ValueError(
            f"{op}: logits and chosen must be matrices, got {logits.shape} and {chosen.shape}"
        )
    (S, E), top_k = logits.shape, chosen.shape[1]
    expect(op, "logits", logits, F32, (S, E))
    expect(op, "chosen", chosen, I32, (S, top_k))
    if E > MAX_EXPERTS or top_k > min(E, WARP):
        raise ValueError(
            f"{op}: at most {MAX_EXPERTS} experts and {min(E, WARP)} of a row, got {E} and {top_k}"
        )
    return S, E, top_k


def _consts(kind: str, experts: int, renormalize: bool) -> dict[str, int]:
    return {
        "PER_LANE": ceil_div(experts, WARP),
        "BY_SIGMOID": KINDS.index(kind),
        "RENORMALIZE": int(renormalize),
    }
