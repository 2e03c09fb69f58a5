"""An update rule declares these; slabs, checkpoints and plans follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, F32, DType, parse_dtype
from llmq.base.tensor import Tensor
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device
from llmq.state.params import Slab

SCALES = ".scales"
"""Ending of the groups of checkpoints that hold scales, after the group of what has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A number for each element that is trained, which the rule keeps from update to update. name:
    of its tensors and its column of [Placement]. group: of its files in checkpoints. category: of
    its memory. dtype, offload: the options that give its format, if it has no other than F32, and
    put it into host memory. In E4M3 it has scales, F32, one for SCALE_BLOCK elements. It is zero at
    the start."""

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


ROWS = "rows"
"""The group of checkpoints with the numbers of rows, see UpdateRule; F32."""


class Part(NamedTuple):
    """The elements that one call of a rule updates: n elements of a slab from element `first` on.
    master inout F32 or BF16 (n,). work: out BF16 (n,), the master rounded to nearest, or None.
    grad: F32 or BF16 (n,), the sum over tokens. moments: inout (n,) by name. scales: inout F32 (n /
    SCALE_BLOCK,), by name, of the moments that are E4M3. segments: I64 (S, 2), as Slab.segments.
    change: (n,) in the rule's `of_change`, which `propose` writes, and `apply` reads: the one gets
    no master, and the other no gradient."""

    slab: Slab
    first: int
    segments: Tensor
    master: Tensor | None
    work: Tensor | None
    grad: Tensor | None
    moments: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    change: Tensor | None


class Whole(NamedTuple):
    """Neighbouring matrices of equal sizes, as whole as Hugging Face has them. proposed: (count,
    rows, columns), which may be overwritten. change: the same, which must lie there in the end.
    rows: inout F32 (count, rows), zero at the start, where the rule keeps such."""

    proposed: Tensor
    change: Tensor
    rows: Tensor | None

    def apart(self) -> Iterator[Whole]:
        """The matrices one by one, (1, rows, columns) each."""
        for i in range(self.proposed.shape[0]):
            yield Whole(*(tensor and tensor.rows(i, i + 1) for tensor in self))


class UpdateRule(ABC):
    """How gradients change weights. moments: in the order of their memory. of_change: the format of
    a change. keeps_rows: a run keeps a number for each row of whole matrices, on the rank that
    updates the matrix. begun: the step, of those that count from 0, at which the moments were zero.
    Bytes and launches of an update are those of the kernels that it launches."""

    moments: ClassVar[tuple[Moment, ...]]
    of_change: ClassVar[DType] = BF16
    keeps_rows: ClassVar[bool] = False
    begun = 0

    def __init__(self, options: OptimOptions):
        """options: normalized; they are baked into captured launches."""
        self.options = options

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        """Whether the change of a slab's matrix depends on all of it: then the slab passes through
        `propose`, `transform` and `apply`, and not through `update`."""
        return False

    @classmethod
    def moments_of(cls, slab: Slab) -> tuple[Moment, ...]:
        """Those of the moments that are kept of a slab."""
        return cls.moments

    @abstractmethod
    def prepare(self, scalars: np.void, step: int) -> None:
        """Fill what only this rule reads of StepScalars; steps since `begun`, counted from 1."""

    @abstractmethod
    def update(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """Update a part, except where scalars.skip_update is set. scalars: I32 (16,) StepScalars.
        Only launches."""

    def propose(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """Update the moments of a part, as `update` does, and write the change that is proposed; 0
        where there is neither gradient nor moment, and of a step that is skipped."""
        raise NotImplementedError

    def transform(self, dev: Device, matrices: Sequence[Whole]) -> None:
        """Make what is proposed for whole matrices into their changes."""
        raise NotImplementedError

    def apply(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """Change the master of a part, as `update` does."""
        raise NotImplementedError
