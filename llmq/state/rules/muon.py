"""Muon: the momentum of each matrix of a block with all singular values about 1; AdamW for others.

The change of a matrix with momentum M = U S V' is about U V', times a factor of its sizes: five
steps of Newton and Schulz's iteration, whose products are of BF16. As torch.optim.Muon has it
(Keller Jordan, https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

from math import sqrt

from llmq.base.dtypes import BF16, F64
from llmq.base.tensor import Tensor
from llmq.ops import global_norm, muon
from llmq.ops.matmul import matmul
from llmq.runtime.device import Device
from llmq.state.params import Slab
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.rule import Moment, Part

# (a, b, c) of each step X <- a X + (b A + c A A) X with A = X X'; an odd number of them.
COEFFICIENTS = {
    # The steepest at 0: singular values end between 0.7 and 1.2.
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    # The best of five steps for singular values from 0.001 on (Amsel et al., arXiv 2505.16932), in
    # the margin of 2 % that BF16 needs.
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
MARGIN = {"jordan": 1.0, "polar-express": 1.02}  # the norm is multiplied by it
FACTORS = {
    "original": lambda rows, columns: sqrt(max(1.0, rows / columns)),
    "match-rms": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: sqrt(rows / columns),
}
"""The factor of the change of a matrix with so many rows (outputs) and columns (inputs)."""


class Muon(AdamW):
    """The momentum m of the matrices of blocks, see llmq/ops/muon.py; AdamW's m and v of others."""

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
            momentum=self.options.muon_momentum,
            salt=part.slab.params[0].index,
            first=part.first,
            m_scale=part.scales.get("m"),
        )

    def transform(self, dev: Device, matrix: Tensor, out: Tensor) -> None:
        """Three products a step, of the shorter side with itself and with the matrix. The factor
        of the sizes is in the last one."""
        kind, (rows, columns) = self.options.muon_coefficients, matrix.shape
        tall, side = rows > columns, min(rows, columns)
        with dev.scratch("squares", (global_norm.num_partials(dev, matrix),), F64) as sums:
            global_norm.partials(dev, sums, matrix)
            muon.normalize(dev, matrix, sums, margin=MARGIN[kind])
        coefficients, factor = COEFFICIENTS[kind], FACTORS[self.options.muon_scale](rows, columns)
        with (
            dev.scratch("gram", (side, side), BF16) as gram,
            dev.scratch("polynomial", (side, side), BF16) as polynomial,
        ):
            for step, (a, b, c) in enumerate(coefficients):
                times = factor if step == len(coefficients) - 1 else 1.0
                matmul(dev, gram, matrix, matrix, trans_a=tall, trans_b=not tall)
                matmul(dev, polynomial, gram, gram, addend=gram, alpha=c, beta=b)
                pair = (matrix, polynomial) if tall else (polynomial, matrix)
                matmul(dev, out, *pair, addend=matrix, alpha=times, beta=a * times)
                matrix, out = out, matrix

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
            cautious=options.cautious_decay,
            salt=part.slab.params[0].index,
            first=part.first,
        )
