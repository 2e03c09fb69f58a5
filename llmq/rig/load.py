"""Minutes of load: what clocks settle at, what holds them down, and which GPU is the slowest."""

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

ROWS = (8192, 4096, 2048, 128)  # of a product, the largest that fits
COPY = 16  # times the bytes of a matrix that are copied at a time
PRODUCTS = 4  # to a copy
ALONE = 0.2  # of the time GPU 0 works alone, where there are several
EVERY = 1.0  # seconds between readings
SETTLED = 1 / 3  # of the readings, the last ones
# Bits of NVML's reasons for a lower clock, and their words in the report. The slowdown is set
# together with what the hardware knows to be its cause, and says something where it knows none.
SLOWDOWN, CAUSES = 0x8, 0x40 | 0x80
REASONS = {
    0x4: "power limit",
    SLOWDOWN: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


# Power in W, temperature in °C, clock in MHz, reasons and PCIe link of a GPU, as NVML tells them.
_READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "power": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000,
    "temperature": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
}


def _reader(gpu: int) -> Callable[[], dict[str, Any]]:
    """The function that reads a GPU's sensors; it gives nothing without NVML."""
    with contextlib.suppress(Exception):  # no module, library, driver or GPU: each its own class
        nvml = open_nvml()
        return partial(told, nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus_id(gpu)), _READINGS)
    return dict


class Load:
    """The load of one GPU: products, and copies of its memory, over and over."""

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
        """All of it once. mark: called before, between products and copy, and behind."""
        mark()
        for _ in range(PRODUCTS):
            matmul.matmul(self.dev, self.out, self.a, self.b, trans_b=True)
        mark()
        self.dev.copy(*self.copied)
        mark()

    def run(self) -> tuple[float, float]:
        """Once; TFLOP/s of the products, GB/s of the copy."""
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
    """Load one GPU for so long, in this thread; adds to its series after so many seconds each."""
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
    """The part: of each GPU its `series`, a reading each second, and what they settle at; `alone`,
    TFLOP/s of GPU 0 with the others idle; `slowest`, of that the share that the slowest one has."""
    machine = choose_machine(device, gpus)
    budget = machine.spec.memory // 4
    rows = next((n for n in ROWS if (6 + 2 * COPY) * n * n < budget), ROWS[-1])
    seconds, alone = job.left, None
    errors: list[BaseException] = []

    def together(count: int, seconds: float) -> list[dict[str, list[Any]]]:
        """Each in a thread, which moves to the CPUs near its GPU; where one fails, others go on."""
        each: list[dict[str, list[Any]]] = [{"seconds": []} for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            how = (machine, rows, seconds, every)
            loads = [pool.submit(_loaded, g, each[g], *how) for g in range(count)]
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
    """The values at which a series settles: medians of its last third, the hottest, and every
    reason there."""
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
