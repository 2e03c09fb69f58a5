"""A stand-in for NVML: a machine with 1 to 8 GPUs, whose sensors a test sets."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

MIB = 1 << 20
GIB = 1 << 30


class FakeError(Exception):
    """An error like pynvml.NVMLError."""

    def __init__(self, value, text="Not Supported"):
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, NOT_FOUND, TIMEOUT, LOST = 3, 6, 10, 15


FAKE_UUID = "5c57ee0034b0285a574850b4b0975c8c"  # of the first one, as records have it


class FakeGpu:
    """The sensors of one GPU, or of a MIG instance. Attributes are what it answers.

    broken: names of calls, without nvmlDeviceGet, that are refused. lost: it has left the bus.
    instances: of MIG; None where the card knows no MIG.
    """

    def __init__(self, number=0, name="NVIDIA GeForce RTX 4090", **answers):
        self.bus_id, self.name = f"0000:{0x19 + number:02X}:00.0", name
        self.uuid = f"GPU-5c57ee{number:02x}-34b0-285a-5748-50b4b0975c8c"
        self.clock, self.max_clock, self.fan = 1755, 1980, 30
        self.power, self.power_limit = 651_234, 700_000
        self.temperature, self.slowdown = 61, 89
        self.free, self.total, self.reserved = 10 * GIB, 80 * GIB, 600 * MIB
        self.use, self.memory_use = 98, 40
        self.rx, self.tx = 5_000_000, 7_000  # KB/s
        self.reasons, self.joules = 0x4, 123_456
        self.corrected, self.uncorrected = 3, 0
        self.xids: list[int] = []
        self.broken: set[str] = set()
        self.lost, self.instances = False, None
        for answer, value in answers.items():
            assert hasattr(self, answer), answer
            setattr(self, answer, value)


def fake_sensors(monkeypatch, *gpus):
    """From now on runs find these GPUs in NVML, in the order in which CUDA counts them."""
    nvml = FakeNvml(*gpus)
    monkeypatch.setattr("llmq.run.sensors.load_nvml", lambda: nvml)
    monkeypatch.setattr("llmq.run.sensors.bus_id", lambda index: nvml.gpus[index].bus_id)
    monkeypatch.setattr("llmq.run.sensors.cuda_uuid", lambda index: "")
    return nvml


class FakeNvml:
    """NVML of a machine with these GPUs. delay: seconds of a call. threads: that have called.

    listening: how often somebody listens for errors.
    """

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = "sm", "gpu", "slow"
    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = "rx", "tx"
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 0, LOST, 16
    nvmlMemory_v2, nvmlEventTypeXidCriticalError = 2, 8

    def __init__(self, *gpus, delay=0.0):
        self.gpus = list(gpus) or [FakeGpu()]
        self.delay = delay
        self.threads: set[str] = set()
        self.listening = 0

    def __getattr__(self, name):
        prefix = "nvmlDeviceGet"
        method = getattr(type(self), "_" + name.removeprefix(prefix), None)
        if not name.startswith(prefix) or method is None:
            raise AttributeError(name)

        def call(gpu, *args):
            assert isinstance(gpu, FakeGpu)
            self.threads.add(threading.current_thread().name)
            time.sleep(self.delay)
            if gpu.lost:
                raise FakeError(LOST, "GPU is lost")
            if name.removeprefix(prefix) in gpu.broken:
                raise FakeError(NOT_SUPPORTED)
            return method(self, gpu, *args)

        return call

    def _ClockInfo(self, gpu, kind):
        return {"sm": gpu.clock}[kind]

    def _MaxClockInfo(self, gpu, kind):
        return {"sm": gpu.max_clock}[kind]

    def _FanSpeed(self, gpu):
        return gpu.fan

    def _PowerUsage(self, gpu):
        return gpu.power

    def _EnforcedPowerLimit(self, gpu):
        return gpu.power_limit

    def _Temperature(self, gpu, kind):
        return {"gpu": gpu.temperature}[kind]

    def _TemperatureThreshold(self, gpu, kind):
        return {"slow": gpu.slowdown}[kind]

    def _MemoryInfo(self, gpu, version=1):
        more = {"reserved": gpu.reserved} if version == 2 else {}
        return SimpleNamespace(free=gpu.free, total=gpu.total, **more)

    def _UtilizationRates(self, gpu):
        return SimpleNamespace(gpu=gpu.use, memory=gpu.memory_use)

    def _PcieThroughput(self, gpu, kind):
        return {"rx": gpu.rx, "tx": gpu.tx}[kind]

    def _CurrentClocksThrottleReasons(self, gpu):
        return gpu.reasons

    def _TotalEnergyConsumption(self, gpu):
        return gpu.joules

    def _TotalEccErrors(self, gpu, kind, counter):
        return (gpu.corrected, gpu.uncorrected)[kind]

    def _UUID(self, gpu):
        return gpu.uuid

    def _Name(self, gpu):
        return gpu.name

    def _MigMode(self, gpu):
        if gpu.instances is None:
            raise FakeError(NOT_SUPPORTED)
        return (int(bool(gpu.instances)), 0)

    def _MaxMigDeviceCount(self, gpu):
        return 7

    def _MigDeviceHandleByIndex(self, gpu, index):
        if index not in gpu.instances:
            raise FakeError(NOT_FOUND, "Not Found")
        return gpu.instances[index]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        for gpu in self.gpus:
            if gpu.bus_id == bus_id:
                return gpu
        raise FakeError(NOT_FOUND, "Not Found")

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.gpus[index].lost:
            raise FakeError(LOST, "GPU is lost")
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlEventSetCreate(self):
        self.listening += 1
        return []

    def nvmlDeviceRegisterEvents(self, gpu, kind, events):
        if gpu.instances:
            raise FakeError(NOT_SUPPORTED)
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events, milliseconds):
        assert milliseconds == 0, "the thread waits for nobody"
        for gpu in events:
            if gpu.xids:
                return SimpleNamespace(eventType=8, eventData=gpu.xids.pop(0))
        raise FakeError(TIMEOUT, "Timeout")

    def nvmlEventSetFree(self, events):
        events.clear()
        self.listening -= 1
