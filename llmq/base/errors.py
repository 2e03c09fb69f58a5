"""Errors that a user can fix. All other exceptions are bugs and keep their traceback."""

import functools
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from llmq.base.console import printable


class LlmqError(Exception):
    """An error of the user or the machine. Its text says in one line what is wrong, where, and what
    to do; the CLI prints it and exits with STATUS. details: further lines, if there are several
    things to do; str() includes them."""

    STATUS = 2

    def __init__(self, headline: str = "", details: Sequence[str] = ()):
        super().__init__(headline)
        self.headline, self.details = str(headline), tuple(details)

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details])


class ConfigError(LlmqError):
    """An unusable option, preset name or config.json of a model."""


class DataError(LlmqError):
    """A missing, damaged or unfitting token file, text input or tokenizer."""


class ModelError(LlmqError):
    """The model's weights or results are not finite numbers."""


NOT_FINITE = (
    "the model's predictions are not finite numbers: its weights are damaged, use an earlier "
    "checkpoint"
)
"""The text of the LlmqError for NaN or an infinity in the results of a forward pass."""


class DiskError(LlmqError):
    """A file could not be written; no part of it is left, and an older file is unchanged."""


class MachineError(LlmqError):
    """A GPU, its driver or another process fails; a later try may succeed."""

    STATUS = 71  # EX_OSERR of sysexits.h


def status_of(error: BaseException) -> int:
    """Return a process's exit status after an error, see docs/logs.md. 1: a bug."""
    if isinstance(error, LlmqError):
        return error.STATUS
    expected = isinstance(error, OSError | MemoryError | RecursionError)
    return LlmqError.STATUS if expected else 1


def warn(*lines: str) -> None:
    """Warn the user, without stopping: one line each."""
    for line in (printable(line.replace("\n", " ")) for line in lines):
        _warnings.append(line)
        if not _kept:
            print_error(f"warning: {line}")


@functools.cache
def warn_once(line: str) -> None:
    """Warn, unless this line was given before."""
    warn(line)


_warnings: deque[str] = deque(maxlen=1000)
_kept = False


def keep_warnings() -> None:
    """Print no warnings from now on: another process fetches them by `taken_warnings`."""
    global _kept
    _kept = True


def taken_warnings() -> list[str]:
    """Return the warnings since the last call."""
    lines = list(_warnings)
    _warnings.clear()
    return lines


def print_error(*lines: str) -> None:
    """Print lines to standard error; a closed or full stream drops the lines silently."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let all later writes to a stream succeed, even what Python flushes at exit."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())
