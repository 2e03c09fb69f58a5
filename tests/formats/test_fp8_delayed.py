"""Delayed fp8 scales in the whole step, on the CPU device."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.base.dtypes import E4M3_MAX
from llmq.formats.scales import HISTORY, SCALE_MARGIN
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.plan.plan import make_plan
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import place
from tests.models import exported, random_batch, trainer_for

T = 32
NAMES = "ln1 att ln2 mlp_act d_mlp d_mlp_up d_att d_qkv".split()  # a checkpoint's, of a layer
JIT = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "head_dtype": "e4m3", "seq_len": T}
DELAYED = JIT | {"fp8_recipe": "delayed"}


@pytest.fixture
def path():
    return exported("qwen2")


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [[random_batch(rng, T=T) for _ in range(2)] for _ in range(count)]


def trainer_on(path, **options):
    return trainer_for(path, **(DELAYED | {"grad_accumulation": 2} | options))


def history(step):
    """The state without its prefix, F64 (HISTORY,) by tensor."""
    state = step.extra_state()
    return {name.removeprefix("fp8_abs_max."): np.array(v) for name, v in state.items()}


def test_history_has_the_largest_values_of_each_step(path):
    steps = batches(HISTORY + 2)
    with trainer_on(path) as trainer:
        assert trainer._step.extra_state() == {}
        seen = []
        for step in steps:
            trainer.step(step)
            seen.append(history(trainer._step))
        blocks = trainer._step.model.operands.largest()
        scales = trainer._step.model.operands.scales.scales.numpy()[:, 0]
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in NAMES] + ["norm"]
    assert list(seen[0]) == names
    for i, name in enumerate(names):
        column = seen[-1][name]
        assert (column > 0).all() and len(column) == HISTORY
        np.testing.assert_array_equal(column[:-1], seen[-2][name][1:])
        assert scales[i] == np.float32(column.max()) * np.float32(SCALE_MARGIN) / np.float32(
            E4M3_MAX
        )
    newest = np.array([seen[-1][name][-1] for name in names[:-1]], np.float32)
    assert list(blocks) == [(layer, name) for layer in range(2) for name in NAMES]
    np.testing.assert_array_equal(newest, [*blocks.values()])
    # Two entries after the first step: of its rehearsal on the first micro-batch, and its own.
    rehearsed, own = np.array([seen[0][name][-2:] for name in names]).T
    assert (rehearsed > 0).all() and not seen[0]["norm"][:-2].any()
    assert (own >= 0.9 * rehearsed).all()  # of more tokens; scales change what comes after them


def test_the_rehearsal_changes_nothing_but_scales(path):
    """The first step is what it is with the history that the rehearsal leaves behind."""
    (step,) = batches(1)
    with trainer_on(path) as trainer:
        want, weights = trainer.step(step), trainer.weights()
        state = trainer._step.extra_state()
    rehearsed = {name: [0.0] * (HISTORY - 1) + [values[-2]] for name, values in state.items()}
    with trainer_on(path) as trainer:
        trainer._step.load_extra_state(rehearsed)
        assert trainer.step(step) == want
        assert trainer._step.extra_state() == state
        same = trainer.weights()
    assert all(np.array_equal(weights[name], same[name]) for name in weights)


def test_converges_as_just_in_time_scales_do(path):
    """One batch learned by heart: tensors change, and gradients shrink to a hundredth."""
    (step,) = batches(1)
    bf16 = {"matmul_dtype": "bf16", "head_dtype": "bf16", "fp8_recipe": "jit"}

    def losses(**options):
        with trainer_on(path, learning_rate=3e-3, steps=100, **options) as trainer:
            return np.array([trainer.step(step).loss for _ in range(45)])

    exact, jit, delayed = losses(**bf16), losses(fp8_recipe="jit"), losses()
    assert jit[-1] < 0.02 * jit[0]
    # Both round to the same codes, at other places of the same binades: they may not be further
    # apart than fp8 is from bf16, nor than some percent of a loss that falls by a factor of 50.
    assert np.abs(delayed / jit - 1).mean() < np.abs(jit / exact - 1).mean() < 0.05
    assert np.abs(delayed / jit - 1).max() < 0.05


def shrunk(state, factor):
    """A history of values that are too small by this factor."""
    return {name: [value / factor for value in values] for name, values in state.items()}


@pytest.mark.parametrize("recompute", [{}, {"recompute_block": True}, {"recompute_ffn": True}])
def test_saturated_elements_are_counted_once_and_scales_recover(path, recompute):
    steps = batches(2)
    # At most every element once: of ln1, att, ln2, the MLP's, and their gradients in two layers,
    # and of the head's input; two micro-steps of two sequences.
    C, F, Q = 64, 160, 128
    elements = 2 * 2 * T * (2 * (3 * C + F + 2 * C + 2 * F + Q) + C)
    with trainer_on(path) as trainer:
        for step in steps:
            assert trainer.step(step).saturated == 0
        state = trainer._step.extra_state()
    counts = []
    for factor in (SCALE_MARGIN * 0.75, 8, 1e6):
        with trainer_on(path, **recompute) as trainer:
            trainer._step.load_extra_state(shrunk(state, factor))
            counts.append(trainer.step(steps[0]).saturated)
            trainer.step(steps[0])  # what came after a saturated tensor was too small as well
            # In so small a model the largest of 128 gradients of keys may double now and then.
            assert trainer.step(steps[0]).saturated < elements / 10000
    assert counts[0] == 0 < counts[1] < counts[2]
    assert elements / 4 < counts[2] < elements


def test_saturation_is_the_same_however_much_is_recomputed(path):
    (first, second) = batches(2)
    with trainer_on(path) as trainer:
        trainer.step(first)
        state = shrunk(trainer._step.extra_state(), 5)
    found = []
    for options in ({}, {"recompute_block": True}, {"recompute_att": True, "recompute_norm": True}):
        with trainer_on(path, **options) as trainer:
            trainer._step.load_extra_state(state)
            found.append((trainer.step(second), trainer._step.extra_state()))
    assert found[0][0].saturated > 0
    assert found[1:] == found[:1] * 2


def test_evaluations_do_not_touch_the_scales(path):
    steps, held_out = batches(3), batches(1, seed=9)[0]
    runs = []
    for evaluates in (False, True):
        with trainer_on(path) as trainer:
            results, evaluated = [], []
            for step in steps:
                if evaluates:
                    evaluated.append(trainer._step.evaluate(held_out))
                results.append(trainer.step(step))
            runs.append((results, trainer._step.extra_state()))
    assert runs[0] == runs[1]
    assert all(result.saturated == 0 for result in evaluated)
    with trainer_on(path, fp8_recipe="jit") as trainer:
        # Before the first step there are no scales but those of the tensors themselves.
        assert trainer._step.evaluate(held_out).loss == evaluated[0].loss
        trainer.step(steps[0])
        assert trainer._step.evaluate(held_out).loss != evaluated[1].loss


def test_resume_is_bitwise_equal(path, tmp_path):
    steps = batches(5)
    with trainer_on(path) as trainer:
        for step in steps[:3]:
            trainer.step(step)
        saved, state = trainer.save(tmp_path / "ckpt"), trainer._step.extra_state()
        results = [trainer.step(step) for step in steps[3:]]
        weights = trainer.weights()
    with trainer_on(path) as trainer:
        trainer.load(saved)
        assert trainer._step.extra_state() == state
        assert [trainer.step(step) for step in steps[3:]] == results
        same = trainer.weights()
    assert all(np.array_equal(weights[name], same[name]) for name in weights)
    with trainer_on(path, gpus=2, grad_accumulation=1) as trainer:
        trainer.load(saved)
        states = trainer.ranks.run("state", lambda rank: rank.step.extra_state())
        assert states == [state, state]
        # The same tokens and scales; sums over ranks in another order, BF16 gradients at that.
        got = [trainer.step(step) for step in steps[3:]]
        assert got[0].loss == pytest.approx(results[0].loss, rel=1e-6)
        assert got[0].norm == pytest.approx(results[0].norm, rel=0.01)


def test_another_history_is_none(path, tmp_path):
    """A history of another recipe, model or length counts as none: the next step begins with a
    rehearsal."""
    (step,) = batches(1)
    with trainer_on(path) as trainer:
        want = trainer.step(step)
        state = trainer._step.extra_state()
    name = next(iter(state))
    for other in ({}, {name: state[name]}, state | {name: state[name][1:]}):
        with trainer_on(path) as trainer:
            trainer._step.load_extra_state(other)
            assert trainer.step(step) == want
    with trainer_on(path, fp8_recipe="jit") as trainer:
        trainer._step.load_extra_state(state)
        assert trainer._step.extra_state() == {}
        trainer.step(step)
    with trainer_on(path) as trainer:
        saved = trainer.save(tmp_path / "ckpt")
        trainer._step.load_extra_state(shrunk(state, 1e-3))
        trainer.step(step)
        trainer.load(saved)  # from before there was a history, and after there was one
        assert trainer.step(step) == want
        assert trainer._step.extra_state() == state


def poison(trainer, value):
    """Put a value into a norm's weight; returns what brings the old one back."""
    view = trainer._step.weights.get
    trainer._step.weights.gather("layers.0")
    weight = view("layers.0")["ln1"].numpy()
    old = weight[3]
    weight[3] = value

    def mend():
        weight[3] = old

    return mend


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinity_and_nan_reach_the_norm_and_leave_the_history_finite(path, value):
    steps = batches(3)
    with trainer_on(path) as trainer:
        trainer.step(steps[0])
        before = trainer.weights()
        mend = poison(trainer, value)
        assert not np.isfinite(trainer.step(steps[1]).norm)
        mend()
        seen = history(trainer._step)
        assert all(np.isfinite(column).all() for column in seen.values())
        assert seen["layers.0.ln1"][-1] == 0 < seen["layers.0.ln1"][-2]
        after = trainer.weights()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert np.isfinite(trainer.step(steps[2]).norm)


