"""How fast data travel between the GPUs, per operation, backend and size.

    python tools/bench_comm.py [--gpus 4] [--sizes 1,16,64,256] [--backend staged]

Backends: nccl and copies with peer access where it works, nccl-off and staged without any. A size
is that of a whole slab in MiB, of which every rank holds a part; 222 is a block of Qwen2.5-7B in
fp8, 444 in bf16. GB/s are 10^9 bytes that each GPU receives per second of the slowest rank, in
replayed graphs of several calls. Each backend runs in a process of its own, because NCCL reads its
settings once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from llmq.base.dtypes import MIB
from llmq.rig.exchanges import BACKENDS, measured


def lines(device: str, world_size: int, backend: str, sizes: tuple[int, ...]) -> Iterator[str]:
    """For one backend: the links, then the times."""
    found = measured(device, world_size, BACKENDS[backend], sizes, False)
    if found.links is not None:
        yield from found.links.lines()
    for (name, mib), slowest in found.alone.items():
        rate = mib * MIB * (world_size - 1) / world_size / slowest / 1e9
        yield f"{name:<16}{mib:>6} {1e6 * slowest:10.1f} us {rate:9.1f} GB/s"


def main(
    gpus: Annotated[int, typer.Option(min=2)] = 2,
    sizes: Annotated[str, typer.Option(help="Slabs in MiB, with commas.")] = "1,16,64,222",
    backend: Annotated[str, typer.Option(help="One of them, or all.")] = "all",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Time collectives between GPUs."""
    if backend != "all":
        if backend not in BACKENDS:
            raise typer.BadParameter(f"--backend: {backend}, use one of {', '.join(BACKENDS)}")
        numbers = tuple(int(size) for size in sizes.split(","))
        for line in lines(device, gpus, backend, numbers):
            print(line, flush=True)
        return
    for name in BACKENDS:
        print(f"-- {name}, {gpus} ranks", flush=True)
        options = f"--gpus={gpus} --sizes={sizes} --device={device} --backend={name}"
        subprocess.run([sys.executable, __file__, *options.split()], check=False)


if __name__ == "__main__":
    typer.run(main)
