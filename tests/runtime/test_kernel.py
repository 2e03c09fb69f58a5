"""Kernel declarations: parsing, checking of arguments, traffic."""

import ctypes
import struct

import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.cuda_kernels import MAP_BYTES, Arguments
from llmq.runtime.kernel import TYPE_VARIABLES, Kernel, ceil_div, expect

STORAGE = Storage("device", base=1 << 12)
KERNEL = Kernel(
    "declared.cu",
    "f",
    "out T[n] out, T[n] x, inout f32[n] sum, G[n]? bias, i64 n, f32 eps",
)


def tensor(dtype=F32, shape=(8,), offset=0):
    return Tensor("x", shape, dtype, STORAGE, offset)


def good(**changes):
    args = {"out": tensor(BF16), "x": tensor(BF16), "sum": tensor(F32), "bias": None}
    return tuple((args | {"n": 8, "eps": 1e-6} | changes).values())


def test_declaration():
    out, x, total, bias, n, eps = KERNEL.declared
    assert (out.pointer, out.reads, out.writes, out.is_type_variable) == (True, False, True, True)
    assert (x.reads, x.writes) == (True, False)
    assert (total.reads, total.writes, total.type) == (True, True, "f32")
    assert (bias.optional, bias.type) == (True, "G")
    assert not n.pointer and not eps.is_type_variable
    assert KERNEL.op == "declared"
    assert TYPE_VARIABLES["declared.cu"] == {"T", "G"}


def test_type_variables_are_bound_by_tensors():
    assert KERNEL.bind(good()) == {"T": BF16}
    assert KERNEL.bind(good(bias=tensor(F32))) == {"T": BF16, "G": F32}
    assert KERNEL.bind(good(eps=1)) == {"T": BF16}  # an int is a float


def test_traffic_counts_reads_and_writes():
    # BF16: out written, x read; F32: sum both; bias read.
    assert KERNEL.traffic(good()) == (16 + 16 + 2 * 32, 0, 0)
    assert KERNEL.traffic(good(bias=tensor(F32))) == (16 + 16 + 2 * 32 + 32, 0, 0)
    pinned = Tensor("x", (8,), F32, Storage("pinned"), 0)
    assert KERNEL.traffic(good(sum=pinned, bias=pinned)) == (16 + 16, 32 + 32, 32)


def test_packed_arguments_that_do_not_fit_their_type_are_an_error():
    arguments = Arguments(KERNEL)
    with pytest.raises(struct.error):
        arguments.set(good(n=1 << 64))


def test_maps_of_matrices():
    """Maps are packed in place of addresses of 8 bytes."""
    kernel = Kernel("maps.cu", "f", "box16 out T[*r] out, i32 n, box8 f32[*q]? x, f32[8] y")
    out, y = tensor(BF16, (4, 8)), tensor()
    assert kernel.bind((out, 3, None, y)) == {"T": BF16}
    assert kernel.traffic((out, 3, None, y)) == (64 + 32, 0, 0)
    for shape in ((8,), (4, 4), (4, 12)):
        with pytest.raises(ValueError, match="f: out must be a matrix with rows of a multiple of"):
            kernel.bind((tensor(BF16, shape), 3, None, y))
    asked = []

    def encode(matrix, rows):
        asked.append((matrix, rows))
        return bytes(range(MAP_BYTES))

    arguments = Arguments(kernel, encode)
    for x in (None, tensor(F32, (2, 4))):
        arguments.set((out, 3, x, y))
        places = (ctypes.c_void_p * 4).from_address(arguments.address)
        values = [ctypes.string_at(places[i], n) for i, n in enumerate((128, 4, 128, 8))]
        maps = bytes(range(MAP_BYTES)), bytes(MAP_BYTES) if x is None else bytes(range(MAP_BYTES))
        assert values == [maps[0], struct.pack("i", 3), maps[1], struct.pack("Q", y.ptr)]
    assert asked == [(out, 16), (out, 16), (x, 8)]


def test_expect():
    x = tensor(F32, (2, 4))
    expect("op", "x", x, F32, (2, 4))
    expect("op", "x", x, None, (2, 4))
    with pytest.raises(TypeError, match="op: x must be BF16, got F32"):
        expect("op", "x", x, BF16, (2, 4))
    with pytest.raises(ValueError, match=r"op: x must have shape \(4, 2\), got \(2, 4\)"):
        expect("op", "x", x, F32, (4, 2))
    with pytest.raises(TypeError, match="op: x must be a tensor, got None"):
        expect("op", "x", None, F32, (2, 4))


def test_ceil_div():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
