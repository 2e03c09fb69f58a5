"""A child process that is ended when it shows no more progress, and what it said at last.

The child says by a file that it goes on: it gives it a new modification time.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmq.base.signals import signal_from_parent
from llmq.options.options_io import make_config
from llmq.run.restarts import in_words

POLL = 0.5  # seconds
LAST_WORDS = 2.0  # seconds from the signal to say where it is until it is ended
KEPT_BYTES = 8192  # of what it printed
KEPT_LINES = 40
CHILD = (sys.executable, "-m", "llmq.bench.measure")
WARM_UP = 3  # steps: launched one by one, captured, replayed
SETTLE = 2.0  # seconds of steps on a GPU, until its clock is that of its power limit
TIMED = 1.0  # seconds at least that a repeat lasts on a GPU: for shorter ones its clock may rise
EXTRA_STEPS = 3  # after the timed ones: one for the host's work, two for the launches
START_SECONDS = 60  # of a child, beside --watchdog: several ranks watch themselves from then on


class Ended(NamedTuple):
    """status: of its exit; None: it had to be ended. late: because its time was over, not because
    it made no progress. words: the last lines that it printed."""

    status: int | None
    late: bool
    words: list[str]


def watched(command: list[str], text: str, alive: Path, limit: float, timeout: float = 0) -> Ended:
    """Run it to its end, its output to our standard error. text: its standard input. alive: the
    file that it touches. limit: seconds from one touch to the next, timeout: of the whole; 0: as
    long as it takes. It first gets SIGUSR1, for which it may print where it is."""
    alive.touch()
    touched, progress = alive.stat().st_mtime_ns, time.monotonic()
    start, late = progress, False
    with tempfile.TemporaryFile("w+") as file:  # whatever its size, and when the child reads it
        file.write(text)
        file.seek(0)
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}  # what is killed prints all the same
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with _without_ctrl_c():
            process = subprocess.Popen(command, stdin=file, env=unbuffered, **pipes)
    said = bytearray()
    reader = threading.Thread(target=_pass_on, args=(process.stdout, said), daemon=True)
    reader.start()
    status = None
    try:
        while limit == 0 or time.monotonic() - progress < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL)
                break
            if late := 0 < timeout <= time.monotonic() - start:
                break
            if (now := alive.stat().st_mtime_ns) != touched:
                touched, progress = now, time.monotonic()
        if status is None:
            process.send_signal(signal.SIGUSR1)
            _wait(process)
    finally:
        process.kill()
        _wait(process)
        reader.join(LAST_WORDS)
    words = [line.rstrip() for line in said.decode(errors="replace").splitlines()]
    return Ended(status, late, [line for line in words if line][-KEPT_LINES:])


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A process that is made here never gets Ctrl-C, which a terminal sends to all: not even while
    it imports would it print a traceback. We get ours behind the block, and end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """For a while: what hangs in a driver does not even end when it is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS)


def _pass_on(pipe: IO[bytes], said: bytearray) -> None:
    """To our standard error as it comes; the last of it stays in `said`."""
    while data := os.read(pipe.fileno(), 1 << 16):
        said += data
        del said[:-KEPT_BYTES]
        with contextlib.suppress(OSError):  # the terminal may be gone
            while data:
                data = data[os.write(2, data) :]
    pipe.close()


def job_of_parent() -> dict[str, Any]:
    """The job of a child: JSON on standard input, without `parent`, with which it ends.

    At SIGUSR1 it prints where all threads are.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    job = json.load(sys.stdin)
    end_with(job.pop("parent", None))
    return job


def end_with(parent: int | None) -> None:
    """End this process when its parent ends, however that does: the GPU must not stay in use.

    parent: the process id that is the parent's as long as it lives.
    """
    if parent is None:
        return
    signal_from_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# ------------------------------------------------------------------------------------------------
# The child that measures


def ask(
    command: Sequence[str], job: dict[str, Any], limit: float, timeout: float = 0
) -> tuple[Any, Ended]:
    """The JSON that llmq/bench/measure.py writes for a job, None if it writes none, and how it has
    ended. command: CHILD. limit, timeout: as of `watched`."""
    with tempfile.TemporaryDirectory(prefix="llmq-bench-") as folder:
        path, alive = Path(folder) / "result.json", Path(folder) / "alive"
        text = json.dumps(job | {"parent": os.getpid()})
        ended = watched([*command, str(path), str(alive)], text, alive, limit, timeout)
        return json.loads(path.read_text()) if path.exists() else None, ended


def run_child(
    options: dict[str, Any], steps: int, repeats: int, timeout: float = 0
) -> dict[str, Any]:
    """The measurements of one child: `status` and the rest as llmq/bench/measure.py writes it.
    timeout: seconds, 0: only --watchdog's. Without a speed it has a `message`, and perhaps
    `last_words`, lines."""
    watchdog = make_config(options).watchdog
    limit = watchdog + START_SECONDS if watchdog else 0
    job = {"options": options, "steps": steps, "repeats": repeats, "started": time.time()}
    try:
        outcome, ended = ask(CHILD, job, limit, timeout)
    except OSError as error:  # there is no memory for a process, say
        return {"status": "failed", "message": f"no process can be made: {error.strerror}"}
    outcome = _without_result(ended, limit, timeout) if outcome is None else outcome
    said = outcome["status"] in ("failed", "hung") and ended.words
    return outcome | ({"last_words": ended.words} if said else {})


def _without_result(ended: Ended, limit: float, timeout: float) -> dict[str, Any]:
    """The outcome of a child that wrote none."""
    if ended.status is None:
        why, flag = f"no progress for {limit} seconds", "--watchdog"
        if ended.late:
            why, flag = f"not done after {timeout:.0f} seconds", "--timeout"
        told = f"{why}, so the process was ended; raise {flag} if this is not a hang, 0 switches "
        return {"status": "hung", "message": told + "it off"}
    message = f"the process {in_words(ended.status)}"
    if ended.status == -signal.SIGKILL:
        message = "the process was killed, as the system does when host memory runs out"
    return {"status": "failed", "message": message}
