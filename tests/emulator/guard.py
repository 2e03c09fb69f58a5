"""Memory for one launch in which every tensor ends, or begins, at a page that nobody may touch.

A kernel that reads or writes outside of its arguments ends the process; faulthandler says where.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from llmq.base.tensor import Storage, Tensor

PAGE = mmap.PAGESIZE
ALIGNMENT = 16  # bytes of the widest access; addresses keep their remainder, so that this much of
# an excess at most goes unnoticed
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def guarded(args: tuple, *, front: bool) -> Iterator[tuple]:
    """The arguments with copies of their tensors, whose content goes back at the end.

    front: the forbidden page lies before each tensor instead of behind it. Tensors that overlap
    stay together.
    """
    tensors = [a for a in args if isinstance(a, Tensor) and a.nbytes]
    spans: list[list[int]] = []
    for start, stop in sorted((t.ptr, t.ptr + t.nbytes) for t in tensors):
        if spans and start < spans[-1][1]:
            spans[-1][1] = max(stop, spans[-1][1])
        else:
            spans.append([start, stop])
    places = [_Place(start, stop, front) for start, stop in spans]
    moved = {}
    for tensor in tensors:
        place = next(p for p in places if p.start <= tensor.ptr < p.stop)
        storage = Storage(tensor.storage.place, place.base + tensor.ptr - place.start)
        moved[id(tensor)] = Tensor(tensor.name, tensor.shape, tensor.dtype, storage, 0)
    try:
        yield tuple(moved.get(id(a), a) for a in args)
        for place in places:
            ctypes.memmove(place.start, place.base, place.stop - place.start)
    finally:
        for place in places:
            place.close()


class _Place:
    """A copy of the bytes [start, stop); base: its address."""

    def __init__(self, start: int, stop: int, front: bool):
        self.start, self.stop = start, stop
        pages = -(-(stop - start + ALIGNMENT) // PAGE)
        self._map = mmap.mmap(-1, (pages + 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(self._map, np.uint8)
        first = view.ctypes.data
        del view
        if front:
            forbidden = first
            base = first + PAGE
            base += (start - base) % ALIGNMENT
        else:
            forbidden = first + pages * PAGE
            base = forbidden - (stop - start)
            base -= (base - start) % ALIGNMENT
        self.base, self._forbidden = base, forbidden
        ctypes.memmove(base, start, stop - start)
        self._protect(0)

    def _protect(self, rights: int) -> None:
        pointer, size = ctypes.c_void_p(self._forbidden), ctypes.c_size_t(PAGE)
        if _libc.mprotect(pointer, size, rights):
            raise OSError(ctypes.get_errno(), "mprotect")

    def close(self) -> None:
        self._map.close()
