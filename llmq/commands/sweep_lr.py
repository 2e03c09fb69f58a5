"""`llmq sweep-lr`: the learning rate of a small model, from which `llmq recipe` goes on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.commands.common import train_options
from llmq.commands.recipe import Data, files_of


@train_options
def sweep_lr(
    given: dict[str, Any],
    data: Data = None,
    depth: Annotated[int, typer.Option(min=1, help="Blocks; the width is 64 times as many.")] = 4,
    rates: Annotated[int, typer.Option(help="Rates of the ladder, each twice the last.")] = 5,
    out: Annotated[Path, typer.Option(help="File with the runs and the best rate.")] = Path(
        "rates.json"
    ),
) -> None:
    """Train a small model at a ladder of learning rates, and find the best one."""
    from llmq.bench.losses import run_sweep_lr
    from llmq.options.options import OPTIONS

    files = {OPTIONS[name].flags[0]: value for name, value in files_of(data, given).items()}
    run_sweep_lr(files | given, depth=depth, rates=rates, out=out)
