"""The products of experts' matrices, and of the adapters beside them: each expert has its own.

    h = x @ A^T                    y = x @ W^T + h @ (scale * B)^T
    d_h = d_y @ (scale * B)        d_x = d_y @ W + d_h @ A
    d_B = scale * d_y^T @ h        d_A = d_h^T @ x

If an expert's matrix has two parts, up and gate, both A lie below each other, and B is a matrix in
which each part has columns of its own, as `ops/adapter.py` makes it. Backward computes h again,
which is small, as is its product.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod

from llmq.base.operand import Operand, tensor_of
from llmq.base.tensor import Accumulator, Tensor
from llmq.formats.format import BACKWARD, FORWARD
from llmq.model.activations import Frame
from llmq.model.halves.half import Shared
from llmq.model.parameters import PartWeights
from llmq.ops import adapter, reduce
from llmq.ops.expert_rows import sum_rows
from llmq.ops.product import grouped_gradient, grouped_product
from llmq.options.adapters import Adapted, adapted_in_layers, adapters_of


class ExpertLinear:
    """Those of all layers. A matrix is named by its key. x, y: rows sorted by expert, R of them, as
    `at.here.kept.starts` says."""

    def __init__(self, shared: Shared, rows: int):
        """rows: R."""
        self.dev, adapters = shared.dev, adapters_of(shared.options)
        self.fast = shared.operands.fast
        every = adapted_in_layers(shared.config, adapters) if adapters is not None else ()
        self._adapted = {(layer, m.key): m for layer, m in every if m.groups > 1}
        widest = max((m.rank * _parts_of(m) for m in self._adapted.values()), default=0)
        if widest:  # one matrix at a time: its gradients follow its input's
            dtype = shared.operands.dtype
            self._d_hidden = self.dev.alloc(
                "d_expert_hidden", (rows * widest,), dtype, "Activations"
            )

    def forward(self, at: Frame, key: str, y: Tensor, x: Operand) -> None:
        """y (R, out), of x (R, in), with a bias if there is one."""
        w, starts = at.w, at.here.kept.starts
        how = {"bias": biases_of(w, key, starts.size - 1), "fast": FORWARD in self.fast}
        a, b = w.adapters(key)
        with ExitStack() as temps:
            if a is not None:
                h = temps.enter_context(self._hidden(tensor_of(x), a, starts))
                how["adapters"] = h, temps.enter_context(self._expanded(at, key, b))
            grouped_product(self.dev, y, x, w[key], starts, trans_b=True, **how)

    def input_gradient(self, at: Frame, key: str, d_x: Tensor | None, d_y: Operand) -> None:
        """d_x (R, in), if it is wanted, from d_y (R, out)."""
        (a, b), starts = at.w.adapters(key), at.here.kept.starts
        how = {"fast": BACKWARD in self.fast}
        if a is not None:
            d_h = self._d_hidden_of(at, key, tensor_of(d_y))
            with self._expanded(at, key, b) as whole:
                grouped_product(self.dev, d_h, tensor_of(d_y), whole, starts)
            how["adapters"] = d_h, _by_expert(a, starts)
        if d_x is not None:
            grouped_product(self.dev, d_x, d_y, at.w[key], starts, **how)

    def trains(self, at: Frame, key: str) -> bool:
        """Whether weight_gradients needs x and d_y as tensors."""
        return key in at.g or at.g.adapters(key)[0] is not None

    def weight_gradients(self, at: Frame, key: str, d_y: Tensor, x: Tensor) -> None:
        """The gradients of the matrix and its adapters, as far as they are wanted. Follows
        input_gradient. If x is that of forward with weights, d_y is without them."""
        g, starts = at.g, at.here.kept.starts
        if key in g:
            grouped_gradient(self.dev, g[key], d_y, x, starts)
        d_a, d_b = g.adapters(key)
        if d_a is not None:
            a, _ = at.w.adapters(key)
            of_experts = d_a._replace(tensor=_by_expert(d_a.tensor, starts))
            d_h = self._d_hidden_of(at, key, d_y)
            grouped_gradient(self.dev, of_experts, d_h, x, starts)
            with self._hidden(x, a, starts) as h:
                self._gradient_of_b(at, key, d_b, d_y, h)

    def bias_gradients(self, at: Frame, key: str, d_y: Tensor, *weighed: Tensor) -> None:
        """The gradients of biases, if there are some that want them. weighed: weights and order of
        rows, where d_y is without weights."""
        d, starts = at.g.bias(key), at.here.kept.starts
        if d is not None:
            d = d._replace(tensor=d.tensor.view(starts.size - 1, d_y.shape[1]))
            sum_rows(self.dev, d, d_y, starts, *weighed)

    def _gradient_of_b(self, at: Frame, key: str, d_b: Accumulator, d_y: Tensor, h: Tensor) -> None:
        dev, dtype, shape = self.dev, d_b.tensor.dtype, self._shape_of_b(at, key)
        with (
            dev.scratch("d_b_whole", shape, dtype) as whole,
            dev.scratch("d_b", d_b.tensor.shape, dtype) as part,
        ):
            target = d_b._replace(tensor=whole, accumulate=False)
            grouped_gradient(dev, target, d_y, h, at.here.kept.starts)
            adapter.collect(dev, part, _below_each_other(whole), *self._blocks(at, key))
            reduce.add(dev, d_b, part)

    def _d_hidden_of(self, at: Frame, key: str, d_y: Tensor) -> Tensor:
        shape = (d_y.shape[0], self._shape_of_b(at, key)[-1])
        return self._d_hidden.rows(0, prod(shape)).view(*shape)

    @contextmanager
    def _hidden(self, x: Tensor, a: Tensor, starts: Tensor) -> Iterator[Tensor]:
        """h (R, n * rank), for n parts of each expert's matrix."""
        experts = _by_expert(a, starts)
        with self.dev.scratch("expert_hidden", (x.shape[0], experts.shape[1]), x.dtype) as h:
            grouped_product(self.dev, h, x, experts, starts, trans_b=True)
            yield h

    @contextmanager
    def _expanded(self, at: Frame, key: str, b: Tensor) -> Iterator[Tensor]:
        """All B (E, out, n * rank), with scaling."""
        with self.dev.scratch("expert_lora_b", self._shape_of_b(at, key), b.dtype) as whole:
            adapter.expand(self.dev, _below_each_other(whole), b, *self._blocks(at, key))
            yield whole

    def _shape_of_b(self, at: Frame, key: str) -> tuple[int, int, int]:
        matrix = self._adapted[at.here.index, key]
        return matrix.groups, matrix.shape[0] // matrix.groups, _parts_of(matrix) * matrix.rank

    def _blocks(self, at: Frame, key: str) -> tuple:
        """The spans, scales and groups that `adapter`'s functions take."""
        matrix = self._adapted[at.here.index, key]
        n = _parts_of(matrix)
        return matrix.spans[:n], matrix.scales[:n], matrix.groups


def biases_of(w: PartWeights, key: str, count: int) -> Tensor | None:
    """Those of so many experts (E, out), if there are some."""
    bias = w.bias(key)
    return bias and bias.view(count, bias.size // count)


def _parts_of(matrix: Adapted) -> int:
    return len(matrix.parts) // matrix.groups


def _by_expert(a: Tensor, starts: Tensor) -> Tensor:
    """All A (E, n * rank, in)."""
    E = starts.size - 1
    return a.view(E, a.shape[0] // E, a.shape[1])


def _below_each_other(whole: Tensor) -> Tensor:
    return whole.view(whole.shape[0] * whole.shape[1], whole.shape[2])
