"""The clock on a device. Its reference has another one, so what is compared is time that passes."""

import time

import numpy as np
import pytest

from llmq.base.dtypes import F64, I32, I64
from llmq.ops.pointwise import clock
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice

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


def test_wrong_tensors():
    dev = PlanDevice(HOST_SPEC)
    at, total = dev.alloc("at", (1,), I64, "Stats"), dev.alloc("total", (2,), F64, "Stats")
    with pytest.raises(TypeError, match="clock_start: at must be I64, got I32"):
        clock.start(dev, dev.alloc("words", (1,), I32, "Stats"))
    with pytest.raises(ValueError, match=r"clock_stop: total must have shape \(1,\), got \(2,\)"):
        clock.stop(dev, total, at)
