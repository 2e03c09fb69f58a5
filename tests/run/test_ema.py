"""A moving average of weights is evaluated and exported in their place, and training goes on."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import llmq
from llmq.base.errors import ConfigError
from llmq.plan.memory import disk_use
from tests.runs import make_workplace, options, records, train
from tests.sharded import (
    FP8,
    GPT2,
    QWEN2,
    assert_same,
    assert_same_run,
    config,
    move_in_pieces,
    run,
)

EMA = {"ema": 0.9}
MUON = {"optimizer": "muon"}
HOST = {"offload_master": True}


@pytest.mark.parametrize(
    ("world", "of", "base", "more"),
    [
        (1, QWEN2, {}, HOST),
        (3, GPT2, MUON | {"master_dtype": "fp32"}, HOST),
        (2, QWEN2, FP8 | {"zero_level": 2}, HOST),
    ],
    ids=["adamw", "muon", "codes"],
)
def test_places_change_no_bit(monkeypatch, world, of, base, more):
    move_in_pieces(monkeypatch, 1024)
    one = run(world, 1, of=of, **base | EMA)
    assert_same_run(one, run(world, 1, of=of, **base | EMA | more))
    plain = run(world, 1, of=of, **base)
    assert_same(plain.state["weights"], one.state["weights"])
    assert one.state.keys() - plain.state.keys() == {"ema"}


def test_what_is_refused():
    with pytest.raises(ConfigError, match="--ema: must be less than 1"):
        config(1, 1, ema=1.0).validate()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    return tmp_path


def trainer(world=1, **changes):
    given = options(gpus=world, grad_accumulation=1, steps=8, **changes)
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)


def averages(t):
    return {p.name: t.ranks.read_param("ema", p) for p in t._step.weights.params()}


@pytest.mark.parametrize(
    "more",
    [
        {"model_dtype": "bf16", "master_dtype": "bf16", "zero_level": 3},
        {
            "model_dtype": "bf16",
            "matmul_dtype": "e4m3",
            "offload_master": True,
            "optimizer": "muon",
        },
    ],
    ids=["bf16", "fp8"],
)
def test_it_is_evaluated_and_exported_and_training_does_not_notice(workplace, more):
    """The average is that of the weights of all steps, the first ones included."""
    with trainer(2, **EMA | more) as t:
        want = {name: value.astype(np.float64) for name, value in t.weights().items()}
        for step in range(3):
            t.step()
            decay = min(0.9, (1 + step) / (10 + step))
            for name, value in t.weights().items():
                want[name] = decay * want[name] + (1 - decay) * value
        weights, kept = t.weights(), averages(t)
        for name, value in kept.items():
            np.testing.assert_allclose(value, want[name], rtol=1e-5, atol=1e-7)
        loss = t.validate().loss
        t.export("out")
        assert_same(t.weights(), weights)
        assert_same(averages(t), kept)
        after = [t.step().loss, t.step().loss]
        end = t.weights()
    with trainer(2, **EMA | more) as t:
        for _ in range(3):
            t.step()
        assert [t.step().loss, t.step().loss] == after
        assert_same(t.weights(), end)
    exported = load_file("out/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(exported[name].astype(np.float64), want[name], rtol=2.0**-7)
    plain = {name: value for name, value in more.items() if name != "offload_master"}
    with trainer(2, **plain | {"from_scratch": False, "model": "out"}) as t:
        assert t.validate().loss == loss


def test_it_goes_on_from_checkpoints_of_any_number_of_ranks(workplace):
    with trainer(2, zero_level=3, **EMA) as t:
        t.step()
        path = t.save()
        planned = disk_use(t.config, t.model, t.plan.placement).checkpoint
        assert sum(a.nbytes for f in path.glob("*.safetensors") for a in load_file(f).values()) == (
            planned
        )
        kept = averages(t)
        t.step()
        end = averages(t)
    for world, optimizer in ((1, "adamw"), (2, "adamw"), (3, "muon")):
        with trainer(world, optimizer=optimizer, **EMA) as t:
            t.load(path)
            assert_same(averages(t), kept)
            t.step()
            if world == 2:
                assert_same(averages(t), end)
    with trainer() as t:  # without one
        t.load(path)
        t.step()
        path = t.save()
        weights = t.weights()
    with trainer(**EMA) as t:  # begins as the weights
        t.load(path)
        assert_same(averages(t), weights)
        t.restart()
        assert_same(averages(t), t.weights())


def test_a_run_ends_with_its_average(workplace):
    """Evaluations of the log are those of the average, as the export is."""
    assert train(**EMA, steps=4, **{"eval-every-n-steps": 2, "out-dir": "out"}) == 0
    last = records("eval")[-1]["loss"]
    with trainer(model="out", from_scratch=False) as t:
        assert t.validate().loss == pytest.approx(last, rel=1e-6)
