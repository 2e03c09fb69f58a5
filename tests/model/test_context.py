"""Sequences that ranks divide among them (--context-parallel), on CPU devices, against torch and
against one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmq.base.errors import ConfigError
from llmq.data.tokens import TokenWriter
from tests.data.test_document_mask import batch_of, documents
from tests.models import exported, hf_model, step_as_torch, trainer_for
from tests.runs import VOCAB, make_workplace, records, train

T = 32
# The documents of two sequences start here: parts of 8 and of 16 tokens cut some of them.
FIRSTS = [[(0, 1, 10, 19), (0, 12)], [(0, 4), (0,)], [(0,), (0, 8, 16, 23)]]


def heads(query: int, kv: int, channels: int = 16) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": channels}


def states(values: int, keys: int) -> dict[str, int]:
    return {"linear_num_value_heads": values, "linear_num_key_heads": keys}


# Ranks of a sequence by model: with fewer key heads than ranks (2), keys of an earlier layer, keys
# as values, sinks, windows, norms of heads, experts, gates, delta nets, and state spaces.
MODELS = {"qwen2": 4, "llama_biases": 2, "gemma4": 2, "gemma4_e2b": 2, "gpt_oss": 2}
MODELS |= {"qwen3_moe": 4, "qwen3_5": 2, "nemotron_h": 2}
CASES = {name: (name, parts, {}) for name, parts in MODELS.items()}
# Numbers of heads that do not divide by those of ranks. A Granite's norm is over all heads.
GRANITE = {"mamba_n_heads": 12, "mamba_d_head": 32, "mamba_expand": 6}
CASES |= {
    "14 queries of 2 keys on 4": ("qwen3", 4, heads(14, 2)),
    "6 queries of 3 keys on 2": ("gpt_oss", 2, heads(6, 3)),
    "5 queries of 1 key on 3": ("gemma4_e2b", 3, heads(5, 1)),
    "7 queries of 7 keys on 2": ("llama_biases", 2, heads(7, 7) | {"hidden_size": 112}),
    "12 queries of 2 keys on 3": ("gemma4", 3, heads(12, 2)),
    "12 states of 4 keys on 3": ("qwen3_5", 3, heads(3, 3) | states(12, 4)),
    "10 states of 2 keys on 4": ("qwen3_5", 4, heads(6, 2) | states(10, 2)),
    "16 states of 2 keys on 3": ("nemotron_h", 3, {}),
    "16 states of 16 keys on 3": ("nemotron_h", 3, {"n_groups": 16}),
    "12 states of 1 key on 2": ("granitemoehybrid", 2, GRANITE),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_match_those_of_documents_alone(case):
    name, parts, changes = CASES[case]
    length = 48 if parts == 3 else T
    model, batch = hf_model(name, **changes), batch_of(np.random.default_rng(0), FIRSTS[0], length)
    options = {"gpus": parts, "context_parallel": parts, "seq_len": length, "document_mask": True}
    with trainer_for(exported(name, **changes), **options) as trainer:
        step_as_torch(trainer, [batch], model, list(documents(batch)))
        assert trainer.usage == trainer.plan.usage


def run(name: str, changes: dict | None = None, **options):
    """Results of steps on the same four sequences of documents, and of an evaluation of two, and
    the weights behind the steps. changes: fields of the model's configuration."""
    rng, T = np.random.default_rng(1), options.get("seq_len", 32)
    defaults = {"seq_len": T, "document_mask": True, "seed": 3}
    with trainer_for(exported(name, **(changes or {})), **(defaults | options)) as trainer:
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


def test_sharded_training_with_heads_that_do_not_divide():
    want = run("qwen3", heads(14, 2), **ONE)
    options = {"gpus": 4, "context_parallel": 4, "zero_level": 3, "all_to_all_reduce": True}
    assert_close(run("qwen3", heads(14, 2), **(ONE | options)), want)


def test_adapters_with_heads_that_do_not_divide():
    options = ONE | {"lora_rank": 4, "base_dtype": "nf4", "seq_len": 48}
    changes = heads(5, 1) | {"hidden_size": 80}
    want = run("llama", changes, **options)
    assert_close(run("llama", changes, **(options | {"gpus": 3, "context_parallel": 3})), want)


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", "granitemoehybrid"])
def test_what_saves_memory_changes_no_bit(name):
    changes = GRANITE if name == "granitemoehybrid" else {}
    options = {"gpus": 2, "context_parallel": 2, "grad_accumulation": 2, "model_dtype": "bf16"}
    want, weights = run(name, changes, **options)
    got, same = run(name, changes, **options, recompute_block=True, offload_residual=True)
    assert got == want
    assert all(np.array_equal(weights[n], same[n]) for n in weights)


def test_runs_from_files_resume_with_other_numbers_of_ranks(tmp_path, monkeypatch):
    """Each sequence of the files is read once, whoever divides it."""
    monkeypatch.chdir(make_workplace(tmp_path))
    with TokenWriter(Path("data/train.bin"), VOCAB) as writer:
        writer.write(np.random.default_rng(0).integers(0, 8, 800))
    common = {"steps": 4, "eval_every_n_steps": 2, "batch_size": 1}
    common |= {"save_training_state": True, "packing": "best-fit", "document_separator": 7}
    common |= {"train_file": "data/train.bin", "eval_file": "data/train.bin"}
    assert train(**common, grad_accumulation=4, log_file="one.json") == 0
    pairs = {"gpus": 4, "context_parallel": 2, "grad_accumulation": 2}
    assert train(**common, **pairs, log_file="pairs.json") == 0
    halves = {"gpus": 2, "context_parallel": 2, "grad_accumulation": 4}
    assert train(**(common | {"steps": 2}), **halves, log_file="first.json") == 0
    assert (
        train(
            **common,
            grad_accumulation=4,
            log_file="second.json",
            **{"continue": "", "overwrite": None},
        )
        == 0
    )
    want = [record["loss"] for record in records("step", "one.json")]
    whole = [record["loss"] for record in records("step", "pairs.json")]
    both = [r["loss"] for log in ("first.json", "second.json") for r in records("step", log)]
    np.testing.assert_allclose(whole, want, rtol=1e-5)
    np.testing.assert_allclose(both, want, rtol=1e-5)
    tokens = [
        [r["step_tokens"] for r in records("step", log)] for log in ("one.json", "pairs.json")
    ]
    assert tokens[0] == tokens[1]


REFUSED = {
    "gpt2": "GPT2LMHeadModel has a learned weight for each position",
    "olmo2": "Olmo2ForCausalLM has norms over all heads of a token",
    "deepseek_v3": "DeepseekV3ForCausalLM has layers of latent_attention",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_sequences_cannot_be_divided(name):
    with pytest.raises(ConfigError, match=f"--context-parallel 2: {REFUSED[name]}"):
        trainer_for(exported(name), gpus=2, context_parallel=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 12}, "--context-parallel: --seq-len must be a multiple of 4 on each GPU"),
        (
            {"gpus": 8, "context_parallel": 8, "seq_len": 32},
            "each GPU needs a query head of its own, and layers of Qwen3ForCausalLM have 4",
        ),
        ({"gpus": 3}, "--context-parallel 2: does not divide the 3 GPUs of a machine, see --gpus"),
        ({"loss": "dpo"}, "--context-parallel: losses of pairs, samples and labels read whole"),
        ({"share": "3:2"}, "--share: with --context-parallel GPUs exchange data in every"),
    ],
)
def test_options_that_divided_sequences_refuse(changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer_for(exported("qwen3"), **({"gpus": 2, "context_parallel": 2} | changes))
