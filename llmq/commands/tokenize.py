"""`llmq tokenize`: text to token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.signals import ending_children


def tokenize(
    tokenizer: Annotated[
        str,
        typer.Option(help="bytes, a folder with tokenizer.json, or a repository in the cache."),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the token files.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Text, JSON lines, JSON or Parquet; globs; -: standard input."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME[:CONFIG]", help="Data set of the hub, streamed; no inputs."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of --dataset; train if not given.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="Field that holds the text; text if not given.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text of several fields: '{title}\\n{text}'."),
    ] = None,
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the documents kept for validation.")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per file.")] = 100_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores.")] = None,
    special_tokens: Annotated[
        str,
        typer.Option(help="auto: those that transformers adds to a text (BOS, EOS); none."),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files.")] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the tokenizer from the Hugging Face hub.")
    ] = False,
) -> None:
    """Turn text into token files."""
    from llmq.checkpoint.hub import find_tokenizer
    from llmq.data.hub_dataset import dataset_of
    from llmq.data.record_text import one_field
    from llmq.data.tokenize import tokenize

    with ending_children():
        summary = tokenize(
            inputs or [],
            tokenizer=find_tokenizer(tokenizer, download),
            out=out,
            dataset=dataset_of(dataset, split),
            field=one_field(field, template),
            template=template,
            eval_fraction=eval_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            overwrite=overwrite,
            special_tokens=special_tokens,
        )
    print(summary.describe())
