"""What the checksums of token files cost whoever reads them: an epoch with and without them.

    python tools/checksum_cost.py [--mib 256] [--seq-len 1024] [--speed 61000]

Writes a file of random tokens, and reads all of its shuffled rows as a run does, in turns with its
`.sums` file and without it; the system has the file in memory, so that nothing hides the cost.
Each piece is compared once, in the first epoch. --speed: tokens per second of a run, whose time of
an epoch the cost is compared with, as the reading is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from llmq.data.checksums import checksums_path, write_checksums
from llmq.data.loader import DataLoader
from llmq.data.tokens import TokenWriter

VOCAB = 50_000
MIB = 1 << 20


def seconds_of_epoch(path: Path, seq_len: int, micro_batch: int) -> float:
    """Of reading every batch of the first epoch."""
    loader = DataLoader(
        path, seq_len=seq_len, micro_batch=micro_batch, seed=1, vocab_size=VOCAB, prefetch=1
    )
    try:
        start = time.perf_counter()
        for _ in range(loader.batches_per_epoch):
            loader.next_batch()
        return time.perf_counter() - start
    finally:
        loader.close()


def main(
    mib: Annotated[int, typer.Option(min=1, help="Size of the token file.")] = 256,
    seq_len: Annotated[int, typer.Option(min=1)] = 1024,
    micro_batch: Annotated[int, typer.Option(min=1)] = 8,
    speed: Annotated[float, typer.Option(help="Tokens per second of the run.")] = 61_000.0,
    rounds: Annotated[int, typer.Option(min=1, help="The fastest of so many counts.")] = 5,
) -> None:
    """Print both times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        tokens = mib * MIB // 4
        rng = np.random.default_rng(0)
        with TokenWriter(path, VOCAB) as writer:
            for start in range(0, tokens, MIB):
                writer.write(rng.integers(0, VOCAB, min(MIB, tokens - start)))
        best = {"without": float("inf"), "with": float("inf")}
        for _ in range(rounds):
            checksums_path(path).unlink(missing_ok=True)
            best["without"] = min(best["without"], seconds_of_epoch(path, seq_len, micro_batch))
            write_checksums(path)  # a new file: what was compared before is not known any more
            best["with"] = min(best["with"], seconds_of_epoch(path, seq_len, micro_batch))
        cost, run = best["with"] - best["without"], tokens / speed
    print(f"an epoch of {mib} MiB in rows of {seq_len} tokens, {micro_batch} at a time:")
    for name, seconds in best.items():
        print(f"  {name:7} checksums {seconds * 1e3:8.1f} ms, {mib / seconds:,.0f} MiB/s")
    print(f"  cost, once         {cost * 1e9 / tokens:8.2f} ns per token")
    print(f"  of the time that a run of {speed:,.0f} tokens/s takes for it: {cost / run:.3%}")


if __name__ == "__main__":
    typer.run(main)
