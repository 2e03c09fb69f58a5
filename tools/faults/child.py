"""A function in a process of its own, forked from this one: what it printed and how it ended."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

HANG_SECONDS = 60  # by the clock, of a machine that may be busy with other things
CPU_SECONDS = 20  # no attempt needs two
MEMORY = 4 << 30  # bytes more than this process has


@dataclass(frozen=True, slots=True)
class Ended:
    """status: of exit, or minus the signal. hung: whether it had to be ended."""

    status: int
    text: str
    hung: bool

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Ends of llmq that must not be, as (category, text)."""
        if self.hung:
            return [("hang", f"no end after {HANG_SECONDS} s, or {CPU_SECONDS} s of CPU")]
        if "Traceback (most recent call last)" in self.text:
            lines = self.text[self.text.rindex("Traceback") :].splitlines()
            return [("traceback", " / ".join(line.strip() for line in lines[-7:]))]
        if self.status == 2 and self.text.count("error: ") == 0:
            return [("traceback", f"status 2 without a reason: {self.text[-300:]}")]
        if self.status not in (0, 2, 75, -signal.SIGKILL):
            return [("traceback", f"status {self.status}: {self.text[-300:]}")]
        return []


def run(function: Callable[[], int], kill_after: float | None = None) -> Ended:
    """Call function(), whose result is the status, in a fork of this process.

    kill_after: seconds after which SIGKILL comes, which is no hang.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(function, output.fileno())
        status, hung = _wait(pid, kill_after)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"), hung)


def _child(function: Callable[[], int], output: int) -> None:
    """Never returns."""
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (until the process ends)
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = function()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def _wait(pid: int, kill_after: float | None) -> tuple[int, bool]:
    descriptor, hung = os.pidfd_open(pid), False
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        seconds = HANG_SECONDS if kill_after is None else kill_after
        if not poll.poll(seconds * 1000):
            hung = kill_after is None
            os.kill(pid, signal.SIGKILL)
        _, code = os.waitpid(pid, 0)
    finally:
        os.close(descriptor)
    status = os.waitstatus_to_exitcode(code)
    # SIGKILL is also what follows the limit of CPU time, where it is no fault that was planned.
    return status, hung or status == -signal.SIGXCPU
