"""`llmq bench`: the speed of one or many configurations, in a report that grows with each run.
Runs, and all plans before, are made in child processes (llmq/bench/child.py): this one loads no
CUDA."""

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

LIMIT = 300  # seconds for the plan of one run

Prediction = dict[str, Any]
"""The prediction of one run, as llmq/bench/measure.py writes it."""


def predict(runs: list[dict[str, Any]]) -> tuple[list[Prediction], dict[str, Any] | None]:
    """The prediction of each run, and the machine. A child that fails is reported, and nothing is
    known."""
    found, ended = ask("llmq.bench.measure:plans", {"runs": runs}, limit=LIMIT)
    if "runs" in found["result"]:
        return found["result"]["runs"], found["result"]["machine"]
    why = found["error"] or f"the process that does it ended with {ended.status}"
    warn(f"the runs cannot be planned: {why}")
    return [{}] * len(runs), None


def _time_left(seconds: float) -> str:
    """For people."""
    for unit, name in ((1, "s"), (60, "min")):
        if seconds < 90 * unit:
            return f", about {seconds / unit:.0f} {name} left"
    return f", about {seconds / 3600:.1f} h left"


FAILED = ("failed", "hung")
# When a run is ended that makes progress, but hardly: seconds for its start, kernels compiled and
# weights made, and by what factor its steps may be slower than the plan says.
PATIENCE, SLOWER = 900, 20


def run_bench(
    given: Mapping[str, Any], file: Path | None, how: BenchOptions, argv: list[str]
) -> None:
    """Measure every configuration, write the report after each, and print its table. given, file:
    as for read_runs. argv: the command, for the report. LlmqError at the end if a run failed."""
    if how.retry and not how.resume:
        raise ConfigError("--retry: is for what failed in an earlier sweep: give --resume, too")
    if how.overwrite and how.resume:
        raise ConfigError("--overwrite: begins anew, --resume keeps what is there: one")
    runs = read_runs(given, file)
    report_file = ReportFile(how.out)
    with report_file.reserved():
        earlier = _earlier(report_file, how)
        sweep = Sweep(runs, how, report_file, earlier, argv)
        try:
            sweep.make()
        except (KeyboardInterrupt, Interrupted):
            sweep.interrupted()
            raise
    print(markdown(sweep.report))
    sweep.raise_failed()


