"""Commands about the logs of runs: `llmq plot`, `watch`, `top`."""

from pathlib import Path

from llmq.base.signals import ending_children
from llmq.commands.common import argument, option, run_names, starting_with


def plot(
    logs: argument(
        list[str], "Names of runs, or their JSON logs.", autocompletion=starting_with(run_names)
    ),
    out: option(
        Path | None,
        "File to write: .png, .svg, .pdf or .html (default: loss.png, or loss-2.png if "
        "that is there, and so on).",
    ) = None,
    x: option(str, "What the x-axis counts.", "--x", metavar="step|tokens|hours") = "step",
    html: option(bool, "Write a page with tooltips (default: loss.html).", "--html") = False,
    overwrite: option(bool, "Replace the file that is there.", "--overwrite") = False,
    smoothing: option(
        float, "Weight of the mean so far in the next one, as TensorBoard's.", min=0, max=0.999
    ) = 0.6,
) -> None:
    """Draw losses, evaluations, learning rate, norm, speed, power and clock of runs on one page.

    llmq plot talks
    """
    from llmq.report.plot import run_plot
    from llmq.run.run_paths import find_log

    run_plot([find_log(log) for log in logs], out, x, html, overwrite, smoothing)


def watch(
    log: argument(str, "Name of a run, or its JSON log.", autocompletion=starting_with(run_names)),
    tensorboard: option(Path | None, "Write event files into DIR/NAME.", metavar="DIR") = None,
    wandb: option(str | None, "Send to a run of this W&B project.", metavar="PROJECT") = None,
    name: option(str | None, "Name there; that of the log.") = None,
    interval: option(int, "Seconds between looks at the log; 0: one look.", min=0, max=86400) = 10,
) -> None:
    """Send the log of a run to TensorBoard or W&B, while it is written or afterwards.

    llmq watch talks --tensorboard runs
    """
    how = locals()
    from llmq.report.sinks import run_watch
    from llmq.run.run_paths import find_log

    with ending_children():
        run_watch(**how | {"log": find_log(log)})


def top(
    log: argument(
        str | None,
        "Name of a run, or its JSON log; the newest one that is being written if not "
        "given. Without one: all GPUs of this machine.",
        autocompletion=starting_with(run_names),
        show_default=False,
    ) = None,
    once: option(bool, "Show it once, as where there is no terminal.", "--once") = False,
) -> None:
    """Show the progress of a run and its GPUs, second by second, until the run ends or Ctrl-C.

    llmq top talks
    """
    from llmq.run.run_paths import find_log, running_log
    from llmq.run.top import run_top

    run_top(running_log() if log is None else find_log(log), once=once)
