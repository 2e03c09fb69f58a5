"""The matrix product on a device against NumPy in double precision."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.base.operand import ProductCodes
from llmq.ops.product.matmul import BLOCK_SCALES, matmul, matmul_fp8
from llmq.ref.product.matmul import CASES, FP8_CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared, dtype_of, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
FP8_SMALL = {name: case for name, case in FP8_CASES.items() if not name.startswith("qwen")}
FP8_PAIRS = pytest.mark.parametrize(
    "dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=lambda d: f"{d[0].name}_{d[1].name}"
)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize(
    "operand, out", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=["f32", "bf16", "bf16_to_f32"]
)
def test_product(dev, rng, case, operand, out):
    M, N, K, trans_a, trans_b = SMALL[case]
    a = rng.normal(size=(K, M) if trans_a else (M, K)).astype(operand.numpy)
    b = rng.normal(size=(N, K) if trans_b else (K, N)).astype(operand.numpy)
    bias = rng.normal(size=N).astype(out.numpy)
    start, addend = (rng.normal(size=(M, N)).astype(out.numpy) for _ in range(2))
    left, right = (x.astype(np.float64) for x in (a.T if trans_a else a, b.T if trans_b else b))
    # bias, addend, accumulate, alpha, beta
    cases = [(0, 0, 0, 1, 1), (1, 0, 0, 1, 1), (0, 1, 0, 1, 1), (1, 1, 0, 1, 1), (0, 0, 1, 1, 1)]
    cases += [(0, 1, 0, -0.75, 0.5)]
    for with_bias, with_addend, accumulate, alpha, beta in cases:

        def call(dev, out, a, b, bias, addend, rest=(accumulate, alpha, beta)):
            flags = {"trans_a": trans_a, "trans_b": trans_b, "accumulate": bool(rest[0])}
            flags |= {"alpha": rest[1], "beta": rest[2]}
            matmul(dev, out, a, b, bias=bias, addend=addend, **flags)

        arrays = {
            "out": start if accumulate else np.full_like(start, np.nan),
            "a": a,
            "b": b,
            "bias": bias if with_bias else None,
            "addend": addend if with_addend else None,
        }
        got = run(dev, call, arrays)["out"].astype(np.float64)
        product = alpha * (left @ right) + with_bias * bias.astype(np.float64)
        want = product + accumulate * start.astype(np.float64)
        want += with_addend * beta * addend.astype(np.float64)
        # F32 sums of K products of about 1 in any order, the partial sums below 4 sqrt(K) <=
        # 48; BF16 results are rounded once more.
        rtol = 2.0**-8 if out == BF16 else 0
        atol = 48 * K * 2.0**-24
        if out == BF16 and accumulate:  # the product may be rounded first
            atol += 2.0**-8 * np.abs(product).max()
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("trans_a, trans_b", [(False, True), (True, False)])
def test_a_batch_is_so_many_products(dev, rng, trans_a, trans_b):
    """The library's sums of one of them may have another order."""
    B, M, N, K = 3, 32, 48, 64
    given = {
        "out": np.full((B, M, N), np.nan),
        "a": rng.normal(size=(B, K, M) if trans_a else (B, M, K)),
        "b": rng.normal(size=(B, N, K) if trans_b else (B, K, N)),
        "addend": rng.normal(size=(B, M, N)),
    }
    given = {name: array.astype(BF16.numpy) for name, array in given.items()}
    how = {"trans_a": trans_a, "trans_b": trans_b, "alpha": -0.75, "beta": 0.5}
    got = run(dev, partial(matmul, **how), given)["out"].astype(np.float64)
    for i in range(B):
        a, b, addend = (given[name][i].astype(np.float64) for name in ("a", "b", "addend"))
        want = -0.75 * (a.T if trans_a else a) @ (b.T if trans_b else b) + 0.5 * addend
        np.testing.assert_allclose(got[i], want, rtol=2.0**-8, atol=48 * K * 2.0**-24)


