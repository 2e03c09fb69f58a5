"""TensorBoard and Weights & Biases as sinks, which receive the records of a run's log.

A `SinkListener` sends each record of a run as soon as the log has the record; `llmq watch` sends
the records of a file. A record holds either numbers of a step, under names such as `train/loss`, or
a text about the whole run, such as the command line.
"""

import functools
import importlib
import importlib.util
import json
import math
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from llmq.base.callback import Callback, RunEnd
from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, DataError, LlmqError, warn
from llmq.base.files import check_writable, disk_errors
from llmq.base.run_id import RunId
from llmq.options.options import TrainConfig
from llmq.report.json_log import (
    DONE,
    Course,
    JsonLog,
    LogReader,
    as_written,
    has_records,
    is_undone,
    without_undone,
)

_COMMON = {"log", "time", "step"}
# Divisors of readings whose units in the log are not W, MiB or MiB/s.
_UNITS = {"power": 1000, "power_limit": 1000, "pcie_rx": MIB, "pcie_tx": MIB}
_UNITS |= dict.fromkeys(("dram_free", "dram_total", "memory_used", "memory_total"), MIB)
_EXTREME = re.compile("_(max|min)$")


def _numeric(fields: dict[str, Any]) -> dict[str, float]:
    """Return the fields that are numbers; null, a value that was not finite, becomes NaN."""
    return {
        name: math.nan if value is None else value
        for name, value in fields.items()
        if name not in _COMMON and (value is None or type(value) in (int, float))
    }


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by the numbers' names in sinks; {} for a record without
    numbers."""
    kind, values = record["log"], _numeric(record)
    match kind:
        case "step" | "eval":
            tokens, ms = values.pop(f"{kind}_tokens"), values["duration_ms"]
            values |= {"tokens_per_second": 1000 * tokens / ms} if ms > 0 else {}
            group = "train" if kind == "step" else f"eval/{record.get('name', '')}".rstrip("/")
            return {f"{group}/{name}": value for name, value in values.items()}
        case "gpu" | "cpu":
            rank = values.pop("rank", 0)
            return {
                f"{kind}{rank}/{name}": value / _UNITS.get(_EXTREME.sub("", name), 1)
                for name, value in values.items()
                if name not in ("id", "samples") and value != -1  # -1: the card cannot tell
            }
        case "rollout":
            return {f"rollout/{name}": value for name, value in values.items()}
        case "task":
            name = f"task/{record['name']}/{record['metric']}"
            found = {name: values["value"], f"{name}_stderr": values["stderr"]}
            return {n: value for n, value in found.items() if n == name or value == value}
        case "abs-maxes":
            named = _numeric({row["name"]: row["value"] for row in record["abs_maxes"]})
            return {f"abs_maxes/{name}": value for name, value in named.items()}
        case "allocator":
            rows = record["stats"]
            sizes = {f"gpu_memory/{row['name']}": row["device"] for row in rows}
            sizes |= {f"host_memory/{r['name']}": r["pinned"] + r["pageable"] for r in rows}
            return {name: size / MIB for name, size in sizes.items() if size}
        case "sol":
            return {f"flops_per_token/{p}": values[p] for p in ("blocks", "lm_head", "attention")}
        case "info" if record["type"] == "time-breakdown":
            sums: dict[str, float] = {}  # by name, summed over micro-steps
            for part in record["breakdown"]:
                for name in part.keys() - {"step"}:
                    sums[name] = sums.get(name, 0.0) + part[name]
            return {f"gpu{record['gpu']}/{name}_ms": ms for name, ms in sums.items()}
    return {}


def text(record: dict[str, Any]) -> tuple[str, Any] | None:
    """Return name and content (as JSON values) of a record about the whole run; None for other
    records."""
    kind = record["log"]
    match kind:
        case "cmd":
            return "cmd", shlex.join(record["cmd"])
        case "sample":
            return f"sample-{record['step']}", {record["prompt"]: record["text"]}
        case "links" | "fast-products" | "choices":
            return kind, record[kind.replace("-", "_")]
        case "sol" | "dataset" | "gpu-model":
            split = record.get("split", record.get("rank"))
            name = kind if split is None else f"{kind}-{split}"
            return name, {k: v for k, v in record.items() if k not in _COMMON}
    return None


# Sinks; timestamps are in seconds since 1970


def _library(flag: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--{flag}: {error}: pip install {flag}") from error


class TensorBoard:
    """A TensorBoard event file, created with the first event. The library's `Writer` is not used,
    because it takes only numbers, and its thread prints a traceback if the disk is full."""

    def __init__(self, directory: Path, run: RunId | None = None, first: int = 0):
        """run: the run of all events. Earlier events of this run in the directory are replaced from
        the step `first` on. Raises ConfigError if the directory holds events of another run."""
        library = functools.partial(_library, "tensorboard")
        self._scalar = library("tensorboard.plugins.scalar.summary_v2").scalar_pb
        self._text = library("tensorboard.plugins.text.summary_v2").text_pb
        self._hparams = library("tensorboard.plugins.hparams.summary_v2").hparams_pb
        self._event = library("tensorboard.compat.proto.event_pb2").Event
        self._writer_of = library("tensorboard.summary.writer.record_writer").RecordWriter
        check_writable("--tensorboard", directory)
        before = sorted(directory.glob("*tfevents*"))
        suffix = "" if run is None else f".run-{run.id}"
        if not all(suffix and path.name.endswith(suffix) for path in before):
            raise ConfigError(f"'{directory}' holds a run already: delete it or change --name")
        # TensorBoard reads files in the order of their names.
        start = f"{int(time.time())}.{len(before):04d}.{socket.gethostname()}{suffix}"
        self._path = directory / f"events.out.tfevents.{start}"
        self._first = first

    @functools.cached_property
    def _writer(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        writer = self._writer_of(open(self._path, "xb"))  # noqa: SIM115
        start = self._event(wall_time=time.time(), file_version="brain.Event:2")
        writer.write(start.SerializeToString())
        # TensorBoard takes a directory's first restart event for the beginning of the run.
        writer.write(self._restart(time.time(), self._first).SerializeToString())
        return writer

    def _restart(self, timestamp: float, step: int) -> Any:
        """Return an event after which TensorBoard forgets all numbers from `step` on."""
        event = self._event(wall_time=timestamp, step=step)
        event.session_log.status = event.session_log.START
        return event

    def rewind(self, timestamp: float, step: int) -> bool:
        """Take back the numbers from `step` on. Returns True, because TensorBoard can take numbers
        back."""
        with disk_errors(self._path):
            self._writer.write(self._restart(timestamp, step).SerializeToString())
        return True

    def _write(self, timestamp: float, summary: Any, step: int = 0) -> None:
        event = self._event(wall_time=timestamp, step=step, summary=summary)
        with disk_errors(self._path):
            self._writer.write(event.SerializeToString())

    def _flush(self) -> None:
        with disk_errors(self._path):
            self._writer.flush()

    def numbers(self, timestamp: float, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._write(timestamp, self._scalar(name, value), step)
        self._flush()

    def text(self, timestamp: float, name: str, content: Any) -> None:
        if name == "options":
            plain = {k: v if isinstance(v, int | float) else str(v) for k, v in content.items()}
            self._write(timestamp, self._hparams(plain, start_time_secs=timestamp))
        self._write(timestamp, self._text(name, _markdown(content)))
        self._flush()

    def close(self) -> None:
        with disk_errors(self._path):
            self._writer.close()


def _markdown(content: Any) -> str:
    """Return a dict as a Markdown table, other content as code."""
    if not isinstance(content, dict):
        return "    " + (content if isinstance(content, str) else json.dumps(content))
    return "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in content.items())])


class WeightsAndBiases:
    """A run of Weights & Biases. The library's own settings decide whether the run is online."""

    def __init__(self, project: str, name: str, run: RunId | None = None):
        """run: the run to continue if the project has a run with this id."""
        wandb = _library("wandb", "wandb")
        same = {} if run is None else {"id": run.id, "resume": "allow"}
        self._run = self._call(wandb.init, project=project, name=name, **same)
        # Steps before `_step` are complete; `_names` are the names of numbers already sent for
        # `_step`.
        self._step, self._names = getattr(self._run, "starting_step", 0) or 0, set()

    @property
    def url(self) -> str | None:
        """Return the web address of the run; None for an offline run."""
        return getattr(self._run, "url", None)

    def rewind(self, timestamp: float, step: int) -> bool:
        """Return False, because Weights & Biases accepts no step after a later step."""
        return False

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:  # an error of the library, the settings or the network
            raise LlmqError(f"--wandb: {error or type(error).__name__}") from error

    def numbers(self, timestamp: float, step: int, values: dict[str, float]) -> None:
        if step > self._step:
            self._step, self._names = step, set()
        new = {name: value for name, value in values.items() if name not in self._names}
        if step == self._step and new:
            self._names |= new.keys()
            self._call(self._run.log, {**new, "_timestamp": timestamp}, step=step)

    def text(self, timestamp: float, name: str, content: Any) -> None:
        values = content if name == "options" else {name: content}
        self._call(self._run.config.update, values, allow_val_change=True)

    def close(self) -> None:
        self._call(self._run.finish)


