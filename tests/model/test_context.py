"""Sequences that ranks divide among them (--context-parallel), on CPU devices, against torch and
against one rank."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.test_document_mask import batch_of, documents
from tests.models import exported, hf_model, step_as_torch, trainer_for

T = 32
# The documents of two sequences start here: parts of 8 and of 16 tokens cut some of them.
FIRSTS = [[(0, 1, 10, 19), (0, 12)], [(0, 4), (0,)], [(0,), (0, 8, 16, 23)]]

# Ranks of a sequence by model: with fewer key heads than ranks (2), keys of an earlier layer, keys
# as values, sinks, windows, norms of heads, and experts.
MODELS = [
    ("qwen2", 4), ("qwen3_moe", 4), ("llama_biases", 2), ("gemma4", 2), ("gemma4_e2b", 2),
    ("gpt_oss", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), MODELS)
def test_loss_and_every_gradient_match_those_of_documents_alone(name, parts):
    model, batch = hf_model(name), batch_of(np.random.default_rng(0), FIRSTS[0], T)
    options = {"gpus": parts, "context_parallel": parts, "seq_len": T, "document_mask": True}
    with trainer_for(exported(name), **options) as trainer:
        step_as_torch(trainer, [batch], model, list(documents(batch)))
        assert trainer.usage == trainer.plan.usage


def run(name: str, **options):
    """Results of steps on the same four sequences of documents, and of an evaluation of two, and
    the weights behind the steps."""
    rng = np.random.default_rng(1)
    defaults = {"seq_len": T, "document_mask": True, "seed": 3}
    with trainer_for(exported(name), **(defaults | options)) as trainer:
        results = []
        for firsts in FIRSTS:
            batches = [batch_of(rng, rows, T) for rows in (firsts, FIRSTS[0])]
            results.append(trainer.step(batches))
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


def assert_close(got, want):
    for one, two in zip(want[0], got[0], strict=True):
        assert one.tokens == two.tokens
        np.testing.assert_allclose([two.loss, two.norm], [one.loss, one.norm], rtol=2e-6)
    for name, expected in want[1].items():
        np.testing.assert_allclose(got[1][name], expected, rtol=1e-4, atol=2e-6, err_msg=name)


# A large epsilon: AdamW makes whole steps of gradients that are nothing but rounding errors.
ONE = {"gpus": 1, "grad_accumulation": 2, "adam_epsilon": 1e-3}
WAYS = {
    "two ranks": {"gpus": 2, "grad_accumulation": 2},
    "two pairs": {"gpus": 4, "grad_accumulation": 1},
    "zero 3": {"gpus": 4, "grad_accumulation": 1, "zero_level": 3, "offload_master": True},
    "exchanges": {"gpus": 4, "grad_accumulation": 1, "zero_level": 2, "all_to_all_reduce": True},
    "saves": {"gpus": 2, "recompute_block": True, "offload_residual": True, "lmhead_chunks": 4},
}


@pytest.fixture(scope="module")
def alone():
    return run("qwen3", **ONE)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_compute_what_one_does(alone, way):
    assert_close(run("qwen3", **(ONE | {"context_parallel": 2} | WAYS[way])), alone)


def test_adapters_on_codes_with_dropout_are_those_of_one_rank():
    """Dropped elements are the same however sequences are divided."""
    options = ONE | {"lora_rank": 4, "base_dtype": "nf4", "lora_dropout": 0.2}
    want = run("llama", **options)
    assert_close(run("llama", **(options | {"gpus": 2, "context_parallel": 2})), want)


def test_what_saves_memory_changes_no_bit():
    options = {"gpus": 2, "context_parallel": 2, "grad_accumulation": 2, "model_dtype": "bf16"}
    want, weights = run("qwen3", **options)
    for change in ({"recompute_block": True, "offload_residual": True}, {"recompute_att": True}):
        got, same = run("qwen3", **(options | change))
        assert got == want, change
        assert all(np.array_equal(weights[n], same[n]) for n in weights), change
