"""Muon: orthogonalizes the momentum of each matrix of a block; AdamW for other parameters.

A matrix with momentum M = U S V' changes by about U V' times a factor that depends on its shape.
Five steps of Newton-Schulz iteration in BF16 compute U V', as in torch.optim.Muon (Keller Jordan,
https://kellerjordan.github.io/posts/muon).

A step multiplies X by a polynomial P of the Gram matrix G = X X', and G becomes P G P. For long
matrices, several consecutive steps compute G alone, and X is multiplied once by the product of the
steps' polynomials: the same result in exact arithmetic. BF16 moves eigenvalues of G near 0 as far
as eigenvalues near 1, and each step multiplies this error. So G is computed again from X after two
or three steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import sqrt

from llmq.base.dtypes import BF16
from llmq.base.tensor import POINTER_ALIGN, Tensor
from llmq.ops.product.matmul import matmul
from llmq.ops.update import muon
from llmq.runtime.device import Device
from llmq.state.params import Slab
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.rule import FullMatrix, MatrixState, OptimizerState, ShardSlice

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of X <- P X with P = a + b G + c G G: Keller Jordan's values, which have the steepest
slope at 0. The resulting singular values are between 0.7 and 1.2."""
SEGMENTS = (3, 2)
"""Numbers of steps after which G is computed again from X. With these numbers, changes are as close
to exact arithmetic as steps that multiply X each time (`tests/state/test_muon.py`)."""
LEAST_SIDE = 256  # with shorter sides launches take most time, and steps on G need more launches
LONGER = 1.5  # ratio of longer to shorter side above which steps on G need fewer FLOPs
MOMENTUM = 0.95  # decay of Nesterov momentum, as in torch.optim.Muon
ROWS_DECAY = 0.95  # decay of NorMuon's mean squares of rows, as in the paper


def _match_rms(rows: int, columns: int) -> float:
    """Return the factor that multiplies a matrix's change. With this factor changes are as large as
    AdamW's, and AdamW's learning rate and weight decay are suitable (torch's match_rms_adamw)."""
    return 0.2 * sqrt(max(rows, columns))