def test_counts_and_checks():
    dev = PlanDevice(replace(HOST_SPEC, library_workspace=1024))

    def make(name, shape, dtype=BF16):
        return dev.alloc(name, shape, dtype, "Activations")

    out, a, b = make("out", (8, 16)), make("a", (8, 32)), make("b", (16, 32))
    matmul(dev, make("sum", (8, 16), F32), a, b, trans_b=True, accumulate=True)
    assert dev.flops["matmul"] == 2 * 8 * 16 * 32
    assert dev.bytes["matmul"] == 2 * 4 * 8 * 16 + 2 * (8 * 32 + 16 * 32)  # out twice, no workspace
    assert dev.sizes()["stack"] == 1024
    several = [make(t.name, (3, *t.shape)) for t in (out, a, b)]
    matmul(dev, *several, trans_b=True)
    assert dev.flops["matmul"] == 4 * 2 * 8 * 16 * 32
    gpu = PlanDevice(GPU_SPEC)
    odd = [gpu.alloc(name, (2, 3, 3), BF16, "Activations") for name in "xyz"]
    with pytest.raises(ValueError, match=r"out\[i\].size must be a multiple of 8 on a GPU, got 9"):
        matmul(gpu, *odd)
    with pytest.raises(TypeError, match="several products: a must be BF16 with 3 dimensions"):
        matmul(dev, several[0], a, b, trans_b=True)
    with pytest.raises(ValueError, match="several products have no bias and no sum"):
        matmul(dev, *several, trans_b=True, accumulate=True)
    with pytest.raises(TypeError, match="matmul: out must be F32 where a is F32"):
        matmul(dev, out, make("a", (8, 32), F32), make("b", (16, 32), F32), trans_b=True)
    dev.bytes["matmul"] = 0
    matmul(dev, out, a, b, trans_b=True, addend=make("addend", (8, 16)))
    assert dev.bytes["matmul"] == 2 * 2 * 8 * 16 + 2 * (8 * 32 + 16 * 32)
    with pytest.raises(ValueError, match="addend and accumulate exclude each other"):
        matmul(dev, out, a, b, trans_b=True, addend=out, accumulate=True)
    with pytest.raises(ValueError, match="bias and accumulate exclude each other"):
        total, bias = make("sum", (8, 16), F32), make("bias", (16,), F32)
        matmul(dev, total, a, b, trans_b=True, bias=bias, accumulate=True)


def scalar(value):
    return np.array([value], np.float32)


@pytest.fixture
def fp8_dev(dev):
    """Each device that has FP8 products."""
    if dev.kind == "cuda" and dev.spec.capability < 89:
        pytest.skip("FP8 products need an Ada, Hopper or later GPU")
    return dev


@pytest.mark.parametrize("case", FP8_SMALL)
@FP8_PAIRS
@pytest.mark.parametrize("out", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_fp8_product_of_integers(fp8_dev, rng, case, dtypes, out, fast):
    """Exact: no partial sum of these needs more than the 14 bits of fast accumulation."""
    M, N, K = FP8_SMALL[case]
    codes = [
        rng.integers(-4, 5, (rows, K)).astype(d.numpy)
        for rows, d in zip((M, N), dtypes, strict=True)
    ]
    bias, start = rng.integers(-9, 10, N) / 4, rng.integers(-99, 100, (M, N)) / 8
    total = codes[0].astype(np.float64) @ codes[1].astype(np.float64).T * 2.0**-4
    cases = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 0.5), (1, 1, 0, 1)]
    cases += [(0, 0, 1, 0.5)] * (out == F32)
    for with_bias, with_addend, accumulate, alpha in cases:

        def call(dev, accumulate=accumulate, alpha=alpha, **tensors):
            how = {"accumulate": accumulate, "alpha": alpha}
            matmul_fp8(dev, fast_accumulation=fast, **how, **tensors)

        arrays = {
            "out": start.astype(out.numpy) if accumulate else np.full((M, N), np.nan, out.numpy),
            "a": codes[0],
            "b": codes[1],
            "scale_a": scalar(2.0**-7),
            "scale_b": scalar(2.0**3),
            "bias": bias.astype(BF16.numpy) if with_bias else None,
            "addend": start.astype(out.numpy) if with_addend else None,
        }
        product = alpha * total + with_bias * bias
        added = (accumulate or with_addend) * start
        got, once = run(fp8_dev, call, arrays)["out"], (product + added).astype(out.numpy)
        np.testing.assert_array_equal(got, once)


@FP8_PAIRS
def test_fp8_codes(fp8_dev, dtypes):
    """Each code of a, and of b, times one."""
    codes = np.resize(np.arange(256, dtype=np.uint8), (16, 32))
    one = np.eye(32)

    def call(dev, left, right, *tensors):
        matmul_fp8(dev, left, tensors[0], tensors[3], tensors[4], tensors[4])
        matmul_fp8(dev, right, tensors[1], tensors[2], tensors[4], tensors[4])

    finite = [
        np.where(np.isfinite(x.astype(np.float32)), x, x.dtype.type(0))
        for x in (codes.view(d.numpy) for d in dtypes)
    ]
    arrays = {
        "left": np.full((16, 32), np.nan, np.float32),
        "right": np.full((32, 16), np.nan, np.float32),
        "a": finite[0],
        "a_one": one.astype(dtypes[0].numpy),
        "b": finite[1],
        "b_one": one.astype(dtypes[1].numpy),
        "scale": scalar(1),
    }
    got = run(fp8_dev, lambda dev, **tensors: call(dev, *tensors.values()), arrays)
    np.testing.assert_array_equal(got["left"], finite[0].astype(np.float32))
    np.testing.assert_array_equal(got["right"], finite[1].astype(np.float32).T)


