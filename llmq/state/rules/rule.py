"""The interface of update rules: a rule declares its states, from which slabs, checkpoints and
memory plans follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, F32, DType, parse_dtype
from llmq.base.tensor import Tensor
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device
from llmq.state.params import Slab

SCALES = ".scales"
"""Suffix of the names of checkpoint groups that hold scales of another group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """A state that a rule keeps between updates, one number per trained element; zero at the start.
    name: name of the state's tensors, also in Placement. group: name of the state's files in
    checkpoints. category: category of the state's memory. dtype: name of the option that sets the
    dtype; None: F32. offload: name of the option that moves the state to host memory. A state in
    E4M3 has F32 scales, one per SCALE_BLOCK elements."""

    name: str
    group: str
    category: str
    dtype: str | None
    offload: str

    def format(self, options: OptimOptions) -> DType:
        return F32 if self.dtype is None else parse_dtype(getattr(options, self.dtype))

    @property
    def scales_group(self) -> str:
        return f"{self.group}{SCALES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixState:
    """A state that a rule keeps for each whole matrix, on the rank that transforms the matrix; zero
    at the start. name: name of the state in FullMatrix. group: name of the state's files in
    checkpoints. category: category of the state's memory. dtype: name of the option that sets the
    dtype; None: F32; "gradient": the dtype of gradients. size: function that returns the number of
    elements for a matrix of (rows, columns). For a state in E4M3 this number is a multiple of
    SCALE_BLOCK, and F32 scales are kept beside the elements."""

    name: str
    group: str
    category: str
    dtype: str | None
    size: Callable[[OptimOptions, int, int], int]

    def format(self, options: OptimOptions, gradient: DType) -> DType:
        if self.dtype is None:
            return F32
        return gradient if self.dtype == "gradient" else parse_dtype(getattr(options, self.dtype))

    def slab(self, options: OptimOptions, slab: Slab) -> Slab:
        """Return the slab that holds this state for all matrices of `slab`."""
        return slab.per_matrix(partial(self.size, options))

    @property
    def scales_group(self) -> str:
        return f"{self.group}{SCALES}"


class ShardSlice(NamedTuple):
    """The elements that one call of a rule updates: n elements of a slab, beginning with element
    `first`. master: inout F32 or BF16 (n,). work: out BF16 (n,), the master rounded to nearest;
    None if no work weights are written. grad: F32 or BF16 (n,), the gradient summed over tokens.
    moments: inout (n,), by name of the moment. scales: inout F32 (n / SCALE_BLOCK,), by the name of
    an E4M3 moment. segments: I64 (S, 2), see Slab.segments. change: (n,) in the dtype of changes;
    `propose` writes the change and `apply` reads it. `propose` gets no master, and `apply` gets no
    gradient."""

    slab: Slab
    first: int
    segments: Tensor
    master: Tensor | None
    work: Tensor | None
    grad: Tensor | None
    moments: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    change: Tensor | None


class FullMatrix(NamedTuple):
    """Adjacent whole matrices of equal shape, divided as in the Hugging Face model. proposed:
    (count, rows, columns), which the rule may overwrite. change: out (count, rows, columns).
    states: inout (count, size), by the name of a MatrixState. scales: inout F32 (count, size /
    SCALE_BLOCK), by the name of an E4M3 state. number: index of the first matrix in its slab. salt:
    a number unique to the slab, for random numbers. segments: I64 (S, 2), as Slab.segments
    returns."""

    proposed: Tensor
    change: Tensor
    states: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    number: int
    salt: int
    segments: Tensor | None

    def apart(self) -> Iterator[FullMatrix]:
        """Yield the matrices one at a time, each (1, rows, columns)."""
        for i in range(self.proposed.shape[0]):
            yield self._replace(
                proposed=self.proposed.rows(i, i + 1),
                change=self.change.rows(i, i + 1),
                states={name: t.rows(i, i + 1) for name, t in self.states.items()},
                scales={name: t.rows(i, i + 1) for name, t in self.scales.items()},
                number=self.number + i,
            )


class UpdateRule(ABC):
    """The rule by which gradients change weights. moments, matrix_states: the states that the rule
    keeps, in the order of their memory. of_change: dtype of a proposed change; None: the dtype of
    gradients. kinds: names of the kinds of updates; updates of one kind launch the same kernels.
    fixed: names of options that a continued run must not change. begun: the step, counted from 0,
    at which the moments were zero.
    zero."""

    moments: ClassVar[tuple[OptimizerState, ...]]
    matrix_states: ClassVar[tuple[MatrixState, ...]] = ()
    of_change: ClassVar[DType | None] = BF16
    kinds: ClassVar[tuple[str, ...]] = ("update",)
    fixed: ClassVar[tuple[str, ...]] = ()
    begun = 0

    def __init__(self, options: OptimOptions):
        """options: with defaults filled in; captured launches contain the options' values."""
        self.options = options

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        """Return True if the change of a matrix depends on the whole matrix. Such a slab passes
        through `propose`, `transform` and `apply`, not through `update`."""
        return False

    @classmethod
    def moments_of(cls, slab: Slab) -> tuple[OptimizerState, ...]:
        """Return the moments that the rule keeps for a slab."""
        return cls.moments

    @abstractmethod
    def prepare(self, scalars: np.void, step: int) -> None:
        """Write the fields of StepScalars that this rule reads. step: the number of the step since
        `begun`, counted from 1."""

    @abstractmethod
    def update(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Enqueue the update of the elements, which does nothing if scalars.skip_update is set.
        scalars: I32 (16,) StepScalars."""

    def propose(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Update the moments and write the proposed change. The change is 0 where gradient and
        moment are 0, and everywhere in a skipped step."""
        raise NotImplementedError

    def kind(self, step: int) -> str:
        """Return the kind of update that a step, counted from 0, performs."""
        return self.kinds[0]

    def transform(
        self, dev: Device, matrices: Sequence[FullMatrix], scalars: Tensor, kind: str
    ) -> None:
        """Replace the proposed changes of whole matrices by final changes. scalars: I32 (16,)
        StepScalars. kind: the kind of update of the step."""
        raise NotImplementedError

    def apply(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Apply the final change to the master, and write work weights as `update` does."""
        raise NotImplementedError
