"""Commands on speed: `llmq bench`, of configurations, and `llmq rig`, of the machine."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError
from llmq.base.files import report_path
from llmq.base.signals import ending_children
from llmq.bench import BenchOptions
from llmq.commands.common import SaveConfig, save_config, train_options

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="File with these options as keys, lists of values, `zip`, `where` and `runs`.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        parser=report_path,
        metavar="<path>",
        help="Report to write, without .md, .json, .csv and .html.",
    ),
]
Peers = Annotated[Path | None, typer.Option(help="JSON with other programs' speeds.")]
TimedSteps = Annotated[
    int, typer.Option(min=1, help="Steps of one repeat; on a GPU as many more as take a second.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats of the timed steps.")]
Add = Annotated[
    bool, typer.Option("--add", help="To what the report holds; equal runs are replaced.")
]
PlanFirst = Annotated[
    bool,
    typer.Option(
        "--plan-first",
        help="Leave out what the plan says does not fit, and begin with what it says is fastest.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Make only the runs that the report does not have.")
]
Retry = Annotated[bool, typer.Option("--retry", help="With --resume: failed runs again, too.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="End a run after so long and go on, 0: never; if not given 20 times what the plan "
        "predicts and 15 minutes, on the CPU never.",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A B", help="Say what is faster in report B than in A."),
]


@train_options
def bench(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    out: Out = BenchOptions.out,
    peers: Peers = None,
    timed_steps: TimedSteps = BenchOptions.steps,
    repeats: Repeats = BenchOptions.repeats,
    add: Add = False,
    plan_first: PlanFirst = False,
    resume: Resume = False,
    retry: Retry = False,
    timeout: Timeout = None,
    compare: Compare = None,
) -> None:
    """Measure the speed of one or many configurations on random tokens."""
    how = BenchOptions(
        out=out,
        peers=peers,
        steps=timed_steps,
        repeats=repeats,
        add=add,
        plan_first=plan_first,
        resume=resume,
        retry=retry,
        timeout=timeout,
        overwrite=bool(given.pop("overwrite", False)),  # of a run it would have no effect here
    )
    if compare is not None:
        from llmq.bench.report_file import run_compare

        if given or config_file or save or how != BenchOptions():
            raise ConfigError("--compare: reads two reports and makes no runs: leave out the rest")
        run_compare(*compare)
        return
    if save is not None:
        from llmq.bench.sweep_file import one_run

        save_config(save, one_run(given, config_file))
    from llmq.bench.bench import run_bench

    with ending_children():
        run_bench(given, config_file, how, sys.argv)


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
