"""Low-rank products of adapters: of block matrices, of the embedding, and of the LM head.

The LM head's adapters are computed like those of a block's matrices (`BlockLinear`). The
embedding's adapters read only the rows of A and B that the tokens of W + s * B A need:

    h = (s * B)[tokens]            y = W[tokens] + h @ A
    d_h = d_y @ A^T                d_A = h^T @ d_y,   d_B[id] = s * sum of d_h where token == id

The embedding scale also multiplies h. Adapters of embeddings have no dropout, as in PEFT.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from llmq.arch.model_config import ModelConfig
from llmq.base.operand import AdapterBlocks, Adapters, DropoutMask
from llmq.base.tensor import Accumulator, Tensor
from llmq.model.linear import Linear
from llmq.model.parameters import PartGrads, PartWeights
from llmq.ops.common import padded_columns
from llmq.ops.pointwise import embedding, reduce
from llmq.ops.pointwise.elementwise import dropout
from llmq.ops.product import adapter
from llmq.ops.product.matmul import matmul
from llmq.ops.product.product import add_dropped
from llmq.options.adapters import Adapted, adapted_tables, adapters_of
from llmq.options.groups.model import ModelOptions
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

HEAD_SALT = 1 << 20  # salt of the LM head's dropout; blocks' matrices have 0, 1, ...


def width_of(matrix: Adapted) -> int:
    """Return the number of columns of h, the input times A."""
    return padded_columns(len(matrix.parts), matrix.rank)


def blocks_of(matrix: Adapted, b: Tensor) -> AdapterBlocks | None:
    """Return the layout of all adapters' B (n, rank), scaled, as blocks of one matrix
    (out_features, R). Return None if b already is this matrix: one adapter of all rows without
    scaling."""
    rows, columns = matrix.shape[0], width_of(matrix)
    if matrix.scales == (1,) and (rows, columns) == b.shape:
        return None
    return AdapterBlocks(rows, columns, matrix.spans, matrix.scales)


def expanded(dev: Device, temps: ExitStack, matrix: Adapted, b: Tensor) -> Tensor:
    """Return all adapters' B, scaled, as one matrix (out_features, R): scratch of `temps`, or b."""
    blocks = blocks_of(matrix, b)
    if blocks is None:
        return b
    shape = (blocks.rows, blocks.columns)
    whole = temps.enter_context(dev.scratch("lora_b", shape, b.dtype))
    adapter.expand(dev, whole, b, blocks.spans, blocks.scales)
    return whole


def output_gradients(
    dev: Device,
    matrix: Adapted,
    d_hidden: Tensor,
    d_b: Accumulator | None,
    d_out: Tensor,
    hidden: Tensor,
    b: Tensor,
) -> None:
    """Compute d_hidden, and d_b unless d_b is None, from d_out. One kernel computes both gradients
    if the kernel supports the shapes."""
    spans, scales = matrix.spans, matrix.scales
    fused = adapter.takes(d_out.dtype, d_out.shape[1], spans, b.shape[1])
    if fused and d_b is not None and len({*scales}) == 1:
        adapter.backward(dev, d_hidden, d_b, d_out, hidden, b, spans, scales[0])
        return
    with ExitStack() as temps:
        matmul(dev, d_hidden, d_out, expanded(dev, temps, matrix, b))
    if d_b is None:
        return
    with dev.scratch("d_b_whole", (matrix.shape[0], hidden.shape[1]), d_b.tensor.dtype) as whole:
        matmul(dev, whole, d_out, hidden, trans_a=True)
        _add_collected(dev, matrix, d_b, whole)


def _add_collected(dev: Device, matrix: Adapted, d_b: Accumulator, whole: Tensor) -> None:
    """Write the gradient of B to d_b, or add the gradient. whole: the gradient of the expanded
    matrix."""
    with dev.scratch("d_b", d_b.tensor.shape, d_b.tensor.dtype) as part:
        adapter.collect(dev, part, whole, matrix.spans, matrix.scales)
        reduce.sum_parts(dev, d_b, [part])


class Dropout:
    """Dropout on the inputs of adapters. Each matrix has a different salt for random numbers. on:
    True while launches of a training step are enqueued, False during evaluations."""

    def __init__(self, dev: Device, options: StepOptions, scalars: Tensor | None):
        self.probability, self.on, self._dev = options.model.lora_dropout, False, dev
        self._scalars, self._sequences = scalars, options.batch.batch_size

    def mask(self, salt: int) -> DropoutMask | None:
        """Return the dropout mask of a matrix in a training step; None without dropout."""
        if not self.probability:
            return None
        return DropoutMask(self.probability, salt, self._sequences, self._scalars)

    def of(self, temps: ExitStack, x: Tensor, salt: int) -> Tensor:
        """Return the input of adapters: in a training step dropout(x), scratch of `temps`; outside
        of training steps x."""
        if not (self.on and self.probability):
            return x
        dropped = temps.enter_context(self._dev.scratch("dropped", x.shape, x.dtype))
        dropout(
            self._dev, dropped, x, self._scalars,
            probability=self.probability, salt=salt, sequences=self._sequences,
        )  # fmt: skip
        return dropped


