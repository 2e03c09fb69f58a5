"""How fast GPUs exchange with pinned host memory: one alone, and several at once.

    python tools/bench_bus.py [--gpus 4] [--mib 256] [--seconds 1]

A line is a set of GPUs that copy at the same time, each with a buffer of its own in host memory.
GB/s are 10^9 bytes of one GPU per second, in one direction, the slowest of the set: `in` is host to
GPU alone, `out` GPU to host alone, `both` each of the two while both go on. `all` is what passes
through the host's memory then, all GPUs and directions added up.

A last line is of kernels of GPU 0 that work in host memory themselves: `in`, one that reads it, and
`both`, one that adds to what is there, in each of the two directions.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer
from bench_ops import median_ms
from op_calls import scalars

from llmq.base.dtypes import BF16, I32, MIB, STEP_SCALARS_WORDS, U8
from llmq.base.tensor import Accumulator
from llmq.ops import reduce
from llmq.rig.bus import WAYS, together
from llmq.runtime.cuda_api import load
from llmq.runtime.device import MemorySizes
from llmq.runtime.machine import choose_machine


def kernels(device: str, nbytes: int) -> tuple[float, float]:
    """GB/s of a kernel that reads so many bytes of host memory, and of one that adds to them, in
    each direction."""
    machine = choose_machine(device, 1)
    sizes = MemorySizes(device=nbytes + MIB, pinned=nbytes)
    with closing(machine.open(sizes)) as dev:
        there = dev.alloc("there", (nbytes // 2,), BF16, "Gradients", "pinned")
        here = dev.alloc("here", (nbytes // 2,), BF16, "Gradients")
        shared = dev.alloc("scalars", (STEP_SCALARS_WORDS,), I32, "Gradients")
        flush = dev.alloc("flush", (MIB // 2,), U8, "Gradients")
        dev.upload(shared, scalars())
        for tensor in (there, here):
            dev.zero(tensor)
        pairs = (
            (Accumulator(here, False, shared, 1), there),
            (Accumulator(there, True, shared, 1), here),
        )
        ms = [median_ms(dev, lambda pair=pair: reduce.add(dev, *pair), flush) for pair in pairs]
    return nbytes / ms[0] / 1e6, nbytes / ms[1] / 1e6


def main(
    gpus: Annotated[int, typer.Option(help="0: all")] = 0,
    mib: Annotated[int, typer.Option(help="of a copy")] = 256,
    seconds: Annotated[float, typer.Option(help="of a measurement, about")] = 1.0,
) -> None:
    """Measure and print the table."""
    api = load().runtime
    count = gpus or api.getDeviceCount()
    sets = [(0,), *((0, other) for other in range(1, count))]
    sets += [tuple(range(n)) for n in range(3, count + 1)]
    print(f"{'GPUs':<10} {'in':>6} {'out':>6} {'both':>6} {'all':>6}   GB/s, copies of {mib} MiB")
    for chosen in sets:
        found = together(api, chosen, mib * MIB, seconds)
        slowest = [min(found[way]) for way in WAYS]
        names = ",".join(map(str, chosen))
        row = (*slowest, 2 * sum(found["both"]))
        print(f"{names:<10} " + " ".join(f"{x:6.1f}" for x in row), flush=True)
    reads, adds = kernels("cuda", mib * MIB)
    print(f"{'kernels':<10} {reads:6.1f} {'':6} {adds:6.1f}")


if __name__ == "__main__":
    typer.run(main)
