"""The gated delta rule on a device against its reference in F64, and by what defines it."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.delta import delta_rule
from llmq.ops.delta.delta_rule import Heads
from llmq.ref.delta.delta_rule import CASES
from llmq.runtime.host_device import reference
from llmq.runtime.plan_device import PlanDevice
from tests.delta import BEGINS, GATES, Chunked, assert_documents_apart, gates_of, starts_of
from tests.harness import GPU_SPEC, devices_without, run

SMALL = {name: shape for name, shape in CASES.items() if "qwen" not in name}
RESULTS = ("out", "state", "d_qkv", "d_gates", "d_state")


def state_like(rng, shape) -> np.ndarray:
    """About as large as such texts leave it."""
    return (rng.normal(size=shape) / 4).astype(np.float32)


def arrays_of(rng, shape, dtype, *, begins: tuple = (), carried: bool = False) -> dict:
    """Inputs of both passes. begins: where documents do, the same in all sequences."""
    B, T, *sizes = shape
    heads = Heads(*sizes)
    decays = -0.2 * rng.exponential(size=(B, T, heads.Hv))
    states = state_like(rng, (2, B, heads.Hv, heads.DK, heads.DV)) if carried else (None, None)
    starts = starts_of(tuple(b for b in begins if b < T), T) if begins else None
    return {
        "qkv": rng.normal(size=(B, T, heads.channels)).astype(dtype.numpy),
        "gates": np.stack([decays, rng.uniform(size=decays.shape)], 2).astype(np.float32),
        "d_out": rng.normal(size=(B, T, heads.Hv * heads.DV)).astype(dtype.numpy),
        "starts": None if starts is None else np.repeat(starts, B, 0),
        "state": states[0],
        "d_state": states[1],
    }


def on_device(dev, arrays: dict, heads: Heads) -> dict:
    """Results of forward and backward on a device."""
    inputs = {name: arrays[name] for name in ("qkv", "gates", "starts", "state")}
    out = {"out": np.full_like(arrays["d_out"], np.nan)}
    first = run(dev, lambda dev, **t: delta_rule.forward(dev, **t, heads=heads), out | inputs)
    gradients = {
        **{"d_qkv": np.full_like(arrays["qkv"], np.nan), "d_out": arrays["d_out"]},
        **{"d_gates": np.full_like(arrays["gates"], np.nan), "d_state": arrays["d_state"]},
    }
    call = inputs | gradients
    found = run(dev, lambda dev, **t: delta_rule.backward(dev, **t, heads=heads), call)
    if first["state"] is not None:  # backward goes to the state behind, too
        np.testing.assert_array_equal(first["state"], found["state"])
    found["out"] = first["out"]
    return {name: found[name] for name in RESULTS if found[name] is not None}


def in_f64(arrays: dict, heads: Heads) -> dict:
    """Results of forward and backward of the reference, in F64."""
    wide = {
        name: x if x is None or x.dtype == np.int32 else x.astype(np.float64)
        for name, x in arrays.items()
    }
    chunked = Chunked(wide["qkv"], wide["gates"], heads, wide["starts"], wide["state"])
    found = {"out": chunked.forward(), "state": chunked.state, "d_state": wide["d_state"]}
    found["d_qkv"], found["d_gates"] = chunked.backward(wide["d_out"], wide["d_state"])
    return {name: found[name] for name in RESULTS if found[name] is not None}


def assert_close(got: dict, want: dict, dtype) -> None:
    """F32: rounding of sums. BF16: states, changes and squares are rounded to 8 bits where they are
    multiplied, one after the other; gradients of decays are differences of such sums, so that of 25
    draws one had an error of 1.9 %."""
    assert got.keys() == want.keys()
    for name, y in want.items():
        x = got[name].astype(np.float64)
        if dtype is F32:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.abs(y).max(), err_msg=name)
        else:
            error = 2**-5 if name == "d_gates" else 2**-6
            assert np.linalg.norm(x - y) <= error * np.linalg.norm(y), name


def check(dev, arrays: dict, heads: Heads, dtype) -> dict:
    """The device's results, which are the reference's."""
    got = on_device(dev, arrays, heads)
    assert_close(got, in_f64(arrays, heads), dtype)
    return got


KINDS = {"plain": {}, "documents": {"begins": (0, 1, 3, 40, 64, 68)}, "carried": {"carried": True}}
EQUAL = [  # each kind in each type, for whole chunks and others
    *(("one_token", F32, kind) for kind in KINDS),
    *(("ragged", F32, kind) for kind in ("documents", "carried")),
    *(("three_chunks", F32, kind) for kind in ("plain", "carried")),
    *(("head_128", dtype, "plain") for dtype in (F32, BF16)),
    *(("ragged", BF16, kind) for kind in KINDS),
    *(("whole_chunks", BF16, kind) for kind in ("plain", "carried")),
]


@pytest.mark.parametrize("name, dtype, kind", EQUAL, ids=str)
def test_equals_reference(dev, rng, name, dtype, kind):
    shape = SMALL[name]
    check(dev, arrays_of(rng, shape, dtype, **KINDS[kind]), Heads(*shape[2:]), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129])
def test_any_number_of_tokens(dev, rng, dtype, T):
    """About borders of tiles of 16 and of chunks; several sequences, of which one's last chunk is
    not the next one's first."""
    shape = (2, T, 1, 1, 32, 32)
    check(dev, arrays_of(rng, shape, dtype, carried=True), Heads(*shape[2:]), dtype)


