"""Routers of experts: top-k choice, and losses that keep experts in balance.

For a row of logits l, with p = softmax(l) over all experts and s = p, or s = sigmoid(l):

    chosen    the top_k experts of largest s + bias; of equal ones, those of lowest number
    weights   scale * s[chosen], with `renormalize` divided by the sum of s[chosen]

`renormalize` equals a softmax over the chosen logits alone. If experts form groups of neighbours, a
row first chooses the groups of largest score, and then experts of these groups. The score of a
group is its largest s + bias or, with sigmoids, the sum of its two largest s + bias
(arXiv:2405.04434, 2.2.2; arXiv:2412.19437, 2.1.2).

The load-balancing loss is Switch Transformer's (arXiv:2101.03961, eq. 4 to 6), over the rows of all
layers together like load_balancing_loss_func of transformers; the z-loss is ST-MoE's
(arXiv:2202.08906, eq. 5):

    aux = E * sum over e of (rows of e / n) * (sum of p[:, e] / n)        z = sum of lse^2 / n

n: number of rows of all layers; rows of e: number of rows that chose expert e, a constant in
gradients. Filler rows do not count, like padding of an attention mask in transformers. Both losses
are added to the loss of a micro-batch, which is a mean over its targets.
"""

from llmq.base.tensor import Tensor
from llmq.ops.common import WARP
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
MAX_GROUPS = WARP
MAX_EXPERTS = 512  # a lane holds every 32nd logit of a row
BLOCKS = 4  # most blocks per multiprocessor: each block adds its sums to memory

KINDS = ("softmax", "sigmoid")

_LIMITS = f"E <= {MAX_EXPERTS}, top_k <= {WARP}, top_k <= E"
ROUTE = Kernel(
    "experts/route.cu",
    "route",
    "out i32[rows,top_k] chosen, out f32[rows,top_k] weights, inout i64[2*E + 4]? sums, "
    "f32[rows,E] logits, f32[E]? bias, i32[rows]? targets, i32 rows, i32 E, i32 top_k, f32 scale",
    where=_LIMITS,
)
BACKWARD = Kernel(
    "experts/route.cu",
    "route_backward",
    "out D[rows,E] d_logits, f32[rows,top_k] d_weights, f32[rows,E]? of_experts, "
    "f32[rows,E] logits, i32[rows,top_k] chosen, f32[E+1]? factors, i32[rows]? targets, i32 rows, "
    "i32 E, i32 top_k, f32 scale",
    where=_LIMITS,
)
BALANCE = Kernel(
    "experts/route.cu",
    "route_balance",
    "out f32[E+1] factors, inout f64[4] losses, inout i64[layers,2*E + 4] totals, "
    "inout i64[layers,2*E + 4] sums, i32[rows] targets, f32[rows]? by, i32 layers, i32 E, "
    "i32 rows, f64 aux, f64 z",
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
    groups: tuple[int, int] = (1, 1),
    bias: Tensor | None = None,
    sums: Tensor | None = None,
    targets: Tensor | None = None,
) -> None:
    """Choose top_k experts for each row. A NaN logit makes the row's weights NaN.

    chosen: experts by falling score; all different, also if logits are NaN. kind: "softmax" or
    "sigmoid", the function s above. groups: (number of groups, number of groups that a row
    chooses). bias: changes the choice, not the weights. sums: accumulates rows by expert;
    probabilities by expert, in units of 2^-32; rows; entropies, in units of 2^-32; lse^2, in units
    of 2^-20; and rows with logits that are not finite. Probabilities, entropies and squares leave
    out the latter rows. targets: sums leave out rows with FILLER_TARGET.

    Cost:    logits read once. Sums are integers, and so do not depend on the order.
    """
    S, E, top_k = ROUTE.dims(logits=logits, chosen=chosen)
    many, active = groups
    if E % many or many > MAX_GROUPS or not 0 < active <= many or top_k > active * (E // many):
        raise ValueError(f"route: {top_k} of {E} experts cannot be in {active} of {many} groups")
    consts = _consts(kind, E, renormalize) | {"SUMS": int(sums is not None)}
    consts |= {"GROUPS": many, "ACTIVE_GROUPS": active} if many > 1 else {}
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
    """d_logits from gradients of the weights, and of both losses if factors are given.

    of_experts: F32 (rows, E), whose elements at chosen experts are added to d_weights. factors: the
    result of `balance`. targets: rows with FILLER_TARGET have no losses. Other arguments: see
    `route`.
    """
    S, E, top_k = BACKWARD.dims(logits=logits, chosen=chosen)
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
    """Compute both losses between forward and backward of a micro-batch, and factors for
    route_backward. Add sums to totals, and zero sums.

    Losses are multiplied by the number of targets, because the step divides by this number.

    factors: F32 (E+1,), for p of each expert, then for lse. losses: F64 (4,), accumulates aux, z,
    mean entropy of routers, and the largest share of a layer's rows in one expert, each times the
    number of targets. sums: each layer's sums, see route. targets: negative if masked. by: weights
    of targets, whose sum replaces the number of targets in factors; None: all are 1. aux, z:
    coefficients of both losses.
    """
    layers, E = sums.shape[0], factors.size - 1
    args = (factors, losses, totals, sums, targets, by, layers, E, targets.size, aux, z)
    dev.launch(BALANCE, 1, THREADS, args)


def _consts(kind: str, experts: int, renormalize: bool) -> dict[str, int]:
    if kind not in KINDS:
        raise ValueError(f"route: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return {
        "PER_LANE": ceil_div(experts, WARP),
        "BY_SIGMOID": KINDS.index(kind),
        "RENORMALIZE": int(renormalize),
    }
