"""Declarations of a model's matrices and norms, from which all other code derives names and shapes.

The weight table, codes, fp8 scales, adapters, files, diagnosis, decoding and speed of light follow
from these declarations. `Architecture.layers` returns the halves of each block, such as attention
and MLP; `halves.py` declares the common halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

Order = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of rows, listed in a different order than the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfPart:
    """A tensor of a Hugging Face checkpoint that holds rows [start, stop) of a parameter.

    Rows are counted over all experts of the parameter. transposed: stored (in_features,
    out_features), as in GPT-2's Conv1D. order: ranges of our rows, within each expert, in the order
    of the file; (): the file has our order. columns: number of stored columns; further columns are
    zeros; None: all columns are stored. depthwise: stored (rows, 1, columns), as in torch's Conv1d.
    experts: number of experts in the tensor (experts, rows of one, columns), transposed (experts,
    columns, rows of one), or of vectors (experts, rows of one); 0: the tensor has no axis of
    experts. by_rank: True for adapters of experts, which are stored as (rows of one, columns *
    experts).
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
        """Return the index into `as_stored` for these rows of the stored array; with experts, for
        these experts."""
        if not self.order:
            return rows
        order = [row for start, stop in self.order for row in range(start, stop)]
        return (rows, order) if self.experts and not self.by_rank else order[rows]

    def stored_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the stored ranges of rows [start, stop) of the part, in our order."""
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
        """Return our rows in the layout of the stored array."""
        values = self.as_stored(values)
        values = values[self.rows_of(slice(None))]
        return values.reshape(len(values), -1) if self.by_rank else values

    def as_stored(self, values: Any) -> Any:
        """Return a view of our values with the axes of the stored array and with rows in our order;
        by_rank gives separate axes for columns and experts."""
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
    """The rows of a weight that form one Hugging Face module. module: the module's name. targets:
    names in --lora-targets; the module has an adapter if all of these names are chosen. transposed,
    order, depthwise: the fields of HfPart. experts: if not 0, `module` names a parameter with this
    number of experts."""

    module: str
    rows: int
    targets: tuple[str, ...] = ()
    transposed: bool = False
    order: Order = ()
    depthwise: bool = False
    experts: int = 0

    def tensor(self, name: str) -> str:
        """Return the name of the module's tensor `name`, such as "weight" or "bias"."""
        if not self.experts:
            return f"{self.module}.{name}"
        return self.module if name == "weight" else f"{self.module}_{name}"

    def hf(self, tensor: str, start: int = 0) -> HfPart:
        """Return the HfPart for the part's weight or bias. tensor: "weight" or "bias". start: the
        part's first row in the parameter."""
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
    """A weight of a model, and the weight's bias if there is one.

    key: the weight's name in its block; the bias is KEY_bias. name: the module's name in
    checkpoints. shape: (features,), (out, in), or (experts, out, in), with padded rows. parts: the
    rows that belong to each Hugging Face module, in order. kind: the kind that the optimizer sees:
    "matrix", "embedding", "router", "norm", "vector", "conv" (a few weights per channel) or
    "constant" (F32, never trained); norms, vectors and constants do not decay. initial: "normal",
    "residual" (normal, scaled by 1/sqrt(2L)), "one", "zero" or "log_uniform" (log of a number from
    0.01 to 16). tensor: the weight's name in each Hugging Face module.
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
        """Return the keys of the weight, of its bias and of its adapters, whether or not these
        exist."""
        return (self.key, *(f"{self.key}_{what}" for what in ("bias", "a", "b")))

    @property
    def spans(self) -> list[tuple[Part, int, int]]:
        """Return the parts, each with its rows [start, stop)."""
        stops = accumulate(part.rows for part in self.parts)
        return [(p, stop - p.rows, stop) for p, stop in zip(self.parts, stops, strict=True)]

    def hf(self, tensor: str) -> tuple[HfPart, ...]:
        """Return the HfParts of the weight or of the bias. tensor: "weight" or "bias"."""
        return tuple(part.hf(tensor, start) for part, start, _ in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix(Module):
    """A matrix of a block, which multiplies activations. input: name of the activation that the
    matrix multiplies; gradient: name of the output's gradient; each has an fp8 scale. active:
    number of experts that compute a token. fused: transformers' parameter of all experts, which
    files may hold instead of the parts, and to which adapters may be added."""

    kind: str = "matrix"
    input: str
    gradient: str
    active: int = 1
    fused: Part | None = None

    @property
    def of_experts(self) -> bool:
        """Return True if each of several experts has such a matrix."""
        return len(self.shape) == 3

    @property
    def used(self) -> int:
        """Return the number of elements that are multiplied for each token."""
        return self.active * prod(self.shape[-2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfSpec:
    """A half of a block, such as attention or MLP: the computation from a norm to the addition to
    the residual stream. kind: name of the class in llmq/model/halves. name: the output is called
    NAME_branch, and the output's gradient d_NAME. norm: key of the norm of the input, also the name
    of the input. norms: modules of the norms between the preceding half and this half. modules:
    other modules, in the order of the weight table. output: key of the matrix whose product is the
    half's output; None if the output is not a product. activations: names of the tensors that
    backward reads, in order of computation. made_again: activations that are never kept, because
    the kernel of their gradient recomputes the values. coded: activations and gradients that
    products may write as fp8 codes (--mlp-dtype). cached: by name, shapes of tensors that
    generation keeps for each token; carried: by name, shapes of F32 states that generation keeps
    for each text; reads: the earlier layer whose cached tensors this layer reads, or None. parts:
    halves that are computed side by side and form this half. factor: multiplier of the output's
    product. sizes: further sizes and switches that this kind of half needs. flops: floating-point
    operations per token in forward, without matrices and attention.
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
        """Return True if a norm stands between the residual stream and the half."""
        return any(norm.key == self.norm for norm in self.norms)

    @property
    def computed(self) -> tuple[str, ...]:
        """Return the names of the half's activations in order of computation, from input to
        output."""
        return (self.norm, *self.activations, f"{self.name}_branch")

    @property
    def backward_order(self) -> Iterator[str]:
        """Yield gradients in order of computation: names d_NAME for activations, and keys for
        parameters."""
        yield f"d_{self.name}"
        inner: list[Module] = []  # norms and vectors after a matrix
        for module in reversed(self.modules):
            if not isinstance(module, Matrix):
                inner.insert(0, module)
                continue
            yield from (key for each in inner for key in each.keys)
            yield from (module.gradient, *module.keys, f"d_{module.input}")
            inner = []
        yield from (key for each in (*inner, *reversed(self.norms)) for key in each.keys)


def halves_inputs(halves: tuple[HalfSpec, ...]) -> tuple[str, ...]:
    """Return the names of the activations that a block's matrices multiply, in order of
    computation."""
    return tuple(dict.fromkeys(m.input for half in halves for m in half.matrices))


def halves_gradients(halves: tuple[HalfSpec, ...]) -> tuple[str, ...]:
    """Return the names of the gradients of the outputs of matrices and halves, in order of
    computation."""
    found: list[str] = []
    for half in reversed(halves):
        found += [f"d_{half.name}", *(m.gradient for m in reversed(half.matrices))]
    return tuple(dict.fromkeys(found))