@pytest.mark.parametrize(
    "Hk, Hv, DK, DV",
    [(1, 3, 96, 96), (2, 4, 32, 128), (1, 1, 128, 32), (3, 3, 64, 96), (1, 4, 64, 64)],
)
def test_any_heads_in_bf16(dev, rng, Hk, Hv, DK, DV):
    """Widths of which each tile copies another part, and key heads of one or more value heads."""
    shape = (1, 70, Hk, Hv, DK, DV)
    check(dev, arrays_of(rng, shape, BF16, carried=True), Heads(*shape[2:]), BF16)


@pytest.mark.parametrize("Hk, Hv, DK, DV", [(1, 2, 128, 128), (2, 2, 96, 32), (1, 3, 32, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_gpus_with_little_shared_memory(generic, rng, kind, Hk, Hv, DK, DV):
    """Kernels for little shared memory load fewer rows of states, and none ahead."""
    shape = (2, 75, Hk, Hv, DK, DV)
    check(generic, arrays_of(rng, shape, BF16, **KINDS[kind]), Heads(*shape[2:]), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_gates_at_their_limits(dev, rng, dtype, kind):
    """States that nothing is taken off, or all at once; changes that write nothing, or write over
    all. The gradient of a beta of 0, which sigmoid's slope is 0 for, is not computed."""
    B, T, heads = 1, 130, Heads(1, 2, 32, 32)
    arrays = arrays_of(rng, (B, T, *heads), dtype, carried=True)
    arrays["gates"] = gates_of(kind, B, T, heads.Hv).astype(np.float32)
    got, want = on_device(dev, arrays, heads), in_f64(arrays, heads)
    writes = arrays["gates"][:, :, 1] > 0
    of_betas = got["d_gates"][:, :, 1]
    assert not of_betas[~writes].any()
    want["d_gates"][:, :, 1] *= writes
    assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_documents(dev, rng, dtype, begins):
    shape = (1, 150, 1, 1, 32, 32)
    arrays = arrays_of(rng, shape, dtype, begins=begins)
    got = check(dev, arrays, Heads(*shape[2:]), dtype)
    assert not got["d_gates"][:, list(begins), 0].any()  # nothing is in front to decay


def parts_of(arrays: dict, cut: int) -> list[dict]:
    """The tokens before and behind the cut; states are the whole text's."""
    by_token = ("qkv", "gates", "d_out")
    return [
        arrays | {name: arrays[name][:, part] for name in by_token}
        for part in (slice(cut), slice(cut, None))
    ]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_text_in_two_parts_is_the_text(dev, rng, dtype, cut):
    """States go on from part to part and gradients of states back, bitwise between two chunks."""
    heads = Heads(1, 2, 32, 32)
    arrays = arrays_of(rng, (1, 150, *heads), dtype, carried=True)
    whole, (front, behind) = on_device(dev, arrays, heads), parts_of(arrays, cut)
    behind["state"] = on_device(dev, front, heads)["state"]
    last = on_device(dev, behind, heads)
    front["d_state"] = last["d_state"]
    first = on_device(dev, front, heads)
    got = {name: np.hstack([first[name], last[name]]) for name in ("out", "d_qkv", "d_gates")}
    got |= {"state": last["state"], "d_state": first["d_state"]}
    if cut % delta_rule.CHUNK:
        assert_close(got, {name: x.astype(np.float64) for name, x in whole.items()}, dtype)
    else:
        for name, x in whole.items():
            np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.mark.parametrize("dtype, T", [(F32, 70), (BF16, 70), (BF16, 128)], ids=str)
def test_sequences_and_heads_change_no_bit_of_each_other(dev, rng, dtype, T):
    """Whatever the others hold, even NaN. With whole chunks scans of Hopper go over many
    sequences."""
    B, heads = 2, Heads(2, 4, 64, 128) if T == 128 else Heads(2, 4, 32, 32)
    arrays = arrays_of(rng, (B, T, *heads), dtype, carried=True)
    want = on_device(dev, arrays, heads)
    other = {name: None if x is None else x.copy() for name, x in arrays.items()}
    for name in ("qkv", "gates", "d_out", "state", "d_state"):
        other[name][0] = np.nan
    got = on_device(dev, other, heads)
    for name, x in want.items():
        np.testing.assert_array_equal(got[name][1], x[1], err_msg=name)
        assert np.isnan(got[name][0].astype(np.float32)).any()
    # The first key head with its value heads.
    half = heads._replace(Hk=1, Hv=2)
    q, k, v = np.split(arrays["qkv"], [2 * heads.DK, 4 * heads.DK], axis=2)
    alone = {
        "qkv": np.concatenate([q[..., : heads.DK], k[..., : heads.DK], v[..., : 2 * heads.DV]], 2),
        "gates": arrays["gates"][..., :2],
        "d_out": arrays["d_out"][..., : 2 * heads.DV],
        "starts": None,
        **{name: arrays[name][:, :2] for name in ("state", "d_state")},
    }
    got = on_device(dev, alone, half)
    np.testing.assert_array_equal(got["out"], want["out"][..., : 2 * heads.DV])
    np.testing.assert_array_equal(got["d_gates"], want["d_gates"][..., :2])
    for name in ("state", "d_state"):
        np.testing.assert_array_equal(got[name], want[name][:, :2])
    d_q, d_k, d_v = np.split(want["d_qkv"], [2 * heads.DK, 4 * heads.DK], axis=2)
    d_alone = [d_q[..., : heads.DK], d_k[..., : heads.DK], d_v[..., : 2 * heads.DV]]
    np.testing.assert_array_equal(got["d_qkv"], np.concatenate(d_alone, 2))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_bit_depends_on_other_documents(dev, rng, dtype):
    """Nor does any depend on a second run."""
    heads = Heads(1, 1, 32, 32)
    arrays = arrays_of(rng, (1, 70, *heads), dtype, begins=(0, 20, 67))
    assert_documents_apart(lambda changed: on_device(dev, changed, heads), arrays)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_was_written_last_under_a_key_is_read(dev, dtype):
    """The rule's definition, without a reference: with betas of 1 the state is a table."""
    heads, order = Heads(1, 1, 64, 32), [0, 1, 2, 3, 1, 0, 63, 4, 1, 63] * 9
    asked = np.roll(order, 7)
    values = np.arange(90)[:, None] % 13 + np.arange(32)  # BF16 has them exactly
    qkv = np.concatenate([np.eye(64)[asked] * 32, np.eye(64)[order] * 64, values], -1)[None]
    gates = np.broadcast_to(np.array([0.0, 1.0])[:, None], (1, 90, 2, 1))
    arrays = {
        **{"qkv": qkv.astype(dtype.numpy), "gates": gates.astype(np.float32)},
        **{"d_out": np.zeros((1, 90, 32), dtype.numpy), "starts": None},
        **{"state": None, "d_state": None},
    }
    got = on_device(dev, arrays, heads)
    out = got["out"][0].astype(np.float64) * 8
    for t, key in enumerate(asked):
        written = [n for n in range(t + 1) if order[n] == key]
        want = values[written[-1]] if written else np.zeros(32)
        # Lengths are powers of two, beside which EPS is next to nothing.
        np.testing.assert_allclose(out[t], want, rtol=1e-6, atol=1e-6)
    assert not got["d_qkv"].any() and not got["d_gates"].any()


@pytest.mark.parametrize(
    "dtype, B, T, Hk, Hv, DK, DV",
    [(F32, 2, 5, 1, 2, 64, 32), (F32, 1, 1, 1, 3, 96, 96), (BF16, 2, 8, 2, 4, 32, 128),
     (BF16, 1, 3, 1, 1, 128, 64)],
    ids=str,
)  # fmt: skip
def test_recurrence_equals_chunks(dev, rng, dtype, B, T, Hk, Hv, DK, DV):
    heads = Heads(Hk, Hv, DK, DV)
    arrays = arrays_of(rng, (B, T, *heads), dtype, carried=True)
    want = {name: x for name, x in in_f64(arrays, heads).items() if name in ("out", "state")}
    call = {name: arrays[name] for name in ("qkv", "gates", "state")}
    call["out"] = np.full_like(arrays["d_out"], np.nan)
    got = run(dev, lambda dev, **t: delta_rule.recurrence(dev, **t, heads=heads), call)
    assert_close({name: got[name] for name in want}, want, dtype)
    if dtype is BF16:  # between tokens nothing is rounded
        np.testing.assert_allclose(got["state"], want["state"], rtol=2e-5, atol=2e-5)


# Bounds of a launch's error over the norm, by dtype: sums in another order; BF16 rounds the result
# and one factor of each product. Gradients of decays are sums of differences.
OF_LAUNCH = {F32: {}, BF16: {"d_gates": 2**-6}}  # differences of sums of rounded factors


def check_launches(dev, monkeypatch, dtype) -> list[str]:
    """From now on, check each launch of the device against the reference of the same inputs. The
    entries launched so far."""
    launched, launch = [], dev.launch
    tiles = np.arange(delta_rule.CHUNK) // 16

    def download(name, tensor):
        array = dev.download(tensor)
        if name == "inverse":  # above the tiles of its diagonal, nobody writes or reads
            array[..., tiles[:, None] < tiles] = 0
        return array

    def checked(kernel, grid, threads, args, *, consts, **options):
        named = {declared.name: x for declared, x in zip(kernel.declared, args, strict=True)}
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        named |= {name: download(name, x) for name, x in tensors.items()}
        launch(kernel, grid, threads, args, consts=consts, **options)
        reference(kernel)(**named, dk=consts["DK"], dv=consts["DV"])
        for name in (d.name for d in kernel.declared if d.writes and d.name in tensors):
            got, want = (np.float64(x) for x in (download(name, tensors[name]), named[name]))
            error = OF_LAUNCH[dtype].get(name, 2e-6 if dtype is F32 else 2**-8)
            assert np.linalg.norm(got - want) <= error * np.linalg.norm(want), name
        launched.append(kernel.entry)

    monkeypatch.setattr(dev, "launch", checked)
    return launched


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_launch_equals_its_reference(dev, rng, monkeypatch, dtype, kind):
    """Each gets the inputs that the launches before have made, so that errors do not add up."""
    shape = (1, 100, 1, 2, 32, 64)
    arrays = arrays_of(rng, shape, dtype, **KINDS[kind])
    monkeypatch.setattr(delta_rule._Call, "on_hopper", lambda call: False)
    launched = check_launches(dev, monkeypatch, dtype)
    on_device(dev, arrays, Heads(*shape[2:]))
    entries = ("prepare", "scan", "prepare", "states", "scan_backward", "gradients")
    assert launched == [f"delta_rule_{entry}" for entry in entries]


@pytest.mark.parametrize("B, T, Hk, Hv, DK", [(2, 128, 1, 2, 128), (1, 200, 2, 2, 64)])
def test_scans_of_hopper_round_as_others(hopper, rng, monkeypatch, B, T, Hk, Hv, DK):
    """Sums are F32 in both, of the same factors rounded to BF16, so that results are nearer to each
    other than any is to the reference."""
    heads = Heads(Hk, Hv, DK, 128)
    arrays = arrays_of(rng, (B, T, *heads), BF16, carried=True)
    scans = on_device(hopper, arrays, heads)
    monkeypatch.setattr(delta_rule._Call, "on_hopper", lambda call: False)
    for name, y in on_device(hopper, arrays, heads).items():
        x, y = scans[name].astype(np.float64), y.astype(np.float64)
        assert np.linalg.norm(x - y) <= 2**-10 * np.linalg.norm(y), name


def planned(dev, B: int, T: int, heads: Heads, dtype=BF16, state: bool = False) -> PlanDevice:
    """The device, on which both passes have been planned."""
    make = partial(dev.alloc, category="Activations")
    qkv, out = (
        make("x", (B, T, heads.channels), dtype),
        make("y", (B, T, heads.Hv * heads.DV), dtype),
    )
    gates = make("gates", (B, T, 2, heads.Hv), F32)
    of_text = [make("state", (B, *heads[1:2], heads.DK, heads.DV), F32) if state else None] * 2
    delta_rule.forward(dev, out, qkv, gates, heads, state=of_text[0])
    delta_rule.backward(dev, qkv, gates, out, qkv, gates, heads, None, *of_text)
    return dev


def test_workspace_and_work_are_what_is_documented():
    B, T, heads = 2, 192, Heads(2, 4, 64, 96)
    _, Hv, DK, DV = heads
    tokens = B * T * Hv
    dev = planned(PlanDevice(GPU_SPEC), B, T, heads)
    elements = 2 * 64 + DK + 2 * DV + 2 * DK * DV // 64  # of backward, which takes more
    assert dev.stack.high_water_mark == tokens * (2 * elements + 4 * 6)
    fmas = {
        "delta_rule_prepare": 2 * 64 * (3 * DK + DV),
        "delta_rule_scan": 3 * DK * DV + 64 * DV,
        "delta_rule_states": 2 * DK * DV,
        "delta_rule_scan_backward": 3 * DK * DV + 64 * DV,
        "delta_rule_gradients": 3 * DK * DV + 64 * (3 * DV + 4 * DK),
    }
    assert dev.flops == {entry: 2 * tokens * each for entry, each in fmas.items()}


@pytest.mark.parametrize(
    "B, T, DK, DV, dtype, state, chosen",
    [
        (4, 128, 128, 128, BF16, False, True),
        (4, 128, 64, 128, BF16, True, True),
        (1, 100, 128, 128, BF16, True, True),
        (2, 100, 128, 128, BF16, True, False),  # a chunk would have tokens of the next sequence
        (4, 128, 96, 128, BF16, False, False),
        (4, 128, 128, 64, BF16, False, False),
        (4, 128, 128, 128, F32, False, False),
    ],
    ids=str,
)
def test_when_scans_are_those_of_hopper(B, T, DK, DV, dtype, state, chosen):
    heads = Heads(1, 2, DK, DV)
    for dev in (PlanDevice(GPU_SPEC), *devices_without()):
        launched = set(planned(dev, B, T, heads, dtype, state).launches)
        scans = {f"delta_rule_{name}" for name in ("scan", "states", "scan_backward")}
        on_hopper = chosen and dev.spec.capability == GPU_SPEC.capability
        assert scans <= {name.removesuffix("_sm90" if on_hopper else "") for name in launched}
        assert any("sm90" in name for name in launched) == on_hopper


WRONG = [
    ({"gates": ((1, 4, 2, 2), BF16)}, TypeError, "gates must be F32"),
    ({"gates": ((1, 4, 2, 1), F32)}, ValueError, "gates must have shape"),
    ({"qkv": ((1, 4, 128), BF16)}, ValueError, r"qkv must have shape \(1, 4, 256\)"),
    ({"starts": ((1, 4), I32)}, ValueError, "a state belongs to one document"),
    ({"out": ((1, 4, 64), BF16)}, ValueError, "out must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((1, 4, 128), BF16), "qkv": ((1, 4, 256), BF16), "gates": ((1, 4, 2, 2), F32)}
    specs |= {"state": ((1, 2, 64, 64), F32)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"delta_rule.(prepare|scan|forward): {text}"):
        delta_rule.forward(plan, **tensors, heads=Heads(1, 2, 64, 64))


def test_heads_that_no_kernel_has_are_refused_on_a_gpu():
    plan = PlanDevice(GPU_SPEC)
    qkv = plan.alloc("qkv", (1, 4, 48), F32, "Activations")
    gates = plan.alloc("gates", (1, 4, 2, 1), F32, "Activations")
    with pytest.raises(
        ValueError, match="delta_rule_prepare: DK must be a multiple of 32 on a GPU, got 16"
    ):
        delta_rule.forward(plan, qkv, qkv, gates, Heads(1, 1, 16, 16))
