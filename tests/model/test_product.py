"""A product with its epilogue: one kernel of ours, or the library's and those that follow it."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I8, I32
from llmq.base.operand import (
    STORE,
    Activated,
    ActivatedGradient,
    Adapters,
    DropoutMask,
    Fp8,
    Int8,
    OutBuffers,
    ProductOutput,
    Rounded,
)
from llmq.base.tensor import Accumulator
from llmq.ops.product.product import grouped_gradient, grouped_product, product, weight_gradient
from llmq.ops.product.routes import ROUTES
from llmq.ops.quantize import quantize_int8
from tests.harness import host_device, step_scalars

M, N, K, R = 32, 64, 48, 16


class Bench:
    """Operands on a CPU device that is told which kernels of ours to take."""

    def __init__(self, monkeypatch, fused):
        monkeypatch.setenv("LLMQ_FUSED", fused)
        self.dev, self.rng = host_device(), np.random.default_rng(0)

    def empty(self, *shape, dtype=BF16):
        return self.dev.alloc("t", shape, dtype, "Activations")

    def tensor(self, *shape, dtype=BF16):
        values = self.rng.normal(size=shape).astype(np.float32)
        return self.put(values.astype(dtype.numpy), dtype)

    def put(self, values, dtype):
        tensor = self.empty(*values.shape, dtype=dtype)
        self.dev.upload(tensor, values)
        return tensor

    def codes(self, rows, features):
        scale = self.put(np.ones(1, np.float32), F32)
        q_t = self.tensor(features, rows, dtype=E4M3)
        return Fp8(source=None, codes=None, transposed=q_t, scale=scale)

    def adapters(self, *tail):
        return Adapters(self.tensor(M, R), self.tensor(*tail))


def adapters(bench):
    out = bench.empty(M, N)
    a, b, added = bench.tensor(M, K), bench.tensor(N, K), bench.adapters(N, R)
    product(bench.dev, out, a, b, trans_b=True, adapters=added, epilogue=STORE)
    return [out]


def glu(bench):
    up, act = bench.empty(M, 2 * N), bench.empty(M, N)
    a, b = bench.tensor(M, K), bench.tensor(2 * N, K)
    output = ProductOutput("up", up.shape, BF16, tensor=up)
    epilogue = Activated(name="geglu", to=OutBuffers("act", act))
    product(bench.dev, output, a, b, trans_b=True, epilogue=epilogue)
    return [up, act]


def glu_grad(bench):
    d_up, act, up = bench.empty(M, 2 * N), bench.empty(M, N), bench.tensor(M, 2 * N)
    a, b, d_act = bench.tensor(M, K), bench.tensor(K, N), bench.empty(M, N)
    output = ProductOutput("d_act", d_act.shape, BF16)
    buffers = OutBuffers("d_up", d_up), OutBuffers("act", act)
    epilogue = ActivatedGradient(name="swiglu", up=up, to=buffers[0], again=buffers[1])
    product(bench.dev, output, a, b, epilogue=epilogue)
    return [d_up, act]


def gradient(bench):
    stored, scalars = bench.tensor(N, K), bench.put(step_scalars(seed=1), I32)
    d_out, x = bench.codes(M, N), bench.codes(M, K)
    out = Accumulator(stored, True, scalars, 1)
    weight_gradient(bench.dev, out, d_out, x)
    return [stored]


def grouped(bench):
    x, w = bench.tensor(M, N), bench.tensor(3 * K, N).view(3, K, N)
    starts = bench.put(np.array([0, 5, 5, M], np.int32), I32)
    out, more = bench.empty(M, K), bench.empty(M, K, dtype=F32)
    grouped_product(bench.dev, out, x, w, starts, trans_b=True)
    x, w = bench.tensor(M, N, dtype=F32), bench.tensor(3 * K, N, dtype=F32).view(3, K, N)
    grouped_product(bench.dev, more, x, w, starts, trans_b=True)  # has no route
    return [out, more]


def grouped_grad(bench):
    stored, scalars = bench.tensor(3 * N, K), bench.put(step_scalars(seed=1), I32)
    starts = bench.put(np.array([0, 5, 5, M], np.int32), I32)
    d_w = Accumulator(stored.view(3, N, K), True, scalars, 1)
    grouped_gradient(bench.dev, d_w, bench.tensor(M, N), bench.tensor(M, K), starts)
    return [stored]


CALLS = (adapters, glu, glu_grad, gradient, grouped, grouped_grad)
PRODUCTS = {call.__name__: call for call in CALLS}


def test_every_route_is_compared():
    assert PRODUCTS.keys() == ROUTES.keys()


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_route_has_the_bits_of_two_kernels_where_the_table_says_so(kind, monkeypatch):
    launched, found = [], []
    for fused in (ROUTES[kind].kernel, "none"):
        bench = Bench(monkeypatch, fused)
        launch = bench.dev.launch

        def counted(kernel, *args, launch=launch, **kwargs):
            launched.append(kernel.entry)
            launch(kernel, *args, **kwargs)

        with bench.dev.instead(launch=counted):
            made = PRODUCTS[kind](bench)
        found.append([bench.dev.download(tensor) for tensor in made])
    assert launched.count(ROUTES[kind].kernel) == 1
    assert ROUTES[kind].exact == all(map(np.array_equal, *found))
    for ours, others in zip(*found, strict=True):
        assert np.isfinite(ours).all() and np.isfinite(others).all()


def frozen(bench, rows, features):
    """A frozen weight as signed bytes."""
    w = bench.tensor(rows, features)
    codes, scale = bench.empty(rows, features, dtype=I8), bench.empty(rows, dtype=F32)
    quantize_int8.rows(bench.dev, codes, scale, w)
    turned = bench.put(np.ascontiguousarray(codes.numpy().T), I8)
    ones = bench.put(np.ones(features, np.float32), F32)
    return Int8(codes=codes, transposed=turned, scale=scale, ones=ones)


def operands_of(bench, kind, left, right):
    """Operands of these shapes."""
    if kind == "int8":
        return Rounded(source=bench.tensor(*left)), frozen(bench, *right)
    dtype = F32 if kind == "f32" else BF16
    tensors = (bench.tensor(*shape, dtype=dtype) for shape in (left, right))
    if kind == "rounded":
        return tuple(Rounded(source=tensor) for tensor in tensors)
    if kind != "e4m3":
        return tuple(tensors)
    scale = bench.put(np.full(1, 0.5, np.float32), F32)
    made = []
    for tensor in tensors:
        codes = bench.put(tensor.numpy().astype(E4M3.numpy), E4M3)
        turned = bench.put(np.ascontiguousarray(codes.numpy().T), E4M3)
        made.append(Fp8(source=tensor, codes=codes, transposed=turned, scale=scale))
    return tuple(made)


@pytest.mark.parametrize("fused", ["all", "none"])
@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("kind", ["f32", "bf16", "e4m3", "rounded", "int8"])
def test_alpha_is_a_factor_of_the_product_alone(kind, trans_b, with_adapters, fused, monkeypatch):
    """A power of two is exact: what is added, adapters and an addend, is not multiplied."""
    bench, alpha = Bench(monkeypatch, fused), 0.25
    a, b = operands_of(bench, kind, (M, K), (N, K) if trans_b else (K, N))
    how = {"trans_b": trans_b, "fast": True}
    out, times = bench.empty(M, N, dtype=F32), bench.empty(M, N, dtype=F32)
    product(bench.dev, out, a, b, **how)
    more = bench.adapters(*((N, R) if trans_b else (R, N))) if with_adapters else None
    product(bench.dev, times, a, b, **how, adapters=more, alpha=alpha)
    want = alpha * bench.dev.download(out)
    if more is not None:
        h, tail = (bench.dev.download(t).astype(np.float32) for t in more[:2])
        want += h @ (tail.T if trans_b else tail)
    np.testing.assert_allclose(bench.dev.download(times), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fused", ["all", "none"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["f32", "bf16", "e4m3", "rounded"])
def test_alpha_is_a_factor_of_a_weights_gradient(kind, dtype, accumulate, fused, monkeypatch):
    """A sum that begins at 0 is the product itself, whose bits stay with a power of two."""
    if kind == "f32" and dtype == BF16:
        return  # no such product
    bench = Bench(monkeypatch, fused)
    a, b = operands_of(bench, kind, (M, N), (M, K))
    scalars, found = bench.put(step_scalars(seed=1), I32), []
    for alpha in (1.0, 0.25):
        out = bench.put(np.zeros((N, K), dtype.numpy), dtype)
        weight_gradient(bench.dev, Accumulator(out, accumulate, scalars, 1), a, b, alpha=alpha)
        found.append(bench.dev.download(out).astype(np.float32))
    assert np.abs(found[0]).max() > 1
    np.testing.assert_array_equal(found[1], found[0] / 4)


def test_a_product_of_signed_bytes_has_no_route(monkeypatch):
    """Nor one with a bias in front of an activation, nor with dropout behind the adapters."""
    bench, calls = Bench(monkeypatch, "all"), []
    a, b, bias = bench.tensor(M, K), bench.tensor(2 * N, K), bench.tensor(2 * N)
    up, act = bench.empty(M, 2 * N), bench.empty(M, N)
    launch = bench.dev.launch

    def counted(kernel, *args, **kwargs):
        calls.append(kernel.entry)
        launch(kernel, *args, **kwargs)

    output = ProductOutput("up", up.shape, BF16)
    call = partial(product, bench.dev, output, trans_b=True)
    signed = Rounded(source=a), Rounded(source=b)
    with bench.dev.instead(launch=counted):
        call(*signed, epilogue=Activated(name="swiglu", to=OutBuffers("act", act)))
        assert calls == ["quantize_int8_rows"] * 2 + ["matmul_int8", "swiglu_forward"]
        calls.clear()
        call(a, b, epilogue=Activated(name="swiglu", to=OutBuffers("act", act)), bias=bias)
        assert calls == ["matmul", "swiglu_forward"]
        calls.clear()
        mask = DropoutMask(0.5, 1, 2, bench.put(step_scalars(seed=1), I32))
        dropped = bench.adapters(R, N)._replace(dropout=mask)
        product(bench.dev, bench.empty(M, N), a, bench.tensor(K, N), adapters=dropped)
        assert calls == ["matmul", "matmul", "dropout"]
