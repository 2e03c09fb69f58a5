"""Sizes of tiny and odd models that transformers takes: the CPU device computes all of them, a GPU
many of them, and one line names the size that it cannot compute."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.commands.cli import _run
from tests.models import exported, hf_model, random_batch, step_as_torch, trainer_for

TRL = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
}  # fmt: skip
"""trl-internal-testing's, of which many have heads of 2 channels."""
TESTER = {
    "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 37,
    "head_dim": 10,
}  # fmt: skip
"""Sizes as the tests of transformers have them."""
ODD = {"hidden_size": 7, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 5}
ODD["head_dim"] = 6
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9}
NET = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
NET |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5, "num_hidden_layers": 2}
SPACES = {"mamba_n_heads": 6, "mamba_d_head": 5, "mamba_d_state": 7, "mamba_n_groups": 2}
SPACES |= {"mamba_expand": 3, "hidden_size": 10, "shared_intermediate_size": 37}
CASES = {
    "llama_trl": ("llama", TRL | {"head_dim": 2}),
    "llama_biases_tester": ("llama_biases", TESTER),
    "llama_biases_odd": ("llama_biases", ODD | {"hidden_size": 10}),
    "qwen2_trl": ("qwen2", TRL),
    "qwen3_trl": ("qwen3", TRL | {"head_dim": 128}),
    "qwen3_odd": ("qwen3", ODD),
    "mistral_tester": ("mistral", TESTER),
    "phi3_trl": ("phi3", TRL),
    "olmo2_odd": ("olmo2", ODD),
    "gemma3_tester": ("gemma3", TESTER | {"attention_bias": True}),
    "qwen3_moe_trl": ("qwen3_moe", TRL | FOUR | {"head_dim": 128, "moe_intermediate_size": 32}),
    "qwen2_moe_odd": ("qwen2_moe", ODD | FOUR | {"shared_expert_intermediate_size": 3}),
    "olmoe_trl": ("olmoe", TRL | {"num_key_value_heads": 4}),
    "mixtral_odd": ("mixtral", ODD | {"num_local_experts": 3}),
    "gpt_oss_trl": ("gpt_oss", TRL | {"num_local_experts": 4, "head_dim": 64}),
    "gpt_oss_odd": ("gpt_oss", ODD | {"num_local_experts": 3}),
    "qwen3_5_trl": ("qwen3_5", TRL | {"hidden_size": 16, "head_dim": 32}),
    "qwen3_5_odd": ("qwen3_5", ODD | NET | {"head_dim": 10, "attention_bias": True}),
    "qwen3_5_moe_odd": ("qwen3_5_moe", ODD | FOUR | NET | {"head_dim": 16}),
    "qwen3_next_odd": ("qwen3_next", ODD | FOUR | NET | {"head_dim": 24}),
    "granitemoehybrid_odd": ("granitemoehybrid", ODD | SPACES),
    "gpt2_trl": ("gpt2", {"n_embd": 8, "n_head": 4}),
    "gpt2_odd": ("gpt2", {"n_embd": 15, "n_head": 5, "n_inner": 37}),
}


ON_GPUS = {name for name in CASES if name.endswith("_trl")}


@pytest.mark.parametrize(("name", "changed"), CASES.values(), ids=CASES)
def test_loss_and_gradients_of_odd_sizes_match_torch(name, changed):
    model = hf_model(name, **changed)
    model.config._experts_implementation = "eager"  # torch's other one needs rows of 16 bytes
    with trainer_for(exported(name, **changed)) as trainer:
        step_as_torch(trainer, [random_batch(np.random.default_rng(0))], model)
        assert trainer.usage == trainer.plan.usage


OPTIONS = {
    "bf16": {"model_dtype": "bf16", "recompute_block": True},
    "normuon": {"optimizer": "normuon"},
    "shards": {"gpus": 2, "zero_level": 3, "batch_size": 1},
    "adapters": {"lora_rank": 2, "lora_dropout": 0.1},
    "dora": {"lora_rank": 3, "lora_dora": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "case", [*(name for name in CASES if name.endswith("odd")), "gpt_oss_trl", "gemma3_tester"]
)
def test_every_way_of_training_takes_odd_sizes(case, options, tmp_path):
    name, changed = CASES[case]
    batches = [random_batch(np.random.default_rng(0), B=OPTIONS[options].get("batch_size", 2))]
    batches *= OPTIONS[options].get("gpus", 1)
    with trainer_for(exported(name, **changed), **OPTIONS[options]) as trainer:
        losses = [trainer.step(batches).loss for _ in range(3)]
        trainer.export(tmp_path / "out")
    assert losses[2] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_takes_odd_sizes_or_says_which(case, capsys):
    """A plan is enough, because its launches check the sizes of all tensors."""
    name, changed = CASES[case]
    sizes = ["--batch-size=2", "--seq-len=24", "--attention=native"]
    for dtype in ("bf16", "fp32"):
        model = str(exported(name, **changed))
        options = ["--model", model, f"--model-dtype={dtype}", *sizes]
        capsys.readouterr()
        status, err = _run(["plan", *options, "--card=H100"]), capsys.readouterr().err
        err = err.rpartition("error: ")[2]
        if status:
            assert err.startswith("the model's ") and "on a GPU it must be a" in err
        assert (status == 0) == (case in ON_GPUS), err
