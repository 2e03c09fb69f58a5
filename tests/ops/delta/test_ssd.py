"""Mamba-2's state space on a device against its reference in F64."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.delta import ssd
from llmq.ops.delta.ssd import Heads
from llmq.ref.delta.ssd import CASES
from llmq.runtime.host_device import reference
from llmq.runtime.kernel import ceil_div
from llmq.runtime.plan_device import PlanDevice
from tests.delta import BEGINS, GATES, assert_documents_apart, gates_of, starts_of
from tests.harness import GPU_SPEC, run, step_scalars
from tests.ssd import Chunked

SMALL = {name: shape for name, shape in CASES.items() if shape[1] < 1000}
RESULTS = ("out", "state", "d_qkv", "d_gates", "d_skip", "d_state")


def arrays_of(rng, shape, dtype, *, begins: tuple = (), carried: bool = False) -> dict:
    """Inputs of both passes. begins: where documents do, the same in all sequences."""
    B, T, *sizes = shape
    heads = Heads(*sizes)
    decays = -0.2 * rng.exponential(size=(B, T, heads.Hv))
    states = rng.normal(size=(2, B, heads.Hv, heads.DK, heads.DV)).astype(np.float32) / 4
    starts = starts_of(tuple(b for b in begins if b < T), T) if begins else None
    return {
        "qkv": rng.normal(size=(B, T, heads.channels)).astype(dtype.numpy),
        "gates": np.stack([decays, rng.uniform(size=decays.shape)], 2).astype(np.float32),
        "skip": rng.normal(size=heads.Hv).astype(dtype.numpy),
        "d_out": rng.normal(size=(B, T, heads.Hv * heads.DV)).astype(dtype.numpy),
        "starts": None if starts is None else np.repeat(starts, B, 0),
        "state": states[0] if carried else None,
        "d_state": states[1] if carried else None,
    }


def on_device(dev, arrays: dict, heads: Heads) -> dict:
    """All results of a device, of forward then of backward."""
    inputs = {name: arrays[name] for name in ("qkv", "gates", "skip", "starts", "state")}
    out = {"out": np.full_like(arrays["d_out"], np.nan)}
    first = run(dev, lambda dev, **t: ssd.forward(dev, **t, heads=heads), out | inputs)

    def backward(dev, d_skip, scalars, **t):
        ssd.backward(dev, d_skip=Accumulator(d_skip, False, scalars, 1), **t, heads=heads)

    gradients = {
        **{"d_qkv": np.full_like(arrays["qkv"], np.nan), "d_out": arrays["d_out"]},
        **{"d_gates": np.full_like(arrays["gates"], np.nan), "d_state": arrays["d_state"]},
        **{"d_skip": np.full(heads.Hv, np.nan, np.float32), "scalars": step_scalars()},
    }
    found = run(dev, backward, inputs | gradients)
    if first["state"] is not None:  # backward goes to the state behind, too
        np.testing.assert_array_equal(first["state"], found["state"])
    found["out"] = first["out"]
    return {name: found[name] for name in RESULTS if found[name] is not None}


def in_f64(arrays: dict, heads: Heads) -> dict:
    """All results of the reference."""
    wide = {
        name: x if x is None or x.dtype == np.int32 else x.astype(np.float64)
        for name, x in arrays.items()
    }
    given = (wide["qkv"], wide["gates"], wide["skip"])
    chunked = Chunked(*given, heads, wide["starts"], wide["state"])
    found = {"out": chunked.forward(), "state": chunked.state, "d_state": wide["d_state"]}
    gradients = chunked.backward(wide["d_out"], wide["d_state"])
    found |= zip(("d_qkv", "d_gates", "d_skip"), gradients, strict=True)
    return {name: found[name] for name in RESULTS if found[name] is not None}


def assert_close(got: dict, want: dict, dtype) -> None:
    """F32: rounding of sums. BF16: states and scores are rounded to 8 bits where they are
    multiplied, one after the other."""
    assert got.keys() == want.keys()
    for name, y in want.items():
        x = got[name].astype(np.float64)
        if dtype is F32:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.abs(y).max(), err_msg=name)
        else:
            assert np.linalg.norm(x - y) <= 2**-6 * np.linalg.norm(y), name


def check(dev, arrays: dict, heads: Heads, dtype) -> dict:
    """The device's results, which are the reference's."""
    got = on_device(dev, arrays, heads)
    assert_close(got, in_f64(arrays, heads), dtype)
    return got


KINDS = {"plain": {}, "documents": {"begins": (0, 1, 3, 40, 64, 68)}, "carried": {"carried": True}}
EQUAL = [
    *(("one_token", F32, kind) for kind in KINDS),
    *(("ragged", F32, kind) for kind in ("documents", "carried")),
    ("three_chunks", F32, "plain"),
    ("many_heads", BF16, "documents"),
    *(("ragged", BF16, kind) for kind in KINDS),
    ("whole_chunks", BF16, "carried"),
]


@pytest.mark.parametrize("name, dtype, kind", EQUAL, ids=str)
def test_equals_reference(dev, rng, name, dtype, kind):
    shape = SMALL[name]
    check(dev, arrays_of(rng, shape, dtype, **KINDS[kind]), Heads(*shape[2:]), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("T", [1, 15, 17, 63, 65, 129])
def test_any_number_of_tokens(dev, rng, dtype, T):
    """About borders of tiles of 16 and of chunks; several sequences, of which one's last chunk is
    not the next one's first."""
    shape = (2, T, 1, 1, 32, 32)
    check(dev, arrays_of(rng, shape, dtype, carried=True), Heads(*shape[2:]), dtype)


