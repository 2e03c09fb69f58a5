"""Measures what preferences cost: DPO beside fine-tuning with the same options, and a teacher.

    python tools/preference_speed.py adapters   7B, nf4, T = 2,048, in 16 GiB: both losses
    python tools/preference_speed.py full       0.5B, T = 1,024, micro-batches of 4, in 6 GiB
    python tools/preference_speed.py teacher [LAYERS]   72B, nf4, streamed, in 24 GiB

Weights are random, and so are the data: neither changes how long anything takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from llmq import Trainer
from llmq.base.dtypes import MIB
from llmq.commands.cli import _run
from llmq.data.tokens import TokenWriter
from llmq.plan.memory import CONTEXT_BYTES
from llmq.report import views
from llmq.run import score

VOCAB = 151936
WARM, TIMED = 2, 4  # steps
BATCHES = 4  # of a teacher
TEACHER = {
    **{"base-dtype": "nf4", "seq-len": 2048, "batch-size": 8, "lmhead-chunks": 16},
    **{"memory-limit": "24GiB", "gpus": 1},
}


def write_data(path: Path, count: int, length: int, *, in_pairs: bool) -> Path:
    """So many documents, of which three quarters are trained."""
    rng, how = np.random.default_rng(0), {"with_masks": True, "with_documents": True}
    with TokenWriter(path, VOCAB, in_pairs=in_pairs, **how) as writer:
        for number in range(count):
            mask = np.arange(length) >= length // 4
            mask[0] = in_pairs and number % 2 == 0  # the preferred one of a pair
            writer.write(rng.integers(0, VOCAB, length), mask, [length])
    return path


def measure(folder: Path, loss: str, **options: object) -> float:
    """Tokens of inputs per second of a step's time on the device, the median of TIMED steps."""
    T, B = options["seq_len"], options["batch_size"]
    documents = 4 * B * (WARM + TIMED)
    data = write_data(folder / f"{loss}.bin", documents, T // 4 - 1, in_pairs=loss == "dpo")
    how = {"from_scratch": True, "train_file": (str(data),), "eval_file": "none", "loss": loss}
    how |= {"packing": "best-fit", "checkpoint_dir": str(folder / loss), "grad_accumulation": 1}
    begun = time.perf_counter()
    with Trainer(**how, **options, gpus=1, steps=WARM + TIMED, warmup=0) as trainer:
        opened = time.perf_counter()
        trainer.score_reference()
        scored = time.perf_counter()
        results = [trainer.step() for _ in range(WARM + TIMED)]
        seconds = np.median([(r.end - r.begin) / 1e9 for r in results[WARM:]])
        used = (trainer.usage.device_bytes + CONTEXT_BYTES) / MIB
        assert trainer.usage == trainer.plan.usage
    numbers = {name: round(results[-1].numbers[name], 4) for name in results[-1].shown}
    print(
        f"{loss}: {B * T / seconds:,.0f} tokens/s, {used:.0f} MiB; losses {results[0].loss:.4f} … "
        f"{results[-1].loss:.4f} {numbers}; opened in {opened - begun:.1f} s, reference in "
        f"{scored - opened:.1f} s",
        flush=True,
    )
    return B * T / seconds


def main(what: str, layers: str = "80") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if what == "teacher":
            score.ROUNDS, views.REPORT_SECONDS = 1, 0.0  # a line for each batch
            data = write_data(folder / "talks.bin", BATCHES * 64, 255, in_pairs=False)
            flags = [f"--{name}={value}" for name, value in TEACHER.items()]
            flags += ["--from-scratch", "--shard-weights", "--offload-master"]
            words = ["score", "Qwen2.5-72B", str(data), "--top-k", "64", f"--num-layers={layers}"]
            sys.exit(_run([*words, "--out", str(folder / "scores"), *flags]))
        if what == "adapters":
            how = {"model": "Qwen2.5-7B", "lora_rank": 16, "base_dtype": "nf4", "seq_len": 2048}
            how |= {"batch_size": 8, "lmhead_chunks": 16, "memory_limit": 16 << 30}
        else:
            how = {"model": "Qwen2.5-0.5B", "seq_len": 1024, "batch_size": 4, "lmhead_chunks": 8}
            how |= {"memory_limit": 6 << 30, "opt_m_dtype": "bf16"}
        speeds = [measure(folder, loss, recompute_block=True, **how) for loss in ("ce", "dpo")]
        print(f"dpo / ce: {speeds[1] / speeds[0]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
