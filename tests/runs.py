"""Runs of `llmq train` on a model so small that a step takes milliseconds, in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

import llmq
from llmq.commands.cli import _run
from llmq.data.tokens import TokenWriter
from llmq.run.loop import Loop

VOCAB = 257
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 256,
    "tie_word_embeddings": True,
}
T, B = 16, 2
# Chunks of T tokens in each training file. With batches of 2 and 2 micro-steps: 5 steps an epoch,
# and batches that come from two files.
TRAIN_CHUNKS = {"train-0": 9, "train-1": 6, "train-2": 5}


def write_tokens(path: Path, chunks: int, seed: int = 0, mask: np.ndarray | None = None) -> Path:
    """Random bytes with a pattern that can be learned: each second one is the sum of two before."""
    tokens = np.random.default_rng(seed).integers(0, 256, chunks * T + 1)
    for i in range(2, len(tokens), 2):
        tokens[i] = (tokens[i - 1] + tokens[i - 2]) % 256
    with TokenWriter(path, VOCAB, with_masks=mask is not None) as writer:
        writer.write(tokens, mask)
    return path


def make_workplace(folder: Path) -> Path:
    """A folder with model/config.json, data/train-*.bin and data/eval.bin."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "data").mkdir()
    for seed, (name, chunks) in enumerate(TRAIN_CHUNKS.items()):
        write_tokens(folder / "data" / f"{name}.bin", chunks, seed)
    write_tokens(folder / "data" / "eval.bin", 7, seed=99)
    return folder


def options(**changes: object) -> dict[str, object]:
    """Options of a run in such a folder, by flag."""
    defaults = {
        "model": "model",
        "from-scratch": True,
        "device": "cpu",
        "model-dtype": "fp32",
        "train-file": "data/train-*.bin",
        "eval-file": "data/eval.bin",
        "batch-size": B,
        "seq-len": T,
        "grad-accumulation": 2,
        "learning-rate": 1e-2,
        "ckpt-interval": 0,
        "eval-every-n-steps": 0,
        "save-training-state": False,
        "log-file": "log.json",
        "out-dir": "out",
        "checkpoint-dir": "ckpt",
        "overwrite": True,
    }
    return defaults | {name.replace("_", "-"): value for name, value in changes.items()}


def flags(**changes: object) -> list[str]:
    """The same as a command line. None takes an option out, "" gives it without a value."""
    given = {name: value for name, value in options(**changes).items() if value is not None}
    return [f"--{name}" if value == "" else f"--{name}={value}" for name, value in given.items()]


def train(**changes: object) -> int:
    """Run `llmq train`; returns the exit status."""
    return _run(["train", *flags(**changes)])


def records(kind: str, log: str | Path = "log.json") -> list[dict]:
    """The records of one kind in a log."""
    return [record for record in json.loads(Path(log).read_text()) if record["log"] == kind]


def signal_after(monkeypatch, step: int, signum: int = signal.SIGINT) -> None:
    """Send this process a signal while the step of this number runs."""
    at_step(monkeypatch, step, lambda loop: os.kill(os.getpid(), signum))


def at_step(monkeypatch, step: int, then: Callable[[Loop], object]) -> None:
    """Call then(the run's loop) when the step of this number is about to begin."""
    before_step(monkeypatch, lambda loop: loop.trainer.steps_done == step and then(loop))


def before_step(monkeypatch, call: Callable[[Loop], object]) -> None:
    """Call it with the run's loop before each step."""
    real = Loop.step

    def step(self: Loop) -> None:
        call(self)
        real(self)

    monkeypatch.setattr(Loop, "step", step)


def trainer(world: int = 1, **changes: object) -> llmq.Trainer:
    """A Trainer in a workplace, of 8 steps of one micro-step each on so many ranks."""
    given = options(gpus=world, grad_accumulation=1, steps=8, **changes)
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)
