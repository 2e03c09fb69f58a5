"""The reports of a run about its GPUs while it trains: records, lines, rows of the live view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from llmq.base.errors import LlmqError
from llmq.model.results import Result
from llmq.report.gauges import Panel, Row, record_line
from llmq.run.events import Member, StepDone
from llmq.run.metrics import Reporter
from llmq.run.sensors import Sensor, Sensors, open_sensors
from llmq.runtime.device import Device
from llmq.runtime.host_usage import HostUsage
from llmq.runtime.nvml import UNSUPPORTED, NvmlGpu
from llmq.runtime.processes import processes
from llmq.runtime.world import World

RECENT = 20  # steps over which the live view takes the mean of waits


class Waits:
    """How long each rank stands still for the others: means since the last record, and of late."""

    def __init__(self, world_size: int):
        self._sums, self._count = [0.0] * world_size, 0
        self._recent: deque[tuple[tuple[float, ...], float]] = deque(maxlen=RECENT)

    def add(self, result: Result, ms: float) -> None:
        """A step, which took so many milliseconds."""
        if result.waits:
            self._sums = [a + b for a, b in zip(self._sums, result.waits, strict=True)]
            self._count += 1
            self._recent.append((result.waits, ms))

    def take(self) -> list[float | None]:
        """By rank milliseconds of a step, the mean of those since the last time."""
        found = [total / self._count if self._count else None for total in self._sums]
        self._sums, self._count = [0.0] * len(self._sums), 0
        return found

    def shares(self) -> list[float | None]:
        """By rank the part of a step, in the last ones."""
        recent = list(self._recent)
        total = sum(ms for _, ms in recent)
        if total <= 0:
            return [None] * len(self._sums)
        columns = zip(*(waits for waits, _ in recent), strict=True)
        return [min(sum(column) / total, 1.0) for column in columns]


class Sensing(Member):
    """The sensors of a run and its reports of them. every: --log-gpu-util; 0: nothing is read."""

    def __init__(self, devices: Sequence[Device], world: World, reporter: Reporter, every: int):
        """devices: of this process's ranks."""
        self._reporter, self._world, self._every = reporter, world, every
        self.sensors = open_sensors(devices) if every > 0 else Sensors([None] * len(devices))
        self.waits = Waits(world.size)

    @property
    def panel(self) -> Panel | None:
        """The panel of the live view; None where nothing is read."""
        return Panel(self._rows) if any(self.sensors.sensors) else None

    def after_step(self, done: StepDone) -> None:
        """Take the measurements of a step, and of the sensors if it is time for them. All processes
        call it."""
        self.waits.add(done.result, done.ms)
        if self._every > 0 and done.step % self._every == 0:
            self._report(done.step)
        elif processes().count == 1:
            self._tell(done.step, self.sensors.take_news())

    def explain(self, error: Exception) -> None:
        """Add to an error what GPUs have reported, which may be its cause."""
        lines = self.sensors.last_words()
        if isinstance(error, LlmqError):
            error.details += tuple(lines)
        else:
            for line in lines:
                error.add_note(line)

    def close(self) -> None:
        """Stop reading."""
        self.sensors.close()

    def _tell(self, step: int, news: Sequence[str]) -> None:
        for line in news:
            self._reporter.message(f"WARNING: {line}", step)

    def _report(self, step: int) -> None:
        """The records of all processes. CPUs have one for each machine."""
        waits, seen = self.waits.take(), set()
        own = (self.sensors.take(), self.sensors.take_news())
        for index, (summaries, news) in enumerate(processes().gather(own)):
            machine, place = processes().machines[index], {}
            if processes().count > 1:
                place = {"machine": machine}
                news = [f"{line} (machine '{machine}')" for line in news]
            self._tell(step, news)
            first = sum(self._world.counts[:index])
            for rank, summary in enumerate(summaries, first):
                if summary is None or summary.get("util") == UNSUPPORTED:  # not yet
                    continue
                kind = "cpu" if "util" in summary else "gpu"
                if kind == "cpu" and machine in seen:
                    continue
                seen.add(machine)
                fields = place | summary
                if kind == "gpu" and waits[rank] is not None:
                    fields["communication"] = waits[rank]
                label = f"gpu {rank:2d}" if kind == "gpu" else machine or "cpu"
                self._reporter.sensors(kind, step, rank, fields, label, record_line(fields))

    def _rows(self) -> list[Row]:
        """The rows of this process; called by the thread that draws."""
        shares, first = self.waits.shares(), self._world.base
        return [
            row_of(sensor, rank, shares[rank])
            for rank, sensor in enumerate(self.sensors.sensors, first)
            if sensor is not None
        ]


def row_of(sensor: Sensor, rank: int, waits: float | None = None) -> Row:
    """A sensor as a row of the live view."""
    source, age = sensor.source, time.monotonic() - sensor.at
    if isinstance(source, HostUsage):
        return Row(label="CPU", sample=sensor.newest)
    lost = source.lost if isinstance(source, NvmlGpu) else None
    return Row(
        label=str(rank),
        sample=sensor.newest,
        name=sensor.card,
        waits=waits,
        note="" if lost is None else f"does not answer: {lost}",
        age=age,
    )
