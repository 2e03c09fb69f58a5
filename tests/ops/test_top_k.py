"""The largest logits on a device against their reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.top_k import top_k
from llmq.ref.top_k import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import compared


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", [CASES[name] for name in ("smallest", "few", "many", "all")])
def test_equals_reference(dev, rng, case, dtype):
    """In BF16 many logits are equal."""
    rows, vocab, padded, k = case
    logits = rng.normal(size=(rows, padded)).astype(dtype.numpy)
    logits[:, vocab:] = np.nan
    logits[0, : vocab // 2] = 0.5
    arrays = {"logits": logits, "lse": rng.random(rows).astype(np.float32)}
    arrays["told"] = np.full((rows, 2 * k), np.nan, np.float32)

    def call(dev, **tensors):
        top_k(dev, **tensors, vocab_size=vocab)

    found = compared(dev, call, arrays)
    assert (np.diff(found["told"][:, :k].view(np.int32), axis=1) > 0).all()


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Weights")

    with pytest.raises(ValueError, match=r"top_k: k must be in 1..255 and at most 16, got 17"):
        top_k(dev, make(2, 34), make(2, 32), make(2), 16)
    with pytest.raises(TypeError, match="top_k: told must be F32, got I32"):
        top_k(dev, make(2, 8, dtype=I32), make(2, 32), make(2), 16)
