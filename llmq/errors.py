"""Errors that a user can cause and can fix. Everything else is a bug and keeps its traceback."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO


class LlmqError(Exception):
    """What is wrong, where, and what to do about it, in one line. The CLI prints it and exits 2."""


class ConfigError(LlmqError):
    """An option, a preset name or a model's config.json that cannot be used as it is."""


class DataError(LlmqError):
    """A token file, a text input or a tokenizer that is missing, damaged or does not fit."""


def warn(lines: Iterable[str]) -> None:
    """Tell the user of what may not be as meant, without stopping: one line each."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def discard(stream: TextIO) -> None:
    """Let all that is written to it from now on succeed, also what Python flushes at exit."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def ending_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and a lost terminal unless that is ignored already, as nohup has it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class Interrupted(BaseException):
    """A signal asked the run to end; its state is saved. signum: which one.

    No KeyboardInterrupt: the command-line parser would turn that into the status of Ctrl-C.
    """

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def ending_children() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that no child outlives this process."""

    def stop(signum: int, frame: object) -> None:
        raise Interrupted(signum)

    signals = [s for s in ending_signals() if s != signal.SIGINT]
    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