Sink = TensorBoard | WeightsAndBiases


class Replay:
    """Sends records to sinks. Repeated steps of a resumed run replace the undone steps in sinks
    that can take numbers back. Records of steps before the newest step are not sent."""

    def __init__(self, log: Path, sinks: list[Sink]):
        self.log, self.sinks = log, sinks
        self.done = False  # True once the run is complete and no new run has begun
        self._course = Course()
        self._newest = 0  # number of the newest step
        self._sent: set[str] = set()  # names of the numbers sent for the newest step
        # By step, the timestamps and numbers of records between two steps.
        self._between: dict[int, list[tuple[float, dict[str, float]]]] = {}
        self._options: dict[str, Any] = {}

    def send(self, record: dict[str, Any]) -> None:
        """Send a record to all sinks. Raises DataError if llmq train cannot have written the
        record."""
        kind, step, timestamp = record["log"], record["step"], record["time"]
        with as_written(self.log, f"its record of {kind} at step {step}"):
            if kind == "option":
                self._options[record["name"]] = record["value"]
                return
            ends = str(record.get("message")).startswith(DONE)
            self.done = kind != "cmd" and (self.done or ends)
            values, description = numbers(record), text(record)
            back = self._course.back_to(record)
        if back is not None:
            self._go_back(timestamp, back)
        options, self._options = self._options, {}
        if step < self._newest:
            return
        if values and step > self._newest:
            self._newest, self._sent = step, set()
        values = {name: value for name, value in values.items() if name not in self._sent}
        self._sent |= values.keys()
        if values and not is_undone(record, step):
            self._between.setdefault(step, []).append((timestamp, values))
        for sink in self.sinks:
            if options:
                sink.text(timestamp, "options", options)
            if description is not None:
                sink.text(timestamp, *description)
            if values:
                sink.numbers(timestamp, step, values)

    def _go_back(self, timestamp: float, step: int) -> None:
        """Take back the numbers of undone steps, but keep numbers written before this step."""
        kept = self._between.get(step, [])
        self._between = {s: sent for s, sent in self._between.items() if s <= step}
        self._newest, self._sent = step, {name for _, values in kept for name in values}
        for sink in self.sinks:
            if sink.rewind(timestamp, step):
                for earlier, values in kept:
                    sink.numbers(earlier, step, values)