@pytest.mark.parametrize("Hk, Hv, DK, DV", [(1, 3, 96, 32), (2, 4, 32, 64), (3, 3, 64, 64)])
def test_any_heads_in_bf16(dev, rng, Hk, Hv, DK, DV):
    shape = (1, 70, Hk, Hv, DK, DV)
    check(dev, arrays_of(rng, shape, BF16, carried=True), Heads(*shape[2:]), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_gates_at_their_limits(dev, rng, dtype, kind):
    """States that nothing is taken off, or all at once; tokens that write nothing."""
    B, T, heads = 1, 130, Heads(1, 2, 32, 32)
    arrays = arrays_of(rng, (B, T, *heads), dtype, carried=True)
    arrays["gates"] = gates_of(kind, B, T, heads.Hv).astype(np.float32)
    check(dev, arrays, heads, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_documents(dev, rng, dtype, begins):
    shape = (1, 150, 1, 1, 32, 32)
    arrays = arrays_of(rng, shape, dtype, begins=begins)
    got = check(dev, arrays, Heads(*shape[2:]), dtype)
    assert not got["d_gates"][:, list(begins), 0].any()  # nothing is in front to decay


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sequences_change_no_bit_of_each_other(dev, rng, dtype):
    """Whatever the others hold, even NaN."""
    B, heads = 2, Heads(2, 4, 32, 32)
    arrays = arrays_of(rng, (B, 70, *heads), dtype, carried=True)
    want = on_device(dev, arrays, heads)
    for name in ("qkv", "gates", "d_out", "state", "d_state"):
        arrays[name] = arrays[name].copy()
        arrays[name][0] = np.nan
    got = on_device(dev, arrays, heads)
    for name in set(want) - {"d_skip"}:
        np.testing.assert_array_equal(got[name][1], want[name][1], err_msg=name)
        assert np.isnan(got[name][0].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_bit_depends_on_other_documents(dev, rng, dtype):
    """Nor does any depend on a second run."""
    heads = Heads(1, 1, 32, 32)
    arrays = arrays_of(rng, (1, 70, *heads), dtype, begins=(0, 20, 67))
    assert_documents_apart(lambda changed: on_device(dev, changed, heads), arrays)


@pytest.mark.parametrize(
    "dtype, B, T, Hk, Hv, DK, DV",
    [(F32, 2, 5, 1, 2, 64, 32), (BF16, 2, 8, 2, 4, 32, 64), (BF16, 1, 3, 1, 1, 128, 64)],
    ids=str,
)
def test_recurrence_equals_chunks(dev, rng, dtype, B, T, Hk, Hv, DK, DV):
    heads = Heads(Hk, Hv, DK, DV)
    arrays = arrays_of(rng, (B, T, *heads), dtype, carried=True)
    want = {name: x for name, x in in_f64(arrays, heads).items() if name in ("out", "state")}
    call = {name: arrays[name] for name in ("qkv", "gates", "skip", "state")}
    call["out"] = np.full_like(arrays["d_out"], np.nan)
    got = run(dev, lambda dev, **t: ssd.recurrence(dev, **t, heads=heads), call)
    assert_close({name: got[name] for name in want}, want, dtype)
    if dtype is BF16:  # between tokens nothing is rounded
        np.testing.assert_allclose(got["state"], want["state"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_launch_equals_its_reference(dev, rng, monkeypatch, dtype, kind):
    """Each gets the inputs that the launches before have made, so that errors do not add up. BF16
    rounds the result and one factor of each product."""
    launched, launch = [], dev.launch

    def checked(kernel, grid, threads, args, *, consts=None, **options):
        if not kernel.entry.startswith("ssd_"):
            return launch(kernel, grid, threads, args, consts=consts, **options)
        named = {declared.name: x for declared, x in zip(kernel.declared, args, strict=True)}
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        named |= {name: dev.download(x) for name, x in tensors.items()}
        launch(kernel, grid, threads, args, consts=consts, **options)
        reference(kernel)(**named, dk=consts["DK"], dv=consts["DV"])
        for name in (d.name for d in kernel.declared if d.writes and d.name in tensors):
            got, want = (np.float64(x) for x in (dev.download(tensors[name]), named[name]))
            if kernel.entry == "ssd_scan_backward" and name == "d_qkv":  # the values' part
                got, want = got[..., -shape[3] * shape[5] :], want[..., -shape[3] * shape[5] :]
            error = 2e-6 if dtype is F32 else 2**-7
            assert np.linalg.norm(got - want) <= error * np.linalg.norm(want), name
        launched.append(kernel.entry)
        return None

    shape = (1, 100, 1, 2, 32, 64)
    arrays = arrays_of(rng, shape, dtype, **KINDS[kind])
    monkeypatch.setattr(dev, "launch", checked)
    on_device(dev, arrays, Heads(*shape[2:]))
    entries = ("prepare", "scan", "prepare", "states", "scan_backward", "gradients", "sum")
    assert launched == [f"ssd_{entry}" for entry in entries]


def test_workspace_and_work_are_what_is_documented():
    B, T, heads = 2, 192, Heads(2, 32, 64, 64)
    _, Hv, DK, DV = heads
    dev = PlanDevice(GPU_SPEC)
    make = {"qkv": (B, T, heads.channels), "out": (B, T, Hv * DV), "skip": (Hv,)}
    tensors = {name: dev.alloc(name, shape, BF16, "Activations") for name, shape in make.items()}
    qkv, out, skip = tensors.values()
    gates = dev.alloc("gates", (B, T, 2, Hv), F32, "Activations")
    ssd.forward(dev, out, qkv, gates, skip, heads)
    ssd.backward(dev, qkv, gates, None, out, qkv, gates, skip, heads)
    tokens = B * T * Hv
    sums = -(-tokens // 16 // 256) * 256  # a F32 for 64 tokens, in whole steps of the stack
    keys = 2 * B * T * 2 * heads.Hk * DK * ceil_div(Hv // heads.Hk, 8)
    assert dev.stack.high_water_mark == tokens * (2 * (64 + 2 * DK * DV // 64) + 8) + sums + keys
    fmas = {
        "ssd_prepare": 2 * 64 * DK // 8,
        "ssd_scan": 2 * DK * DV + 64 * DV,
        "ssd_states": DK * DV,
        "ssd_scan_backward": 2 * DK * DV + 64 * DV,
        "ssd_gradients": 2 * DK * DV + 64 * DV,
    }
    assert dev.flops == {"ssd_sum": 0} | {entry: 2 * tokens * n for entry, n in fmas.items()}


WRONG = [
    ({"gates": ((1, 4, 2, 2), BF16)}, TypeError, "gates must be F32"),
    ({"gates": ((1, 4, 2, 1), F32)}, ValueError, "gates must have shape"),
    ({"qkv": ((1, 4, 128), BF16)}, ValueError, r"qkv must have shape \(1, 4, 256\)"),
    ({"skip": ((3,), BF16)}, ValueError, "skip must have shape"),
    ({"starts": ((1, 4), I32)}, ValueError, "a state belongs to one document"),
    ({"out": ((1, 4, 64), BF16)}, ValueError, "out must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((1, 4, 128), BF16), "qkv": ((1, 4, 256), BF16), "gates": ((1, 4, 2, 2), F32)}
    specs |= {"skip": ((2,), BF16), "state": ((1, 2, 64, 64), F32)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"ssd.(prepare|scan|forward): {text}"):
        ssd.forward(plan, **tensors, heads=Heads(1, 2, 64, 64))