@FP8_PAIRS
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_fp8_product_of_random_codes(fp8_dev, rng, dtypes, fast):
    M, N, K = 64, 48, 128
    a, b = (
        (rng.normal(size=(rows, K)) * 60).astype(d.numpy)
        for rows, d in zip((M, N), dtypes, strict=True)
    )
    scale_a, scale_b = scalar(0.0123), scalar(7.7e-4)
    arrays = {"out": np.full((M, N), np.nan, np.float32), "a": a, "b": b}
    arrays |= {"scale_a": scale_a, "scale_b": scale_b}

    def call(dev, **tensors):
        matmul_fp8(dev, fast_accumulation=fast, **tensors)

    got = run(fp8_dev, call, arrays)["out"].astype(np.float64)
    want = np.float64(scale_a[0]) * scale_b[0] * (a.astype(np.float64) @ b.astype(np.float64).T)
    # Ada and Hopper truncate each product and each sum to 2^-13 of the largest that they add, fast
    # or not where K is this small: at most K times, if all errors have one sign, and the results
    # are about as large as the largest product. In F32 it is 2^-24.
    bound = K * (2.0**-13 if fp8_dev.kind == "cuda" else 2.0**-24)
    assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


CODES = {E4M3: (448.0, 0x7E), E5M2: (57344.0, 0x7B)}


@pytest.mark.parametrize(
    "dtypes, out",
    [((E4M3, E4M3), E4M3), ((E5M2, E4M3), E5M2), ((E5M2, E4M3), E4M3)],
    ids=["e4m3", "e5m2", "e5m2_to_e4m3"],
)
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_fp8_results_are_codes(fp8_dev, rng, dtypes, out, fast):
    """Sums of integers, exact in any order: rounded once, clamped; the largest is of this call
    alone, whatever was there."""
    M, N, K = 64, 48, 128
    a, b = (
        rng.integers(-4, 5, (rows, K)).astype(d.numpy)
        for rows, d in zip((M, N), dtypes, strict=True)
    )
    total = a.astype(np.float32) @ b.astype(np.float32).T * np.float32(0.25)
    limit, _ = CODES[out]
    peak = np.abs(total).max()

    def call(dev, codes, a, b, scale_a, scale_b, scale, factor, largest):
        to = ProductCodes(codes, scale, factor, largest)
        matmul_fp8(dev, to, a, b, scale_a, scale_b, fast_accumulation=fast)

    for share in (0.75, 1.75):  # of what fits; the second time large values are clamped
        factor = np.float32(share * limit / peak)
        arrays = {"codes": np.full((M, N), 0x55, np.uint8).view(out.numpy), "a": a, "b": b}
        arrays |= {"scale_a": scalar(0.5), "scale_b": scalar(0.5), "scale": scalar(1 / factor)}
        arrays |= {"factor": scalar(factor), "largest": scalar(1e9)}
        got = run(fp8_dev, call, arrays)
        want = (total * factor).clip(-limit, limit).astype(out.numpy)
        np.testing.assert_array_equal(got["codes"].view(np.uint8), want.view(np.uint8))
        assert got["largest"] == peak
        assert (np.abs(want.astype(np.float32)) == limit).any() == (share > 1)


def test_what_is_not_finite_reaches_the_largest_of_a_product(fp8_dev):
    a, b = np.ones((16, 32), E4M3.numpy), np.ones((16, 32), E4M3.numpy)

    def call(dev, codes, a, b, scale_a, scale_b, factor, largest):
        matmul_fp8(dev, ProductCodes(codes, factor, factor, largest), a, b, scale_a, scale_b)

    for value in (np.inf, 2e38, np.nan):  # 2e38: sums of 32 of them are infinite
        arrays = {"codes": np.zeros((16, 16), E4M3.numpy), "a": a, "b": b, "scale_a": scalar(value)}
        arrays |= {"scale_b": scalar(1), "factor": scalar(1), "largest": scalar(0)}
        got = run(fp8_dev, call, arrays)
        codes = got["codes"].astype(np.float32)
        # A code shows a NaN itself; an infinity, which is clamped, only the largest value does:
        # cuBLASLt's is then an infinity or NaN, by its algorithm.
        assert not np.isfinite(got["largest"][0])
        assert np.isnan(codes).all() if np.isnan(value) else (codes == 448).all()


