"""Products with what follows them on a device, against references and the operations they replace.

Operands are small integers, of `exp` small multiples of 1/8, so that sums are exact in any order.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops.common import CAPABILITY, tile_columns
from llmq.ops.pointwise import swiglu
from llmq.ops.product import matmul_fused
from llmq.ops.product.matmul import matmul, matmul_fp8
from llmq.ops.product.routes import Sizes, taken
from llmq.ref.product.matmul_fused import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.emulator import device as emulator
from tests.fp8_out import outputs
from tests.harness import (
    GPU_SPEC,
    SIZES,
    compared,
    devices_without,
    host_device,
    run,
    step_scalars,
)

H100 = replace(GPU_SPEC, num_sms=132)
# Sources of their own take long to compile for the emulator; some cases are large.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def whole(rng, dtype, *shape):
    """Small integers."""
    return rng.integers(-3, 4, shape).astype(np.float32).astype(dtype.numpy)


def small(entry):
    return {name: case for name, case in CASES[entry].items() if not name.startswith("qwen")}


def cases_of(entry):
    return pytest.mark.parametrize("case", small(entry).values(), ids=small(entry))


def scales_of(dtype, a, b):
    """The scales of fp8 codes."""
    values = {"scale_a": a, "scale_b": b}
    fp8 = dtype in (E4M3, E5M2)
    return {name: np.array([x], np.float32) if fp8 else None for name, x in values.items()}


def low_of(rng, M, N, R, transposed):
    """The operands of adapters."""
    shape = (R, N) if transposed else (N, R)
    return {
        "h": whole(rng, BF16, M, R) if R else None,
        "tail": whole(rng, BF16, *shape) if R else None,
    }


def fp8_of(codes=None, transposed=None, scale=None, saturated=None):
    return None if scale is None else Fp8Out(codes, transposed, scale, saturated)


def same_bits(got, want, names):
    for name in names:
        if want[name] is not None:
            both = got[name].view(np.uint8), want[name].view(np.uint8)
            np.testing.assert_array_equal(*both, name)


def of_plan(dev):
    return lambda dtype, *shape: dev.alloc("t", shape, dtype, "Weights")


def refused(op, call, given, cases):
    """call(**given) is refused with each of these changes."""
    for change, error, match in cases:
        with pytest.raises(error, match=f"{op}: {match}"):
            call(**given | change)


# -- Stored, with adapters, a bias and an addend ---------------------------------------------------


def adapted_arrays(rng, case, a, b, **instead):
    M, N, K, R, transposed = case
    outside = transposed and a == BF16
    return {
        "out": np.full((M, N), np.nan, BF16.numpy),
        "a": whole(rng, a, M, K),
        "b": whole(rng, b, *((K, N) if outside else (N, K))),
        **low_of(rng, M, N, R, transposed),
        **scales_of(a, 0.5, 4.0),
        "bias": None if transposed else whole(rng, BF16, N),
        "addend": None if transposed else whole(rng, BF16, M, N),
    } | instead


def check_adapted(dev, rng, case, a, b=None, *, alpha=1.0, **instead):
    arrays = adapted_arrays(rng, case, a, b or a, **instead)
    given = {name: array for name, array in arrays.items() if array is not None}
    compared(dev, partial(matmul_fused.adapted, transposed=case[-1], alpha=alpha), given)


@cases_of("matmul_adapted")
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_adapted(hopper, rng, case, dtype):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    check_adapted(hopper, rng, case, dtype)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_adapted_times_alpha(hopper, rng, dtype):
    """The product without the adapters'; halves and quarters are exact."""
    check_adapted(hopper, rng, CASES["matmul_adapted"]["small"], dtype, alpha=0.25)
    check_adapted(hopper, rng, (16, 64, 64, 0, True), dtype, alpha=-0.5)


@pytest.fixture
def wide(monkeypatch):
    """A product whose tiles all have 224 columns."""
    monkeypatch.setattr("llmq.ops.product.matmul_fused.tile_columns", lambda *args: 224)


def test_wide_tiles(hopper, rng, wide):
    """The last 64 columns begin in those before; several turns of the emulator's cluster."""
    check_adapted(hopper, rng, (272, 712, 208, 72, True), BF16)


