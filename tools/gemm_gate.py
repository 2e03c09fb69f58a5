"""An fp8 product of our own against cuBLASLt's best, both at the card's power limit.

    python tools/gemm_gate.py [--seconds 3] [--out benchmarks/h100_gemm_gate.md]

For an H100 or H200. The products are those between which SwiGLU stands: the up product, and the
input gradient of the down product. Codes are distributed as those of activations and weights are.
cuBLASLt is tuned, once allowed to accumulate fast and once not; of tools/gemm_sm90.cu the fastest
of three orders of its tiles is taken. All take turns, each for so many seconds, twice. Power and
energy are the card's own counters.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

from llmq.base.dtypes import BF16, E4M3, F32, U8
from llmq.base.tensor import Tensor
from llmq.runtime.compile import Nvrtc

SOURCE = Path(__file__).with_name("gemm_sm90.cu")
SHARED = 5 * 40960 + 8 * 2048 + 12 * 8 + 1024  # stages, chunks, barriers, alignment
GROUPS = (8, 12, 16)
SHAPES = {  # M, N, K
    "0.5B up": (32768, 9728, 896),
    "0.5B down, input gradient": (32768, 4864, 896),
    "1.5B up": (32768, 17920, 1536),
    "1.5B down, input gradient": (32768, 8960, 1536),
    "7B up": (16384, 37888, 3584),
    "7B down, input gradient": (16384, 18944, 3584),
}
WORKSPACE = 64 << 20


class Load(NamedTuple):
    """What a product did under load. equal: share of its results that are cuBLASLt's bits."""

    teraflops: float
    picojoules: float  # of a FLOP
    watts: float
    equal: float | None = None


