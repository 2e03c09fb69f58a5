"""`llmq sample`: continues a text."""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.commands.common import checked


def sample(
    model: Annotated[str, typer.Argument(help="Model directory or cached repository.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest tokens of this mass.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 42,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model_dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
) -> None:
    """Continue a text with a trained model."""
    from llmq.train.sampling import run_sample

    run_sample(
        model,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_samples=num_samples,
        device=checked("device", device),
        model_dtype=checked("model_dtype", model_dtype),
    )
