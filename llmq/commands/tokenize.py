"""`llmq tokenize`: texts and conversations to token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.signals import ending_children


def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text, JSON lines, JSON or Parquet; globs.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or a folder with tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Directory of the token files.")],
    field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the documents kept for validation.")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per file.")] = 100_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores.")] = None,
    special_tokens: Annotated[
        str,
        typer.Option(help="auto: those that transformers adds to a text (BOS, EOS); none."),
    ] = "auto",
    format: Annotated[
        str,
        typer.Option(
            help="Records: text, or conversations: messages, conversations, prompt, instruction; "
            "auto: by their fields."
        ),
    ] = "auto",
    train_on: Annotated[
        str, typer.Option(help="Of conversations: assistant, last (of its messages) or all.")
    ] = "assistant",
    chat_template: Annotated[
        str | None, typer.Option(help="File, or name of one of the tokenizer's; its own.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Count the documents that are longer.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files.")] = False,
) -> None:
    """Turn texts and conversations into token files."""
    from llmq.data.tokenize import tokenize

    with ending_children():
        summary = tokenize(
            inputs,
            tokenizer=tokenizer,
            out=out,
            field=field,
            eval_fraction=eval_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            overwrite=overwrite,
            special_tokens=special_tokens,
            format=format,
            train_on=train_on,
            chat_template=chat_template,
            seq_len=seq_len,
        )
    print(summary.describe())
