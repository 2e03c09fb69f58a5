"""`llmq top`: shows the live view of another process's run, from the run's log and from NVML."""

import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from llmq.base.console import printable_console
from llmq.base.errors import LlmqError
from llmq.base.run_id import RunId
from llmq.report.json_log import DONE, LogReader, as_written
from llmq.report.live import DRAWS, WIDE, Panel, Progress, Row, panel_lines
from llmq.run.run_paths import has_writer, is_written_here, silence
from llmq.run.sensors import INTERVAL, Sensor, Sensors, row_of
from llmq.runtime.host_usage import HostUsage
from llmq.runtime.nvml import NvmlGpu, all_gpus, find_gpu, find_nvml

LOOKS = 1.0  # seconds between two reads of the log
FIRST_LOOK = 1.2 * INTERVAL  # seconds until the use of the CPUs is known
PAUSE = 60.0  # seconds without a record after which a run without a live lock counts as ended
MOST_RANKS = 1 << 16
SHOWN_NEWS = 2  # most errors of GPUs that are listed below the view
_ENDS = (*DONE, "Stopped by ")


class Follower:
    """Reads the state of a run from the run's log. ended: True once the log has its end record.
    supervised: True if --restarts started the run. models, gpus, cpus: newest `gpu-model`, `gpu`
    and `cpu` records, by rank."""

    def __init__(self, log: Path):
        self.log = log
        self._reader = LogReader(log)
        self._begin({})

    def _begin(self, record: dict[str, Any]) -> None:
        run = RunId.of(record.get("run"))
        self.name = self.log.stem if run is None else run.name
        self.progress = Progress(record.get("resumed_at", 0), 1)
        self.ended = False
        self.supervised = "--restarts=0" in record.get("cmd", ())
        self.models: dict[int, dict[str, Any]] = {}
        self.gpus: dict[int, dict[str, Any]] = {}
        self.cpus: dict[int, dict[str, Any]] = {}
        self._scores: dict[str, float] = {}

    def look(self) -> None:
        """Read new records of the log. Raises DataError if the file is no log."""
        for record in self._reader.new_records():
            what = f"its record of {record['log']} at step {record['step']}"
            with as_written(self.log, what):
                self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        match record["log"]:
            case "cmd":
                self._begin(record)
            case "option" if record["name"] == "steps":
                self.progress.total = max(int(record["value"]), 1)
            case "gpu-model":
                self.models[_rank(record["rank"])] = record
            case "gpu":
                self.gpus[_rank(record.get("rank", 0))] = record
            case "cpu":
                self.cpus[int(record["rank"])] = record
            case "eval":
                name = record.get("name")
                self._scores[f"{name}/loss" if name else "eval"] = _number(record["loss"])
                self.progress.update(scores=self._scores)
            case "info" if str(record.get("message")).startswith(_ENDS):
                self.ended = True
            case "step":
                self.progress.update(
                    step=record["step"] + 1,
                    ms=float(record["duration_ms"]),
                    tokens=record["step_tokens"],
                    **{name: _number(record[name]) for name in ("loss", "norm", "lr")},
                )

    def waits(self, rank: int) -> float | None:
        """Return the fraction of a step in which a rank waits for other ranks; None if unknown."""
        waited = self.gpus.get(rank, {}).get("communication")
        return None if waited is None or not self.progress.ms else waited / self.progress.ms


def _rank(value: Any) -> int:
    if not 0 <= (rank := int(value)) < MOST_RANKS:
        raise ValueError(f"rank {rank}")
    return rank


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _here(nvml: Any | None, model: dict[str, Any], log: Path) -> NvmlGpu | None:
    """Return the GPU that a `gpu-model` record of this log describes, or None if this GPU is in
    another machine."""
    uuid, place = model.get("uuid"), model.get("bus_id")
    if nvml is None or place is None:
        return None
    with suppress(nvml.NVMLError):
        gpu = find_gpu(nvml, place, uuid or "")
        # The record of a run without sensors has no uuid.
        if gpu.uuid == uuid if uuid else is_written_here(log):
            return gpu
        gpu.close()
    return None


