"""`train --tensorboard` and `--wandb`: `llmq watch` as a process of its own beside the run.

The process reads the log as any reader does. It learns that the run has ended, however it did, from
the end of its standard input. Nothing that happens to it stops the run or makes a step wait.
"""

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.options.options import TrainConfig
from llmq.report.watch import run_watch
from llmq.run.events import Member, StepDone
from llmq.run.metrics import Reporter

INTERVAL = 10  # seconds between looks at the log
PATIENCE = 10  # seconds that the end of a run waits for the rest to be sent
NICENESS = 10  # the run's threads come first


class Watcher(Member):
    """One process, which sends a log to one place. Making one does not raise."""

    def __init__(self, flag: str, log: Path, place: str, reporter: Reporter):
        """flag: that asked for it, --tensorboard or --wandb. place: its value."""
        self._flag, self._reporter = flag, reporter
        job = {"log": str(log), flag.removeprefix("--"): place}
        command = [sys.executable, "-m", "llmq.run.watcher", json.dumps(job)]
        self._process: subprocess.Popen | None = None
        self._problem: str | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # Its output is read while it writes, so the two have a place in the file each.
        descriptor, path = tempfile.mkstemp()
        self._lines = open(path)  # noqa: SIM115
        os.unlink(path)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the run, whose end then ends this
            )
        except OSError as error:
            self._problem = error.strerror
        finally:
            os.close(descriptor)

    def _news(self) -> list[str]:
        """The lines that it has written since the last time, and once why it has failed."""
        process = self._process
        if process is not None and process.poll() not in (None, 0):
            process.stdin.close()
            self._process = None
            self._errors.seek(0)
            said = [line.strip() for line in self._errors if line.strip()]
            self._problem = said[-1] if said else f"ended with status {process.returncode}"
        lines = [line.strip() for line in self._lines]
        if self._problem is not None:
            lines.append(f"WARNING: {self._flag}: {self._problem}: the run goes on without it")
            self._problem = None
        return lines

    def after_step(self, done: StepDone) -> None:
        """Tell what is new, if anything; waits for nothing."""
        for line in self._news():
            self._reporter.message(line, done.step)

    def close(self, patience: float = PATIENCE) -> None:
        """The run has ended: have the rest sent, and wait for that, but not longer."""
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                warn(f"{self._flag}: process {process.pid} goes on sending the log")
        for line in self._news():
            print(line, flush=True)
        self._lines.close()
        self._errors.close()


def check_libraries(config: TrainConfig) -> None:
    """ConfigError, before anything is loaded, where what the options ask for is not installed."""
    for flag in ("tensorboard", "wandb"):
        if getattr(config, flag) is not None and importlib.util.find_spec(flag) is None:
            raise ConfigError(f"--{flag}: there is no library {flag}: pip install {flag}")


def start_watchers(config: TrainConfig, reporter: Reporter) -> list[Watcher]:
    """Those that the options ask for. The log has its first record."""
    places = {"--tensorboard": config.tensorboard, "--wandb": config.wandb}
    wanted = {flag: str(place) for flag, place in places.items() if place is not None}
    if config.log_file.is_file():
        return [Watcher(flag, config.log_file, place, reporter) for flag, place in wanted.items()]
    warn(*[f"{flag} has no effect with --log-file {config.log_file}" for flag in wanted])
    return []


def _run_has_ended(seconds: float) -> bool:
    """Wait so long at most for the end of standard input."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _main(job: dict[str, str]) -> int:
    """The process: 0, or 2 after an error, which is the last line of standard error."""
    os.nice(NICENESS)
    tensorboard, wandb = job.get("tensorboard"), job.get("wandb")
    try:
        run_watch(
            Path(job["log"]),
            tensorboard=tensorboard and Path(tensorboard),
            wandb=wandb,
            name=None,
            interval=INTERVAL,
            until=_run_has_ended,
        )
    except LlmqError as error:
        text = " ".join(str(error).split())
        for flag in ("--tensorboard: ", "--wandb: "):
            text = text.removeprefix(flag)
        print(text, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
