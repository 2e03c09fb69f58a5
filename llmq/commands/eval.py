"""`llmq eval`: how good a model is at tasks."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import Adapter, Device, ModelDtype


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Model directory, cached repository, or checkpoint.")
    ],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="[KIND=]FILE",
            help="Questions or texts in JSON or Parquet, or a text file; may be repeated.",
        ),
    ],
    adapter: Adapter = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only as many records of each file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON to write.")] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence; what is longer loses its beginning."),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a GPU computes at a time.")
    ] = 4096,
    device: Device = "auto",
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs to use; 0: all.")] = 0,
    model_dtype: ModelDtype = "bf16",
) -> None:
    """Measure accuracy and perplexity of a model, as lm-eval defines them."""
    from llmq.run.evaluate import run_eval

    run_eval(
        model,
        task,
        adapter=adapter,
        limit=limit,
        out=out,
        seq_len=seq_len,
        batch_tokens=batch_tokens,
        device=device,
        gpus=gpus,
        model_dtype=model_dtype,
    )