class Gemm:
    """The kernel, with one order of its tiles."""

    def __init__(self, group: int):
        from cuda.bindings import driver

        numbers = '"' + ", ".join(f"%{i}" for i in range(96)) + '"'
        operands = ", ".join(f'"+f"(d[{i}])' for i in range(96))
        text = SOURCE.read_text().replace("WGMMA_NUMBERS", numbers)
        text = text.replace("WGMMA_OPERANDS", operands)
        options = ("-std=c++17", "--gpu-architecture=sm_90a", f"-DGROUP={group}")
        code, log = Nvrtc().compile(SOURCE.name, text, options)
        if code is None:
            raise RuntimeError(log)
        self._driver = driver
        self._module = self._call("cuModuleLoadData", code)
        self._function = self._call("cuModuleGetFunction", self._module, b"gemm")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, attribute, SHARED)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._driver, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {status.name}")
        return values[0] if values else None

    def _map(self, tensor: Tensor, box: tuple[int, int]) -> Any:
        """Of a matrix, which is read or written in boxes (rows, columns) of 128 bytes a row."""
        d = self._driver
        types = d.CUtensorMapDataType
        rows, columns = tensor.shape
        bf16 = types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        return self._call(
            "cuTensorMapEncodeTiled",
            bf16 if tensor.dtype == BF16 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            tensor.ptr,
            [d.cuuint64_t(columns), d.cuuint64_t(rows)],
            [d.cuuint64_t(columns * tensor.dtype.itemsize)],
            [d.cuuint32_t(box[1]), d.cuuint32_t(box[0])],
            [d.cuuint32_t(1), d.cuuint32_t(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def bind(self, out: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Callable[[int], None]:
        """A function of a stream that computes out. scale: of both operands."""
        maps = [self._map(a, (128, 128)), self._map(b, (96, 128)), self._map(out, (16, 64))]
        words = [ctypes.c_uint64(scale.ptr)] * 2
        sizes = [ctypes.c_int(n) for n in (*out.shape, a.shape[1])]
        places = [int(m.getPtr()) for m in maps] + [ctypes.addressof(w) for w in (*words, *sizes)]
        pointers = (ctypes.c_void_p * len(places))(*places)

        def run(stream: int, _kept: Any = (maps, words, sizes)) -> None:
            address = ctypes.addressof(pointers)
            place = (132, 1, 1, 384, 1, 1, SHARED, stream, address, 0)
            self._call("cuLaunchKernel", self._function, *place)

        return run


class Card:
    """The GPU's counters. Uses NVML's Python bindings."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.name = pynvml.nvmlDeviceGetName(self._handle)

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3


def codes(rows: int, columns: int, spread: float, seed: int) -> Any:
    """E4M3 codes (rows, columns) of a normal distribution whose columns differ by e^spread, scaled
    so that the largest one is 448."""
    import cupy
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator)
    x *= torch.exp(spread * torch.randn(1, columns, device="cuda", generator=generator))
    x *= 448 / x.abs().max()
    found = cupy.from_dlpack(x.to(torch.float8_e4m3fn).view(torch.uint8)).copy()
    torch.cuda.synchronize()
    return found


def under_load(
    runs: dict[str, Callable[[int], None]], stream: Any, card: Card, flops: int, seconds: float
) -> dict[str, Load]:
    """All in turns, twice."""
    totals = {name: [0, 0.0, 0.0] for name in runs}
    for name in [*runs] * 2:
        count, start, energy = 0, time.perf_counter(), card.joules()
        while time.perf_counter() - start < seconds:
            for _ in range(50):
                runs[name](stream.ptr)
            stream.synchronize()
            count += 50
        spent = (count, time.perf_counter() - start, card.joules() - energy)
        totals[name] = [a + b for a, b in zip(totals[name], spent, strict=True)]
    return {
        name: Load(flops * n / time_ / 1e12, joules / (flops * n) * 1e12, joules / time_)
        for name, (n, time_, joules) in totals.items()
    }


def compare(
    shape: tuple[int, int, int], library: Any, kernels: list[Gemm], card: Card, seconds: float
) -> dict[str, Load]:
    """One product by all ways."""
    import cupy

    M, N, K = shape
    stream = cupy.cuda.Stream(non_blocking=True)

    def place(array: Any, dtype: Any, shape: tuple[int, ...]) -> Tensor:
        return Tensor("x", shape, dtype, SimpleNamespace(base=array.data.ptr, on_host=False), 0)

    arrays = [codes(M, K, 0.3, 1), codes(N, K, 0.0, 2)]
    results = [cupy.zeros((M, N), cupy.uint16) for _ in range(2)]
    one, space = cupy.full(4, 1e-3, cupy.float32), cupy.empty(WORKSPACE, cupy.uint8)
    a, b = place(arrays[0], E4M3, (M, K)), place(arrays[1], E4M3, (N, K))
    theirs, ours = (place(r, BF16, (M, N)) for r in results)
    scale, workspace = place(one, F32, (1,)), place(space, U8, (WORKSPACE,))

    def cublas(fast: bool) -> Callable[[int], None]:
        rest = (scale, scale, None, workspace, M, N, K, 0, fast)
        return lambda stream: library.fp8(stream, theirs, a, b, *rest)

    def milliseconds(run: Callable[[int], None]) -> float:
        events = [cupy.cuda.Event() for _ in range(2)]
        for event in events:
            event.record(stream)
            for _ in range(10):
                run(stream.ptr)
        stream.synchronize()
        return cupy.cuda.get_elapsed_time(*events)

    runs = {"cuBLASLt exact": cublas(False), "cuBLASLt fast": cublas(True)}
    for run in runs.values():
        run(stream.ptr)  # which tunes; the fast result stays
    mine = min((k.bind(ours, a, b, scale) for k in kernels), key=milliseconds)
    stream.synchronize()
    equal = float((results[0] == results[1]).mean())
    found = under_load(runs | {"ours": mine}, stream, card, 2 * M * N * K, seconds)
    return found | {"ours": found["ours"]._replace(equal=equal)}


def table(rows: dict[str, dict[str, Load]]) -> list[str]:
    """Markdown."""
    lines = [
        "| product | cuBLASLt exact | cuBLASLt fast | ours | speed | energy | same bits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, ways in rows.items():
        fast, ours = ways["cuBLASLt fast"], ways["ours"]
        cells = [f"{w.teraflops:.0f}, {w.picojoules:.3f}, {w.watts:.0f}" for w in ways.values()]
        speed, energy = ours.teraflops / fast.teraflops, ours.picojoules / fast.picojoules
        cells += [f"{speed:.1%}", f"{energy:.1%}", f"{ours.equal:.1%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main(
    seconds: Annotated[float, typer.Option(help="Of each way, each time.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    import cupy

    from llmq.runtime.cublaslt import CublasLt

    cupy.cuda.Device(0).use()
    cupy.zeros(1)
    card = Card()
    library = CublasLt(card.name, tune=True, cache_path=None)
    kernels = [Gemm(group) for group in GROUPS]
    rows = {name: compare(s, library, kernels, card, seconds) for name, s in SHAPES.items()}
    text = [
        "# An fp8 product of our own beside cuBLASLt's",
        "",
        f"{card.name}, {date.today()}: `python tools/{Path(__file__).name} --seconds {seconds:g}`.",
        "TFLOP/s, pJ per FLOP and W of each way; speed and energy of ours against cuBLASLt's fast "
        "accumulation.",
        "",
        *table(rows),
    ]
    print("\n".join(text))
    if out is not None:
        out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    typer.run(main)
