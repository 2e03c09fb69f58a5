"""How fast GPUs exchange with pinned host memory: one alone, and several at once.

    python tools/bench_bus.py [--gpus 4] [--mib 256] [--seconds 1]

A line is a set of GPUs that copy at the same time, each with a buffer of its own in host memory.
GB/s are 10^9 bytes of one GPU per second, in one direction, the slowest of the set: `in` is host to
GPU alone, `out` GPU to host alone, `both` each of the two while both go on. `all` is what passes
through the host's memory then, all GPUs and directions added up.
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.base.dtypes import MIB
from llmq.rig.bus import WAYS, together
from llmq.runtime.cuda_api import load


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


if __name__ == "__main__":
    typer.run(main)
