"""References of products with what follows them, against torch in F64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.ref.pointwise.swiglu import swiglu_forward, swiglu_forward_fp8
from llmq.ref.product.matmul_fused import (
    CASES,
    matmul_adapted,
    matmul_gradient,
    matmul_grouped,
    matmul_grouped_gradient,
    matmul_swiglu,
    matmul_swiglu_backward,
)
from tests.fp8_out import outputs
from tests.harness import step_scalars


def small(entry):
    return {name: case for name, case in CASES[entry].items() if not name.startswith("qwen")}


def wide(array):
    return torch.from_numpy(array.astype(np.float64))


def normal(rng, dtype, *shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(dtype.numpy)


def filled(*shape):
    return np.full(shape, np.nan, BF16.numpy)


def operands_of(rng, M, N, K, R, a, b=None, *, transposed=False, scales=(0.3, 0.7), alpha=1.0):
    """Operands in the order of all references, and x of them."""
    fp8 = a != BF16
    left, right = normal(rng, a, M, K), normal(rng, b or a, N, K)
    h, tail = (normal(rng, BF16, M, R), normal(rng, BF16, N, R)) if R else (None, None)
    x = wide(left) @ wide(right).T * float(np.float32(alpha))
    if fp8:
        x *= float(np.float32(scales[0])) * float(np.float32(scales[1]))
    if R:
        x += wide(h) @ wide(tail).T
    if transposed:
        right, tail = right if fp8 else right.T, tail.T if R else None
    scales = [np.array([s], np.float32) for s in scales] if fp8 else [None, None]
    return [left, right, h, tail, *scales, M, N, K, alpha], x


def active(gelu, gate):
    """torch's GELU cancels 1 against a tanh near -1."""
    functional = torch.nn.functional
    return functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", small("matmul_adapted").values(), ids=small("matmul_adapted"))
@pytest.mark.parametrize("alpha", [1.0, 0.22])
def test_adapted(rng, case, fp8, alpha):
    """Rounded once: half a unit of BF16's last place, beside what F32 sums lose."""
    M, N, K, R, transposed = case
    kind = {"transposed": transposed, "alpha": alpha}
    operands, x = operands_of(rng, M, N, K, R, E4M3 if fp8 else BF16, **kind)
    bias, addend, out = normal(rng, BF16, N), normal(rng, BF16, M, N), filled(M, N)
    ways = {"b_k_outside": transposed and not fp8, "tail_k_outside": transposed}
    matmul_adapted(*operands, out, bias, addend, **ways)
    want = x + wide(bias) + wide(addend)
    np.testing.assert_allclose(out.astype(np.float64), want.numpy(), rtol=2**-8, atol=1e-4)


def test_adapted_without_adapters(rng):
    a, b = (rng.integers(-3, 4, (16, 32)).astype(BF16.numpy) for _ in range(2))
    out = np.empty((16, 16), np.float32)
    matmul_adapted(a, b, *[None] * 4, 16, 16, 32, 1.0, out)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32).T)


def test_gradient(rng):
    """The product's rounding leaves half a unit of BF16's last place, the sum's a whole."""
    M, N, K = CASES["matmul_gradient"]["tiles"]
    operands, product = operands_of(rng, M, N, K, 0, E4M3, alpha=0.22)
    before = normal(rng, BF16, M, N, scale=30)
    rounded = product.abs() * 2**-8 + 1e-4  # 1e-4: what F32 sums lose
    d = before.copy()
    matmul_gradient(*operands, d, step_scalars(), 0, 1, part_steps=0)
    assert ((wide(d) - product).abs() <= rounded).all()
    found = []
    for micro_step in range(16):
        d, scalars = before.copy(), step_scalars(seed=1, micro_step=micro_step)
        matmul_gradient(*operands, d, scalars, 1, 1, part_steps=0)
        found.append(wide(d))
    want = wide(before) + product
    error = torch.stack(found) - want
    assert (error.abs() <= rounded + want.abs() * 2**-7 + 1e-4).all()
    # Rounded up as often as it is far from the lower neighbour: no mean error of many.
    assert error.mean().abs() < want.abs().mean() * 2**-7 / 100


def up_operands(rng, M, F, K, R, dtype):
    operands, x = operands_of(rng, M, 2 * F, K, R, dtype, scales=(0.1, 0.7))
    operands[7] = F
    return operands, x


