"""`llmq sample`: continues a text."""

from typing import Annotated

import typer

from llmq.base.errors import ConfigError
from llmq.commands.common import Adapter, Device, Model, ModelDtype


def sample(
    model: Model,
    adapter: Adapter = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest tokens of this mass.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 42,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer --prompt, or each line of standard input.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of --chat.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Template of --chat, a file; the tokenizer's.")
    ] = None,
    device: Device = "auto",
    model_dtype: ModelDtype = "bf16",
) -> None:
    """Continue a text with a trained model."""
    options = {
        "adapter": adapter,
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "num_samples": num_samples,
        "device": device,
        "model_dtype": model_dtype,
    }
    if chat:
        from llmq.run.sampling import run_chat

        return run_chat(model, system=system, chat_template=chat_template, **options)
    for flag, value in (("--system", system), ("--chat-template", chat_template)):
        if value is not None:
            raise ConfigError(f"{flag}: needs --chat")
    from llmq.run.sampling import run_sample

    return run_sample(model, **options)
