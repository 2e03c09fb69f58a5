"""Policy-gradient losses of sampled documents: GRPO, Dr. GRPO, DAPO, GSPO and CISPO.

Shao et al., DeepSeekMath, 2024; Liu et al., Understanding R1-Zero-Like Training, 2025; Yu et al.,
DAPO, 2025; Zheng et al., Group Sequence Policy Optimization, 2025; MiniMax, MiniMax-M1, 2025.
`cu/loss/grpo.cu` has the formulas.
"""

from typing import NamedTuple

from llmq.base.dtypes import STATS
from llmq.base.tensor import Tensor
from llmq.ref.loss.grpo import SUMS, Form
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, ONE_BLOCK = 256, 1024
_SUMS, _ROWS = "f32[3,B,seq_len] sums", "i32[B,seq_len] targets, f32[B,seq_len] losses"
_MODELS = "f32[B,seq_len] old, f32[B,seq_len]? reference"
_STARTS = "i32[B,seq_len]? starts, i64 n, i32 seq_len"
_SAMPLES = (
    f"{_SUMS}, {_ROWS}, {_MODELS}, f32[B,seq_len] advantages, {_STARTS}, "
    "i32 kind, f32 low, f32 high, f32 beta, i32 per, f32 length"
)
SUMS_OF = Kernel("loss/grpo.cu", "grpo_sums", f"out {_SUMS}, {_ROWS}, {_MODELS}, {_STARTS}")
WEIGHTS = Kernel("loss/grpo.cu", "grpo_weights", f"out f32[B,seq_len] weights, {_SAMPLES}")
ADD_STATS = Kernel(
    "loss/grpo.cu",
    "grpo_stats",
    f"inout f64[statistics] stats, {_SAMPLES}",
    where=f"statistics >= {len(STATS) + len(SUMS)}",
)


class Samples(NamedTuple):
    """Tensors (B, T) of sampled documents. targets: I32, negative if masked, as prompts are.
    losses: F32, each token's cross-entropy. old: F32, log-probabilities by the sampling model.
    reference: F32, log-probabilities by the reference model, or None. advantages: F32. starts: I32,
    first position of each token's document; None: each row is one document."""

    targets: Tensor
    losses: Tensor
    old: Tensor
    reference: Tensor | None
    advantages: Tensor
    starts: Tensor | None

    @property
    def places(self) -> tuple[Tensor | None, int, int]:
        """Arguments of kernels: starts, number of tokens, and length of a row."""
        return self.starts, self.targets.size, self.targets.shape[-1]


def sums(dev: Device, sums: Tensor, of: Samples) -> None:
    """Add up each document's trained tokens, at the document's first position.

    sums: F32 (3, B, T): the sum of log ratios, -loss - old; the number of trained tokens; the sum
    of divergences from the reference, 0 without a reference. Other positions are not written.
    """
    args = (sums, *of[:4], *of.places)
    dev.launch(SUMS_OF, ceil_div(of.targets.size, THREADS), THREADS, args)


def weights(dev: Device, weights: Tensor, sums: Tensor, of: Samples, form: Form) -> None:
    """Derivative of the sum of all tokens' losses by each token's cross-entropy.

    weights: F32 (B, T), 0 for masked tokens. sums: the result of `sums`.
    """
    args = (weights, sums, *of[:-1], *of.places, *form)
    dev.launch(WEIGHTS, ceil_div(of.targets.size, THREADS), THREADS, args)


def stats(dev: Device, stats: Tensor, sums: Tensor, of: Samples, form: Form) -> None:
    """Add the micro-batch's samples to the statistics: loss, count, and sums over tokens.

    count: number of tokens, or of documents with a trained token, see form.per. clipped: number of
    ratios out of bounds; ratio: new to old probability; drift: |log-probability - old|; kl:
    divergence from the reference times the ratio; entropy: negative log-probability.

    stats: F64, begins with STATS and SUMS. sums: the result of `sums`.

    Cost:    one launch of a single block, with a fixed order of summation.
    """
    dev.launch(ADD_STATS, 1, ONE_BLOCK, (stats, sums, *of[:-1], *of.places, *form))
