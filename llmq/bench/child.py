"""One measurement in a process of its own, so that what fails, hangs or crashes ends nothing else.

`python -m llmq.bench.child TASK RESULT ALIVE` calls TASK, "module:function", with a Job and the
options that it reads as JSON from standard input, beside `seconds`, which it may take, and
`parent`, the process with which it ends. It writes JSON to the file RESULT whenever it knows more:
`result`, and `error` where the task failed. While it goes on it touches the file ALIVE, and at
SIGUSR1 it prints where all threads are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmq.base.files import write_file
from llmq.base.signals import signal_from_parent
from llmq.options.options_io import make_config
from llmq.run.restarts import in_words

POLL = 0.5  # seconds
LAST_WORDS = 2.0  # seconds from the signal to say where it is until it is ended
KEPT_BYTES = 8192  # of what it printed
KEPT_LINES = 40
CHILD = (sys.executable, "-m", "llmq.bench.child")
WARM_UP = 3  # steps: launched one by one, captured, replayed
SETTLE = 2.0  # seconds of steps on a GPU, until its clock is that of its power limit
TIMED = 1.0  # seconds at least that a repeat lasts on a GPU: for shorter ones its clock may rise
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


def end_with(parent: int) -> None:
    """End this process when its parent ends, however that does: the GPU must not stay in use.

    parent: the process id that is the parent's as long as it lives.
    """
    signal_from_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ask(
    task: str, options: dict[str, Any], *, seconds: float = 0, limit: float = 0, timeout: float = 0
) -> tuple[dict[str, Any], Ended]:
    """The `result` and `error` of a task, as far as its child has written them, and how it ended.
    seconds: that the task may take, as it is told. limit, timeout: as of `watched`."""
    job = {"seconds": seconds, "options": options, "parent": os.getpid()}
    with tempfile.TemporaryDirectory(prefix="llmq-bench-") as folder:
        path, alive = Path(folder) / "result.json", Path(folder) / "alive"
        command = [*CHILD, task, str(path), str(alive)]
        ended = watched(command, json.dumps(job), alive, limit, timeout)
        found = json.loads(path.read_text()) if path.exists() else {}
    return {"result": {}, "error": None} | found, ended


def run_child(
    options: dict[str, Any], steps: int, repeats: int, timeout: float = 0
) -> dict[str, Any]:
    """The measurements of one configuration: `status` and the rest as llmq/bench/measure.py notes
    it. timeout: seconds, 0: only --watchdog's. Without a speed it has a `message`, and perhaps
    `last_words`, lines."""
    watchdog = make_config(options).watchdog
    limit = watchdog + START_SECONDS if watchdog else 0
    job = {"options": options, "steps": steps, "repeats": repeats, "started": time.time()}
    try:
        found, ended = ask("llmq.bench.measure:measure", job, limit=limit, timeout=timeout)
    except OSError as error:  # there is no memory for a process, say
        return {"status": "failed", "message": f"no process can be made: {error.strerror}"}
    outcome = found["result"]
    if found["error"]:
        outcome = {"status": "failed", "message": found["error"]}
    elif not outcome:
        outcome = _without_result(ended, limit, timeout)
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


# ------------------------------------------------------------------------------------------------
# The child


@dataclass
class Job:
    """The job of a task. deadline: of time.monotonic. note: keeps what is known. alive: the file to
    touch."""

    deadline: float = 0.0
    note: Callable[[dict[str, Any]], None] = field(default=lambda result: None)
    alive: Path | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @classmethod
    def within(cls, seconds: float) -> Job:
        """A job whose results only its caller wants."""
        return cls(time.monotonic() + seconds)


def main() -> None:
    """The child: see the top of this file."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    given = json.load(sys.stdin)
    end_with(given["parent"])
    task, path, alive = sys.argv[1:]
    found: dict[str, Any] = {"result": {}, "error": None}

    def note(result: dict[str, Any]) -> None:
        found["result"] = result
        write_file(Path(path), json.dumps(found))

    try:
        module, _, name = task.partition(":")
        job = Job(time.monotonic() + given["seconds"], note, Path(alive))
        getattr(importlib.import_module(module), name)(job, **given["options"])
    except Exception as error:  # of CUDA, say: the report has it, and the traceback where
        traceback.print_exc()
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        note(found["result"])


if __name__ == "__main__":
    main()
