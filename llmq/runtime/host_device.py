"""HostDevice is the CPU: a launch calls the kernel's NumPy reference on views of the tensors."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.dtypes import BF16
from llmq.base.products import products_in_tiles
from llmq.base.tensor import DEVICE, SSD, TIERS, Storage, Tensor
from llmq.runtime.device import HOST_SPEC, Device, Launch, MemorySizes
from llmq.runtime.files import Files
from llmq.runtime.kernel import Kernel
from llmq.runtime.mesh import Mesh


@cache
def reference(kernel: Kernel) -> Callable[..., None]:
    """Return the NumPy function that is a kernel's reference."""
    return getattr(importlib.import_module(f"llmq.ref.{kernel.module}"), kernel.entry)


@cache
def constants_of(kernel: Kernel) -> tuple[str, ...]:
    """Return the compile-time constants that a kernel's reference takes as keyword-only
    arguments."""
    parameters = inspect.signature(reference(kernel)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.numpy().reshape(-1).view(np.uint8)


class HostDevice(Device):
    """A device that computes with NumPy arrays in the calling thread. poison: True to fill each
    allocated tensor with 0xFF bytes (NaN in every float format), which exposes reads of unwritten
    memory. mesh: the rank's mesh, see Device. folders: directories for the files of the tier
    "ssd"."""

    kind = "host"

    def __init__(
        self,
        sizes: MemorySizes,
        *,
        poison: bool = False,
        mesh: Mesh | None = None,
        folders: Sequence[Path] = (),
    ):
        storages = {SSD.name: Storage(SSD.name)}
        self._folders, self._files = folders, None
        for place, size in sizes.items():
            if place == SSD.name:
                continue
            # NumPy aligns arrays to only 16 bytes, but the arena needs 256.
            raw = TIERS.get(place, DEVICE).memory(size + 256)
            skip = -raw.ctypes.data % 256
            data = raw[skip : skip + size]
            storages[place] = Storage(place, raw.ctypes.data + skip, data)
        super().__init__(HOST_SPEC, storages, sizes, mesh=mesh)
        self.poison = poison
        self._noted: list[Callable[[], None]] | None = None
        self._kept: dict[tuple, list[Callable[[], None]]] = {}

    def alloc(self, *args: Any, **place: str) -> Tensor:
        tensor = super().alloc(*args, **place)
        if self.poison and tensor.storage.tier is not SSD:
            _bytes(tensor).fill(0xFF)
        return tensor

    def _open_files(self, buffers: Tensor) -> None:
        capacity = self.arenas[SSD.name].capacity
        self._files = Files(self._folders, capacity, buffers.numpy())

    @contextmanager
    def scratch(self, *args: Any) -> Iterator[Tensor]:
        with super().scratch(*args) as tensor:
            if self.poison:
                _bytes(tensor).fill(0xFF)
            yield tensor

    def _launch(self, launch: Launch) -> None:
        args = [a.numpy() if isinstance(a, Tensor) else a for a in launch.args]
        # NumPy's warnings are off, because the trainer itself reports a run that diverges.
        with np.errstate(all="ignore"):
            named = {name: launch.consts.get(name.upper()) for name in constants_of(launch.kernel)}
            constants = {name: value for name, value in named.items() if value is not None}
            self._do(partial(reference(launch.kernel), *args, **constants))

    def _do(self, call: Callable[[], None]) -> None:
        if self._noted is not None:
            self._noted.append(call)
        call()

    def copy(self, dst: Tensor, src: Tensor) -> None:
        if dst.nbytes != src.nbytes:
            raise ValueError(f"copy: {dst!r} and {src!r} differ in size")
        if src.storage.tier is SSD:
            self._do(partial(self._files.load, _bytes(dst), src.offset))
        elif dst.storage.tier is SSD:
            self._do(partial(self._files.save, dst.offset, _bytes(src)))
        else:
            self._do(partial(np.copyto, _bytes(dst), _bytes(src)))

    def zero(self, tensor: Tensor) -> None:
        if tensor.storage.tier is SSD:
            self._do(partial(self._files.zero, tensor.offset, tensor.nbytes))
        else:
            self._do(partial(_bytes(tensor).fill, 0))

    def compute(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        arrays = [t.numpy().view(np.uint16) if t.dtype is BF16 else t.numpy() for t in tensors]
        with np.errstate(all="ignore"):
            fn(np, *arrays)

    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        if array.shape != dst.shape or array.dtype != dst.dtype.numpy:
            raise ValueError(f"upload: {dst!r} given {array.dtype} {list(array.shape)}")
        if dst.storage.tier is SSD:
            self._files.save(dst.offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        else:
            dst.numpy()[...] = array

    def download(self, src: Tensor) -> np.ndarray:
        if src.storage.tier is not SSD:
            return src.numpy().copy()
        array = np.empty(src.shape, src.dtype.numpy)
        self._files.load(array.reshape(-1).view(np.uint8), src.offset)
        return array

    def _switch(self, stream: str) -> None:
        pass

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        if not self._capture_only:
            fn()

    def rows_apart(self) -> AbstractContextManager[None]:
        return products_in_tiles()

    def replay(self, key: tuple, fn: Callable[[], Any]) -> None:
        """Run fn and record its calls of references; later runs with the same key repeat only these
        calls. fn always runs if there are several ranks, with poison, or while `instead` replaces a
        method."""
        watched = self.poison or {"launch", "copy", "zero"} & vars(self).keys()
        if self._capture_only or watched or self.mesh.size() > 1:
            self.graph(key, fn)
            return
        kept = self._kept.get((key, self.stack.used))
        if kept is None:
            self._noted = noted = []
            try:
                fn()
            finally:
                self._noted = None
            self._kept[key, self.stack.used] = noted
            return
        with np.errstate(all="ignore"):
            for call in kept:
                call()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
