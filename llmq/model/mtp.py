"""Training of a head for multi-token prediction beside a frozen trunk, the rest of the model
(`arch/mtp.py`).

    output of the trunk's final norm, tokens ahead -> joined (rows, 2C)
    joined -> fc -> block -> norm -> losses of targets ahead

The head sees only the first sequences of a micro-batch (--mtp-share), because its time grows with
the number of sequences. The head's loss has no gradient for the trunk's parameters. The head's
gradients are divided by the number of the trunk's targets, like all gradients of a step. The head
runs between the trunk's forward and backward passes, and shares memory for gradients of the stream
with the trunk.
"""

from dataclasses import replace
from itertools import count

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP, block_config
from llmq.base.dtypes import F64, I32
from llmq.base.operand import OutBuffers
from llmq.base.step_inputs import StepInputs
from llmq.base.tensor import Tensor
from llmq.formats.operands import Operands
from llmq.model.balance import ROUTER_STATS, Balance
from llmq.model.block import Blocks
from llmq.model.block_linear import BlockLinear
from llmq.model.halves.attention import rope_tables
from llmq.model.halves.half import ModelContext
from llmq.model.head import Head
from llmq.model.linear import Linear
from llmq.model.norms import BlockNorms, Normalization, alloc_stats
from llmq.model.parameters import PartGrads, PartWeights
from llmq.model.residuals import Residuals
from llmq.ops.attention import heads
from llmq.ops.attention.heads import Place
from llmq.ops.loss import mtp
from llmq.ops.pointwise import embedding
from llmq.options.options import StepOptions
from llmq.runtime.device import Device
from llmq.state.grads import Gradients
from llmq.state.weights import Weights

MTP_STATS = ("mtp_loss", "mtp_acceptance")
"""Statistics of a step that `add` sums up, weighted by the number of targets."""


