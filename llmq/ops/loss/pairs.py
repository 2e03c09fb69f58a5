"""Losses of pairs of documents, of which one is to be preferred: DPO, IPO, SimPO, ORPO and KTO.

Rafailov et al., Direct Preference Optimization, 2023; Azar et al., A General Theoretical Paradigm
to Understand Learning from Human Preferences, 2023; Meng et al., SimPO, 2024; Hong et al., ORPO,
2024; Ethayarajh et al., KTO, 2024. `cu/loss/pairs.cu` has the formulas.
"""

from typing import NamedTuple

from llmq.base.dtypes import STATS
from llmq.base.tensor import Tensor
from llmq.ref.loss.pairs import KTO, SUMS, Form
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, ONE_BLOCK = 256, 1024
_PLACES = "i32[B,seq_len] starts, f32[B,seq_len] partner, i64 n, i32 seq_len"
_SUMS = "f32[3,B,seq_len] sums"
_FORM = "i32 kind, i32 normalize, f32 beta, f32 gamma, f32 smoothing, f32 sft"
SUMS_OF = Kernel(
    "loss/pairs.cu",
    "pairs_sums",
    f"out {_SUMS}, i32[B,seq_len] targets, f32[B,seq_len] losses, f32[B,seq_len]? reference, "
    + _PLACES,
)
GAINS = Kernel("loss/pairs.cu", "pairs_gains", f"out f64[2] gains, {_SUMS}, {_PLACES}")
SHIFT = Kernel("loss/pairs.cu", "pairs_shift", "out f32[1] shift, f64[ranks,2] gained, i32 ranks")
WEIGHTS = Kernel(
    "loss/pairs.cu",
    "pairs_weights",
    f"out f32[B,seq_len] weights, {_SUMS}, f32[1]? shift, i32[B,seq_len] targets, {_PLACES}, "
    + _FORM,
)
ADD_STATS = Kernel(
    "loss/pairs.cu",
    "pairs_stats",
    f"inout f64[statistics] stats, {_SUMS}, f32[1]? shift, {_PLACES}, {_FORM}",
    where=f"statistics >= {len(STATS) + len(SUMS)}",
)


class Places(NamedTuple):
    """The places of documents and of their pairs. starts: I32 (B, T), the first position of each
    one's document. partner: F32 (B, T), 1 + the first position of the pair's other document, in the
    same row; negative in a document that is not preferred, 0 outside of pairs."""

    starts: Tensor
    partner: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, int, int]:
        """The last arguments of kernels."""
        return self.starts, self.partner, self.starts.size, self.starts.shape[-1]


def sums(
    dev: Device,
    sums: Tensor,
    targets: Tensor,
    losses: Tensor,
    reference: Tensor | None,
    places: Places,
) -> None:
    """Add up each document's trained tokens, at its first position; the rest is not written.

    sums: of -loss - reference; of -loss; of 1. targets: negative: masked. losses: cross-entropy of
    each token. reference: log-probabilities by another model; None: 0.
    """
    args = (sums, targets, losses, reference, *places.args)
    dev.launch(SUMS_OF, ceil_div(targets.size, THREADS), THREADS, args)


def gains(dev: Device, gains: Tensor, sums: Tensor, places: Places) -> None:
    """Add up the gains of the second documents of all pairs, of which KTO's shift is the mean.

    gains: their sum, and the number of documents. sums: as `sums` makes them.

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    dev.launch(GAINS, 1, ONE_BLOCK, (gains, sums, *places.args))


def shift(dev: Device, shift: Tensor, gained: Tensor) -> None:
    """Estimate the divergence from the reference, as KTO does: the mean of the gains of all second
    documents, at least 0; each is an answer to another prompt.

    gained: `gains` of each rank.

    Cost:    one launch of a single thread.
    """
    dev.launch(SHIFT, 1, 1, (shift, gained, gained.shape[0]))


def weights(
    dev: Device,
    weights: Tensor,
    sums: Tensor,
    shift: Tensor | None,
    targets: Tensor,
    places: Places,
    form: Form,
) -> None:
    """The derivative of the sum of all pairs' losses by each token's cross-entropy.

    weights: 0 where masked, outside of pairs, and in pairs of which one document has no trained
    token. sums: as `sums` makes them. shift: of KTO; else None. targets: negative: masked.
    """
    _check("pairs.weights", shift, form)
    args = (weights, sums, shift, targets, *places.args, *form)
    dev.launch(WEIGHTS, ceil_div(targets.size, THREADS), THREADS, args)


def stats(
    dev: Device, stats: Tensor, sums: Tensor, shift: Tensor | None, places: Places, form: Form
) -> None:
    """Add the micro-batch's pairs to the statistics: loss and count, which is that of pairs.

    accuracy: pairs whose chosen reward is the larger one (KTO: documents whose reward has the right
    sign); chosen, rejected: how many rewards and log-probabilities are in the sums that follow.

    stats: begins with STATS and SUMS. sums, shift: as of `weights`.

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    _check("pairs.stats", shift, form)
    dev.launch(ADD_STATS, 1, ONE_BLOCK, (stats, sums, shift, *places.args, *form))


def _check(op: str, shift: Tensor | None, form: Form) -> None:
    if (shift is not None) != (form.kind == KTO):
        raise ValueError(f"{op}: shift is for KTO, and needed there")
