"""Layers in turns train some blocks at a time in the memory of so many, wherever it lies."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import llmq
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.check import run_check
from llmq.options.presets import preset
from llmq.plan.memory import disk_use
from llmq.plan.plan import make_plan
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import weight_table
from llmq.state.turns import still_blocks
from tests.runs import make_workplace, options
from tests.sharded import (
    FP8,
    GPT2,
    QWEN2,
    UNTIED,
    assert_same,
    assert_same_run,
    config,
    model,
    move_in_pieces,
    run,
    train_steps,
)

FIVE = model("tiny-qwen3", num_layers=5, tied_embeddings=False)
TURNS = {"layers_per_step": 2, "layers_period": 2}


def still(step: int, of=FIVE, **more) -> set[str]:
    cfg = config(1, 1, **TURNS | more)
    return still_blocks(cfg, weight_table(of), step)


def test_blocks_are_drawn_by_seed_and_period():
    drawn = [still(step) for step in range(40)]
    assert all(len(names) == 3 for names in drawn)
    assert drawn[0::2] == drawn[1::2]
    assert len(set(map(frozenset, drawn))) > 5
    assert set.union(*drawn) == {f"layers.{i}" for i in range(5)}
    assert drawn != [still(step, seed=43) for step in range(40)]


def test_a_period_is_a_run_whose_other_blocks_are_frozen():
    """They have no gradients and no moments, and the run the memory of the plan."""
    for more in ({}, FP8, {"optimizer": "muon"}, {"optimizer": "galore", "galore_rank": 8}):
        turns = run(1, 2, of=FIVE, layers_per_step=2, layers_period=9, **more)
        frozen = run(1, 2, of=FIVE, frozen=still(0), **more)
        assert_same_run(turns, frozen)


def test_other_blocks_stay_and_moments_begin_with_a_period():
    """AdamW's first change is as long as the learning rate."""

    def program(session):
        dev, step = session.dev, session.step
        results = []
        for number in range(6):
            before = {name: dev.download(t) for name, t in step.weights.master.items()}
            results.append(step.result(session.train(number, lr=1e-2)))
            after = {name: dev.download(t) for name, t in step.weights.master.items()}
            same = {name for name in before if (before[name] == after[name]).all()}
            assert same == still(number), number
            assert set(step.grads.shard) == set(before) - same
            if number % 2 == 0:
                for name in before.keys() - same:
                    moved = np.abs(after[name] - before[name])
                    assert np.median(moved[moved > 0]) == pytest.approx(1e-2, rel=1e-3), name
        return results

    run(1, 1, program, of=FIVE, model_dtype="fp32", weight_decay=0.0, **TURNS)


@pytest.mark.parametrize("more", [{}, FP8, {"optimizer": "normuon"}], ids=["bf16", "fp8", "muon"])
def test_levels_change_no_bit(more):
    """Every rank reads what follows from the masters of all, the last period's too (see `run`)."""
    one, two, three = (
        run(3, 1, train_steps(5), of=FIVE, zero_level=level, **TURNS | more) for level in (1, 2, 3)
    )
    assert_same_run(one, two)
    assert_same_run(one, three)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("of", "base", "more"),
    [
        (FIVE, {"zero_level": 2}, {"offload_gradients": True, "offload_opt_m": True}),
        (UNTIED, FP8, {"offload_master": True, "offload_opt_v": True}),
        (GPT2, {}, {"recompute_block": True, "offload_residual": True, "offload_opt_m": True}),
        (QWEN2, {"zero_level": 2}, {"shard_weights": True, "offload_master": True}),
    ],
    ids=["gradients", "codes", "recompute", "streamed"],
)
def test_places_change_no_bit(monkeypatch, world, of, base, more):
    move_in_pieces(monkeypatch, 1024)
    base = TURNS | {"layers_period": 1} | base
    assert_same_run(
        run(world, 2, train_steps(4), of=of, **base),
        run(world, 2, train_steps(4), of=of, **base | more),
    )


