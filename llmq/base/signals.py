"""Signals ask a run to end or to save a checkpoint."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def ending_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and SIGHUP; the last only if the process does not ignore SIGHUP, as
    nohup makes it do."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class Interrupted(BaseException):
    """A signal asked the run to end; the run's state is saved. signum: the signal. The class is not
    a KeyboardInterrupt, which the command-line parser would turn into the exit status of Ctrl-C."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class OutOfTime(BaseException):
    """A run ended before its last step because its time limit was over; its state is saved."""

    STATUS = 75  # EX_TEMPFAIL of sysexits.h: the user may repeat the same command later


class SaveSignal:
    """Records SIGUSR1, which asks for a checkpoint, during a `with` block."""

    def __init__(self) -> None:
        self._asked, self._before = False, None

    def taken(self) -> bool:
        """Return True if a signal came since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGUSR1, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _note(self, signum: int, frame: object) -> None:
        self._asked = True


# A parent that passes signals on sets this environment variable to its start by time.monotonic(), a
# clock that all processes of a machine share.
SUPERVISED = "LLMQ_SUPERVISED"
# seconds in which the parent may pass on a signal that all processes have already got
PASSED_ON = 1.0


class FirstSignal:
    """Keeps the first ending signal in `signum`; a second signal has its usual effect. A second
    SIGHUP is ignored, because a shell and the system each send one. If a parent passes signals on,
    every second signal within PASSED_ON seconds is ignored."""

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
    """Ask Linux to send this signal to this process when its parent dies."""
    PR_SET_PDEATHSIG = 1
    with suppress(OSError, AttributeError):  # only Linux has prctl
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
