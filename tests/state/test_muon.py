"""Muon changes matrices as torch.optim.Muon does, wherever they lie, and runs go on with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmq.arch import ARCHITECTURES
from llmq.base.dtypes import BF16, F32
from llmq.base.errors import ConfigError, LlmqError
from llmq.options.presets import preset
from llmq.plan.memory import disk_use
from llmq.plan.placement_table import placement_table
from llmq.plan.plan import make_plan
from llmq.ref.common import step_scalars
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state import rules
from llmq.state.params import weight_table
from llmq.state.placement import place, table_of
from llmq.state.rules import rule_of
from llmq.state.rules.muon import COEFFICIENTS, LEAST_SIDE, MOMENTUM, ROWS_DECAY, STEPS
from llmq.state.rules.rule import FullMatrix
from tests.harness import GPU_SPEC, host_device
from tests.harness import run as launch
from tests.mixture import EXPERTS, Mixture
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

MUON, NORMUON = {"optimizer": "muon"}, {"optimizer": "normuon"}
MASTER32 = MUON | {"master_dtype": "fp32", "grad_accum_dtype": "fp32"}
HOST = {"offload_master": True, "offload_opt_m": True}


# -- the rule --------------------------------------------------------------------------------------


def of_torch(weights, table, options):
    """Tensors of each Hugging Face matrix and of all else, and torch's two optimizers."""
    found, matrices, others = {}, [], []
    for slab in table:
        for p in slab.params:
            parts = [(part.start, part.stop) for part in p.hf] if slab.is_block else [(0, p.rows)]
            found[p.name] = [
                (start, stop, torch.nn.Parameter(torch.tensor(weights[p.name][start:stop])))
                for start, stop in parts
            ]
            tensors = [tensor for *_, tensor in found[p.name]]
            if slab.is_block:
                matrices += tensors
            else:
                decay = options.weight_decay if p.decay else 0.0
                others.append({"params": tensors, "weight_decay": decay})
    muon = torch.optim.Muon(
        matrices,
        lr=options.muon_lr,
        weight_decay=options.weight_decay,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    betas = (options.beta_1, options.beta_2)
    adamw = torch.optim.AdamW(
        others, lr=options.learning_rate, betas=betas, eps=options.adam_epsilon
    )
    return found, (muon, adamw)


@pytest.mark.parametrize(
    ("of", "more"),
    [
        (QWEN2, {"muon_lr": 3e-3}),
        (GPT2, {"muon_lr": 3e-3, "weight_decay": 0.5}),
    ],
    ids=["fused", "rates apart"],
)
def test_steps_are_those_of_torch(of, more):
    """Gradients of a run go to torch's optimizers, too; q, k and v, gate and up are fused."""
    of = replace(of, num_layers=2)
    more = MUON | {"model_dtype": "fp32", "adam_epsilon": 1e-3, "learning_rate": 1e-2} | more
    cfg = config(1, 1, **more)

    def program(session):
        dev, step = session.dev, session.step
        masters = step.weights.master

        def arrays(tensors):
            return {
                p.name: dev.download(slab.view(tensors[slab.name], p)).astype(np.float32)
                for slab in step.table
                for p in slab.params
            }

        found, optimizers = of_torch(arrays(masters), step.table, cfg)
        for number in range(4):
            before = arrays(masters)
            result = step.result(session.train(number, lr=1e-2))
            scale = step_scalars(dev.download(step.scalars))["grad_scale"]
            grads, after = arrays(step.grads.shard), arrays(masters)
            for name, parts in found.items():
                for start, stop, tensor in parts:
                    tensor.data = torch.tensor(before[name][start:stop])
                    tensor.grad = torch.tensor(grads[name][start:stop] * scale)
            for optimizer in optimizers:
                optimizer.step()
            for name, parts in found.items():
                for start, stop, tensor in parts:
                    moved = after[name][start:stop] - before[name][start:stop]
                    want = tensor.detach().numpy() - before[name][start:stop]
                    # BF16 moves torch's own changes by 1.5 % from those of exact iterations. The
                    # order of sums, and the factor in the last product, move other roundings.
                    error = np.linalg.norm(moved - want) / np.linalg.norm(want)
                    assert error < 2.0**-6, (name, start, error)
        return [result]

    run(1, 1, program, of=of, **more)


def whole(x, out, rows):
    return FullMatrix(x, out, {} if rows is None else {"rows": rows}, {}, 0, 0, None)


def transform(rule, dev, matrices):
    rule.transform(dev, matrices, None, rule.kinds[0])


def change(*matrices, dev=None, rows=None, **more):
    """Changes of matrices of equal sizes by the rule. rows: state of rows, updated in place."""
    rule = rule_of(config(1, 1, **(MUON if rows is None else NORMUON) | more))

    def call(dev, x, out, rows):
        transform(rule, dev, [whole(x, out, rows)])

    x = np.stack(matrices).astype(BF16.numpy)
    made = launch(dev or host_device(), call, {"x": x, "out": np.zeros_like(x), "rows": rows})
    if rows is not None:
        rows[...] = made["rows"]
    made = made["out"].astype(np.float64)
    return made if len(matrices) > 1 else made[0]


def stepped(matrix, rounded):
    """A wide matrix after steps at full length, of which all products are rounded."""
    x = rounded(matrix.astype(BF16.numpy).astype(np.float64))
    x = rounded(x / np.linalg.norm(x))
    for a, b, c in [COEFFICIENTS] * STEPS:
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x


def test_steps_of_gram_matrices_are_as_exact(dev, rng):
    """They are as near to exact steps as those at full length in BF16, which torch has: for few
    large singular values among small ones, for such as fall fast, and for noise. It does not matter
    whether matrices are tall or wide, nor that there are several."""
    side, longer = LEAST_SIDE, 2 * LEAST_SIDE
    u, v = (np.linalg.qr(rng.normal(size=(n, side)))[0] for n in (side, longer))
    falling = (u * np.geomspace(1, 1e-4, side)) @ v.T
    few = (u * np.where(np.arange(side) < 4, 1, 1e-3)) @ v.T
    factor = 0.2 * longer**0.5
    matrices = falling, few, rng.normal(size=(side, longer))
    wide = change(*matrices, dev=dev) / factor
    tall = change(*(m.T for m in matrices), dev=dev) / factor
    for matrix, *made in zip(matrices, wide, tall.transpose(0, 2, 1), strict=True):
        want = stepped(matrix, lambda x: x)
        full = stepped(matrix, lambda x: x.astype(BF16.numpy).astype(np.float64))
        # The factor, and the order of sums, move roundings of noise, by which steps are least off.
        bound = max(np.linalg.norm(full - want), 2.0**-5 * np.linalg.norm(want))
        assert max(np.linalg.norm(one - want) for one in made) < bound


@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (48, 48)])
def test_singular_values_become_one(rng, shape):
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(1, 0.02, len(v))
    made = change((u * values) @ v) / (0.2 * max(shape) ** 0.5)
    inner = np.diag(u.T @ made @ v.T)
    assert inner.min() > 0.6, inner
    assert inner.max() < 1.3, inner
    assert np.linalg.norm(made - (u * inner) @ v) < 0.1 * np.linalg.norm(made)


