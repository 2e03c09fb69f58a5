#!/usr/bin/env python3
"""Training a mixture of experts beside transformers with its grouped products: tokens per second.

    PYTHONPATH=. tools/experts_speed.py --model OLMoE-1B-7B --num-layers 4 --batch-size 8
        --seq-len 2048 --grad-accumulation 4 --form "" --form "--matmul-dtype=e4m3"
        [more options of llmq train]

Both sides train all weights of a preset from scratch in bf16, with bf16 moments, on random tokens,
as many micro-batches a step, with clipped gradients and AdamW; a card has place for all of OLMoE's
layers only without transformers' temporaries. transformers' side has its experts multiplied by
`grouped_mm`, SDPA, fused AdamW, and with --compile layers that are compiled. Each side is timed
after steps that warm up, for so many seconds. --form: further options of llmq, once for each row.
"""

from __future__ import annotations

import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from llmq.bench.child import WARM_UP
from llmq.bench.measure import MANY, open_trainer, random_batches, timed_steps, versions_of
from llmq.commands.common import TrainCommand, train_options
from tools.peft_speed import options_of

OURS = {"from-scratch": True, "opt-m-dtype": "bf16", "opt-v-dtype": "bf16"}
LEARNING_RATE, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def seconds_of(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """The median time of a step."""
    for _ in range(WARM_UP):
        step()
    wait()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or not times:
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


Size = tuple[int, int, int]
"""Micro-batches of a step, sequences of one, tokens of a sequence."""


def ours(options: dict[str, Any], seconds: float) -> tuple[float, ModelConfig, Size]:
    """Tokens per second, the model, and the size of a step."""
    with open_trainer(options, MANY) as trainer:
        batches = random_batches(trainer)
        for _ in range(WARM_UP):
            trainer.step(batches)
        one, _ = timed_steps(trainer, batches, 2)
        one, _ = timed_steps(trainer, batches, max(2, int(seconds / one)))
        size = len(batches), trainer.config.batch_size, trainer.config.seq_len
        return trainer.plan.tokens / one, trainer.model, size


def theirs(model: ModelConfig, size: Size, device: str, compiles: bool, seconds: float) -> float:
    """Tokens per second."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    document = dict(model.to_hf())
    config = AutoConfig.for_model(document.pop("model_type"), **document)
    config.use_cache = config.output_router_logits = False
    torch.manual_seed(0)
    with torch.device(device):  # weights are drawn where they stay
        net = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )  # fmt: skip
        tokens = torch.randint(config.vocab_size, size)
    net.train()
    if compiles:
        for layer in net.model.layers:
            layer.compile(dynamic=False)
    trained = [*net.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, fused=True)

    def step() -> None:
        for micro_batch in tokens:
            (net(input_ids=micro_batch, labels=micro_batch).loss / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return tokens.numel() / seconds_of(step, wait, seconds)


def head(given: dict[str, Any], size: Size, device: str) -> list[str]:
    """The first lines of a page of results."""
    import torch
    import transformers

    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions, (times, rows, length) = versions_of(device) | versions, size
    return [
        f"# {given['model']} beside transformers' grouped products, {where}",
        "",
        f"`{shlex.join(sys.argv)}`, {date.today()}",
        "",
        "; ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"All weights, random ones and random tokens; a step has {times} x {rows} sequences of "
        f"{length}.",
        "",
    ]


@app.command(cls=TrainCommand)
@train_options
def main(
    given: dict[str, Any],
    form: Annotated[list[str] | None, typer.Option(help="Options of a row of llmq.")] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile transformers' layers.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Time of steps of each row.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Print a table."""
    rows, model, size = [], None, (0, 0, 0)
    for text in form or [""]:
        speed, model, size = ours(OURS | given | options_of(text), seconds)
        rows.append((f"llmq {text}".rstrip(), speed))
        gc.collect()
    device = "cpu" if given.get("device") == "cpu" else "cuda"
    base = theirs(model, size, device, compile_, seconds)
    compiled = ", compiled layers" if compile_ else ""
    rows.append((f"transformers, grouped_mm{compiled}", base))
    table = ["| | tok/s | of transformers' |", "| --- | --- | --- |"]
    table += [f"| {name} | {speed:,.0f} | {speed / base:.2f} |" for name, speed in rows]
    print(*table, sep="\n")
    if out:
        out.write_text("\n".join([*head(given, size, device), *table, ""]))


if __name__ == "__main__":
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")
