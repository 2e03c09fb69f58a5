"""Sensors of a process's GPUs or CPUs, and a run's reports of the readings. A thread reads the
sensors once a second into plain attributes; the run takes no lock and never waits. A driver that
hangs stops only this thread."""

import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from llmq.base.callback import Callback, RunEnd, StepDone
from llmq.base.errors import LlmqError
from llmq.base.result import Result
from llmq.report.live import Panel, Row, record_line
from llmq.run.metrics import Reporter
from llmq.runtime.device import Device
from llmq.runtime.gpu_info import bus_id, cuda_uuid
from llmq.runtime.host_usage import HostUsage
from llmq.runtime.nvml import NO_REASON, UNSUPPORTED, NvmlGpu, find_gpu, load_nvml, reason, xid_text
from llmq.runtime.world import World

INTERVAL = 1.0  # seconds between two rounds of readings
PATIENCE = 2.0  # seconds for which the end of a run waits for a driver that does not answer
_CAPS = ("power cap", "thermal cap", "other cap")

# Readings whose mean and maximum over a window become the fields NAME and NAME_max.
_MEANS = (
    *("clock", "fan", "power", "temperature", "gpu_util", "mem_util", "pcie_rx", "pcie_tx"),
    *("util", "memory_used"),
)
_NO_MAX = ("fan",)
_LEAST = "dram_free"  # free memory, with mean and minimum as dram_free and dram_free_min


class Window:
    """Means and extremes of the samples since the last record. UNSUPPORTED samples do not count;
    the mean of only such samples is UNSUPPORTED."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[int]] = defaultdict(list)
        self._reasons: Counter[str] = Counter()  # by reason of throttling, the number of samples
        self._kinds: Counter[str] = Counter()  # by kind of reason, the number of samples
        self._xids: list[int] = []
        self._samples = 0

    def add(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Take one more sample. Returns the window's record so far, in the units of the sample:
        means, extremes (`_max`, `_min`), and the last value of other fields."""
        self._samples += 1
        found = {name: value for name, value in sample.items() if name not in ("reasons", "xid")}
        for name in (*_MEANS, _LEAST):
            if name in sample:
                found |= self._number(name, sample[name])
        if "reasons" in sample:
            found |= self._held_down(sample["reasons"])
        if "xid" in sample:
            self._xids = [*self._xids, *sample["xid"]]
            found["xid"] = self._xids
        return found | {"samples": self._samples}

    def _number(self, name: str, value: int) -> dict[str, int]:
        values = self._values[name]
        if value != UNSUPPORTED:
            values.append(value)
        extreme, most = (f"{name}_min", min) if name == _LEAST else (f"{name}_max", max)
        found = {name: round(sum(values) / len(values)) if values else UNSUPPORTED}
        return found if name in _NO_MAX else found | {extreme: most(values, default=UNSUPPORTED)}

    def _held_down(self, bits: int) -> dict[str, Any]:
        """Count a sample's bits of throttle reasons, and return the fields of the record. throttle:
        the most frequent kind, as llm.q names it. throttled: percentage of samples with the clock
        held down while the GPU worked. reasons: percentage of samples by reason."""
        if bits != UNSUPPORTED:
            found = reason(bits)
            self._kinds["no cap" if found is None else found.kind] += 1
            if found is not None:
                self._reasons[found.text] += 1
        told = self._kinds.total()
        if not told:
            return {"throttle": NO_REASON, "throttled": UNSUPPORTED, "reasons": {}}
        capped = sum(self._kinds[kind] for kind in _CAPS)
        shares = {name: round(100 * n / told) for name, n in self._reasons.most_common()}
        throttle = max(self._kinds, key=lambda kind: (self._kinds[kind], kind in _CAPS))
        return {"throttle": throttle, "throttled": round(100 * capped / told), "reasons": shares}


