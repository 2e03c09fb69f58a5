"""`llmq`: its commands, one module each, and what becomes of their errors.

A command imports its implementation when it runs, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated

import typer

from llmq import __version__
from llmq.base.errors import LlmqError, discard
from llmq.base.signals import Interrupted
from llmq.commands import (
    bench,
    demo,
    export,
    plan,
    plot,
    sample,
    show,
    tokenize,
    train,
    train_tokenizer,
    verify,
    watch,
)
from llmq.commands.common import TrainCommand

app = typer.Typer(
    name="llmq",
    help="Train Qwen-, Llama- and GPT-2-class language models on one machine.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"llmq {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    pass


app.command(cls=TrainCommand)(train.train)
app.command(cls=TrainCommand)(plan.plan)
app.command(cls=TrainCommand)(verify.verify)
app.command()(tokenize.tokenize)
app.command()(train_tokenizer.train_tokenizer)
app.command()(show.show)
app.command()(demo.demo)
app.command()(sample.sample)
app.command()(export.export)
app.command()(plot.plot)
app.command()(watch.watch)
app.command(cls=TrainCommand)(bench.bench)


# The base of all errors of the command-line parser, whose own module is not public.
_UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _run(args: list[str]) -> int:
    """Run a command and return the exit status: 2 after an error that the user can fix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # else a console without UTF-8 is an error
            stream.reconfigure(errors="backslashreplace")
    try:
        command = typer.main.get_command(app)
        status = command.main(args=args or ["--help"], prog_name="llmq", standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as stop:
        return 128 + stop.signum
    except (typer.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        discard(sys.stdout)  # whoever read our output has gone
        return 1
    except (_UsageError, LlmqError, OSError, MemoryError, RecursionError) as error:
        if os.environ.get("LLMQ_DEBUG", "0") != "0":
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


def _one_line(error: BaseException) -> str:
    """What the user needs to know of an error."""
    if isinstance(error, _UsageError):
        text = error.format_message()
        if "extra argument" in text and isinstance(error.ctx.command, TrainCommand):
            text += " Put a pattern such as 'data/train*.bin' in quotes."
    elif isinstance(error, MemoryError):
        text = "out of host memory, lower --batch-size or --seq-len"
        text += f": {error}" if str(error) else ""
    elif isinstance(error, RecursionError):
        text = "a JSON or YAML file is nested too deeply, mend it (LLMQ_DEBUG=1 shows where)"
    elif isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.strerror, error.filename) if part)
        if error.errno == errno.ENOSPC:
            text += "; free some space or write to another disk"
    else:
        text = str(error) or type(error).__name__
    notes = ", ".join(getattr(error, "__notes__", ()))  # such as the rank it comes from
    return " ".join([*text.split(), *([f"({notes})"] if notes else [])])


def main() -> None:
    """Entry point of `llmq`."""
    sys.exit(_run(sys.argv[1:]))


def train_main() -> None:
    """Entry point of `llmq-train`, the same as `llmq train`."""
    sys.exit(_run(["train", *sys.argv[1:]]))
