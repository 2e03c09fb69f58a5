"""A measurement in a child process, whose failure, hang or crash ends no other measurement.

`python -m llmq.bench.child TASK RESULT ALIVE` calls TASK, "module:function", with a Job and the
options that standard input holds as JSON. Standard input also holds `seconds`, the time limit, and
`parent`, the process whose end ends the child. The child writes JSON to the file RESULT after each
new result: `result`, and `error` if the task failed. A working child touches the file ALIVE. At
SIGUSR1 a child prints the stacks of all threads.
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

POLL = 0.5  # seconds between looks at the child
LAST_WORDS = 2.0  # seconds from SIGUSR1 (print the stacks) to SIGKILL
KEPT_BYTES = 8192  # bytes of the child's output that the report keeps
KEPT_LINES = 40
CHILD = (sys.executable, "-m", "llmq.bench.child")
WARM_UP = 3  # steps before timing: launched one by one, captured, replayed
SETTLE = 2.0  # seconds of steps until a GPU's clock settles at its power limit
TIMED = 1.0  # least seconds of a repeat on a GPU, because the clock may rise in shorter repeats
START_SECONDS = 60  # seconds added to --watchdog for the start, when only this process watches


class Ended(NamedTuple):
    """How a child process has ended. status: exit status; None: the parent ended the child. late:
    True if the parent ended the child at the timeout, not for lack of progress. words: the last
    lines of the child's output."""

    status: int | None
    late: bool
    words: list[str]


def watched(command: list[str], text: str, alive: Path, limit: float, timeout: float = 0) -> Ended:
    """Run a command to its end, and pass its output to this process's standard error. text: the
    command's standard input. alive: the file that the child touches. limit: most seconds from one
    touch to the next; 0: no limit. timeout: most seconds in all; 0: no limit. A child beyond a
    limit gets SIGUSR1, which prints the child's stacks, and then SIGKILL."""
    alive.touch()
    touched, progress = alive.stat().st_mtime_ns, time.monotonic()
    start, late = progress, False
    with tempfile.TemporaryFile("w+") as file:  # a pipe would block for a large text
        file.write(text)
        file.seek(0)
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}  # output of a killed child comes, too
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
    """Let a child that starts within the context ignore Ctrl-C, which a terminal sends to all
    processes. Even during imports the child then prints no traceback. This process receives Ctrl-C
    after the context, and ends the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait at most LAST_WORDS seconds: a process that hangs in a driver survives even SIGKILL."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS)


def _pass_on(pipe: IO[bytes], said: bytearray) -> None:
    """Copy a pipe to this process's standard error as data come; `said` keeps the last KEPT_BYTES
    bytes."""
    while data := os.read(pipe.fileno(), 1 << 16):
        said += data
        del said[:-KEPT_BYTES]
        with contextlib.suppress(OSError):  # the terminal may be gone
            while data:
                data = data[os.write(2, data) :]
    pipe.close()


def end_with(parent: int) -> None:
    """End this process when its parent ends for any reason, so that no GPU stays in use.

    parent: the parent's process id. If os.getppid() differs, the parent has ended already.
    """
    signal_from_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ask(
    task: str, options: dict[str, Any], *, seconds: float = 0, limit: float = 0, timeout: float = 0
) -> tuple[dict[str, Any], Ended]:
    """Run a task in a child process. Returns `result` and `error`, as far as the child has written,
    and the end of the process. seconds: time limit that the task itself keeps. limit, timeout: see
    `watched`."""
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
    """Measure a configuration in a child process. The outcome has the fields of `measure` in
    llmq/bench/measure.py. timeout: seconds; 0: only --watchdog limits the run. An outcome without a
    speed has `message`, and may have `last_words`, the last lines of output."""
    watchdog = make_config(options).watchdog
    limit = watchdog + START_SECONDS if watchdog else 0
    job = {"options": options, "steps": steps, "repeats": repeats, "started": time.time()}
    try:
        found, ended = ask("llmq.bench.measure:measure", job, limit=limit, timeout=timeout)
    except OSError as error:  # e.g. no memory for a process
        return {"status": "failed", "message": f"no process can be made: {error.strerror}"}
    outcome = found["result"]
    if found["error"]:
        outcome = {"status": "failed", "message": found["error"]}
    elif not outcome:
        outcome = _without_result(ended, limit, timeout)
    said = outcome["status"] in ("failed", "hung") and ended.words
    return outcome | ({"last_words": ended.words} if said else {})


def _without_result(ended: Ended, limit: float, timeout: float) -> dict[str, Any]:
    """Return the outcome of a child that wrote no result."""
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


# The child process


@dataclass
class Job:
    """The job of a task in a child process. deadline: in seconds of time.monotonic(). note:
    function that stores the result so far. alive: the file to touch."""

    deadline: float = 0.0
    note: Callable[[dict[str, Any]], None] = field(default=lambda result: None)
    alive: Path | None = None

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    @classmethod
    def within(cls, seconds: float) -> Job:
        """Return a job of `seconds` without files, for a caller in the same process."""
        return cls(time.monotonic() + seconds)


def main() -> None:
    """Run the child process, whose input and output the module's docstring describes."""
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
    except Exception as error:  # e.g. of CUDA; the report has the error's text
        traceback.print_exc()
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        note(found["result"])


if __name__ == "__main__":
    main()
