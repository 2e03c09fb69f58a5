"""--mlp-dtype e4m3 in the whole step, on the CPU device: products write fp8 codes for the MLP."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2
from llmq.base.errors import ConfigError
from llmq.formats.scales import HISTORY, SCALE_MARGIN
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.run.diagnose import _activations, _measured_gradients, abs_maxes
from tests.models import exported, random_batch, trainer_for

T = 32
NAMES = tuple("ln1 att ln2 mlp_act d_mlp d_mlp_up d_att d_qkv".split())
RESULTS = ("mlp_up", "d_mlp_act")
DELAYED = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed", "seq_len": T}
CODES = DELAYED | {"mlp_dtype": "e4m3"}


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [[random_batch(rng, T=T) for _ in range(2)] for _ in range(count)]


def trainer_on(name="qwen2", **options):
    return trainer_for(exported(name), **(CODES | {"grad_accumulation": 2} | options))


def launches_of(trainer, step):
    """Kernels of a step, each with its tensors."""
    dev, seen = trainer._step.dev, []
    launch = dev.launch

    def noting(kernel, grid, block, args, **options):
        seen.append((kernel.entry, [a for a in args if hasattr(a, "dtype")]))
        launch(kernel, grid, block, args, **options)

    with dev.instead(launch=noting):
        trainer.step(step)
    return seen


@pytest.mark.parametrize("name, gradient", [("qwen2", "e4m3"), ("gemma3", "e5m2")])
def test_nothing_between_the_products_of_an_mlp_is_wider_than_a_byte(name, gradient):
    first, second = batches(2)
    with trainer_on(name, gradient_dtype=gradient) as trainer:
        trainer.step(first)
        seen = launches_of(trainer, second)
        layers = trainer.model.num_layers
    micro_steps = 2 * layers
    swiglu = [tensors for entry, tensors in seen if entry.startswith("swiglu")]
    assert len(swiglu) == 2 * micro_steps
    assert all(t.dtype != BF16 for tensors in swiglu for t in tensors)
    written = [tensors[0] for entry, tensors in seen if entry == "matmul_fp8"]
    written = {(t.name, t.dtype) for t in written if "mlp_" in t.name}
    codes = {"e4m3": E4M3, "e5m2": E5M2}[gradient]
    kept = {(f"mlp_up.{layer}", E4M3) for layer in range(layers)}
    assert {w for w in written if "branch" not in w[0]} == kept | {("d_mlp_act", codes)}


def test_learns_as_without_codes():
    """One batch learned by heart: the losses are no further away than fp8's are from bf16's."""
    (step,) = batches(1)

    def losses(**options):
        with trainer_on(learning_rate=3e-3, steps=100, **options) as trainer:
            return np.array([trainer.step(step).loss for _ in range(25)])

    bf16 = losses(matmul_dtype="bf16", fp8_recipe="jit", mlp_dtype="bf16")
    fp8, codes = losses(mlp_dtype="bf16"), losses()
    assert codes[-1] < 0.3 * codes[0]
    assert (codes != fp8).all()
    # The loss falls fast: the distances are up to some percent of it at each step.
    assert np.abs(codes / fp8 - 1).mean() < 1.5 * np.abs(fp8 / bf16 - 1).mean() < 0.05


RECOMPUTED = (
    {"recompute_swiglu": True},
    {"recompute_ffn": True, "recompute_layers": "1"},
    {"recompute_block": True, "attn_bwd_chunks": 2},
    {"keep_transposed": False, "offload_residual": True, "recompute_norm": True},
)


def test_what_is_recomputed_changes_no_bit():
    """Also of counts, where values are too large for their codes, and of the next scales."""
    first, second = batches(2)
    with trainer_on() as trainer:
        trainer.step(first)
        state = trainer._step.extra_state()
    small = {name: [value / 5 for value in values] for name, values in state.items()}
    found = []
    for options in ({}, *RECOMPUTED):
        with trainer_on(**options) as trainer:
            trainer._step.load_extra_state(small)
            found.append((trainer.step(second), trainer._step.extra_state()))
    assert found[0][0].saturated > 0
    assert found[1:] == found[:1] * len(RECOMPUTED)


def test_saturated_codes_of_products_are_counted_and_scales_recover():
    steps = batches(2)
    with trainer_on() as trainer:
        assert [trainer.step(step).saturated for step in steps] == [0, 0]
        state = trainer._step.extra_state()
    names = {name.rpartition(".")[2] for name in state}
    assert names == {*NAMES, *RESULTS}
    counts = []
    for name in RESULTS:  # only these: what else is too large follows from what they clamp
        small = {
            key: [value / 64 for value in values] if key.endswith(f".{name}") else values
            for key, values in state.items()
        }
        with trainer_on() as trainer:
            trainer._step.load_extra_state(small)
            counts.append(trainer.step(steps[0]).saturated)
            found = trainer._step.model.operands.scales
            slot = f"layers.1.{name}"
            count = int(trainer._step.dev.download(found._saturated_of[slot])[0])
            seen = trainer._step.extra_state()[f"fp8_abs_max.{slot}"][-1]
            assert trainer.step(steps[0]).saturated < counts[-1] / 100
        elements = 2 * 2 * T * 160 * (2 if name == "mlp_up" else 1)
        assert 0.05 * elements < count < elements
        # The largest value is that of before clamping.
        assert seen > 16 * max(small[f"fp8_abs_max.{slot}"])


def test_history_and_scales_of_products():
    steps = batches(3)
    with trainer_on() as trainer:
        for step in steps:
            trainer.step(step)
        scales = trainer._step.model.operands.scales
        state, limit = trainer._step.extra_state(), {"mlp_up": 448, "d_mlp_act": 448}
        for name in RESULTS:
            history = state[f"fp8_abs_max.layers.0.{name}"]
            assert len(history) == HISTORY and history[-1] > 0
            scale = scales.scale(f"layers.0.{name}").numpy()[0]
            assert scale == np.float32(max(history)) * np.float32(SCALE_MARGIN) / np.float32(
                limit[name]
            )
            product = scales.product(f"layers.0.{name}", None)
            assert product.factor.numpy()[0] == np.float32(1) / scale
        logged = abs_maxes(trainer.ranks)
        seen = _activations(trainer._step) + _measured_gradients(trainer._step)
    assert logged["act.mlp_up.1"] == state["fp8_abs_max.layers.1.mlp_up"][-1]
    assert logged["grad.swiglu.0"] == state["fp8_abs_max.layers.0.d_mlp_act"][-1]
    assert len(logged) == 2 * len(NAMES + RESULTS)
    # They are looked at where a NaN is searched for, of which codes have no largest value.
    for name, of_both in (("mlp_up", "mlp_up"), ("mlp_act", "swiglu")):
        values = [entry.value for entry in seen if entry.name == f"{name} of layer 0"]
        assert values == [logged[f"act.{of_both}.0"], logged[f"grad.{of_both}.0"]]


def test_resume_and_another_format_of_the_mlp(tmp_path):
    steps = batches(4)
    with trainer_on() as trainer:
        for step in steps[:2]:
            trainer.step(step)
        saved = trainer.save(tmp_path / "ckpt")
        results = [trainer.step(step) for step in steps[2:]]
    with trainer_on() as trainer:
        trainer.load(saved)
        assert [trainer.step(step) for step in steps[2:]] == results
    with trainer_on(mlp_dtype="bf16") as trainer:
        trainer.load(saved)  # the other tensors' scales go on
        assert trainer._step.model.operands.scales.ready
        other = trainer.save(tmp_path / "other")
        assert trainer.step(steps[2]).loss == pytest.approx(results[0].loss, rel=1e-3)
    with trainer_on() as trainer:
        trainer.load(other)  # of products there are none
        assert not trainer._step.model.operands.scales.ready
        assert trainer.step(steps[2]).loss == pytest.approx(results[0].loss, rel=1e-3)


def test_evaluations_touch_no_scale_and_need_none():
    steps, held_out = batches(2), batches(1, seed=9)[0]
    runs, evaluated = [], []
    for evaluates in (False, True):
        with trainer_on() as trainer:
            results = []
            for step in steps:
                if evaluates:
                    evaluated.append(trainer._step.evaluate(held_out).loss)
                results.append(trainer.step(step))
            runs.append((results, trainer._step.extra_state()))
    assert runs[0] == runs[1]
    with trainer_on(mlp_dtype="bf16") as trainer:
        assert trainer._step.evaluate(held_out).loss == pytest.approx(evaluated[0], rel=1e-3)


def test_gradients_are_near_those_without_codes():
    """Also of the biases, which are sums of the tensor and not of its codes."""
    (step,) = batches(1)
    found = []
    for options in ({"matmul_dtype": "bf16", "fp8_recipe": "jit"}, {}, {"mlp_dtype": "e4m3"}):
        with trainer_on("llama_biases", **({"mlp_dtype": "bf16"} | options)) as trainer:
            trainer.step(step)
            gradients = trainer.gradients()
        found.append({n: g.astype(np.float32) for n, g in gradients.items()})
    bf16, fp8, codes = found

    def error(gradients, names):
        squares = [np.square(gradients[n] - bf16[n]).sum() for n in names]
        return np.sqrt(sum(squares) / sum(np.square(bf16[n]).sum() for n in names))

    # Two more roundings to three bits, of random sign, among many that there are.
    assert error(fp8, bf16) < error(codes, bf16) < 1.2 * error(fp8, bf16) < 0.2
    for name in bf16:
        assert 0 < error(codes, [name]) < 2 * error(fp8, [name]) + 0.02, name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_infinity_and_nan_reach_the_norm(value):
    first, second = batches(2)
    with trainer_on() as trainer:
        trainer.step(first)
        trainer._step.weights.gather("layers.0")
        trainer._step.weights.get("layers.0")["ln2"].numpy()[3] = value
        assert not np.isfinite(trainer.step(second).norm)
        state = trainer._step.extra_state()
    assert all(np.isfinite(values).all() for values in state.values())


def test_the_plan_is_what_a_trainer_takes():
    (step,) = batches(1)
    with trainer_on() as trainer:
        trainer.step(step)
        trainer._step.evaluate(step)
        sizes = trainer._step.dev.sizes()
        assert sizes == trainer.plan.usage.sizes


def test_refused():
    options = {flag.replace("_", "-"): value for flag, value in CODES.items()}
    with pytest.raises(ConfigError, match="--mlp-dtype: e4m3 is for MLPs with a gate"):
        make_config(options).validate_with(preset("gpt2"))
    make_config(options).validate_with(preset("tiny"))


def test_ranks_share_their_scales():
    steps = batches(2, seed=3)
    with trainer_on(gpus=2, grad_accumulation=1, zero_level=2) as trainer:
        results = [trainer.step(step) for step in steps]
        states = trainer.ranks.run("state", lambda rank: rank.step.extra_state())
    assert states[0] == states[1] and "fp8_abs_max.layers.1.d_mlp_act" in states[0]
    with trainer_on() as one:
        want = [one.step(step) for step in steps]
    for result, expected in zip(results, want, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=0.002)