class MtpHead:
    """Activations of the head in one micro-step. rows: number of tokens of the sequences that the
    head sees. d_residual, d_norm: (rows, C), scratch shared with the trunk."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: StepOptions,
        backend: str,
        inputs: StepInputs,
        d_residual: Tensor,
        d_norm: Tensor,
    ):
        """inputs, d_residual, d_norm: tensors of the trunk, with all sequences."""
        self.dev, self.config, self._of_trunk = dev, config, inputs.targets
        own, options = block_config(config), _own_options(options)
        operands = Operands(dev)
        operands.prepare(own, options, None)
        (rows, C), dtype = operands.shape, operands.dtype
        self.d_residual, self.d_norm = (d.rows(0, rows) for d in (d_residual, d_norm))
        seen = (each and each.rows(0, options.batch.batch_size) for each in inputs[:3])
        self.inputs = inputs = StepInputs(*seen)
        ids = inputs.tokens.shape
        self.tokens = dev.alloc("mtp.tokens", ids, I32, "Activations")
        self.targets = dev.alloc("mtp.targets", ids, I32, "Activations")
        self._embedded = dev.alloc("mtp.embedded", (rows, C), dtype, "Activations")
        self._joined = dev.alloc("mtp.joined", (rows, 2 * C), dtype, "Activations")
        self._stats = [alloc_stats(dev, own, f"mtp.{n}", rows) for n in ("embedding", "hidden")]
        self.norm, self.linear = Normalization(dev, own), Linear(dev)
        self.residuals = Residuals(dev, 1, (rows, C), dtype, offload=False)
        self._router_stats, self.balance = None, None
        if own.experts is not None:
            self._router_stats = dev.alloc("mtp.router", (len(ROUTER_STATS),), F64, "Activations")
            dev.zero(self._router_stats)
            self.balance = Balance(dev, own, options, self.targets)
        shared = ModelContext(
            dev, own, options, operands, BlockLinear(dev, own, options, operands, None),
            BlockNorms(dev, own, operands), backend,
            rope_tables(dev, own, options.batch.local_seq_len), inputs, self.balance, None,
        )  # fmt: skip
        self.blocks = Blocks(shared, self.residuals, None, trains=True)
        self.head = Head(dev, own, operands, options, self.residuals.final)

    def run(self, hidden: Tensor, weights: Weights, grads: Gradients, logits: str) -> None:
        """Compute the head's losses and gradients for a micro-batch. hidden: (B*T, C), output of
        the trunk's final norm for all sequences. logits: name of the block whose matrix multiplies
        hidden states to logits."""
        of_inputs, hidden = self.inputs, hidden.rows(0, self.targets.size)
        mtp.shift(
            self.dev, self.tokens, self.targets, of_inputs.tokens, of_inputs.targets,
            of_inputs.first_key,
        )  # fmt: skip
        for block in dict.fromkeys(("embed", MTP, logits)):
            weights.gather(block)
        with self.dev.range("mtp"):
            own, g = weights.get(MTP), PartGrads(grads.full(MTP))
            w = PartWeights(own)
            self._join(w, PartWeights(weights.get("embed")), hidden)
            self.linear.forward(self.residuals.tensors[0], self._joined, w["fc"])
            self.blocks.forward(0, w, keep=True)
            last = self.blocks.layers[0]
            self.head.forward(w, last.streams[-1], last.branch)
            if self.balance is not None:
                self.balance.finish(self._router_stats, None)
            weights.get(logits)
            self._backward(PartWeights(own | weights.of_logits()), g, hidden)
        for block in dict.fromkeys(("embed", MTP, logits)):
            weights.release(block)
        grads.notify(MTP)

    def _join(self, w: PartWeights, of_trunk: PartWeights, hidden: Tensor) -> None:
        """Compute the input of fc, (rows, 2C); the method overwrites d_norm."""
        rows, C = hidden.shape
        shape, scale = (*self.tokens.shape, C), self.config.embedding_scale
        embedded = self._embedded.view(*shape)
        embedding.forward(self.dev, embedded, self.tokens, of_trunk["embed"], None, scale)
        both = (self._embedded, w["norm_embedding"]), (hidden, w["norm_hidden"])
        for i, (x, weight) in enumerate(both):
            self.norm.forward(OutBuffers("", self.d_norm), self._stats[i], x, weight, None)
            to, of = Place(i * C, 2 * C, 0), Place(0, C, 0)
            heads.copy(self.dev, self._joined, self.d_norm, rows, 1, C, to, of)

    def _backward(self, w: PartWeights, g: PartGrads, hidden: Tensor) -> None:
        dev, (rows, C), d_residual, d_norm = self.dev, hidden.shape, self.d_residual, self.d_norm
        last, of_head = self.blocks.layers[0], PartGrads({"norm": g["norm"]})
        d_out = OutBuffers(last.halves[-1].out_id, self.blocks.norms.d_out(d_residual, d_norm))
        flat = self.targets.view(rows)
        how = (last.branch, d_out, d_residual, d_norm)
        self.head.loss_and_backward(w, of_head, flat, None, *how)
        self.blocks.backward(0, w, g, d_residual, d_norm, wanted=True)
        self.linear.weight_gradients(g["fc"], None, d_residual, self._joined)
        with dev.scratch("mtp.d_joined", (rows, 2 * C), d_residual.dtype) as d_joined:
            self.linear.input_gradient(d_joined, d_residual, w["fc"])
            for i, (x, key) in enumerate(
                ((self._embedded, "norm_embedding"), (hidden, "norm_hidden"))
            ):
                to, of = Place(0, C, 0), Place(i * C, 2 * C, 0)
                heads.copy(dev, d_norm, d_joined, rows, 1, C, to, of)
                unused = OutBuffers("", d_residual)
                self.norm.backward(unused, g[key], None, d_norm, x, w[key], self._stats[i], None)

    def add(self, stats: Tensor, trunk: Tensor) -> None:
        """Add the statistics of a micro-batch to those of a step, F64 (2,) in the order of
        MTP_STATS. trunk: F32 (B*T,), the trunk's losses of all sequences."""
        n = self.targets.size
        targets, of_trunk = self.targets.view(n), self._of_trunk.view(trunk.size)
        mtp.stats(self.dev, stats, self.head.losses, trunk.rows(0, n), targets, of_trunk)


def _own_options(options: StepOptions) -> StepOptions:
    """Return the options of the head's model: only the sequences that the head sees, no adapters,
    and chunks of at most the trunk's size."""
    model, batch, memory = options.model, options.batch, options.memory
    B, S = batch.batch_size, model.mtp_sequences(batch.batch_size)
    rows = S * batch.local_seq_len
    chunks, parts = (-(-n * S // B) for n in (memory.lmhead_chunks, memory.attn_bwd_chunks))
    chunks = next(n for n in count(chunks) if rows % n == 0)
    parts = next(n for n in count(parts) if S % n == 0 or n % S == 0)
    return options._replace(
        model=replace(model, lora_rank=None, train=None),
        batch=replace(batch, batch_size=S),
        memory=replace(memory, lmhead_chunks=chunks, attn_bwd_chunks=parts),
    )
