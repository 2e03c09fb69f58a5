"""What a run reports about its GPUs: the card, its speed of light, and NVML's readings."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmq.base.dtypes import BF16, MIB
from llmq.config.adapters import adapters_of
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.ops import matmul, random
from llmq.plan.sol import FlopsPerToken, flops_per_token, nanoseconds_per_token, peaks
from llmq.runtime.arena import align_up
from llmq.runtime.device import Device
from llmq.runtime.gpu_info import GpuInfo, bus_id
from llmq.runtime.processes import processes
from llmq.train.metrics import Reporter

INTERVAL = 0.5  # seconds between two rounds of readings
UNSUPPORTED = -1

# ------------------------------------------------------------------------------------------------
# NVML


# Numbers of one moment: field of the `gpu` record, and how NVML gives it for a handle.
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
}
# Rates, averaged from record to record. NVML gives KB/s of the last 20 ms, and takes that long.
_RATES: dict[str, Callable[[Any, Any], int]] = {
    "gpu_util": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    "mem_util": lambda n, h: n.nvmlDeviceGetUtilizationRates(h).memory,
    "pcie_rx": lambda n, h: 1000 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES),
    "pcie_tx": lambda n, h: 1000 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES),
}
# What holds the clock down, the most telling first: bits of NVML's answer, word of the record.
_THROTTLE = (
    (0x4 | 0x80, "power cap"),  # SwPowerCap, HwPowerBrakeSlowdown
    (0x20 | 0x40, "thermal cap"),  # SwThermalSlowdown, HwThermalSlowdown
    (0x1, "idle"),  # GpuIdle
    (~0, "other cap"),
)


@functools.cache
def load_nvml() -> Any | None:
    """The initialized NVML module; None, after one warning, where NVML cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no module, no library, no driver: each its own class
        print(
            f"warning: no GPU readings, NVML cannot be used ({error}); install nvidia-ml-py and "
            "the NVIDIA driver's tools, or use --log-gpu-util 0",
            file=sys.stderr,
        )
        return None
    return pynvml


class GpuMonitor:
    """Reads one GPU's sensors on a thread of its own, so that training never waits for NVML."""

    def __init__(self, nvml: Any, handle: Any, index: int, interval: float = INTERVAL):
        """index: the rank's GPU, for the records. interval: seconds between rounds of readings."""
        self._nvml, self._handle, self.index = nvml, handle, index
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sums = dict.fromkeys(_RATES, 0)
        self._rounds = 0
        self._newest: dict[str, Any] = {}
        self._averages: dict[str, int] = {}
        self._poll()
        self._thread = threading.Thread(
            target=self._run, args=(interval,), name=f"monitor {index}", daemon=True
        )
        self._thread.start()

    def sample(self) -> dict[str, Any]:
        """Fields of the `gpu` record: the newest readings, and rates since the last sample.

        Clocks in MHz, power in mW, temperatures in °C, utilisation and fan in percent, memory in
        bytes, PCIe in bytes per second; -1 or "not supported" where the card does not tell.
        """
        with self._lock:
            if self._rounds:
                self._averages = {
                    name: UNSUPPORTED if total < 0 else total // self._rounds
                    for name, total in self._sums.items()
                }
                self._sums, self._rounds = dict.fromkeys(_RATES, 0), 0
            return {"id": self.index, **self._newest, **self._averages}

    def joules(self) -> float | None:
        """Energy that the GPU has used since the driver was loaded; None if it does not count."""
        millijoules = self._read(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h))
        return None if millijoules == UNSUPPORTED else millijoules / 1000

    def identity(self) -> dict[str, Any]:
        """driver: its release; uuid: hexadecimal; reserved: bytes that the driver keeps."""
        uuid = self._read(lambda n, h: n.nvmlDeviceGetUUID(h))
        memory = self._read(lambda n, h: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2))
        driver = self._read(lambda n, h: n.nvmlSystemGetDriverVersion())
        return {
            "driver": "" if driver == UNSUPPORTED else driver,
            "uuid": "" if uuid == UNSUPPORTED else uuid.removeprefix("GPU-").replace("-", ""),
            "reserved": 0 if memory == UNSUPPORTED else memory.reserved,
        }

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self, interval: float) -> None:
        while not self._stop.wait(interval):
            self._poll()

    def _poll(self) -> None:
        newest: dict[str, Any] = {name: self._read(get) for name, get in _READINGS.items()}
        newest["throttle"] = self._throttle()
        rates = {name: self._read(get) for name, get in _RATES.items()}
        with self._lock:
            self._newest = newest
            self._rounds += 1
            for name, value in rates.items():
                self._sums[name] += value

    def _read(self, get: Callable[[Any, Any], Any]) -> Any:
        """What NVML gives for this GPU, UNSUPPORTED where it refuses."""
        try:
            return get(self._nvml, self._handle)
        except self._nvml.NVMLError:
            return UNSUPPORTED

    def _throttle(self) -> str:
        reasons = self._read(lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h))
        if reasons == UNSUPPORTED:
            return "not supported"
        return next((word for bits, word in _THROTTLE if reasons & bits), "no cap")