@gpu_only
@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_adapted_gradients_in_e5m2(hopper, rng, dtypes):
    check_adapted(hopper, rng, CASES["matmul_adapted"]["tiles_transposed"], *dtypes)


@gpu_only
@pytest.mark.parametrize("added", ["bias", "addend"])
def test_one_is_added(hopper, rng, added):
    """The stream has an addend and mostly no bias, gradients of others have neither."""
    for dtype in (BF16, E4M3):
        check_adapted(hopper, rng, (2064, 3088, 400, 40, False), dtype, **{added: None})


@gpu_only
def test_without_adapters(hopper, rng):
    """Products without adapters are what is computed again: the up product, and gradients before
    the activation's."""
    check_adapted(hopper, rng, (304, 208, 144, 0, False), E4M3)
    for dtype in (E4M3, E5M2):
        check_adapted(hopper, rng, (304, 208, 144, 0, True), dtype, E4M3)


@gpu_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_adapted_on_all_multiprocessors(hopper, rng, dtype, transposed):
    """Several tiles of each cluster, in several groups of columns, of which K makes few."""
    check_adapted(hopper, rng, (2064, 3088, 8208, 40, transposed), dtype)


@gpu_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_adapted_on_all_multiprocessors_with_wide_tiles(hopper, rng, wide, dtype, transposed):
    check_adapted(hopper, rng, (2064, 3088, 8208, 40, transposed), dtype)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_wide_tiles_with_bias_and_addend(hopper, rng, wide, dtype):
    check_adapted(hopper, rng, (304, 712, 208, 72, False), dtype)


def test_where_tiles_are_wide():
    """7B's 3,584 columns make 3.9 turns of wide tiles and 4.6 of narrow ones."""
    dev = PlanDevice(H100)
    assert tile_columns(dev, 4096, 3584, 2 * 18944) == tile_columns(dev, 4096, 3584, 18944) == 224
    assert tile_columns(dev, 4096, 3584, 2 * 4608) == 224
    assert tile_columns(dev, 4096, 3584, 4608) == 192  # tiles are multiplied as quickly as stored
    assert tile_columns(dev, 4096, 4608, 2 * 3584) == 192  # 5.8 turns


def test_where_adapted_is_faster():
    def faster(dev=None, M=4096, N=18944, K=3584, R=32, dtype=BF16, out=BF16, fast=True):
        dev = dev or PlanDevice(H100)
        return taken(dev, "adapters", Sizes(M, N, K, dtype, out, R), fast=fast)

    assert faster() and faster(dtype=E4M3) and faster(R=128)
    assert not faster(M=1024) and not faster(R=136)
    assert not faster(R=12) and not faster(K=3592, dtype=E4M3)  # rows of no multiple of 16 bytes
    # An idle last turn costs less than is saved, if little of it is idle, or K is short.
    assert faster(N=3584) and faster(N=3584, K=37888) and faster(N=3584, K=37888, dtype=E4M3)
    assert faster(N=3584, M=3584) and not faster(N=3584, M=3584, K=18944)
    assert not faster(N=512) and faster(N=512, M=16384)  # the first turn is not full
    assert not faster(dtype=F32) and not faster(out=F32)
    assert not faster(dtype=E4M3, fast=False) and faster(fast=False)
    assert not any(faster(other) for other in devices_without())


def test_wrong_arguments_of_adapted():
    dev = PlanDevice(GPU_SPEC)
    op, tensor, call = "matmul_adapted", of_plan(dev), partial(matmul_fused.adapted, dev)
    one, low = tensor(F32, 1), tensor(BF16, 32, 8)
    given = {"out": tensor(BF16, 32, 48), "a": tensor(BF16, 32, 64), "b": tensor(BF16, 48, 64)}
    given |= {"h": low, "tail": tensor(BF16, 48, 8)}
    scales, codes = {"scale_a": one, "scale_b": one}, {"a": tensor(E5M2, 32, 64)}
    call(**given)
    assert dev.flops[op] == 2 * 32 * 48 * (64 + 8)
    refused(op, call, given, [
        ({"transposed": True}, ValueError, r"b must have shape \(64, 64\)"),
        (scales, TypeError, "fp8 codes have scales, and only they"),
        (codes | {"b": tensor(E5M2, 48, 64)} | scales, TypeError, "a or b must be F8_E4M3, both"),
        (codes | {"b": tensor(E4M3, 48, 64)}, TypeError, "fp8 codes have scales"),
        (
            {"a": tensor(BF16, 32, 60), "b": tensor(BF16, 48, 60)},
            ValueError,
            "a must be a matrix with rows of a multiple of 16 bytes",
        ),
    ])  # fmt: skip


