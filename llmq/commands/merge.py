"""`llmq merge`: a model and its adapters as one model."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import Model, checks


def merge(
    base: Model,
    adapter: Annotated[Path, typer.Argument(help="Directory of adapters in PEFT's format.")],
    out: Annotated[Path, typer.Option(help="Directory of the model.")],
    model_dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16 or fp32; as the model if not given.", callback=checks("model_dtype")
        ),
    ] = None,
    base_dtype: Annotated[
        str | None,
        typer.Option(
            help="Format that the model is rounded to before; as in training if not given. "
            "bf16: it is taken as it is, e4m3, int8, nf4, mxfp4: as --base-dtype of train.",
            callback=checks("base_dtype"),
        ),
    ] = None,
) -> None:
    """Write a model with its adapters as a model directory that needs no PEFT."""
    from llmq.checkpoint.merge import merge_adapter

    files = merge_adapter(base, adapter, out, model_dtype, base_dtype)
    print(f"wrote {', '.join(files)} to {out}")
