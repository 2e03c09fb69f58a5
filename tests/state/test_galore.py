"""GaLore changes matrices as galore-torch does, wherever they lie, and runs go on with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, F32, I32, I64, Limits
from llmq.base.errors import ConfigError, LlmqError
from llmq.options.presets import preset
from llmq.plan.memory import disk_use
from llmq.plan.plan import make_plan
from llmq.ref.common import step_scalars
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.rules import rule_of
from llmq.state.rules.galore import RENEWAL
from llmq.state.rules.rule import FullMatrix
from tests.harness import GPU_SPEC
from tests.harness import run as launch
from tests.harness import step_scalars as scalars_of
from tests.runs import make_workplace, trainer
from tests.sharded import (
    GPT2,
    QWEN2,
    UNTIED,
    assert_same,
    assert_same_run,
    batches,
    config,
    move_in_pieces,
    run,
)

GALORE = {"optimizer": "galore", "galore_rank": 8, "galore_period": 2}
FP32 = GALORE | {"model_dtype": "fp32"}
HOST = {"offload_master": True}
MASTER32 = GALORE | {"master_dtype": "fp32", "grad_accum_dtype": "fp32"}


# -- the rule --------------------------------------------------------------------------------------


class OfTorch:
    """A matrix by Algorithm 2 of arXiv 2403.03507, in the order of galore-torch's code. Epsilon and
    weight decay are those of torch.optim.AdamW."""

    def __init__(self, options):
        self.options, self.steps, self.m, self.v = options, 0, 0.0, 0.0

    def change(self, grad, ours, own):
        """The change at a learning rate of 1. ours: the projection of the run. own: by torch's SVD,
        of which only signs, which are any, are the run's."""
        o, right = self.options, grad.shape[0] >= grad.shape[1]
        if not own:
            self.p = ours if right else ours.T
        elif self.steps % o.galore_period == 0:
            u, _, vh = torch.linalg.svd(grad, full_matrices=False)
            p = (vh if right else u.T)[: o.galore_rank]
            p = p * (p * ours).sum(dim=1, keepdim=True).sign()
            self.p = p if right else p.T
        self.steps += 1
        low = grad @ self.p.T if right else self.p.T @ grad
        self.m = o.beta_1 * self.m + (1 - o.beta_1) * low
        self.v = o.beta_2 * self.v + (1 - o.beta_2) * low**2
        root = (self.v / (1 - o.beta_2**self.steps)).sqrt()
        step = self.m / (1 - o.beta_1**self.steps) / (root + o.adam_epsilon)
        return o.galore_scale * (step @ self.p if right else self.p @ step)