def test_tensors_of_zeros(tmp_path):
    """Projections that start at zero: no gradient passes them in the first step."""
    options = {"from_scratch": True, "init_proj_to_zero": True, "model": "tiny", "batch_size": 2}
    rng = np.random.default_rng(0)
    with trainer_for(tmp_path, **(DELAYED | options)) as trainer:
        V = trainer.model.vocab_size
        batch = tuple(rng.integers(0, V, (2, T)).astype(np.int32) for _ in range(2))
        results = [trainer.step([batch]) for _ in range(6)]
        seen = history(trainer._step)
    assert not seen["layers.0.d_mlp_up"][-6] and seen["layers.0.d_mlp_up"][-1] > 0
    assert [result.saturated for result in results[:2]] == [0, 0]
    losses = [result.loss for result in results]
    assert losses == sorted(losses, reverse=True) and np.isfinite(losses).all()


def counted_micro_step(model, recipe):
    """A device that has counted one micro-step of 64 tokens."""
    options = JIT | {"seq_len": 64, "fp8_recipe": recipe, "batch_size": 1, "grad_accumulation": 1}
    dev = PlanDevice(HOST_SPEC)
    config = TrainConfig(**options).normalized()
    step = Step(dev, model, config.for_step, place(config.for_step, weight_table(model)))
    if not step.model.operands.scales.ready:
        step.calibrate()
    dev.launches.clear()
    dev.bytes.clear()
    batch = (np.zeros((1, 64), np.int32),) * 2
    step.inbox.send(step.scalars_of(0, 0, 0.0, 0.0), batch, step.results)
    dev.graph(*step.micro_step(0, last=True))
    return dev


