"""Errors that a user can cause and can fix. Everything else is a bug and keeps its traceback."""

import functools
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from llmq.base.console import printable


class LlmqError(Exception):
    """An error of the user's or the machine's: its text says in one line what is wrong, where, and
    what to do about it. The CLI prints it and exits with STATUS. details: further lines, where what
    to do is a list; str() of the error has them too."""

    STATUS = 2

    def __init__(self, headline: str = "", details: Sequence[str] = ()):
        super().__init__(headline)
        self.headline, self.details = str(headline), tuple(details)

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details])


class ConfigError(LlmqError):
    """An option, a preset name or a model's config.json that cannot be used as it is."""


class DataError(LlmqError):
    """A token file, a text input or a tokenizer that is missing, damaged or does not fit."""


class ModelError(LlmqError):
    """The model's weights, or what it computes, are no finite numbers."""


class DiskError(LlmqError):
    """A file could not be written; nothing of it is left, and what was there stays."""


class MachineError(LlmqError):
    """A GPU, its driver or another process does not do what it should: later it may."""

    STATUS = 71  # EX_OSERR of sysexits.h


def status_of(error: BaseException) -> int:
    """The status with which a process ends after an error: the table in docs/logs.md. 1 is a
    bug's."""
    if isinstance(error, LlmqError):
        return error.STATUS
    known = isinstance(error, OSError | MemoryError | RecursionError)
    return LlmqError.STATUS if known else 1


def warn(*lines: str) -> None:
    """Tell the user of what may not be as meant, without stopping: one line each."""
    for line in (printable(line.replace("\n", " ")) for line in lines):
        _warnings.append(line)
        if not _kept:
            print_error(f"warning: {line}")


@functools.cache
def warn_once(line: str) -> None:
    """The same, of a line that was not told before."""
    warn(line)


_warnings: deque[str] = deque(maxlen=1000)
_kept = False


def keep_warnings() -> None:
    """From now on `warn` prints nothing: another process asks `taken_warnings` for them."""
    global _kept
    _kept = True


def taken_warnings() -> list[str]:
    """The warnings given since this was last called."""
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
    """Let all that is written to it from now on succeed, also what Python flushes at exit."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())
