"""The products of a block's matrices, and of the adapters beside them.

    h = dropout(x) @ A^T           y = x @ W^T + h @ B^T
    d_h = d_y @ B                  d_x = d_y @ W + dropout(d_h @ A)
    d_B = d_y^T @ h                d_A = d_h^T @ dropout(x)

Whether both terms are one product, or one with what follows, is for `ops/product.py` to say.

A is (R, in_features) and B (out_features, R), scaling included: the adapters of rows of a matrix,
as `ops/adapter.py` makes one of them, and explains magnitudes (DoRA), for which y is made once more
in backward. h is small and kept. W, which is not trained, has no product of its own for a gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import STORE, Adapters, Epilogue, Handed, Operand, Result, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.format import BACKWARD, FORWARD, Format
from llmq.model.activations import Frame
from llmq.model.adapters import Dropout, expanded, output_gradients, width_of
from llmq.model.linear import Linear
from llmq.model.parameters import PartWeights
from llmq.ops import adapter, reduce
from llmq.ops.matmul import matmul
from llmq.ops.product import accepts_addend, product
from llmq.options.adapters import Adapted, adapted_in_layers, adapters_of
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class _Parts(NamedTuple):
    """The parts of one matrix of one block. salt: of its dropout. hidden: h (rows, R). norms: F32
    (out_features,), of rows that have magnitudes; None without those."""

    matrix: Adapted
    salt: int
    hidden: Tensor
    norms: Tensor | None


class BlockLinear:
    """All products of all blocks. A matrix is named by its layer (`at.here`), and its key there."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        format: Format,
        scalars: Tensor | None,
    ):
        """format: of the products. scalars: StepScalars, which a model with adapters needs."""
        self.dev, self.config, self.format = dev, config, format
        self.linear = Linear(dev, format)
        every = [(layer, m) for layer in range(config.num_layers) for m in config.matrices(layer)]
        self._matrices = {(layer, matrix.key): matrix for layer, matrix in every}
        self._numbers = {which: number for number, which in enumerate(self._matrices)}
        self._adapters = Linear(dev)  # whose products are small
        self.dropout = Dropout(dev, options, scalars)
        self._rows = options.batch_size * options.local_seq_len
        self._parts: dict[tuple[int, str], _Parts] = {}
        self._d_hidden: Tensor | None = None
        adapters = adapters_of(options)
        if adapters is None:
            return
        widest = 0
        for layer, matrix in adapted_in_layers(config, adapters):
            if matrix.groups > 1:
                continue  # of experts, whose half computes them
            width, name = width_of(matrix), matrix.key
            hidden = dev.alloc(
                f"{name}_hidden.{layer}", (self._rows, width), format.dtype, "Activations"
            )
            norms = None
            if adapters.dora:
                norms = dev.alloc(f"{name}_norms.{layer}", matrix.shape[:1], F32, "Activations")
            self._parts[layer, name] = _Parts(matrix, len(self._parts), hidden, norms)
            widest = max(widest, width)
        # One matrix at a time: its gradients follow its input's.
        self._d_hidden = dev.alloc("d_hidden", (self._rows * widest,), format.dtype, "Activations")

    def accepts_addend(self, layer: int, key: str, out: Tensor) -> bool:
        """Whether forward takes an addend for an `out` like this one."""
        parts, features = self._parts.get((layer, key)), self._matrices[layer, key].shape[1]
        if parts is not None and parts.norms is not None:
            return False
        hidden, fast = parts and parts.hidden, FORWARD in self.format.fast
        return accepts_addend(self.dev, out, self.format.multiplied, features, hidden, fast=fast)

    def forward(
        self,
        at: Frame,
        key: str,
        out: Result | Handed,
        x: Operand,
        addend: Tensor | None = None,
        *,
        epilogue: Epilogue = STORE,
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, and the adapters'.
        addend: like out, other memory, or None, as it is unless `accepts_addend`. Beside adapters
        no product writes codes."""
        w, adapters, parts, bias = at.w, None, self._of(at, key), at.w.bias(key)
        if parts is not None:
            made, finished = partial(self._tail, parts, x, *w.adapters(key)), None
            if parts.norms is not None:
                self._measure(parts, key, w)
                finished = partial(self._scale, parts, w.magnitudes(key), bias)
                bias = None
            adapters = Adapters(parts.hidden, made, finished=finished)
        product(
            self.dev, out, bias=bias, adapters=adapters, addend=addend, epilogue=epilogue,
            **self.linear.how(FORWARD, x, w[key]),
        )  # fmt: skip

    def _of(self, at: Frame, key: str) -> _Parts | None:
        return self._parts.get((at.here.index, key))

    def _measure(self, parts: _Parts, key: str, w: PartWeights) -> None:
        (a, b), matrix = w.adapters(key), parts.matrix
        adapter.norms(self.dev, parts.norms, w[key], a, b, matrix.spans, matrix.scales)

    def _scale(self, parts: _Parts, magnitudes: Tensor, bias: Tensor | None, out: Tensor) -> None:
        adapter.scale(self.dev, out, out, parts.norms, magnitudes, bias)

    def begin_magnitudes(self, layer: int, w: PartWeights) -> None:
        """Magnitudes of a layer's rows become the rows' norms."""
        for (of_layer, key), parts in self._parts.items():
            if of_layer == layer:
                self._measure(parts, key, w)
                self.dev.copy(w.magnitudes(key), parts.norms)

    @contextmanager
    def _tail(self, parts: _Parts, x: Operand, a: Tensor, b: Tensor) -> Iterator[Tensor]:
        """Computes h; the matrix that it is multiplied by."""
        with self.dropout.of(tensor_of(x), parts.salt) as dropped:
            matmul(self.dev, parts.hidden, dropped, a, trans_b=True)
        with expanded(self.dev, parts.matrix, b) as whole:
            yield whole

    def input_gradient(
        self,
        at: Frame,
        key: str,
        d_x: Result | Handed | None,
        d_out: Operand,
        *,
        epilogue: Epilogue = STORE,
    ) -> None:
        """d_x (rows, in_features), from d_out (rows, out_features); and the gradient of B. d_x:
        None where nobody wants it."""
        adapters, parts = None, self._of(at, key)
        with self._of_sum(at, key, d_out) as d_out:
            if parts is not None and d_x is None:
                self._output_gradients(at, key, d_out)
            if d_x is None:
                return
            if parts is not None:
                made = partial(self._tail_backward, at, key, d_out)
                drops = self.dropout.probability > 0
                added = partial(self.dropout.write, salt=parts.salt, add=True) if drops else None
                adapters = Adapters(self._d_hidden_of(parts), made, added)
            how = self.linear.how(BACKWARD, d_out, at.w[key], self._numbers[at.here.index, key])
            product(self.dev, d_x, adapters=adapters, epilogue=epilogue, **how)

    @contextmanager
    def _of_sum(self, at: Frame, key: str, d_out: Operand) -> Iterator[Operand]:
        """The gradient of the sum of both products: d_out, of rows with magnitudes in scratch."""
        parts = self._of(at, key)
        if parts is None or parts.norms is None:
            yield d_out
            return
        with self.dev.scratch("d_sum", d_out.shape, d_out.dtype) as d_sum:
            adapter.scale(self.dev, d_sum, d_out, parts.norms, at.w.magnitudes(key))
            yield d_sum

    @contextmanager
    def _tail_backward(self, at: Frame, key: str, d_out: Operand) -> Iterator[Tensor]:
        """Computes d_h and the gradient of B; the matrix that d_h is multiplied by."""
        self._output_gradients(at, key, d_out)
        a, _ = at.w.adapters(key)
        yield a

    def needs_input(self, at: Frame, key: str) -> bool:
        """Whether weight_gradients needs x."""
        return key in at.g or self._of(at, key) is not None

    def weight_gradients(
        self, at: Frame, key: str, d_out: Operand, x: Operand | None, *, bias: bool = True
    ) -> None:
        """Compute the gradients of the weight, of the bias unless that is done already, and of the
        adapters' A and magnitudes, as far as they are wanted. Follows input_gradient. x: None where
        it is not needed."""
        w, g, number = at.w, at.g, self._numbers[at.here.index, key]
        self.linear.weight_gradients(g.get(key), g.bias(key) if bias else None, d_out, x, number)
        parts = self._of(at, key)
        if parts is None:
            return
        d_hidden, (d_a, _) = self._d_hidden_of(parts), g.adapters(key)
        with self.dropout.of(tensor_of(x), parts.salt) as dropped:
            self._adapters.weight_gradients(d_a, None, d_hidden, dropped)
        d_magnitudes = g.magnitudes(key)
        if d_magnitudes is None:
            return
        # The sum is made again: what is kept of it is rounded, rotated, or added to the stream.
        with (
            self.dev.scratch("sum", d_out.shape, d_out.dtype) as both,
            expanded(self.dev, parts.matrix, w.adapters(key)[1]) as tail,
        ):
            self.linear.forward(both, x, w[key])
            matmul(self.dev, both, parts.hidden, tail, trans_b=True, accumulate=True)
            adapter.magnitude_gradient(self.dev, both, both, d_out, parts.norms)
            reduce.bias_gradient(self.dev, d_magnitudes, both)

    def _output_gradients(self, at: Frame, key: str, d_out: Operand) -> None:
        parts, (_, b), (_, d_b) = self._of(at, key), at.w.adapters(key), at.g.adapters(key)
        of_b = (self._d_hidden_of(parts), d_b, tensor_of(d_out), parts.hidden, b)
        output_gradients(self.dev, parts.matrix, *of_b)

    def _d_hidden_of(self, parts: _Parts) -> Tensor:
        return self._d_hidden.rows(0, parts.hidden.size).view(*parts.hidden.shape)
