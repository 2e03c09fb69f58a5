"""Sweeps whose runs are not made: what a driver does with their outcomes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from llmq.bench import BenchOptions, bench
from llmq.bench.bench import run_bench

MACHINE = {"device": "CPU", "gpu": None, "versions": {"llmq": "0.1", "NumPy": "2"}}
GRID = "device: cpu\nmodel: [tiny, tiny-gpt2]\nbatch-size: [1, 2, 4]\n"
TABLE = [(model, batch) for model in ("tiny", "tiny-gpt2") for batch in (1, 2, 4)]


def speed_of(options: dict[str, Any]) -> float:
    """Some number that belongs to these options."""
    return 1000.0 + zlib.crc32(json.dumps(options, sort_keys=True).encode()) % 1000


def ok(options: dict[str, Any], speed: float | None = None) -> dict[str, Any]:
    """The outcome of a run that was measured."""
    speed = speed_of(options) if speed is None else speed
    seconds = [64 / speed * factor for factor in (0.99, 1.0, 1.02)]
    names = "predicted sol_percent joules_per_token gpu"
    result = {
        "tokens_per_second": speed,
        "spread": 0.03,
        "step_seconds": seconds,
        "tflops": 0.5,
        "memory": {"planned": 1 << 30, "used": None, "as_planned": True},
        "first_step_seconds": 1.0,
        "loss": 5.5,
    }
    result |= dict.fromkeys(names.split())
    return {"status": "ok", "result": result, "machine": dict(MACHINE), "gpus": 1}


class Sweeps:
    """Makes sweeps of one file. made: model and batch of the runs that were made, in order.

    outcomes: by (model, batch), where it is not that of `ok`: a dict, or something to call.
    predictions: as llmq/bench/measure.py writes them, by (model, batch).
    """

    def __init__(self, folder: Path, monkeypatch: Any):
        self.out, self.file = folder / "out", folder / "sweep.yaml"
        self.file.write_text(GRID)
        self.made: list[tuple[str, int]] = []
        self.outcomes: dict[tuple[str, int], Any] = {}
        self.predictions: dict[tuple[str, int], dict[str, Any]] = {}
        self.timeouts: list[float] = []
        self.machine: dict[str, Any] | None = dict(MACHINE)
        monkeypatch.setattr(bench, "run_child", self._run)
        monkeypatch.setattr(bench, "predict", self._predict)

    def make(self, **how: Any) -> None:
        """`llmq bench` with this file."""
        run_bench({}, self.file, BenchOptions(out=self.out, **how), ["llmq", "bench"])

    def _run(self, options: dict[str, Any], steps: int, repeats: int, timeout: float) -> Any:
        name = name_of(options)
        self.made.append(name)
        self.timeouts.append(timeout)
        outcome = self.outcomes.get(name, ok)
        outcome = outcome(options) if callable(outcome) else dict(outcome)
        if self.machine is not None and "machine" in outcome:
            outcome["machine"] = dict(self.machine)
        return outcome

    def _predict(self, runs: list[dict[str, Any]]) -> Any:
        return [self.predictions.get(name_of(run), {}) for run in runs], self.machine

    def report(self) -> dict[str, Any]:
        """OUT.json."""
        return json.loads(self.out.with_name("out.json").read_text())

    def text(self, suffix: str) -> str:
        """Another of its files."""
        return self.out.with_name(f"out.{suffix}").read_text()

    def table(self) -> list[Any]:
        """Rows of the table, which interruptions must not change."""
        runs = [run | {"invocation": 0, "seconds": 0} for run in self.report()["runs"]]
        lines = self.text("md").splitlines()
        cells = [line.split(" | ") for line in lines if line.startswith("|")]
        if cells and "made by" in cells[0]:
            place = cells[0].index("made by")
            cells = [row[:place] + row[place + 1 :] for row in cells]
        failed = [line for line in lines if line.startswith("-")]
        return [runs, cells, failed, self.text("csv")]

    def statuses(self) -> dict[tuple[str, int], str]:
        """The status of each run of the report, in its order."""
        return {name_of(run["options"]): run["status"] for run in self.report()["runs"]}


def name_of(options: dict[str, Any]) -> tuple[str, int]:
    return options["model"], int(options.get("batch-size", 4))


def planned(speed: float, *, fits: bool = True, on_gpu: bool = True) -> dict[str, Any]:
    """A prediction. 64 tokens a step."""
    message = None if fits else "out of memory: 90 MiB are needed, 80 MiB are available"
    status = "fits" if fits else "does not fit"
    rest = {"device": 90 << 20, "host": 1 << 20, "tokens_per_second": speed, "on_gpu": on_gpu}
    return {"status": status, "message": message, "step_seconds": 64 / speed} | rest