def _earlier(file: ReportFile, how: BenchOptions) -> Report | None:
    """The report that is there already and stays. ConfigError if it is not to be lost."""
    if how.resume:
        return file.read("--resume")
    report = None if how.overwrite else file.read("--out")
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
    """The runs of a sweep, and the report that it has come to.

    order: of all runs, pending: those that are still to be made. begun: the file is of this sweep.
    """

    def __init__(
        self,
        runs: list[Row],
        how: BenchOptions,
        file: ReportFile,
        earlier: Report | None,
        argv: list[str],
    ):
        self.how, self.file, self.earlier = how, file, earlier
        self.order = self.pending = runs
        self.begun = False
        self.predictions: dict[Hashable, Prediction] = {}
        self.walls: list[float] = []  # seconds that runs have taken
        self.machine: dict[str, Any] | None = None
        self.differing: list[str] = []  # that it was told
        invocation = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shlex.join(["llmq", *argv[1:]]),
            "steps": how.steps,
            "repeats": how.repeats,
        }
        self.new: Report = {"machine": None, "invocations": [invocation], "runs": []}
        self.shared = shared_flags([describe(options) for options in runs])

    def make(self) -> None:
        """All that is missing."""
        if len(self.order) > 1 or self.how.plan_first or self.how.resume:
            self._plan()
        if self.how.resume and self.earlier is not None:
            self._leave_what_is_done(self.earlier)
        self._warn_of_failures()
        count, todo = len(self.order), list(self.pending)
        for options in todo:
            run = describe(options) | {"options": options}
            number = f"[{count - len(self.pending) + 1}/{count}]"
            if not self._tried(options):
                prediction = self._prediction(options)
                told = {"status": "does not fit", "message": f"{prediction['message']} (planned)"}
                bytes_needed = {name: prediction[name] for name in ("device", "host")}
                print(f"{number} {full_title(run, self.shared)}", file=sys.stderr)
                self._finish(options, run | told | {"planned": bytes_needed})
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
        """The report of this sweep, and of what was there before it."""
        new = self.new | {"left": len(self.pending), "running": None}
        report = new if self.earlier is None else continued(self.earlier, new)
        return in_order(report, self.order)

    def interrupted(self) -> None:
        """Say how to go on. That a run was under way means nothing: it did not end the sweep."""
        if self.begun:
            # It may have come while a run was written.
            self.file.write(self.report, stopped=True)
        if self.begun and self.pending:
            done = len(self.order) - len(self.pending)
            told = f"{done} of {len(self.order)} runs are in {self.file.path}: --resume goes on"
            print(told, file=sys.stderr)

    def raise_failed(self) -> None:
        """LlmqError if runs failed, in this sweep or before it was interrupted."""
        ours = {identity(options) for options in self.order}
        runs = [run for run in self.report["runs"] if identity(run["options"]) in ours]
        failed = sum(run["status"] in FAILED for run in runs)
        if failed:
            again = "; --resume --retry makes them again" if self.how.resume else ""
            told = f"{failed} of {len(self.order)} runs failed, {self.how.out}.md says why{again}"
            raise LlmqError(told)

    def _plan(self) -> None:
        """Predictions of all, and with --plan-first another order: the fastest first."""
        predictions, machine = predict(self.order)
        names = map(identity, self.order)
        self.predictions = dict(zip(names, predictions, strict=True))
        self._compare_machines(machine)
        if self.how.plan_first:
            self.order = self.pending = sorted(self.order, key=self._speed, reverse=True)

    def _warn_of_failures(self) -> None:
        """A word that is wrong in one of many runs is told before the night, not after it."""
        wrong = [o for o in self.pending if self._prediction(o).get("status") == "failed"]
        if wrong:
            title = full_title(describe(wrong[0]), self.shared)
            told = (
                f"{len(wrong)} of {len(self.pending)} runs cannot be planned, and will hardly run"
            )
            warn(f"{told}; the first is {title}: {self._prediction(wrong[0])['message']}")

    def _prediction(self, options: Row) -> Prediction:
        return self.predictions.get(identity(options), {})

    def _tried(self, options: Row) -> bool:
        """Whether a run is made, or left out because the plan says that it does not fit."""
        fits = self._prediction(options).get("status") != "does not fit"
        return fits or not self.how.plan_first

    def _speed(self, options: Row) -> float:
        """The predicted speed; a run that cannot be planned comes last, and says itself why."""
        return self._prediction(options).get("tokens_per_second", 0.0)

    def _leave_what_is_done(self, earlier: Report) -> None:
        """Runs of the report are not made again; the one that was under way when it ended comes
        last: it may be what ended it."""
        again = FAILED if self.how.retry else ()
        done = {identity(r["options"]) for r in earlier["runs"] if r["status"] not in again}
        running = earlier["running"] and identity(earlier["running"])
        missing = [options for options in self.order if identity(options) not in done]
        self.pending = sorted(missing, key=lambda options: identity(options) == running)
        ours = {identity(options) for options in self.order}
        strangers = sum(identity(run["options"]) not in ours for run in earlier["runs"])
        told = f"{len(self.order) - len(missing)} of {len(self.order)} runs are done"
        if strangers:
            told += f"; {strangers} runs of the report are not in this sweep, and stay"
        print(told, file=sys.stderr)
        for run in earlier["runs"]:
            self._learn(run)

    def _measured(self, options: Row) -> dict[str, Any]:
        """The outcome of a run that is made, and how long it took."""
        start, how = time.monotonic(), self.how
        outcome = run_child(options, how.steps, how.repeats, self._timeout(options))
        self._compare_machines(outcome.pop("machine", None))
        return outcome | {"seconds": round(time.monotonic() - start, 2)}

    def _timeout(self, options: Row) -> float:
        if self.how.timeout is not None:
            return self.how.timeout
        predicted = self._prediction(options)
        if not predicted.get("on_gpu"):
            return 0
        steps = WARM_UP + self.how.steps * self.how.repeats
        return PATIENCE + SLOWER * steps * predicted["step_seconds"]

    def _compare_machines(self, machine: dict[str, Any] | None) -> None:
        """Note on which it is; ConfigError if what is there was measured on another one."""
        if machine is None:
            return
        self.machine = machine
        found = differences((self.earlier or {}).get("machine"), machine)
        if any(line.startswith("device ") for line in found):
            told = f"--resume: {self.file.path} was measured on another machine ("
            raise ConfigError(f"{told}{'; '.join(found)}): use another --out")
        if found and found != self.differing:
            warn(f"--resume: earlier runs are of other versions ({'; '.join(found)})")
            self.differing = found

    def _finish(self, options: Row, run: dict[str, Any]) -> None:
        """Note a run that is over, and see that it is on the disk."""
        self.new["machine"] = self.new["invocations"][0]["machine"] = self.machine
        if run["gpus"] > 1:
            run["flags"].setdefault("gpus", flag_of("gpus", run["gpus"]))
        self.new["runs"].append(run | {"invocation": 0})
        self.pending = [p for p in self.pending if p is not options]
        self._learn(run)
        try:
            self._write()  # before it is told: who reads that may be gone
        finally:  # the disk may be full
            said = run.get("message") or f"{run['result']['tokens_per_second']:,.0f} tok/s"
            print(f"  {run['status']}: {said}", file=sys.stderr, flush=True)

    def _learn(self, run: dict[str, Any]) -> None:
        if run["status"] == "ok" and "seconds" in run:
            self.walls.append(run["seconds"])

    def _write(self, running: Row | None = None) -> None:
        self.begun = True
        self.file.write(self.report | {"running": running})