class Top:
    """Collects the content of the screen: a log's run with its GPUs, or only this machine's
    GPUs."""

    def __init__(self, log: Path | None):
        self.run = None if log is None else Follower(log)
        self._machine = os.environ.get("LLMQ_MACHINE") or socket.gethostname()
        self._nvml, self._known = find_nvml(), {}
        self._sensors, self._news = Sensors([]), []
        try:
            self.look()
        except LlmqError:
            self.close()
            raise

    def look(self) -> None:
        """Read new records of the log, and open the sensors of the run's GPUs."""
        self._news = [*self._news, *self._sensors.take_news()][-SHOWN_NEWS:]
        if self.run is not None:
            self.run.look()
        models = {} if self.run is None else dict(self.run.models)
        if models != self._known or not self._sensors.sensors:
            self._known = models
            self._sensors.close()
            self._sensors = Sensors(self._of_run(models) or self._of_machine())
        if self.run is not None:
            self._try(self.run)

    def _try(self, run: Follower) -> None:
        """Draw the log's records once, so that malformed records raise DataError here and not in
        the drawing thread."""
        with as_written(run.log, "its last record of steps or sensors"):
            run.progress.render()
            panel_lines(self.rows(), WIDE)

    def _of_run(self, models: dict[int, dict[str, Any]]) -> list[Sensor | None]:
        """Return sensors of the run's GPUs by rank; None for a GPU of another machine."""
        found: list[Sensor | None] = [None] * (max(models, default=-1) + 1)
        for rank, model in models.items():
            gpu = _here(self._nvml, model, self.run.log)
            found[rank] = gpu and Sensor(gpu, f"GPU {rank}")
        return found

    def _of_machine(self) -> list[Sensor | None]:
        gpus = [] if self.run is not None or self._nvml is None else all_gpus(self._nvml)
        found = [gpu and Sensor(gpu, f"GPU {index}") for index, gpu in enumerate(gpus)]
        return found or [Sensor(HostUsage(), "CPU")]

    def rows(self) -> list[Row]:
        """Return rows of GPUs: present readings of this machine's GPUs, and the log's last readings
        of other machines' GPUs."""
        run, rows = self.run, []
        for rank, sensor in enumerate(self._sensors.sensors):
            waits = None if run is None else run.waits(rank)
            if sensor is not None:
                rows.append(row_of(sensor, rank, waits))
            elif rank in self._known:
                rows.append(self._row_of_log(rank, waits))
            elif run is None:
                rows.append(Row(label=str(rank), sample={}, note="does not answer"))
        if run is not None and not self._known:
            for record in run.cpus.values():
                machine = record.get("machine", self._machine)
                if machine != self._machine:
                    rows.append(Row(label="CPU", sample=record, machine=machine))
        return rows

    def _row_of_log(self, rank: int, waits: float | None) -> Row:
        model, sample = self._known[rank], self.run.gpus.get(rank)
        return Row(
            label=str(rank),
            sample=sample or {},
            name=model.get("name", ""),
            machine=model.get("machine", ""),
            waits=waits,
            note="" if sample else "no readings here, and none in the log yet",
        )

    def render(self) -> RenderableType:
        """Return the whole view, with the newest errors of GPUs at the bottom."""
        return Group(self._view(), *(Text(line, "bold red") for line in self._news))

    def _view(self) -> RenderableType:
        if self.run is None:
            return Panel(self.rows)
        goes_on = self.goes_on
        state = "" if goes_on else " has ended"
        title = f"{self.run.name}{state}  {self.run.log}"
        progress = self.run.progress.render(goes_on=goes_on)
        panel = [Panel(self.rows)] if goes_on else []
        return Group(Text(title, no_wrap=True, overflow="ellipsis"), progress, *panel)

    @property
    def goes_on(self) -> bool:
        """Return True while the run may write to the log."""
        if self.run is None:
            return True
        log, written = self.run.log, has_writer(self.run.log)
        if written is None or (self.run.supervised and not written):
            # Some file systems have no locks, and --restarts may start a crashed run again.
            written = silence(log) < PAUSE
        return written and not self.run.ended

    def close(self) -> None:
        self._sensors.close()


def run_top(log: Path | None, *, once: bool = False, every: float = LOOKS) -> None:
    """Show a log's run and its GPUs, or this machine's GPUs (log: None), until the run's end or
    Ctrl-C. once: True to print a single view, as without a terminal. every: seconds between reads
    of the log. Raises DataError if the log cannot be read."""
    console = printable_console()
    top = Top(log)
    try:
        if once or not console.is_terminal or console.is_dumb_terminal or not top.goes_on:
            if top.goes_on:
                time.sleep(FIRST_LOOK)
            console.print(top.render())
            return
        with Live(top.render(), console=console, refresh_per_second=DRAWS) as live:
            while top.goes_on:
                time.sleep(every)
                top.look()
                live.update(top.render())
    except KeyboardInterrupt:
        pass  # Ctrl-C leaves the view
    finally:
        top.close()
