#!/usr/bin/env python3
"""How fast documents train: packed with masks, one to a sequence, and windows without masks.

    PYTHONPATH=. tools/document_speed.py [--model Qwen2.5-0.5B] [--seq-len 4096] [--batch-size 8]

The documents are of random tokens and of 100 to 1,000 tokens, all lengths equally likely. Trained
tokens are those that a loss is computed for; sequences per second are those of the step, full or
not. Every way trains the same model from random weights and is timed over steps that follow each
other; the ways are repeated in turns, and the median of a way is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from llmq.data.tokens import TokenWriter
from llmq.options.presets import preset
from llmq.run.trainer import Trainer

SHORTEST, LONGEST = 100, 1000  # tokens of a document
WAYS: dict[str, dict[str, Any]] = {
    "windows, no masks": {"packing": "concat", "document_mask": False},
    "windows, masks": {"packing": "concat", "document_mask": True},
    "best-fit, masks": {"packing": "best-fit"},
    "one to a sequence": {"packing": "none"},
}
WARM_UP = 3  # steps before the first that counts


def write_documents(path: Path, vocab_size: int, tokens: int) -> None:
    """Random documents of `tokens` tokens together, or a little more."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, vocab_size, with_documents=True) as writer:
        while writer.num_tokens < tokens:
            length = int(rng.integers(SHORTEST, LONGEST + 1))
            writer.write(rng.integers(0, vocab_size, length, np.int32), ends=[length])


def steps_per_second(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Steps per second, and trained tokens of a step, the mean."""
    start = time.perf_counter()
    tickets, trained = [], 0
    for _ in range(steps):  # results are read late, so that the device never waits
        tickets.append(trainer.enqueue_step())
        if len(tickets) > 2:
            trained += trainer.result(tickets.pop(0)).tokens
    trained += sum(trainer.result(ticket).tokens for ticket in tickets)
    return steps / (time.perf_counter() - start), trained / steps


def main(
    model: Annotated[str, typer.Option(help="preset")] = "Qwen2.5-0.5B",
    seq_len: Annotated[int, typer.Option()] = 4096,
    batch_size: Annotated[int, typer.Option()] = 8,
    matmul_dtype: Annotated[str, typer.Option(help="bf16 or e4m3")] = "bf16",
    attention: Annotated[str, typer.Option(help="auto, native or cudnn")] = "auto",
    lmhead_chunks: Annotated[int, typer.Option()] = 4,
    steps: Annotated[int, typer.Option(help="of one repeat")] = 6,
    repeats: Annotated[int, typer.Option()] = 3,
    device: Annotated[str, typer.Option()] = "cuda",
) -> None:
    """Measure and print a Markdown table."""
    options = {
        "model": model,
        "from_scratch": True,
        "device": device,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "grad_accumulation": 1,
        "matmul_dtype": matmul_dtype,
        "attention": attention,
        "lmhead_chunks": lmhead_chunks,
        "eval_file": "none",
        "steps": 100_000,
    }
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.bin"
        enough = (WARM_UP + steps) * batch_size * seq_len * 2
        write_documents(path, preset(model).vocab_size, enough)
        for name, way in WAYS.items():  # one after the other: each takes the GPU's memory
            with Trainer(**options, **way, train_file=str(path)) as trainer:
                steps_per_second(trainer, WARM_UP)
                found[name] = [steps_per_second(trainer, steps) for _ in range(repeats)]
    print(f"{model}, {matmul_dtype}, {batch_size} x {seq_len}\n")
    print("| way | trained tokens/s | of a step's positions | sequences/s | of unmasked |")
    print("| --- | --- | --- | --- | --- |")
    unmasked = statistics.median(rate for rate, _ in found["windows, no masks"])
    for name, repeats_of_way in found.items():
        rate, trained = (statistics.median(x) for x in zip(*repeats_of_way, strict=True))
        share = trained / (batch_size * seq_len)
        print(
            f"| {name} | {rate * trained:,.0f} | {share:.1%} | {rate * batch_size:.2f} | "
            f"{rate / unmasked:.1%} |"
        )


if __name__ == "__main__":
    typer.run(main)