class EmbeddingAdapters:
    """The adapters of the token embedding. out, d_out: (B, T, C), the residual stream before the
    first block, and the stream's gradient."""

    def __init__(self, dev: Device, config: ModelConfig, matrix: Adapted):
        self._dev, self._matrix, self._linear = dev, matrix, Linear(dev)
        self._scale, self._padding = config.embedding_scale, config.padding_row

    @contextmanager
    def _hidden(self, tokens: Tensor, b: Tensor, like: Tensor) -> Iterator[Tensor]:
        shape = (*tokens.shape, width_of(self._matrix))
        with self._dev.scratch("embed_hidden", shape, like.dtype) as hidden:
            with ExitStack() as temps:
                rows = expanded(self._dev, temps, self._matrix, b)
                embedding.forward(self._dev, hidden, tokens, rows, None, scale=self._scale)
            yield hidden.view(tokens.size, shape[-1])

    def forward(self, out: Tensor, tokens: Tensor, w: PartWeights) -> None:
        """Add h @ A to out, the embeddings of the tokens."""
        flat = out.view(tokens.size, out.shape[-1])
        with self._hidden(tokens, w["embed_b"], out) as hidden:
            matmul(self._dev, flat, hidden, w["embed_a"], accumulate=True)

    def backward(self, d_out: Tensor, tokens: Tensor, w: PartWeights, g: PartGrads) -> None:
        dev, flat, d_b = self._dev, d_out.view(tokens.size, d_out.shape[-1]), g["embed_b"]
        with self._hidden(tokens, w["embed_b"], d_out) as hidden:
            self._linear.weight_gradients(g.get("embed_a"), None, hidden, flat)
            matmul(dev, hidden, flat, w["embed_a"], trans_b=True)
            shape = (self._matrix.shape[0], hidden.shape[1])
            with dev.scratch("d_b_whole", shape, d_b.tensor.dtype) as whole:
                dev.zero(whole)
                d_rows = d_b._replace(tensor=whole, accumulate=True)
                d_hidden = hidden.view(*tokens.shape, hidden.shape[1])
                embedding.backward(dev, d_rows, d_hidden, tokens, self._scale, self._padding)
                _add_collected(dev, self._matrix, d_b, whole)


@dataclass(frozen=True, slots=True)
class OfPass:
    """Tensors of the LM head's adapters during one pass over all rows. hidden, d_hidden: (rows, R).
    tail: (Vp, R), all adapters' B as one matrix. b: (V, rank), B as stored in the weight table.
    d_b: the gradient of b; None in forward."""

    dev: Device
    matrix: Adapted
    hidden: Tensor
    d_hidden: Tensor | None
    tail: Tensor
    b: Tensor
    d_b: Accumulator | None

    def beside(self, start: int, stop: int) -> Adapters:
        """Return the adapters' term in the logits of rows [start, stop)."""
        return Adapters(self.hidden.rows(start, stop), self.tail)

    def of_logits(self, start: int, stop: int, gradient: Tensor) -> None:
        """Compute the gradients of h and B from `gradient`, (stop - start, Vp), of the logits of
        rows [start, stop). The calls must follow the order of the chunks."""
        d_b = self.d_b if start == 0 else self.d_b._replace(accumulate=True)
        hidden, d_hidden = self.hidden.rows(start, stop), self.d_hidden.rows(start, stop)
        output_gradients(self.dev, self.matrix, d_hidden, d_b, gradient, hidden, self.b)


class HeadAdapters:
    """The adapters of the LM head, which computes logits for one chunk of rows at a time."""

    def __init__(self, dev: Device, matrix: Adapted, dropout: Dropout):
        self._dev, self._matrix, self._linear = dev, matrix, Linear(dev)
        self._dropout = dropout

    def begin(
        self, temps: ExitStack, x: Tensor, w: PartWeights, g: PartGrads | None = None
    ) -> OfPass:
        """Begin a pass over the rows of x (rows, C). The product h is scratch of `temps`. If g is
        given, `finish` must end the pass."""
        dev, shape = self._dev, (x.shape[0], width_of(self._matrix))
        a, b = w.adapters("lm_head")
        _, d_b = (None, None) if g is None else g.adapters("lm_head")
        hidden = temps.enter_context(dev.scratch("lm_head_hidden", shape, x.dtype))
        d_hidden = None
        if g is not None:
            d_hidden = temps.enter_context(dev.scratch("d_lm_head_hidden", shape, x.dtype))
        with ExitStack() as inner:
            dropped = self._dropout.of(inner, x, HEAD_SALT)
            matmul(dev, hidden, dropped, a, trans_b=True)
        tail = expanded(dev, temps, self._matrix, b)
        return OfPass(dev, self._matrix, hidden, d_hidden, tail, b, d_b)

    def finish(self, low: OfPass, x: Tensor, w: PartWeights, g: PartGrads, d_x: Tensor) -> None:
        """Compute the gradient of A, and add the adapters' term to d_x (rows, C), the gradient of
        x."""
        dev, (a, _), (d_a, _) = self._dev, w.adapters("lm_head"), g.adapters("lm_head")
        with ExitStack() as temps:
            dropped = self._dropout.of(temps, x, HEAD_SALT)
            self._linear.weight_gradients(d_a, None, low.d_hidden, dropped)
        mask = self._dropout.mask(HEAD_SALT)
        if mask is None:
            matmul(dev, d_x, low.d_hidden, a, accumulate=True)
        else:
            add_dropped(dev, d_x, low.d_hidden, a, mask, trans_b=False)


def table_adapters(config: ModelConfig, options: ModelOptions, block: str) -> Adapted | None:
    """Return the adapters of `block`, which is "embed" (embedding) or "head" (LM head); None
    without adapters."""
    adapters = adapters_of(options)
    return None if adapters is None else adapted_tables(config, adapters).get(block)