@pytest.mark.parametrize("of", [QWEN2, GPT2], ids=["fused", "conv1d"])
@pytest.mark.parametrize("own", [False, True], ids=["given projections", "own projections"])
def test_steps_are_those_of_galore_torch(of, own):
    """Gradients of a run go to torch too, with the run's projections, or with torch's SVD, whose
    signs are any. With rank 40 a renewal has as many directions as a matrix has columns."""
    most = 40 if own else 16
    more = FP32 | {"adam_epsilon": 1e-4, "galore_rank": most, "galore_scale": 0.5}
    cfg = config(1, 1, **more)

    def program(session):
        dev, step = session.dev, session.step
        pieces = step.optimizer.matrix_states["galore.projection"]
        of_torch: dict[tuple, OfTorch] = {}
        compared = set()
        for number in range(4):
            before = {name: dev.download(t) for name, t in step.weights.master.items()}
            session.train(number, lr=1e-2)
            scale = step_scalars(dev.download(step.scalars))["grad_scale"]
            for slab in (slab for slab in step.table if slab.is_block):
                grads, after = (
                    dev.download(t[slab.name]) for t in (step.grads.shard, step.weights.master)
                )
                kept, at = dev.download(pieces[slab.name].tensor), 0
                for start, rows, columns in slab.matrices():
                    part = slice(start, start + rows * columns)
                    grad = torch.tensor(grads[part] * scale).reshape(rows, columns)
                    shorter = min(rows, columns)
                    rank = min(most, shorter)
                    ours = torch.tensor(kept[at : at + rank * shorter]).reshape(rank, shorter)
                    at += -(-rank * shorter // 128) * 128
                    np.testing.assert_allclose(ours @ ours.T, np.eye(rank), atol=1e-5)
                    rule = of_torch.setdefault((slab.name, start), OfTorch(cfg))
                    want = rule.change(grad, ours, own).numpy()
                    old = before[slab.name][part].reshape(rows, columns)
                    want = 1e-2 * (want + cfg.weight_decay * old)
                    moved = old - after[part].reshape(rows, columns)
                    error = np.linalg.norm(moved - want) / np.linalg.norm(want)
                    # The order of sums in F32 turns vectors of nearly equal singular values.
                    # Vectors of values below 2^-12 of the largest are lost in its square: any are
                    # as good.
                    values = torch.linalg.svdvals(grad)
                    if own and values[rank - 1] < 1e-3 * values[0]:
                        continue
                    compared.add(number)
                    assert error < (1e-2 if own else 1e-5), (slab.name, start, error)
        assert {0, 2} <= compared if own else len(compared) == 4
        return [session.step.result(session.train(4))]

    run(1, 1, program, of=of, **more)


def test_a_skipped_step_keeps_the_projections():
    def program(session):
        dev, step = session.dev, session.step
        session.train(0)
        groups = step.optimizer.matrix_states
        tensors = [p.tensor for pieces in groups.values() for p in pieces.values()]
        before = [dev.download(tensor) for tensor in tensors]
        assert all(x.any() for x in before)
        assert step.optimizer.rule.kind(2) == RENEWAL
        step.train(2, 1e-2, 1.0, session.batches(2), limits=Limits(norm=1e-9))
        for tensor, x in zip(tensors, before, strict=True):
            np.testing.assert_array_equal(dev.download(tensor), x)
        return [step.result(session.train(3))]

    run(1, 1, program, **FP32)


def test_matrices_without_a_gradient_have_orthonormal_directions():
    """Such as an expert without tokens, which may have some in the next step."""
    nothing = {"model_dtype": "fp32", "init_proj_to_zero": True}

    def program(session):
        step, dev = session.step, session.dev
        dev.zero(step.weights.master["layers.0"])
        step.weights.refresh()
        result = step.result(session.train(0))
        slab = next(slab for slab in step.table if slab.name == "layers.0")
        grads = dev.download(step.grads.shard["layers.0"])
        kept, at, still = step.optimizer.matrix_states["galore.projection"], 0, 0
        kept = dev.download(kept["layers.0"].tensor)
        for start, rows, columns in slab.matrices():
            shorter = min(rows, columns)
            ours = kept[at : at + 8 * shorter].reshape(8, shorter)
            at += -(-8 * shorter // 128) * 128
            still += not grads[start : start + rows * columns].any()
            # 16 random directions of 16 numbers are nearly dependent.
            np.testing.assert_allclose(ours @ ours.T, np.eye(8), atol=1e-3)
        assert still > 0
        return [result]

    run(1, 1, program, **GALORE | nothing)


def test_directions_are_leading_singular_vectors(dev, rng):
    """Matrices are tall or wide, with falling singular values, in the formats of gradients."""
    rule = rule_of(config(1, 1, **GALORE))
    for shape in ((48, 80), (80, 48)):
        u, _, vh = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        matrix = (u * np.geomspace(1, 1e-3, 48)) @ vh
        for dtype in (F32, BF16):

            def renew(dev, x, out, scalars, segments, **states):
                matrix = FullMatrix(x, out, states, {}, 0, 3, segments)
                rule.transform(dev, [matrix], scalars, RENEWAL)

            sizes = {state.name: state.size(rule.options, *shape) for state in rule.matrix_states}
            arrays = {
                "x": matrix[None].astype(dtype.numpy),
                "out": np.zeros((1, *shape), dtype.numpy),
                "scalars": scalars_of(grad_scale=1.0, beta1_correction=10, beta2_correction=20),
                "segments": np.array([[matrix.size, 1]]),
                "projection": np.zeros((1, sizes["projection"]), dtype.numpy),
                **{name: np.zeros((1, sizes[name]), np.float32) for name in "mv"},
            }
            made = launch(dev, renew, arrays)
            p = made["projection"][0].reshape(8, 48).astype(np.float64)
            want = u[:, :8].T if shape[0] < shape[1] else vh[:8]
            # Two multiplications bring the directions behind the first 16 down to 0.1^5 beside the
            # eighth; BF16 rounds the matrix and the projection.
            inner, off = np.abs(p @ want.T), 1e-3 if dtype is F32 else 2.0**-5
            np.testing.assert_allclose(inner, np.eye(8), atol=off)
            # AdamW's first step is the sign of each number.
            change = made["out"][0].astype(np.float64)
            np.testing.assert_allclose(np.linalg.norm(change), 0.25 * (8 * 80) ** 0.5, rtol=0.02)


@pytest.mark.parametrize("shape", [(3, 96), (80, 7), (64, 80)])
def test_a_gpu_takes_matrices_of_any_sides(shape):
    """A product begins on 16 bytes: a plan checks this of each."""
    rule, dev = rule_of(config(1, 1, **GALORE)), PlanDevice(GPU_SPEC)

    def whole(count):
        x, out = (dev.alloc(name, (count, *shape), BF16, "Adam V") for name in ("x", "out"))
        states = {
            state.name: dev.alloc(
                state.name,
                (count, state.size(rule.options, *shape)),
                state.format(rule.options, BF16),
                state.category,
            )
            for state in rule.matrix_states
        }
        return FullMatrix(x, out, states, {}, 0, 0, dev.alloc("segments", (1, 2), I64, "Adam V"))

    scalars = dev.alloc("scalars", (16,), I32, "Adam V")
    for kind in rule.kinds:
        rule.transform(dev, [whole(1), whole(2), whole(1)], scalars, kind)


# -- places ----------------------------------------------------------------------------------------


def first_alone(session):
    """Steps of which only the first of all micro-batches has targets: sums of one number."""
    dev, accum = session.dev, session.config.grad_accumulation
    results = []
    for step in range(3):
        all_of = batches(step, 0, 1, dev.mesh.size() * accum, session.vocab)
        masked = [(x, y if i == 0 else np.full_like(y, -100)) for i, (x, y) in enumerate(all_of)]
        own = masked[dev.mesh.rank * accum :][:accum]
        results.append(session.step.result(session.step.train(step, 1e-2, 0.0, own)))
    return results


@pytest.mark.parametrize("moments", ["fp32", "e4m3"])
def test_the_number_of_ranks_changes_no_bit(moments):
    """Three ranks take the last of four blocks alone; for four ranks slabs have gaps."""
    more = MASTER32 | {"opt_m_dtype": moments, "opt_v_dtype": moments}
    one = run(1, 12, first_alone, **more)
    assert all(x.astype(np.float32).any() for x in one.state["galore.projection"].values())
    for world, accum, level in ((2, 6, 1), (3, 4, 2), (4, 3, 3)):
        many = run(world, accum, first_alone, zero_level=level, **more)
        for group in one.state:
            if "scales" not in group or group.startswith("galore"):
                assert_same(many.state[group], one.state[group])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("of", "base", "more"),
    [
        (QWEN2, MASTER32 | {"opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"}, HOST),
        (UNTIED, GALORE | {"zero_level": 2}, HOST | {"offload_gradients": True}),
        (GPT2, MASTER32, HOST | {"use_zero_copy": True}),
        (QWEN2, GALORE | {"matmul_dtype": "e4m3", "zero_level": 2, "opt_m_dtype": "bf16"},
         HOST | {"shard_weights": True, "persistent_quants": True}),
    ],
    ids=["masters", "gradients", "zero-copy", "codes"],
)  # fmt: skip
def test_places_change_no_bit(monkeypatch, of, base, more, world):
    move_in_pieces(monkeypatch, 1024)
    assert_same_run(run(world, 1, of=of, **base), run(world, 1, of=of, **base | more))


def test_state_is_that_of_few_directions():
    """In plans and checkpoints, for the CPU and for a GPU."""
    model, sizes = preset("Qwen2.5-0.5B"), {}
    blocks = [slab for slab in weight_table(model) if slab.is_block]
    shapes = [sorted(shape) for slab in blocks for _, *shape in slab.matrices()]
    others = sum(slab.size for slab in weight_table(model) if not slab.is_block)
    eight = {"opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3", "galore_rank": 128}
    for name, more in {"adamw": {"optimizer": "adamw"}, "fp32": {}, "e4m3": eight}.items():
        cfg = replace(config(1, 1, **GALORE | {"galore_rank": 128} | more), model_dtype="bf16")
        plans = [make_plan(cfg, model, spec) for spec in (HOST_SPEC, replace(GPU_SPEC, memory=0))]
        used, on_gpu = (plan.usage.categories["device"] for plan in plans)
        assert used["Adam M"] == on_gpu["Adam M"]
        sizes[name] = used, disk_use(cfg, model, plans[0].placement).checkpoint
    moments = sum(min(128, short) * longer for short, longer in shapes)
    projections = 2 * sum(min(128, short) * short for short, _ in shapes)
    assert sizes["fp32"][0]["Adam M"] == 4 * (moments + others)
    assert sizes["fp32"][0]["Projections"] == projections
    # A scale of 4 bytes for each 128 codes.
    assert sizes["e4m3"][0]["Adam M"] == pytest.approx((moments + others) * (1 + 4 / 128), rel=1e-3)
    stored = sum(p.count for slab in blocks for p in slab.params)
    assert sizes["adamw"][1] - sizes["fp32"][1] == 8 * (stored - moments) - projections


# -- options and runs ------------------------------------------------------------------------------


def test_what_is_refused():
    for more, text in (
        ({"lora_rank": 4}, "--optimizer: galore is for the matrices of blocks"),
        ({"galore_rank": 12}, "--galore-rank: 12 is no multiple of 8"),
        ({"offload_opt_m": True}, "--offload-opt-m: moments of projected gradients stay on the"),
    ):
        with pytest.raises(ConfigError, match=text):
            config(1, 1, **GALORE | more).validate()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def test_any_number_of_ranks_goes_on(workplace):
    """From the middle of a period."""
    more = GALORE | {"galore_period": 3, "opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"}
    with trainer(2, zero_level=3, **more) as t:
        t.step()
        path = t.save()
        planned = disk_use(t.config, t.model, t.plan.placement).checkpoint
        weights, after = t.weights(), [t.step() for _ in range(3)]
        end = t.weights()
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert planned <= stored < planned + 60_000  # of headers
    for world in (2, 3):
        with trainer(world, **more) as t:
            t.load(path)
            assert_same(t.weights(), weights)
            results = [t.step() for _ in range(3)]
            assert t.usage == t.plan.usage
            if world == 2:
                assert_same(t.weights(), end)
                assert [r.loss for r in results] == [r.loss for r in after]


def test_moments_of_another_rank_are_refused(workplace):
    with trainer(**GALORE) as t:
        t.step()
        path = t.save()
    with (
        trainer(**GALORE | {"galore_rank": 16}) as t,
        pytest.raises(LlmqError, match=r"--galore-rank: .* moments of --galore-rank 8"),
    ):
        t.load(path)


def test_a_run_goes_on_with_another_optimizer(workplace, capsys):
    """Weights go on, and moments begin, with a renewal."""
    with trainer() as t:
        t.step()
        path, weights = t.save(), t.weights()
    with trainer(**GALORE) as t:
        t.load(path)
        assert "moments begin at zero" in capsys.readouterr().err
        assert_same(t.weights(), weights)
        t.step()
        moved = t.weights()
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    assert (moved[name] != weights[name]).any()
