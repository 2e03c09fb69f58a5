"""Host and plan device: the same calls, once done and once counted."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.pointwise import elementwise
from llmq.runtime.device import HOST_SPEC, Device, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.plan_device import PlanDevice

SIZES = MemorySizes(device=1 << 12, stack=1 << 12, pinned=1 << 12)


def work(dev: Device):
    """A bit of everything; returns x = [3, 3, 3, 3] and the pinned copy of it."""
    x = dev.alloc("x", (4,), F32, "Activations")
    pinned = dev.alloc("p", (4,), F32, "Activations", place="pinned")
    elementwise.fill(dev, x, 3.0)
    with dev.scratch("temporary", (100,), BF16) as temporary:
        dev.zero(temporary)
    event = dev.event()
    with dev.on("copy"):
        dev.copy(pinned, x)
        dev.record(event)
    dev.wait(event)
    event.synchronize()
    dev.graph(("g",), lambda: dev.copy(x, pinned))
    with dev.range("nothing"):
        dev.synchronize()
    return x, pinned


def test_the_host_does_it():
    dev = HostDevice(SIZES)
    x, pinned = work(dev)
    assert dev.download(x).tolist() == [3.0] * 4
    assert pinned.numpy().tolist() == [3.0] * 4
    assert dev.download(x) is not x.numpy()


def test_the_plan_counts_what_the_host_does():
    plan, host = PlanDevice(HOST_SPEC), HostDevice(SIZES)
    work(plan)
    work(host)
    assert plan.sizes() == MemorySizes(device=256, stack=256, pinned=256)
    assert plan.sizes() == MemorySizes(
        device=host.arenas["device"].used,
        stack=host.stack.high_water_mark,
        pinned=host.arenas["pinned"].used,
    )
    assert plan.bytes["copy"] == 2 * 32
    assert plan.bytes["zero"] == 200
    assert plan.launches["copy"] == 2
    assert {str(source) for source in plan.sources} == {"fill T=f32"}


def test_a_plan_is_enough_for_the_host():
    plan = PlanDevice(HOST_SPEC)
    work(plan)
    work(HostDevice(plan.sizes()))
    with pytest.raises(MemoryError):
        work(HostDevice(MemorySizes(**plan.sizes() | {"device": 0})))


@pytest.mark.parametrize("make", [lambda: HostDevice(SIZES), lambda: PlanDevice(HOST_SPEC)])
def test_both_check_their_arguments(make):
    dev = make()
    x, y = dev.alloc("x", (4,), F32, "Weights"), dev.alloc("y", (4,), BF16, "Weights")
    with pytest.raises(ValueError, match=r"copy: x F32 \[4\] and y BF16 \[4\] differ in size"):
        dev.copy(x, y)
    for array in (np.zeros(5, np.float32), np.zeros(4)):
        with pytest.raises(ValueError, match=r"upload: x F32 \[4\] given float"):
            dev.upload(x, array)
    with pytest.raises(TypeError, match="arguments given"):
        dev.launch(elementwise.FILL, 1, 32, (x,))


def test_the_plan_has_no_content():
    dev = PlanDevice(HOST_SPEC)
    x = dev.alloc("x", (4,), F32, "Weights")
    with pytest.raises(RuntimeError, match="no content"):
        dev.download(x)
    dev.upload(x, np.zeros(4, np.float32))


@pytest.mark.parametrize("watched", [False, True])
def test_the_host_keeps_what_it_replays(watched):
    """References are called again, with what tensors hold by then; nothing else of fn is run."""
    dev, ran = HostDevice(SIZES, poison=watched), []
    x, y = (dev.alloc(name, (4,), F32, "Activations") for name in "xy")

    def fn():
        ran.append(True)
        with dev.scratch("temporary", (4,), F32) as temporary:
            dev.copy(temporary, x)
            elementwise.add(dev, y, temporary, x)

    for value in (1, 2, 3):
        dev.upload(x, np.full(4, value, np.float32))
        dev.replay(("k",), fn)
        assert dev.download(y).tolist() == [2.0 * value] * 4
    assert len(ran) == (3 if watched else 1)


def test_poison():
    dev = HostDevice(SIZES, poison=True)
    x = dev.alloc("x", (4,), BF16, "Weights")
    assert np.isnan(x.numpy().astype(np.float32)).all()
    for _ in range(2):  # also where the stack is used again
        with dev.scratch("t", (4,), F32) as t:
            assert np.isnan(t.numpy()).all()
            t.numpy()[...] = 1


def test_host_memory_is_aligned():
    dev = HostDevice(SIZES)
    for place in ("device", "pinned"):
        assert dev.alloc("x", (1,), F32, "Weights", place).ptr % 256 == 0
    with dev.scratch("t", (1,), F32) as t:
        assert t.ptr % 256 == 0


def test_functions_stand_in_for_methods_for_a_while():
    dev = HostDevice(SIZES)
    said, x = [], dev.alloc("x", (4,), F32, "Weights")

    def noting(who, zero):
        return lambda tensor: (said.append(who), zero(tensor))

    with dev.instead(zero=noting("outer", dev.zero)):
        with pytest.raises(KeyError), dev.instead(zero=noting("inner", dev.zero)):
            dev.zero(x)
            raise KeyError
        dev.zero(x)
    dev.zero(x)
    assert said == ["inner", "outer", "outer"]
    assert dev.download(x).tolist() == [0.0] * 4
