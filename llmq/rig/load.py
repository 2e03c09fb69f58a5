"""The load test: minutes of products and copies, which show settled clocks and the slowest GPU."""

import contextlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from llmq.base.dtypes import BF16, U8
from llmq.bench.child import Job
from llmq.ops.pointwise import elementwise
from llmq.ops.product import matmul
from llmq.runtime.device import Device
from llmq.runtime.gpu_info import bus_id
from llmq.runtime.machine import Machine, choose_machine, open_apart
from llmq.runtime.nvml import open_nvml, told
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.timing import Marks

ROWS = (8192, 4096, 2048, 128)  # rows of a square product; the largest product that fits is used
COPY = 16  # bytes of a copy divided by rows * rows
PRODUCTS = 4  # number of matrix products before each copy
ALONE = 0.2  # share of the time in which, with several GPUs, GPU 0 works alone
EVERY = 1.0  # seconds between readings
SETTLED = 1 / 3  # share of each series, at the end, whose readings count as settled
# Words for the bits of NVML's reasons for a lower clock. If the hardware knows the cause of a
# slowdown, it sets SLOWDOWN together with the cause. SLOWDOWN therefore counts only without a known
# cause.
SLOWDOWN, CAUSES = 0x8, 0x40 | 0x80
REASONS = {
    0x4: "power limit",
    SLOWDOWN: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


# NVML's readings of a GPU: power in W, temperature in °C, clock in MHz, reasons for a lower clock,
# and the PCIe link.
_READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "power": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "temperature": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
}


def _reader(gpu: int) -> Callable[[], dict[str, Any]]:
    """Return a function that reads a GPU's sensors; without NVML the readings are empty."""
    with contextlib.suppress(Exception):  # each cause raises a different class
        nvml = open_nvml()
        return partial(told, nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus_id(gpu)), _READINGS)
    return dict


class Load:
    """Makes repeated load on a GPU: products, then a copy within GPU memory."""

    def __init__(self, dev: Device, rows: int):
        self.dev, self.rows = dev, rows
        self.a, self.b, self.out = (
            dev.alloc(name, (rows, rows), BF16, "Activations") for name in ("a", "b", "out")
        )
        size = COPY * rows * rows
        self.copied = [dev.alloc(name, (size,), U8, "Activations") for name in ("target", "source")]
        for seed, operand in enumerate((self.a, self.b)):
            elementwise.normal(dev, operand, 1.0, seed)

    def enqueue(self, mark: Callable[[], object]) -> None:
        """Enqueue a round of products and a copy. mark: called before the products, between
        products and copy, and after the copy."""
        mark()
        for _ in range(PRODUCTS):
            matmul.matmul(self.dev, self.out, self.a, self.b, trans_b=True)
        mark()
        self.dev.copy(*self.copied)
        mark()

    def run(self) -> tuple[float, float]:
        """Run a round; return TFLOP/s of the products and GB/s of the copy."""
        marks = Marks(self.dev)
        self.enqueue(marks.mark)
        self.dev.synchronize()
        products, copy = marks.milliseconds(0, 1), marks.milliseconds(1, 2)
        marks.close()
        flops = PRODUCTS * 2 * self.rows**3
        return flops / products / 1e9, 2 * self.copied[0].nbytes / copy / 1e6


def _loaded(
    gpu: int,
    series: dict[str, list[Any]],
    machine: Machine,
    rows: int,
    seconds: float,
    every: float,
) -> None:
    """Load a GPU for `seconds` in this thread, and append a reading to the GPU's series every
    `every` seconds."""
    plan = PlanDevice(machine.spec)
    Load(plan, rows).enqueue(lambda: None)
    with closing(open_apart(machine, gpu, plan.sizes())) as dev:
        load, read = Load(dev, rows), _reader(gpu) if machine.kind == "cuda" else dict
        load.run()
        start = last = time.monotonic()
        rates: list[tuple[float, float]] = []
        while time.monotonic() - start < seconds:
            rates.append(load.run())
            if time.monotonic() - last >= every or not series["seconds"]:
                last = time.monotonic()
                reading = read() | {"seconds": last - start}
                reading |= {"tflops": statistics.median(rate for rate, _ in rates)}
                reading |= {"gb_per_s": statistics.median(rate for _, rate in rates)}
                for name, value in reading.items():
                    series.setdefault(name, []).append(value)
                rates = []


def measure(job: Job, *, gpus: int, device: str = "cuda", every: float = EVERY, **_: Any) -> None:
    """Measure GPUs under load, the part `load` of `llmq rig`. The result has for each GPU a
    `series` with a reading every second, and the values at which the series settle; `alone`,
    TFLOP/s of GPU 0 while the other GPUs are idle; `slowest`, the slowest GPU's share of
    `alone`."""
    machine = choose_machine(device, gpus)
    budget = machine.spec.memory // 4
    rows = next((n for n in ROWS if (6 + 2 * COPY) * n * n < budget), ROWS[-1])
    seconds, alone = job.left, None
    errors: list[BaseException] = []

    def together(count: int, seconds: float) -> list[dict[str, list[Any]]]:
        """Load `count` GPUs, each from a thread near its GPU. An error in one thread does not stop
        the other threads."""
        each: list[dict[str, list[Any]]] = [{"seconds": []} for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            loads = [
                pool.submit(_loaded, gpu, each[gpu], machine, rows, seconds, every)
                for gpu in range(count)
            ]
        errors.extend(error for load in loads if (error := load.exception()) is not None)
        return each

    if gpus > 1:
        alone = settled(together(1, ALONE * seconds)[0]).get("tflops")
    each = together(gpus, max(job.left, every))
    records = [{"gpu": gpu, "series": s, "settled": settled(s)} for gpu, s in enumerate(each)]
    rates = [record["settled"].get("tflops") for record in records]
    slowest = min(filter(None, rates), default=None)
    job.note(
        {
            "rows": rows,
            "gpus": records,
            "alone": alone,
            "slowest": None if alone is None or slowest is None else min(slowest / alone, 1.0),
            "errors": [str(error) for error in errors],
        }
    )
    if errors:
        raise errors[0]


def settled(series: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the medians of the last third of each series, the highest temperature, and the share
    of readings in this third with each clock-limiting reason."""
    found: dict[str, Any] = {}
    for name, values in series.items():
        last = values[-max(1, round(SETTLED * len(values))) :] if values else []
        if name == "reasons":
            last = [bits & ~SLOWDOWN if bits & CAUSES else bits for bits in last]
            shares = {w: sum(bool(v & b) for v in last) / len(last) for b, w in REASONS.items()}
            found["reasons"] = {word: share for word, share in shares.items() if share}
        elif last and name != "seconds":
            found[name] = statistics.median(last)
    if series.get("temperature"):
        found["hottest"] = max(series["temperature"])
    return found
