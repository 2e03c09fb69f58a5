"""`llmq demo`: the whole program in two minutes, on text that every machine has."""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

from llmq.errors import DataError
from llmq.machine import choose_machine
from llmq.options_io import make_config
from llmq.plot import run_plot
from llmq.presets import resolve_model
from llmq.sample import Sampler, fresh_weights, open_model
from llmq.tokenize import tokenize
from llmq.tokenizer import ByteTokenizer
from llmq.training import run_training

PROMPT = "def __init__(self"
NEW_TOKENS = 160
STEPS = {"host": 300, "cuda": 2000}


def python_sources() -> list[str]:
    """The modules of Python's own standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(str(path) for path in folder.glob("*.py"))
    if not files:
        raise DataError(f"'{folder}' has no Python sources: use `llmq tokenize` on your own text")
    return files


def run_demo(out: Path, device: str, steps: int | None) -> None:
    """Tokenize, train, evaluate, save, plot, and sample before and after; writes into `out`."""
    start = time.perf_counter()
    machine = choose_machine(device, 1)
    data = out / "data"
    tokenize(python_sources(), tokenizer="bytes", out=data, eval_fraction=0.05)
    config = make_config(
        {
            "model": "tiny",
            "from-scratch": True,
            "model-dtype": "fp32" if machine.kind == "host" else "bf16",
            "train-file": str(data / "train*.bin"),
            "eval-file": str(data / "eval*.bin"),
            "batch-size": 16,
            "seq-len": 128,
            "grad-accumulation": 1,
            "steps": steps or STEPS[machine.kind],
            "learning-rate": 4e-3,
            "warmup": 20,
            "final-lr-fraction": 0.05,
            "eval-every-n-steps": 100,
            "eval-num-steps": 10,
            "ckpt-interval": 0,
            "save-training-state": False,
            "checkpoint-dir": str(out / "ckpt"),
            "out-dir": str(out / "model"),
            "log-file": str(out / "log.json"),
            "device": {"host": "cpu"}.get(machine.kind, machine.kind),
        }
    )
    model, _ = resolve_model(config.model, config.from_scratch)
    before = Sampler(machine, model, fresh_weights(model, config.seed), 256)
    _show("Before training", before)
    run_training(config.validate_with(model), model, None, sys.argv)
    run_plot([out / "log.json"], out / "loss.png")
    with open_model(str(out / "model")) as (model, read, _):
        after = Sampler(machine, model, read, 256)
    _show("After training", after)
    print(f"The model is in {out / 'model'}; the demo took {time.perf_counter() - start:.0f} s.")


def _show(title: str, sampler: Sampler) -> None:
    tokenizer = ByteTokenizer()
    new = sampler.generate(
        tokenizer.encode(PROMPT), NEW_TOKENS, np.random.default_rng(0), temperature=0.6
    )
    text = PROMPT + tokenizer.decode(list(new))
    print(f"--- {title}:\n{text}\n---\n", flush=True)
