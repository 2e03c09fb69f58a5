"""Tensors of more than 2^31 elements: their last rows come out as a small tensor's do.

On a GPU, with up to 15 GB. The emulator does the same with small ones, which shows that it works.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.tensor import Tensor
from llmq.ops.attention import attention, rope
from llmq.ops.loss import cross_entropy
from llmq.ops.pointwise import elementwise, embedding, gelu, norm, swiglu
from llmq.ops.pointwise.elementwise import fill
from llmq.ops.quantize import quantize
from llmq.runtime.device import Device, MemorySizes
from tests.conftest import gpu_problem
from tests.emulator import device as emulator

MIB = 1 << 20
T, HEADS, KV_HEADS, HEAD_DIM = 64, 8, 4, 64  # a grid has at most 65535 sequences
C = 1024


class Part(NamedTuple):
    """One tensor of a call: the shape of a row (a sequence for attention), and whether the call
    reads or writes it."""

    row: tuple[int, ...]
    reads: bool
    writes: bool
    dtype: DType = BF16


IN, OUT, BOTH = (True, False), (False, True), (True, True)
QKV, ATTENDED = (T, HEADS + 2 * KV_HEADS, HEAD_DIM), (T, HEADS, HEAD_DIM)


def attend_backward(dev: Device, d_qkv: Tensor, d_out: Tensor, qkv: Tensor) -> None:
    """With statistics of zeros, as good as any for where things are."""
    lse = dev.alloc("lse", (qkv.shape[0], HEADS, T), F32, "Activations")
    dev.zero(lse)
    attention.backward(dev, d_qkv, d_out, d_out, lse, qkv, HEADS, KV_HEADS)


def attend(dev: Device, out: Tensor, qkv: Tensor) -> None:
    lse = dev.alloc("lse", (qkv.shape[0], HEADS, T), F32, "Activations")
    attention.forward(dev, out, lse, qkv, HEADS, KV_HEADS)


def rotate(dev: Device, qkv: Tensor) -> None:
    values = rope.make_table(T, HEAD_DIM, 10000.0, None)
    table = dev.alloc("table", values.shape, F32, "Activations")
    dev.upload(table, values)
    rope.forward(dev, qkv, table, HEADS, KV_HEADS)


def normalise(dev: Device, out: Tensor, x: Tensor) -> None:
    rstd = dev.alloc("rstd", x.shape[:1], F32, "Activations")
    weight = dev.alloc("weight", (C,), BF16, "Activations")
    elementwise.normal(dev, weight, 1.0, 5)
    norm.forward(dev, out, None, rstd, x, weight, None, 1e-6)


def classify(dev: Device, logits: Tensor) -> None:
    rows = logits.shape[:1]
    losses, lse = (dev.alloc(name, rows, F32, "Activations") for name in ("losses", "lse"))
    targets = dev.alloc("targets", rows, I32, "Activations")
    dev.zero(targets)
    cross_entropy.forward_backward(dev, logits, losses, lse, targets, C - 3, 0.0)


def quantized(dev: Device, q: Tensor, back: Tensor, x: Tensor) -> None:
    """Both layouts; back: the transposed one, transposed."""
    q_t = dev.alloc("q_t", (C, x.shape[0]), E4M3, "Activations")
    scale, abs_max = (dev.alloc(name, (1,), F32, "Activations") for name in ("scale", "abs_max"))
    fill(dev, abs_max, 4.0)
    quantize.quantize(dev, q, q_t, scale, x, abs_max)
    quantize.transpose(dev, back, q_t)


def look_up(dev: Device, out: Tensor) -> None:
    tokens = dev.alloc("tokens", (1, out.shape[0]), I32, "Activations")
    dev.zero(tokens)
    weight = dev.alloc("weight", (8, C), BF16, "Activations")
    elementwise.normal(dev, weight, 1.0, 5)
    embedding.forward(dev, out.view(1, *out.shape), tokens, weight, None)


CALLS: dict[str, tuple[Callable[..., None], dict[str, Part]]] = {
    "convert": (elementwise.convert, {"out": Part((C,), *OUT, F32), "x": Part((C,), *IN)}),
    "swiglu": (swiglu.forward, {"out": Part((C,), *OUT), "up_gate": Part((2 * C,), *IN)}),
    "swiglu backward": (
        swiglu.backward,
        {
            "d_up_gate": Part((2 * C,), *OUT),
            "d_out": Part((C,), *IN),
            "up_gate": Part((2 * C,), *IN),
        },
    ),
    "gelu": (gelu.forward, {"out": Part((C,), *OUT), "x": Part((C,), *IN)}),
    "gelu backward": (
        gelu.backward,
        {"d_x": Part((C,), *OUT), "d_out": Part((C,), *IN), "x": Part((C,), *IN)},
    ),
    "norm": (normalise, {"out": Part((C,), *OUT), "x": Part((C,), *IN)}),
    "rope": (rotate, {"qkv": Part(QKV, *BOTH)}),
    "attention": (attend, {"out": Part(ATTENDED, *OUT), "qkv": Part(QKV, *IN)}),
    "attention backward": (
        attend_backward,
        {"d_qkv": Part(QKV, *OUT), "d_out": Part(ATTENDED, *IN), "qkv": Part(QKV, *IN)},
    ),
    "cross entropy": (classify, {"logits": Part((C,), *BOTH)}),
    "quantize": (
        quantized,
        {"q": Part((C,), *OUT, E4M3), "back": Part((C,), *OUT, E4M3), "x": Part((C,), *IN)},
    ),
    "embedding": (look_up, {"out": Part((C,), *OUT)}),
}


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request):
    """open(sizes) and the elements of the largest tensor."""
    if request.param == "emulator":
        if problem := emulator.missing():
            pytest.skip(problem)
        yield emulator.EmulatorDevice, 64 * C
        return
    if problem := gpu_problem():
        pytest.skip(problem)
    from llmq.runtime.cuda_device import CudaDevice

    opened = []

    def open_device(sizes: MemorySizes) -> CudaDevice:
        opened.append(CudaDevice(0, sizes, tune=False))
        return opened[-1]

    yield open_device, (1 << 31) + 64 * 2 * C
    for device in opened:
        device.close()


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("name", CALLS)
def test_the_last_rows(machine, name):
    (open_device, elements), (call, parts) = machine, CALLS[name]
    widest = max(int(np.prod(part.row)) for part in parts.values())
    last_rows = 16 if widest <= 2 * C else 2
    rows = max(-(-elements // (widest * last_rows)), 2) * last_rows
    size = {n: int(np.prod(part.row)) * part.dtype.itemsize for n, part in parts.items()}
    # Besides: the transposed codes, statistics, and what few rows take.
    beside = C + 64 if name == "quantize" else 4 * HEADS * T if last_rows == 2 else 64
    extra = rows * beside + 64 * MIB
    sizes = MemorySizes(device=rows * sum(size.values()) + extra, stack=extra, pinned=0)
    dev = open_device(sizes)
    large, small = {}, {}
    for seed, (tensor, part) in enumerate(parts.items()):
        large[tensor] = dev.alloc(tensor, (rows, *part.row), part.dtype, "Activations")
        small[tensor] = dev.alloc(tensor, (last_rows, *part.row), part.dtype, "Activations")
        if part.reads:
            elementwise.normal(dev, large[tensor], 1.0, seed)
            first = (rows - last_rows) * int(np.prod(part.row))
            elementwise.normal(dev, small[tensor], 1.0, seed, first)
            last = dev.download(large[tensor].rows(rows - last_rows, rows))
            assert (bits(last) == bits(dev.download(small[tensor]))).all()
    call(dev, **large)
    call(dev, **small)
    for tensor, part in parts.items():
        if part.writes:
            last = dev.download(large[tensor].rows(rows - last_rows, rows))
            assert (bits(last) == bits(dev.download(small[tensor]))).all(), tensor
    if "back" in parts:
        codes = (dev.download(small[tensor]) for tensor in ("q", "back"))
        assert np.array_equal(*(bits(x) for x in codes))
