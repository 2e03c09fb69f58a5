"""How fast the kernels of gated delta nets are, next to what the machine allows and to attention.

    python tools/delta_speed.py --out benchmarks/h100/2026-11-26/h100_delta_kernels.md

For each model, length of sequences and number of them: every kernel of the delta rule and of what
is around it in a layer, forward and backward, and the attention of the model's other layers beside
them. Kernels are timed where they run, one after the other, and an operation begins with a cache
full of other (dirty) lines; the median of --runs. A kernel's bytes are those that it must read and
write once, its FLOPs those of its products on tensor cores, of triangles one half.

A kernel that computed at 35 % of a large product's rate, or moved bytes at 70 % of a large copy's,
whichever takes longer, would take the time that the goal permits: that is what binds it.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_ops import Ceilings, ceilings, plan, prepare
from op_calls import OPS, Call

from llmq.arch.delta import DeltaNet
from llmq.base.errors import LlmqError
from llmq.options.presets import PRESETS
from llmq.runtime.gpu_info import library_versions
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.timing import LaunchTime, time_launches

MIB = 1 << 20
CHUNK, FACTORS = 64, 24  # tokens; bytes of factors of a token and a value head
PRODUCT_GOAL, COPY_GOAL, GROWTH_GOAL = 0.35, 0.70, 1.1


class Work(NamedTuple):
    """Bytes that are read and written, and FLOPs of products: what a token takes."""

    bytes: float
    flops: float


def work_of(delta: DeltaNet) -> dict[str, Work]:
    """The work of each kernel of a layer, in BF16."""
    Hk, Hv, DK, DV = delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim
    triangle = (CHUNK + 1) / 2  # tokens of a chunk that one sees, in the mean
    key, w, v, state, square = 2 * DK * Hk / Hv, 2 * DK, 2 * DV, 2 * DK * DV / CHUNK, 2 * CHUNK
    gates = 2 * 4
    products = DK * DV
    made = 2 * key + v + gates + v + w + square + FACTORS  # by prepare, ahead
    # Each has the bytes and the FMAs that a token of a value head takes.
    rule = {
        "prepare ahead": (made, triangle * (3 * DK + DV)),
        "prepare": (made + square, triangle * (3 * DK + DV)),
        "scan": (v + w + 2 * key + square + FACTORS + v, 3 * products + triangle * DV),
        "states": (v + w + key + FACTORS + state + v, 2 * products),
        "scan_backward": (
            v + 2 * key + w + square + FACTORS + v + state,
            3 * products + triangle * DV,
        ),
        "gradients": (
            3 * v + 2 * state + square + FACTORS + 2 * key + v + gates + (2 * key + v + gates),
            3 * products + triangle * (3 * DV + 4 * DK),
        ),
    }
    return {name: Work(Hv * moved, Hv * 2 * fmas) for name, (moved, fmas) in rule.items()}


@dataclass(frozen=True)
class Row:
    """A kernel, or an operation that memory limits. work: of all tokens; None: attention."""

    name: str
    us: float
    work: Work | None = None


def launches(machine: Machine, call: Call, runs: int) -> tuple[list[LaunchTime], int]:
    """The launches of a call with the median of their times, and the bytes of the call."""
    flush_bytes = (256 if machine.kind == "cuda" else 1) * MIB
    sizes, moved, _ = plan(machine.spec, call, flush_bytes)
    with closing(machine.open(sizes)) as dev:
        prepared = prepare(dev, call, flush_bytes)

        def all_runs() -> None:
            for _ in range(runs):
                dev.zero(prepared.flush)
                prepared.run()

        all_runs()
        found = time_launches(dev, all_runs)
    length = len(found) // runs
    each = [found[i::length] for i in range(1, length)]  # the first one fills the cache
    median = [statistics.median(launch.ms for launch in same) for same in each]
    pairs = zip(each, median, strict=True)
    return [LaunchTime(s[0].name, ms, s[0].traffic, s[0].flops, True) for s, ms in pairs], moved


def of_operation(machine: Machine, op: str, shape: tuple, runs: int, *names: str) -> list[Row]:
    """Rows of an operation whose calls have these names."""
    rows = []
    for call in OPS[op](*shape):
        if call.name in names:
            found, moved = launches(machine, call, runs)
            total = sum(launch.ms for launch in found) * 1e3
            work = None if op == "attention" else Work(moved, 0)
            rows.append(Row(f"{op} {call.name}", total, work))
    return rows


def of_rule(machine: Machine, delta: DeltaNet, B: int, T: int, runs: int) -> list[Row]:
    """Rows of the delta rule's kernels."""
    shape = (B, T, delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim)
    work, rows = work_of(delta), []
    for call in OPS["delta_rule"](*shape):
        if call.name in ("forward", "backward"):
            for launch in launches(machine, call, runs)[0]:
                name = launch.name.removeprefix("delta_rule_").removesuffix("_sm90")
                name += " ahead" if (name, call.name) == ("prepare", "forward") else ""
                of_all = Work(*(B * T * x for x in work[name]))
                rows.append(Row(f"{call.name}: {name.split()[0]}", launch.ms * 1e3, of_all))
    return rows


