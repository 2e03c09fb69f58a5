"""`llmq plot`: the curves of runs."""

from pathlib import Path
from typing import Annotated

import typer

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
