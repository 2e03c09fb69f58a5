"""The choice of a GPU among several ways to the same results: the faster one, timed once and
kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.base.tensor import Tensor
from llmq.runtime.algorithm_file import algorithm_file
from llmq.runtime.tuning import Unsupported, fastest

Ways = dict[str, Callable[[], None]]


class Choices:
    """The choices of one rank; for the rank's thread, with its GPU current.

    As tuned algorithms of products, a choice is kept in a file, and the first one that a rank
    publishes holds for all: two runs take the same kernels, and so do all GPUs of one.
    chosen: of each piece of work so far, the way that is taken.
    """

    def __init__(self, machine: str, *, cuda: Any, cache_path: Path | None):
        """machine: the GPU and the releases that a choice holds for. cuda: CuPy's CUDA runtime.
        cache_path: as CublasLt."""
        self._machine = machine
        self._cuda = cuda
        self._file = algorithm_file(cache_path)
        self.chosen: dict[str, str] = {}

    def run(self, stream: int, work: str, ways: Ways, kept: tuple[Tensor, ...]) -> None:
        """Enqueue the work once. Its first time times every way on the stream, which synchronizes.

        Arguments as those of Device.choose. Raises RuntimeError inside a graph capture for work
        that would have to be timed first.
        """
        name = self.chosen.get(work)
        if name is None:
            name = self.chosen[work] = self._choose(stream, work, ways, kept)
        ways[name]()

    def _choose(self, stream: int, work: str, ways: Ways, kept: tuple[Tensor, ...]) -> str:
        key = f"{self._machine}, {work}: {' or '.join(ways)}"
        names = {name.encode(): name for name in ways}
        remembered = self._file.get(key)
        if remembered in names:
            return names[remembered]
        if self._cuda.streamIsCapturing(stream):
            raise RuntimeError(
                f"{work} was not seen before this graph capture, in which it cannot be timed; run "
                "it once outside of the graph, or switch tuning off"
            )
        best = fastest(self._cuda, stream, list(ways), lambda name: ways[name](), Unsupported, kept)
        best = best or next(iter(ways))  # which says why it cannot run
        return names.get(self._file.publish(key, best.encode(), instead_of=remembered), best)