def open_monitor(dev: Device, interval: float = INTERVAL) -> GpuMonitor | None:
    """The monitor of a device's GPU; None on the CPU and, after one warning, without NVML."""
    if dev.kind != "cuda":
        return None
    nvml = load_nvml()
    if nvml is None:
        return None
    place = bus_id(dev.index)
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(place)
    except nvml.NVMLError as error:
        print(f"warning: no readings of GPU {dev.index} at {place}: {error}", file=sys.stderr)
        return None
    return GpuMonitor(nvml, handle, dev.index, interval)


def report_gpus(reporter: Reporter, monitors: Sequence[GpuMonitor | None], step: int) -> None:
    """The `gpu` records of all processes. monitors: of this one's ranks."""
    own = [monitor and monitor.sample() for monitor in monitors]
    of_all = [sample for of_process in processes().gather(own) for sample in of_process]
    for rank, sample in enumerate(of_all):
        if sample is not None:
            reporter.gpu(step, rank, sample, monitor_line(sample))


def monitor_line(sample: dict[str, Any]) -> str:
    """A sample for the live view."""

    def shown(name: str, unit: int = 1) -> str:
        return "-" if sample[name] == UNSUPPORTED else f"{sample[name] // unit:,}"

    return (
        f"GPU {sample['id']}: {shown('gpu_util')} % | "
        f"{shown('power', 1000)} / {shown('power_limit', 1000)} W | "
        f"{shown('temperature')} / {shown('temp_slowdown')} °C | "
        f"{shown('clock')} / {shown('max_clock')} MHz, {sample['throttle']} | "
        f"{shown('dram_free', MIB)} MiB free | "
        f"PCIe ↓ {shown('pcie_rx', MIB)} ↑ {shown('pcie_tx', MIB)} MiB/s"
    )


# ------------------------------------------------------------------------------------------------
# [System] and [Speed of Light]


def system_record(index: int, info: GpuInfo, monitor: GpuMonitor | None) -> dict[str, Any]:
    """Fields of the `gpu-model` record; without NVML driver and uuid are "", reserved is 0."""
    fields = {"id": index, "driver": "", "uuid": "", "reserved": 0, **asdict(info)}
    return fields | ({} if monitor is None else monitor.identity())


