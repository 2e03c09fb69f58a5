"""The weights that a trainer's blocks compute with, whatever they are kept as."""

from __future__ import annotations

import numpy as np

from llmq.base.operand import Fp8, Int8, Operand
from llmq.run.trainer import Trainer
from llmq.state.params import Param
from llmq.state.weights import Weights


def values_of(weights: Weights, operand: Operand) -> np.ndarray:
    """F32, what products take it for."""
    if isinstance(operand, Fp8):
        codes, scale = (weights.dev.download(t) for t in (operand.codes, operand.scale))
        return codes.astype(np.float32) * scale[0]
    if isinstance(operand, Int8):
        codes, scale = (weights.dev.download(t) for t in (operand.codes, operand.scale))
        return codes.astype(np.float32) * scale[:, None]
    return weights.dev.download(operand).astype(np.float32)


def block_weights(trainer: Trainer) -> dict[Param, np.ndarray]:
    """The matrices of all blocks as products read them, of all ranks alike."""

    def read(rank) -> dict[Param, np.ndarray]:
        weights, found = rank.step.weights, {}
        weights.start_micro_step(True)
        for name, slab in weights.slabs.items():
            if slab.is_block:
                weights.gather(name)
                operands = weights.get(name)
                found |= {p: values_of(weights, operands[p.key]) for p in slab.params}
                weights.release(name)
        return found

    first, *others = trainer.ranks.run("reading", read)
    for other in others:
        for param, values in first.items():
            np.testing.assert_array_equal(other[param], values)
    return first
