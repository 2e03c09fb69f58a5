"""`llmq bench`: measures the speed of one or many configurations, in a report that grows with each
run.

Child processes (llmq/bench/child.py) make the runs and all plans; this process loads no CUDA.
"""

import shlex
import statistics
import sys
import time
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.signals import Interrupted
from llmq.bench import BenchOptions
from llmq.bench.child import WARM_UP, ask, run_child
from llmq.bench.report import describe, full_title, markdown, shared_flags
from llmq.bench.report_file import Report, ReportFile, continued, differences, in_order
from llmq.bench.sweep_file import Row, flag_of, identity, read_runs

LIMIT = 300  # seconds for the plan of a run

Prediction = dict[str, Any]
"""The prediction of a run, a record that `plans` in llmq/bench/measure.py writes."""


def predict(runs: list[dict[str, Any]]) -> tuple[list[Prediction], dict[str, Any] | None]:
    """Return the prediction of each run, and the record of the machine. If the child process fails,
    warn and return empty predictions and None."""
    found, ended = ask("llmq.bench.measure:plans", {"runs": runs}, limit=LIMIT)
    if "runs" in found["result"]:
        return found["result"]["runs"], found["result"]["machine"]
    why = found["error"] or f"the process that does it ended with {ended.status}"
    warn(f"the runs cannot be planned: {why}")
    return [{}] * len(runs), None


def _time_left(seconds: float) -> str:
    """Return the remaining time as console text, in s, min or h."""
    for unit, name in ((1, "s"), (60, "min")):
        if seconds < 90 * unit:
            return f", about {seconds / unit:.0f} {name} left"
    return f", about {seconds / 3600:.1f} h left"


FAILED = ("failed", "hung")
# Limits of a run that hardly makes progress. PATIENCE: seconds for the start (compiled kernels,
# initial weights). SLOWER: largest ratio of a step's duration to the planned duration.
PATIENCE, SLOWER = 900, 20


def run_bench(
    given: Mapping[str, Any], file: Path | None, settings: BenchOptions, argv: list[str]
) -> None:
    """Measure every configuration, write the report after each run, and print the report's table.
    given, file: see read_runs. argv: the command line, which the report shows. Raises ConfigError
    for options that exclude each other or an existing report that must stay, and LlmqError at the
    end if a run failed."""
    if settings.retry and not settings.resume:
        raise ConfigError("--retry: is for what failed in an earlier sweep: give --resume, too")
    if settings.overwrite and settings.resume:
        raise ConfigError("--overwrite: begins anew, --resume keeps what is there: one")
    runs = read_runs(given, file)
    report_file = ReportFile(settings.out)
    with report_file.reserved():
        earlier = _earlier(report_file, settings)
        sweep = Sweep(runs, settings, report_file, earlier, argv)
        try:
            sweep.make()
        except (KeyboardInterrupt, Interrupted):
            sweep.interrupted()
            raise
    print(markdown(sweep.report))
    sweep.raise_failed()


def _earlier(file: ReportFile, settings: BenchOptions) -> Report | None:
    """Return the existing report if the sweep resumes it, else None. Raises ConfigError if the new
    sweep would lose results."""
    if settings.resume:
        return file.read("--resume")
    report = None if settings.overwrite else file.read("--out")
    if report is not None and any(r["status"] == "ok" for r in report["runs"]):
        left = report["left"]
        state = f"is of a sweep that did not end, {left} runs are missing: --resume goes on"
        if not left:
            state = "is a finished report"
        raise ConfigError(
            f"--out: {file.path} {state}, --overwrite replaces it; or choose another --out"
        )
    return None


