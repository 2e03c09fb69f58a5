"""Errors that a user can fix. All other exceptions are bugs and keep their traceback."""

import functools
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from llmq.base.console import printable


class LlmqError(Exception):
    """An error that the user or the machine has caused. Its text says in one line what is wrong,
    where, and what to do; the CLI prints the text and exits with STATUS. details: further lines if
    there are several things to do; str() includes these lines."""

    STATUS = 2

    def __init__(self, headline: str = "", details: Sequence[str] = ()):
        super().__init__(headline)
        self.headline, self.details = str(headline), tuple(details)

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details])


class ConfigError(LlmqError):
    """An option, a preset name or a model's config.json is unusable."""


class DataError(LlmqError):
    """A token file, text input or tokenizer is missing, damaged or unfitting."""


class ModelError(LlmqError):
    """The model's weights or results are not finite numbers."""


NOT_FINITE = (
    "the model's predictions are not finite numbers: its weights are damaged, use an earlier "
    "checkpoint"
)
"""The text of the LlmqError for NaN or an infinity in the results of a forward pass."""


class DiskError(LlmqError):
    """A file could not be written; the incomplete file is removed, and an older file is
    unchanged."""


class MachineError(LlmqError):
    """A GPU, its driver or another process fails; a later try may succeed."""

    STATUS = 71  # EX_OSERR of sysexits.h


def status_of(error: BaseException) -> int:
    """Return a process's exit status after an error, as docs/logs.md lists; 1 stands for a bug."""
    if isinstance(error, LlmqError):
        return error.STATUS
    expected = isinstance(error, OSError | MemoryError | RecursionError)
    return LlmqError.STATUS if expected else 1


def warn(*lines: str) -> None:
    """Warn the user with these lines, without stopping."""
    for line in (printable(line.replace("\n", " ")) for line in lines):
        _warnings.append(line)
        if not _kept:
            print_error(f"warning: {line}")


@functools.cache
def warn_once(line: str) -> None:
    """Warn the user with this line unless the process has already done so."""
    warn(line)


_warnings: deque[str] = deque(maxlen=1000)
_kept = False


def keep_warnings() -> None:
    """From now on keep warnings instead of printing; another process fetches them by
    `taken_warnings`."""
    global _kept
    _kept = True


def taken_warnings() -> list[str]:
    """Return the warnings given since the last call."""
    lines = list(_warnings)
    _warnings.clear()
    return lines


def print_error(*lines: str) -> None:
    """Print lines to standard error; the lines are lost if the stream is closed or its disk is
    full."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let all later writes to a stream succeed, even the text that Python flushes at exit."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())