# -- Added to a gradient ---------------------------------------------------------------------------


def check_gradient(dev, rng, case, a=E4M3, *, accumulate=True, **options):
    M, N, K = case
    arrays = {
        "d": (rng.normal(size=(M, N)) * 100).astype(BF16.numpy),
        "a": whole(rng, a, *((K, M) if a == BF16 else (M, K))),
        "b": whole(rng, BF16, K, N) if a == BF16 else whole(rng, E4M3, N, K),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
        **scales_of(a, 0.5, 4.0),
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if not accumulate:
        arrays["d"][:] = np.nan

    def call(dev, d, scalars, **operands):
        acc = Accumulator(d, accumulate, scalars, salt=4)
        matmul_fused.gradient(dev, acc, **operands, **options)

    return compared(dev, call, arrays)["d"]


@cases_of("matmul_gradient")
def test_gradient(hopper, rng, case):
    check_gradient(hopper, rng, case)


def test_gradient_overwrites(hopper, rng):
    check_gradient(hopper, rng, CASES["matmul_gradient"]["small"], accumulate=False)


def test_gradient_times_alpha(hopper, rng):
    check_gradient(hopper, rng, CASES["matmul_gradient"]["small"], alpha=0.25)


@gpu_only
def test_gradient_of_e5m2(hopper, rng):
    check_gradient(hopper, rng, CASES["matmul_gradient"]["tiles"], E5M2)


@gpu_only
def test_gradient_of_fast_sums(hopper, rng):
    """Sums of a few whole numbers are exact in 14 bits."""
    check_gradient(hopper, rng, (304, 208, 144), fast_accumulation=True)


@gpu_only
def test_gradient_on_all_multiprocessors(hopper, rng):
    """Several tiles of each cluster, in several groups of columns; twice the same bits."""
    case = (2064, 9008, 4112)
    first, second = (check_gradient(hopper, np.random.default_rng(5), case) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


def test_which_gradients_are_added():
    def serves(dev=None, M=17920, N=1536, K=32768, dtype=E4M3, target=BF16):
        return taken(dev or PlanDevice(H100), "gradient", Sizes(M, N, K, dtype, target))

    def served(weights):
        return [name for name, (M, N) in weights.items() if serves(M=M, N=N)]

    def weights(C, qkv, F):
        return {"qkv": (qkv, C), "o": (C, C), "up": (2 * F, C), "down": (C, F)}

    assert served(weights(896, 1152, 4864)) == ["up"]  # 0.5B: 4.7 columns of tiles
    assert served(weights(1536, 2048, 8960)) == ["qkv", "up"]
    assert served(weights(2048, 2560, 11008)) == ["up", "down"]
    assert served(weights(3584, 4608, 18944)) == ["up", "down"]
    assert not serves(target=F32) and not serves(K=2048)
    assert serves(dtype=E5M2) and not serves(dtype=BF16)
    assert not serves(K=32776) and not serves(N=1532)  # rows of no multiple of 16 bytes
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments_of_gradient():
    dev = PlanDevice(GPU_SPEC)
    op, tensor, call = "matmul_gradient", of_plan(dev), partial(matmul_fused.gradient, dev)
    scale = tensor(F32, 1)
    acc = Accumulator(tensor(BF16, 32, 48), True, tensor(I32, 16), 1)
    given = {"acc": acc, "a": tensor(E4M3, 32, 64), "b": tensor(E4M3, 48, 64)}
    given |= {"scale_a": scale, "scale_b": scale}
    call(**given)
    assert dev.flops[op] == 2 * 32 * 48 * 64
    refused(op, call, given, [
        ({"scale_b": None}, TypeError, "fp8 codes have scales"),
        ({"a": tensor(BF16, 32, 64)}, TypeError, "fp8 codes have scales, and only they"),
        (
            {"a": tensor(E4M3, 32, 72), "b": tensor(E4M3, 48, 72)},
            ValueError,
            r"rows must have multiples of 16 bytes, got \(32, 48, 72\)",
        ),
    ])  # fmt: skip


# -- The MLP's activation --------------------------------------------------------------------------


def up_arrays(rng, M, F, K, R, dtype):
    return {
        "a": whole(rng, dtype, M, K),
        "b": whole(rng, dtype, 2 * F, K),
        **low_of(rng, M, 2 * F, R, False),
        **scales_of(dtype, 0.5, 0.125),
    }


def up_results(M, F, layout):
    """Results of all kinds; layout: of codes, None: none."""
    found = {
        "up_gate": np.full((M, 2 * F), np.nan, BF16.numpy),
        "out": np.full((M, F), np.nan, BF16.numpy),
        "abs_max": np.zeros(1, np.float32),
    }
    return found | (outputs((M, F), E4M3, layout, np.float32(0.25)) if layout else {})


def one(dev, up_gate, out, a, b, h, tail, scale_a, scale_b, abs_max, gelu=False, **codes):
    """The operation."""
    matmul_fused.swiglu(
        dev, up_gate, out, a, b, h, tail, scale_a, scale_b,
        gelu=gelu, abs_max=abs_max, fp8=fp8_of(**codes),
    )  # fmt: skip


def two(dev, up_gate, out, a, b, h, tail, scale_a, scale_b, abs_max, gelu=False, **codes):
    """The operations that it replaces."""
    if dev.spec.capability == CAPABILITY:
        matmul_fused.adapted(dev, up_gate, a, b, h, tail, scale_a, scale_b)
    elif scale_a is None:
        matmul(dev, up_gate, a, b, trans_b=True)
    else:
        matmul_fp8(dev, up_gate, a, b, scale_a, scale_b)
    swiglu.forward(dev, out, up_gate, gelu=gelu, abs_max=abs_max, fp8=fp8_of(**codes))


def check_swiglu(dev, arrays, *, gelu=False, left_out=()):
    """The bits of the two operations. left_out: results that are not wanted."""
    want = run(dev, partial(two, gelu=gelu), arrays)
    got = run(dev, partial(one, gelu=gelu), arrays | dict.fromkeys(left_out))
    same_bits(got, want, set(arrays) - set(left_out))


@pytest.mark.parametrize("dtype, layout", [(E4M3, "both"), (BF16, None)], ids=str)
@cases_of("matmul_swiglu")
def test_swiglu(hopper, rng, case, dtype, layout):
    M, F, *_ = case
    check_swiglu(hopper, up_arrays(rng, *case, dtype) | up_results(M, F, layout))


def test_swiglu_of_low_gates_and_saturation(hopper, rng):
    """Gates whose sigmoid is no normal number, sums that are saturated, and a NaN."""
    M, F, *_ = case = CASES["matmul_swiglu"]["tiles"]
    arrays = up_arrays(rng, *case, E4M3) | up_results(M, F, "both")
    arrays["scale_b"][:] = 4
    arrays["a"][-1, 0] = np.nan  # in the last row, of which the first tiles see nothing
    check_swiglu(hopper, arrays)


@gpu_only
@pytest.mark.parametrize("left_out", [(), ("up_gate",), ("out",)], ids=str)
@pytest.mark.parametrize("layout", ["codes", "transposed", "both"])
def test_swiglu_on_all_multiprocessors(hopper, rng, layout, left_out):
    """Several tiles of each cluster, in several groups of columns, of which K makes few."""
    M, F, *_ = case = (2064, 1552, 8208, 0)
    arrays = up_arrays(rng, *case, E4M3) | up_results(M, F, layout)
    check_swiglu(hopper, arrays, left_out=left_out)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_geglu_with_adapters(hopper, rng, dtype):
    M, F, *_ = case = (2064, 4112, 1040, 72)
    arrays = up_arrays(rng, *case, dtype) | up_results(M, F, "both")
    check_swiglu(hopper, arrays, gelu=True)


def test_where_swiglu_is_taken():
    def serves(dev=None, M=4096, F=18944, K=3584, rank=0, dtype=E4M3, fast=True):
        dev = dev or PlanDevice(GPU_SPEC)
        return taken(dev, "glu", Sizes(M, F, K, dtype, None, rank), fast=fast)

    assert serves() and serves(dtype=BF16) and serves(rank=128) and serves(F=4864, K=896)
    assert not serves(F=4096) and not serves(M=1024) and not serves(rank=136)
    assert not serves(M=4104) and not serves(F=18952)  # codes of both layouts
    assert not serves(rank=12) and not serves(K=3592)  # rows of no multiple of 16 bytes
    assert not serves(dtype=F32) and not serves(dtype=E5M2)
    assert not serves(fast=False) and serves(dtype=BF16, fast=False)
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments_of_swiglu():
    dev = PlanDevice(GPU_SPEC)
    op, tensor, call = "matmul_swiglu", of_plan(dev), partial(matmul_fused.swiglu, dev)
    given = {"up_gate": tensor(BF16, 32, 96), "out": tensor(BF16, 32, 48)}
    given |= {"a": tensor(BF16, 32, 64), "b": tensor(BF16, 96, 64)}
    h, tail, scale = tensor(BF16, 32, 8), tensor(BF16, 96, 8), tensor(F32, 1)
    scales = {"scale_a": scale, "scale_b": scale}
    fp8 = {"a": tensor(E4M3, 32, 64), "b": tensor(E4M3, 96, 64)}
    call(**given, h=h, tail=tail)
    assert dev.flops[op] == 4 * 32 * 48 * (64 + 8)
    none, rows = {"up_gate": None}, "a must be a matrix with rows of a multiple of 16 bytes"
    refused(op, call, given, [
        ({"out": None}, TypeError, "out or fp8 must be given"),
        ({"b": tensor(BF16, 95, 64)}, ValueError, "b must have rows of up and of gate"),
        (
            none | {"out": tensor(BF16, 32, 40), "b": tensor(BF16, 80, 64)},
            ValueError,
            "M and F must be multiples of 16, got 32 and 40",
        ),
        ({"b": fp8["b"]}, TypeError, "fp8 codes multiply fp8 codes"),
        (fp8 | {"a": tensor(E5M2, 32, 64)} | scales, TypeError, "a must be BF16 or F8_E4M3, got"),
        (fp8, TypeError, "fp8 codes have scales"),
        (scales, TypeError, "fp8 codes have scales, and only they"),
        ({"h": tensor(BF16, 32, 136), "tail": None}, TypeError, "fp8 codes .* h needs tail"),
        ({"a": tensor(BF16, 32, 60), "b": tensor(BF16, 96, 60)}, ValueError, rows),
    ])  # fmt: skip


# -- The activation's gradient ---------------------------------------------------------------------


def down_arrays(rng, case, left):
    """The arrays of the product, and up_gate; gates of all sizes, and what is no number in the last
    rows."""
    M, F, K, R = case
    codes = left != BF16
    up_gate = (rng.normal(size=(M, 2 * F)) * 4).astype(BF16.numpy)
    up_gate[0, F:] = np.resize([-200, -90, -88, -87.5, -20, 0, 20, 90, 200, 1], F)
    up_gate[-1, F - 1], up_gate[-2, 2 * F - 1] = np.nan, np.inf
    return {
        "a": whole(rng, left, M, K),
        "b": whole(rng, E4M3 if codes else BF16, *((F, K) if codes else (K, F))),
        **low_of(rng, M, F, R, True),
        **scales_of(left, 0.5, 1 / 64),
        "up_gate": up_gate,
    }


def down_results(case, *, tensor, fp8, layout, out=False, again=False, abs_max=True):
    """Arrays to write to. fp8: the format of codes, or None. out, again: whether it is written, and
    whether its codes are."""
    M, F, _, _ = case

    def empty(dtype, *shape):
        filled = np.full(shape, np.nan, np.float32) if dtype == BF16 else np.full(shape, 0.75)
        return filled.astype(dtype.numpy)

    return {
        "d_up_gate": empty(BF16, M, 2 * F) if tensor else None,
        "abs_max": np.zeros(1, np.float32) if abs_max else None,
        "codes": empty(fp8, M, 2 * F) if fp8 and layout != "transposed" else None,
        "transposed": empty(fp8, 2 * F, M) if fp8 and layout != "rows" else None,
        "scale": np.array([1 / 300], np.float32) if fp8 else None,
        "saturated": np.array([7], np.int32) if fp8 else None,
        "out": empty(BF16, M, F) if out else None,
        "out_transposed": empty(E4M3, F, M) if again else None,
        "out_scale": np.array([1 / 50], np.float32) if again else None,
        "out_saturated": np.array([3], np.int32) if again else None,
    }


def check_backward(dev, rng, case, left=E4M3, *, gelu=False, in_place=False, alpha=1.0, **wanted):
    given = down_arrays(rng, case, left)
    written = down_results(case, **wanted)
    if in_place:
        written["d_up_gate"] = None

    def called(
        op, dev, *, codes, transposed, scale, saturated,
        out_transposed, out_scale, out_saturated, **rest,
    ):  # fmt: skip
        if in_place:
            rest["d_up_gate"] = rest["up_gate"]
        fp8 = fp8_of(codes, transposed, scale, saturated)
        again = fp8_of(None, out_transposed, out_scale, out_saturated)
        op(dev, gelu=gelu, fp8=fp8, out_fp8=again, **rest)

    ours = partial(matmul_fused.swiglu_backward, alpha=alpha)
    got = run(dev, partial(called, ours), given | written)
    M, F, *_ = case
    operands = {name: x for name, x in given.items() if name != "up_gate"}
    operands["out"] = np.empty((M, F), BF16.numpy)
    alone = partial(matmul_fused.adapted, transposed=True, alpha=alpha)
    d_out = run(host_device(), alone, operands)["out"]
    operands = {"d_out": d_out, "up_gate": given["up_gate"]}
    want = run(dev, partial(called, swiglu.backward), operands | written)
    same_bits(got, want, [*written, "up_gate"])
    return want


def test_swiglu_backward(hopper, rng):
    """Codes in both layouts, and in the largest case those of the activation."""
    for name, case in small("matmul_swiglu_backward").items():
        again = name == "tiles"
        want = check_backward(hopper, rng, case, tensor=False, fp8=E4M3, layout="both", again=again)
        assert want["saturated"][0] > 7
        assert not again or want["out_saturated"][0] > 3


@pytest.mark.parametrize("left", [BF16, E4M3], ids=str)
def test_swiglu_backward_times_alpha(hopper, rng, left):
    wanted = {"tensor": True, "fp8": None, "layout": None}
    check_backward(hopper, rng, (16, 64, 64, 8), left, alpha=0.25, **wanted)


LARGE = (2064, 4160, 1040, 0)  # several tiles of each cluster, in several groups of columns


@gpu_only
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_backward_to_codes_in_one_layout(hopper, rng, layout):
    check_backward(hopper, rng, LARGE, tensor=False, fp8=E4M3, layout=layout)


@gpu_only
@pytest.mark.parametrize("layout", ["both", None])
def test_backward_with_codes_of_the_activation(hopper, rng, layout):
    fp8 = E5M2 if layout else None
    check_backward(hopper, rng, LARGE, E5M2, tensor=not layout, fp8=fp8, layout=layout, again=True)


@gpu_only
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_backward_in_bf16(hopper, rng, gelu, in_place):
    options = {"tensor": not in_place, "fp8": None, "layout": None, "out": True}
    check_backward(hopper, rng, LARGE, BF16, gelu=gelu, in_place=in_place, abs_max=False, **options)


@gpu_only
def test_backward_with_adapters(hopper, rng):
    """With two pairs of tiles of adapters, and d_up_gate besides its codes, in place."""
    options = {"tensor": True, "fp8": E4M3, "layout": "rows", "out": True}
    check_backward(hopper, rng, (*LARGE[:3], 72), in_place=True, **options)


@gpu_only
@pytest.mark.parametrize("gelu", [False, True])
def test_backward_in_e5m2(hopper, rng, gelu):
    options = {"tensor": True, "fp8": E5M2, "layout": "both", "out": False}
    case = CASES["matmul_swiglu_backward"]["tiles"]
    check_backward(hopper, rng, case, E5M2, gelu=gelu, **options)


@gpu_only
def test_backward_with_scales_just_in_time(hopper, rng):
    """Codes as operands and none as results."""
    options = {"tensor": True, "fp8": None, "layout": None, "out": False}
    case = CASES["matmul_swiglu_backward"]["tiles"]
    check_backward(hopper, rng, case, in_place=True, **options)


def test_where_backward_is_taken():
    def serves(dev=None, M=4096, F=18944, K=3584, dtype=E4M3, rank=0, fast=True):
        dev = dev or PlanDevice(GPU_SPEC)
        return taken(dev, "glu_grad", Sizes(M, F, K, dtype, None, rank), fast=fast)

    assert serves() and serves(dtype=E5M2) and serves(dtype=BF16) and serves(rank=128)
    assert serves(M=32768, F=4864, K=896) and serves(M=32768, F=8960, K=1536)
    assert not serves(M=1024) and not serves(F=2816) and not serves(dtype=F32)
    assert not serves(M=4104) and not serves(F=18960)  # what a warp has of a tile
    assert not serves(rank=136) and not serves(rank=12) and not serves(K=3592)
    assert not serves(fast=False) and serves(dtype=BF16, fast=False)
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments_of_backward():
    dev = PlanDevice(GPU_SPEC)
    op, tensor, call = "matmul_swiglu_backward", of_plan(dev), matmul_fused.swiglu_backward
    call, wide, scale = partial(call, dev), tensor(BF16, 32, 128), tensor(F32, 1)
    h, tail = tensor(BF16, 32, 8), tensor(BF16, 8, 64)
    given = {"d_up_gate": wide, "up_gate": wide, "a": tensor(BF16, 32, 48)}
    given |= {"b": tensor(BF16, 48, 64)}
    scales, codes = {"scale_a": scale, "scale_b": scale}, {"a": tensor(E5M2, 32, 48)}
    call(**given, h=h, tail=tail)
    assert dev.flops[op] == 2 * 32 * 64 * (48 + 8)
    sizes = "M and F must be multiples of 16 and 64, got 32 and 48"
    refused(op, call, given, [
        ({"d_up_gate": None}, TypeError, "d_up_gate or fp8 must be given"),
        ({"b": tensor(BF16, 48, 48)}, ValueError, sizes),
        ({"a": scale}, ValueError, "a must have 2 dimensions"),
        (scales, TypeError, "fp8 codes have scales, and only they"),
        ({"a": tensor(F32, 32, 48), "b": tensor(BF16, 64, 48)}, TypeError, "a must be BF16 or F8"),
        ({"h": tensor(BF16, 32, 136), "tail": None}, TypeError, "fp8 codes .* h needs tail"),
        (codes | {"b": tensor(E4M3, 64, 48)}, TypeError, "fp8 codes have scales"),
        (codes | {"b": tensor(E5M2, 64, 48)} | scales, TypeError, "a or b must be F8_E4M3"),
    ])  # fmt: skip


# -- Rows that are sorted by expert ----------------------------------------------------------------


def grouped_arrays(rng, case, a, b=None):
    M, N, K, E, transposed = case
    outside = transposed and a == BF16
    edges = np.sort(rng.integers(0, M + 1, max(E - 2, 0)))
    edges[:2] = 0  # some experts have no rows
    return {
        "out": np.full((M, N), np.nan, BF16.numpy),
        "a": whole(rng, a, M, K),
        "b": whole(rng, b or a, *((E, K, N) if outside else (E, N, K))),
        "starts": np.array([0, *edges, *[M] * (E - len(edges))], np.int32),
        **scales_of(a, 0.5, 4.0),
        "bias": whole(rng, BF16, E, N) if not transposed else None,
    }


@cases_of("matmul_grouped")
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_grouped(hopper, rng, case, dtype):
    """Experts without rows, with a few and with several pairs of tiles; and adapters of one or two
    steps."""
    call = partial(matmul_fused.grouped, transposed=case[-1])
    arrays = grouped_arrays(rng, case, dtype)
    compared(hopper, call, arrays)
    M, N, _, E, transposed = case
    h, tail = ((M, 8), (E, 8, N)) if transposed else ((M, 72), (E, N, 72))
    compared(hopper, call, arrays | {"h": whole(rng, BF16, *h), "tail": whole(rng, BF16, *tail)})


def grouped_gradient(dev, d, scalars, accumulate=True, **tensors):
    acc = Accumulator(d, accumulate, scalars, salt=5)
    matmul_fused.grouped_gradient(dev, acc, **tensors)


def gradient_arrays_of(rng, case):
    R, M, N, E = case
    arrays = grouped_arrays(rng, (R, N, M, E, False), BF16)
    return {
        "d": whole(rng, BF16, E, M, N),
        "a": arrays["a"],
        "b": whole(rng, BF16, R, N),
        "starts": arrays["starts"],
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }


@cases_of("matmul_grouped_gradient")
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_gradient(hopper, rng, case, accumulate):
    """Experts without rows, and with numbers of them that are no multiples of a step."""
    arrays = gradient_arrays_of(rng, case)
    got = compared(hopper, partial(grouped_gradient, accumulate=accumulate), arrays)["d"]
    absent = np.diff(arrays["starts"]) == 0
    np.testing.assert_array_equal(got[absent], arrays["d"][absent] if accumulate else 0)


def test_grouped_gradient_of_several_clusters(rng):
    """The second one's last warps run first, and its last step has no 64 rows."""
    if problem := emulator.missing():
        pytest.skip(problem)
    dev = emulator.EmulatorDevice(SIZES, num_sms=4)
    compared(dev, grouped_gradient, gradient_arrays_of(rng, (100, 520, 200, 1)))


@gpu_only
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_gradient_on_all_multiprocessors(hopper, rng, accumulate):
    arrays = gradient_arrays_of(rng, (9000, 1544, 1096, 64))
    compared(hopper, partial(grouped_gradient, accumulate=accumulate), arrays)


@gpu_only
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_grouped_on_all_multiprocessors(hopper, rng, dtype, transposed):
    """Several tiles of each cluster, of many experts; alone and with adapters."""
    arrays = grouped_arrays(rng, (9000, 768, 1088, 48, transposed), dtype)
    call, low = partial(matmul_fused.grouped, transposed=transposed), (16, 768)
    compared(hopper, call, arrays)
    tail = whole(rng, BF16, 48, *(low if transposed else low[::-1]))
    compared(hopper, call, arrays | {"h": whole(rng, BF16, 9000, 16), "tail": tail})


def test_where_grouped_is_taken():
    def route(K, N=1536, M=16384, dtype=BF16, dev=None, fast=False, rank=0):
        sizes = Sizes(M, N, K, dtype, F32 if dtype == F32 else BF16, rank)
        return taken(dev or PlanDevice(H100), "grouped", sizes, fast=fast)

    assert route(2048, rank=8) and not route(2048, rank=256)
    assert route(2048) and route(768, 2048) and route(2048, dtype=E4M3, fast=True)
    assert not route(2048, dtype=F32) and not route(2056) and not route(2048, dtype=E4M3)
    assert not any(route(2048, dev=dev) for dev in devices_without())


def test_where_gradients_are_grouped():
    def route(M=1536, N=2048, dtype=BF16, out=BF16, dev=None):
        return taken(dev or PlanDevice(H100), "grouped_grad", Sizes(M, N, 131072, dtype, out))

    assert route() and route(N=768)
    assert not route(out=F32) and not route(dtype=F32) and not route(M=1540)
    assert not any(route(dev=dev) for dev in devices_without())


def test_wrong_grouped_arguments():
    dev = PlanDevice(GPU_SPEC)
    make = of_plan(dev)
    given = {"out": make(BF16, 16, 64), "a": make(BF16, 16, 128), "b": make(BF16, 3, 64, 128)}
    given |= {"dev": dev, "starts": make(I32, 4)}
    matmul_fused.grouped(**given)
    refused("matmul_grouped", matmul_fused.grouped, given, [
        ({"b": make(BF16, 64, 128)}, ValueError, "b and tail must have 3 dimensions"),
        ({"tail": make(BF16, 3, 64, 8)}, TypeError, "fp8 codes .* h needs tail"),
        (
            {"a": make(BF16, 16, 96), "b": make(BF16, 3, 96, 64), "transposed": True},
            ValueError, "at most 512 experts, and K outside in multiples of 64, got 3 and 96",
        ),
    ])  # fmt: skip
    scalars, x = make(I32, 16), make(BF16, 16, 128)
    acc = Accumulator(make(BF16, 3, 64, 128), True, scalars, 0)
    given = {"dev": dev, "acc": acc, "a": make(BF16, 16, 64), "b": x, "starts": make(I32, 4)}
    matmul_fused.grouped_gradient(**given)