@pytest.mark.parametrize("gelu", [0, 1], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("case", small("matmul_swiglu").values(), ids=small("matmul_swiglu"))
def test_swiglu(rng, case, dtype, gelu):
    """up_gate is rounded once, and so is out, of what up_gate holds: half a unit of BF16's last
    place each, beside what F32 sums lose."""
    M, F, *_ = case
    operands, want = up_operands(rng, *case, dtype)
    up_gate, out = filled(M, 2 * F), filled(M, F)
    matmul_swiglu(*operands, up_gate, out, gelu=gelu)
    np.testing.assert_allclose(wide(up_gate), want, rtol=2**-8, atol=1e-4)
    up, gate = wide(up_gate).chunk(2, dim=1)
    np.testing.assert_allclose(wide(out), up * active(gelu, gate), rtol=2**-8, atol=1e-12)


@pytest.mark.parametrize("layout", [None, "codes", "both"])
def test_what_is_behind_the_product_is_swiglu(rng, layout):
    """All results, and each subset of these that a caller may want."""
    M, F, *_ = case = CASES["matmul_swiglu"]["tiles"]
    operands, _ = up_operands(rng, *case, E4M3)
    up_gate = filled(M, 2 * F)
    matmul_swiglu(*operands, up_gate, filled(M, F))
    wanted, found = (
        {"out": filled(M, F), "abs_max": np.zeros(1, F32.numpy)}
        | (outputs((M, F), E4M3, layout, np.float32(0.01)) if layout else {})
        for _ in range(2)
    )
    results = list(wanted.values())[1:]
    if layout:
        swiglu_forward_fp8(wanted["out"], up_gate, M, F, *results, *[None] * 4)  # not from codes
    else:
        swiglu_forward(wanted["out"], up_gate, M, F, *results)
    if layout:
        found["out"] = None
    matmul_swiglu(*operands, None, found.pop("out"), **found)
    for name, array in found.items():
        if array is not None:
            np.testing.assert_array_equal(array.view(np.uint8), wanted[name].view(np.uint8), name)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("gelu", [0, 1])
def test_swiglu_backward(rng, gelu, fp8):
    """d_out is rounded to BF16, and what is computed of that is, too."""
    M, F, *_ = case = CASES["matmul_swiglu_backward"]["tiles"]
    formats = (E5M2, E4M3) if fp8 else (BF16, BF16)
    kind = {"transposed": True, "scales": (0.25, 0.5), "alpha": 0.22}
    operands, d_out = operands_of(rng, *case, *formats, **kind)
    up_gate = normal(rng, BF16, M, 2 * F, scale=4)
    exact = wide(up_gate).requires_grad_()
    up, gate = exact.split(F, dim=1)
    out64 = active(gelu, gate) * up
    (want,) = torch.autograd.grad(out64, exact, d_out)
    d_up_gate, out, abs_max = filled(M, 2 * F), filled(M, F), np.zeros(1, np.float32)
    ways = {"b_k_outside": not fp8, "tail_k_outside": 1, "gelu": gelu}
    no_codes = [None] * 4
    matmul_swiglu_backward(
        *operands, d_up_gate, up_gate, abs_max, *no_codes, out, *no_codes[1:], **ways
    )
    # Half a unit of BF16's last place, twice where d_out was rounded first; beside what F32 loses.
    np.testing.assert_allclose(out.astype(np.float64), out64.detach(), rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(d_up_gate.astype(np.float64), want, rtol=2**-7, atol=2e-3)
    assert abs_max[0] == np.abs(d_up_gate.astype(np.float32)).max()


@pytest.mark.parametrize("case", small("matmul_grouped").values(), ids=small("matmul_grouped"))
def test_grouped(rng, case):
    """Each expert's rows are those of a product of their own."""
    M, N, K, E, transposed = case
    starts = np.sort(np.concatenate([[0, M], rng.integers(0, M + 1, E - 1)])).astype(np.int32)
    a, b, bias = normal(rng, BF16, M, K), normal(rng, BF16, E, N, K), normal(rng, BF16, E, N)
    laid = np.ascontiguousarray(b.swapaxes(1, 2)) if transposed else b
    out = filled(M, N)
    flat = laid.reshape(-1, laid.shape[2])
    operands = (a, flat, *[None] * 4, M, N, K, 1.0, out, bias, starts, E)
    matmul_grouped(*operands, b_k_outside=transposed)
    of_row = torch.from_numpy(np.repeat(np.arange(E), np.diff(starts)))
    want = torch.bmm(wide(b)[of_row], wide(a)[:, :, None])[:, :, 0] + wide(bias)[of_row]
    np.testing.assert_allclose(out.astype(np.float64), want.numpy(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_gradient(rng, accumulate):
    """Gradients are added in F32, so that only the product is rounded."""
    R, M, N, E = CASES["matmul_grouped_gradient"]["small"]
    E, starts = 3, np.array([0, 5, 5, R], np.int32)
    a, b, before = normal(rng, BF16, R, M), normal(rng, BF16, R, N), normal(rng, BF16, E, M, N)
    got = before.astype(np.float32)
    operands = (
        a,
        b,
        *[None] * 4,
        M,
        N,
        R,
        1.0,
        got,
        step_scalars(seed=1),
        accumulate,
        3,
        starts,
        E,
    )
    matmul_grouped_gradient(*operands)
    parts = [wide(a)[x:y].T @ wide(b)[x:y] for x, y in pairwise(starts)]
    want = torch.stack(parts) + accumulate * wide(before)
    # Products are rounded to BF16 before they are added.
    np.testing.assert_allclose(got, want.numpy(), rtol=2**-8, atol=2**-8 * 4)
    np.testing.assert_array_equal(got[1], accumulate * before[1].astype(np.float32))
