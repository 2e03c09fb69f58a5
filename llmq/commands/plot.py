"""`llmq plot`: the loss curves of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    logs: Annotated[list[Path], typer.Argument(help="JSON logs of training runs.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("loss.png"),
) -> None:
    """Draw the losses of training runs."""
    from llmq.train.plot import run_plot

    run_plot(logs, out)