@pytest.mark.parametrize("shape", [(24, 80), (80, 24)])
def test_rows_are_divided_as_normuon_does(rng, shape):
    """Algorithm 1 of arXiv 2510.05491, after Muon's change, in the order of its published code; a
    step without gradients changes nothing of it."""
    rows, second = np.zeros((2, shape[0]), np.float32), torch.zeros(2, shape[0], 1)
    decay, sizes = ROWS_DECAY, np.geomspace(1, 10, shape[0])[:, None]
    for step in range(4):
        matrices = [sizes * rng.normal(size=shape) * (step != 2) for _ in range(2)]
        plain = torch.tensor(change(*matrices))
        made = torch.tensor(change(*matrices, rows=rows))
        if step == 2:
            assert not made.any()
            continue
        second.lerp_(plain.square().mean(-1, keepdim=True).float(), 1 - decay)
        want = plain / (second.sqrt() + 1e-10)
        want *= plain.norm(dim=(-2, -1), keepdim=True) / want.norm(dim=(-2, -1), keepdim=True)
        np.testing.assert_allclose(rows, second[..., 0], rtol=1e-5)  # the order of sums
        # BF16 rounds once before rows are divided and once after.
        np.testing.assert_allclose(made, want, rtol=2.0**-7)


@pytest.mark.parametrize("shape", [(3, 96), (80, 6)])
def test_a_gpu_takes_matrices_whose_gram_matrices_are_no_multiple_of_16_bytes(rng, shape):
    """A product begins on 16 bytes: a plan checks this of each."""
    rule, dev = rule_of(config(1, 1, **NORMUON)), PlanDevice(GPU_SPEC)

    def made(count):
        x, out = (dev.alloc(name, (count, *shape), BF16, "Adam V") for name in ("x", "out"))
        return whole(x, out, dev.alloc("rows", (count, shape[0]), F32, "Adam V"))

    transform(rule, dev, [made(1), made(2), made(1)])
    matrices = rng.normal(size=(3, *shape))
    np.testing.assert_array_equal(change(*matrices), [change(matrix) for matrix in matrices])


