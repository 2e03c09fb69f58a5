"""Measure the cost of ranks in several processes, or on several machines.

    python tools/bench_processes.py [--model Qwen2.5-1.5B --batch-size 32 --grad-accumulation 2]

Trains with two GPUs, three times: as two threads of one process; as two processes; and as two
processes that take themselves to be two machines of a GPU each (--shard-over machine), between
which NCCL uses sockets on the loopback device alone. Prints tokens per second, and of the machines
how long a step waits beside what the gradients take over that link, whose speed is measured before.
Exits 1 if two processes are slower than 99 % of two threads, or a step waits longer than 110 % of
what the link takes. With --device cpu the ranks are on the CPU, and MPI is the link.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from llmq.base.dtypes import BF16
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.data.tokens import TokenWriter
from llmq.options.presets import preset
from llmq.runtime.device import MemorySizes
from llmq.runtime.machine import choose_machine
from llmq.runtime.mesh import Mesh
from llmq.runtime.mpi import join
from llmq.runtime.processes import set_processes
from llmq.runtime.workers import Workers
from llmq.state.params import weight_table
from tests.mpi import ENVIRONMENT, mpirun

SKIPPED = 3  # steps at the start, in which caches fill
CALLS = 5
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
LEAST_SPEED, MOST_EXPOSED = 0.99, 1.10


def link(device: str, mib: int) -> None:
    """In a process of several: print the seconds that the first rank takes to sum so many MiB."""
    them = join()
    set_processes(them)
    machine = choose_machine(device, 1)
    sizes = MemorySizes(device=mib << 20, stack=0, pinned=0)
    dev = machine.open(sizes, mesh=Mesh.of(machine.world_size, machine.world.base, shards=1))
    connect([dev], CommOptions(), Workers(1), machine.world)
    sums = dev.alloc("sums", ((mib << 20) // BF16.itemsize,), BF16, "Gradients")
    dev.zero(sums)
    seconds = []
    for _ in range(1 + CALLS):
        dev.synchronize()
        them.gather(None)
        begin = time.perf_counter()
        dev.mesh.group("replica").all_reduce(sums)
        dev.synchronize()
        seconds.append(time.perf_counter() - begin)
    dev.close()
    if them.first:
        print(json.dumps(statistics.median(seconds[1:])))


def launch(command: list[str], places: list[dict[str, str]]) -> str:
    """The output of as many processes as places, each with this environment; alone if it is one."""
    root = str(Path(__file__).parents[1])
    apps = [["env", *(f"{k}={v}" for k, v in place.items()), *command] for place in places]
    words = apps[0]
    if len(apps) > 1:
        words = [mpirun()]
        for i, app in enumerate(apps):
            words += [*([":"] if i else []), "-n", "1", *app]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": root}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def train(name: str, flags: list[str], places: list[dict[str, str]]) -> tuple[float, float]:
    """Tokens per second of a run, and the milliseconds of a step that it waits for others."""
    gpus = 2 // len(places)
    outputs = [f"--gpus={gpus}", f"--log-file={name}.json", f"--out-dir={name}", "--overwrite"]
    launch([sys.executable, "-m", "llmq", "train", *flags, *outputs], places)
    log: list[dict[str, Any]] = json.loads(Path(f"{name}.json").read_text())
    steps = [record for record in log if record["log"] == "step"][SKIPPED:]
    seconds = statistics.median(record["duration_ms"] for record in steps) / 1000
    return steps[0]["step_tokens"] / seconds, statistics.median(r["communication"] for r in steps)


def processes_beside_threads(flags: list[str]) -> float:
    """The speed of two processes, as a share of that of two threads."""
    threads, _ = train("threads", flags, [{}])
    print(f"two threads:    {threads:12,.0f} tokens/s", flush=True)
    processes, _ = train("processes", flags, [{}, {}])
    share = processes / threads
    print(f"two processes:  {processes:12,.0f} tokens/s, {share:.1%} of two threads", flush=True)
    return share


def main(
    model: str = "Qwen2.5-1.5B",
    batch_size: int = 32,
    grad_accumulation: int = 2,
    seq_len: int = 1024,
    steps: int = 12,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    link_mib: Annotated[int, typer.Option(help="What the link's speed is measured with.")] = 256,
    only_machines: Annotated[bool, typer.Option(help="Leave out threads and processes.")] = False,
    is_link: Annotated[bool, typer.Option("--link", help="Of this tool itself.")] = False,
) -> None:
    """Compare threads, processes, and machines."""
    if is_link:
        link(device, link_mib)
        return
    config = preset(model)
    numbers = ["--model-dtype=fp32"] if device == "cpu" else ["--matmul-dtype=e4m3"]
    flags = ["--from-scratch", f"--model={model}", f"--device={device}", f"--seq-len={seq_len}"]
    flags += [f"--batch-size={batch_size}", f"--grad-accumulation={grad_accumulation}", *numbers]
    flags += [f"--steps={steps}", "--train-file=tokens.bin", "--eval-file=none", "--log-gpu-util=0"]
    visible = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]
    pretended = [{"LLMQ_MACHINE": name} | SOCKETS for name in "ab"]
    machines = [a | b for a, b in zip(visible, pretended, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        count = 2 * batch_size * grad_accumulation * (steps + 1) * seq_len
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, count + 1)
        with TokenWriter(Path("tokens.bin"), config.vocab_size) as writer:
            writer.write(tokens)
        share = None if only_machines else processes_beside_threads(flags)
        script = [sys.executable, __file__, "--link", f"--device={device}"]
        measured = launch([*script, f"--link-mib={link_mib}"], machines)
        seconds_per_byte = json.loads(measured.strip().splitlines()[-1]) / (link_mib << 20)
        itemsize = 4 if device == "cpu" else BF16.itemsize
        size = itemsize * sum(slab.size for slab in weight_table(config))
        expected = 1000 * size * seconds_per_byte
        print(
            f"machines' link: {1e-9 / seconds_per_byte:12.2f} GB/s each way; "
            f"{size / 1e9:.2f} GB of gradients take {expected:.1f} ms",
            flush=True,
        )
        speed, waits = train("machines", flags, machines)
        os.chdir("/")
    print(
        f"two machines:   {speed:12,.0f} tokens/s; a step waits {waits:.1f} ms, "
        f"{waits / expected:.1%} of what the gradients take"
    )
    if (share is not None and share < LEAST_SPEED) or waits > MOST_EXPOSED * expected:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
