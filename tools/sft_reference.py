#!/usr/bin/env python3
"""Compare fine-tuning on conversations with a plain loop of transformers: losses of every step.

    PYTHONPATH=. tools/sft_reference.py [--model Qwen2.5-0.5B] [--steps 30] [--device cuda]

llmq and the loop start from the same random weights and take the same batches of packed
conversations, in which only the assistant's words are trained. Both mask attention between
conversations. The loop has weights in fp32, products in bf16 (autocast), torch's AdamW and its own
mask of (T, T); llmq has a model in bf16 with fp32 master weights. With --model-dtype fp32 both
compute in fp32. Exits with 1 if a loss differs by more than --limit.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from llmq.base.batch import Batch
from llmq.options.presets import preset
from llmq.run.trainer import Trainer

WORDS = (
    "one two three four five six seven eight nine ten red green blue why how what is not".split()
)
VOCABULARY = 512  # size of the tokenizer's vocabulary
BETAS, EPSILON, LR, CLIP = (0.9, 0.95), 1e-8, 2e-5, 1.0


def conversations(path: Path, count: int) -> None:
    """Write turns of random words; an answer repeats the question's words in reverse."""
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            messages = []
            for _ in range(rng.randint(1, 4)):
                question = rng.choices(WORDS, k=rng.randint(3, 60))
                messages.append({"role": "user", "content": " ".join(question)})
                messages.append({"role": "assistant", "content": " ".join(reversed(question))})
            file.write(json.dumps({"messages": messages}) + "\n")


def llmq(*arguments: str) -> None:
    """Run a command of this checkout; show its output if it fails."""
    command = [sys.executable, "-m", "llmq", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def make_inputs(folder: Path, model: str, count: int) -> None:
    """Write a tokenizer, token files and a model of random weights into `folder`."""
    conversations(folder / "talks.jsonl", count)
    text, tokenizer = folder / "text.txt", folder / "tokenizer"
    text.write_text((folder / "talks.jsonl").read_text())
    llmq(
        "train-tokenizer", str(text), "--vocab-size", str(VOCABULARY), "--chat-template", "chatml",
        "--out", str(tokenizer),
    )  # fmt: skip
    llmq(
        "tokenize", str(folder / "talks.jsonl"), "--tokenizer", str(tokenizer),
        "--out", str(folder / "data"),
    )  # fmt: skip
    config = preset(model)
    config = replace(config, vocab_size=max(config.vocab_size, VOCABULARY))
    (folder / "model").mkdir()
    document = config.to_hf("fp32")
    (folder / "model" / "config.json").write_text(json.dumps(document))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    reference.to(torch.float32).save_pretrained(folder / "model")
    for file in tokenizer.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())


def visible(starts: torch.Tensor) -> torch.Tensor:
    """Keys that a query may see, bool (B, 1, T, T), from document starts (B, T)."""
    at = torch.arange(starts.shape[1], device=starts.device)
    return ((at[None, None] <= at[:, None]) & (at[None, None] >= starts[:, :, None]))[:, None]


def reference_losses(
    folder: Path, steps: list[list[Batch]], device: str, dtype: torch.dtype
) -> list[float]:
    """Mean loss of each step before its update. dtype: dtype of products."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.0
    )
    losses = []
    for batches in steps:
        trained = sum(int((batch.targets >= 0).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            inputs, targets, starts = (torch.from_numpy(x).long().to(device) for x in batch[:3])
            positions = torch.arange(inputs.shape[1], device=device) - starts
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                logits = model(
                    inputs, attention_mask=visible(starts), position_ids=positions, use_cache=False
                ).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / trained).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / trained)
    return losses


def our_losses(
    folder: Path, steps: int, options: dict[str, Any]
) -> tuple[list[float], list[list[Batch]]]:
    """Return losses, and the batches of each step."""
    losses, taken = [], []
    with Trainer(
        **options, model=str(folder / "model"), train_file=str(folder / "data" / "train*.bin"),
        packing="best-fit", eval_file="none", master_dtype="fp32", opt_m_dtype="fp32",
        opt_v_dtype="fp32", learning_rate=LR, warmup=0, final_lr_fraction=1.0, beta_1=BETAS[0],
        beta_2=BETAS[1], adam_epsilon=EPSILON, weight_decay=0.0, grad_clip=CLIP, steps=steps,
    ) as trainer:  # fmt: skip
        loader = trainer.train_loader
        for _ in range(steps):
            if loader.batches_left < trainer.micro_batches:
                loader.advance_epoch()
            batches = [loader.next_batch() for _ in range(trainer.micro_batches)]
            taken.append(batches)
            losses.append(trainer.step(batches).loss)
    return losses, taken


def main(
    model: Annotated[str, typer.Option(help="preset")] = "Qwen2.5-0.5B",
    steps: Annotated[int, typer.Option()] = 30,
    seq_len: Annotated[int, typer.Option()] = 1024,
    batch_size: Annotated[int, typer.Option()] = 4,
    grad_accumulation: Annotated[int, typer.Option()] = 2,
    talks: Annotated[int, typer.Option(help="conversations")] = 4000,
    limit: Annotated[float, typer.Option(help="largest relative difference of a loss")] = 0.003,
    model_dtype: Annotated[str, typer.Option()] = "bf16",
    device: Annotated[str, typer.Option()] = "cuda",
) -> None:
    """Train both ways and print the losses side by side."""
    dtype = torch.bfloat16 if model_dtype == "bf16" else torch.float32
    options = {
        "device": device,
        "model_dtype": model_dtype,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "grad_accumulation": grad_accumulation,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, model, talks)
        ours, batches = our_losses(folder, steps, options)
        theirs = reference_losses(folder / "model", batches, device, dtype)
    differences = np.array(ours) / np.array(theirs) - 1
    print(f"{model}, {model_dtype}, {grad_accumulation} x {batch_size} x {seq_len}, {device}\n")
    print("| step | llmq | transformers | difference |")
    print("| --- | --- | --- | --- |")
    for step, (a, b, difference) in enumerate(zip(ours, theirs, differences, strict=True)):
        print(f"| {step} | {a:.5f} | {b:.5f} | {difference:+.4%} |")
    largest = float(np.abs(differences).max())
    print(f"\nThe largest difference is {largest:.4%}; {limit:.2%} is the limit.")
    sys.exit(largest > limit)


if __name__ == "__main__":
    typer.run(main)
