"""`llmq export`: a checkpoint as a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import checked


def export(
    out_dir: Annotated[Path, typer.Option(help="Directory of the model.")],
    checkpoint_dir: Annotated[
        Path, typer.Option(help="A checkpoint, or a directory whose newest one is taken.")
    ] = Path("ckpt/llmq"),
    model_dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp32; as the run's if not given.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write weights that are infinities or NaNs, too.")
    ] = False,
) -> None:
    """Write a checkpoint as a model directory that transformers loads."""
    from llmq.checkpoint.export import export_checkpoint

    dtype = None if model_dtype is None else checked("model_dtype", model_dtype)
    files = export_checkpoint(checkpoint_dir, out_dir, dtype, force=force)
    print(f"wrote {', '.join(files)} to {out_dir}")
