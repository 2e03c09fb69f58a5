"""Run one operation on any device: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from llmq.base.dtypes import BF16, DTYPES, STEP_SCALARS, DType
from llmq.runtime.device import Device, DeviceSpec, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.plan_device import PlanDevice

MIB = 1 << 20
GPU_SPEC = DeviceSpec(
    name="GPU", capability=90, num_sms=8, memory=1 << 30, library_workspace=4 * MIB
)
SIZES = MemorySizes(device=256 * MIB, stack=256 * MIB, pinned=16 * MIB)


def host_device() -> HostDevice:
    """The reference device, with memory that reads as NaN until written."""
    return HostDevice(SIZES, poison=True)


def devices_without() -> Iterator[PlanDevice]:
    """Devices that no product of our own serves: those of other capabilities."""
    for capability in (89, 100):
        yield PlanDevice(replace(GPU_SPEC, capability=capability))


def dtype_of(array: np.ndarray) -> DType:
    """The llmq dtype of a NumPy array."""
    return next(d for d in DTYPES.values() if d.numpy == array.dtype)


def step_scalars(**values: float) -> np.ndarray:
    """An I32 (16,) StepScalars array with these fields set, the others zero."""
    words = np.zeros(16, np.int32)
    record = words.view(STEP_SCALARS)[0]
    for name, value in values.items():
        record[name] = value
    return words


def run(dev: Device, call: Callable, arrays: dict[str, np.ndarray | None]) -> dict:
    """Upload the arrays, call(dev, **tensors), download them all again.

    None stays None. Pass NaN-filled arrays for outputs: an element the op forgets stays NaN.
    """
    tensors = {}
    for name, array in arrays.items():
        if array is None:
            tensors[name] = None
            continue
        tensors[name] = dev.alloc(name, array.shape, dtype_of(array), "Activations")
        dev.upload(tensors[name], np.ascontiguousarray(array))
    call(dev, **tensors)
    dev.synchronize()
    return {k: None if t is None else dev.download(t) for k, t in tensors.items()}


def close(dev, call, arrays, names, *, bf16: float, f32: float) -> dict:
    """The device's results, of which those named are near the reference's: relative tolerances."""
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in names:
        a, b = got[name].astype(np.float32), want[name].astype(np.float32)
        rtol = bf16 if got[name].dtype == BF16.numpy else f32
        np.testing.assert_allclose(a, b, rtol=rtol, atol=f32)
    return got


def compared(dev, call, arrays) -> dict:
    """The reference's results for these arrays, of which the device makes the same bits."""
    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in (name for name, array in arrays.items() if array is not None):
        np.testing.assert_array_equal(got[name].view(np.uint8), want[name].view(np.uint8))
    return want
