"""Commands on the logs of runs: `llmq plot`, `watch`, `top`."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.signals import ending_children
from llmq.commands.common import run_names, starting_with


def plot(
    logs: Annotated[
        list[str],
        typer.Argument(
            autocompletion=starting_with(run_names), help="Names of runs, or their JSON logs."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .png, .svg, .pdf or .html (default: loss.png, or loss-2.png if "
            "that is there, and so on)."
        ),
    ] = None,
    x: Annotated[
        str, typer.Option("--x", metavar="step|tokens|hours", help="What the x-axis counts.")
    ] = "step",
    html: Annotated[
        bool, typer.Option("--html", help="Write a page with tooltips (default: loss.html).")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file that is there.")
    ] = False,
) -> None:
    """Draw losses, evaluations, learning rate, norm, speed, power and clock of runs on one page."""
    from llmq.report.plot import run_plot
    from llmq.run.run_paths import find_log

    run_plot([find_log(log) for log in logs], out, x, html, overwrite)


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
    how = locals()
    from llmq.report.watch import run_watch
    from llmq.run.run_paths import find_log

    with ending_children():
        run_watch(**how | {"log": find_log(log)})


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
