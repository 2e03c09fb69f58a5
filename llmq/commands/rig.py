"""`llmq rig`: what a machine can do, and what is wrong with it."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.files import report_path
from llmq.base.signals import ending_children


def rig(
    out: Annotated[
        Path,
        typer.Option(
            parser=report_path,
            metavar="<path>",
            help="Report to write, without .md, .json and .png.",
        ),
    ] = Path("rig"),
    minutes: Annotated[
        float, typer.Option(min=2, max=10, help="That it takes at most; parts become shorter.")
    ] = 10.0,
) -> None:
    """Measure this machine, say what is wrong with it, and keep its rates for plans."""
    from llmq.rig.rig import run_rig

    with ending_children():
        run_rig(out, minutes)