class Muon(AdamW):
    """Muon with momentum m for matrices of blocks (llmq/ops/update/muon.py); AdamW with m and v for
    other parameters."""

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        return slab.is_block

    @classmethod
    def moments_of(cls, slab: Slab) -> tuple[OptimizerState, ...]:
        return cls.moments[:1] if cls.by_matrix(slab) else cls.moments

    def propose(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Update the momentum and propose changes with one launch."""
        muon.propose(
            dev,
            part.change,
            part.grad,
            part.moments["m"],
            scalars,
            momentum=MOMENTUM,
            salt=part.slab.params[0].index,
            first=part.first,
            m_scale=part.scales.get("m"),
        )

    def transform(
        self, dev: Device, matrices: Sequence[FullMatrix], scalars: Tensor, kind: str
    ) -> None:
        """Orthogonalize all proposed changes. Matrices with equal shorter sides share launches of
        products of (side, side) matrices."""
        together: dict[int, list[FullMatrix]] = {}
        for each in matrices:
            side, longer = sorted(each.proposed.shape[1:])
            if side * side * BF16.itemsize % POINTER_ALIGN:
                # The next Gram matrix would begin at an address that matrix products do not accept.
                for one in each.apart():
                    _Iteration(dev, side, [one]).run((1,) * STEPS)
                continue
            # A negative key marks matrices for which every step multiplies X.
            by_gram = side >= LEAST_SIDE and longer > LONGER * side
            together.setdefault(side if by_gram else -side, []).append(each)
        for key, of in together.items():
            segments = SEGMENTS if key > 0 else (1,) * STEPS
            _Iteration(dev, abs(key), of).run(segments)

    def apply(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Apply the changes with one launch, at a fixed multiple of AdamW's learning rate."""
        options = self.options
        muon.apply(
            dev,
            part.master,
            part.work,
            part.change,
            scalars,
            lr_scale=options.muon_lr / options.learning_rate,
            weight_decay=options.weight_decay,
            salt=part.slab.params[0].index,
            first=part.first,
        )


class NorMuon(Muon):
    """Muon that divides each row of a change by the root of a running mean of the row's squares
    (arXiv 2510.05491)."""

    matrix_states = (
        MatrixState(
            name="rows", group="rows", category="Adam V", dtype=None,
            size=lambda options, rows, columns: rows,
        ),
    )  # fmt: skip


class _Iteration:
    """Newton-Schulz steps of matrices whose shorter sides are equal.

    pairs: (x, out) for each set of matrices of equal shape, both BF16 (count, rows, columns).
    """

    def __init__(self, dev: Device, side: int, matrices: list[FullMatrix]):
        self.dev, self.side = dev, side
        self.pairs = [(each.proposed, each.change) for each in matrices]
        self.rows = [each.states.get("rows") for each in matrices]

    def run(self, segments: tuple[int, ...]) -> None:
        """Run all Newton-Schulz steps. segments: for each newly computed Gram matrix, the number of
        steps."""
        count, full = sum(x.shape[0] for x, _ in self.pairs), max(segments) == 1
        shapes = {x.shape for x, _ in self.pairs}
        # Single matrices of equal shape, whose products all read x, are packed into one tensor to
        # share launches.
        packed = full and count > 1 and shapes == {(1, *self.pairs[0][0].shape[1:])}
        with ExitStack() as temps:

            def scratch(name: str, *shape: int) -> Tensor:
                return temps.enter_context(self.dev.scratch(name, (count, *shape), BF16))

            names = ("gram", "polynomial", "spare", "total")[: 2 if full else 4]
            gram, *others = (scratch(name, self.side, self.side) for name in names)
            apart = self.pairs
            if packed:
                x, out = (scratch(name, *apart[0][0].shape[1:]) for name in ("packed", "result"))
                self._normalize(apart, [x.rows(i, i + 1) for i in range(count)])
                self.pairs = [(x, out)]
            else:
                odd = len(segments) % 2
                self.pairs = [(x, out) if odd else (out, x) for x, out in apart]
                self._normalize(apart, [x for x, _ in self.pairs])
            for index, length in enumerate(segments):
                for x, _, square in self._parts(gram):
                    tall = x.shape[1] > x.shape[2]
                    matmul(self.dev, square, x, x, trans_a=tall, trans_b=not tall)
                if length == 1:  # a multiplies the addend x, and is thus not rounded into p
                    a, p = COEFFICIENTS[0], others[0]
                    self._polynomial(p, gram)
                else:
                    a, p = 0.0, self._steps(gram, *others, length)
                last = index == len(segments) - 1
                if last and packed:
                    x = self.pairs[0][0]
                    self.pairs = [(x.rows(i, i + 1), out) for i, (_, out) in enumerate(apart)]
                self._multiply(p, a, last=last)

    def _normalize(self, pairs: list[tuple[Tensor, Tensor]], into: list[Tensor]) -> None:
        for (x, _), to in zip(pairs, into, strict=True):
            muon.normalize(self.dev, to, x)

    def _parts(self, squares: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (x, out, part of squares) for each pair of `pairs`. squares: (count, side, side),
        with one matrix for each matrix of all pairs."""
        end = 0
        for x, out in self.pairs:
            at, end = end, end + x.shape[0]
            yield x, out, squares.rows(at, end)

    def _polynomial(self, out: Tensor, gram: Tensor) -> None:
        """Set out to the polynomial P of the Gram matrix, without the term a."""
        _, b, c = COEFFICIENTS
        matmul(self.dev, out, gram, gram, addend=gram, alpha=c, beta=b)

    def _steps(self, gram: Tensor, p: Tensor, spare: Tensor, total: Tensor, count: int) -> Tensor:
        """Return the product of the polynomials of `count` steps. gram: the Gram matrices before
        the first step. All four tensors are overwritten."""
        for i in range(count):
            self._polynomial(p, gram)
            muon.diagonal(self.dev, p, COEFFICIENTS[0])
            own = p
            if i == 0:
                p, total = total, p
            else:
                matmul(self.dev, spare, p, total)
                total, spare = spare, total
            if i < count - 1:
                matmul(self.dev, spare, own, gram)
                matmul(self.dev, gram, spare, own)
        return total

    def _multiply(self, p: Tensor, a: float, *, last: bool) -> None:
        """Set out to (p + a) x, or to x (p + a) for tall matrices, and exchange x and out. The last
        product includes the factor `_match_rms`; NorMuon scales rows after the last product."""
        for i, (x, out, square) in enumerate(self._parts(p)):
            rows, columns = x.shape[1:]
            times = _match_rms(rows, columns) if last else 1.0
            operands = (x, square) if rows > columns else (square, x)
            added = {"addend": x, "beta": a * times} if a else {}
            matmul(self.dev, out, *operands, alpha=times, **added)
            if last and self.rows[i] is not None:
                muon.even(self.dev, out, self.rows[i], decay=ROWS_DECAY)
            self.pairs[i] = out, x