def test_kernels_write_codes_themselves():
    """Some tensors are left to quantize after the fact, and some are never written in BF16."""
    model = preset("Qwen2.5-0.5B")
    dev, jit = (counted_micro_step(model, recipe) for recipe in ("delayed", "jit"))
    L = model.num_layers
    # The attention's output, for its product and for that one's weight gradient; the head's input.
    assert dev.launches["quantize_scaled"] == 2 * L + 1
    assert dev.launches["quantize_transpose"] == dev.launches["quantize"] == 0
    assert dev.launches["abs_max"] == 0 < jit.launches["abs_max"]
    # Codes of the norms, forward and backward, and of the gradient of the logits.
    assert dev.launches["transpose_codes"] == 4 * L + 1
    assert sum(dev.launches.values()) < sum(jit.launches.values()) - 4 * L
    assert sum(dev.bytes.values()) < sum(jit.bytes.values())
    for kernel in ("norm_forward", "swiglu_forward_fp8", "rope_backward_fused"):
        assert dev.launches[kernel] >= L


def test_plan_counts_steps_without_a_rehearsal():
    flops = []
    for recipe in ("jit", "delayed"):
        config = TrainConfig(**(JIT | {"seq_len": 64, "fp8_recipe": recipe}), batch_size=2)
        plan = make_plan(config.normalized(), preset("Qwen2.5-0.5B"), HOST_SPEC)
        flops.append(plan.flops)
    assert flops[0] == flops[1]


@pytest.mark.parametrize("options", [{}, {"zero_level": 2}, {"zero_level": 3}])
def test_ranks_share_their_scales(path, options):
    steps = batches(3, seed=3)
    with trainer_on(path, gpus=2, grad_accumulation=1, **options) as trainer:
        results = [trainer.step(step) for step in steps]
        states = trainer.ranks.run("state", lambda rank: rank.step.extra_state())
    assert states[0] == states[1] != {}
    with trainer_on(path) as one:
        want = [one.step(step) for step in steps]
        alone = one._step.extra_state()
    # Scales of both ranks together are those of one that has both micro-batches; the rehearsal has
    # seen both here and one there, which changes the first scales a little.
    name = "layers.0.ln1"
    assert states[0][f"fp8_abs_max.{name}"][-3:] == pytest.approx(
        alone[f"fp8_abs_max.{name}"][-3:], rel=0.02
    )
    for result, expected in zip(results, want, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=0.002)
        assert result.tokens == expected.tokens


def test_saturation_is_counted_over_all_ranks(path):
    (step, following) = batches(2)
    with trainer_on(path) as one:
        one.step(step)
        state = shrunk(one._step.extra_state(), 10)
        one._step.load_extra_state(state)
        want = one.step(following)
    with trainer_on(path, gpus=2, grad_accumulation=1) as trainer:
        trainer.step(step)
        trainer.ranks.run("load", lambda rank: rank.step.load_extra_state(state))
        got = trainer.step(following)
    assert want.saturated > 0
    # Weights differ by the rounding of the first step's gradients.
    assert got.saturated == pytest.approx(want.saturated, rel=0.05)
