"""How fast GPUs exchange with pinned host memory: one alone, and several at once.

    python tools/bench_bus.py [--gpus 4] [--mib 256] [--seconds 1]

A line is a set of GPUs that copy at the same time, each with a buffer of its own in host memory.
GB/s are 10^9 bytes of one GPU per second, in one direction, the slowest of the set: `in` is host to
GPU alone, `out` GPU to host alone, `both` each of the two while both go on. `all` is what passes
through the host's memory then, all GPUs and directions added up.
"""

from __future__ import annotations

import threading
from typing import Annotated

import typer

MIB = 1 << 20
WAYS = {"in": (True, False), "out": (False, True), "both": (True, True)}


class End:
    """One GPU with a buffer here and one there for each direction."""

    def __init__(self, gpu: int, nbytes: int):
        import cupy

        self.gpu, self.nbytes = gpu, nbytes
        with cupy.cuda.Device(gpu):
            self.host = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
            self.device = [cupy.cuda.alloc(nbytes) for _ in range(2)]
            self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def _copy(self, way: int) -> None:
        from cupy.cuda import runtime

        pair = (self.device[way].ptr, self.host[way].ptr)
        dst, src = pair if way == 0 else pair[::-1]
        runtime.memcpyAsync(dst, src, self.nbytes, 4, self.streams[way].ptr)  # 4: by address

    def rates(self, ways: tuple[bool, bool], copies: int, start: threading.Barrier) -> list[float]:
        """GB/s of the directions that take part, measured by the GPU's own events."""
        import cupy

        with cupy.cuda.Device(self.gpu):
            events = []
            for way, takes_part in enumerate(ways):
                if takes_part:
                    self._copy(way)
                    self.streams[way].synchronize()
            start.wait()
            for way, takes_part in enumerate(ways):
                if takes_part:
                    first, last = cupy.cuda.Event(), cupy.cuda.Event()
                    first.record(self.streams[way])
                    events.append((first, last))
            for _ in range(copies):
                for way, takes_part in enumerate(ways):
                    if takes_part:
                        self._copy(way)
            taking_part = [w for w, takes_part in enumerate(ways) if takes_part]
            for way, (_, last) in zip(taking_part, events, strict=True):
                last.record(self.streams[way])
            found = []
            for first, last in events:
                last.synchronize()
                seconds = cupy.cuda.get_elapsed_time(first, last) / 1e3
                found.append(copies * self.nbytes / seconds / 1e9)
            return found


def together(ends: list[End], ways: tuple[bool, bool], copies: int) -> list[list[float]]:
    """Rates of all GPUs, which begin at the same time, each driven by a thread."""
    start = threading.Barrier(len(ends))
    found: list[list[float]] = [[] for _ in ends]

    def run(index: int) -> None:
        found[index] = ends[index].rates(ways, copies, start)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(
    gpus: Annotated[int, typer.Option(help="0: all")] = 0,
    mib: Annotated[int, typer.Option(help="of a copy")] = 256,
    seconds: Annotated[float, typer.Option(help="of a measurement, about")] = 1.0,
) -> None:
    """Measure and print the table."""
    from cupy.cuda import runtime

    count = gpus or runtime.getDeviceCount()
    ends = [End(gpu, mib * MIB) for gpu in range(count)]
    copies = max(2, int(seconds * 40e9 / (mib * MIB)))
    sets = [ends[:1]] + [list(pair) for pair in zip(ends[:1] * count, ends[1:], strict=False)]
    sets += [ends[:n] for n in range(3, count + 1)]
    print(f"{'GPUs':<10} {'in':>6} {'out':>6} {'both':>6} {'all':>6}   GB/s, copies of {mib} MiB")
    for chosen in sets:
        slowest, total = [], 0.0
        for ways in WAYS.values():
            found = together(chosen, ways, copies)
            slowest.append(min(rate for rates in found for rate in rates))
            total = sum(rate for rates in found for rate in rates)
        names = ",".join(str(end.gpu) for end in chosen)
        print(f"{names:<10} " + " ".join(f"{x:6.1f}" for x in (*slowest, total)), flush=True)


if __name__ == "__main__":
    typer.run(main)
