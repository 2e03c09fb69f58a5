"""Signals that ask a run to end, and their effect on running work."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def ending_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class Interrupted(BaseException):
    """A signal asked the run to end; its state is saved. signum: the signal. Not a
    KeyboardInterrupt, which the command-line parser would turn into the status of Ctrl-C."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class OutOfTime(BaseException):
    """A run ended before its last step because its time was over; its state is saved."""

    STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command may be repeated later


class SaveSignal:
    """Notes SIGUSR1, which asks for a checkpoint, during a `with` block."""

    def __init__(self) -> None:
        self._asked, self._before = False, None

    def taken(self) -> bool:
        """True if a signal came since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGUSR1, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _note(self, signum: int, frame: object) -> None:
        self._asked = True


# Environment variable of a run whose parent passes signals on: the start of this, by
# time.monotonic(), which all processes of a machine share.
SUPERVISED = "LLMQ_SUPERVISED"
PASSED_ON = 1.0  # seconds in which the parent passes on a signal that all processes got


class FirstSignal:
    """Keeps the first ending signal in `signum`; a second one acts as usual. Exceptions are SIGHUP,
    which a shell and the system each send, and signals passed on by a parent, which may have
    reached all processes."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for signum in ending_signals():
            self._before[signum] = signal.signal(signum, self._note)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            if SUPERVISED not in os.environ:
                self._act_as_usual()
        elif time.monotonic() - self._since > PASSED_ON:
            self._act_as_usual()
            os.kill(os.getpid(), signum)

    def _act_as_usual(self) -> None:
        self.__exit__()
        if signal.SIGHUP in self._before:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def signal_from_parent(signum: int) -> None:
    """Have Linux send this signal to this process when its parent dies."""
    PR_SET_PDEATHSIG = 1
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


@contextmanager
def ending_children() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block like Ctrl-C, so that no child outlives this process."""

    def stop(signum: int, frame: object) -> None:
        raise Interrupted(signum)

    signals = [s for s in ending_signals() if s != signal.SIGINT]
    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
