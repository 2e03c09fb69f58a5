"""`llmq demo`: the whole program in two minutes."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import Device


def demo(
    out: Annotated[Path, typer.Option(help="Directory of everything it writes.")] = Path("demo"),
    device: Device = "auto",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    resume: Annotated[
        bool, typer.Option("--continue", help="Go on where the last demo was stopped.")
    ] = False,
) -> None:
    """Tokenize a small text, train a tiny model on it, plot the loss and sample from it."""
    from llmq.run.demo import run_demo

    run_demo(out, device, steps, resume)
