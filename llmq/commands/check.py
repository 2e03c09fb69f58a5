"""`llmq check`: whether token files, checkpoints and models are damaged."""

from typing import Annotated

import typer


def check(
    files: Annotated[
        list[str], typer.Argument(help="Token files, checkpoints, models, folders or patterns.")
    ],
    trained: Annotated[
        bool,
        typer.Option(
            "--trained", help="Say which trained tensors of checkpoints have not moved instead."
        ),
    ] = False,
) -> None:
    """Compare files with their checksums, and say which are damaged: exit status 0 if none."""
    from llmq.checkpoint.check import run_check

    run_check(files, trained=trained)
