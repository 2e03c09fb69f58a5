"""Readings of a GPU through NVML: sensors, reasons for a low clock, and errors. This module changes
no setting of the GPU.

NVML is called through ctypes, so that other threads run during a call.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

UNSUPPORTED = -1
"""The value of a reading that the card does not support."""
NO_REASON = "not supported"
_MOST_EVENTS = 32  # most events that one reading takes

# _READINGS has NVML's call for each reading. The PCIe calls take 20 ms each, during which NVML
# measures KB/s.
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
# _ERRORS has NVML's calls for numbers of errors since the driver was loaded.
_ERRORS: dict[str, Callable[[Any, Any], int]] = {
    "ecc_corrected": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC
    ),
    "ecc_uncorrected": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
}


class Reason(NamedTuple):
    """A reason why NVML reports a low clock. bits: the reason's bits in NVML's answer. kind: the
    word of llm.q (an earlier trainer) in logs. text, short: words for the user."""

    bits: int
    kind: str
    text: str
    short: str  # at most 7 characters


REASONS = (  # ordered, the most informative reason first
    Reason(0x4, "power cap", "power limit", "power"),  # NVML calls this SwPowerCap
    # HwPowerBrakeSlowdown: the power supply asks for it
    Reason(0x80, "power cap", "power brake", "brake"),
    Reason(0x20, "thermal cap", "heat", "heat"),  # NVML calls this SwThermalSlowdown
    Reason(0x40, "thermal cap", "severe heat", "heat!"),  # NVML calls this HwThermalSlowdown
    Reason(0x1, "idle", "idle", "idle"),  # NVML calls this GpuIdle
    Reason(0x8, "other cap", "slowdown", "slowed"),  # HwSlowdown, if no bit above is set
    # SyncBoost: the GPU runs as slowly as the slowest GPU of its group
    Reason(0x10, "other cap", "sync boost", "sync"),
    # ApplicationsClocksSetting, DisplayClocksSetting
    Reason(0x2 | 0x100, "other cap", "set clocks", "set"),
    Reason(0x200, "other cap", "board limit", "board"),
    Reason(~0, "other cap", "other", "other"),
)


def reason(bits: int) -> Reason | None:
    """Return the most informative reason in NVML's answer; None if nothing lowers the clock."""
    return next((one for one in REASONS if bits & one.bits), None)


# XIDS has the meanings of the driver's error numbers (XIDs), from NVIDIA's catalogue.
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
    """Return the initialized NVML module; None, after one warning, if NVML does not work."""
    try:
        return open_nvml()
    except Exception as error:  # missing modules, libraries and drivers raise different classes
        print(
            f"warning: no GPU readings, NVML cannot be used ({error}); install nvidia-ml-py and "
            "the NVIDIA driver's tools, or use --log-gpu-util 0",
            file=sys.stderr,
        )
        return None


def open_nvml() -> Any:
    """Return the initialized NVML module; failures raise many classes of errors."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def find_nvml() -> Any | None:
    """Return the initialized NVML module; None if NVML does not work."""
    # missing modules, libraries and drivers raise different classes
    with contextlib.suppress(Exception):
        return open_nvml()
    return None


def told(
    nvml: Any, handle: Any, readings: Mapping[str, Callable[[Any, Any], Any]]
) -> dict[str, Any]:
    """Return the results of `readings` by name; readings that the card or this release of NVML does
    not support are left out."""
    values = {}
    for name, get in readings.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            values[name] = get(nvml, handle)
    return values


class NvmlGpu:
    """One GPU, or one MIG instance of a GPU, which has fewer readings. lost: the reason why the GPU
    no longer answers; None while the GPU answers."""

    def __init__(self, nvml: Any, handle: Any, instance: Any | None = None):
        """handle: NVML's handle of the physical GPU. instance: NVML's handle of the MIG instance;
        None for a whole GPU."""
        self._nvml = nvml
        self._handles = [handle] if instance is None else [instance, handle]
        self._events = self._watched_errors(handle)
        self.lost: str | None = None

    def read(self) -> dict[str, Any]:
        """Return the current readings by name; a reading that the card does not support is
        UNSUPPORTED. Clocks are in MHz, power in mW, temperatures in °C, utilisation and fan in
        percent, memory in bytes, PCIe rates in bytes per second. reasons: NVML's bits that say why
        the clock is low."""
        readings = {name: self._read(get) for name, get in _READINGS.items()}
        readings["reasons"] = self._read(
            lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h)
        )
        return readings | self.read_errors()

    def read_errors(self) -> dict[str, Any]:
        """Return the numbers of memory errors since the driver was loaded, and under "xid" the
        driver's errors since the last reading."""
        counts = {name: self._read(get) for name, get in _ERRORS.items()}
        return counts | {"xid": list(self._new_errors())}

    def joules(self) -> float | None:
        """Return the energy used since the driver was loaded, in joules; None if the GPU does not
        measure energy."""
        millijoules = self._read(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h))
        return None if millijoules == UNSUPPORTED else millijoules / 1000

    def identity(self) -> dict[str, Any]:
        """Return the driver's and the GPU's identity as a dictionary. driver: release of the
        driver. uuid: the GPU's UUID in hexadecimal. reserved: bytes of GPU memory that the driver
        keeps."""
        memory = self._read(lambda n, h: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2))
        driver = self._read(lambda n, h: n.nvmlSystemGetDriverVersion())
        return {
            "driver": "" if driver == UNSUPPORTED else driver,
            "uuid": self.uuid,
            "reserved": 0 if memory == UNSUPPORTED else memory.reserved,
        }

    @property
    def uuid(self) -> str:
        """The UUID in hexadecimal; "" if NVML does not report it."""
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
        """Return NVML's value for this GPU; UNSUPPORTED if NVML refuses."""
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
        """Return an event set that receives the driver's new errors of this GPU; None if the card
        does not support events."""
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
        with contextlib.suppress(self._nvml.NVMLError):  # NVML raises when no event is left
            for _ in range(_MOST_EVENTS if events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(events, 0)
                if event.eventType == kind:
                    yield int(event.eventData)


def _hexadecimal(uuid: Any) -> str:
    """Return the digits of a UUID such as GPU-5c57ee15-34b0-…, in lower case."""
    text = "" if uuid == UNSUPPORTED else str(uuid)
    return text.removeprefix("MIG-").removeprefix("GPU-").replace("-", "").lower()


def find_gpu(nvml: Any, bus_id: str, uuid: str = "") -> NvmlGpu:
    """Return the GPU with this PCI address, independently of CUDA_VISIBLE_DEVICES. uuid:
    hexadecimal digits as CUDA gives them, perhaps cut off; with MIG the UUID of the instance.
    Raises nvml.NVMLError if there is no such GPU."""
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    with contextlib.suppress(nvml.NVMLError):  # most cards do not support MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):  # no instance has this number
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                    if uuid and _hexadecimal(nvml.nvmlDeviceGetUUID(instance)).startswith(uuid):
                        return NvmlGpu(nvml, handle, instance)
    return NvmlGpu(nvml, handle)


def all_gpus(nvml: Any) -> list[NvmlGpu | None]:
    """Return all GPUs, even GPUs hidden by CUDA_VISIBLE_DEVICES; None stands for a GPU that does
    not answer."""
    gpus: list[NvmlGpu | None] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = None
        with contextlib.suppress(nvml.NVMLError):
            gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        gpus.append(gpu)
    return gpus