class Sweep:
    """Makes the runs of a sweep, and keeps the report so far.

    order: all runs. pending: the runs that are not made yet. begun: True if this sweep has written
    the file.
    """

    def __init__(
        self,
        runs: list[Row],
        settings: BenchOptions,
        file: ReportFile,
        earlier: Report | None,
        argv: list[str],
    ):
        self.settings, self.file, self.earlier = settings, file, earlier
        self.order = self.pending = runs
        self.begun = False
        self.predictions: dict[Hashable, Prediction] = {}
        self.walls: list[float] = []  # seconds of each finished run
        self.machine: dict[str, Any] | None = None
        self.differing: list[str] = []  # version differences that were already reported
        invocation = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shlex.join(["llmq", *argv[1:]]),
            "steps": settings.steps,
            "repeats": settings.repeats,
        }
        self.new: Report = {"machine": None, "invocations": [invocation], "runs": []}
        self.shared = shared_flags([describe(options) for options in runs])

    def make(self) -> None:
        """Make all runs that the report lacks."""
        if len(self.order) > 1 or self.settings.plan_first or self.settings.resume:
            self._plan()
        if self.settings.resume and self.earlier is not None:
            self._leave_what_is_done(self.earlier)
        self._warn_of_failures()
        count, todo = len(self.order), list(self.pending)
        for options in todo:
            run = describe(options) | {"options": options}
            number = f"[{count - len(self.pending) + 1}/{count}]"
            if not self._tried(options):
                prediction = self._prediction(options)
                outcome = {
                    "status": "does not fit",
                    "message": f"{prediction['message']} (planned)",
                }
                bytes_needed = {name: prediction[name] for name in ("device", "host")}
                print(f"{number} {full_title(run, self.shared)}", file=sys.stderr)
                self._finish(options, run | outcome | {"planned": bytes_needed})
                continue
            if count > 1:
                self._write(running=options)
            left = ""
            if self.walls:
                runs = sum(map(self._tried, self.pending))
                left = _time_left(runs * statistics.fmean(self.walls))
            said = f"{number} {full_title(run, self.shared)}{left} ..."
            print(said, file=sys.stderr, flush=True)
            self._finish(options, run | self._measured(options))
        if not todo:
            self._write()

    @property
    def report(self) -> Report:
        """Return the report of this sweep and of the earlier runs in its file."""
        new = self.new | {"left": len(self.pending), "running": None}
        report = new if self.earlier is None else continued(self.earlier, new)
        return in_order(report, self.order)

    def interrupted(self) -> None:
        """Write the report, and print how to resume. The run under way stays pending, because an
        interruption says nothing about this run."""
        if self.begun:
            # The interruption may have come while a run was written to the file.
            self.file.write(self.report, stopped=True)
        if self.begun and self.pending:
            done = len(self.order) - len(self.pending)
            line = f"{done} of {len(self.order)} runs are in {self.file.path}: --resume goes on"
            print(line, file=sys.stderr)

    def raise_failed(self) -> None:
        """Raise LlmqError if runs of this sweep failed, even before an interruption."""
        ours = {identity(options) for options in self.order}
        runs = [run for run in self.report["runs"] if identity(run["options"]) in ours]
        failed = sum(run["status"] in FAILED for run in runs)
        if failed:
            again = "; --resume --retry makes them again" if self.settings.resume else ""
            line = (
                f"{failed} of {len(self.order)} runs failed, {self.settings.out}.md says why{again}"
            )
            raise LlmqError(line)

    def _plan(self) -> None:
        """Predict all runs; with --plan-first also sort the runs, the fastest first."""
        predictions, machine = predict(self.order)
        names = map(identity, self.order)
        self.predictions = dict(zip(names, predictions, strict=True))
        self._compare_machines(machine)
        if self.settings.plan_first:
            self.order = self.pending = sorted(self.order, key=self._speed, reverse=True)

    def _warn_of_failures(self) -> None:
        """Warn of runs that cannot be planned, so that a misspelled value shows before a long
        sweep."""
        wrong = [o for o in self.pending if self._prediction(o).get("status") == "failed"]
        if wrong:
            title = full_title(describe(wrong[0]), self.shared)
            summary = (
                f"{len(wrong)} of {len(self.pending)} runs cannot be planned, and will hardly run"
            )
            warn(f"{summary}; the first is {title}: {self._prediction(wrong[0])['message']}")

    def _prediction(self, options: Row) -> Prediction:
        return self.predictions.get(identity(options), {})

    def _tried(self, options: Row) -> bool:
        """Return True if the run will be made; False if --plan-first leaves out a run that does not
        fit."""
        fits = self._prediction(options).get("status") != "does not fit"
        return fits or not self.settings.plan_first

    def _speed(self, options: Row) -> float:
        """Return predicted tokens per second; 0 for a run that cannot be planned, which makes the
        run last."""
        return self._prediction(options).get("tokens_per_second", 0.0)

    def _leave_what_is_done(self, earlier: Report) -> None:
        """Remove finished runs from `pending`. The run that was under way when the earlier sweep
        ended comes last, because this run may have caused the end."""
        again = FAILED if self.settings.retry else ()
        done = {identity(r["options"]) for r in earlier["runs"] if r["status"] not in again}
        running = earlier["running"] and identity(earlier["running"])
        missing = [options for options in self.order if identity(options) not in done]
        self.pending = sorted(missing, key=lambda options: identity(options) == running)
        ours = {identity(options) for options in self.order}
        strangers = sum(identity(run["options"]) not in ours for run in earlier["runs"])
        line = f"{len(self.order) - len(missing)} of {len(self.order)} runs are done"
        if strangers:
            line += f"; {strangers} runs of the report are not in this sweep, and stay"
        print(line, file=sys.stderr)
        for run in earlier["runs"]:
            self._learn(run)

    def _measured(self, options: Row) -> dict[str, Any]:
        """Return the outcome of a run in a child process, with the run's seconds."""
        start, settings = time.monotonic(), self.settings
        outcome = run_child(options, settings.steps, settings.repeats, self._timeout(options))
        self._compare_machines(outcome.pop("machine", None))
        return outcome | {"seconds": round(time.monotonic() - start, 2)}

    def _timeout(self, options: Row) -> float:
        if self.settings.timeout is not None:
            return self.settings.timeout
        predicted = self._prediction(options)
        if not predicted.get("on_gpu"):
            return 0
        steps = WARM_UP + self.settings.steps * self.settings.repeats
        return PATIENCE + SLOWER * steps * predicted["step_seconds"]

    def _compare_machines(self, machine: dict[str, Any] | None) -> None:
        """Note the machine of the runs. Raises ConfigError if the earlier runs used another device;
        warns of other versions."""
        if machine is None:
            return
        self.machine = machine
        found = differences((self.earlier or {}).get("machine"), machine)
        if any(line.startswith("device ") for line in found):
            prefix = f"--resume: {self.file.path} was measured on another machine ("
            raise ConfigError(f"{prefix}{'; '.join(found)}): use another --out")
        if found and found != self.differing:
            warn(f"--resume: earlier runs are of other versions ({'; '.join(found)})")
            self.differing = found

    def _finish(self, options: Row, run: dict[str, Any]) -> None:
        """Add a finished run to the report, and write the report to the disk."""
        self.new["machine"] = self.new["invocations"][0]["machine"] = self.machine
        if run["gpus"] > 1:
            run["flags"].setdefault("gpus", flag_of("gpus", run["gpus"]))
        self.new["runs"].append(run | {"invocation": 0})
        self.pending = [p for p in self.pending if p is not options]
        self._learn(run)
        try:
            self._write()  # before printing, as the terminal may be gone
        finally:  # the disk may be full
            said = run.get("message") or f"{run['result']['tokens_per_second']:,.0f} tok/s"
            print(f"  {run['status']}: {said}", file=sys.stderr, flush=True)

    def _learn(self, run: dict[str, Any]) -> None:
        if run["status"] == "ok" and "seconds" in run:
            self.walls.append(run["seconds"])

    def _write(self, running: Row | None = None) -> None:
        self.begun = True
        self.file.write(self.report | {"running": running})