def test_memory_is_that_of_the_drawn_blocks():
    shape = preset("Qwen2.5-0.5B")
    block = next(slab for slab in weight_table(shape) if slab.is_block)
    used, disk = [], []
    for more in ({}, {"layers_per_step": 2}):
        cfg = replace(config(1, 1, **more), model_dtype="bf16", master_dtype="bf16")
        plan = make_plan(cfg, shape, HOST_SPEC)
        used.append(plan.usage.categories["device"])
        disk.append(disk_use(cfg, shape, plan.placement).checkpoint)
    saved = (shape.num_layers - 2) * block.size
    assert used[0]["Gradients"] - used[1]["Gradients"] == 2 * saved
    assert used[0]["Adam M"] - used[1]["Adam M"] == 4 * saved
    assert used[0]["Weights"] == used[1]["Weights"]
    count = sum(p.count for p in block.params)
    assert disk[0] - disk[1] == 8 * (shape.num_layers - 2) * count


def test_what_is_refused():
    for more, text in (
        ({"lora_rank": 4}, "--layers-per-step: is for the blocks of the model"),
        ({"ema": 0.9}, "--layers-per-step: other blocks have no average"),
        ({"master_dtype": "fp32", "model_dtype": "bf16"}, "use --master-dtype bf16"),
        ({"ckpt_background": True}, "leave --ckpt-background out"),
    ):
        with pytest.raises(ConfigError, match=text):
            config(1, 1, **TURNS | more).validate()
    many = config(1, 1, layers_per_step=6)
    with pytest.raises(ConfigError, match="6 blocks are more than the model's 5"):
        many.validate_with(FIVE)
    with pytest.raises(ConfigError, match="blocks of this model differ"):
        config(1, 1, **TURNS).validate_with(preset("tiny-qwen3-next"))


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trainer(world=1, **changes):
    sizes = {"num_layers": 4, "layers_period": 3, "layers_per_step": 2}
    given = options(gpus=world, grad_accumulation=1, steps=9, **sizes | changes)
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)


@pytest.mark.parametrize("done", [1, 3, 5])
def test_any_number_of_ranks_goes_on(workplace, done):
    """From within a period, and from its end, after which others are drawn."""
    with trainer(2, zero_level=3) as t:
        for _ in range(done):
            t.step()
        path = t.save()
        planned = disk_use(t.config, t.model, t.plan.placement).checkpoint
        weights, after = t.weights(), [t.step() for _ in range(4)]
        end = t.weights()
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert planned <= stored < planned + 60_000  # of headers
    for world in (1, 2):
        with trainer(world) as t:
            t.load(path)
            assert_same(t.weights(), weights)
            results = [t.step() for _ in range(4)]
            assert t.usage == t.plan.usage
            if world == 2:
                assert_same(t.weights(), end)
                assert [r.loss for r in results] == [r.loss for r in after]


def test_a_run_begins_again(workplace):
    with trainer() as t:
        first = [t.step().loss for _ in range(5)]
        t.restart()
        assert t.step().loss != first[0]  # the data go on
        t.export("exported")


def test_checkpoints_are_checked_and_exported(workplace, capsys):
    with trainer() as t:
        for _ in range(4):
            t.step()
        path = t.save()
        t.export("exported", checkpoint=path)
    for trained in (False, True):
        run_check([str(path)], trained=trained)
    out = capsys.readouterr().out
    assert "all weights are finite" in out and "trained tensors have moved by step 4" in out


@pytest.mark.parametrize(
    "change", [{"layers_per_step": 1}, {"layers_period": 4}, {"seed": 7}, {"layers_per_step": None}]
)
def test_other_turns_are_refused(workplace, change):
    with trainer() as t:
        t.step()
        path = t.save()
    flag = "--" + next(iter(change)).replace("_", "-")
    with trainer(**change) as t, pytest.raises(LlmqError, match=re.escape(f"{flag}: checkpoint")):
        t.load(path)
