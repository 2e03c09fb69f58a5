"""A rule that llmq does not have trains, is planned, sharded, offloaded and saved as AdamW is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import llmq
from llmq.base.errors import ConfigError
from llmq.plan.memory import disk_use
from llmq.plan.placement_table import placement_table
from llmq.state.placement import place, table_of
from tests import momentum
from tests.momentum import NEEDS, register
from tests.runs import make_workplace, options
from tests.sharded import (
    DELAYED,
    FP8,
    FP32,
    GPT2,
    QWEN2,
    UNTIED,
    assert_same,
    assert_same_run,
    config,
    move_in_pieces,
    run,
    train_steps,
)

MASTER32 = {"master_dtype": "fp32", "opt_m_dtype": "fp32"}
HOST = {"offload_master": True, "offload_opt_m": True}
STREAMED = {"shard_weights": True, "shard_gradients": True, "offload_gradients": True}


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    register(monkeypatch)


def test_a_rule_needs_itself_and_three_files():
    root = Path(__file__).parents[2]
    assert len(NEEDS) <= 3
    assert [name for name in NEEDS if (root / name).exists()] == ["llmq/state/rules/__init__.py"]
    source = Path(momentum.__file__).read_text()
    assert '"update/momentum.cu"' in source and '"llmq.ref.update.momentum"' in source
    words = ("momentum.cu", "Momentum")
    for path in (root / "llmq").rglob("*.py"):
        assert not any(word in path.read_text() for word in words), path


@pytest.mark.parametrize("world, level", [(2, 3), (4, 1), (4, 2)])  # for four slabs have gaps
def test_ranks_move_matrices_as_one_rank_does(world, level):
    """Run checks that each rank takes the memory of the plan, to the byte."""
    steps = train_steps(2, lr=3e-3)
    one = run(1, world, steps, grad_clip=0.0, **FP32)
    many = run(world, 1, steps, grad_clip=0.0, zero_level=level, **FP32)
    assert "momentum" in many.state and "adam.m" not in many.state
    for group, arrays in one.state.items():
        for name in [name for name in arrays if name.endswith("weight")]:
            value, other = arrays[name], many.state[group][name]
            np.testing.assert_allclose(other, value, rtol=2e-4, atol=2e-6, err_msg=name)


def test_levels_change_no_bit():
    one, two, three = (run(3, 1, zero_level=level, **MASTER32) for level in (1, 2, 3))
    assert_same_run(one, two)
    assert_same_run(one, three)


@pytest.mark.parametrize(
    ("world", "of", "base", "more"),
    [
        (2, QWEN2, MASTER32, HOST),
        (3, UNTIED, MASTER32 | {"zero_level": 2}, HOST | STREAMED),
        (1, GPT2, MASTER32, HOST | {"use_zero_copy": True}),
        (3, QWEN2, FP8 | {"zero_level": 2}, HOST | STREAMED | {"persistent_quants": True}),
        (1, UNTIED, DELAYED | {"opt_m_dtype": "bf16"}, HOST),
    ],
    ids=["masters", "streamed", "zero-copy", "codes", "delayed"],
)
def test_places_change_no_bit(monkeypatch, of, base, more, world):
    """Also of matrices that are longer than what passes through a buffer."""
    move_in_pieces(monkeypatch, 1024)
    assert_same_run(run(world, 1, of=of, **base), run(world, 1, of=of, **base | more))


def test_adapters_are_matrices_too():
    lora = {"lora_rank": 4, "lora_alpha": 8.0}
    assert_same_run(run(2, 1, **lora), run(2, 1, **lora | HOST))


def test_eight_bits_are_refused_by_a_rule_without_scales():
    with pytest.raises(ConfigError, match="momentum has no scales"):
        run(1, 1, opt_m_dtype="e4m3")


def test_the_table_of_placements_names_its_moment():
    cfg = config(2, 1, offload_opt_m=True)
    lines = placement_table(place(cfg.for_step, table_of(cfg, QWEN2, 2), 2))
    assert lines[0].split()[-2:] == ["gradient", "momentum"]
    assert "pinned" in lines[1]


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trainer(world, **changes):
    given = options(gpus=world, grad_accumulation=1, steps=4, **changes)
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)


def moments(t):
    """Moments of all ranks, by parameter."""
    return {p.name: t.ranks.read_param("momentum", p) for p in t._step.weights.params()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_goes_on_from_its_files(workplace, world):
    """With the same bits, and as many bytes as the plan says."""
    with trainer(2, zero_level=3, offload_opt_m=True) as t:
        t.step()
        path = t.save()
        weights, saved = t.weights(), moments(t)
        planned = disk_use(t.config, t.model, t.plan.placement).checkpoint
        after = [t.step(), t.step()], t.weights()
    files = sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"{group}.shard_{rank:03d}_of_002.safetensors"
        for group in ("momentum", "weights")
        for rank in range(2)
    ]
    assert sum(a.nbytes for file in files for a in load_file(file).values()) == planned
    with trainer(world) as t:
        t.load(path)
        assert_same(t.weights(), weights)
        assert_same(moments(t), saved)
        results = [t.step(), t.step()]
        assert t.usage == t.plan.usage
        if world == 2:
            assert_same(t.weights(), after[1])
            assert [r.loss for r in results] == [r.loss for r in after[0]]
