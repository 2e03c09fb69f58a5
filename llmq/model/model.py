"""The loop over layers in forward and backward: gather weights, run the block, release the weights,
notify the gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from llmq.arch.model_config import ModelConfig
from llmq.base.step_inputs import StepInputs
from llmq.base.tensor import Tensor
from llmq.formats import operands_of
from llmq.model.activations import CacheOfPass, Recompute
from llmq.model.adapters import EmbeddingAdapters, table_adapters
from llmq.model.balance import Balance
from llmq.model.block import Blocks
from llmq.model.block_linear import BlockLinear
from llmq.model.halves.attention import rope_tables
from llmq.model.halves.half import ModelContext
from llmq.model.halves.per_layer import PerLayerInputs
from llmq.model.head import Head
from llmq.model.losses.loss import Loss, Rows
from llmq.model.mtp import MtpHead
from llmq.model.norms import BlockNorms
from llmq.model.parameters import PartGrads, PartWeights
from llmq.model.residuals import Residuals
from llmq.ops.loss.labels import Labels
from llmq.ops.pointwise import embedding
from llmq.ops.product.skinny import MOST_CODED_ROWS
from llmq.options.options import StepOptions
from llmq.runtime.device import Device
from llmq.state.grads import Gradients
from llmq.state.params import NEW_ROWS
from llmq.state.weights import Weights


def _forward_only(options: StepOptions) -> StepOptions:
    """Return the options of blocks that run no backward pass and keep no activations."""
    again = {f"recompute_{name}": True for name in Recompute._fields}
    stays = {"recompute_layers": "all", "offload_residual": False, "offload_between": False}
    return options._replace(memory=replace(options.memory, **again, **stays))


class Model:
    """The activations of a micro-step, and the forward and backward passes. activations_at: a byte
    offset in the device's arena, beyond which only constants survive between two micro-steps."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: StepOptions,
        weights: Weights,
        backend: str,
        inputs: StepInputs,
        *,
        scalars: Tensor | None = None,
        loss: Loss | None = None,
        cache: CacheOfPass | None = None,
    ):
        """backend: backend of attention, as in halves/attention.directions. inputs: the tensors
        that passes read; a loss needs targets. scalars: StepScalars, which adapters read; None
        without adapters. loss: the loss of training; None if no backward pass follows. cache: the
        cache of generated texts; None if passes see whole sequences."""
        self.dev, self.config, self.weights, self.inputs = dev, config, weights, inputs
        self.loss = loss
        trains = self._trains = loss is not None and not options.model.trains_mtp_alone
        self.operands = operands_of(dev, config, options, scalars)
        shape, dtype = self.operands.shape, self.operands.dtype
        # True if products may read weights as codes; DoRA's norms of rows need decoded weights.
        few = shape[0] <= MOST_CODED_ROWS
        self._few_rows = few and loss is None and not options.model.lora_dora
        of_head = options
        if loss is not None and not trains:
            options = _forward_only(options)
        offload, layers = options.memory.offload_residual, config.num_layers
        routes = trains and config.experts is not None
        self.balance = Balance(dev, config, options, inputs.targets) if routes else None
        self.activations_at, constants = dev.arenas["device"].used, len(dev.constants)
        self.residuals = Residuals(dev, layers, shape, dtype, offload=offload, keep=trains)
        linear = BlockLinear(dev, config, options, self.operands, scalars)
        if cache is None:
            tables = rope_tables(dev, config, options.batch.seq_len)
        else:
            tables = cache.rope_tables
        norms = BlockNorms(dev, config, self.operands)
        self.per_layer = None
        if config.per_layer_size is not None:
            self.per_layer = PerLayerInputs(dev, config, shape[0], dtype)
        shared = ModelContext(
            dev, config, options, self.operands, linear, norms, backend, tables, inputs,
            self.balance, self.per_layer and self.per_layer.inputs,
        )  # fmt: skip
        self.blocks = Blocks(shared, self.residuals, cache, trains=trains)
        largest = loss.largest if trains else 1.0
        final = self.residuals.final
        self.dropout = linear.dropout
        self.head = Head(dev, config, self.operands, options, final, largest, self.dropout)
        table = table_adapters(config, options.model, "embed")
        self.embedding = None if table is None else EmbeddingAdapters(dev, config, table)
        if loss is not None:
            self.d_residual = dev.alloc("d_residual", shape, dtype, "Activations")
            self.d_norm = dev.alloc("d_norm", shape, dtype, "Activations")
        self.mtp = None
        if loss is not None and options.model.trains_mtp:
            self.mtp = MtpHead(dev, config, of_head, backend, inputs, self.d_residual, self.d_norm)
        self.constants = dev.constants[constants:]

    @property
    def _layers(self) -> range:
        return range(self.config.num_layers)

    @property
    def _head_slab(self) -> tuple[str, str]:
        """Return block and key of the matrix that multiplies hidden states to logits."""
        return ("embed", "embed") if self.config.tied_embeddings else ("head", "lm_head")

    def forward(self, *, stale: bool, keep: bool) -> None:
        """Compute the output of the final norm from the tokens. stale: the result of
        Weights.take_stale. keep: True if backward follows."""
        weights, tokens, first_key = self.weights, self.inputs.tokens, self.inputs.first_key
        keep &= self._trains
        self.operands.scales.start_micro_step(of_step=keep)
        self.dropout.on = keep
        weights.start_micro_step(stale, few_rows=self._few_rows)
        weights.gather("embed")
        weights.gather("layers.0")
        residual = self.residuals.tensors[0].view(*tokens.shape, self.config.hidden_size)
        w = PartWeights(weights.get("embed"))
        scale, positions = self.config.embedding_scale, w.get("positions")
        starts = None if positions is None else first_key
        embedding.forward(self.dev, residual, tokens, w["embed"], positions, scale, starts)
        if self.embedding is not None:
            self.embedding.forward(residual, tokens, w)
        weights.release("embed")
        if self.per_layer is not None:
            with self._per_layer_weights() as w:
                self.per_layer.forward(self.residuals.tensors[0], tokens, w)
        for layer in self._layers:
            weights.gather(f"layers.{layer + 1}" if layer + 1 in self._layers else "head")
            with self.dev.range(f"forward {layer}"):
                w = PartWeights(weights.get(f"layers.{layer}"))
                self.blocks.forward(layer, w, keep=keep)
            weights.release(f"layers.{layer}")
        last = self.blocks.layers[-1]
        self.head.forward(PartWeights(weights.get("head")), last.streams[-1], last.branch)
        weights.release("head")

    @contextmanager
    def _per_layer_weights(self) -> Iterator[PartWeights]:
        for block in PerLayerInputs.BLOCKS:
            self.weights.gather(block)
        yield PartWeights(
            {k: w for b in PerLayerInputs.BLOCKS for k, w in self.weights.get(b).items()}
        )
        for block in PerLayerInputs.BLOCKS:
            self.weights.release(block)

    def begin_magnitudes(self) -> None:
        """Set the magnitudes of adapted rows (DoRA) to the norms of the weights' rows."""
        self.weights.start_micro_step(stale=False)
        for layer in self._layers:
            name = f"layers.{layer}"
            self.weights.gather(name)
            self.blocks.linear.begin_magnitudes(layer, PartWeights(self.weights.get(name)))
            self.weights.release(name)

    def token_losses(self, of_rows: Labels | None = None) -> None:
        """Compute the loss of each token after `forward`, without gradients. of_rows: the result of
        Loss.of_rows; read only if the model has no loss."""
        slab, _ = self._head_slab
        self.weights.gather(slab)
        of_rows = of_rows if self.loss is None else self.loss.of_rows()
        w, targets = PartWeights(self.weights.of_logits()), self.inputs.targets
        self.head.token_losses(w, targets.view(targets.size), of_rows)
        self.weights.release(slab)

    def top_k(self, top: Tensor) -> None:
        """Write the k largest logits of all rows to `top`, as Head.top_k does; call `token_losses`
        before this method."""
        slab, _ = self._head_slab
        self.weights.gather(slab)
        self.head.top_k(PartWeights(self.weights.of_logits()), top)
        self.weights.release(slab)

    @contextmanager
    def logits(self) -> Iterator[Tensor]:
        """Yield the logits (B*T, Vp) that predict each next token, chunk by chunk, as Head.logits
        does; call `forward` before this method."""
        slab, _ = self._head_slab
        self.weights.gather(slab)
        with self.head.logits(PartWeights(self.weights.of_logits())) as logits:
            yield logits
        self.weights.release(slab)

    def rows(self) -> Rows:
        """Return targets, losses and log-sum-exp of the micro-batch."""
        targets = self.inputs.targets
        losses, lse = (t.view(*targets.shape) for t in (self.head.losses, self.head.lse))
        return Rows(targets, losses, lse, self.inputs.first_key)

    def backward(self, grads: Gradients, *, accumulate: bool, last: bool) -> None:
        """Compute the loss of each token, and all gradients, after `forward`. accumulate: True to
        add to the gradients, False to overwrite the gradients. last: True for the last micro-step
        of an optimizer step."""
        grads.start_micro_step(accumulate, last)
        weights, streams = self.weights, self.blocks.streams
        if self.mtp is not None:
            self.mtp.run(self.head.out, weights, grads, self._head_slab[0])
        if not self._trains:
            self.token_losses()
            grads.end_micro_step()
            return
        blocks, last_layer = self.blocks.layers, self._layers[-1]
        of_inputs = ("embed", *(() if self.per_layer is None else PerLayerInputs.BLOCKS))
        trains_inputs = any(map(grads.wants, of_inputs))
        weights.gather(f"layers.{last_layer}", blocks[last_layer].multiplied_again)
        grads.load(f"layers.{last_layer}")
        with self.dev.range("head"):
            self._backward_head(grads)
        for layer in reversed(self._layers):
            if layer > 0:
                weights.gather(f"layers.{layer - 1}", blocks[layer - 1].multiplied_again)
                grads.load(f"layers.{layer - 1}")
            name = f"layers.{layer}"
            for stream in streams:
                stream.read(layer)
            with self.dev.range(f"backward {layer}"):
                w = PartWeights(weights.get(name, transposed=True))
                g = PartGrads(grads.full(name))
                wanted = layer > 0 or trains_inputs
                self.blocks.backward(layer, w, g, self.d_residual, self.d_norm, wanted=wanted)
            for stream in streams:
                stream.was_read(layer)
            weights.release(name)
            grads.notify(name)
        if self.per_layer is not None and trains_inputs:
            self._backward_per_layer(grads)
        self._backward_embedding(grads)
        grads.end_micro_step()

    def _backward_per_layer(self, grads: Gradients) -> None:
        blocks, x = PerLayerInputs.BLOCKS, self.residuals.tensors[0]
        g = PartGrads({key: g for block in blocks for key, g in grads.full(block).items()})
        with self._per_layer_weights() as w:
            self.per_layer.backward(self.d_residual, x, self.inputs.tokens, w, g)
        for block in blocks:
            grads.notify(block)

    def _backward_embedding(self, grads: Gradients) -> None:
        """Compute the embedding's gradient. With a tied head, add this gradient to the head's
        gradient; with an untied head, overwrite the memory."""
        dev, g, tokens = self.dev, PartGrads(grads.full("embed")), self.inputs.tokens
        d_residual = self.d_residual.view(*tokens.shape, self.config.hidden_size)
        scale, padding = self.config.embedding_scale, self.config.padding_row
        vocab = self.config.padded_vocab
        for target, (first, stop) in (
            (g.get("embed"), (0, vocab)),
            (g.get(NEW_ROWS), self.config.new_tokens or (0, 0)),
        ):
            if target is None:
                continue
            if not self.config.tied_embeddings and not target.accumulate:
                dev.zero(target.tensor)  # for the rows of tokens that do not occur in the batch
            rows = target._replace(tensor=target.tensor.rows(0, stop - first), accumulate=True)
            embedding.backward(dev, rows, d_residual, tokens, scale, padding, first, vocab)
        if "positions" in g:
            embedding.backward_positions(dev, g["positions"], d_residual, self.inputs.first_key)
        if self.embedding is not None:
            self.weights.gather("embed")
            w = PartWeights(self.weights.get("embed"))
            self.embedding.backward(d_residual, tokens, w, g)
            self.weights.release("embed")
        grads.notify("embed")

    def _backward_head(self, grads: Gradients) -> None:
        weights, (slab, key) = self.weights, self._head_slab
        of_head = (("lm_head", key), (NEW_ROWS, NEW_ROWS))
        for name in {slab, "head"}:
            weights.gather(name)
        of_table = grads.full(slab)
        w = PartWeights(weights.get("head") | weights.of_logits())
        g = PartGrads(grads.full("head") | {name: of_table.get(k) for name, k in of_head})
        last, d_residual, d_norm = self.blocks.layers[-1], self.d_residual, self.d_norm
        d_out = self.blocks.norms.d_out(d_residual, d_norm)
        to = self.operands.measured(last.halves[-1].out_id, d_out)
        flat = self.inputs.targets.view(self.inputs.targets.size)
        if self.loss.ahead:
            self.head.token_losses(w, flat, self.loss.of_rows())
            self.loss.prepare(self.rows())
        row_weights = self.loss.weights(self.rows())
        row_weights = row_weights and row_weights.view(flat.size)
        self.head.loss_and_backward(
            w, g, flat, row_weights, last.branch, to, d_residual, d_norm, self.loss.of_rows()
        )
        for name in {slab, "head"}:
            weights.release(name)
        grads.notify("head")
