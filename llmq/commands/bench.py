"""`llmq bench`: the speed of configurations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.signals import ending_children
from llmq.commands.common import SaveConfig, save_config, train_options


@train_options
def bench(
    given: dict[str, Any],
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="File with these options as keys, lists of values, and a list `runs`.",
        ),
    ] = None,
    save: SaveConfig = None,
    out: Annotated[Path, typer.Option(help="Report to write, without .md and .json.")] = Path(
        "bench"
    ),
    peers: Annotated[Path | None, typer.Option(help="JSON with other programs' speeds.")] = None,
    timed_steps: Annotated[int, typer.Option(min=1, help="Steps of one repeat.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the timed steps.")] = 3,
    add: Annotated[
        bool, typer.Option("--add", help="To what the report holds; equal runs are replaced.")
    ] = False,
) -> None:
    """Measure the speed of one or many configurations on random tokens."""
    from llmq.bench.bench import run_bench

    if save is not None:
        from llmq.bench.bench import one_run

        save_config(save, one_run(given, config_file))
    with ending_children():
        run_bench(
            given,
            config_file,
            out=out,
            peers=peers,
            steps=timed_steps,
            repeats=repeats,
            add=add,
            argv=sys.argv,
        )
