"""Preference losses of pairs of documents: DPO, IPO, SimPO, ORPO and KTO.

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
    """Positions of documents and pairs. starts: I32 (B, T), first position of each token's
    document. partner: F32 (B, T), 1 + first position of the pair's other document, in the same row;
    negative in rejected documents, 0 outside pairs."""

    starts: Tensor
    partner: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, int, int]:
        """Arguments of kernels: starts, partner, number of tokens, and length of a row."""
        return self.starts, self.partner, self.starts.size, self.starts.shape[-1]


def sums(
    dev: Device,
    sums: Tensor,
    targets: Tensor,
    losses: Tensor,
    reference: Tensor | None,
    places: Places,
) -> None:
    """Add up each document's trained tokens, at the document's first position.

    sums: F32 (3, B, T): the sum of -loss - reference, the sum of -loss, and the number of trained
    tokens. Other positions are not written. targets: negative if masked. losses: cross-entropy of
    each token. reference: log-probabilities by the reference model; None: 0.
    """
    args = (sums, targets, losses, reference, *places.args)
    dev.launch(SUMS_OF, ceil_div(targets.size, THREADS), THREADS, args)


def gains(dev: Device, gains: Tensor, sums: Tensor, places: Places) -> None:
    """Add up the gains of the second documents of all pairs. KTO's shift is the mean of the gains.

    gains: F64 (2,), the sum of gains, and the number of documents. sums: the result of `sums`.

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    dev.launch(GAINS, 1, ONE_BLOCK, (gains, sums, *places.args))


def shift(dev: Device, shift: Tensor, gained: Tensor) -> None:
    """Compute KTO's estimate of the divergence from the reference: the mean gain of second
    documents, which answer other prompts, but at least 0.

    gained: F64 (ranks, 2), the result of `gains` on each rank.

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
    """Derivative of the sum of all pairs' losses by each token's cross-entropy.

    weights: 0 for masked tokens, outside pairs, and in pairs with a document without trained
    tokens. sums: the result of `sums`. shift: for KTO the result of `shift`; else None. targets:
    negative if masked.
    """
    _check("pairs.weights", shift, form)
    args = (weights, sums, shift, targets, *places.args, *form)
    dev.launch(WEIGHTS, ceil_div(targets.size, THREADS), THREADS, args)


def stats(
    dev: Device, stats: Tensor, sums: Tensor, shift: Tensor | None, places: Places, form: Form
) -> None:
    """Add the micro-batch's pairs to the statistics: loss, count of pairs, and sums over pairs.

    accuracy: number of pairs whose chosen document has the larger reward (KTO: of documents whose
    reward has the right sign); chosen, rejected: numbers of chosen and of rejected documents in the
    other sums.

    stats: begins with STATS and SUMS. sums, shift: as in `weights`.

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    _check("pairs.stats", shift, form)
    dev.launch(ADD_STATS, 1, ONE_BLOCK, (stats, sums, shift, *places.args, *form))


def _check(op: str, shift: Tensor | None, form: Form) -> None:
    if (shift is not None) != (form.kind == KTO):
        raise ValueError(f"{op}: shift is for KTO, and needed there")
