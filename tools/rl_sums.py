"""Train a small model to add: by cross-entropy until it answers some sums, then by GRPO.

    python tools/rl_sums.py [--digits 2] [--minutes 4] [--layers 4] [--width 256] [--device auto]

The prompts are all sums of two numbers of --digits digits, as bytes such as `17+25=`. If there are
many sums, a tenth is held out. The model starts from random weights, and learns answers by
cross-entropy until its samples answer a third of the held-out sums. After that the model learns
only from rewards, 1 for the right answer and 0 for any other, until its samples answer the fraction
--goal of the held-out sums, or --minutes are over. A row of the table is an evaluation: the
fraction of right answers among samples at temperature 1, and among greedy answers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq import Trainer, __version__
from llmq.base.batch import Batch
from llmq.run.rollouts import Rollouts, Sample, packed
from llmq.text.tokenizer import ByteTokenizer

END = ByteTokenizer().eos_id
LEAST, MOST = 1 / 3, 0.4  # right samples: fine-tuning ends at LEAST, exports up to MOST
LENGTH = 32  # tokens of a sequence
HELD_OUT = 200  # maximum number of sums of an evaluation
ROWS = 64  # sequences of a micro-batch, with two sums each
STEPS = 10  # steps between two evaluations


class Sum(NamedTuple):
    """A sum and its answer, as texts."""

    prompt: str
    answer: str


Sums = tuple[list[Sum], list[Sum]]
"""Those that are learned, and those of an evaluation."""


def sums(digits: int) -> Sums:
    """All sums, in a fixed random order: the learned sums, and the sums of an evaluation, which are
    held out of the learned sums if there are many."""
    numbers = range(10 ** (digits - 1), 10**digits)
    every = [Sum(f"{a}+{b}=", f"{a + b}") for a in numbers for b in numbers]
    order = np.random.default_rng(0).permutation(len(every))
    if len(every) <= HELD_OUT:
        return every, every
    held = len(every) // 10
    return [every[i] for i in order[held:]], [every[i] for i in order[: min(held, HELD_OUT)]]


def score(texts: list[str], record: dict[str, Any]) -> list[float]:
    """Rewards of texts: 1 for the right answer, else 0."""
    return [float(text == record["answer"]) for text in texts]


class Right(NamedTuple):
    """Fractions of a set of sums that are answered right: by samples at temperature 1 (sampled),
    and by greedy decoding (likeliest)."""

    sampled: float
    likeliest: float


def evaluate(trainer: Trainer, held: list[Sum]) -> Right:
    """Answer each sum twice, by a sample and by greedy decoding, and return the right fractions."""
    found, prompts = [], [each.prompt for each in held]
    for temperature in (1.0, 0.0):
        made = trainer.generate(prompts, temperature=temperature, max_new_tokens=8)
        texts = (bytes(i for i in one.shown if i < END).decode(errors="replace") for (one,) in made)
        pairs = zip(texts, held, strict=True)
        found.append(float(np.mean([text == each.answer for text, each in pairs])))
    return Right(*found)


def tuning_batch(learned: list[Sum], step: int) -> Batch:
    """A batch of random sums for fine-tuning, whose answers are the targets. step: the seed."""
    chosen = np.random.default_rng([1, step]).integers(0, len(learned), 2 * ROWS)
    texts = [learned[i] for i in chosen]
    answers = [[*each.answer.encode(), END] for each in texts]
    samples = [Sample(i, ids, [0.0] * len(ids), 0.0) for i, ids in enumerate(answers)]
    (batch,) = packed(samples, [[*each.prompt.encode()] for each in texts], (ROWS, LENGTH), 1)
    return batch._replace(named={})


def fine_tune(how: dict[str, Any], every: Sums, folder: Path, seconds: float) -> Right:
    """Fine-tune from random weights until the fraction LEAST of the samples is right. Export the
    last model that is right at most at MOST, and return this model's fractions."""
    learned, held = every
    how = how | {"model": "tiny-qwen3", "from_scratch": True, "vocab_size": END + 1}
    with Trainer(**how, grad_accumulation=1, learning_rate=1e-3) as trainer:
        begin, found, kept = time.monotonic(), Right(-1, -1), Right(0, 0)
        while found.sampled < LEAST:
            for _ in range(STEPS):
                trainer.step([tuning_batch(learned, trainer.steps_done)])
            found = evaluate(trainer, held)
            if found.sampled <= MOST:
                trainer.export(folder)
                kept = found
            if found.sampled < LEAST and time.monotonic() - begin > seconds:
                raise SystemExit(f"fine-tuning answers {found} in {seconds:.0f} s: too little")
        row("tuned", trainer.steps_done, time.monotonic() - begin, kept)
    return kept


def row(what: str, step: int, seconds: float, right: Right) -> None:
    """Print a row of the table."""
    parts = f"{right.sampled:.1%} | {right.likeliest:.1%}"
    print(f"| {what} | {step} | {seconds / 60:.2f} | {parts} |", flush=True)


def main(
    digits: Annotated[int, typer.Option(help="Of each number.", min=1, max=4)] = 2,
    minutes: Annotated[float, typer.Option(help="Of rewards, at most.")] = 4.0,
    goal: Annotated[float, typer.Option(help="Right samples with which the run ends.")] = 0.95,
    layers: int = 4,
    width: int = 256,
    device: str = "auto",
    lr: Annotated[float, typer.Option(help="Learning rate of rewards.")] = 3e-4,
    prompts: Annotated[int, typer.Option(help="Of a step.")] = 64,
    samples: Annotated[int, typer.Option(help="Of a prompt.")] = 16,
    updates: Annotated[int, typer.Option(help="Optimizer steps on these samples.")] = 1,
) -> None:
    """Train the model and print the table of evaluations."""
    heads, every = width // 32, sums(digits)
    common = {"device": device, "gpus": 1, "seq_len": LENGTH, "batch_size": ROWS, "steps": 10**6}
    common |= {"eval_file": "none", "document_mask": True, "weight_decay": 0.0, "ckpt_interval": 0}
    sizes = {"num_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    sizes |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": 32}
    print(f"llmq {__version__}: sums of {digits} digits, {layers} layers of {width}\n")
    print("| | step | minutes | samples | likeliest |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        first = right = fine_tune(common | sizes, every, model, 60 * minutes)
        own = {"loss": "grpo", "learning_rate": lr, "warmup": 10, "beta_2": 0.99}
        own |= {"prompts_per_step": prompts, "num_samples": samples, "updates": updates}
        own |= {"max_new_tokens": digits + 2, "grad_accumulation": -(-samples * prompts // ROWS)}
        with Trainer(**common, **own, model=model) as trainer:
            Rollouts(trainer, [each._asdict() for each in every[0]], score)
            begin, took = time.monotonic(), 0.0
            while right.sampled < goal and took < 60 * minutes:
                for _ in range(STEPS):
                    trainer.step()
                right = evaluate(trainer, every[1])
                took = time.monotonic() - begin
                row("rewards", trainer.steps_done, took, right)
    print(f"\nfrom {first.sampled:.1%} to {right.sampled:.1%} in {took / 60:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
