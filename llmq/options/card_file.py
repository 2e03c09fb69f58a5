"""Card files: rates of a machine's GPUs, measured by `llmq rig`, that replace the data sheet in
plans. The folder `cards` of the cache directory has one JSON file for each machine, with a
checksum."""

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import read_json, write_shared
from llmq.runtime.compile import cache_dir
from llmq.runtime.device import DeviceSpec

FORMAT = 1
LAYOUT = "llmq card file"

Points = Sequence[tuple[Sequence[int], float]]
"""Measurements of one kind of launch: sizes, and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CardFile:
    """Measurements of one machine, in seconds and GB/s (1e9 bytes).

    gpus: number of GPUs; device, capability, num_sms, memory (bytes): facts about each GPU; host:
    result of this_host. date: in UTC. launches: by name of a `Kind`, sizes and seconds within
    steps. bus: by number of GPUs that copy at once, three rates of each GPU: host to GPU, GPU to
    host, and each direction while both run. exchange: by number of GPUs, backend ("nccl", "copies",
    without peer access "nccl-off", "staged") and operation: bytes that each GPU receives, and
    seconds beside kernels; for "load": bytes copied from host memory, and seconds that they add to
    an exchange through host memory. beside: by number of GPUs and backend, the factor by which
    exchanges slow kernels. beside_bus: True if peer traffic bypasses the host's bus. slowest: speed
    of the slowest GPU while all GPUs work, relative to one GPU alone. disk: rates of reading and
    writing in --offload-dir; empty if not measured.
    """

    device: str
    capability: int
    num_sms: int
    memory: int
    gpus: int
    host: str
    date: str
    version: str
    driver: str
    launches: Mapping[str, Points]
    bus: Mapping[str, Sequence[float]]
    exchange: Mapping[str, Mapping[str, Mapping[str, Points]]]
    beside: Mapping[str, Mapping[str, float]]
    beside_bus: bool = False
    slowest: float = 1.0
    disk: Sequence[float] = field(default_factory=list)

    @property
    def day(self) -> str:
        """The date without the time."""
        return self.date[:10]

    def spec(self) -> DeviceSpec:
        """The machine's GPU as a device to plan for."""
        return DeviceSpec(
            name=self.device,
            capability=self.capability,
            num_sms=self.num_sms,
            memory=self.memory,
        )


# ------------------------------------------------------------------------------------------------
# Files


def folder() -> Path:
    return cache_dir() / "cards"


def this_host() -> str:
    """A hash of the host name, which distinguishes machines that share the folder and keeps the
    name private."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def path_of(device: str, gpus: int, host: str | None = None) -> Path:
    """Return the card file's path for `gpus` GPUs of this name; host: this machine if None."""
    words = (device.removeprefix("NVIDIA "), f"x{gpus}", host or this_host())
    name = "_".join(re.sub(r"[^\w.-]+", "-", word) for word in words)
    return folder() / f"{name}.json"


def record_of(file: CardFile) -> dict[str, Any]:
    """Return the record to write: the measurements and their checksum."""
    card = asdict(file)
    return {"layout": LAYOUT, "format": FORMAT, "checksum": _checksum(card), "card": card}


def write_card_file(file: CardFile) -> Path:
    """Write the file for plans of this machine, and return its path. Raises OSError."""
    path = path_of(file.device, file.gpus, file.host)
    write_shared(path, json.dumps(record_of(file)).encode() + b"\n")
    return path


def read_card_file(path: Path) -> CardFile:
    """Read a card file, or the card file inside a report of `llmq rig` (rig.json). Raises
    ConfigError."""
    try:
        found = read_json(path)
        return _file_of(found.get("card_file", found) or {})
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ConfigError(f"'{path}' is no card file of llmq rig, or damaged ({reason})") from None


def _checksum(card: dict[str, Any]) -> str:
    text = json.dumps(card, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------
# Validation


def checked(file: CardFile) -> CardFile:
    """Return the card file that a reader of this file would get. Raises ConfigError if reading
    would fail."""
    try:
        return _file_of(json.loads(json.dumps(record_of(file))))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the measurements make no card file ({error})") from None


def _file_of(found: dict[str, Any]) -> CardFile:
    """Return the card file of a record. Raises ValueError, TypeError or KeyError for a damaged
    record."""
    if found.get("layout") != LAYOUT:
        raise ValueError("it has no measurements of GPUs")
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']}, this version reads {FORMAT}: run it again")
    if found["checksum"] != _checksum(found["card"]):
        raise ValueError("the checksum is wrong")
    file = CardFile(**found["card"])
    for name in ("device", "host", "date", "version", "driver"):
        if not isinstance(getattr(file, name), str):
            raise ValueError(f"{name} is no text")
    for name in ("capability", "num_sms", "memory", "gpus"):
        if type(getattr(file, name)) is not int or getattr(file, name) < 1:
            raise ValueError(f"{name} is no number above 0")
    for kind, points in file.launches.items():
        _check_points(kind, points)
    for count, rates in file.bus.items():
        _check_numbers(f"bus of {int(count)}", rates, 3)
    for count, backends in file.exchange.items():
        for backend, operations in backends.items():
            for operation, points in operations.items():
                _check_points(f"{operation} of {int(count)} by {backend}", points)
    for count, factors in file.beside.items():
        _check_numbers(f"beside of {int(count)}", list(factors.values()), len(factors))
    _check_numbers("slowest", [file.slowest], 1)
    _check_numbers("disk", file.disk, 2 if file.disk else 0)
    return file


def _check_points(name: str, points: Points) -> None:
    if not points:
        raise ValueError(f"{name} has no measurement")
    for sizes, seconds in points:
        _check_numbers(name, [*sizes, seconds], 1 + len(points[0][0]))


def _check_numbers(name: str, values: Sequence[float], count: int) -> None:
    if len(values) != count or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0
        for x in values
    ):
        raise ValueError(f"{name} has a rate that is none")
