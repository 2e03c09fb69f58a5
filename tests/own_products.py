"""What the tests of our own products for Hopper share."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llmq.base.dtypes import DType
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC


def whole(rng: np.random.Generator, dtype: DType, *shape: int) -> np.ndarray:
    """Small integers: sums of their products are exact in any order."""
    return rng.integers(-3, 4, shape).astype(np.float32).astype(dtype.numpy)


def devices_without() -> Iterator[PlanDevice]:
    """Devices that none of them serves: of other capabilities, and with another GPU beside it."""
    for capability in (89, 100):
        yield PlanDevice(replace(GPU_SPEC, capability=capability))
    yield PlanDevice(GPU_SPEC, rank=0, world_size=2)
