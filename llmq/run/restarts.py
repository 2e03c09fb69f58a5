"""`llmq train --restarts`: a parent process, without a GPU, restarts a crashed run. Each attempt is
a process with the user's command, which continues from the newest good checkpoint and writes the
same log."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmq.base.errors import LlmqError, MachineError
from llmq.base.signals import SUPERVISED, OutOfTime, ending_signals, signal_from_parent
from llmq.checkpoint.manifest import MANIFEST
from llmq.checkpoint.store import checkpoints_by_name
from llmq.options.option_types import NEWEST
from llmq.options.options import TrainConfig
from llmq.run.sensors import Sensor
from llmq.runtime.nvml import all_gpus, open_nvml

PAUSES = 5.0, 300.0  # in seconds: first pause before a restart, doubled each time; longest pause
POLL = 0.05  # seconds between looks for a signal during a pause


def is_crash(status: int) -> bool:
    """Return True if another attempt may succeed after this exit status, which is negative for a
    signal. Returns False for success (0), bad input (2), a signal that asks for the end, and
    --max-hours."""
    asked = [*ending_signals(), signal.SIGHUP]
    ends = {0, LlmqError.STATUS, OutOfTime.STATUS, *(128 + signum for signum in asked)}
    return status not in ends and -status not in asked


def in_words(status: int) -> str:
    """Return words that say how a process with this exit status ended."""
    if status < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
    hung = " (a GPU or the driver)" if status == MachineError.STATUS else ""
    return f"ended with status {status}{hung}"


def supervise(
    command: Sequence[str], config: TrainConfig, restarts: int, pauses: Sequence[float] = PAUSES
) -> int:
    """Run the command, and run it again after each crash, at most `restarts` times. Returns the
    last exit status. command: `llmq train` with options; appended options override earlier ones.
    pauses: see PAUSES. The run receives ending signals and SIGUSR1 of this process."""
    gpus, before, pause = _gpus(), _Before(config), pauses[0]
    shared = ["--restarts=0", f"--log-file={config.log_file}"]  # the default name has a time
    more: list[str] = []
    with _Run() as run:
        end = run.begin + 3600 * config.max_hours if config.max_hours > 0 else math.inf
        for left in range(restarts, -1, -1):
            known = before.made()
            status = run.wait([*command, *shared, *more])
            if not is_crash(status) or run.signum is not None:
                break
            why = "; ".join([f"the run {in_words(status)}", *_new_errors(gpus)])
            if left == 0:
                _tell(f"error: {why}; it was started {restarts + 1} times, see --restarts")
                break
            more = before.arguments()
            pause = pauses[0] if before.made() != known else pause
            if time.monotonic() + pause >= end:
                _tell(f"error: {why}; --max-hours leaves no time to start it again")
                return OutOfTime.STATUS
            where = "its newest good checkpoint" if before.made() else "where it began"
            times = "once more" if left == 1 else f"{left} times at most"
            _tell(f"warning: {why}; it goes on from {where} in {pause:.0f} s ({times})")
            if run.sleeps(pause):
                _tell(f"Stopped by {signal.Signals(run.signum).name}; go on with --continue")
                return 128 + run.signum
            pause = min(2 * pause, pauses[1])
    return status if status >= 0 else 128 - status


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gpus() -> list[Sensor]:
    """Return sensors of the machine's GPUs, which report errors from now on; [] without NVML."""
    found: list[Sensor] = []
    with suppress(Exception):  # a missing module, library or driver raises unrelated errors
        gpus = enumerate(all_gpus(open_nvml()))
        found = [Sensor(gpu, f"GPU {index}") for index, gpu in gpus if gpu is not None]
    _new_errors(found)
    return found


def _new_errors(gpus: Sequence[Sensor]) -> list[str]:
    """Return lines about errors of GPUs since the last call."""
    return [line for gpu in gpus for line in dict.fromkeys(gpu.errors())]


class _Before:
    """Records the checkpoints and the log that existed before the first attempt of a run."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self._log, self._manifests = _stamp(config.log_file), self._found()

    def _found(self) -> dict[Path, tuple[int, int] | None]:
        with suppress(LlmqError):
            paths = checkpoints_by_name(self._config.checkpoint_dir).values()
            return {path: _stamp(path / MANIFEST) for path in paths}
        return {}

    def made(self) -> set[Path]:
        """Return the checkpoints that were written since the first attempt began."""
        now = self._found().items()
        return {path for path, stamp in now if self._manifests.get(path) != stamp}

    def arguments(self) -> list[str]:
        """Return the arguments that the next attempt appends to the command."""
        on = ["--no-overwrite", f"--continue={NEWEST}"]  # the folders hold this run's own files now
        if self.made():
            return [*on, "--no-new-data"]
        if self._config.continue_from is not None:
            return []  # begin again from the user's checkpoint
        # A changed log proves that files of other runs were moved aside. Until the log changes, a
        # checkpoint in the run's folder may belong to another run.
        return on if _stamp(self._config.log_file) != self._log else []


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    except OSError:
        return None


class _Run:
    """Runs a command as a process in its own process group, to which signals are passed on. signum:
    first ending signal that this parent process received, or None. begin: time.monotonic() at the
    first attempt. If the parent is killed, the run ends, too."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.signum: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> _Run:
        for signum in (*ending_signals(), signal.SIGUSR1):
            self._handlers[signum] = signal.signal(signum, self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _pass(self, signum: int, frame: object) -> None:
        if signum != signal.SIGUSR1:
            self.signum = self.signum or signum
        if self._process is not None:
            self._process.send_signal(signum)

    def wait(self, command: list[str]) -> int:
        """Run a command to its end, and return the command's exit status."""
        process = subprocess.Popen(
            command,
            env=os.environ | {SUPERVISED: str(self.begin)},
            process_group=0,
            # The kernel sends the run SIGTERM when its parent dies; the run then writes a
            # checkpoint.
            preexec_fn=partial(signal_from_parent, signal.SIGTERM),
        )
        self._process = process
        if self.signum is not None:  # a signal came before self._process was set
            process.send_signal(self.signum)
        try:
            return process.wait()
        finally:
            self._process = None

    def sleeps(self, seconds: float) -> bool:
        """Sleep; return True if an ending signal came while sleeping."""
        end = time.monotonic() + seconds
        while self.signum is None and time.monotonic() < end:
            time.sleep(POLL)
        return self.signum is not None
