"""A tensor is a contiguous typed range of an arena; a tier is a kind of memory.

Only this module says which processors and copies can access a tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import DType


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of memory. on_host: True if the memory lies on the host, so that an update has to copy
    its content to the device. direct: True if kernels and collectives can access the memory; False
    if only copies can. in_ram: True if the memory is the machine's RAM. cached: True if the CPU
    reads the memory at full speed. align: alignment of tensors in bytes; 256 is enough for
    cuBLASLt, cuDNN and 16-byte vector accesses."""

    name: str
    on_host: bool = True
    direct: bool = True
    in_ram: bool = True
    cached: bool = True
    align: int = 256

    def memory(self, nbytes: int) -> np.ndarray:
        """Return memory of this tier as uint8 (nbytes,), for a device that is the CPU."""
        return np.empty(nbytes, np.uint8)


DEVICE = Tier("device", on_host=False, in_ram=False)
PINNED = Tier("pinned")
# GPUs copy from it fast; the CPU reads it slowly
WRITE_COMBINED = Tier("write_combined", cached=False)
# SSD is the tier of scratch files (runtime/files.py); direct I/O needs whole blocks of the file
# system.
SSD = Tier("ssd", direct=False, in_ram=False, align=4096)
TIERS = {tier.name: tier for tier in (DEVICE, PINNED, WRITE_COMBINED, SSD)}
"""The tiers by name. A device has an arena in each tier, and a stack in its own memory."""


def host_tiers() -> list[str]:
    """Return the names of the tiers in the host's RAM."""
    return [name for name, tier in TIERS.items() if tier.on_host and tier.in_ram]


POINTER_ALIGN = 16  # bytes, because kernels read 16 bytes at a time


class Storage:
    """One allocation of memory. place: "stack", or the name of a tier. base: address of the first
    byte, 0 on the plan device. bytes: uint8 view of the allocation; None if the host cannot access
    the memory. tier: the Tier of the memory."""

    __slots__ = ("base", "bytes", "place", "tier")

    def __init__(self, place: str, base: int = 0, data: np.ndarray | None = None):
        self.place = place
        self.base = base
        self.bytes = data
        self.tier = TIERS.get(place, DEVICE)


class Tensor:
    """A contiguous array of one dtype inside a storage. Copies of the Tensor object share the
    memory. ptr: address of the first element. on_host, direct: copied from the storage's Tier.
    kind: all properties that declarations of kernel arguments check."""

    __slots__ = (
        "_array", "direct", "dtype", "kind", "name", "nbytes", "offset", "on_host", "ptr", "shape",
        "size", "storage",
    )  # fmt: skip

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: DType, storage: Storage, offset: int
    ):
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.storage = storage
        self.offset = offset
        self.ptr = storage.base + offset
        self.on_host, self.direct = storage.tier.on_host, storage.tier.direct
        self.size = prod(self.shape)
        self.nbytes = self.size * dtype.itemsize
        self.kind = (dtype, self.shape, self.direct, self.ptr % POINTER_ALIGN)
        self._array: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """Return the elements as a NumPy view without a copy; possible only if the host can read
        the storage."""
        if self._array is None:
            if self.storage.bytes is None:
                raise RuntimeError(f"{self!r} is not readable by the host")
            raw = self.storage.bytes[self.offset : self.offset + self.nbytes]
            self._array = raw.view(self.dtype.numpy).reshape(self.shape)
        return self._array

    def view(self, *shape: int) -> Tensor:
        """Return the same elements under another shape of equal size."""
        if prod(shape) != self.size:
            raise ValueError(
                f"view: {self!r} has {self.size} elements, {shape} needs {prod(shape)}"
            )
        return Tensor(self.name, shape, self.dtype, self.storage, self.offset)

    def view_as(self, dtype: DType, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the first bytes as a tensor of another dtype and this shape. shape: the new shape;
        None: this tensor's shape, for a dtype of equal size."""
        view = Tensor(self.name, shape or self.shape, dtype, self.storage, self.offset)
        if view.nbytes > self.nbytes or (shape is None and view.nbytes != self.nbytes):
            raise ValueError(f"view_as: {self!r} does not have the bytes of {view!r}")
        return view

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of the first dimension."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows: [{start}, {stop}) is outside of {self!r}")
        row_bytes = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return Tensor(self.name, shape, self.dtype, self.storage, self.offset + start * row_bytes)

    def __repr__(self) -> str:
        return f"{self.name} {self.dtype.label} {list(self.shape)}"


class Accumulator(NamedTuple):
    """The tensor to which a kernel writes or adds a parameter's gradient.

    tensor: the gradient tensor, F32 or BF16. accumulate: True to add to the tensor, False to
    overwrite it. scalars: I32 (16,), the step's StepScalars. salt: number that gives this tensor
    random numbers of its own. A sum in a BF16 gradient is rounded stochastically, each element by
    itself; any other result is rounded to nearest.
    """

    tensor: Tensor
    accumulate: bool
    scalars: Tensor
    salt: int
