"""Products of our own against cuBLASLt's best, all at the card's power limit.

    python tools/gemm_gate.py [--tail | --swiglu | --gradients | --grouped] [--seconds 3]
        [--out table.md]

For an H100 or H200, whose `matmul_fused` is. Without --tail it computes plain fp8 products, those
between which SwiGLU stands: the up product, and the input gradient of the down product. cuBLASLt is
allowed to accumulate fast, and not. With --tail it computes these with the product of adapters in
them, in fp8 and bf16, and cuBLASLt does both, the second one onto the first. With --swiglu it
computes products with the MLP's activation in them, or its gradient, beside the two kernels that
each of them replaces, and the first one of these alone (tools/fused_products.py). With --gradients
it does so with weight gradients that are added to what is stored (tools/gradient_products.py). With
--grouped it computes products of experts beside a dense product of the same FLOPs
(tools/grouped_products.py).

Operands are distributed as those of activations and weights are. cuBLASLt is tuned. All take turns,
each for so many seconds, twice. Power and energy are the card's own counters.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import fused_products
import gradient_products
import grouped_products
import typer

from llmq.base.dtypes import BF16, E4M3, E4M3_MAX, F32, DType
from llmq.base.tensor import Tensor
from llmq.ops import matmul_fused
from llmq.ops.matmul import matmul, matmul_fp8

SHAPES = {  # M, N, K
    "0.5B up": (32768, 9728, 896),
    "0.5B down, input gradient": (32768, 4864, 896),
    "1.5B up": (32768, 17920, 1536),
    "1.5B down, input gradient": (32768, 8960, 1536),
    "7B up": (16384, 37888, 3584),
    "7B down, input gradient": (16384, 18944, 3584),
}
# M, N, K, R, transposed: of one to three adapters of rank 16.
TAIL_SHAPES = {
    "7B up": (4096, 37888, 3584, 32, False),
    "7B down, input gradient": (4096, 18944, 3584, 16, True),
    "7B qkv": (4096, 4608, 3584, 48, False),
    "7B o": (4096, 3584, 3584, 16, False),
    "7B qkv, input gradient": (4096, 3584, 4608, 48, True),
    "7B down": (4096, 3584, 18944, 16, False),
}
SCALE = 1e-2  # of both operands' codes
BATCH = 50  # launches between two looks at the clock

Run = Callable[[], None]


class Load(NamedTuple):
    """The measurements of one run under load."""

    seconds: float
    joules: float

    def work(self, flops: int) -> str:
        """TFLOP/s, pJ per FLOP and W."""
        rate, energy = flops / self.seconds / 1e12, self.joules / flops * 1e12
        return f"{rate:.0f}, {energy:.3f}, {self.joules / self.seconds:.0f}"


class OnGpu:
    """A tensor's bytes, as torch takes them."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.ptr, False),
            "version": 3,
        }


class Card:
    """The GPU's counters. Uses NVML's Python bindings."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3


class Bench:
    """A GPU with the operands of one product. dev: a CudaDevice."""

    def __init__(self, dev: Any, card: Card):
        import torch

        self.dev, self.card, self.torch = dev, card, torch
        self.real: dict[str, Any] = {}  # what tensors hold, as F32 on the GPU, by name
        self._random = torch.Generator("cuda").manual_seed(1)

    def operand(
        self,
        name: str,
        dtype: DType,
        rows: int,
        columns: int,
        spread: float,
        size: float = 1.0,
    ) -> Tensor:
        """Normally distributed, with columns that differ by e^spread, of deviation `size` without
        that; the largest code is 448."""
        torch = self.torch
        x = torch.randn(rows, columns, device="cuda", generator=self._random)
        x *= torch.exp(spread * torch.randn(1, columns, device="cuda", generator=self._random))
        if dtype == E4M3:
            x *= E4M3_MAX / x.abs().max()
            x = x.to(torch.float8_e4m3fn)
            bits = x.view(torch.uint8)
        else:
            x = (x * size).to(torch.bfloat16)
            bits = x.view(torch.uint16)
        self.real[name] = x.float()
        tensor = self.dev.alloc(name, (rows, columns), dtype, "Activations")
        self.dev.upload(tensor, bits.cpu().numpy().view(dtype.numpy))
        return tensor

    def result(self, name: str, M: int, N: int) -> Tensor:
        return self.empty(name, BF16, M, N)

    def empty(self, name: str, dtype: DType, *shape: int) -> Tensor:
        """A tensor of zeros."""
        tensor = self.dev.alloc(name, shape, dtype, "Activations")
        self.dev.zero(tensor)
        return tensor

    def scale(self, value: float = SCALE) -> Tensor:
        import numpy as np

        scale = self.dev.alloc("scale", (1,), F32, "Activations")
        self.dev.upload(scale, np.full(1, value, np.float32))
        return scale

    def deviation(self, *names: str) -> float:
        """The product of these operands' standard deviations."""
        return math.prod(float(self.real[name].std()) for name in names)

    def equal(self, x: Tensor, y: Tensor) -> float:
        """The share of all bytes that are the same."""
        parts = (self.torch.as_tensor(OnGpu(z), device="cuda").split(1 << 27) for z in (x, y))
        return sum(int((p == q).sum()) for p, q in zip(*parts, strict=True)) / x.nbytes

    def held(self, tensor: Tensor) -> Any:
        """A result, as F32 on the GPU."""
        bits = self.dev.download(tensor).view("uint16")
        return self.torch.from_numpy(bits).cuda().view(self.torch.bfloat16).float()

    def under_load(self, runs: dict[str, Run], seconds: float) -> dict[str, Load]:
        """All in turns, twice; each has run once."""
        totals = {name: [0.0, 0.0, 0.0] for name in runs}
        for name in [*runs] * 2:
            count, energy, start = 0, self.card.joules(), time.perf_counter()
            while not count or time.perf_counter() - start < seconds:
                for _ in range(BATCH):
                    runs[name]()
                self.dev.synchronize()
                count += BATCH
            spent = (count, time.perf_counter() - start, self.card.joules() - energy)
            totals[name] = [a + b for a, b in zip(totals[name], spent, strict=True)]
        return {name: Load(time_ / n, joules / n) for name, (n, time_, joules) in totals.items()}


