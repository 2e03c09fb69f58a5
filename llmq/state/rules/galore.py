"""GaLore: AdamW on gradients projected to few directions; plain AdamW for other parameters.

A gradient G that is at least as wide as tall becomes P G; the rows of P are the r leading left
singular vectors of the gradient at the last renewal. AdamW keeps the moments of P G. A weight
changes by alpha P' S: S is AdamW's step for P G, P' the transpose of P, and alpha the option
--galore-scale. A gradient that is taller than wide becomes G P', and P has right singular vectors
(Zhao et al., https://arxiv.org/abs/2403.03507; the package galore-torch).

Singular vectors come from a randomized range finder (Halko et al.,
https://arxiv.org/abs/0909.4061): r + MORE random directions are multiplied alternately by the
gradient and by its transpose, and made orthonormal after each product. If Y is the gradient in
these directions, the singular vectors follow from the eigenvectors of the small matrix Y Y'. All
large products are computed by matrix products of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from llmq.base.dtypes import F32, I32, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import SCALE_BLOCK
from llmq.ops.pointwise import elementwise
from llmq.ops.product.matmul import matmul
from llmq.ops.update import adamw, galore, muon
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.arena import align_up
from llmq.runtime.device import Device
from llmq.state.params import Slab
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.rule import FullMatrix, MatrixState, OptimizerState, ShardSlice

MORE = 8  # number of random directions beyond the rank
POWERS = 2  # number of multiplications by the gradient and its transpose
TRACE = 1e-6  # factor of random numbers added to directions, which remain if the gradient is zero
RENEWAL = "renewal"


def _rank(options: OptimOptions, rows: int, columns: int) -> int:
    return min(options.galore_rank, rows, columns)


def _projection_size(options: OptimOptions, rows: int, columns: int) -> int:
    return align_up(_rank(options, rows, columns) * min(rows, columns), SCALE_BLOCK)


def _moment_size(options: OptimOptions, rows: int, columns: int) -> int:
    return align_up(_rank(options, rows, columns) * max(rows, columns), SCALE_BLOCK)


class GaLore(AdamW):
    """GaLore for matrices of blocks, with moments m and v of projected gradients; AdamW with
    moments m and v for other parameters."""

    matrix_states = (
        MatrixState(
            name="projection", group="galore.projection", category="Projections",
            dtype="gradient", size=_projection_size,
        ),
        MatrixState(
            name="m", group="galore.m", category="Adam M", dtype="opt_m_dtype", size=_moment_size
        ),
        MatrixState(
            name="v", group="galore.v", category="Adam V", dtype="opt_v_dtype", size=_moment_size
        ),
    )  # fmt: skip
    of_change = None
    kinds = ("update", RENEWAL)
    fixed = ("galore_rank",)

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        return slab.is_block

    @classmethod
    def moments_of(cls, slab: Slab) -> tuple[OptimizerState, ...]:
        return () if cls.by_matrix(slab) else cls.moments

    def kind(self, step: int) -> str:
        """Return RENEWAL for every --galore-period-th step, beginning with step 0."""
        return self.kinds[(step - self.begun) % self.options.galore_period == 0]

    def propose(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Copy the gradient as the proposed change."""
        dev.copy(part.change, part.grad)

    def transform(
        self, dev: Device, matrices: Sequence[FullMatrix], scalars: Tensor, kind: str
    ) -> None:
        """Replace gradients by changes at learning rate 1, one matrix after another."""
        options = self.options
        apart = [_Projected(dev, one, options) for each in matrices for one in each.apart()]
        if kind == RENEWAL:
            together: dict[tuple[int, int], list[_Projected]] = {}
            for i, each in enumerate(apart):
                # After a (k, k) matrix with odd k, the next matrix would not be aligned to 16
                # bytes.
                alone = i if each.directions % 2 else -1
                together.setdefault((each.directions, alone), []).append(each)
            for same in together.values():
                _renew(dev, same, scalars)
        with dev.scratch("scalars", scalars.shape, I32) as at_rate_one:
            dev.copy(at_rate_one, scalars)
            elementwise.fill(dev, at_rate_one.rows(0, 1).view_as(F32), 1.0)  # the learning rate
            for each in apart:
                each.change(at_rate_one)

    def apply(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Apply the changes with one launch, at AdamW's learning rate."""
        muon.apply(
            dev,
            part.master,
            part.work,
            part.change,
            scalars,
            lr_scale=1.0,
            weight_decay=self.options.weight_decay,
            salt=part.slab.params[0].index,
            first=part.first,
        )


class _Projected:
    """A matrix and its GaLore state. gradient, out: (rows, columns). projection: (rank, shorter
    side). directions: number of random directions that a renewal uses. shorter, longer: lengths of
    the matrix's sides."""

    def __init__(self, dev: Device, matrix: FullMatrix, options: OptimOptions):
        self.dev, self.matrix, self.options = dev, matrix, options
        _, rows, columns = matrix.proposed.shape
        self.tall = rows >= columns  # as in galore-torch, where a square gradient is tall
        self.rank, self.shorter = _rank(options, rows, columns), min(rows, columns)
        self.longer = max(rows, columns)
        self.directions = min(self.rank + MORE, self.shorter)
        self.gradient = matrix.proposed.view(rows, columns)
        self.out = matrix.change.view(rows, columns)
        of_state = matrix.states["projection"]
        kept = of_state.view(of_state.size).rows(0, self.rank * self.shorter)
        self.projection = kept.view(self.rank, self.shorter)
        self.salt = (matrix.number + 1) << 16 | matrix.salt  # differs between matrices

    @property
    def dtype(self) -> DType:
        return self.gradient.dtype

    def random(self, out: Tensor) -> None:
        """Fill the F32 tensor `out` with random numbers, the same in each call."""
        elementwise.normal(self.dev, out, 1.0, self.options.seed << 32 | self.salt)

    def rounded(self, temps: ExitStack, x: Tensor) -> Tensor:
        """Return the F32 tensor x in the gradient's dtype, for products with the gradient."""
        if self.dtype is F32:
            return x
        made = temps.enter_context(self.dev.scratch("rounded", x.shape, self.dtype))
        elementwise.convert(self.dev, made, x)
        return made

    def along(self, out: Tensor, x: Tensor, *, back: bool = False) -> None:
        """Multiply directions x, F32 (k, shorter), by the gradient, and write the product to out,
        F32 (k, longer). If back is True, multiply x (k, longer) by the gradient's transpose, and
        write out (k, shorter)."""
        with ExitStack() as temps:
            x = self.rounded(temps, x)
            matmul(self.dev, out, x, self.gradient, trans_b=self.tall != back)

    def change(self, scalars: Tensor) -> None:
        """Update the moments, and write the change for learning rate 1. scalars: the step's scalars
        with learning rate 1."""
        dev, options, matrix = self.dev, self.options, self.matrix
        states = {name: tensor.view(tensor.size) for name, tensor in matrix.states.items()}
        scales = {name: tensor.view(tensor.size) for name, tensor in matrix.scales.items()}
        size, used = states["m"].size, self.rank * self.longer
        shape = (self.longer, self.rank) if self.tall else (self.rank, self.longer)
        with ExitStack() as temps:
            grad, small = (
                temps.enter_context(dev.scratch(name, (size,), F32)) for name in ("low", "small")
            )
            if used < size:
                dev.zero(grad)
            low, operands = grad.rows(0, used).view(*shape), (self.gradient, self.projection)
            matmul(dev, low, *operands[:: 1 if self.tall else -1], trans_b=self.tall)
            dev.zero(small)  # AdamW subtracts its step from zeros, giving the change
            adamw.update(
                dev,
                small,
                None,
                grad,
                states["m"],
                states["v"],
                matrix.segments,
                scalars,
                beta1=options.beta_1,
                beta2=options.beta_2,
                epsilon=options.adam_epsilon,
                weight_decay=0.0,
                salt=self.salt,
                m_scale=scales.get("m"),
                v_scale=scales.get("v"),
            )
            moved = self.rounded(temps, small.rows(0, used).view(*shape))
            pair = (moved, self.projection)[:: 1 if self.tall else -1]
            matmul(dev, self.out, *pair, trans_a=not self.tall, alpha=-options.galore_scale)


def _renew(dev: Device, matrices: list[_Projected], scalars: Tensor) -> None:
    """Compute new projections of matrices with equal numbers of directions, unless the step is
    skipped. Each stage processes all matrices, so that one launch computes all eigenvectors."""
    count, k = len(matrices), matrices[0].directions
    with ExitStack() as temps:

        def scratch(name: str, *shape: int) -> Tensor:
            return temps.enter_context(dev.scratch(name, shape, F32))

        small = scratch("small", count, k, k)
        xs, spare = ([scratch(name, k, each.longer) for each in matrices] for name in ("x", "y"))

        def of(i: int) -> Tensor:
            return small.rows(i, i + 1).view(k, k)

        def part(x: Tensor, columns: int) -> Tensor:
            return x.view(x.size).rows(0, k * columns).view(k, columns)

        def orthonormal(sides: list[int]) -> None:
            """Replace the rows of xs by orthonormal bases."""
            nonlocal xs, spare
            made = [part(x, side) for x, side in zip(xs, sides, strict=True)]
            for i, x in enumerate(made):
                matmul(dev, of(i), x, x, trans_b=True)
            galore.eigen(dev, small, roots=True)
            for i, (each, x) in enumerate(zip(matrices, made, strict=True)):
                with dev.scratch("trace", x.shape, F32) as trace:
                    each.random(trace)
                    out = part(spare[i], sides[i])
                    matmul(dev, out, of(i), x, addend=trace, beta=TRACE)
            xs, spare = spare, xs

        def multiply(sides: list[int], *, back: bool) -> None:
            nonlocal xs, spare
            for each, x, to, side in zip(matrices, xs, spare, sides, strict=True):
                source, target = (each.longer, side) if back else (each.shorter, side)
                each.along(part(to, target), part(x, source), back=back)
            xs, spare = spare, xs

        shorter, longer = ([getattr(m, name) for m in matrices] for name in ("shorter", "longer"))
        for each, x in zip(matrices, xs, strict=True):
            each.random(part(x, each.shorter))
        for _ in range(POWERS):
            multiply(longer, back=False)
            orthonormal(longer)
            multiply(shorter, back=True)
            orthonormal(shorter)
        orthonormal(shorter)  # again, as rounding leaves small directions oblique
        for i, each in enumerate(matrices):
            along = part(spare[i], each.longer)
            each.along(along, part(xs[i], each.shorter))
            matmul(dev, of(i), along, along, trans_b=True)
        galore.eigen(dev, small)
        for i, each in enumerate(matrices):
            made = part(spare[i], each.shorter).rows(0, each.rank)
            matmul(dev, made, of(i).rows(0, each.rank), part(xs[i], each.shorter))
            galore.renew(dev, each.projection, made, scalars)
