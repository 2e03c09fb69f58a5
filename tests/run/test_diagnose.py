"""Numbers that are not finite are found where they first appear; --debug-log-abs-max."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import llmq
from llmq.base.tensor import Tensor
from llmq.run import diagnose
from llmq.run.diagnose import MAX_SKIPPED, NanOrigin, find_origin
from llmq.runtime.host_device import HostDevice
from tests.conftest import gpu_problem
from tests.runs import T, make_workplace, options, records, train

B = 2
FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
LAYER = "model.layers.1"
ON_GPU = pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trainer(**changes):
    given = options(**{"steps": 20, **changes})
    return llmq.Trainer(**{name.replace("-", "_"): value for name, value in given.items()})


def batches(count=2):
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(1, 255, (2, B, T)).astype(np.int32)) for _ in range(count)]


def spoil(tensor: Tensor, value: float = np.nan) -> None:
    tensor.numpy().reshape(-1)[3] = value


@pytest.fixture
def spoiling(monkeypatch):
    """spoiling(entry, argument, name) puts a NaN (or value) into an argument of launches: of those
    of `entry`, with or without fp8 results, whose argument has this name (None: any), from the
    first-th one on; before=True: before it runs.
    """

    def patch(entry, argument, name=None, *, first=0, before=False, value=np.nan):
        launch, count = HostDevice.launch, 0

        def spoiled(self, kernel, grid, block, args, **rest):
            nonlocal count
            names = [a.name for a in kernel.declared]
            hit = kernel.entry.removesuffix("_fp8") == entry
            hit = hit and name in (None, args[names.index(argument)].name)
            count += hit
            hit = hit and count > first
            if hit and before:
                spoil(args[names.index(argument)], value)
            launch(self, kernel, grid, block, args, **rest)
            if hit and not before:
                spoil(args[names.index(argument)], value)

        monkeypatch.setattr(HostDevice, "launch", spoiled)

    return patch


def origin(trainer, given=None):
    """The origin found for a step that fails."""
    ticket = trainer.enqueue_step(given or batches())
    assert not math.isfinite(trainer.result(ticket).norm)
    return find_origin(trainer.ranks, 0, trainer.ranks.batches_of(ticket))


# -- where it is found ---------------------------------------------------------------------------


def test_a_weight():
    with trainer() as t:
        name = f"{LAYER}.mlp.up.weight"
        (piece,) = [p for p in t.ranks.first.pieces("weights") if p.slab.name == "layers.1"]
        param = next(p for p in piece.slab.params if p.name == name)
        element = piece.tensor.rows(param.offset + 5, param.offset + 6)
        t.dev.upload(element, np.array([np.inf], np.float32))
        assert origin(t) == NanOrigin(f"the weight {name}", in_weights=True)


@pytest.mark.parametrize(
    ("entry", "argument", "name", "found"),
    [
        ("embedding_forward", "out", None, "the input of layer 0"),
        ("norm_forward", "out", "ln1.0", "ln1 of layer 0"),
        ("attention_forward", "out", "att.1", "att of layer 1"),
        ("swiglu_forward", "out", "mlp_act.0", "mlp_act of layer 0"),
        ("matmul", "out", "mlp_up.1", "mlp_up of layer 1"),
        ("matmul", "out", "logits", "the losses"),
    ],
)
def test_an_activation(spoiling, entry, argument, name, found):
    spoiling(entry, argument, name)
    with trainer() as t:
        assert origin(t) == NanOrigin(f"{found}, micro-step 0")


def test_the_micro_step(spoiling):
    """The fourth launch: two in the step itself, then one in each forward pass that follows."""
    spoiling("swiglu_forward", "out", "mlp_act.1", first=3)
    with trainer() as t:
        ticket = t.enqueue_step(batches())
        found = find_origin(t.ranks, 0, t.ranks.batches_of(ticket))
        assert found == NanOrigin("mlp_act of layer 1, micro-step 1")


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up.weight", "model.layers.0.self_attn.qkv.weight"],
)
def test_a_gradient(spoiling, name):
    spoiling("matmul", "out", name)  # of this name are the weight, never written, and its gradient
    with trainer(grad_accumulation=1) as t:
        assert origin(t, batches(1)) == NanOrigin(f"the gradient of {name}")


@pytest.mark.parametrize(
    ("entry", "argument", "found"),
    [
        ("swiglu_forward", "up_gate", "mlp_act of layer 0, micro-step 0"),
        ("swiglu_backward", "d_out", "the gradient of mlp_up of layer 1"),
    ],
)
def test_what_fp8_products_measure(spoiling, entry, argument, found):
    """Nothing but the slots of largest values has seen these tensors."""
    spoiling(entry, argument, before=True)
    with trainer(**FP8, recompute_block=True) as t:
        assert origin(t) == NanOrigin(found)


FORMATS = {
    "bf16": {"model_dtype": "bf16"},
    "jit": FP8,
    "delayed": FP8 | {"fp8_recipe": "delayed"},
    "fp8_head": FP8 | {"head_dtype": "e4m3"},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", [f"{LAYER}.mlp.up.weight", "model.embed_tokens.weight"])
def test_an_infinite_weight(name, formats, device):
    """FP8 has no infinity: clamped, it would be a weight as any other."""
    with trainer(device=device, **formats) as t:
        t.step(batches())
        for piece in t.ranks.first.pieces("weights"):
            for param in piece.slab.params:
                if param.name == name:
                    element = piece.tensor.rows(param.offset + 7, param.offset + 8)
                    t.dev.upload(element, np.array([-np.inf], element.dtype.numpy))
        t.ranks.first.step.weights.refresh()
        assert origin(t) == NanOrigin(f"the weight {name}", in_weights=True)


@pytest.mark.parametrize("recipe", ["jit", "delayed"])
@pytest.mark.parametrize(
    ("entry", "argument", "found"),
    [
        ("swiglu_forward", "up_gate", "mlp_act of layer 0, micro-step 0"),
        ("swiglu_backward", "d_out", "the gradient of mlp_up of layer 1"),
    ],
)
def test_an_infinity_that_only_fp8_products_see(spoiling, recipe, entry, argument, found):
    """Their codes are finite, and so are the products."""
    with trainer(**FP8, fp8_recipe=recipe, recompute_block=True) as t:
        t.step(batches())
        before = t.weights()
        spoiling(entry, argument, before=True, value=np.inf)
        assert origin(t) == NanOrigin(found)
        after = t.weights()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_nothing_where_all_is_finite():
    for changes in ({}, FP8, {"recompute_block": True, "offload_residual": True}):
        with trainer(**changes) as t:
            ticket = t.enqueue_step(batches())
            before = t.weights()
            assert find_origin(t.ranks, 0, t.ranks.batches_of(ticket)) is None
            assert all(np.array_equal(before[name], after) for name, after in t.weights().items())


def test_looking_changes_no_later_step():
    with trainer(**FP8) as looked, trainer(**FP8) as plain:
        for t in (looked, plain):
            ticket = t.enqueue_step()
        find_origin(looked.ranks, 0, looked.ranks.batches_of(ticket))
        for _ in range(3):
            assert looked.step() == plain.step()
        assert looked.usage == looked.plan.usage


def test_it_is_the_batch_of_the_step_that_failed(spoiling, monkeypatch):
    """On a GPU the next step has been enqueued when a result is read."""
    launch = HostDevice.launch

    def spoiled(self, kernel, grid, block, args, **rest):
        launch(self, kernel, grid, block, args, **rest)
        if kernel.entry == "embedding_forward":
            values = dict(zip([a.name for a in kernel.declared], args, strict=True))
            if (values["tokens"].numpy() == 255).any():
                spoil(values["out"])

    monkeypatch.setattr(HostDevice, "launch", spoiled)
    bad = batches()
    bad[1][0][0, 0] = 255
    with trainer() as t:
        failing, good = t.enqueue_step(bad), t.enqueue_step(batches())
        assert math.isnan(t.result(failing).norm) and math.isfinite(t.result(good).norm)
        found = find_origin(t.ranks, 0, t.ranks.batches_of(failing))
        assert found == NanOrigin("the input of layer 0, micro-step 1")


def test_the_first_of_all_ranks(spoiling):
    """Ranks hold different parts of the weights, and see different tokens."""
    with trainer(gpus=2, grad_accumulation=1) as t:
        piece = t.ranks._ranks[1].pieces("weights")[0]  # the upper half of the embedding
        piece.tensor.numpy()[-1] = np.nan
        found = origin(t)
        assert found == NanOrigin("the weight model.embed_tokens.weight", in_weights=True)
    spoiling("matmul", "out", f"{LAYER}.mlp.up.weight")
    with trainer(gpus=2, grad_accumulation=1, zero_level=2) as t:
        assert origin(t) == NanOrigin(f"the gradient of {LAYER}.mlp.up.weight")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])])
@pytest.mark.parametrize("formats", [{"model_dtype": "bf16"}, FP8], ids=["bf16", "fp8"])
def test_finite_weights_that_overflow(device, formats):
    """Weights of 1e30 in a row of up and one of gate: their product is too large for F32."""
    with trainer(device=device, **formats) as t:
        t.step(batches())  # so that what follows is captured, on a GPU
        for piece in t.ranks.first.pieces("weights"):
            for param in piece.slab.params:
                if param.name == f"{LAYER}.mlp.up.weight":
                    values = t.dev.download(piece.slab.view(piece.tensor, param))
                    values[[0, len(values) // 2]] = 1e30
                    t.dev.upload(piece.slab.view(piece.tensor, param), values)
        t.ranks.first.step.weights.refresh()
        found = NanOrigin("mlp_act of layer 1, micro-step 0")
        assert origin(t) == origin(t) == found
        assert t.usage == t.plan.usage


# -- what the user is told -----------------------------------------------------------------------


def test_the_message_names_it_once(spoiling, monkeypatch, capsys):
    looks = []
    monkeypatch.setattr(
        diagnose, "find_origin", lambda *args: looks.append(args[1]) or find_origin(*args)
    )
    spoiling("swiglu_forward", "out", "mlp_act.1", first=2 * 2)  # from step 2 on
    assert train(steps=20, epochs=None) == 2
    out, err = capsys.readouterr()
    start = "changed no weights: the gradient norm is nan"
    assert f"WARNING: step 2 {start}; first seen in mlp_act of layer 1, micro-step 0\n" in out
    assert f"WARNING: step 3 {start}\n" in out
    assert out.count(start) == MAX_SKIPPED
    assert looks == [2]
    assert err.startswith("error: 10 steps in a row changed no weights, the last one is 11: ")
    assert "lower --learning-rate" in err and err.count("\n") == 1


def test_a_glitch(spoiling, monkeypatch, capsys):
    """Only once, so that it cannot be found again, and the run goes on."""
    launch, count = HostDevice.launch, 0

    def spoiled(self, kernel, grid, block, args, **rest):
        nonlocal count
        launch(self, kernel, grid, block, args, **rest)
        count += kernel.entry == "swiglu_forward"
        if kernel.entry == "swiglu_forward" and count == 5:
            spoil(args[0])

    monkeypatch.setattr(HostDevice, "launch", spoiled)
    assert train(steps=4) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert lines == [
        "WARNING: step 1 changed no weights: the gradient norm is nan; computed again all is finite"
    ]
    norms = [r["norm"] for r in records("step")]
    assert norms[1] is None and None not in norms[:1] + norms[2:]


def test_weights_that_are_lost_end_the_run(spoiling, capsys):
    spoiling("adamw", "param", first=4)  # of the second update, the first slab
    assert train(steps=20) == 2
    out, err = capsys.readouterr()
    name = "the weight model.embed_tokens.weight"
    assert out.count("changed no weights") == 1
    assert f"step 2 changed no weights: the gradient norm is nan; first seen in {name}\n" in out
    assert err.startswith(f"error: step 2: {name} is not finite any more: go on from the ")


# -- --debug-log-abs-max -------------------------------------------------------------------------

NAMES = "act.ln1.{} act.att{} act.ln2.{} act.swiglu.{} "
NAMES += "grad.qkv.{} grad.res_att.{} grad.mlp_up.{} grad.res_ffn.{}"


def test_abs_maxes_are_logged(capsys):
    assert train(steps=3, **FP8, debug_log_abs_max=2) == 0
    out = capsys.readouterr().out
    found = records("abs-maxes")
    assert [r["step"] for r in found] == [0, 2]
    with trainer(**FP8) as t:
        t.step()
        assert {e["name"]: e["value"] for e in found[0]["abs_maxes"]} == diagnose.abs_maxes(t.ranks)
    expected = {name for i in range(2) for name in NAMES.format(*[i] * 8).split()}
    for record in found:
        assert list(record) == ["log", "time", "step", "abs_maxes"]
        assert {entry["name"] for entry in record["abs_maxes"]} == expected
        assert all(entry["value"] > 0 for entry in record["abs_maxes"])
    line = r"^\[A\] step     (\d) \| largest: act\.\S+ [\d.]+, grad\.\S+ [\d.e-]+$"
    assert re.findall(line, out, re.MULTILINE) == ["0", "2"]


def test_abs_maxes_that_are_not_finite_are_null(spoiling, capsys):
    spoiling("swiglu_forward", "up_gate", before=True)
    assert train(steps=1, **FP8, debug_log_abs_max="", debug_time_breakdown="", force="") == 0
    (record,) = records("abs-maxes")
    values = {entry["name"]: entry["value"] for entry in record["abs_maxes"]}
    assert values["act.swiglu.0"] is None and values["act.ln1.0"] > 0
    assert "largest: act.swiglu.0 nan" in capsys.readouterr().out


def test_abs_maxes_of_all_ranks(spoiling):
    with trainer(gpus=2, grad_accumulation=1, **FP8) as t, trainer(**FP8) as one:
        given = batches()
        t.step(given)
        seen = []
        for batch in given:
            one.step([batch, batch])
            seen.append(diagnose.abs_maxes(one.ranks)["act.ln1.0"])
            one._origin.init(one.ranks)
        assert diagnose.abs_maxes(t.ranks)["act.ln1.0"] == max(seen)


def test_without_fp8_there_is_nothing_to_log(capsys):
    assert train(steps=1, debug_log_abs_max="") == 0
    assert "warning: --debug-log-abs-max=1 has no effect" in capsys.readouterr().err
    assert records("abs-maxes") == []
