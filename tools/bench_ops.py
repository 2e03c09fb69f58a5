"""Speed of each operation, relative to the machine's ceilings.

    python tools/bench_ops.py norm [--case qwen15b]      python tools/bench_ops.py all
    for c in gemma4_local gemma4_global glm47_flash granite4_micro nemotron3_nano; do
        python tools/bench_ops.py all --case $c; done    # what no GPU has timed yet

Shapes are the CASES of llmq/ref/<op>.py in bf16 (those of matmul_fp8 are in matmul.py), without
shapes too small to fill a GPU; --case runs any of these. Before every run the L2 cache is filled
with other (dirty) lines. The table has the median time of many runs and the rate: TFLOP/s of
products and attention, else GB/s of the bytes that must be moved. The ceiling of bytes is a large
copy on this device. The ceiling of products and attention is the value in benchmarks/peers.json for
this card and shape, else a large product in bf16, twice its speed for fp8 and int8. A call below 85
% of the large copy's rate is also compared with a copy of equal size, which needs time to start and
end, too.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from op_calls import OPS, SEED, Call, Spec, cases, scalars

from llmq.base.dtypes import BF16, E4M3, F32, I8, I32, I64, STEP_SCALARS_WORDS, U8
from llmq.base.errors import LlmqError
from llmq.base.operand import Fp8Out, ProductCodes
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.pointwise import elementwise
from llmq.ops.quantize import fp8_scale, quantize, quantize_int8
from llmq.run.monitor import PRODUCT_SIZES, measured_peak
from llmq.runtime.arena import align_up
from llmq.runtime.device import FUSED, Device, DeviceSpec, MemorySizes
from llmq.runtime.gpu_info import library_versions
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.timing import Marks

MIB = 1 << 20
LEAST_BYTES, LEAST_FLOPS = 16 * MIB, 10**10  # cases with less work are for tests
WARM_UP, MIN_RUNS, MAX_RUNS, SECONDS = 3, 10, 100, 0.3
FACTS = Path(__file__).parents[1] / "benchmarks" / "peers.json"
GOAL = 85  # percent of the bandwidth of a copy
PRODUCTS = (
    "attention",
    "attention_backward",
    "grouped",
    "matmul",
    "matmul_fp8",
    "matmul_int8",
    *FUSED,
)  # compute-bound operations; all others are memory-bound


@dataclass(frozen=True)
class Prepared:
    """A call with allocated tensors, and a buffer larger than the L2 cache."""

    run: Callable[[], None]
    flush: Tensor


def fill_codes(dev: Device, codes: Tensor, seed: int = 0) -> None:
    """Fill codes from normally distributed numbers; a product of zeros would be faster."""
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


def prepare(dev: Device, call: Call, flush_bytes: int) -> Prepared:
    """Allocate and fill the tensors of a call."""
    shared = dev.alloc("scalars", (STEP_SCALARS_WORDS,), I32, "Activations")
    dev.upload(shared, scalars())

    def made(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [made(name, part) for part in value]
        if isinstance(value, Fp8Out | ProductCodes):
            return type(value)(*(made(name, part) for part in value))
        if isinstance(value, np.ndarray):
            dtype = next(d for d in (I32, F32, I64) if d.numpy == value.dtype)
            tensor = dev.alloc(name, value.shape, dtype, "Activations")
            dev.upload(tensor, value)
            return tensor
        if not isinstance(value, Spec):
            return value
        tensor = dev.alloc(name, value.shape, value.dtype, "Activations")
        if value.dtype in (E4M3, I8) and len(value.shape) == 2:
            fill_codes(dev, tensor)
        elif value.dtype not in (F32, BF16):
            dev.zero(tensor)
        elif value.value is None:
            elementwise.normal(dev, tensor, 1.0, SEED)
        else:
            elementwise.fill(dev, tensor, value.value)
        return Accumulator(tensor, True, shared, 1) if value.gradient else tensor

    args = {name: made(name, value) for name, value in call.args.items()}
    flush = dev.alloc("flush", (flush_bytes,), U8, "Activations")
    return Prepared(lambda: call.function(dev, **args), flush)


def plan(spec: DeviceSpec, call: Call, flush_bytes: int) -> tuple[MemorySizes, int, int]:
    """Return the memory sizes that the call needs, the bytes it must move and the FLOPs it must
    compute."""
    dev = PlanDevice(spec)
    prepared = prepare(dev, call, flush_bytes)
    moved, computed = sum(dev.bytes.values()), sum(dev.flops.values())
    prepared.run()
    moved = sum(dev.bytes.values()) - moved if call.bytes is None else call.bytes
    computed = sum(dev.flops.values()) - computed if call.flops is None else call.flops
    return dev.sizes(), moved, computed


def median_ms(
    dev: Device, run: Callable[[], None], flush: Tensor, seconds: float = SECONDS
) -> float:
    """Median milliseconds of MIN_RUNS to MAX_RUNS runs in about `seconds`; each begins with a cache
    full of the flush buffer's lines."""
    marks = Marks(dev)

    def timed(count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            dev.zero(flush)
            first = marks.mark()
            run()
            pairs.append((first, marks.mark()))
        dev.synchronize()
        return [marks.milliseconds(*pair) for pair in pairs]

    once = statistics.median(timed(WARM_UP))
    times = timed(min(max(int(seconds * 1e3 / once), MIN_RUNS), MAX_RUNS))
    marks.close()
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of a device. copy: bytes per second of a copy. product: FLOP/s of a product. facts:
    this card's part of benchmarks/peers.json."""

    copy: float
    product: float
    facts: dict[str, Any]

    def of(self, op: str, call: str, case: str, computed: int) -> tuple[float, str]:
        """Return the bytes or FLOPs per second that a call could reach, and the source of this
        number."""
        if op not in PRODUCTS:
            return self.copy, "copy"
        known = self.facts.get(op, {}).get(case)
        if known is None and (op in ("matmul_fp8", "matmul_int8") or call.startswith("fp8")):
            return 2 * self.product, "2 x product"
        if known is None:
            return self.product, "product"
        if op.startswith("matmul"):
            return known * 1e12, "peers.json"
        return computed / (known[call.split()[0]] / 1e3), "peers.json"


def copy_speed(open_device: Callable[[MemorySizes], Device], size: int, flush_bytes: int) -> float:
    """Bytes read plus bytes written per second by a copy of `size` bytes."""
    with closing(open_device(MemorySizes(device=2 * size + flush_bytes, stack=0, pinned=0))) as dev:
        source, target, flush = (
            dev.alloc(name, (n,), U8, "Activations")
            for name, n in (("source", size), ("target", size), ("flush", flush_bytes))
        )
        return 2 * size / median_ms(dev, lambda: dev.copy(target, source), flush) * 1e3


def ceilings(open_device: Callable[[MemorySizes], Device], on_gpu: bool) -> Ceilings:
    """Measure the ceilings of this device."""
    size = 1024 * MIB if on_gpu else MIB
    product = 4 * PRODUCT_SIZES[0] ** 2 * 2 if on_gpu else MIB  # three matrices and a workspace
    copied = copy_speed(open_device, size, size)
    with closing(open_device(MemorySizes(device=0, stack=product, pinned=0))) as dev:
        peak = measured_peak(dev)
        facts = json.loads(FACTS.read_text())["ceilings"].get(dev.spec.name, {})
    return Ceilings(copied, float("inf") if peak is None else peak * 1e12, facts)


def measured(
    open_device: Callable[[MemorySizes], Device],
    spec: DeviceSpec,
    op: str,
    case: str | None,
    limits: Ceilings,
    flush_bytes: int,
    seconds: float = SECONDS,
) -> Iterator[dict[str, Any]]:
    """Yield a record for every call of every case of an operation."""
    shapes = cases(op)
    for name in shapes if case is None else {case} & set(shapes):
        for call in OPS[op](*shapes[name]):
            sizes, moved, computed = plan(spec, call, flush_bytes)
            if case is None and moved < LEAST_BYTES and computed < LEAST_FLOPS:
                continue
            record = {"op": op, "call": call.name, "case": name}
            try:
                with closing(open_device(sizes)) as dev:
                    prepared = prepare(dev, call, flush_bytes)
                    ms = median_ms(dev, prepared.run, prepared.flush, seconds)
            except (LlmqError, RuntimeError) as error:  # a missing library, or a bug
                yield record | {"error": str(error), "failed": not isinstance(error, LlmqError)}
                continue
            ceiling, source = limits.of(op, call.name, name, computed)
            rate = (computed if op in PRODUCTS else moved) / ms * 1e3
            if op not in PRODUCTS and rate < GOAL / 100 * ceiling:
                half = align_up(moved // 2)
                record["of_equal_copy"] = 100 * rate / copy_speed(open_device, half, flush_bytes)
            yield record | {
                "us": ms * 1e3,
                "bytes": moved,
                "flops": computed,
                "gb_per_s": moved / ms / 1e6,
                "tflops": computed / ms / 1e9,
                "percent": 100 * rate / ceiling,
                "ceiling": source,
            }


def line(record: dict[str, Any]) -> str:
    """One record as a line for people."""
    start = f"{record['op']:13} {record['call']:22} {record['case']:21}"
    if "error" in record:
        return f"{start} {record['error']}"
    rate = (
        f"{record['tflops']:8.1f} TFLOP/s" if record["flops"] else f"{record['gb_per_s']:8.0f} GB/s"
    )
    of = record["ceiling"]
    if "of_equal_copy" in record:
        of += f", {record['of_equal_copy']:.1f} of one as short"
    return f"{start} {record['us']:10.1f} {rate:16} {record['percent']:6.1f} {of}"


def main(
    op: Annotated[str, typer.Argument(help="An operation of llmq/ops, or all.")],
    case: Annotated[str | None, typer.Option(help="Only this one of its CASES.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    json_file: Annotated[Path | None, typer.Option("--json", help="Records to write.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each call, about.")] = SECONDS,
) -> None:
    """Time operations."""
    if op != "all" and op not in OPS:
        sys.exit(f"error: {op} is not an operation: all, {', '.join(OPS)}")
    ops = list(OPS) if op == "all" else [op]
    known = list(dict.fromkeys(name for chosen in ops for name in cases(chosen)))
    if case is not None and case not in known:
        sys.exit(f"error: --case: {case} is no case of {op}: {', '.join(known)}")
    try:
        machine = choose_machine(device, 1)
        on_gpu = machine.kind == "cuda"
        flush_bytes = (256 if on_gpu else 1) * MIB  # several times the largest L2 cache
        limits = ceilings(machine.open, on_gpu)
    except LlmqError as error:
        sys.exit(f"error: {error}")
    print(f"{machine.spec.name}: copy {limits.copy / 1e9:,.0f} GB/s, "
          f"product {limits.product / 1e12:,.0f} TFLOP/s")  # fmt: skip
    print(f"{'op':13} {'call':22} {'case':21} {'us':>10} {'rate':16} {'%':>6} of")
    records = []
    for name in ops:
        open_device, spec = machine.open, machine.spec
        for record in measured(open_device, spec, name, case, limits, flush_bytes, seconds):
            records.append(record)
            print(line(record), flush=True)
    weak = [r for r in records if r.get("ceiling") == "copy" and r["percent"] < GOAL]
    names = (f"{r['op']} {r['call']} {r['case']} {r['percent']:.0f}" for r in weak)
    print(f"below {GOAL} % of a copy: {', '.join(names) or 'none'}")
    versions = "; ".join(f"{name} {version}" for name, version in library_versions().items())
    command = " ".join(["tools/bench_ops.py", *sys.argv[1:]])
    print(f"{command}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {versions}")
    if json_file is not None:
        json_file.write_text(json.dumps(records, indent=1) + "\n")
    if any(record.get("failed") for record in records):
        sys.exit("error: some calls failed")


if __name__ == "__main__":
    typer.run(main)
