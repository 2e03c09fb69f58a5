"""The line that tells the user of an error."""

from __future__ import annotations

import errno
from typing import Any

import typer

from llmq.base.errors import LlmqError
from llmq.commands.common import TrainCommand

# The base of all errors of the command-line parser, whose own module is not public.
LONGEST = 2000  # characters of an error: values of others may have millions
UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _meant(error: Any) -> str | None:
    """The options that one that is not there may stand for: those that begin so, if there are any.

    The parser's own guess goes by letters alone, and takes --eval-every for --eval-seed.
    """
    name = getattr(error, "option_name", None)
    if name is None or not hasattr(error, "possibilities"):
        return None
    known = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
    begun = sorted(flag for flag in known if flag.startswith(name))
    return begun and f"No such option: {name}, did you mean {' or '.join(begun)}?"


def one_line(error: BaseException) -> str:
    """The text that the user needs to know of an error."""
    if isinstance(error, UsageError):
        text = _meant(error) or error.format_message()
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
        text = error.headline if isinstance(error, LlmqError) else str(error)
        text = text or type(error).__name__
    notes = ", ".join(getattr(error, "__notes__", ()))  # such as the rank it comes from
    text = " ".join([*text.split(), *([f"({notes})"] if notes else [])])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
