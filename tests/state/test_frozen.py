"""Parameters without a gradient: it is never written, and those of others are the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.covering import pairwise
from tests.models import exported, random_batch, trainer_for

T = 32
FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "head_dtype": "e4m3"}
FORMATS = [{}, FP8, FP8 | {"fp8_recipe": "delayed"}, {"recompute_block": True}]
ALL = {"embed", "positions", "qkv", "o", "up", "down", "q_norm", "k_norm", "norm", "lm_head"}
ALL |= {f"{key}_bias" for key in ("qkv", "o", "up", "down", "ln1", "ln2", "norm")} | {"ln1", "ln2"}
FROZEN = [
    ALL - {"lm_head", "norm"},
    {"qkv_bias", "o_bias", "up_bias", "down_bias", "ln1", "q_norm", "norm_bias", "positions"},
    {"qkv", "down", "ln2", "ln2_bias", "ln1_bias", "k_norm", "norm", "lm_head"},
    # Backward ends at the first layer's queries, at its attention's output, at its MLP.
    FIRST := {"embed", "positions", "ln1", "ln1_bias", "qkv_bias"},
    FIRST | {"qkv", "q_norm", "k_norm"},
    FIRST | {"qkv", "q_norm", "k_norm", "o", "o_bias", "ln2", "ln2_bias", "ln2_post"},
]


def gradients(path, batches, frozen, **options):
    """Gradients by name, before and after a step, and the names of frozen parameters."""
    with trainer_for(path, seq_len=T, grad_accumulation=2, **options) as trainer:
        grads, table = trainer._step.grads, trainer._step.table
        full = grads.full
        grads.full = lambda block: {k: v for k, v in full(block).items() if k not in frozen}
        trained = {p.block for s in table for p in s.params if p.key not in frozen}
        grads.wants = trained.__contains__
        before = trainer.gradients()
        loss = trainer.step(batches).loss
        names = {p.name for s in table for p in s.params if p.key in frozen}
        return loss, before, trainer.gradients(), names


@pytest.mark.parametrize(
    ("model", "form", "frozen"),
    pairwise(
        model=("qwen3", "llama_biases", "gpt2", "olmo2"),
        form=range(len(FORMATS)),
        frozen=tuple(map(frozenset, FROZEN)),
    ),
)
def test_frozen_parameters_get_no_gradient(model, form, frozen):
    rng, options = np.random.default_rng(0), FORMATS[form]
    batches = [random_batch(rng, T=T) for _ in range(2)]
    want_loss, _, want, _ = gradients(exported(model), batches, set(), **options)
    loss, before, after, names = gradients(exported(model), batches, frozen, **options)
    assert loss == want_loss and names
    for name, value in after.items():
        same_as = before if name in names else want
        np.testing.assert_array_equal(value, same_as[name], err_msg=name)