@contextmanager
def opened(card: Card, nbytes: int) -> Iterator[Bench]:
    """A GPU with so much memory for tensors."""
    from llmq.runtime.cuda_device import CudaDevice
    from llmq.runtime.device import MemorySizes

    sizes = MemorySizes(device=nbytes + (1 << 20), stack=32 << 20, pinned=0)
    with closing(CudaDevice(0, sizes)) as dev:
        yield Bench(dev, card)


def plain(card: Card, shape: tuple[int, int, int], seconds: float) -> str:
    """The row of one fp8 product."""
    M, N, K = shape
    with opened(card, M * K + N * K + 4 * M * N) as bench:
        dev, scale = bench.dev, bench.scale()
        a, b = bench.operand("a", E4M3, M, K, 0.3), bench.operand("b", E4M3, N, K, 0.0)
        theirs, ours = bench.result("theirs", M, N), bench.result("ours", M, N)
        library = (dev, theirs, a, b, scale, scale)
        runs = {
            "exact": lambda: matmul_fp8(*library),
            "fast": lambda: matmul_fp8(*library, fast_accumulation=True),
            "ours": lambda: matmul_fused.adapted(dev, ours, a, b, None, None, scale, scale),
        }
        for run in runs.values():
            run()  # which tunes; the fast result stays
        equal = (dev.download(theirs).view("uint16") == dev.download(ours).view("uint16")).mean()
        found = bench.under_load(runs, seconds)
    cells = [load.work(2 * M * N * K) for load in found.values()]
    speed = found["fast"].seconds / found["ours"].seconds
    energy = found["ours"].joules / found["fast"].joules
    return " | ".join([*cells, f"{speed:.1%}", f"{energy:.1%}", f"{equal:.1%}"])


def with_tail(
    card: Card, dtype: DType, shape: tuple[int, int, int, int, bool], seconds: float
) -> str:
    """The row of one product with adapters."""
    M, N, K, R, transposed = shape
    by_rows = transposed and dtype == BF16  # b is (K, N)
    with opened(card, dtype.itemsize * (M + N) * K + 2 * (M + N) * R + 4 * M * N) as bench:
        dev, real, scale = bench.dev, bench.real, bench.scale()
        a = bench.operand("a", dtype, M, K, 0.3)
        b = bench.operand("b", dtype, *((K, N) if by_rows else (N, K)), 0.0)
        h = bench.operand("h", BF16, M, R, 0.3)
        tail = bench.operand("tail", BF16, *((R, N) if transposed else (N, R)), 0.0)
        theirs, ours = bench.result("theirs", M, N), bench.result("ours", M, N)
        scales = (scale, scale) if dtype == E4M3 else ()

        def alone() -> None:
            if scales:
                matmul_fp8(dev, theirs, a, b, *scales, fast_accumulation=True)
            else:
                matmul(dev, theirs, a, b, trans_b=not by_rows)

        def two() -> None:
            alone()
            matmul(dev, theirs, h, tail, trans_b=not transposed, accumulate=True)

        def joined() -> None:
            matmul_fused.adapted(dev, ours, a, b, h, tail, *scales, transposed=transposed)

        two(), joined()
        want = real["a"] @ (real["b"] if by_rows else real["b"].T) * (SCALE**2 if scales else 1)
        want += real["h"] @ (real["tail"] if transposed else real["tail"].T)
        size = want.square().mean().sqrt()
        errors = [
            float((bench.held(out) - want).square().mean().sqrt() / size) for out in (theirs, ours)
        ]
        runs = {"alone": alone, "two": two, "joined": joined}
        found = bench.under_load(runs, seconds)
    cells = [f"{1e3 * load.seconds:.3f}, {load.joules:.3f}" for load in found.values()]
    saved = 1 - found["joined"].seconds / found["two"].seconds
    return " | ".join([*cells, f"{saved:.1%}", *(f"{error:.2e}" for error in errors)])


