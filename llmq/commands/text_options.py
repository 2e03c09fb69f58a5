"""Options of the commands that read texts: which, and what of a record is its text."""

from __future__ import annotations

from typing import Annotated

import typer

Inputs = Annotated[
    list[str] | None,
    typer.Argument(help="Text, JSON lines, JSON, CSV, TSV or Parquet; globs; -: standard input."),
]
Dataset = Annotated[
    str | None,
    typer.Option(metavar="NAME[:CONFIG]", help="Data set of the hub, streamed; no inputs."),
]
Split = Annotated[str | None, typer.Option(help="Of --dataset; train if not given.")]
Field = Annotated[
    list[str] | None, typer.Option(help="Field that holds the text; text if not given.")
]
Template = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Text of several fields: '{title}\\n{text}'."),
]
