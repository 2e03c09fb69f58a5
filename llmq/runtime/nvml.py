"""Readings of a GPU by NVML: sensors, what holds its clock down, errors. It reads, and sets
nothing.

NVML is called through ctypes, which lets other threads run during a call.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

UNSUPPORTED = -1
"""The reading of what a card does not tell."""
NO_REASON = "not supported"
_MOST_EVENTS = 32  # that are taken at a time

# Field of a reading, and how NVML gives it for a handle. PCIe: KB/s of the last 20 ms, which is how
# long that takes.
_READINGS: dict[str, Callable[[Any, Any], int]] = {
    "clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "max_clock": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
    "fan": lambda n, h: n.nvmlDeviceGetFanSpeed(h),
    "power": lambda n, h: n.nvmlDeviceGetPowerUsage(h),
    "power_limit": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h),
    "temperature": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "temp_slowdown": lambda n, h: n.nvmlDeviceGetTemperatureThreshold(
        h, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    ),
    "dram_free": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).free,
    "dram_total": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total,
    "gpu_util": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "mem_util": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).memory,
    "pcie_rx": lambda n, h: 1000 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES),
    "pcie_tx": lambda n, h: 1000 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES),
}
# Since the driver was loaded.
_ERRORS: dict[str, Callable[[Any, Any], int]] = {
    "ecc_corrected": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC
    ),
    "ecc_uncorrected": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
}


class Reason(NamedTuple):
    """Why a clock is lower than it could be. bits: of NVML's answer. kind: llm.q's word in logs."""

    bits: int
    kind: str
    text: str
    short: str  # at most 7 characters


REASONS = (  # the most telling first
    Reason(0x4, "power cap", "power limit", "power"),  # SwPowerCap
    Reason(0x80, "power cap", "power brake", "brake"),  # HwPowerBrakeSlowdown: by the power supply
    Reason(0x20, "thermal cap", "heat", "heat"),  # SwThermalSlowdown
    Reason(0x40, "thermal cap", "severe heat", "heat!"),  # HwThermalSlowdown
    Reason(0x1, "idle", "idle", "idle"),  # GpuIdle
    Reason(0x8, "other cap", "slowdown", "slowed"),  # HwSlowdown, without one of the above
    Reason(0x10, "other cap", "sync boost", "sync"),  # SyncBoost: as the slowest of a group
    Reason(0x2 | 0x100, "other cap", "set clocks", "set"),  # Applications-, DisplayClocksSetting
    Reason(0x200, "other cap", "board limit", "board"),
    Reason(~0, "other cap", "other", "other"),
)


def reason(bits: int) -> Reason | None:
    """The most telling of NVML's reasons; None where nothing holds the clock down."""
    return next((one for one in REASONS if bits & one.bits), None)


# Meanings of the driver's numbers of errors, by NVIDIA's catalogue of them.
XIDS = {
    8: "the GPU stopped processing",
    13: "a kernel failed",
    31: "a kernel used memory that it may not",
    32: "the commands that it was sent are damaged",
    43: "a program's work on the GPU was stopped",
    45: "what was left of a program was cleaned up",
    48: "an uncorrectable memory error (ECC)",
    61: "the GPU's controller stopped",
    62: "the GPU's controller stopped",
    63: "a damaged row of memory is being replaced",
    64: "a damaged row of memory cannot be replaced",
    69: "a kernel failed",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors (ECC)",
    94: "a memory error (ECC) that was contained",
    95: "a memory error (ECC) that was not contained",
    109: "the GPU did not switch programs in time",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}


def xid_text(xid: int) -> str:
    return f"Xid {xid}" + (f", {XIDS[xid]}" if xid in XIDS else "")


@functools.cache
def load_nvml() -> Any | None:
    """The initialized NVML module; None, after one warning, where NVML cannot be used."""
    try:
        return open_nvml()
    except Exception as error:  # no module, no library, no driver: each its own class
        print(
            f"warning: no GPU readings, NVML cannot be used ({error}); install nvidia-ml-py and "
            "the NVIDIA driver's tools, or use --log-gpu-util 0",
            file=sys.stderr,
        )
        return None


