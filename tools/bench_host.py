"""The CPU device next to torch on the CPU: the same model, batch and number of threads, in fp32.

    python tools/bench_host.py [--threads 4] [--batch-size 4] [--seq-len 128]

Prints tokens per second of whole training steps: forward, backward, clipping, AdamW. torch runs
transformers' implementation of the same preset. Needs the packages of the extra `test`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer


def median_seconds(step: Callable[[], object], steps: int) -> float:
    """Median time of a step, after one that is not counted."""
    step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ours(model: str, batch_size: int, seq_len: int, steps: int) -> float:
    """Seconds of our step."""
    from llmq.bench.measure import open_trainer, random_batches

    options = {"model": model, "from-scratch": True, "device": "cpu", "model-dtype": "fp32"}
    options |= {"batch-size": batch_size, "seq-len": seq_len, "grad-accumulation": 1}
    with open_trainer(options, steps + 1) as trainer:
        batches = random_batches(trainer)
        return median_seconds(lambda: trainer.step(batches), steps)


def torchs(model: str, batch_size: int, seq_len: int, steps: int, threads: int) -> float:
    """Seconds of torch's step."""
    import torch
    import transformers

    from llmq.options.presets import preset

    torch.set_num_threads(threads)
    config = preset(model)
    hf_config = transformers.AutoConfig.for_model(**config.to_hf("fp32"))
    net = transformers.AutoModelForCausalLM.from_config(hf_config).float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.1)
    tokens = torch.randint(0, config.vocab_size, (2, batch_size, seq_len))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(
            net(tokens[0]).logits.flatten(0, 1), tokens[1].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return median_seconds(step, steps)


def main(
    model: Annotated[str, typer.Option(help="A preset.")] = "tiny",
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=4)] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="All cores if not given.")] = None,
) -> None:
    """Print both speeds."""
    threads = threads or len(os.sched_getaffinity(0))
    for library in ("OMP", "OPENBLAS", "MKL"):  # read when NumPy is imported, below
        os.environ[f"{library}_NUM_THREADS"] = str(threads)
    tokens = batch_size * seq_len
    speeds = {
        "llmq": tokens / ours(model, batch_size, seq_len, steps),
        "torch": tokens / torchs(model, batch_size, seq_len, steps, threads),
    }
    print(f"{model}, fp32, batch {batch_size} x {seq_len}, {threads} threads, tokens per second:")
    for name, speed in speeds.items():
        print(f"  {name:5} {speed:10,.0f}")
    print(f"  ratio {speeds['llmq'] / speeds['torch']:10.2f}")


if __name__ == "__main__":
    typer.run(main)
