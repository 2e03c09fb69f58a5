"""`llmq watch`: the log of a run in TensorBoard or Weights & Biases."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.signals import ending_children
from llmq.commands.common import run_names, starting_with


def watch(
    log: Annotated[
        str,
        typer.Argument(
            autocompletion=starting_with(run_names), help="Name of a run, or its JSON log."
        ),
    ],
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write event files into DIR/NAME.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send to a run of this W&B project.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name there; that of the log.")] = None,
    interval: Annotated[
        int, typer.Option(min=0, max=86400, help="Seconds between looks at the log; 0: one look.")
    ] = 10,
) -> None:
    """Send the log of a run to TensorBoard or W&B, while it is written or afterwards."""
    from llmq.report.watch import run_watch
    from llmq.run.run_paths import find_log

    with ending_children():
        run_watch(find_log(log), tensorboard=tensorboard, wandb=wandb, name=name, interval=interval)
