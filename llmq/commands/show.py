"""`llmq show`: documents of token files."""

from typing import Annotated

import typer


def show(
    files: Annotated[list[str], typer.Argument(help="Token files, patterns, folders of tokenize.")],
    document: Annotated[
        int | None, typer.Option(min=1, help="First document to print, from 1.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Documents to print: 3, or 1 with --document.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="A line for each token, with its id.")] = False,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Show where documents are cut, and count them.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a folder; that beside the files.")
    ] = None,
    document_separator: Annotated[
        int | None, typer.Option(min=0, help="Id that ends a document, where no .docs file does.")
    ] = None,
) -> None:
    """Print documents of token files, with what is trained of them, and counts."""
    from llmq.data.show import run_show

    run_show(
        files,
        document=document,
        limit=limit,
        ids=ids,
        seq_len=seq_len,
        tokenizer=tokenizer,
        document_separator=document_separator,
    )
