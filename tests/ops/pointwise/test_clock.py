"""The clock on a device. Its reference has another one, so what is compared is time that passes."""

import time

import numpy as np
import pytest

from llmq.base.dtypes import F64, I64
from llmq.ops.pointwise import clock

SECONDS = 0.02


@pytest.fixture
def tensors(dev):
    at, total = (dev.alloc(n, (1,), t, "Activations") for n, t in (("at", I64), ("total", F64)))
    dev.upload(total, np.full(1, 5.0))
    return at, total


def test_spans_add_up_and_what_lies_between_does_not(dev, tensors):
    at, total = tensors
    clock.start(dev, at)  # compiles
    clock.stop(dev, total, at)
    dev.upload(total, np.full(1, 5.0))
    begin = time.perf_counter()
    for pause in (SECONDS, 0.0, SECONDS):
        clock.start(dev, at)
        dev.synchronize()
        time.sleep(pause)
        clock.stop(dev, total, at)
        dev.synchronize()
    around = 1e3 * (time.perf_counter() - begin)
    measured = dev.download(total)[0] - 5
    # Two clocks: 1 % is more than they drift apart, and what the timer's steps leave out.
    assert 0.99 * 2e3 * SECONDS <= measured <= 1.01 * around
    begin = time.perf_counter()
    clock.start(dev, at)
    clock.stop(dev, total, at)
    dev.synchronize()
    assert 0 <= dev.download(total)[0] - 5 - measured <= 1e3 * (time.perf_counter() - begin)