def test_fp8_scales_in_a_graph(fp8_dev, rng):
    """Two products of one plan keep their own scales, whose values are read at each replay."""
    dev = fp8_dev
    make = {
        "a": rng.integers(-4, 5, (16, 32)).astype(E4M3.numpy),
        "b": rng.integers(-4, 5, (16, 32)).astype(E4M3.numpy),
        **{name: scalar(value) for name, value in (("one", 1), ("half", 0.5), ("four", 4))},
        **dict.fromkeys(("first", "second"), np.zeros((16, 16), np.float32)),
    }
    t = {name: dev.alloc(name, x.shape, dtype_of(x), "Activations") for name, x in make.items()}
    for name, array in make.items():
        dev.upload(t[name], array)

    def products():
        matmul_fp8(dev, t["first"], t["a"], t["b"], t["one"], t["half"])
        matmul_fp8(dev, t["second"], t["a"], t["b"], t["four"], t["one"])

    total = make["a"].astype(np.float32) @ make["b"].astype(np.float32).T
    for four in (4, 4, 8):  # runs, captures, replays
        dev.zero(t["first"])
        dev.zero(t["second"])
        dev.upload(t["four"], scalar(four))
        dev.graph(("fp8",), products)
        dev.synchronize()
        np.testing.assert_array_equal(dev.download(t["first"]), total / 2)
        np.testing.assert_array_equal(dev.download(t["second"]), total * four)


@pytest.mark.parametrize("count, beta", [(512, 0.0), (512 * 9, 1.0)])
def test_block_scales(dev, count, beta):
    arrays = {
        "scales": np.zeros(count, np.uint8),
        "scalars": np.full(8, 3, np.float32),
        **{"scale_a": scalar(0.37), "scale_b": scalar(1.9)},
        "next": np.full(64, 5, np.float32),  # tensors follow each other in memory
    }

    def call(dev, scales, scalars, scale_a, scale_b, next):
        dev.launch(BLOCK_SCALES, 2, 256, (scales, scalars, scale_a, scale_b, 0.22, beta, count))

    want = compared(dev, call, arrays)
    assert (want["scales"] == 127).all() and want["scalars"][4] == beta
    np.testing.assert_allclose(want["scalars"][0], 0.37 * 1.9 * 0.22, rtol=1e-6)
    np.testing.assert_array_equal(want["next"], 5)


def test_counts_and_checks_of_8_bits():
    dev = PlanDevice(replace(GPU_SPEC, library_workspace=1024))

    def make(name, shape, dtype=E4M3):
        return dev.alloc(name, shape, dtype, "Activations")

    out, a, b = make("out", (16, 48), BF16), make("a", (16, 32)), make("b", (48, 32))
    scale, bias = make("scale", (1,), F32), make("bias", (48,), BF16)
    total = make("sum", (16, 48), F32)
    matmul_fp8(dev, total, a, b, scale, scale, accumulate=True, fast_accumulation=True)
    assert dev.flops["matmul_fp8"] == 2 * 16 * 48 * 32
    assert dev.bytes["matmul_fp8"] == 2 * 4 * 16 * 48 + 16 * 32 + 48 * 32 + 2 * 4
    assert dev.sizes()["stack"] == 1024

    def check(error, match, *args, **kwargs):
        with pytest.raises(error, match=f"^matmul_fp8: {match}"):
            matmul_fp8(dev, *args, **kwargs)

    check(TypeError, "out must be F32 or BF16, got F8_E4M3", a, a, b, scale, scale)
    formats = "F8_E4M3 or F8_E4M3_HALF or F8_E5M2"
    check(TypeError, f"b must be {formats}, got BF16", out, a, out, scale, scale)
    five = (make("a", (16, 32), E5M2), make("b", (48, 32), E5M2))
    check(TypeError, "a or b must be F8_E4M3, both are F8_E5M2", out, *five, scale, scale)
    odd = (make("out", (16, 40), BF16), make("a", (16, 32)), make("b", (40, 32)))
    check(ValueError, "N must be a multiple of 16, got 40", *odd, scale, scale)
    two = make("scales", (2,), F32)
    check(ValueError, "scale_a is not 16-byte aligned", out, a, b, two.rows(1, 2), scale)
    two_codes = make("out", (16, 48)), make("out", (16, 48), E5M2)
    to, wrong = (ProductCodes(codes, scale, scale, scale) for codes in two_codes)
    for more in ({"accumulate": True}, {"addend": two_codes[0]}):
        check(TypeError, "out must be no codes where", to, a, b, scale, scale, **more)
    check(TypeError, "out must be F8_E4M3, got F8_E5M2", wrong, a, b, scale, scale)
    check(TypeError, "out must be F8_E4M3 or F8_E5M2, got BF16",
          to._replace(codes=out), five[0], b, scale, scale)  # fmt: skip
    both = {"bias": bias, "accumulate": True}
    check(ValueError, "bias and accumulate exclude", total, a, b, scale, scale, **both)
    check(TypeError, "out must be F32, got BF16", out, a, b, scale, scale, accumulate=True)