def test_nothing_changes_by_nothing():
    assert not change(np.zeros((8, 24))).any()


def test_each_expert_is_a_matrix(monkeypatch):
    """Be there one tensor for each at Hugging Face, or one for all."""
    monkeypatch.setitem(ARCHITECTURES, Mixture.name, Mixture(80))
    windows = {"sliding_window": 8, "windowed_layers": (True, False, True)}
    of = replace(QWEN2, architecture=Mixture.name, **windows).validate()
    slab = next(slab for slab in weight_table(of) if slab.name == "layers.0")
    shapes = [(rows, columns) for _, rows, columns in slab.matrices()]
    assert shapes.count((80, 48)) == shapes.count((48, 80)) == EXPERTS
    assert sum(rows * columns for rows, columns in shapes) == sum(p.count for p in slab.params)
    up = next(p for p in slab.params if p.key == "many_up")
    one = replace(up, hf=(replace(up.hf[0], stop=up.hf[-1].stop),))
    others = tuple(one if p is up else p for p in slab.params)
    assert replace(slab, params=others).matrices() == slab.matrices()


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


def test_the_number_of_ranks_changes_no_bit():
    """Three ranks take the last of four blocks alone; for four ranks slabs have gaps."""
    more = MASTER32 | NORMUON
    one = run(1, 12, first_alone, **more)
    assert all(rows.any() for rows in one.state["rows"].values())
    for world, accum, level in ((2, 6, 1), (3, 4, 2), (4, 3, 3)):
        many = run(world, accum, first_alone, zero_level=level, **more)
        for group in one.state:
            assert_same(many.state[group], one.state[group])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("of", "base", "more"),
    [
        (QWEN2, MASTER32 | {"opt_m_dtype": "e4m3"}, HOST),
        (UNTIED, MUON | {"zero_level": 2}, HOST | {"offload_gradients": True}),
        (GPT2, MASTER32, HOST | {"use_zero_copy": True}),
        (QWEN2, MUON | {"matmul_dtype": "e4m3", "zero_level": 2, "opt_m_dtype": "bf16"},
         HOST | {"shard_weights": True, "persistent_quants": True}),
    ],
    ids=["masters", "gradients", "zero-copy", "codes"],
)  # fmt: skip
def test_places_change_no_bit(monkeypatch, of, base, more, world):
    move_in_pieces(monkeypatch, 1024)
    assert_same_run(run(world, 1, of=of, **base), run(world, 1, of=of, **base | more))


