"""Embeddings and LM heads from files, enlarged by rows for new tokens."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from llmq.checkpoint.safetensors_file import FileTensor


class GrownTable:
    """A stored embedding or LM head, enlarged to `rows` rows; reads like a FileTensor. Each new row
    [first, first + count) is the mean of the rows before `first`."""

    def __init__(self, stored: FileTensor, rows: int, first: int, count: int):
        self.path, self.dtype, self._stored = stored.path, stored.dtype, stored
        self.shape = (rows, *stored.shape[1:])
        self._new = range(first, first + count)

    @cached_property
    def _mean(self) -> np.ndarray:
        total, dtype = np.zeros(self.shape[1:], np.float64), None
        for rows, values in self._stored.pieces():
            dtype = values.dtype
            total += values[: max(self._new.start - rows.start, 0)].sum(0, dtype=np.float64)
        return (total / self._new.start).astype(dtype)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        for rows, _ in self._stored.pieces():
            yield rows, self.rows(rows.start, rows.stop)
        if self.shape[0] > self._stored.shape[0]:
            rows = slice(self._stored.shape[0], self.shape[0])
            yield rows, self.rows(rows.start, rows.stop)

    def rows(self, start: int, stop: int, *, transposed: bool = False) -> np.ndarray:
        end = min(stop, self._stored.shape[0])
        out = np.repeat(self._mean[None], stop - start, axis=0)
        if start < end:
            out[: end - start] = self._stored.rows(start, end, transposed=transposed)
        out[max(self._new.start - start, 0) : max(self._new.stop - start, 0)] = self._mean
        return out
