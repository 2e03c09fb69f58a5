"""Measure what the checksums of token files cost whoever reads them: an epoch with and without
them.

    python tools/checksum_cost.py [--mib 64] [--seq-len 1024] [--rounds 15] [--speed 61000]

Reading is: every batch of the first epoch, rows in shuffled order, taken from `DataLoader` one
after the other as fast as it gives them, with 4 read ahead as in a run. Each piece is compared
once, in the first epoch; so every round begins with loaders that have compared nothing. In turns,
the order changing from round to round: with the `.sums` file and without it; from memory, where the
system has the file, and from the disk, after the system was asked to forget it (a disk in memory
does not forget).

Printed are medians over the rounds: of seconds on the clock and of the processor, and of what the
checksums add to them in the same round, with its standard error. Where others use the processor,
too, its time says more. --speed: tokens per second of a run; its time for the same tokens is what
all of this is compared with. The last line is of a piece alone, by the processor's time: reading it
from memory once more, which is the least that any checksum costs, and the checksum itself, of this
version of the files and of the one before.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))
from llmq.data.checksums import PIECE_BYTES, checksums_path
from llmq.data.loader import DataLoader
from llmq.data.tokens import TokenWriter

VOCAB = 50_000
MIB = 1 << 20
PREFETCH = 4


class Cost(NamedTuple):
    """The seconds of an epoch: on the clock, and of the processor."""

    wall: float
    cpu: float


def cost_of_epoch(path: Path, seq_len: int, micro_batch: int, *, cold: bool) -> Cost:
    """The cost of reading every batch of the first epoch."""
    loader = DataLoader(
        path, seq_len=seq_len, micro_batch=micro_batch, seed=1, vocab_size=VOCAB, prefetch=PREFETCH
    )
    with loader:
        if cold:
            forget(path)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(loader.batches_per_epoch):
            loader.next_batch()
        return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def forget(path: Path) -> None:
    """Ask the system to keep nothing of the file in memory."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_tokens(path: Path, tokens: int) -> None:
    """A file of random tokens with its checksums, which are on the disk afterwards."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, VOCAB, with_checksums=True) as writer:
        for start in range(0, tokens, MIB):
            writer.write(rng.integers(0, VOCAB, min(MIB, tokens - start)))


def measure(
    path: Path, seq_len: int, micro_batch: int, rounds: int, *, cold: bool
) -> tuple[list[Cost], list[Cost]]:
    """Without and with checksums, of each round."""
    sums, hidden = checksums_path(path), path.with_suffix(".hidden")
    found: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(rounds):
        for with_sums in (number % 2, 1 - number % 2):
            if with_sums:
                os.utime(sums)  # a new file: what was compared before is not known any more
            else:
                sums.rename(hidden)
            found[with_sums].append(cost_of_epoch(path, seq_len, micro_batch, cold=cold))
            if not with_sums:
                hidden.rename(sums)
    return found


def line(name: str, without: list[float], with_sums: list[float]) -> str:
    """A row of the table, from seconds of each round."""
    more = [100 * (b / a - 1) for a, b in zip(without, with_sums, strict=True)]
    error = 1.2533 * statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
    return (
        f"{name:<18} {statistics.median(without) * 1e3:11.1f} "
        f"{statistics.median(with_sums) * 1e3:9.1f} {statistics.median(more):8.2f} {error:9.2f}"
    )


def times_of_pieces(path: Path) -> list[float]:
    """The times of reading a piece, of its XXH3 and of its CRC-32: medians over pieces, seconds."""
    buffer = bytearray(PIECE_BYTES)
    places = np.random.default_rng(0).permutation(path.stat().st_size // PIECE_BYTES).tolist()
    found: list[list[float]] = [[], [], []]
    with open(path, "rb", buffering=0) as file:
        works: list[Callable[[int], object]] = [
            lambda place: os.preadv(file.fileno(), (buffer,), place * PIECE_BYTES),
            lambda _: xxhash.xxh3_64_intdigest(buffer),
            lambda _: zlib.crc32(buffer),
        ]
        for place in places:
            for work, seconds in zip(works, found, strict=True):
                start = time.thread_time()
                work(place)
                seconds.append(time.thread_time() - start)
    return [statistics.median(seconds) for seconds in found]


def main(
    mib: Annotated[int, typer.Option(min=1, help="Size of the token file.")] = 64,
    seq_len: Annotated[int, typer.Option(min=1)] = 1024,
    micro_batch: Annotated[int, typer.Option(min=1)] = 8,
    speed: Annotated[float, typer.Option(help="Tokens per second of the run.")] = 61_000.0,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    folder: Annotated[Path | None, typer.Option(help="Where the file lies.")] = None,
) -> None:
    """Print the table."""
    tokens = mib * MIB // 4
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "tokens.bin"
        write_tokens(path, tokens)
        print(f"an epoch of {mib} MiB in rows of {seq_len} tokens, {micro_batch} at a time:")
        print(
            f"{'read from':<18} {'without, ms':>11} {'with, ms':>9} {'more, %':>8} {'error, %':>9}"
        )
        for name, cold in (("memory", False), ("disk", True)):
            found = measure(path, seq_len, micro_batch, rounds, cold=cold)
            for kind, title in (("wall", name), ("cpu", f"{name}, processor")):
                of_kind = ([getattr(cost, kind) for cost in costs] for costs in found)
                print(line(title, *of_kind), flush=True)
            more = statistics.median(b.cpu - a.cpu for a, b in zip(*found, strict=True))
            if not cold:
                of_run = more / (tokens / speed)
        of_piece = [f"{seconds * 1e6:.1f} us" for seconds in times_of_pieces(path)]
    print(f"from memory, of the time of a run of {speed:,.0f} tokens/s: {of_run:.4%}")
    print("a piece: read {}, XXH3 {}, CRC-32 {}".format(*of_piece))


if __name__ == "__main__":
    typer.run(main)