def open_nvml() -> Any:
    """The initialized NVML module; raises what it likes."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def find_nvml() -> Any | None:
    """The initialized NVML module; None where NVML cannot be used."""
    with contextlib.suppress(Exception):  # no module, no library, no driver: each its own class
        return open_nvml()
    return None


def told(
    nvml: Any, handle: Any, readings: Mapping[str, Callable[[Any, Any], Any]]
) -> dict[str, Any]:
    """Readings by name; those that the card, or this release of NVML, does not tell are left
    out."""
    found = {}
    for name, get in readings.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            found[name] = get(nvml, handle)
    return found


class NvmlGpu:
    """One GPU, or an instance of one that MIG has divided, which tells less. lost: why it does not
    answer any more; None while it does."""

    def __init__(self, nvml: Any, handle: Any, instance: Any | None = None):
        """instance: handle of the MIG instance; handle: of the whole GPU."""
        self._nvml = nvml
        self._handles = [handle] if instance is None else [instance, handle]
        self._events = self._watched_errors(handle)
        self.lost: str | None = None

    def read(self) -> dict[str, Any]:
        """Readings of this moment, UNSUPPORTED for what the card does not tell. Clocks in MHz,
        power in mW, temperatures in °C, utilisation and fan in percent, memory in bytes, PCIe in
        bytes per second. reasons: why the clock is held down, bits of NVML's."""
        found = {name: self._read(get) for name, get in _READINGS.items()}
        found["reasons"] = self._read(lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h))
        return found | self.read_errors()

    def read_errors(self) -> dict[str, Any]:
        """Errors of memory since the driver was loaded; xid: the driver's errors since last time"""
        counts = {name: self._read(get) for name, get in _ERRORS.items()}
        return counts | {"xid": list(self._new_errors())}

    def joules(self) -> float | None:
        """Energy that the GPU has used since the driver was loaded; None if it does not count."""
        millijoules = self._read(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h))
        return None if millijoules == UNSUPPORTED else millijoules / 1000

    def identity(self) -> dict[str, Any]:
        """driver: its release; uuid: hexadecimal; reserved: bytes that the driver keeps."""
        memory = self._read(lambda n, h: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2))
        driver = self._read(lambda n, h: n.nvmlSystemGetDriverVersion())
        return {
            "driver": "" if driver == UNSUPPORTED else driver,
            "uuid": self.uuid,
            "reserved": 0 if memory == UNSUPPORTED else memory.reserved,
        }

    @property
    def uuid(self) -> str:
        """Hexadecimal; "" where it is not told."""
        return _hexadecimal(self._read(lambda n, h: n.nvmlDeviceGetUUID(h)))

    @property
    def name(self) -> str:
        name = self._read(lambda n, h: n.nvmlDeviceGetName(h))
        return "" if name == UNSUPPORTED else name

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(events)

    def _read(self, get: Callable[[Any, Any], Any]) -> Any:
        """The value that NVML gives for this GPU, UNSUPPORTED where it refuses."""
        for handle in self._handles:
            if self.lost is not None:
                break
            try:
                return get(self._nvml, handle)
            except self._nvml.NVMLError as error:
                gone = (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
                if error.value in gone:
                    self.lost = str(error)
        return UNSUPPORTED

    def _watched_errors(self, handle: Any) -> Any | None:
        """The set that gets the driver's errors of this GPU from now on; None if it cannot."""
        with contextlib.suppress(self._nvml.NVMLError):
            events = self._nvml.nvmlEventSetCreate()
            kind = self._nvml.nvmlEventTypeXidCriticalError
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, kind, events)
                return events
            except self._nvml.NVMLError:
                self._nvml.nvmlEventSetFree(events)
        return None

    def _new_errors(self) -> Iterator[int]:
        events, kind = self._events, self._nvml.nvmlEventTypeXidCriticalError
        with contextlib.suppress(self._nvml.NVMLError):  # there are no more
            for _ in range(_MOST_EVENTS if events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(events, 0)
                if event.eventType == kind:
                    yield int(event.eventData)


def _hexadecimal(uuid: Any) -> str:
    """GPU-5c57ee15-34b0-… without what is no digit."""
    text = "" if uuid == UNSUPPORTED else str(uuid)
    return text.removeprefix("MIG-").removeprefix("GPU-").replace("-", "").lower()


def find_gpu(nvml: Any, bus_id: str, uuid: str = "") -> NvmlGpu:
    """The GPU at a place in the machine, whatever CUDA_VISIBLE_DEVICES calls it. uuid: as CUDA
    tells it, hexadecimal, perhaps not to its end: of an instance, where MIG has divided the GPU.
    Raises nvml.NVMLError where none is there."""
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    with contextlib.suppress(nvml.NVMLError):  # most cards know no MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):  # there is no instance of this number
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                    if uuid and _hexadecimal(nvml.nvmlDeviceGetUUID(instance)).startswith(uuid):
                        return NvmlGpu(nvml, handle, instance)
    return NvmlGpu(nvml, handle)


def all_gpus(nvml: Any) -> list[NvmlGpu | None]:
    """Those of the machine, also those that CUDA_VISIBLE_DEVICES hides; None: does not answer."""
    found: list[NvmlGpu | None] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = None
        with contextlib.suppress(nvml.NVMLError):
            gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        found.append(gpu)
    return found
