"""Matrices and norms of a model's parts, each declared once.

Weight table, codes, fp8 scales, adapters, files, diagnosis, decoding and speed of light follow from
these declarations. `Architecture.layers` returns the halves of each block, made in `halves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

Order = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of rows, in another order than the rows' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfPart:
    """A tensor of a Hugging Face checkpoint that holds rows [start, stop) of a parameter.

    Rows are counted over all experts. transposed: stored (in_features, out_features), as in GPT-2's
    Conv1D. order: ranges of our rows, within each expert, in stored order; (): our order. columns:
    number of stored columns; later columns are zeros; None: all are stored. depthwise: stored
    (rows, 1, columns), as in torch's Conv1d. experts: number of experts in the tensor (experts,
    rows of one, columns), transposed (experts, columns, rows of one), or of vectors (experts, rows
    of one); 0: the tensor has no axis of experts. by_rank: the layout of adapters of experts, (rows
    of one, columns * experts).
    """

    name: str
    start: int
    stop: int
    transposed: bool = False
    order: Order = ()
    columns: int | None = None
    depthwise: bool = False
    experts: int = 0
    by_rank: bool = False

    def rows_of(self, rows: slice) -> Any:
        """The index into `as_stored` for these rows of the stored array; with experts, for these
        experts."""
        if not self.order:
            return rows
        order = [row for start, stop in self.order for row in range(start, stop)]
        return (rows, order) if self.experts and not self.by_rank else order[rows]

    def stored_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The stored ranges of our rows [start, stop) of the part, in our order."""
        if not self.order:
            return [(start, stop)]
        count = (self.stop - self.start) // max(self.experts, 1)
        lengths = accumulate((last - first for first, last in self.order), initial=0)
        ours = sorted((*each, at - each[0]) for each, at in zip(self.order, lengths, strict=False))
        found = []
        for base in range(start - start % count, stop, count):
            for first, last, by in ours:
                low, high = max(start, base + first), min(stop, base + last)
                if low < high:
                    found.append((low + by, high + by))
        return found

    def stored(self, values: Any) -> Any:
        """Our rows in the layout of the stored array."""
        values = self.as_stored(values)
        values = values[self.rows_of(slice(None))]
        return values.reshape(len(values), -1) if self.by_rank else values

    def as_stored(self, values: Any) -> Any:
        """View of our values with the axes of the stored array, rows still in our order; by_rank:
        columns and experts are separate axes."""
        values = values if self.columns is None else values[:, : self.columns]
        if self.experts:
            each = values.reshape(self.experts, -1, *values.shape[1:])
            each = each.swapaxes(1, -1) if self.transposed else each
            return each.transpose(1, 2, 0) if self.by_rank else each
        if self.depthwise:
            return values[:, None]
        return values.T if self.transposed else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of a weight that are one module at Hugging Face. module: the module's name. targets:
    names in --lora-targets; the module has an adapter if all are chosen. transposed, order,
    depthwise: see HfPart. experts: if not 0, `module` is the name of a parameter with this number
    of experts."""

    module: str
    rows: int
    targets: tuple[str, ...] = ()
    transposed: bool = False
    order: Order = ()
    depthwise: bool = False
    experts: int = 0

    def tensor(self, name: str) -> str:
        """Name of the module's weight, bias, or another tensor."""
        if not self.experts:
            return f"{self.module}.{name}"
        return self.module if name == "weight" else f"{self.module}_{name}"

    def hf(self, tensor: str, start: int = 0) -> HfPart:
        """The HfPart for the part's weight or bias. tensor: "weight" or "bias". start: the part's
        first row in the parameter."""
        return HfPart(
            name=self.tensor(tensor),
            start=start,
            stop=start + self.rows,
            transposed=tensor == "weight" and self.transposed,
            order=self.order,
            depthwise=tensor == "weight" and self.depthwise,
            experts=self.experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A weight of a model and its bias, if it has one.

    key: the weight's name in its block; the bias is KEY_bias. Shapes may differ between layers.
    name: the module's name in checkpoints. shape: (features,), (out, in), or (experts, out, in),
    with padded rows. parts: the rows of each Hugging Face module, in order. kind: for the
    optimizer: "matrix", "embedding", "router", "norm", "vector", "conv" (a few weights for each
    channel), or "constant" (F32, with the gradient zero); norms, vectors and constants do not
    decay. initial: "normal", "residual" (normal, scaled by 1/sqrt(2L)), "one", "zero" or
    "log_uniform" (log of a number from 0.01 to 16). tensor: the weight's name in each Hugging Face
    module.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    kind: str
    initial: str = "normal"
    bias: bool = False
    tensor: str = "weight"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the weight, its bias and its adapters have, or would have."""
        return (self.key, *(f"{self.key}_{what}" for what in ("bias", "a", "b")))

    @property
    def spans(self) -> list[tuple[Part, int, int]]:
        """The parts, each with its rows [start, stop)."""
        stops = accumulate(part.rows for part in self.parts)
        return [(p, stop - p.rows, stop) for p, stop in zip(self.parts, stops, strict=True)]

    def hf(self, tensor: str) -> tuple[HfPart, ...]:
        """The HfParts of the weight or of the bias. tensor: "weight" or "bias"."""
        return tuple(part.hf(tensor, start) for part, start, _ in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix(Module):
    """A matrix that multiplies the activations of a half of a block. input: name of the multiplied
    activation, gradient: name of the output's gradient; each has an fp8 scale. active: number of
    experts per token. fused: transformers' parameter of all experts, which files may hold instead
    of the parts, and which adapters may adapt."""

    kind: str = "matrix"
    input: str
    gradient: str
    active: int = 1
    fused: Part | None = None

    @property
    def of_experts(self) -> bool:
        """True if each of several experts has such a matrix."""
        return len(self.shape) == 3

    @property
    def used(self) -> int:
        """Number of elements that are multiplied for each token."""
        return self.active * prod(self.shape[-2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfSpec:
    """A half of a block, between a norm and the residual stream. kind: class in llmq/model/halves.
    name: the half's output is NAME_branch, the output's gradient is d_NAME. norm: key of the norm
    in front, also the name of the half's input. norms: modules of the norms between the half before
    and this one. modules: other modules, in the order of the weight table. output: key of the
    matrix whose product is the half's output; None: the output is no product. activations: names of
    tensors for backward, in order of computation. made_again: activations that are never kept,
    because the kernel of their gradient computes them. coded: activations and gradients that
    products may write as fp8 codes (--mlp-dtype). cached: by name, shapes of tensors that
    generation keeps of each token; carried: by name, shapes of F32 states that generation keeps of
    each text; reads: the earlier layer whose cached tensors this layer reads; None: its own. parts:
    the halves, side by side, that this half consists of. factor: factor of the output's product.
    sizes: further sizes and switches that this kind needs. flops: operations per token in forward,
    beside matrices and attention.
    """

    kind: str
    name: str
    norm: str
    norms: tuple[Module, ...]
    modules: tuple[Module, ...]
    output: str | None
    activations: tuple[str, ...]
    made_again: tuple[str, ...] = ()
    coded: tuple[str, ...] = ()
    cached: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    carried: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[HalfSpec, ...] = ()
    reads: int | None = None
    factor: float = 1.0
    sizes: Mapping[str, Any] = field(default_factory=dict)
    flops: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(module for module in self.modules if isinstance(module, Matrix))

    def __getitem__(self, key: str) -> Module:
        return next(module for module in self.modules if module.key == key)

    @property
    def pre_norm(self) -> bool:
        """A norm stands between the stream and the half."""
        return any(norm.key == self.norm for norm in self.norms)

    @property
    def computed(self) -> tuple[str, ...]:
        """Names of the half's activations in order of computation, from input to output."""
        return (self.norm, *self.activations, f"{self.name}_branch")

    @property
    def backward_order(self) -> Iterator[str]:
        """Gradients in the order in which they are computed: names d_NAME of activations'
        gradients, and keys of parameters."""
        yield f"d_{self.name}"
        inner: list[Module] = []  # norms and the like behind a matrix
        for module in reversed(self.modules):
            if not isinstance(module, Matrix):
                inner.insert(0, module)
                continue
            yield from (key for each in inner for key in each.keys)
            yield from (module.gradient, *module.keys, f"d_{module.input}")
            inner = []
        yield from (key for each in (*inner, *reversed(self.norms)) for key in each.keys)


def halves_inputs(halves: tuple[HalfSpec, ...]) -> tuple[str, ...]:
    """Names of the activations that a block's matrices multiply, in order of computation."""
    return tuple(dict.fromkeys(m.input for half in halves for m in half.matrices))


def halves_gradients(halves: tuple[HalfSpec, ...]) -> tuple[str, ...]:
    """Names of the gradients of the matrices' and the halves' outputs, in order of computation."""
    found: list[str] = []
    for half in reversed(halves):
        found += [f"d_{half.name}", *(m.gradient for m in reversed(half.matrices))]
    return tuple(dict.fromkeys(found))
