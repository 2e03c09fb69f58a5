"""Products, attention and copies over a ladder of sizes, on a GPU as warm as in training."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmq.base.dtypes import BF16, E4M3, F32, I8, MIB, U8, DType
from llmq.base.tensor import Tensor
from llmq.ops import (
    attention,
    attention_backward,
    elementwise,
    fp8_scale,
    matmul,
    quantize,
    quantize_int8,
)
from llmq.options.rules import FP8_CAPABILITY
from llmq.rig.child import Job
from llmq.rig.steps import table_of
from llmq.runtime.device import Device, DeviceSpec
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.timing import LaunchTime, time_launches

SIZES = (512, 1024, 2048, 4096, 8192, 16384)  # rows and columns of a product
COPIES = (256, 1024)  # MiB that are read, and as many that are written: more than caches hold
HEADS = ((64, 14, 2), (128, 28, 4))  # size, of queries, of keys: those of Qwen2.5-0.5B and 7B
LENGTHS = (1024, 4096)
TOKENS = 16384  # of attention
SHARE = 4  # of the memory that is free, a case may take one part in so many
SETTLE = 4.0  # seconds of products before the first case
WARM = 0.2  # seconds of a case before it is timed
TIMED = (3, 30)  # runs, at least and at most
# Fills before these, for as long as the host needs to enqueue them: with an empty queue what takes
# microseconds would last as long as its launch.
AHEAD, FILLS = 256 * MIB, 120


@dataclass(frozen=True)
class Case:
    """One measurement. prepare: allocates on a device and returns what runs it. work: FLOPs, or
    bytes that are moved."""

    name: str
    size: str
    work: int
    prepare: Callable[[Device], Callable[[], None]]


def fill_codes(dev: Device, codes: Tensor, seed: int = 0) -> None:
    """Codes of normally distributed numbers: of zeros a product would be faster."""
    with (
        dev.scratch("numbers", codes.shape, BF16) as numbers,
        dev.scratch("largest", (1,), F32) as largest,
        dev.scratch("scale", (codes.shape[0],), F32) as scale,
    ):
        elementwise.normal(dev, numbers, 1.0, seed)
        if codes.dtype == I8:
            quantize_int8.rows(dev, codes, scale, numbers)
            return
        dev.zero(largest)
        fp8_scale.abs_max(dev, largest, numbers)
        quantize.quantize(dev, codes, None, scale.rows(0, 1), numbers, largest)


def _product(n: int, dtype: DType, fast: bool, dev: Device) -> Callable[[], None]:
    """The product of square matrices in BF16 or codes. fast: sums of fp8, see matmul_fp8."""
    out, a, b = (dev.alloc("square", (n, n), t, "Activations") for t in (BF16, dtype, dtype))
    if dtype == BF16:
        for seed, operand in enumerate((a, b)):
            elementwise.normal(dev, operand, 1.0, seed)
        return lambda: matmul.matmul(dev, out, a, b, trans_b=True)
    scale = dev.alloc("scale", (n,), F32, "Activations")
    elementwise.fill(dev, scale, 1.0)
    for seed, codes in enumerate((a, b)):
        fill_codes(dev, codes, seed)
    if dtype == I8:
        return lambda: matmul.matmul_int8(dev, out, a, b, scale, scale)
    of_all = scale.rows(0, 1)
    return lambda: matmul.matmul_fp8(dev, out, a, b, of_all, of_all, fast_accumulation=fast)


def _copy(mib: int, dev: Device) -> Callable[[], None]:
    pair = [dev.alloc(name, (mib * MIB,), U8, "Activations") for name in ("target", "source")]
    return lambda: dev.copy(*pair)


def _attention(
    head: tuple[int, int, int], seq_len: int, backend: str, backward: bool, own: bool, dev: Device
) -> Callable[[], None]:
    """own: backward by ops.attention_backward, which is "native" for whole sequences on Hopper."""
    head_dim, heads, kv_heads = head
    batch = max(TOKENS // seq_len, 1)

    def alloc(name: str, count: int) -> Tensor:
        return dev.alloc(name, (batch, seq_len, count, head_dim), BF16, "Activations")

    qkv, out = alloc("qkv", heads + 2 * kv_heads), alloc("out", heads)
    lse = dev.alloc("lse", (batch, heads, seq_len), F32, "Activations")
    elementwise.normal(dev, qkv, 1.0, 0)
    ahead = partial(attention.forward, dev, out, lse, qkv, heads, kv_heads, backend=backend)
    if not backward:
        return ahead
    d_qkv, d_out = alloc("d_qkv", heads + 2 * kv_heads), alloc("d_out", heads)
    elementwise.normal(dev, d_out, 1.0, 1)
    ahead()
    tensors = (d_qkv, d_out, out, lse, qkv)
    way = partial(attention_backward.backward, micro_batch=batch) if own else None
    return partial(attention.backward, dev, *tensors, heads, kv_heads, backend=backend, kernel=way)


def cases(spec: DeviceSpec) -> Iterator[Case]:
    """All that this GPU can compute, the most telling first."""
    fits = [n for n in SIZES if 6 * n * n < spec.memory // SHARE]
    ways = {
        "bf16 product": (BF16, False),
        "fp8 product": (E4M3, False),
        "fp8 product, fast sums": (E4M3, True),
        "int8 product": (I8, False),
    }
    for name, (dtype, fast) in ways.items():
        if dtype != E4M3 or spec.capability >= FP8_CAPABILITY:
            for n in reversed(fits):
                yield Case(name, str(n), 2 * n**3, partial(_product, n, dtype, fast))
    for mib in COPIES:
        if 2 * mib * MIB < spec.memory // SHARE:
            yield Case("copy", f"{mib} MiB", 2 * mib * MIB, partial(_copy, mib))
    for head, length in [(head, length) for length in LENGTHS for head in HEADS]:
        square = max(TOKENS // length, 1) * head[1] * length * length * head[0]
        ways = [
            (b, backward, False) for b in attention.BACKENDS[::-1] for backward in (False, True)
        ]
        if attention_backward.is_supported(spec.capability, length, head[0]):
            ways.append(("native", True, True))
        for backend, backward, own in ways:
            name = f"attention {'backward' if backward else 'forward'}, {backend}"
            name += ", whole sequences" if own else ""
            prepare = partial(_attention, head, length, backend, backward, own)
            yield Case(name, f"{head[0]} x {length}", (5 if backward else 2) * square, prepare)


def prepared(dev: Device, case: Case) -> tuple[Callable[[], None], Tensor | None]:
    """The function that runs a case, and on GPUs memory to fill."""
    run = case.prepare(dev)
    on_host = dev.kind == "host"
    return run, None if on_host else dev.alloc("ahead", (AHEAD,), U8, "Activations")


def run_case(dev: Device, case: Case) -> list[LaunchTime]:
    """Run it until it is warm, and time some of its runs, one launch at a time."""
    run, ahead = prepared(dev, case)
    run()  # loads and tunes
    dev.synchronize()
    start, count = time.perf_counter(), 0
    while count < TIMED[0] or time.perf_counter() - start < WARM:
        run()
        dev.synchronize()
        count += 1
    count = min(count, TIMED[1])

    def timed() -> None:
        for _ in range(count):
            run()

    for _ in range(FILLS if ahead is not None else 0):
        dev.zero(ahead)
    return time_launches(dev, timed)


def measure(job: Job, *, device: str = "cuda", **_: Any) -> None:
    """The part: `rows`, what and how fast, in TFLOP/s or GB/s; `launches`, for the card file."""
    machine = choose_machine(device, 1)
    chosen = list(cases(machine.spec))
    found: dict[str, Any] = {"rows": [], "launches": {}, "refused": {}}
    every: list[LaunchTime] = []
    for index, case in enumerate(chosen):
        if job.left <= 0:
            break
        try:
            plan = PlanDevice(machine.spec)
            prepared(plan, case)[0]()
            with closing(machine.open(plan.sizes())) as dev:
                if index == 0:
                    _settle(dev, case, min(SETTLE, job.left / 2))
                times = run_case(dev, case)
        except Exception as error:  # of a library that is missing, or refuses it
            found["refused"][f"{case.name}, {case.size}"] = " ".join(str(error).split())[:200]
            continue
        every += times
        once = sum(time.ms for time in times) / 1e3 / max(_runs(times), 1)
        rate = {"tflops": case.work / once / 1e12}
        if case.name == "copy":
            rate = {"gb_per_s": case.work / once / 1e9}
        found["rows"].append({"what": case.name, "size": case.size} | rate)
        found["launches"] = table_of(every)
        job.note(found)


def _runs(times: list[LaunchTime]) -> int:
    """How many runs of a case they are: its first launch is in each once."""
    return sum(time.name == times[0].name for time in times)


def _settle(dev: Device, case: Case, seconds: float) -> None:
    with dev.temporary():
        run = case.prepare(dev)
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            run()
            dev.synchronize()