_OPEN: dict[str, Callable[[Any, str | None, Path, RunId | None, int], Sink]] = {
    "tensorboard": lambda place, name, log, run, first: _tensorboard(place, log, name, run, first),
    "wandb": lambda place, name, log, run, _: WeightsAndBiases(place, name or log.stem, run),
}
"""Constructors of sinks by flag. place: value of the flag. name: name of the run in the sink.
first: first step of the log."""


def open_sinks(
    places: Mapping[str, Any], name: str | None, log: Path, records: list[dict[str, Any]]
) -> list[Sink]:
    """Open the sinks in `places`, for a log that begins with `records`. Raises LlmqError if a sink
    cannot be opened."""
    started = [r for r in records if r["log"] == "cmd"]
    run = RunId.of(started[0].get("run")) if started else None
    begins = [r.get("resumed_at", 0) for r in started]
    first = min([*begins, *(r["step"] for r in records if r["log"] == "step")], default=0)
    return [_OPEN[flag](place, name, log, run, first) for flag, place in places.items()]


def _tensorboard(
    directory: Path, log: Path, name: str | None, run: RunId | None, first: int
) -> TensorBoard:
    """Open a TensorBoard sink under the log's name. If another run has this name, append the run's
    id."""
    try:
        return TensorBoard(directory / (name or log.stem), run, first)
    except ConfigError:
        if name is not None or run is None or not any((directory / log.stem).glob("*tfevents*")):
            raise
        return TensorBoard(directory / f"{log.stem}-{run.id}", run, first)