def with_more(card: Card, row: tuple[Any, Any, int], seconds: float) -> str:
    """The row of one case of fused_products or gradient_products."""
    make, case, results = row
    with opened(card, case.nbytes(results) + (1 << 20)) as bench:
        ways = make(bench, case)
        ways.product(), ways.two(), ways.one()  # which tunes
        for tensor in (*ways.results[0], *ways.results[1]):
            bench.dev.zero(tensor)
        ways.two(), ways.one()
        bench.dev.synchronize()
        equal = min(bench.equal(x, y) for x, y in zip(*ways.results, strict=True))
        runs = {"product": ways.product, "two": ways.two, "one": ways.one}
        found = bench.under_load(runs, seconds)
    cells = [f"{1e3 * load.seconds:.3f}, {load.joules:.3f}" for load in found.values()]
    two, one = found["two"], found["one"]
    saved = (1 - one.seconds / two.seconds, 1 - one.joules / two.joules)
    return " | ".join([*cells, *(f"{share:.1%}" for share in (*saved, equal))])


def plain_table(card: Card, seconds: float) -> list[str]:
    """Markdown."""
    return [
        "TFLOP/s, pJ per FLOP and W of each way; speed and energy of ours against cuBLASLt's fast "
        "accumulation.",
        "",
        "| product | cuBLASLt exact | cuBLASLt fast | ours | speed | energy | same bits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(f"| {name} | {plain(card, shape, seconds)} |" for name, shape in SHAPES.items()),
    ]


def tail_table(card: Card, seconds: float) -> list[str]:
    """Markdown."""
    return [
        "ms and J of each way: cuBLASLt's product without adapters, its two products, and ours; "
        "the time that ours saves of the two; root mean square errors over that of the result.",
        "",
        "| product | without adapters | two products | ours | saved | error of two | of ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name}, {dtype.name} | {with_tail(card, dtype, shape, seconds)} |"
            for dtype in (E4M3, BF16)
            for name, shape in TAIL_SHAPES.items()
        ),
    ]


def table_with_more(card: Card, seconds: float, cases: dict[str, Any]) -> list[str]:
    """Markdown."""
    return [
        "ms and J of each way: the product alone, the two kernels, and one; time and energy that "
        "one saves of the two; bytes that are the same, of that result which has the fewest.",
        "",
        "| product | alone | two kernels | one | time saved | energy saved | same bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(f"| {name} | {with_more(card, row, seconds)} |" for name, row in cases.items()),
    ]


def grouped_table(card: Card, seconds: float) -> list[str]:
    """Markdown."""
    lines = [
        "TFLOP/s of cuBLASLt's dense product, of the kernel for all GPUs, and of that for Hopper; "
        "the latter's share of the dense one's; bytes of both kernels' results that are the same.",
        "",
        "| product | dense | generic | Hopper | of dense | same bytes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (case, dtype) in grouped_products.CASES.items():
        with opened(card, case.nbytes) as bench:
            lines.append(f"| {name} | {grouped_products.row(bench, case, dtype, seconds)} |")
    return lines


def main(
    tail: Annotated[bool, typer.Option("--tail", help="With the product of adapters.")] = False,
    swiglu: Annotated[bool, typer.Option("--swiglu", help="With the MLP's activation.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="Of weights, added.")] = False,
    grouped: Annotated[bool, typer.Option("--grouped", help="Of experts.")] = False,
    seconds: Annotated[float, typer.Option(help="Of each way, each time.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    import torch

    if tail + swiglu + gradients + grouped > 1:
        raise typer.BadParameter("one of --tail, --swiglu, --gradients and --grouped")
    card = Card()
    torch.backends.cuda.matmul.allow_tf32 = False
    title, flag, table = "An fp8 product of our own beside cuBLASLt's", "", plain_table
    if tail:
        title = "Products with adapters in them beside cuBLASLt's"
        flag, table = " --tail", tail_table
    elif swiglu:
        title = "Products with the activation in them beside two kernels"
        flag, table = " --swiglu", partial(table_with_more, cases=fused_products.CASES)
    elif gradients:
        title = "Weight gradients added by their products beside two kernels"
        flag, table = " --gradients", partial(table_with_more, cases=gradient_products.CASES)
    elif grouped:
        title = "Products of experts beside dense ones"
        flag, table = " --grouped", grouped_table
    command = f"python tools/{Path(__file__).name}{flag} --seconds {seconds:g}"
    text = [
        f"# {title}",
        "",
        f"{torch.cuda.get_device_name()}, {date.today()}: `{command}`.",
        *table(card, seconds),
    ]
    print("\n".join(text))
    if out is not None:
        out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    typer.run(main)
