"""The products of a block's matrices, and of the adapters beside them.

    h = dropout(x) @ A^T           y = x @ W^T + h @ B^T
    d_h = d_y @ B                  d_x = d_y @ W + dropout(d_h @ A)
    d_B = d_y^T @ h                d_A = d_h^T @ dropout(x)

A is (R, in_features) and B (out_features, R), scaling included: the adapters of rows of a matrix,
as `ops/adapter.py` makes one of them. h is small and kept. W, which is not trained, has no product
of its own for a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llmq.base.dtypes import DType
from llmq.base.operand import Fp8, Operand, ProductCodes
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.adapters import Adapted, adapted_matrices, adapters_of
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.model.linear import Linear
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.ops import adapter, reduce
from llmq.ops.dropout import dropout
from llmq.ops.matmul import matmul
from llmq.runtime.device import Device


def _tensor(x: Operand) -> Tensor:
    """What adapters multiply: the tensor itself, also where W's product takes its fp8 codes."""
    return x.source if isinstance(x, Fp8) else x


class _Parts(NamedTuple):
    """Of one matrix of one block. salt: of its dropout. hidden: h (rows, R)."""

    matrix: Adapted
    salt: int
    hidden: Tensor


MATRICES = ("qkv", "o", "up", "down")


def _number(layer: int, key: str) -> int:
    """Of a matrix among those of all blocks."""
    return len(MATRICES) * layer + MATRICES.index(key)


class BlockLinear:
    """All products of all blocks. A matrix is named by its layer, and its key in a block.

    drops: whether what is enqueued is a step's, with dropout; of capture time.
    """

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        linear: Linear,
        dtype: DType,
        scalars: Tensor | None,
    ):
        """dtype: of activations. scalars: StepScalars, which a model with adapters needs."""
        self.dev, self.linear, self.drops = dev, linear, False
        self._adapters = Linear(dev)  # whose products are small
        self._scalars, self._probability = scalars, options.lora_dropout
        self._rows, self._sequences = options.batch_size * options.seq_len, options.batch_size
        self._parts: dict[tuple[int, str], _Parts] = {}
        self._d_hidden: Tensor | None = None
        adapters = adapters_of(options)
        if adapters is None:
            return
        self._scale = options.lora_scale
        matrices = adapted_matrices(config, adapters.targets)
        widths = [adapter.padded_columns(len(m.spans), adapters.rank) for m in matrices]
        for layer in range(config.num_layers):
            for matrix, width in zip(matrices, widths, strict=True):
                name = f"{matrix.key}_hidden.{layer}"
                hidden = dev.alloc(name, (self._rows, width), dtype, "Activations")
                self._parts[layer, matrix.key] = _Parts(matrix, len(self._parts), hidden)
        # Of one matrix at a time: its gradients follow its input's.
        self._d_hidden = dev.alloc("d_hidden", (self._rows * max(widths),), dtype, "Activations")

    def forward(
        self, layer: int, key: str, out: Tensor | ProductCodes, x: Operand, w: BlockWeights
    ) -> None:
        """out (rows, out_features) = x (rows, in_features) @ weight^T + bias, and the adapters'.

        Beside adapters no product writes codes.
        """
        self.linear.forward(out, x, getattr(w, key), getattr(w, f"{key}_bias"))
        parts = self._parts.get((layer, key))
        if parts is None:
            return
        with self._dropped(parts, _tensor(x)) as dropped:
            matmul(self.dev, parts.hidden, dropped, getattr(w, f"{key}_a"), trans_b=True)
        with self._expanded(parts, getattr(w, f"{key}_b")) as b:
            matmul(self.dev, out, parts.hidden, b, trans_b=True, accumulate=True)

    def input_gradient(
        self,
        layer: int,
        key: str,
        d_x: Tensor | ProductCodes,
        d_out: Operand,
        w: BlockWeights,
    ) -> None:
        """d_x (rows, in_features), from d_out (rows, out_features)."""
        self.linear.input_gradient(d_x, d_out, getattr(w, key), _number(layer, key))
        parts = self._parts.get((layer, key))
        if parts is None:
            return
        d_hidden, a = self._d_hidden_of(parts), getattr(w, f"{key}_a")
        with self._expanded(parts, getattr(w, f"{key}_b")) as b:
            matmul(self.dev, d_hidden, _tensor(d_out), b)
        if not self._probability:
            matmul(self.dev, d_x, d_hidden, a, accumulate=True)
            return
        with self.dev.scratch("d_dropped", d_x.shape, d_x.dtype) as d_dropped:
            matmul(self.dev, d_dropped, d_hidden, a)
            self._dropout(parts, d_x, d_dropped, add=True)

    def needs_input(self, layer: int, key: str, g: BlockGrads) -> bool:
        """Whether weight_gradients needs x."""
        return getattr(g, key) is not None or (layer, key) in self._parts

    def weight_gradients(
        self,
        layer: int,
        key: str,
        g: BlockGrads,
        d_bias: Accumulator | None,
        d_out: Operand,
        x: Operand | None,
    ) -> None:
        """Of the weight, of the bias as far as d_bias asks for it, and of the adapters.

        Follows input_gradient. x: None where it is not needed.
        """
        number = _number(layer, key)
        self.linear.weight_gradients(getattr(g, key), d_bias, d_out, x, number)
        parts = self._parts.get((layer, key))
        if parts is None:
            return
        d_hidden, d_a, d_b = self._d_hidden_of(parts), *(getattr(g, f"{key}_{n}") for n in "ab")
        with self._dropped(parts, _tensor(x)) as dropped:
            self._adapters.weight_gradients(d_a, None, d_hidden, dropped)
        if d_b is None:
            return
        dtype, shape = d_b.tensor.dtype, (parts.matrix.shape[0], parts.hidden.shape[1])
        with (
            self.dev.scratch("d_b_whole", shape, dtype) as whole,
            self.dev.scratch("d_b", d_b.tensor.shape, dtype) as part,
        ):
            matmul(self.dev, whole, _tensor(d_out), parts.hidden, trans_a=True)
            adapter.collect(self.dev, part, whole, parts.matrix.spans, self._scale)
            reduce.add(self.dev, d_b, part)

    def _d_hidden_of(self, parts: _Parts) -> Tensor:
        return self._d_hidden.rows(0, parts.hidden.size).view(*parts.hidden.shape)

    @contextmanager
    def _expanded(self, parts: _Parts, b: Tensor) -> Iterator[Tensor]:
        """All adapters' B in one matrix (out_features, R), with scaling."""
        shape = (parts.matrix.shape[0], parts.hidden.shape[1])
        with self.dev.scratch("lora_b", shape, b.dtype) as whole:
            adapter.expand(self.dev, whole, b, parts.matrix.spans, self._scale)
            yield whole

    @contextmanager
    def _dropped(self, parts: _Parts, x: Tensor) -> Iterator[Tensor]:
        """The adapters' input: x, in a step after dropout."""
        if not (self.drops and self._probability):
            yield x
            return
        with self.dev.scratch("dropped", x.shape, x.dtype) as dropped:
            self._dropout(parts, dropped, x, add=False)
            yield dropped

    def _dropout(self, parts: _Parts, out: Tensor, x: Tensor, *, add: bool) -> None:
        dropout(
            self.dev, out, x, self._scalars, probability=self._probability, salt=parts.salt,
            sequences=self._sequences, add=add,
        )  # fmt: skip
