"""Losses of pairs of documents, of which one is to be preferred: DPO, IPO, SimPO, ORPO and KTO.

Rafailov et al., Direct Preference Optimization, 2023; Azar et al., A General Theoretical Paradigm
to Understand Learning from Human Preferences, 2023; Meng et al., SimPO, 2024; Hong et al., ORPO,
2024; Ethayarajh et al., KTO, 2024. `cu/loss/pairs.cu` has the formulas.
"""

from typing import NamedTuple

from llmq.base.dtypes import F32, F64, I32, STATS
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_stats
from llmq.ref.loss.pairs import KTO, SUMS, Form
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS, ONE_BLOCK = 256, 1024
_PLACES = "const i32* starts, const f32* partner, i64 n, i32 seq_len"
_FORM = "i32 kind, i32 normalize, f32 beta, f32 gamma, f32 smoothing, f32 sft"
SUMS_OF = Kernel(
    "loss/pairs.cu",
    "pairs_sums",
    args="f32* sums, const i32* targets, const f32* losses, const f32*? reference, " + _PLACES,
)
GAINS = Kernel("loss/pairs.cu", "pairs_gains", args=f"f64* gains, const f32* sums, {_PLACES}")
SHIFT = Kernel("loss/pairs.cu", "pairs_shift", args="f32* shift, const f64* gained, i32 ranks")
WEIGHTS = Kernel(
    "loss/pairs.cu",
    "pairs_weights",
    args="f32* weights, const f32* sums, const f32*? shift, const i32* targets, "
    f"{_PLACES}, {_FORM}",
)
ADD_STATS = Kernel(
    "loss/pairs.cu",
    "pairs_stats",
    args=f"inout f64* stats, const f32* sums, const f32*? shift, {_PLACES}, {_FORM}",
)


class Places(NamedTuple):
    """The places of documents and of their pairs. starts: I32 (B, T), the first position of each
    one's document. partner: F32 (B, T), 1 + the first position of the pair's other document, in the
    same row; negative in a document that is not preferred, 0 outside of pairs."""

    starts: Tensor
    partner: Tensor

    def checked(self, op: str) -> tuple[Tensor, Tensor, int, int]:
        """The last arguments of kernels. TypeError or ValueError for what does not serve."""
        shape = self.starts.shape
        expect(op, "starts", self.starts, I32, shape)
        expect(op, "partner", self.partner, F32, shape)
        return self.starts, self.partner, self.starts.size, shape[1]


def sums(
    dev: Device,
    sums: Tensor,
    targets: Tensor,
    losses: Tensor,
    reference: Tensor | None,
    places: Places,
) -> None:
    """Add up each document's trained tokens, at its first position; the rest is not written.

    Args:
        sums       out  F32 (3, B, T)  of -loss - reference; of -loss; of 1
        targets    in   I32 (B, T)     negative: masked
        losses     in   F32 (B, T)     cross-entropy of each token
        reference  in   F32 (B, T)     log-probabilities by another model; or None: 0
    """
    where = places.checked("pairs.sums")
    shape = targets.shape
    expect("pairs.sums", "sums", sums, F32, (3, *places.starts.shape))
    expect("pairs.sums", "targets", targets, I32, places.starts.shape)
    expect("pairs.sums", "losses", losses, F32, shape)
    if reference is not None:
        expect("pairs.sums", "reference", reference, F32, shape)
    args = (sums, targets, losses, reference, *where)
    dev.launch(SUMS_OF, ceil_div(targets.size, THREADS), THREADS, args)


def gains(dev: Device, gains: Tensor, sums: Tensor, places: Places) -> None:
    """Add up the gains of the second documents of all pairs, of which KTO's shift is the mean.

    Args:
        gains  out  F64 (2,)       sum of gains, number of documents
        sums   in   F32 (3, B, T)  as `sums` makes them

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    where = places.checked("pairs.gains")
    expect("pairs.gains", "gains", gains, F64, (2,))
    expect("pairs.gains", "sums", sums, F32, (3, *places.starts.shape))
    dev.launch(GAINS, 1, ONE_BLOCK, (gains, sums, *where))


def shift(dev: Device, shift: Tensor, gained: Tensor) -> None:
    """Estimate the divergence from the reference, as KTO does: the mean of the gains of all second
    documents, at least 0; each is an answer to another prompt.

    Args:
        shift   out  F32 (1,)
        gained  in   F64 (ranks, 2)  `gains` of each rank

    Cost:    one launch of a single thread.
    """
    ranks = gained.shape[0]
    expect("pairs.shift", "shift", shift, F32, (1,))
    expect("pairs.shift", "gained", gained, F64, (ranks, 2))
    dev.launch(SHIFT, 1, 1, (shift, gained, ranks))


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

    Args:
        weights  out  F32 (B, T)     0 where masked, outside of pairs, and in pairs of which one
                                     document has no trained token
        sums     in   F32 (3, B, T)  as `sums` makes them
        shift    in   F32 (1,)       of KTO; else None
        targets  in   I32 (B, T)     negative: masked
    """
    where = places.checked("pairs.weights")
    _check("pairs.weights", sums, shift, places, form)
    expect("pairs.weights", "weights", weights, F32, places.starts.shape)
    expect("pairs.weights", "targets", targets, I32, places.starts.shape)
    args = (weights, sums, shift, targets, *where, *form)
    dev.launch(WEIGHTS, ceil_div(targets.size, THREADS), THREADS, args)


def stats(
    dev: Device, stats: Tensor, sums: Tensor, shift: Tensor | None, places: Places, form: Form
) -> None:
    """Add the micro-batch's pairs to the statistics: loss and count, which is that of pairs.

    accuracy: pairs whose chosen reward is the larger one (KTO: documents whose reward has the right
    sign); chosen, rejected: how many rewards and log-probabilities are in the sums that follow.

    Args:
        stats  inout  F64 (s,)       begins with STATS and SUMS
        sums, shift   as of `weights`

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    expect_stats("pairs.stats", stats, (*STATS, *SUMS))
    where = places.checked("pairs.stats")
    _check("pairs.stats", sums, shift, places, form)
    dev.launch(ADD_STATS, 1, ONE_BLOCK, (stats, sums, shift, *where, *form))


def _check(op: str, sums: Tensor, shift: Tensor | None, places: Places, form: Form) -> None:
    expect(op, "sums", sums, F32, (3, *places.starts.shape))
    if (shift is not None) != (form.kind == KTO):
        raise ValueError(f"{op}: shift is for KTO, and needed there")
    if shift is not None:
        expect(op, "shift", shift, F32, (1,))
