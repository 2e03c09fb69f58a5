"""Commands about speed: `llmq bench` measures configurations, `llmq rig` measures the machine."""

import sys
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import report_path
from llmq.base.signals import ending_children
from llmq.bench import BenchOptions
from llmq.commands.common import SaveConfig, option, save_config, train_options

ConfigFile = option(
    Path | None,
    "File with these options as keys, lists of values, and `runs`.",
    "--config",
    metavar="FILE",
)
Out = option(
    Path,
    "Report to write, without .md, .json, .csv and .png.",
    parser=report_path,
    metavar="<path>",
)
Repeats = option(int, "Repeats of the timed steps.", min=1)
Compare = option(
    tuple[Path, Path] | None,
    "Say what is faster in report B than in A.",
    "--compare",
    metavar="A B",
)


@train_options
def bench(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    out: Out = BenchOptions.out,
    timed_steps: option(
        int, "Steps of one repeat; on a GPU as many more as take a second.", min=1
    ) = BenchOptions.steps,
    repeats: Repeats = BenchOptions.repeats,
    plan_first: option(
        bool,
        "Leave out what the plan says does not fit, and begin with what it says is fastest.",
        "--plan-first",
    ) = False,
    resume: option(bool, "Make only the runs that the report does not have.", "--resume") = False,
    retry: option(bool, "With --resume: failed runs again, too.", "--retry") = False,
    timeout: option(
        float | None,
        "End a run after so long and go on, 0: never; if not given 20 times what the plan "
        "predicts and 15 minutes, on the CPU never.",
        min=0,
        metavar="SECONDS",
    ) = None,
    compare: Compare = None,
) -> None:
    """Measure the speed of one or many configurations on random tokens.

    llmq bench --model Qwen2.5-1.5B --from-scratch --matmul-dtype e4m3
    """
    how = BenchOptions(
        out=out,
        steps=timed_steps,
        repeats=repeats,
        plan_first=plan_first,
        resume=resume,
        retry=retry,
        timeout=timeout,
        overwrite=bool(given.pop("overwrite", False)),  # has no effect on a run here
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
    out: option(
        Path, "Report to write, without .json.", parser=report_path, metavar="<path>"
    ) = Path("rig"),
    minutes: option(float, "That it takes at most; parts become shorter.", min=2, max=10) = 10.0,
    offload_dir: option(
        list[str], "Directory whose disk is measured, too; several share the traffic."
    ) = (),
) -> None:
    """Measure this machine, say what is wrong with it, and keep its rates for plans.

    llmq rig
    """
    from llmq.rig.rig import run_rig

    with ending_children():
        run_rig(out, minutes, folders=offload_dir)