def system_lines(record: dict[str, Any]) -> list[str]:
    """The lines of [System r]."""
    driver, runtime = (
        f"{record[name] // 1000}.{record[name] % 1000 // 10}"
        for name in ("cuda_driver", "cuda_runtime")
    )
    total = record["memory"] // MIB
    return [
        f"  Device {record['id']}: {record['name']}",
        f"  CUDA version: driver {driver}, runtime {runtime}",
        f"  Memory: {total - record['free'] // MIB} MiB / {total} MiB",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOfLight:
    """The most tokens per second that a card's data sheet allows.

    peaks: TF32, BF16, FP8 and INT8, in TFLOP/s. dtype: of weights and activations, "fp32" or
    "bf16". matmul_dtype, head_dtype: of the products of the blocks and of the LM head, the same,
    "e4m3" or "int8".
    nanoseconds: per token, over all GPUs.
    """

    flops: FlopsPerToken
    peaks: tuple[float, float, float, float]
    dtype: str
    matmul_dtype: str
    head_dtype: str
    nanoseconds: int

    @property
    def tokens_per_second(self) -> int:
        """llm.q's rounding."""
        return 1_000_000_000 // self.nanoseconds

    def percent(self, tokens: int, milliseconds: float) -> float:
        """How close a step of so many tokens came, in percent."""
        return 100.0 * self.nanoseconds * tokens / (milliseconds * 1e6)

    def record(self) -> dict[str, Any]:
        """Fields of the `sol` record: FLOPs per token, tokens per second, TFLOP/s."""
        tf32, bf16, fp8, int8 = self.peaks
        return asdict(self.flops) | {
            "tps": self.tokens_per_second,
            "tf32_peak": tf32,
            "bf16_peak": bf16,
            "fp16_peak": bf16,  # the same on every card of the table
            "fp8_peak": fp8,
            "int8_peak": int8,
        }

    def lines(self, measured: float | None) -> list[str]:
        """The lines of [Speed of Light]. measured: BF16 TFLOP/s of this card, None if unknown."""
        label, blocks = _PEAKS[self.dtype][1], _PEAKS[self.matmul_dtype][1]
        rows = [
            f"  Peak {_PEAKS[dtype][1]:>4}: {_peak(self.peaks, dtype):8.1f} TFLOP/s"
            for dtype in dict.fromkeys((self.dtype, self.matmul_dtype))
        ]
        if measured is not None:
            percent = 100 * measured / self.peaks[1]
            rows.append(f"  Benchmark:  {percent:6.1f}%         of spec sheet")
        for name, flops, used in (
            ("Blocks:", self.flops.blocks, blocks),
            ("LM-Head:", self.flops.lm_head, _PEAKS[self.head_dtype][1]),
            ("Attention:", self.flops.attention, label),
        ):
            unit, size = ("G", 1e9) if flops > 2e9 else ("M", 1e6)
            rows.append(f"  {name:<10} {flops / size:8.1f} {unit}FLOP   in {used}")
        return [*rows, f"  SOL:       {self.tokens_per_second:8d} tok/s"]


# By format: which of the peaks, and its name.
_PEAKS = {"fp32": (0, "TF32"), "bf16": (1, "BF16"), "e4m3": (2, "FP8"), "int8": (3, "INT8")}


def _peak(values: tuple[float, float, float, float], dtype: str) -> float:
    return values[_PEAKS[dtype][0]]


def speed_of_light(
    config: TrainConfig, model: ModelConfig, device_name: str, world_size: int = 1
) -> SpeedOfLight | None:
    """The speed of light of a run.

    None for a card whose peak is not known, and for a model of less than a nanosecond a token.
    """
    found = peaks(device_name)
    if found is None:
        return None
    dtype = config.model_dtype
    flops = flops_per_token(model, config.seq_len, adapters_of(config))
    used = [_peak(found, part) for part in (config.matmul_dtype, config.head_dtype, dtype)]
    if min(used) == 0:  # the card has no fp8
        return None
    nanoseconds = nanoseconds_per_token(flops, *used, world_size)
    if nanoseconds == 0:
        return None
    return SpeedOfLight(
        flops=flops,
        peaks=found,
        dtype=dtype,
        matmul_dtype=config.matmul_dtype,
        head_dtype=config.head_dtype,
        nanoseconds=nanoseconds,
    )


PRODUCT_SIZES = (8192, 4096, 2048)  # of the timed product: the largest that there is memory for
PRODUCT_SECONDS = 0.1


def measured_peak(dev: Device) -> float | None:
    """TFLOP/s of a large BF16 product of random numbers, in at most 0.3 s; None if it cannot be.

    Allocates nothing: it uses the device's stack, and stays below the high-water mark of a step,
    or what the stack reports would be this product. Not for steady state: it synchronizes.
    """
    if dev.kind != "cuda":
        return None
    library = align_up(dev.spec.library_workspace)
    for n in PRODUCT_SIZES:
        if 3 * align_up(2 * n * n) + library < dev.stack.capacity - dev.stack.used:
            break
    else:
        return None
    with (
        dev.scratch("peak_a", (n, n), BF16) as a,
        dev.scratch("peak_b", (n, n), BF16) as b,
        dev.scratch("peak_out", (n, n), BF16) as out,
    ):
        for seed, operand in enumerate((a, b)):  # zeros would be faster than any real numbers
            random.normal(dev, operand, 1.0, seed)

        def products(count: int) -> float:
            dev.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                matmul.matmul(dev, out, a, b, trans_b=True)
            dev.synchronize()
            return (time.perf_counter() - start) / count

        products(1)  # loads and tunes
        count = max(1, int(PRODUCT_SECONDS / products(3)))
        return 2 * n**3 / products(count) / 1e12
