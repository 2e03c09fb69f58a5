"""How many functions a reader goes through from `Trainer.step` to the launch of any kernel."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import llmq
from llmq.runtime.host_device import HostDevice

MOST = 13
B, T = 2, 32
RECOMPUTE = {f"recompute_{name}": True for name in ("swiglu", "norm", "ffn", "qkv", "att", "block")}
FP8 = {"matmul_dtype": "e4m3"}
DELAYED = FP8 | {"fp8_recipe": "delayed"}
CODED = DELAYED | {"mlp_dtype": "e4m3"}
LORA = {"lora_rank": 8}
FORMATS = {
    "bf16": {},
    "jit": FP8,
    "delayed": DELAYED,
    "coded": CODED,
    "fp8 head": DELAYED | {"head_dtype": "e4m3"},
    "int8": {"matmul_dtype": "int8"},
    "muon": {"optimizer": "muon"},
    "offload": {"offload_residual": True, "offload_opt_m": True, "offload_master": True},
    "lora": LORA,
    "lora, dropout": LORA | {"lora_dropout": 0.1, "lora_targets": "q,v,up,embedding,head"},
    "dora": LORA | {"lora_dora": True},
    "nf4": LORA | {"base_dtype": "nf4"},
    "nf4, jit": LORA | {"base_dtype": "nf4"} | FP8,
    "int8, lora": LORA | {"base_dtype": "int8", "matmul_dtype": "int8"},
}
SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 64,
}
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 32}
GPT2 = {"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "gpt2", GPT2),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", SIZES | {"attention_bias": True}),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", SIZES | WINDOW),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", SIZES | {"pad_token_id": None}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe", SIZES | EXPERTS | {"norm_topk_prob": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "qwen3-next": ("Qwen3NextForCausalLM", "qwen3_next", SIZES | EXPERTS | DELTA),
}
OF_EXPERTS = LORA | {"lora_targets": "q,experts"}


def depths(monkeypatch, model, options):
    """The most frames from `Trainer.step` to each kernel's launch, both included."""
    found, launch = {}, HostDevice.launch

    def counted(self, kernel, *args, **kwargs):
        frame, count = sys._getframe(1), 1
        while frame is not None and frame.f_code is not llmq.Trainer.step.__code__:
            frame, count = frame.f_back, count + 1
        if frame is not None:
            found[kernel.entry] = max(found.get(kernel.entry, 0), count)
        return launch(self, kernel, *args, **kwargs)

    monkeypatch.setattr(HostDevice, "launch", counted)
    shape = {"batch_size": B, "seq_len": T, "grad_accumulation": 1, "steps": 2}
    how = {"from_scratch": True, "device": "cpu", "gpus": 1, "tune": False}
    with llmq.Trainer(model=model, **shape, **how, **options) as trainer:
        tokens = np.zeros((B, T), np.int32)
        for _ in range(2):
            trainer.step([(tokens, tokens)])
    assert found
    return found


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_launch_is_few_frames_below_a_step(monkeypatch, options):
    far = {k: n for k, n in depths(monkeypatch, "tiny", options).items() if n > MOST}
    assert not far


@pytest.mark.parametrize("again", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", [DELAYED, LORA], ids=["delayed", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_a_launch_of_any_layer_is_few_frames_below_a_step(
    tmp_path, monkeypatch, name, options, again
):
    architecture, kind, sizes = MODELS[name]
    config = {"architectures": [architecture], "model_type": kind, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if options is LORA and name == "qwen3-moe":
        options = OF_EXPERTS
    if options is LORA:
        again = {}
    far = {k: n for k, n in depths(monkeypatch, tmp_path, options | again).items() if n > MOST}
    assert not far