class Sensor:
    """A source of readings and its samples. The thread replaces the dicts `newest` and `summary`,
    and never changes a dict. name: name in messages. card: name of the GPU. index: CUDA's number of
    the GPU; None: no GPU. newest: the last sample, {} before the first. summary: record of the
    window, {} before the first sample. at: time.monotonic() of the last sample."""

    def __init__(self, source: NvmlGpu | HostUsage, name: str, index: int | None = None):
        self.source, self.name, self.index = source, name, index
        self.newest: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.at = time.monotonic()
        self.card: str = getattr(source, "name", "")
        self._window, self._taken = Window(), False
        self._uncorrected = 0  # number of uncorrectable memory errors that are known
        self._told_lost = False

    def poll(self, news: deque[str]) -> None:
        """Take a sample, and append lines about new errors to `news`. Only the thread of `Sensors`
        calls this method."""
        sample = self.source.read()
        if self._taken:
            self._window, self._taken = Window(), False
        if not self.newest:  # samples from before the run do not count
            self._uncorrected = max(sample.get("ecc_uncorrected", 0), 0)
        self.summary = self._window.add(sample)
        self.newest, self.at = sample, time.monotonic()
        news.extend(self.faults(sample))

    def faults(self, sample: dict[str, Any]) -> list[str]:
        """Return lines about new errors in a sample."""
        lines = [f"{self.name}: {xid_text(xid)}" for xid in sample.get("xid", [])]
        count = sample.get("ecc_uncorrected", UNSUPPORTED)
        if count > self._uncorrected:
            more = count - self._uncorrected
            lines.append(f"{self.name}: {more} uncorrectable memory errors (ECC)")
            self._uncorrected = count
        lost = getattr(self.source, "lost", None)
        if lost is not None and not self._told_lost:
            lines.append(f"{self.name} does not answer any more: {lost}")
            self._told_lost = True
        return lines

    def errors(self) -> list[str]:
        """Read a GPU's errors now; return lines about new errors."""
        return self.faults(self.source.read_errors())

    def take(self) -> dict[str, Any]:
        """Return the summary of the samples since the last call; the next sample begins a new
        window. If there is no new sample, return the last window's summary again."""
        summary = self.summary
        self._taken = True
        return summary if self.index is None else {"id": self.index, **summary}


class Sensors:
    """Reads the sensors of a process's GPUs, by rank, or one sensor of all CPUs. sensors: None for
    a GPU without readings. news: lines about errors, which `take_news` removes."""

    def __init__(self, sensors: Sequence[Sensor | None], interval: float | None = INTERVAL):
        """interval: seconds between rounds of readings; None: sensors are never read."""
        self.sensors = list(sensors)
        self.news: deque[str] = deque()
        self._told: list[str] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if interval is not None and any(self.sensors):
            self._round()
            self._thread = threading.Thread(
                target=self._run, args=(interval,), name="sensors", daemon=True
            )
            self._thread.start()

    @property
    def sources(self) -> list[Any]:
        """Return the NvmlGpu of each rank, which can be queried at any time; None without a GPU."""
        gpus = [sensor and sensor.source for sensor in self.sensors]
        return [gpu if isinstance(gpu, NvmlGpu) else None for gpu in gpus]

    def take(self) -> list[dict[str, Any] | None]:
        """Return the result of Sensor.take for each rank; None without a sensor."""
        return [sensor and sensor.take() for sensor in self.sensors]

    def take_news(self) -> list[str]:
        """Return the lines about errors that were added since the last call."""
        lines = []
        while self.news:
            lines.append(self.news.popleft())
        self._told += lines
        return lines

    def last_words(self) -> list[str]:
        """Read all GPUs' errors once more, and return all known errors. An error may be the cause
        of the run's failure."""
        for sensor in self.sensors if self._thread is not None else []:
            if sensor is not None and isinstance(sensor.source, NvmlGpu):
                self.news.extend(sensor.errors())
        self.take_news()
        return list(dict.fromkeys(self._told))

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the thread. A thread that waits for a driver for more than `patience` seconds keeps
        running."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                return
        for gpu in self.sources:
            if gpu is not None:
                gpu.close()

    def _run(self, interval: float) -> None:
        due = time.monotonic()
        while True:
            due = max(due + interval, time.monotonic())
            if self._stop.wait(max(due - time.monotonic(), interval / 4)):
                return
            self._round()

    def _round(self) -> None:
        for sensor in self.sensors:
            if sensor is not None:
                sensor.poll(self.news)


def open_sensors(devices: Sequence[Device], interval: float | None = INTERVAL) -> Sensors:
    """Return sensors of the devices' GPUs, or a sensor of all CPUs. Without NVML a GPU has no
    sensor."""
    if devices[0].kind != "cuda":
        return Sensors([Sensor(HostUsage(), "CPU")], interval)
    return Sensors([_sensor_of(dev) for dev in devices], interval)


