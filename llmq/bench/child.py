"""A child process that is ended when it shows no more progress.

The child says by a file that it goes on: it gives it a new modification time.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from pathlib import Path

POLL = 0.5  # seconds
LAST_WORDS = 2.0  # seconds from the signal to say where it is until it is ended


def run_watched(command: list[str], text: str, alive: Path, limit: float) -> int | None:
    """Run it to its end and return its exit status; None if it had to be ended.

    text: its standard input. Its standard output goes to our standard error. alive: the file that
    it touches. limit: seconds from one touch to the next, after which it first gets SIGUSR1, for
    which it may print where it is; 0: as long as it takes.
    """
    alive.touch()
    touched, progress = alive.stat().st_mtime_ns, time.monotonic()
    with tempfile.TemporaryFile("w+") as file:  # whatever its size, and when the child reads it
        file.write(text)
        file.seek(0)
        process = subprocess.Popen(command, stdin=file, stdout=2)
    try:
        while limit == 0 or time.monotonic() - progress < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL)
            if (now := alive.stat().st_mtime_ns) != touched:
                touched, progress = now, time.monotonic()
        process.send_signal(signal.SIGUSR1)
        _wait(process)
        return None
    finally:
        process.kill()
        _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """For a while: what hangs in a driver does not even end when it is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS)