def test_state_is_that_of_momentum():
    """Muon has the state of momentum in plans, tables and checkpoints."""
    cfg, other = config(1, 1, **MUON), config(1, 1)
    model = preset("Qwen2.5-0.5B")
    with_v = [slab for slab in weight_table(model) if not slab.is_block]
    plans = [make_plan(replace(c, model_dtype="bf16"), model, HOST_SPEC) for c in (cfg, other)]
    muon, adamw = (plan.usage.categories["device"] for plan in plans)
    assert muon["Adam M"] == adamw["Adam M"]
    assert muon["Adam V"] == 4 * sum(slab.size for slab in with_v) < 0.3 * adamw["Adam V"]
    placement = place(cfg.for_step, table_of(cfg, model))
    block = next(line for line in placement_table(placement) if "layers" in line)
    assert block.split()[-2:] == ["shard", "-"]
    sizes = [
        disk_use(c, model, place(c.for_step, table_of(c, model))).checkpoint for c in (cfg, other)
    ]
    assert sizes[1] - sizes[0] == 4 * sum(
        p.count for slab in weight_table(model) if slab.is_block for p in slab.params
    )
    flops = plans[0].flops - plans[1].flops
    products = [
        5 * (4 * side**2 * longer + 2 * side**3)
        if side < LEAST_SIDE or longer == side
        else 2 * (4 * side**2 * longer) + 14 * 2 * side**3
        for slab in weight_table(model)
        if slab.is_block
        for side, longer in (sorted(shape) for _, *shape in slab.matrices())
    ]
    assert flops == pytest.approx(sum(products), rel=1e-3)  # beside what goes element by element


# -- options and runs ------------------------------------------------------------------------------


def test_rates_and_what_is_refused():
    assert config(1, 1, **MUON, learning_rate=3e-4).muon_lr == 3e-4
    assert config(1, 1).muon_lr is None
    for more, text in (
        ({"lora_rank": 4}, "--optimizer: muon is for the matrices of blocks"),
        ({"learning_rate": 0.0}, "--muon-lr: takes the course of --learning-rate"),
    ):
        with pytest.raises(ConfigError, match=text):
            config(1, 1, **MUON | more).validate()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def test_any_number_of_ranks_goes_on(workplace):
    more = NORMUON | {"opt_m_dtype": "e4m3"}
    with trainer(2, zero_level=3, **more) as t:
        t.step()
        path = t.save()
        planned = disk_use(t.config, t.model, t.plan.placement).checkpoint
        weights, after = t.weights(), [t.step(), t.step()]
        end = t.weights()
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert planned <= stored < planned + 40_000  # of headers
    for world in (2, 3):
        with trainer(world, **more) as t:
            t.load(path)
            assert_same(t.weights(), weights)
            results = [t.step(), t.step()]
            if world == 2:
                assert_same(t.weights(), end)
                assert [r.loss for r in results] == [r.loss for r in after]


def test_a_run_goes_on_with_another_optimizer(workplace, capsys):
    """Weights go on, and moments begin: AdamW's first step has the size of a first step."""
    with trainer(opt_m_dtype="e4m3") as t:
        t.step()
        path, weights = t.save(), t.weights()
    with trainer(**MUON) as t:
        t.load(path)
        told = capsys.readouterr().err
        assert "--optimizer is muon, in the checkpoint's run it was adamw" in told
        assert "moments begin at zero" in told
        assert_same(t.weights(), weights)
        t.step()
        path, before = t.save(), t.weights()
    with trainer(weight_decay=0) as t, trainer(weight_decay=0) as other:
        t.load(path)
        t.step()
        moved = t.weights()["lm_head.weight" if "lm_head.weight" in before else next(iter(before))]
        first = np.abs(moved - before[next(iter(before))])
        assert np.median(first[first > 0]) == pytest.approx(1e-2, rel=0.01)  # as a first step's is
        other.load(t.save())  # which remembers when its moments began
        assert_same(
            {"": np.array([t.step().loss, t.step().loss])},
            {"": np.array([other.step().loss, other.step().loss])},
        )
        assert_same(other.weights(), t.weights())


def test_checkpoints_of_a_rule_that_is_not_known_are_refused(workplace, monkeypatch):
    with trainer(**MUON) as t:
        path = t.save()
    monkeypatch.delitem(rules.RULES, "muon")
    with trainer() as t, pytest.raises(LlmqError, match="a checkpoint of --optimizer muon, which"):
        t.load(path)
