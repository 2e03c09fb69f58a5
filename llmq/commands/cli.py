"""The command `llmq`: the table of its commands, and the handling of their errors.

A command imports its implementation when the command runs, so that --help answers at once.
"""

import os
import signal
import sys
from copy import copy
from functools import cache
from typing import Any

import typer

from llmq import __version__
from llmq.base.console import doors
from llmq.base.errors import LlmqError, discard, print_error
from llmq.base.signals import Interrupted, OutOfTime
from llmq.commands import bench, data, finetune, logs, models, plan, rl, serve, train
from llmq.commands.common import Command, Group, TrainCommand, UsageError, one_line, option
from llmq.runtime.world import refuse_several

TRAIN = "llmq-train"  # the console script that runs `llmq train`

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 1 << 16}

app = typer.Typer(
    name="llmq",
    help="Train Qwen-, Llama- and GPT-2-class language models on one machine.",
    cls=Group,
    rich_markup_mode=None,  # rich's tables cut names, see common.py
    context_settings=SETTINGS,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"llmq {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    context: typer.Context,
    version: option(
        bool, "Print and exit.", "--version", callback=_print_version, is_eager=True
    ) = False,
) -> None:
    if context.invoked_subcommand not in (None, "train"):
        refuse_several(f"llmq {context.invoked_subcommand}")


PANELS = {  # panels of --help: commands by name; a TrainCommand has the options of a run
    "Begin": {
        "demo": (train.demo, Command),
        "finetune": (finetune.finetune, TrainCommand),
    },
    "Data": {
        "tokenize": (data.tokenize, Command),
        "train-tokenizer": (data.train_tokenizer, Command),
        "data": (data.data, Command),
        "show": (data.show, Command),
    },
    "Before a run": {
        "plan": (plan.plan, TrainCommand),
        "recipe": (plan.recipe, TrainCommand),
        "sweep-lr": (plan.sweep_lr, TrainCommand),
    },
    "Runs": {
        "train": (train.train, TrainCommand),
        "rl": (rl.rl, TrainCommand),
        "top": (logs.top, Command),
        "plot": (logs.plot, Command),
        "watch": (logs.watch, Command),
    },
    "Models": {
        "sample": (models.sample, Command),
        "serve": (serve.serve, Command),
        "eval": (models.evaluate, Command),
        "score": (models.score, TrainCommand),
        "export": (models.export, Command),
        "merge": (models.merge, Command),
        "check": (data.check, Command),
    },
    "Machines": {
        "rig": (bench.rig, Command),
        "bench": (bench.bench, TrainCommand),
        "verify": (train.verify, TrainCommand),
    },
}
COMMANDS = {name: how for panel in PANELS.values() for name, how in panel.items()}
for _panel, _commands in PANELS.items():
    for _name, (_function, _kind) in _commands.items():
        app.command(_name, cls=_kind, rich_help_panel=_panel)(_function)


@cache
def _command(prog_name: str, name: str | None = None) -> Any:
    """Return the command that a console script runs: for `llmq` the group of all commands, for
    `llmq-train` the command `train` with options for shell completion.

    name: the only command to make, because making all commands takes most of a short run's time;
    None: all.
    """
    some = copy(app)
    some.registered_commands = [c for c in app.registered_commands if name in (None, c.name)]
    made = typer.main.get_command(some)
    if prog_name != TRAIN:
        return made
    command = made.commands["train"]
    command.context_settings |= SETTINGS
    command.params += typer.main.get_install_completion_arguments()
    return command


def _join_equals() -> None:
    """Make completion of `--opt=VALUE` work in bash, which passes `=` as a separate word."""
    words, at = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if "=" not in words or not at.isdecimal():
        return
    kept, place = [], int(at)
    for number, word in enumerate(words.replace("\n", " ").split(" ")):
        if word != "=":
            kept.append(word)
        elif number < int(at):
            place -= 1
        else:  # the cursor is directly behind the =
            kept.append("")
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = " ".join(kept), str(place)


def _run(args: list[str], prog_name: str = "llmq") -> int:
    """Run a command and return the exit status, LlmqError.STATUS for errors that the user can fix.

    prog_name: name of the console script.
    """
    _open_standard_streams()
    _join_equals()
    with doors():
        status = _status(args, prog_name)
        _lost_output()  # drops text that cannot be written, even after a signal
        return status


def _status(args: list[str], prog_name: str) -> int:
    try:
        if not args and prog_name != TRAIN:
            args = ["--help"]
        name = "train" if prog_name == TRAIN else args[0] if args[0] in COMMANDS else None
        command = _command(prog_name, name)
        status = command.main(args=args, prog_name=prog_name, standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as stop:
        return 128 + stop.signum
    except OutOfTime:
        return OutOfTime.STATUS
    except (typer.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        discard(sys.stdout)  # the reading process has ended
        return 1
    except (UsageError, LlmqError, OSError, MemoryError, RecursionError) as error:
        if os.environ.get("LLMQ_DEBUG", "0") != "0":
            raise
        details = error.details if isinstance(error, LlmqError) else ()
        lost = _lost_output() if isinstance(error, OSError) else None
        line = one_line(error) if lost is None else f"cannot write standard output: {lost.strerror}"
        print_error(f"error: {line}", *details)
        return error.STATUS if isinstance(error, LlmqError) else LlmqError.STATUS
    return status if isinstance(status, int) else 0


def _lost_output() -> OSError | None:
    """Return the error of standard output if its text cannot be written, else None. The text is
    dropped, because the interpreter would try to write it again at exit, and print a traceback."""
    lost = getattr(sys.stdout, "lost", None)
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        return error
    return lost


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that the shell has closed. Without
    this, the next opened file would get the stream's number, and receive all text that libraries
    print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            stream = open(os.devnull, mode)  # noqa: SIM115 (kept open)
            if stream.fileno() != number:
                os.dup2(stream.fileno(), number)
            setattr(sys, name, stream)


def main() -> None:
    """Run `llmq`, as the entry point of its console script."""
    sys.exit(_run(sys.argv[1:]))


def train_main() -> None:
    """Run `llmq train`, as the entry point of the console script `llmq-train`."""
    sys.exit(_run(sys.argv[1:], TRAIN))
