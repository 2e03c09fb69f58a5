"""`llmq merge`: a model and its adapters as one model."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import checked


def merge(
    base: Annotated[str, typer.Argument(help="Model directory or cached repository.")],
    adapter: Annotated[Path, typer.Argument(help="Directory of adapters in PEFT's format.")],
    out: Annotated[Path, typer.Option(help="Directory of the model.")],
    model_dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp32; as the model if not given.")
    ] = None,
    base_dtype: Annotated[
        str | None,
        typer.Option(
            help="Format that the model is rounded to before; as in training if not given. "
            "bf16: it is taken as it is, e4m3, int8, nf4, mxfp4: as --base-dtype of train."
        ),
    ] = None,
) -> None:
    """Write a model with its adapters as a model directory that needs no PEFT."""
    from llmq.checkpoint.merge import merge_adapter

    kept = None if base_dtype is None else checked("base_dtype", base_dtype)
    dtype = None if model_dtype is None else checked("model_dtype", model_dtype)
    files = merge_adapter(base, adapter, out, dtype, kept)
    print(f"wrote {', '.join(files)} to {out}")
