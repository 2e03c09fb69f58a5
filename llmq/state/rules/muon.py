"""Muon: the momentum of each matrix of a block with all singular values about 1; AdamW for others.

The change of a matrix with momentum M = U S V' is about U V', times a factor of its sizes: five
steps of Newton and Schulz's iteration, whose products are of BF16. As torch.optim.Muon has it
(Keller Jordan, https://kellerjordan.github.io/posts/muon).

A step multiplies X by a polynomial P of its Gram matrix G = X X', and G becomes P G P. So that of
long matrices some steps in a row are of G alone, and X is multiplied once by the product of their
polynomials. That is the same in exact numbers. BF16 moves eigenvalues of G near 0 as far as those
near 1, and each step multiplies them, so that G has to be made again of X after two or three.
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
from llmq.state.rules.rule import Moment, Part, Whole

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of X <- P X with P = a + b G + c G G: the steepest at 0, as Keller Jordan's code has
them. Singular values end between 0.7 and 1.2."""
SEGMENTS = (3, 2)
"""How many steps follow from one Gram matrix: as many as leave changes as near to those of exact
numbers as steps at full length do (`tests/state/test_muon.py`)."""
LEAST_SIDE = 256  # shorter ones are limited by launches, of which this way has more
LONGER = 1.5  # times the shorter side, from which this way takes fewer FLOPs
MOMENTUM = 0.95  # decay of the momentum, which is Nesterov's: torch.optim.Muon's default
ROWS_DECAY = 0.95  # of NorMuon's mean squares of rows, as its authors have it


def _match_rms(rows: int, columns: int) -> float:
    """The factor of the change of a matrix, (rows, columns). Changes become as large as AdamW's,
    whose learning rates and weight decay then serve (torch's match_rms_adamw)."""
    return 0.2 * sqrt(max(rows, columns))


class Muon(AdamW):
    """The momentum m of the matrices of blocks, see llmq/ops/update/muon.py; AdamW's m and v of
    others."""

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        return slab.is_block

    @classmethod
    def moments_of(cls, slab: Slab) -> tuple[Moment, ...]:
        return cls.moments[:1] if cls.by_matrix(slab) else cls.moments

    def propose(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """One launch."""
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

    def transform(self, dev: Device, matrices: Sequence[Whole]) -> None:
        """Products of all matrices with an equal shorter side are launched together, as far as
        they are of that side alone."""
        together: dict[int, list[Whole]] = {}
        for each in matrices:
            side, longer = sorted(each.proposed.shape[1:])
            if side * side * BF16.itemsize % POINTER_ALIGN:
                # A Gram matrix behind another one would not begin where a product may.
                for one in each.apart():
                    _Iteration(dev, side, [one]).run((1,) * STEPS)
                continue
            # The sign tells those that are iterated at full length.
            by_gram = side >= LEAST_SIDE and longer > LONGER * side
            together.setdefault(side if by_gram else -side, []).append(each)
        for key, of in together.items():
            segments = SEGMENTS if key > 0 else (1,) * STEPS
            _Iteration(dev, abs(key), of).run(segments)

    def apply(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """One launch, at a rate that is a fixed multiple of AdamW's."""
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
    """Muon whose changes are divided, row by row, by the root of a running mean of their squares
    (arXiv 2510.05491)."""

    keeps_rows = True


class _Iteration:
    """Newton-Schulz steps of matrices with one shorter side.

    pairs: (x, out), BF16 (count, rows, columns) each.
    """

    def __init__(self, dev: Device, side: int, matrices: list[Whole]):
        self.dev, self.side = dev, side
        self.pairs = [(each.proposed, each.change) for each in matrices]
        self.rows = [each.rows for each in matrices]

    def run(self, segments: tuple[int, ...]) -> None:
        """segments: how many steps follow from Gram matrices before these are made again."""
        count, full = sum(x.shape[0] for x, _ in self.pairs), max(segments) == 1
        shapes = {x.shape for x, _ in self.pairs}
        # Each lies alone, and all its products are with all of it: together they are packed.
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
                for x, _, own in self._parts(gram):
                    tall = x.shape[1] > x.shape[2]
                    matmul(self.dev, own, x, x, trans_a=tall, trans_b=not tall)
                if length == 1:  # a is not rounded, but a factor of what the product adds
                    beside, by = COEFFICIENTS[0], others[0]
                    self._polynomial(by, gram)
                else:
                    beside, by = 0.0, self._steps(gram, *others, length)
                last = index == len(segments) - 1
                if last and packed:
                    x = self.pairs[0][0]
                    self.pairs = [(x.rows(i, i + 1), out) for i, (_, out) in enumerate(apart)]
                self._multiply(by, beside, last=last)

    def _normalize(self, pairs: list[tuple[Tensor, Tensor]], into: list[Tensor]) -> None:
        for (x, _), to in zip(pairs, into, strict=True):
            muon.normalize(self.dev, to, x)

    def _parts(self, squares: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """x, out, and those of the square matrices (count, side, side) that are theirs."""
        end = 0
        for x, out in self.pairs:
            at, end = end, end + x.shape[0]
            yield x, out, squares.rows(at, end)

    def _polynomial(self, out: Tensor, gram: Tensor) -> None:
        """P without its term a."""
        _, b, c = COEFFICIENTS
        matmul(self.dev, out, gram, gram, addend=gram, alpha=c, beta=b)

    def _steps(self, gram: Tensor, p: Tensor, spare: Tensor, total: Tensor, count: int) -> Tensor:
        """The matrices that `count` steps multiply by. All four are scratch, gram is read, too."""
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

    def _multiply(self, by: Tensor, beside: float, *, last: bool) -> None:
        """x and out are exchanged, where out is (by + beside) x, or of tall matrices x (by +
        beside). The last product has the factor of the sizes, and then rows are scaled."""
        for i, (x, out, own) in enumerate(self._parts(by)):
            rows, columns = x.shape[1:]
            times = _match_rms(rows, columns) if last else 1.0
            operands = (x, own) if rows > columns else (own, x)
            added = {"addend": x, "beta": beside * times} if beside else {}
            matmul(self.dev, out, *operands, alpha=times, **added)
            if last and self.rows[i] is not None:
                muon.even(self.dev, out, self.rows[i], decay=ROWS_DECAY)
            self.pairs[i] = out, x