def _places_of(tensorboard: Path | None, wandb: str | None) -> dict[str, Any]:
    """Return the flags of the given sinks, with their values."""
    places = {"tensorboard": tensorboard, "wandb": wandb}
    return {flag: place for flag, place in places.items() if place is not None}


def check_libraries(config: TrainConfig) -> None:
    """Raise ConfigError for a sink whose library is not installed. The check runs before the run
    loads any file."""
    for flag in _places_of(config.tensorboard, config.wandb):
        if importlib.util.find_spec(flag) is None:
            raise ConfigError(f"--{flag}: there is no library {flag}: pip install {flag}")


class SinkListener(Callback):
    """Sends a log that this process writes to a sink, opened with the first record. A log that
    continues an older log sends the earlier records first. A failure is reported once and ends the
    listener, never the run."""

    def __init__(self, flag: str, place: Any, log: JsonLog, tell: Callable[[str, int], None]):
        """flag, place: a key and a value of `_places_of`. log: a log without records of this
        process. tell: function that shows a line about a step."""
        self._flag, self._place, self._log, self._tell = flag, place, log, tell
        reader = LogReader(log.path)
        self._earlier = list(reader.new_records()) if has_records(log.path) else []
        self._replay: Replay | None = None
        self._sinks: list[Sink] = []

    def on_record(self, record: dict[str, Any]) -> None:
        try:
            if self._replay is None:
                self._begin([*self._earlier, record])
            else:
                self._replay.send(record)
        except Exception as error:  # the library, the settings, the network or the disk failed
            self._log.listeners.remove(self)
            for sink in self._sinks:
                with suppress(Exception):
                    sink.close()
            self._sinks.clear()
            self._tell(f"WARNING: {self._told(error)}: the run goes on without it", record["step"])

    def _told(self, error: Exception) -> str:
        """Return an error's message in a line, after the flag of the sink."""
        message = " ".join(str(error).split()) or type(error).__name__
        return f"--{self._flag}: {message.removeprefix(f'--{self._flag}: ')}"

    def _begin(self, records: list[dict[str, Any]]) -> None:
        self._sinks = open_sinks({self._flag: self._place}, None, self._log.path, records)
        self._replay, self._earlier = Replay(self._log.path, self._sinks), []
        for earlier in without_undone(records):
            self._replay.send(earlier)
        if url := getattr(self._sinks[0], "url", None):
            self._tell(f"Weights & Biases: {url}", records[-1]["step"])

    def on_end(self, end: RunEnd) -> None:
        """Close the sinks, which sends the remaining records. A failure is only a warning."""
        try:
            for sink in self._sinks:
                sink.close()
        except Exception as error:
            warn(self._told(error))


def sinks_of_run(
    config: TrainConfig, log: JsonLog, tell: Callable[[str, int], None]
) -> list[Callback]:
    """Return a listener for each sink that the options ask for. tell: function that shows a line
    about a step."""
    places = _places_of(config.tensorboard, config.wandb)
    return [SinkListener(*sink, log, tell) for sink in places.items()]


def run_watch(
    log: Path, *, tensorboard: Path | None, wandb: str | None, name: str | None, interval: int
) -> None:
    """Send a log's records, then every `interval` seconds the new records until the run is done.

    interval: in seconds; 0 sends only the existing records. name: name of the run in the sink;
    None: the log's name.
    """
    places = _places_of(tensorboard, wandb)
    if not places:
        raise ConfigError("nowhere to send the log to: give --tensorboard DIR or --wandb PROJECT")
    reader = LogReader(log)
    records = list(reader.new_records())  # read before a sink is created
    if interval == 0 and not records:
        raise DataError(f"'{log}' has no records yet")
    while not records:  # the first record names the run
        time.sleep(interval)
        records = list(reader.new_records())
    with ExitStack() as stack:
        sinks = open_sinks(places, name, log, records)
        for sink in sinks:
            stack.callback(sink.close)
        replay = Replay(log, sinks)
        new: Iterable[dict[str, Any]] = without_undone(records)
        while True:
            for record in new:
                replay.send(record)
            if interval == 0 or replay.done:
                break
            time.sleep(interval)
            new = reader.new_records()
    print(f"sent {reader.count} records of '{log}'")
