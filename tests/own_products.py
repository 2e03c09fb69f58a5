"""Helpers of the tests of our own products for Hopper."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llmq.base.dtypes import F32, I32, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import num_sums
from llmq.runtime.mesh import Mesh
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC


def whole(rng: np.random.Generator, dtype: DType, *shape: int) -> np.ndarray:
    """Small integers: sums of their products are exact in any order."""
    return rng.integers(-3, 4, shape).astype(np.float32).astype(dtype.numpy)


def arrays_of_logits(
    rng: np.random.Generator, M: int, N: int, vocab: int, dtype: DType, spread: float
) -> dict[str, np.ndarray]:
    """Results of a product of logits with exponentials of this dtype behind it, and rows' operands.

    spread: of shifts. A quarter of the rows is masked.
    """
    targets = rng.integers(0, vocab, M).astype(np.int32)
    targets[:3] = vocab - 1, 0, 64
    targets[3::4] = -100
    return {
        "e": np.full((M, N), np.nan, dtype.numpy),
        "sums": np.full((num_sums(N), M), np.nan, np.float32),
        "target_logits": np.full(M, -7, np.float32),
        "shift": rng.normal(size=M).astype(np.float32) * spread,
        "targets": targets,
    }


def wrong_logits(dev: PlanDevice, dtype: DType, of_e: DType) -> tuple[dict, list[tuple]]:
    """Arguments of such a product of operands of this dtype, in a plan; and what it refuses in
    place of some, with the error and its message."""

    def tensor(dtype: DType, *shape: int) -> Tensor:
        return dev.alloc("t", shape, dtype, "Weights")

    row, sums = tensor(F32, 32), tensor(F32, 1, 32)
    right = {"e": tensor(of_e, 32, 96), "sums": sums, "target_logits": row, "shift": row}
    right |= {"a": tensor(dtype, 32, 64), "b": tensor(dtype, 96, 64), "targets": tensor(I32, 32)}
    return right | {"vocab_size": 90}, [
        ({"e": tensor(F32, 32, 96)}, TypeError, f"e must be {of_e.label}, got F32"),
        ({"sums": row}, ValueError, r"sums must have shape \(1, 32\)"),
        ({"target_logits": sums}, ValueError, r"target_logits must have shape \(32,\)"),
        ({"b": tensor(dtype, 96, 32)}, ValueError, r"b must have shape \(96, 64\)"),
        ({"shift": sums}, ValueError, r"shift must have shape \(32,\)"),
        ({"targets": row}, TypeError, "targets must be I32, got F32"),
        ({"vocab_size": 97}, ValueError, r"vocab_size must be in \[1, 96\], got 97"),
    ]


def devices_without() -> Iterator[PlanDevice]:
    """Devices that none of them serves: of other capabilities, and with another GPU beside it."""
    for capability in (89, 100):
        yield PlanDevice(replace(GPU_SPEC, capability=capability))
    yield PlanDevice(GPU_SPEC, mesh=Mesh.of(2, 0))
