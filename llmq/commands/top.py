"""`llmq top`: a run that is going, and the GPUs it runs on."""

from typing import Annotated

import typer

from llmq.commands.common import run_names, starting_with


def top(
    log: Annotated[
        str | None,
        typer.Argument(
            autocompletion=starting_with(run_names),
            help="Name of a run, or its JSON log; the newest one that is being written if not "
            "given. Without one: all GPUs of this machine.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once, as where there is no terminal.")
    ] = False,
) -> None:
    """Show the progress of a run and its GPUs, second by second, until the run ends or Ctrl-C."""
    from llmq.run.run_paths import find_log, running_log
    from llmq.run.top import run_top

    run_top(running_log() if log is None else find_log(log), once=once)