def _sensor_of(dev: Device) -> Sensor | None:
    nvml = load_nvml()
    if nvml is None:
        return None
    place = bus_id(dev.index)
    try:
        gpu = find_gpu(nvml, place, cuda_uuid(dev.index))
    except nvml.NVMLError as error:
        print(f"warning: no readings of GPU {dev.index} at {place}: {error}", file=sys.stderr)
        return None
    return Sensor(gpu, f"GPU {dev.mesh.rank}", dev.index)


RECENT = 20  # number of steps over which the live view averages waiting times


class Waits:
    """Averages the time that each rank waits for other ranks: since the last record, and over the
    last RECENT steps."""

    def __init__(self, world_size: int):
        self._sums, self._count = [0.0] * world_size, 0
        self._recent: deque[tuple[tuple[float, ...], float]] = deque(maxlen=RECENT)

    def add(self, result: Result, ms: float) -> None:
        """Add the waits of a step of `ms` milliseconds."""
        if result.waits:
            self._sums = [a + b for a, b in zip(self._sums, result.waits, strict=True)]
            self._count += 1
            self._recent.append((result.waits, ms))

    def take(self) -> list[float | None]:
        """Return the mean wait per step since the last call, in ms, by rank; None without measured
        steps."""
        found = [total / self._count if self._count else None for total in self._sums]
        self._sums, self._count = [0.0] * len(self._sums), 0
        return found

    def shares(self) -> list[float | None]:
        """Return the fraction of the last RECENT steps that each rank has waited; None if
        unknown."""
        recent = list(self._recent)
        total = sum(ms for _, ms in recent)
        if total <= 0:
            return [None] * len(self._sums)
        columns = zip(*(waits for waits, _ in recent), strict=True)
        return [min(sum(column) / total, 1.0) for column in columns]


class Sensing(Callback):
    """Holds a run's sensors, and reports the sensors' readings."""

    def __init__(self, devices: Sequence[Device], world: World, reporter: Reporter, every: int):
        """devices: the devices of this process's ranks. every: steps between reports
        (--log-gpu-util); 0: no sensors."""
        self._reporter, self._world, self._every = reporter, world, every
        self.sensors = open_sensors(devices) if every > 0 else Sensors([None] * len(devices))
        self.waits = Waits(world.size)

    @property
    def panel(self) -> Panel | None:
        """Return the panel of the live view; None if this process has no sensors."""
        return Panel(self._rows) if any(self.sensors.sensors) else None

    def on_step(self, step: StepDone) -> None:
        """Add a step's waits, and report sensors every `every` steps."""
        self.waits.add(step.result, step.ms)
        if self._every > 0 and step.step % self._every == 0:
            self._report(step.step)
        elif not self._world.several:
            self._tell(step.step, self.sensors.take_news())

    def on_end(self, end: RunEnd) -> None:
        """Stop the sensors. Add the errors of GPUs, as possible causes, to the run's error."""
        if isinstance(end.error, LlmqError):
            end.error.details += tuple(self.sensors.last_words())
        elif isinstance(end.error, Exception):
            for line in self.sensors.last_words():
                end.error.add_note(line)
        self.sensors.close()

    def _tell(self, step: int, news: Sequence[str]) -> None:
        for line in news:
            self._reporter.message(f"WARNING: {line}", step)

    def _report(self, step: int) -> None:
        """Report the readings of all processes: a record for each GPU, or for the CPUs of each
        machine."""
        waits, seen = self.waits.take(), set()
        own = (self.sensors.take(), self.sensors.take_news())
        for index, (summaries, news) in enumerate(self._world.gather(own)):
            machine, place = self._world.machines[index], {}
            if self._world.several:
                place = {"machine": machine}
                news = [f"{line} (machine '{machine}')" for line in news]
            self._tell(step, news)
            first = sum(self._world.counts[:index])
            for rank, summary in enumerate(summaries, first):
                if summary is None or summary.get("util") == UNSUPPORTED:  # CPU use is unknown yet
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
        """Return the live view's rows of this process. The drawing thread calls this method."""
        shares, first = self.waits.shares(), self._world.base
        return [
            row_of(sensor, rank, shares[rank])
            for rank, sensor in enumerate(self.sensors.sensors, first)
            if sensor is not None
        ]


def row_of(sensor: Sensor, rank: int, waits: float | None = None) -> Row:
    """Return a sensor as a row of the live view. waits: see Row."""
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