def of_model(machine: Machine, name: str, B: int, T: int, runs: int) -> list[Row]:
    """Rows of a model's layers."""
    model = PRESETS[name]
    delta = model.delta
    columns = delta.channels + delta.values + 2 * delta.value_heads
    conv = (B, T, delta.channels, columns, delta.taps)
    norm = (B * T, delta.value_heads, delta.value_dim, columns, delta.channels)
    gates = (B * T, delta.value_heads, columns, columns - 2 * delta.value_heads)
    attention = (B, T, model.num_heads, model.num_kv_heads, model.head_dim)
    both = ("forward", "backward")
    rows = of_operation(machine, "short_conv", conv, runs, *both)
    rows += of_operation(machine, "delta_gates", gates, runs, *both)
    rows += of_rule(machine, delta, B, T, runs)
    rows += of_operation(machine, "gated_norm", norm, runs, *both)
    for way in ("cudnn", "native"):
        try:
            calls = (f"forward {way}", f"backward {way}")
            return rows + of_operation(machine, "attention", attention, runs, *calls)
        except (LlmqError, ValueError, RuntimeError):  # a library that is missing, a head size
            continue
    return rows


def line(row: Row, limits: Ceilings, before: Row | None, longer: int) -> str:
    """A row of the table. before: the same of a shorter sequence; longer: than that."""
    growth = "" if before is None else f"{row.us / before.us / longer:.2f}"
    if row.work is None:
        return f"| {row.name} | {row.us:,.0f} | | | | | {growth} |"
    moved, flops = row.work
    of_copy = moved / limits.copy / row.us * 1e6
    of_product = flops / limits.product / row.us * 1e6
    by_products = flops / PRODUCT_GOAL / limits.product > moved / COPY_GOAL / limits.copy
    share = of_product / PRODUCT_GOAL if by_products else of_copy / COPY_GOAL
    product = f"{100 * of_product:.0f}" if flops else ""
    bound = "products" if by_products else "copy"
    return (
        f"| {row.name} | {row.us:,.0f} | {100 * of_copy:.0f} | {product} | {bound} | {share:.2f} | "
        f"{growth} |"
    )


LEGEND = f"""Times are of one layer. Of the goal: 1 or more holds it, {100 * PRODUCT_GOAL:.0f} % of
products or {100 * COPY_GOAL:.0f} % of the copy, what binds. Growth: time per token in relation to
the shortest sequence; {GROWTH_GOAL} is the goal."""
HEAD = (
    "| | us | of copy, % | of products, % | binds | of the goal | growth |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def main(
    model: Annotated[list[str] | None, typer.Option(help="Presets.")] = None,
    seq_len: Annotated[list[int] | None, typer.Option(help="Lengths, the shortest first.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Numbers of sequences.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Of each operation.")] = 10,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="A file for the tables.")] = None,
) -> None:
    """Print tables."""
    try:
        machine = choose_machine(device, 1)
        limits = ceilings(machine.open, machine.kind == "cuda")
    except LlmqError as error:
        sys.exit(f"error: {error}")
    command = " ".join(["tools/delta_speed.py", *sys.argv[1:]])
    versions = "; ".join(f"{name} {version}" for name, version in library_versions().items())
    texts = [
        f"# Kernels of gated delta nets, {machine.spec.name}",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {versions}",
        f"A large copy: {limits.copy / 1e9:,.0f} GB/s; a large product in bf16: "
        f"{limits.product / 1e12:,.0f} TFLOP/s.\n{LEGEND}",
    ]
    print("\n\n".join(texts), flush=True)
    for name in model or ["Qwen3.5-4B", "Qwen3.5-27B"]:
        for B in batch_size or [1, 4]:
            lengths = seq_len or [4096, 32768]
            first: dict[str, Row] = {}
            for T in lengths:
                rows = of_model(machine, name, B, T, runs)
                longer = T // lengths[0]
                lines = [line(row, limits, first.get(row.name), longer) for row in rows]
                first = first or {row.name: row for row in rows}
                text = "\n".join([f"## {name}, {B} x {T:,}\n", HEAD, *lines])
                print(f"\n{text}", flush=True)
                texts.append(text)
    if out is not None:
        out.write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    typer.run(main)
