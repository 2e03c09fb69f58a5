"""Ternary weights in the whole step, on the CPU device; kernels are in tests/ops."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from llmq.base.errors import ConfigError
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.options_io import option_rows
from llmq.options.presets import preset
from tests.bitnet import AutoBitLinear, as_bitnet
from tests.formats.test_fp8 import run, same
from tests.formats.test_int8 import losses_of
from tests.models import exported, random_batch, step_as_torch, trainer_for

TERNARY = {"model_dtype": "bf16", "matmul_dtype": "ternary"}
OTHERS = {"all": "lm_head", "mlp": "lm_head|self_attn", "attention": "lm_head|mlp"}
"""Modules that stay as they are, by --ternary-of."""


@pytest.mark.parametrize(
    ("name", "of"),
    [(name, "all") for name in ("llama", "qwen2", "granite", "qwen3_5")]
    + [("qwen3", "mlp"), ("phi3", "attention")],
)
def test_losses_and_gradients_are_those_of_transformers(name, of):
    """Models have biases or none, factors of products, delta nets, and modules fused here or
    there."""
    model = as_bitnet(exported(name), OTHERS[of])
    assert any(isinstance(module, AutoBitLinear) for module in model.modules())
    options = {"matmul_dtype": "ternary", "ternary_of": of}
    with trainer_for(exported(name), **options) as trainer:
        step_as_torch(trainer, [random_batch(np.random.default_rng(0))], model)
        assert trainer.usage == trainer.plan.usage


@cache
def plain():
    """A run that recomputes and offloads nothing."""
    return run(exported("qwen3"), **TERNARY)


STREAMED = {"shard_weights": True, "offload_master": True}


@pytest.mark.parametrize(
    "options",
    [*({f"recompute_{flag}": True} for flag in ("swiglu", "norm", "block")), STREAMED],
    ids=str,
)
def test_recompute_and_offload_are_bitwise_equal(options):
    assert same(run(exported("qwen3"), **TERNARY, **options), plain())


def test_sharded_ranks_compute_what_one_does():
    batches = [random_batch(np.random.default_rng(n), B=1, T=32) for n in range(2)]
    found = []
    for options in ({"grad_accumulation": 2}, {"gpus": 2, "zero_level": 3}):
        options |= {"batch_size": 1, "seq_len": 32, "grad_accum_dtype": "fp32"}
        with trainer_for(exported("qwen3"), **TERNARY, **options) as trainer:
            result = trainer.step(batches)
            found.append((result.loss, result.norm))
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # F32 sums over ranks in another order


def test_the_model_learns_and_evaluates_as_it_trains():
    losses = losses_of(exported("qwen2"), matmul_dtype="ternary", learning_rate=5e-3)
    assert losses[-1] < 0.8 * losses[0]
    batch = random_batch(np.random.default_rng(2))
    with trainer_for(exported("qwen3"), **TERNARY) as trainer:
        evaluated = trainer._step.evaluate([batch])
        assert evaluated.loss == trainer.step([batch]).loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 4}, "--matmul-dtype: ternary is for weights that are trained: leave it out"),
        ({"gradient_dtype": "e4m3"}, "--gradient-dtype: e4m3 needs --matmul-dtype e4m3"),
        ({"gradient_dtype": "ternary"}, "--gradient-dtype"),
        ({"head_dtype": "e4m3"}, "--head-dtype: e4m3 does not go with --matmul-dtype ternary"),
        ({"persistent_quants": True}, "--persistent-quants: needs --matmul-dtype e4m3"),
        ({"model": "tiny-qwen3-moe"}, "there is no ternary product for experts: use bf16"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        config = TrainConfig(**TERNARY | options).normalized()
        config.validate_with(preset(options.get("model", "Qwen2.5-0.5B")))


def test_logs_spell_all_number_formats():
    formats = {name: option for name, option in OPTIONS.items() if name.endswith("_dtype")}
    for name, option in formats.items():
        for value in option.choices:
            config = replace(TrainConfig().normalized(), **{name: value})
            assert dict(option_rows(config, preset("tiny")))
