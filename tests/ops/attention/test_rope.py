"""rope's kernels against their references: bit for bit, with any numbers."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops.attention import rope
from llmq.ops.pointwise import reduce
from llmq.ref.attention.rope import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import bits, check_abs_max
from tests.exact import coarse, run_exact
from tests.fp8_out import LARGEST, check_codes, outputs, with_fp8
from tests.harness import GPU_SPEC, host_device, run, step_scalars

SMALL = [name for name in CASES if not name.startswith(("qwen", "tiles"))]
BOTH = ["head_80", "head_128"]
SHAPES = pytest.mark.parametrize(
    "shape, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


def inputs(rng, shape, dtype, positions) -> dict:
    B, T, Hq, Hkv, Hd = shape
    qkv = rng.normal(size=(B, T, Hq + 2 * Hkv, Hd)).astype(np.float32)
    return {"qkv": qkv.astype(dtype.numpy), "table": rope.make_table(positions, Hd, 1e4, None)}


@SHAPES
@pytest.mark.parametrize("first_position", [0, 3])
def test_forward(dev, rng, shape, dtype, first_position):
    """A text may have begun in front of the tokens."""
    arrays = inputs(rng, shape, dtype, shape[1] + 4)
    starts = first_position and np.full(shape[:2], -first_position, np.int32)
    arrays["starts"] = None if first_position == 0 else starts

    def call(dev, qkv, table, starts):
        rope.forward(dev, qkv, table, shape[2], shape[3], starts)

    got = run_exact(dev, call, arrays)
    heads = shape[2] + shape[3]
    np.testing.assert_array_equal(got["qkv"][:, :, heads:], arrays["qkv"][:, :, heads:])
    # Position 0 is not rotated, every other one is.
    same = (got["qkv"][:, :, :heads] == arrays["qkv"][:, :, :heads]).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(same, np.arange(shape[1]) + first_position == 0)


@SHAPES
def test_backward(dev, rng, shape, dtype):
    def call(dev, qkv, table):
        rope.backward(dev, qkv, table, shape[2], shape[3])

    run_exact(dev, call, inputs(rng, shape, dtype, shape[1]))


@pytest.mark.parametrize(
    "name, dtype", [("head_64", BF16), ("head_80", F32), ("head_128", BF16)], ids=str
)
def test_abs_max_includes_the_value_heads(dev, rng, name, dtype):
    shape = CASES[name]
    heads = shape[2] + shape[3]

    def call(dev, d_qkv, table, abs_max):
        rope.backward(dev, d_qkv, table, shape[2], shape[3], abs_max=abs_max)

    arrays = inputs(rng, shape, dtype, shape[1])
    arrays["d_qkv"] = arrays.pop("qkv")
    for large in (slice(heads), slice(heads, None)):
        arrays["d_qkv"][:, :, large] *= 8
        check_abs_max(dev, call, arrays, stored="d_qkv", spoiled="d_qkv")

    # Every element is looked at.
    for index in rng.integers(0, arrays["d_qkv"].size, size=8):
        alone = np.zeros_like(arrays["d_qkv"])
        alone.reshape(-1)[index] = 3
        operands = {"d_qkv": alone, "table": arrays["table"], "abs_max": np.zeros(1, np.float32)}
        got = run(dev, call, operands)
        assert got["abs_max"] == np.abs(got["d_qkv"].astype(np.float32)).max() > 2


def fused_call(shape, accumulate=False):
    """The backward pass and the bias gradient in one call."""

    def call(dev, d_qkv, table, d_bias, scalars, abs_max=None, fp8=None):
        acc = Accumulator(d_bias, accumulate, scalars, salt=4)
        rope.backward(dev, d_qkv, table, *shape[2:4], abs_max=abs_max, d_bias=acc, fp8=fp8)

    return call


def two_calls(shape, accumulate=False):
    """The same in two calls."""

    def call(dev, d_qkv, table, d_bias, scalars, abs_max):
        rope.backward(dev, d_qkv, table, *shape[2:4], abs_max=abs_max)
        packed = d_qkv.view(shape[0] * shape[1], d_bias.size)
        reduce.bias_gradient(dev, Accumulator(d_bias, accumulate, scalars, salt=4), packed)

    return call


def fused_arrays(rng, shape, dtype, target) -> dict:
    arrays = inputs(rng, shape, dtype, shape[1])
    arrays["d_qkv"] = arrays.pop("qkv")
    start = rng.normal(size=(shape[2] + 2 * shape[3]) * shape[4])
    arrays["d_bias"] = start.astype(target.numpy)
    arrays["scalars"] = step_scalars(seed=1, step=2, micro_step=3)
    arrays["abs_max"] = np.zeros(1, np.float32)
    return arrays


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "name, dtype, target",
    [
        ("tiles_16", BF16, BF16),
        ("tiles_64", BF16, BF16),
        ("tiles_80", F32, F32),
        ("tiles_128", BF16, F32),
        ("tiles_256", BF16, BF16),
        ("tiles_256", F32, F32),
    ],
    ids=str,
)
def test_bias_gradient_equals_two_calls(dev, rng, name, dtype, target, accumulate):
    shape = CASES[name]
    arrays = fused_arrays(rng, shape, dtype, target)
    # Multiples of 1/8 up to 4: F32 sums of them are exact in any order.
    arrays["d_qkv"] = coarse(rng, arrays["d_qkv"].shape, dtype)
    arrays["table"] = rng.integers(-2, 3, arrays["table"].shape).astype(np.float32) / 2
    got = run_exact(dev, fused_call(shape, accumulate), arrays)
    want = run(dev, two_calls(shape, accumulate), arrays)
    for result in ("d_qkv", "d_bias", "abs_max"):
        np.testing.assert_array_equal(got[result], want[result], err_msg=result)


@pytest.mark.parametrize("name", ["tiles_64", "tiles_128"])
def test_bias_gradient_of_any_numbers(dev, rng, name):
    shape = CASES[name]
    arrays = fused_arrays(rng, shape, BF16, F32)
    plain, got = run(dev, two_calls(shape), arrays), run(dev, fused_call(shape), arrays)
    np.testing.assert_array_equal(got["d_qkv"], plain["d_qkv"])
    want = plain["d_qkv"].reshape(-1, got["d_bias"].size).astype(np.float64).sum(axis=0)
    # 240 terms of size 1, at most 4 + 2 + 8 + 2 of them in sequence.
    np.testing.assert_allclose(got["d_bias"], want, rtol=0, atol=1e-5)
    # In a fixed order, with codes or without.
    fp8 = outputs((shape[0] * shape[1], want.size), E4M3, "both", np.float32(1))
    again = run(dev, with_fp8(fused_call(shape)), arrays | fp8)
    assert bits(again["d_bias"]) == bits(got["d_bias"])


@pytest.mark.parametrize(
    "name, dtype, format, layout",
    [
        ("tiles_16", BF16, E4M3, "both"),
        ("rows_of_no_16", BF16, E4M3, "both"),
        ("rows_of_no_16", F32, E5M2, "transposed"),
        ("tiles_64", BF16, E5M2, "both"),
        ("tiles_64", BF16, E4M3, "transposed"),
        ("tiles_80", BF16, E4M3, "both"),
        ("tiles_80", F32, E4M3, "codes"),
        ("tiles_128", BF16, E4M3, "both"),
        ("tiles_256", BF16, E4M3, "both"),
    ],
    ids=str,
)
def test_fp8_equals_two_steps(dev, rng, name, dtype, format, layout):
    shape = CASES[name]
    arrays = inputs(rng, shape, dtype, shape[1]) | {"abs_max": np.zeros(1, np.float32)}
    arrays["d_qkv"] = arrays.pop("qkv")

    def call(dev, d_qkv, table, abs_max, fp8=None):
        rope.backward(dev, d_qkv, table, *shape[2:4], abs_max=abs_max, fp8=fp8)

    for value in (None, np.inf, np.nan):
        if value is not None:
            arrays["d_qkv"][-1, -1, 0, -1] = arrays["d_qkv"][-1, -1, -1, -1] = value
        for device in (dev, host_device()):
            with np.errstate(invalid="ignore"):  # inf - inf, in the reference
                plain = run(device, call, arrays)
                rotated = plain["d_qkv"].reshape(shape[0] * shape[1], -1)
                # A number in 20 is larger than 2.
                fp8 = outputs(rotated.shape, format, layout, 2 / LARGEST[format])
                got = run(device, with_fp8(call), arrays | fp8)
            assert check_codes(got, rotated, format, layout) > rotated.size / 50
            assert bits(got["abs_max"]) == bits(plain["abs_max"])
            assert bits(got["d_qkv"]) == bits(arrays["d_qkv"])  # not written


@pytest.mark.parametrize(
    "name, channels, dtype",
    [
        ("tiles_128", 96, BF16),
        ("tiles_80", 48, F32),
        ("tiles_128", 8, BF16),
        ("tiles_80", 10, F32),
        ("head_6", 4, BF16),
    ],
    ids=str,
)
def test_a_part_of_the_channels(dev, rng, name, channels, dtype):
    """Only the first channels of a head are rotated, in all kernels alike."""
    shape = CASES[name]
    arrays = inputs(rng, shape, dtype, shape[1])
    Hd = shape[4]
    arrays["table"] = rope.make_table(shape[1], Hd, 1e4, None, 1.5, channels)

    def forward(dev, qkv, table):
        rope.forward(dev, qkv, table, *shape[2:4], channels=channels)

    got = run_exact(dev, forward, arrays)["qkv"]
    np.testing.assert_array_equal(got[..., channels:], arrays["qkv"][..., channels:])
    alone = {"qkv": np.ascontiguousarray(arrays["qkv"][..., :channels])}
    alone["table"] = rope.make_table(shape[1], channels, 1e4, None, 1.5)

    def whole(dev, qkv, table):
        rope.forward(dev, qkv, table, *shape[2:4])

    np.testing.assert_array_equal(got[..., :channels], run(host_device(), whole, alone)["qkv"])
    arrays["d_qkv"] = arrays.pop("qkv")
    arrays["d_bias"] = np.zeros(arrays["d_qkv"].shape[2] * Hd, np.float32)
    arrays["scalars"], arrays["abs_max"] = step_scalars(seed=1), np.zeros(1, np.float32)

    def fused(dev, d_qkv, table, d_bias, scalars, abs_max, fp8=None):
        acc = Accumulator(d_bias, False, scalars, salt=4)
        options = {"channels": channels, "abs_max": abs_max, "d_bias": acc, "fp8": fp8}
        rope.backward(dev, d_qkv, table, *shape[2:4], **options)

    def plain(dev, d_qkv, table, abs_max, **_):
        rope.backward(dev, d_qkv, table, *shape[2:4], channels=channels, abs_max=abs_max)

    want = run_exact(dev, plain, arrays)
    if not rope.fuses(Hd, channels):
        with pytest.raises(ValueError, match="need Hd and channels in multiples of 16"):
            run(dev, fused, arrays)
        return
    got = run(dev, fused, arrays)
    for result in ("d_qkv", "abs_max"):
        np.testing.assert_array_equal(got[result], want[result])
    sums = want["d_qkv"].reshape(-1, got["d_bias"].size).astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(got["d_bias"], sums, rtol=0, atol=2e-5)  # F32 sums
    rotated = want["d_qkv"].reshape(shape[0] * shape[1], -1)
    fp8 = outputs(rotated.shape, E4M3, "both", 2 / LARGEST[E4M3])
    check_codes(run(dev, with_fp8(fused), arrays | fp8), rotated, E4M3, "both")


STARTS = np.repeat([0, 1, 20, 60], [1, 19, 40, 20]).astype(np.int32)  # of documents in a row


def test_documents_have_positions_of_their_own(dev, rng):
    """Each document counts its positions as if it were a sequence."""
    Hq, Hkv = shape = 3, 1
    arrays = inputs(rng, (2, 80, *shape, 64), BF16, 80)
    arrays["starts"] = np.stack([STARTS, np.zeros_like(STARTS)])

    def forward(dev, qkv, table, starts=None):
        rope.forward(dev, qkv, table, Hq, Hkv, starts=starts)

    def backward(dev, qkv, table, starts=None):
        rope.backward(dev, qkv, table, Hq, Hkv, starts)

    for call in (forward, backward):
        got = run_exact(dev, call, arrays)["qkv"]
        alone = {name: arrays[name] for name in ("qkv", "table")}
        np.testing.assert_array_equal(got[1:], run(dev, call, alone)["qkv"][1:])
        for start in np.unique(STARTS):
            document = start == STARTS
            alone["qkv"] = arrays["qkv"][:1, document]
            np.testing.assert_array_equal(got[:1, document], run(dev, call, alone)["qkv"])


@pytest.mark.parametrize("name, dtype", [("tiles_64", BF16), ("tiles_80", F32)], ids=str)
def test_fused_documents_equal_two_steps(dev, rng, name, dtype):
    shape = CASES[name]
    arrays = fused_arrays(rng, shape, dtype, F32)
    starts = np.repeat(np.arange(0, shape[1], 16), 16)[: shape[1]].astype(np.int32)
    arrays["starts"] = np.stack([starts] * shape[0])
    arrays["starts"][0] = 0

    def fused(dev, d_qkv, table, starts, d_bias, scalars, abs_max, fp8=None):
        acc = Accumulator(d_bias, False, scalars, salt=4)
        options = {"abs_max": abs_max, "d_bias": acc, "fp8": fp8}
        rope.backward(dev, d_qkv, table, *shape[2:4], starts, **options)

    def plain(dev, d_qkv, table, starts, abs_max, **_):
        rope.backward(dev, d_qkv, table, *shape[2:4], starts, abs_max=abs_max)

    want, got = run(dev, plain, arrays), run(dev, fused, arrays)
    for result in ("d_qkv", "abs_max"):
        np.testing.assert_array_equal(got[result], want[result])
    rotated = want["d_qkv"].reshape(shape[0] * shape[1], -1)
    fp8 = outputs(rotated.shape, E4M3, "both", 2 / LARGEST[E4M3])
    coded = run(dev, with_fp8(fused), arrays | fp8)
    check_codes(coded, rotated, E4M3, "both")
    assert bits(coded["d_bias"]) == bits(got["d_bias"])


@pytest.mark.parametrize("name, dtype", [("tiles_64", BF16), ("head_6", F32)], ids=str)
def test_queries_have_factors_by_position(dev, rng, name, dtype):
    """Queries alone are multiplied by a factor of their position, in all kernels."""
    shape = CASES[name]
    arrays = fused_arrays(rng, shape, dtype, F32)
    arrays["starts"] = np.tile((np.arange(shape[1]) // 7 * 7).astype(np.int32), (shape[0], 1))
    arrays["lengths"] = rope.query_lengths(shape[1], 0.5, 3)

    def forward(dev, d_qkv, table, starts, lengths=None, **_):
        rope.forward(dev, d_qkv, table, *shape[2:4], starts, lengths=lengths)

    got = run(dev, forward, arrays)["d_qkv"].astype(np.float32)
    np.testing.assert_array_equal(got, run(host_device(), forward, arrays)["d_qkv"])
    plain = run(dev, forward, arrays | {"lengths": None})["d_qkv"].astype(np.float32)
    factors = arrays["lengths"][np.arange(shape[1]) % 7, None, None]
    np.testing.assert_array_equal(got[:, :, shape[2] :], plain[:, :, shape[2] :])
    want = plain[:, :, : shape[2]] * factors
    np.testing.assert_allclose(got[:, :, : shape[2]], want, rtol=2**-7)

    def fused(dev, d_qkv, table, starts, lengths, d_bias, scalars, abs_max):
        acc = Accumulator(d_bias, False, scalars, salt=4)
        options = {"lengths": lengths, "abs_max": abs_max, "d_bias": acc}
        rope.backward(dev, d_qkv, table, *shape[2:4], starts, **options)

    def backward(dev, d_qkv, table, starts, lengths, abs_max, **_):
        options = {"lengths": lengths, "abs_max": abs_max}
        rope.backward(dev, d_qkv, table, *shape[2:4], starts, **options)

    want = run_exact(dev, backward, arrays)
    if rope.fuses(shape[4], None):
        got = run(dev, fused, arrays)
        for result in ("d_qkv", "abs_max"):
            np.testing.assert_array_equal(got[result], want[result])


@pytest.mark.parametrize("features, across, tiles", [(2048, 8, 2), (1152, 5, 2), (16, 1, 1)])
def test_fused_grid(features, across, tiles):
    assert rope.fused_grid(32768, features) == ((across, 512), tiles)
    assert rope.fused_grid(129, features) == ((across, 3), tiles)
    assert across * tiles * 128 >= features


def test_fused_traffic_and_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    d_qkv, table = make((2, 16, 8, 64), BF16), make((16, 32, 2), F32)
    one, count, scalars = make((1,), F32), make((1,), I32), make((16,), I32)

    def accumulator(shape, dtype):
        return Accumulator(make(shape, dtype), True, scalars, 1)

    fp8 = Fp8Out(make((32, 512), E4M3), make((512, 32), E4M3), one, count)
    rope.backward(dev, d_qkv, table, 4, 2, fp8=fp8)
    assert dev.bytes == {"rope_backward_fused": 32 * 512 * 4 + 16 * 64 * 4 + 12}
    with pytest.raises(ValueError, match=r"rope.backward: FP8 results have"):
        rope.backward(dev, make((2, 15, 8, 64), BF16), table, 4, 2, fp8=fp8)
    ragged = Fp8Out(make((30, 512), E4M3), None, one, count)
    with pytest.raises(ValueError, match=r"rope.backward: B \* T must be a multiple of 4 with fp8"):
        rope.backward(dev, make((2, 15, 8, 64), BF16), table, 4, 2, fp8=ragged)


def test_backward_undoes_forward(dev, rng):
    shape = CASES["head_96"]
    arrays = inputs(rng, shape, F32, shape[1])

    def call(dev, qkv, table):
        rope.forward(dev, qkv, table, shape[2], shape[3])
        rope.backward(dev, qkv, table, shape[2], shape[3])

    got = run_exact(dev, call, arrays)
    # Four products of size 1 and their roundings in F32; cos^2 + sin^2 is 1 to 2^-23.
    np.testing.assert_allclose(got["qkv"], arrays["qkv"], rtol=1e-5, atol=1e-6)


def test_grid_covers_every_pair():
    # 16 heads in chunks of 4, half a head of 64 BF16 in 4 vectors: 16 threads a token.
    assert rope.grid(32768, 16, 4) == 32768 * 16 // 128
    assert rope.grid(32768, 14, 8) == 32768 * 4 * 8 // 128
    assert rope.grid(1, 2, 4) == 1


def of_head_dim(Hd: int) -> dict[str, tuple]:
    """Heads of this size, and a table for them."""
    return {"qkv": ((2, 5, 8, Hd), BF16), "table": ((8, Hd // 2, 2), F32)}


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"qkv": ((2, 5, 8, 64), I32)}, TypeError, "qkv must be F32 or BF16"),
        ({"qkv": ((2, 5, 7, 64), BF16)}, ValueError, "qkv must have shape"),
        ({"qkv": ((2, 8, 64), BF16)}, ValueError, "qkv must have shape"),
        (of_head_dim(514), ValueError, "Hd must be at most 512 on a GPU"),
        ({"table": ((4, 32, 2), F32)}, ValueError, "seq_length must be at most 4, got 5"),
        ({"table": ((8, 64, 2), F32)}, ValueError, "table must have shape"),
        ({"table": ((8, 32, 2), BF16)}, TypeError, "table must be F32"),
    ],
)
def test_wrong_arguments_raise(change, error, text):
    specs = {"qkv": ((2, 5, 8, 64), BF16), "table": ((8, 32, 2), F32)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"rope.forward: .*{text}"):
        rope.forward(plan, **tensors, num_heads=4, num_kv_heads=2)
