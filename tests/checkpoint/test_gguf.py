"""GGUF files of `llmq export`, as gguf, transformers and llama.cpp read them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from llmq.arch import ARCHITECTURES
from llmq.arch.llama import Llama
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.errors import LlmqError
from llmq.base.locks import lock_beside, locked
from llmq.checkpoint.exports import export, gguf_vocab
from llmq.checkpoint.hf import export_model
from llmq.options.presets import preset
from llmq.text.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    HfTokenizer,
    new_byte_level_bpe,
    save_tokenizer,
)
from tests.adapters import targets
from tests.arch.test_families import FAMILIES
from tests.models import CONFIGS, VOCAB, exported, hf_model, trainer_for
from tests.mtp import with_head
from tests.text_data import write_bpe

gguf = pytest.importorskip("gguf")

# llama.cpp computes with its own scale of queries, with heads as wide as OLMo 2's hidden size, with
# as many keys as queries in OLMoE, with experts in all layers, with gpt-oss's own activation, and
# with keys of delta nets as wide as values.
CHANGED = {
    "gemma3": {"query_pre_attn_scalar": 32}, "olmo2": {"head_dim": 16},
    "qwen3_moe": {"num_hidden_layers": 1}, "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_next": {"mlp_only_layers": (), "linear_value_head_dim": 64},
    "nemotron_h": {"layers_block_type": ("linear_attention", "moe", "full_attention")},
}  # fmt: skip
NAMED = [
    name for name in CONFIGS if not name.startswith(("granite", "gemma4", "nemotron_h"))
]  # their tensors are compared by name
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
ROPE_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "qkv_proj": "attn_qkv",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "gate_up_proj": "ffn_up",
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "q_a_layernorm": "attn_q_a_norm", "kv_a_layernorm": "attn_kv_a_norm",
    "k_b_proj": "attn_k_b", "v_b_proj": "attn_v_b",
}  # fmt: skip
POST_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
DELTA_NAMES = {
    "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha", "in_proj_ba": "ssm_ba", "conv1d": "ssm_conv1d", "norm": "ssm_norm",
    "out_proj": "ssm_out",
}  # fmt: skip
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ROUTERS = {
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}
GPT2_NAMES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm",
    "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
TEXT = (
    "Hello  world, it's 12345 o'clock!\n\n\tDon't — naïve café 你好世界 🦙🦙 привет\r\n  "
    f"x = foo(bar[3]);   end {END_OF_TEXT}again <|x|> now ▁ ok  "
)


ADAPTED = "llama qwen3 phi3 gpt2 qwen3_5 granitemoehybrid nemotron_h".split()


def source(name: str) -> Path:
    return exported(name, **CHANGED.get(name, {}))


def peft_adapter(name: str, folder: Path, **settings: object) -> None:
    """Adapters of all matrices, in PEFT's format; random ones."""
    given = {"r": 4, "target_modules": targets(name), "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    model = hf_model(name, **CHANGED.get(name, {}))
    model = peft.get_peft_model(model, peft.LoraConfig(**given | settings))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def gguf_name(name: str, hf: str) -> str:
    """The name of a tensor, by the names above."""
    parts = hf.removeprefix("model.").removeprefix("transformer.").split(".")
    names = GPT2_NAMES if name == "gpt2" else ROPE_NAMES
    names = names | (POST_NAMES if name in ("gemma3", "olmo2", "gpt_oss", *DELTA) else {})
    if hf.endswith("sinks"):
        return f"blk.{parts[1]}.attn_sinks.weight"
    block = f"blk.{parts[1]}." if parts[0] in ("layers", "h") else ""
    if hf.endswith(("A_log", "dt_bias")):
        return block + ("ssm_a" if hf.endswith("A_log") else "ssm_dt.bias")
    if hf.endswith("e_score_correction_bias"):
        return block + "exp_probs_b.bias"
    inner = parts[2:-1] if block else parts[:-1]
    if {"experts", "shared_expert", "shared_experts"} & {*inner}:
        end = "exps" if "experts" in inner else "shexp"
        return f"{block}{names[EXPERT_NAMES.get(inner[-1], inner[-1])]}_{end}.{parts[-1]}"
    names = names | ROUTERS | (DELTA_NAMES if "linear_attn" in inner else {})
    inner = inner if name == "gpt2" else inner[-1:]
    return f"{block}{names['.'.join(inner)]}.{parts[-1]}"


def as_stored(name: str, hf: str, values: np.ndarray) -> np.ndarray:
    """The values of a tensor, as llama.cpp's converter writes them."""
    if name == "gpt2" and ".c_" in hf and hf.endswith("weight"):
        return values.T
    of_delta = "linear_attn" in hf
    if name in ("gemma3", *DELTA) and hf.endswith("norm.weight") and not of_delta:
        return values + np.float32(1)
    if hf.endswith("A_log"):
        values = -np.exp(values)
    if of_delta and name != "qwen3_next":
        return values_in_turns(hf, values.squeeze())
    if of_delta:
        return values.squeeze()
    if name in ("llama", "llama_biases", "mistral", "mixtral") and (
        ".q_proj." in hf or ".k_proj." in hf
    ):
        half = {"llama": 32}.get(name, 16) // 2  # (head, half, pair) becomes (head, pair, half)
        order = np.arange(len(values)).reshape(-1, 2, half).transpose(0, 2, 1).ravel()
        return values[order]
    return values


def values_in_turns(hf: str, values: np.ndarray) -> np.ndarray:
    """A tensor of 2 x 4 value heads of 32 channels as one of 4 x 2; 128 channels of queries and
    keys stay in front."""
    if "out_proj" in hf:
        return values.reshape(len(values), 2, 4, 32).swapaxes(1, 2).reshape(values.shape)
    if hf.endswith("norm.weight"):
        return values
    first = 128 if "in_proj_qkv" in hf or "conv1d" in hf else 0
    own = values[first:].reshape(2, 4, -1).swapaxes(0, 1).reshape(values[first:].shape)
    return np.concatenate([values[:first], own])


def by_module(name: str, hf: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor under the names of modules; those of gpt-oss's experts hold several."""
    if "in_proj_qkvz" in hf:  # of each key head: q, k, four v, four z, each of 64 channels
        q, k, v, z = np.split(values.reshape(2, 10, 64, -1), [1, 2, 6], axis=1)
        flat = lambda *many: np.concatenate([x.reshape(-1, values.shape[1]) for x in many])  # noqa: E731
        return [(hf.replace("qkvz", "qkv"), flat(q, k, v)), (hf.replace("qkvz", "z"), flat(z))]
    if "kv_b_proj" in hf:  # of each of 4 heads 16 rows of keys, and as many of values
        keys, heads = np.split(values.reshape(4, 32, -1), 2, axis=1)
        keys = keys.swapaxes(1, 2)
        return [(hf.replace("kv_b", x), each) for x, each in (("k_b", keys), ("v_b", heads))]
    if name != "gpt_oss" or ".experts." not in hf:
        return [(hf, values)]
    end = "bias" if hf.endswith("_bias") else "weight"
    values = values.swapaxes(1, -1)  # (experts, in, out)
    module = f"{hf.removesuffix('_bias')}.{end}"
    if "gate_up_proj" not in hf:
        return [(module, values)]
    halves = {"gate_proj": values[:, 0::2], "up_proj": values[:, 1::2]}
    return [(module.replace("gate_up_proj", half), each) for half, each in halves.items()]


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The values of all tensors of a file, F32."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(
            tuple(reversed(t.shape.tolist()))
        )
        for t in gguf.GGUFReader(path).tensors
    }


def fields(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


# ------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize("name", NAMED)
def test_tensors_are_those_of_the_model(name, tmp_path):
    export(source(name), tmp_path / "f.gguf", to="gguf", dtype="fp32")
    export(source(name), tmp_path / "q.gguf", to="gguf", dtype="q8_0", verify=True)
    found, rounded = tensors(tmp_path / "f.gguf"), tensors(tmp_path / "q.gguf")
    factors = found.pop("rope_freqs.weight", None)
    assert (factors is not None) == (name == "llama")
    stored = load_file(source(name) / "model.safetensors")
    of_modules: dict[str, list[np.ndarray]] = {}
    for hf in sorted(stored, key=lambda hf: [int(n) for n in re.findall(r"\d+", hf)]):
        for module, values in by_module(name, hf, stored[hf].numpy()):
            modules = of_modules.setdefault(gguf_name(name, module), [])
            modules.append(as_stored(name, module, values))
    stacks = "_exps" if name != "gpt_oss" else "none"
    expected = {
        key: np.stack(each) if stacks in key else each[0] for key, each in of_modules.items()
    }
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)
        plain = re.search(r"^position|bias$|_inp|conv1d", key)
        if values.ndim == 1 or plain:
            np.testing.assert_array_equal(rounded[key], values, err_msg=key)
            continue
        near = rounded[key].reshape(-1, 32), values.reshape(-1, 32)
        step = np.abs(near[1]).max(1, keepdims=True) / 127
        assert (np.abs(near[0] - near[1]) <= 0.57 * step).all(), key


FAMILY_FIELDS = {
    "glm4_moe_lite": {
        "attention.head_count_kv": 1, "attention.key_length": 56, "attention.value_length": 48,
        "attention.key_length_mla": 32, "attention.value_length_mla": 32,
        "attention.kv_lora_rank": 48, "attention.q_lora_rank": 40, "rope.dimension_count": 8,
        "expert_shared_count": 2, "expert_weights_scale": np.float32(1.8),
        "expert_weights_norm": True, "expert_gating_func": 2, "leading_dense_block_count": 1,
    },
    "glm4_moe": {
        "attention.head_count_kv": 2, "expert_shared_count": 2, "expert_gating_func": 2,
        "expert_weights_scale": 2.5, "leading_dense_block_count": 1, "rope.dimension_count": 16,
        "expert_group_count": 2, "expert_group_used_count": 1,
    },
    "gemma4_e4b": {
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.key_length_swa": 16,
        "attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 16,
        "rope.dimension_count": 32, "rope.dimension_count_swa": 16, "feed_forward_length": 160,
        "attention.sliding_window_pattern": [True, False] * 3,
    },
    "gemma4_unified": {
        "attention.head_count_kv": [2, 1] * 2, "attention.shared_kv_layers": 0,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    },
    "nemotron_h_dense": {
        "attention.head_count_kv": [0, 0, 2], "feed_forward_length": [160, 0, 0],
        "ssm.group_count": 4, "ssm.inner_size": 256, "ssm.time_step_rank": 4,
    },
    "minimax_m2": {"expert_gating_func": 2, "expert_count": 6, "rope.dimension_count": 16},
    "lfm2": {"attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 4},
    "arcee": {"attention.head_count_kv": 2},
    "ministral3": {
        "attention.temperature_scale": np.float32(0.3), "rope.scaling.yarn_log_multiplier": 1.0,
        "rope.scaling.original_context_length": 5,
    },
    "granite": {
        "attention.scale": 0.015625, "embedding_scale": 12.0, "logit_scale": 8.0,
        "residual_scale": np.float32(0.22),
    },
    "granitemoehybrid_experts": {
        "attention.head_count_kv": [0, 2, 0, 2], "ssm.group_count": 1, "ssm.inner_size": 128,
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 8, "expert_count": 6,
        "expert_shared_feed_forward_length": 80, "rope.scaling.finetuned": False,
        "attention.scale": np.float32(0.1), "logit_scale": 6.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY_FIELDS)
def test_families_that_are_a_file_each(name, tmp_path, capsys):
    """Their tensors have names, and their sizes are those of llama.cpp's converters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).float()
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "f.gguf", to="gguf", dtype="q8_0", verify=True)
    found, kind = fields(tmp_path / "f.gguf"), ModelConfig.from_hf(model.config.to_dict() | {
        "architectures": [type(model).__name__]
    }).arch.gguf  # fmt: skip
    given = FAMILY_FIELDS[name]
    assert {key: found[f"{kind.name}.{key}"] for key in given} == given
    stored = load_file(tmp_path / "model" / "model.safetensors")
    count = sum(value.numel() for value in stored.values())
    written = tensors(tmp_path / "f.gguf")
    factors = written.pop("rope_freqs.weight", None)
    assert (factors is not None) == name.startswith("gemma4")
    assert sum(values.size for values in written.values()) == count
    assert ("epsilon 1e-05 in norms of latents" in capsys.readouterr().err) == (
        name == "glm4_moe_lite"
    )


def test_state_spaces_are_as_llama_cpps_converter_writes_them(tmp_path):
    path = exported("granitemoehybrid")
    export(path, tmp_path / "f.gguf", to="gguf", dtype="fp32")
    stored = {k: v.numpy() for k, v in load_file(path / "model.safetensors").items()}
    found, at = tensors(tmp_path / "f.gguf"), "model.layers.0"
    gate, up = np.split(stored[f"{at}.shared_mlp.input_linear.weight"], 2)
    expected = {
        "ssm_in.weight": stored[f"{at}.mamba.in_proj.weight"],
        "ssm_conv1d.weight": stored[f"{at}.mamba.conv1d.weight"][:, 0],
        "ssm_conv1d.bias": stored[f"{at}.mamba.conv1d.bias"],
        "ssm_dt.bias": stored[f"{at}.mamba.dt_bias"],
        "ssm_a": -np.exp(stored[f"{at}.mamba.A_log"])[:, None],
        "ssm_d": stored[f"{at}.mamba.D"][:, None],
        "ssm_norm.weight": stored[f"{at}.mamba.norm.weight"][None],
        "ssm_out.weight": stored[f"{at}.mamba.out_proj.weight"],
        "ffn_gate.weight": gate,
        "ffn_up.weight": up,
        "ffn_down.weight": stored[f"{at}.shared_mlp.output_linear.weight"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[f"blk.0.{name}"], values, err_msg=name)


def test_layers_of_one_half_are_as_llama_cpps_converter_writes_them(tmp_path):
    path = source("nemotron_h")
    export(path, tmp_path / "f.gguf", to="gguf", dtype="fp32")
    stored = {k: v.numpy() for k, v in load_file(path / "model.safetensors").items()}
    found, at = tensors(tmp_path / "f.gguf"), "backbone.layers"
    experts = {
        x: np.stack([stored[f"{at}.1.mixer.experts.{e}.{x}_proj.weight"] for e in range(5)])
        for x in ("up", "down")
    }
    expected = {
        "0.attn_norm.weight": stored[f"{at}.0.norm.weight"],
        "0.ssm_in.weight": stored[f"{at}.0.mixer.in_proj.weight"],
        "0.ssm_a": -np.exp(stored[f"{at}.0.mixer.A_log"])[:, None],
        "0.ssm_dt.bias": stored[f"{at}.0.mixer.dt_bias"],
        "0.ssm_norm.weight": stored[f"{at}.0.mixer.norm.weight"].reshape(2, -1),
        "1.ffn_gate_inp.weight": stored[f"{at}.1.mixer.gate.weight"],
        "1.exp_probs_b.bias": stored[f"{at}.1.mixer.gate.e_score_correction_bias"],
        "1.ffn_up_exps.weight": experts["up"],
        "1.ffn_down_exps.weight": experts["down"],
        "1.ffn_up_shexp.weight": stored[f"{at}.1.mixer.shared_experts.up_proj.weight"],
        "2.attn_q.weight": stored[f"{at}.2.mixer.q_proj.weight"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[f"blk.{name}"], values, err_msg=name)
    known = fields(tmp_path / "f.gguf")
    given = {
        "feed_forward_length": [0, 48, 0], "attention.head_count_kv": [0, 0, 2],
        "expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 80,
        "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
    }  # fmt: skip
    assert {key: known[f"nemotron_h_moe.{key}"] for key in given} == given
    refused(exported("nemotron_h"), tmp_path / "m.gguf", "of which some layers have an MLP")


def test_gemma_4_is_as_llama_cpps_converter_writes_it(tmp_path):
    path = exported("gemma4_a4b")
    export(path, tmp_path / "f.gguf", to="gguf", dtype="fp32")
    stored = {k: v.numpy() for k, v in load_file(path / "model.safetensors").items()}
    found, at = tensors(tmp_path / "f.gguf"), "model.layers.1"
    expected = {
        "ffn_gate_up_exps.weight": stored[f"{at}.experts.gate_up_proj"],
        "ffn_down_exps.weight": stored[f"{at}.experts.down_proj"],
        "ffn_gate_inp.weight": stored[f"{at}.router.proj.weight"],
        "ffn_gate_inp.scale": stored[f"{at}.router.scale"],
        "ffn_down_exps.scale": stored[f"{at}.router.per_expert_scale"],
        "layer_output_scale.weight": stored[f"{at}.layer_scalar"],
        "attn_norm.weight": stored[f"{at}.input_layernorm.weight"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[f"blk.1.{name}"], values, err_msg=name)
    factors = found["rope_freqs.weight"]  # of 32 channels a quarter turns
    np.testing.assert_array_equal(factors, np.float32([1] * 4 + [1e30] * 12))
    assert "blk.1.attn_v.weight" not in found  # keys are values


def test_heads_for_multi_token_prediction_are_further_layers(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["glm4_moe"]()).float()
    _, head = with_head("glm4_moe", model, tmp_path)
    stored, at = load_file(tmp_path / "model.safetensors"), "model.layers.4"
    both = stored.pop(f"{at}.mlp.experts.gate_up_proj").chunk(2, dim=1)  # as released: by expert
    named = {"gate": both[0], "up": both[1], "down": stored.pop(f"{at}.mlp.experts.down_proj")}
    for key, experts in named.items():
        for i, values in enumerate(experts):
            stored[f"{at}.mlp.experts.{i}.{key}_proj.weight"] = values.contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    export(tmp_path, tmp_path / "f.gguf", to="gguf", dtype="fp32", verify=True)
    found, known = tensors(tmp_path / "f.gguf"), fields(tmp_path / "f.gguf")
    assert (known["glm4moe.block_count"], known["glm4moe.nextn_predict_layers"]) == (5, 1)
    own = {"eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm"}
    own |= {"shared_head.norm": "nextn.shared_head_norm", "self_attn.q_proj": "attn_q"}
    for hf, name in own.items():
        want = head[f"{at}.{hf}.weight"].detach().numpy()
        np.testing.assert_array_equal(found[f"blk.4.{name}.weight"], want, err_msg=name)
    for key, experts in named.items():
        np.testing.assert_array_equal(found[f"blk.4.ffn_{key}_exps.weight"], experts.numpy())
    export(tmp_path, tmp_path / "t.gguf", to="gguf", dtype="fp32", text_only=True)
    assert not any(name.startswith("blk.4.") for name in tensors(tmp_path / "t.gguf"))


@pytest.mark.parametrize("name", ["qwen2_untied", "llama", "mistral", "gemma3"])
def test_transformers_reads_the_same_model(name, tmp_path, capfd):
    export(source(name), tmp_path / "m.gguf", to="gguf", dtype="fp32")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    expected = hf_model(name, **CHANGED.get(name, {})).state_dict()
    assert read.keys() == expected.keys()
    for key, values in expected.items():  # 1 was added to norms and taken off, in F32
        torch.testing.assert_close(read[key], values, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "q8_0", "q4_0"])
def test_formats(dtype, tmp_path):
    """Matrices have the format, and norms F32; the file says so. The head of q4_0 has q8_0."""
    export(source("qwen3"), tmp_path / "m.gguf", to="gguf", dtype=dtype, verify=True)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    label = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}.get(dtype, dtype.upper())
    assert kinds["blk.0.ffn_up.weight"] == kinds["blk.1.attn_q.weight"] == label
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == ("Q8_0" if dtype == "q4_0" else label)
    file_type = gguf.LlamaFileType(fields(tmp_path / "m.gguf")["general.file_type"]).name
    assert file_type == ("ALL_F32" if dtype == "fp32" else f"MOSTLY_{label}")


def test_rows_that_no_blocks_fill_are_fp16(tmp_path):
    folder = exported("qwen2", hidden_size=48, num_attention_heads=4, intermediate_size=96)
    export(folder, tmp_path / "m.gguf", to="gguf", dtype="q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.ffn_down.weight"]) == ("F16", "Q8_0")


def test_metadata(tmp_path):
    export(source("gemma3"), tmp_path / "g.gguf", to="gguf")
    found = fields(tmp_path / "g.gguf")
    expected = {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "attention.head_count": 4,
        "feed_forward_length": 160, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False],
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0, "vocab_size": VOCAB,
    }  # fmt: skip
    assert {key: found[f"gemma3.{key}"] for key in expected} == expected
    assert found["gemma3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    export(source("gpt_oss"), tmp_path / "o.gguf", to="gguf")
    found = fields(tmp_path / "o.gguf")
    expected = {
        "feed_forward_length": 48, "expert_feed_forward_length": 48, "expert_count": 8,
        "expert_used_count": 2, "attention.sliding_window": 5, "attention.key_length": 32,
        "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 16,
    }  # fmt: skip
    assert {key: found[f"gpt-oss.{key}"] for key in expected} == expected
    assert "gpt-oss.attention.sliding_window_pattern" not in found  # as the converter does it
    export(source("gpt2"), tmp_path / "2.gguf", to="gguf")
    found = fields(tmp_path / "2.gguf")
    assert found["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    assert not [key for key in found if "rope" in key]


def test_bounds_of_yarn_that_llama_cpp_truncates_are_told(tmp_path, capsys):
    hf_model("qwen2", rope_parameters=YARN | {"truncate": False}).save_pretrained(tmp_path / "m")
    export(tmp_path / "m", tmp_path / "m.gguf", to="gguf")
    assert "llama.cpp truncates the bounds of yarn" in capsys.readouterr().err


def test_sizes_of_delta_nets_are_written(tmp_path):
    for name in DELTA:
        export(source(name), tmp_path / f"{name}.gguf", to="gguf")
        found, at = fields(tmp_path / f"{name}.gguf"), name.replace("_", "")
        sizes = {"conv_kernel": 4, "group_count": 2, "time_step_rank": 8}
        width = 64 if name == "qwen3_next" else 32
        sizes |= {"state_size": width, "inner_size": 8 * width}
        expected = {f"{at}.ssm.{key}": size for key, size in sizes.items()}
        expected |= {f"{at}.full_attention_interval": 2, f"{at}.rope.dimension_count": 16}
        assert expected.items() <= found.items()
        axes = None if name == "qwen3_next" else [11, 11, 10, 0]
        assert found.get(f"{at}.rope.dimension_sections") == axes


def test_delta_nets_that_llama_cpp_does_not_compute_are_refused(tmp_path):
    for changed, message in (
        ({"linear_key_head_dim": 64}, "no Qwen3.5 with keys of 64 and values of 32 channels"),
        ({"layer_types": ("full_attention", "linear_attention")}, "stand at several distances"),
        ({"layer_types": ("full_attention",) * 2}, "no Qwen3.5 without delta nets"),
    ):
        refused(exported("qwen3_5", **changed), tmp_path / "m.gguf", message)


def test_rope_factors_are_those_of_transformers(tmp_path):
    export(source("llama"), tmp_path / "m.gguf", to="gguf")
    config = CONFIGS["llama"]()
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    factors = tensors(tmp_path / "m.gguf")["rope_freqs.weight"]
    np.testing.assert_allclose(plain / factors, inverse.numpy(), rtol=1e-6)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0}
YARN["original_max_position_embeddings"] = 16
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"partial_rotary_factor": 1.0}
LONG |= {"long_factor": [2.0, 3.0, 4.0, 5.5] * 2, "short_factor": [1.0, 1.25, 1.5, 2.0] * 2}


def test_positions_are_stretched_as_the_converter_says_it(tmp_path):
    hf_model("qwen2", rope_parameters=YARN).save_pretrained(tmp_path / "yarn")
    export(tmp_path / "yarn", tmp_path / "y.gguf", to="gguf")
    expected = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    expected |= {"yarn_beta_fast": 16.0, "yarn_beta_slow": 1.0}
    found = fields(tmp_path / "y.gguf")
    assert {key: found[f"qwen2.rope.scaling.{key}"] for key in expected} == expected
    more = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
    hf_model("phi3", **more).save_pretrained(tmp_path / "long")
    export(tmp_path / "long", tmp_path / "l.gguf", to="gguf")
    found = fields(tmp_path / "l.gguf")
    assert found["phi3.rope.scaling.type"] == "longrope"
    assert found["phi3.rope.scaling.original_context_length"] == 16
    config = transformers.AutoConfig.from_pretrained(tmp_path / "long")
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(factor)
    stored = tensors(tmp_path / "l.gguf")
    for name in ("long", "short"):
        np.testing.assert_array_equal(stored[f"rope_factors_{name}.weight"], LONG[f"{name}_factor"])


# ------------------------------------------------------------------------------------------------
# Adapters


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_what_a_merge_adds(name, tmp_path):
    ranks = {"rank_pattern": {"q_proj": 2}} if name == "llama" else {}
    peft_adapter(name, tmp_path / "a", r=4, lora_alpha=6, use_rslora=name == "qwen3", **ranks)
    folder, how = str(source(name)), {"to": "gguf", "dtype": "fp32"}
    export(folder, tmp_path / "base.gguf", **how)
    export(tmp_path / "a", tmp_path / "merged.gguf", base=folder, merge=True, **how)
    export(tmp_path / "a", tmp_path / "lora.gguf", base=folder, **how)
    base, merged, lora = (tensors(tmp_path / f"{n}.gguf") for n in ("base", "merged", "lora"))
    known = fields(tmp_path / "lora.gguf")
    assert (known["general.type"], known["adapter.type"]) == ("adapter", "lora")
    adapted = {key.removesuffix(".lora_a") for key in lora if key.endswith(".lora_a")}
    assert adapted and lora.keys() == {f"{key}.lora_{ab}" for key in adapted for ab in "ab"}
    for key, values in base.items():
        added = merged[key] - values
        product = 0
        if key in adapted:
            scale = known["adapter.lora.alpha"] / len(lora[f"{key}.lora_a"])
            product = scale * (lora[f"{key}.lora_b"] @ lora[f"{key}.lora_a"])
            assert np.abs(product).max() > 1e-3
        np.testing.assert_allclose(added, product, atol=1e-6, err_msg=key)


def test_runs_are_exported_from_their_checkpoints(tmp_path):
    """A run's model, and the adapters of another run."""
    whole = trainer_for(source("qwen3"))
    lora = trainer_for(source("qwen3"), lora_rank=2, lora_targets="q,v")
    for kind, trainer in (("whole", whole), ("lora", lora)):
        trainer.save(tmp_path / kind)
        export(tmp_path / kind, tmp_path / f"{kind}.gguf", to="gguf")
    state = hf_model("qwen3").state_dict()
    found = tensors(tmp_path / "whole.gguf")
    up = state["model.layers.1.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(found["blk.1.ffn_up.weight"], up)
    names = {f"blk.{i}.attn_{m}.weight.lora_{ab}" for i in (0, 1) for m in "qv" for ab in "ab"}
    assert tensors(tmp_path / "lora.gguf").keys() == names


# ------------------------------------------------------------------------------------------------
# Refusals


def refused(where: Path | str, out: Path, message: str, **options: object) -> None:
    """Nothing is there afterwards."""
    with pytest.raises(LlmqError, match=message):
        export(where, out, **{"to": "gguf"} | options)
    assert not out.exists() and not list(out.parent.glob(".*llmq-tmp"))


def test_what_no_gguf_file_holds_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "out" / "m.gguf"
    out.parent.mkdir()
    refused(exported("gemma3"), out, "with scores of attention times 0.223607, only 0.176777")
    refused(exported("olmo2"), out, "no OLMo2 with 4 heads of 32 channels")
    refused(exported("olmoe"), out, "no OLMoE with fewer keys than queries")
    refused(exported("qwen3_moe"), out, "no Qwen3-MoE of which some layers have an MLP")
    refused(
        exported("qwen2_moe", norm_topk_prob=True), out, "no Qwen2-MoE with norm_topk_prob True"
    )
    hf = transformers.AutoModelForCausalLM.from_config(FAMILIES["deepseek_v2"]())
    hf.save_pretrained(tmp_path / "groups")
    refused(tmp_path / "groups", out, "with groups of experts")
    refused(exported("gpt_oss"), out, "swiglu_limit 0.3, only swiglu_alpha 1.702 and .* 7")
    for more, message in (
        ({"tie_word_embeddings": True}, "loads no gpt-oss without output.weight"),
        ({"attention_bias": False}, "loads no gpt-oss without blk.0.attn_output.bias"),
    ):
        refused(exported("gpt_oss", **CHANGED["gpt_oss"], **more), out, message)
    every = {"layer_types": ["full_attention"] * 2} | CHANGED["gpt_oss"]
    hf_model("gpt_oss", **every).save_pretrained(tmp_path / "every")
    refused(tmp_path / "every", out, "windows in other layers than those whose number")
    for name, more, message in (
        ("qwen2", {"attention_factor": 2.0}, "with an attention factor of 2, only 1.13863"),
        ("qwen2", {"rope_type": "dynamic"}, "no Qwen2 with positions stretched as dynamic"),
        ("mistral", LONG, "no Mistral with positions stretched as longrope"),
    ):
        hf_model(name, rope_parameters=YARN | more).save_pretrained(tmp_path / message)
        refused(tmp_path / message, out, message)
    refused(source("qwen2"), out, "--dtype: gguf is .* got 'nf4'", dtype="nf4")
    refused(source("qwen2"), out, "is no folder of adapters", merge=True)
    refused(tmp_path / "none", out, "no complete checkpoint")
    refused("nothing", out, "'nothing' is neither a checkpoint, nor a model directory or a repo")
    monkeypatch.setattr(Llama, "gguf", None)
    refused(source("llama"), out, "LlamaForCausalLM has no name in GGUF files")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(source("qwen2"), out, "needs the package gguf: pip install gguf")


def test_a_relative_is_no_name_in_gguf(tmp_path, monkeypatch):
    """A subclass computes something else, also where it says nothing of GGUF."""

    class Relative(Llama):
        name = "RelativeForCausalLM"

    monkeypatch.setitem(ARCHITECTURES, "RelativeForCausalLM", Relative())
    shutil.copytree(source("llama"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["architectures"] = ["RelativeForCausalLM"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "m", tmp_path / "m.gguf", "RelativeForCausalLM has no name in GGUF files")


def test_adapters_with_parts_of_the_model_are_refused(tmp_path):
    peft_adapter("qwen3", tmp_path / "a", modules_to_save=["norm", "input_layernorm"])
    out = tmp_path / "m.gguf"
    refused(
        tmp_path / "a",
        out,
        "norms, which were trained beside them: add --merge",
        base=str(source("qwen3")),
    )
    refused(tmp_path / "a", out, "in PEFT's format already", base=str(source("qwen3")), to="hf")
    peft_adapter("qwen3", tmp_path / "c", r=4, alpha_pattern={"q_proj": 3})
    refused(
        tmp_path / "c", out, "more than one numerator of their scalings", base=str(source("qwen3"))
    )
    peft_adapter("qwen3", tmp_path / "b", trainable_token_indices=[129, 130])
    refused(
        tmp_path / "b", out, "brings rows of new tokens: add --merge", base=str(source("qwen3"))
    )
    export(tmp_path / "b", out, base=str(source("qwen3")), merge=True, to="gguf")


def test_values_beyond_fp16_are_refused(tmp_path):
    model = replace(preset("tiny"), num_layers=1)
    large = lambda param: np.full(param.shape, 1e5, np.float32)  # noqa: E731
    export_model(tmp_path / "m", model, large, F32)
    refused(
        tmp_path / "m", tmp_path / "m.gguf", "fp16 cannot hold: give --dtype bf16", dtype="fp16"
    )


def test_values_of_fp16_stay_so(tmp_path, capsys):
    """GGUF has that format, model directories have not."""
    hf_model("qwen3").half().save_pretrained(tmp_path / "m")
    export(tmp_path / "m", tmp_path / "m.gguf", to="gguf")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["token_embd.weight"] == "F16" and "bf16" not in capsys.readouterr().err
    export(tmp_path / "m", tmp_path / "out")
    assert "the model is in fp16 and is written in bf16" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_if_told_so(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(LlmqError, match=r"holds m\.gguf already: .* --overwrite"):
        export(source("qwen2"), path, to="gguf")
    assert path.read_text() == "mine"
    export(source("qwen2"), path, to="gguf", overwrite=True)
    assert len(tensors(path)) == 26
    assert export(source("qwen2"), tmp_path / "new", to="gguf", dtype="q8_0") == [
        "README.md",
        "model-q8_0.gguf",
    ]


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_two_exports_to_one_place(kind, tmp_path):
    """The second one is refused while the first writes, and takes nothing away from it."""
    out = tmp_path / ("m.gguf" if kind == "gguf" else "m")
    busy = pytest.raises(LlmqError, match=f"--out: '{out}' is in use by process")
    with locked(lock_beside(out), "--out", out), busy:
        export(source("qwen2"), out, to=kind)
    assert not out.exists()
    export(source("qwen2"), out, to=kind)
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", '{"eos_tok'),
        ("special_tokens_map.json", '{"eos_tok'),
        ("added_tokens.json", "[]"),
    ],
)
def test_a_torn_file_of_the_tokenizer_is_named(name, content, tmp_path):
    folder = shutil.copytree(source("qwen2"), tmp_path / "source")
    write_bpe(folder)
    (folder / name).write_text(content)
    refused(folder, tmp_path / "m.gguf", f"cannot read '{folder / name}'")


def test_a_file_that_is_not_what_was_meant_never_gets_its_name(tmp_path, monkeypatch):
    real = gguf.quants.quantize

    def damaged(rows, kind):
        codes = real(rows, kind)
        if codes.dtype == np.uint8:
            codes[0, 3] ^= 64
        return codes

    monkeypatch.setattr(gguf.quants, "quantize", damaged)
    refused(source("qwen2"), tmp_path / "m.gguf", "is not what was written", dtype="q8_0")
    export(source("qwen2"), tmp_path / "m.gguf", to="gguf", dtype="q8_0", verify=False)


# ------------------------------------------------------------------------------------------------
# Tokenizers


def byte_level(kind: str) -> Tokenizer:
    """A BPE over bytes of this file, which cuts texts as the tokenizers of that name do."""
    tokenizer = new_byte_level_bpe()
    if kind != "qwen2":
        words = {
            "gpt-2": [],
            "smollm": [pre_tokenizers.Digits(individual_digits=True)],
            "dbrx": [pre_tokenizers.Split(tokenizers_regex(), "isolated")],
        }[kind]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "dbrx")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, last])
        tokenizer.normalizer = None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], how)
    return tokenizer


def tokenizers_regex():
    from tokenizers import Regex

    return Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def by_characters(begins_with_space: bool) -> Tokenizer:
    """A BPE over characters with tokens for bytes, as SentencePiece makes it."""
    first = [normalizers.Prepend("▁")] if begins_with_space else []
    normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    how = trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    trained.train_from_iterator([Path(__file__).read_text()], how)
    content = json.loads(trained.to_str())
    content |= {"pre_tokenizer": None, "added_tokens": []}
    content["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    last = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    if begins_with_space:
        first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.post_processor = first
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


TOKENIZERS = {
    "bytes": None,
    **{kind: lambda kind=kind: byte_level(kind) for kind in ("qwen2", "gpt-2", "smollm", "dbrx")},
    "spaces": lambda: by_characters(True),
    "characters": lambda: by_characters(False),
    "gemma4": lambda: by_characters(False),
}
BY_BYTES = [*TOKENIZERS][:5]


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """with_tokenizer(kind): the GGUF file of a model with it, and the tokenizer; made once."""
    made: dict[str, tuple] = {}

    def get(kind):
        if kind in made:
            return made[kind]
        folder, tokenizer = tmp_path_factory.mktemp(kind), ByteTokenizer()
        if TOKENIZERS[kind] is not None:
            named = {"eos_token": END_OF_TEXT}
            special = [END_OF_TEXT, "<|x|>"]
            if kind not in BY_BYTES:
                named["bos_token"] = "<s>"
                special = ["<s>", "</s>", "<unk>", *special]
            save_tokenizer(folder / "t", TOKENIZERS[kind](), named, special)
            (folder / "t" / "chat_template.jinja").write_text("{{ messages }}")
            tokenizer = HfTokenizer(folder / "t")
        model = replace(preset("tiny"), num_layers=1, vocab_size=500)
        if kind == "gemma4":
            model = preset("tiny-gemma4").with_layers([2])
            model = replace(model, vocab_size=500, per_layer_size=None)
        zeros = lambda param: np.zeros(param.shape, np.float32)  # noqa: E731
        export_model(folder / "m", model, zeros, F32, tokenizer)
        export(folder / "m", folder / "m.gguf", to="gguf", dtype="q4_0")
        return made.setdefault(kind, (folder / "m.gguf", tokenizer))

    return get


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(kind, with_tokenizer):
    path, tokenizer = with_tokenizer(kind)
    found = fields(path)
    by_bytes = kind in BY_BYTES
    own = "gemma4" if kind == "gemma4" else "llama"
    assert found["tokenizer.ggml.model"] == ("gpt2" if by_bytes else own)
    name = {"bytes": "gpt-2", "gemma4": None}.get(kind, kind if by_bytes else "default")
    assert found.get("tokenizer.ggml.pre") == name
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 500
    assert (
        tokens[tokenizer.eos_id] == END_OF_TEXT
        and types[tokenizer.eos_id] == gguf.TokenType.CONTROL
    )
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_id
    assert found["tokenizer.ggml.add_bos_token"] == (kind == "spaces")
    assert not found["tokenizer.ggml.add_eos_token"]
    assert (tokens[499], types[499]) == ("[PAD499]", gguf.TokenType.UNUSED)
    assert ("tokenizer.ggml.merges" in found) == (by_bytes or kind == "gemma4")
    assert ("tokenizer.ggml.scores" in found) != by_bytes
    if kind != "bytes":
        assert found["tokenizer.chat_template"] == "{{ messages }}"
    if not by_bytes:
        assert found["tokenizer.ggml.add_space_prefix"] == (kind == "spaces")
        assert types[tokens.index("<0x0A>")] == gguf.TokenType.BYTE
        assert types[tokens.index("<unk>")] == gguf.TokenType.UNKNOWN


def test_a_tokenizer_without_a_name_is_refused(tmp_path):
    tokenizer = byte_level("gpt-2")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    save_tokenizer(tmp_path / "t", tokenizer, {}, [])
    model = replace(preset("tiny"), num_layers=1)
    export_model(
        tmp_path / "m", model, lambda p: np.zeros(p.shape, np.float32), F32, tmp_path / "t"
    )
    refused(tmp_path / "m", tmp_path / "m.gguf", "cuts texts in a way .* no name of")


def test_published_expressions_have_their_names():
    """Those of Qwen3.5, of Mistral NeMo and of GPT-4o, as their tokenizer.json has them."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    head = r"[^\r\n\p{L}\p{N}]?"
    tekken = f"{head}{upper}*{lower}+|{head}{upper}+{lower}*" + r"|\p{N}" + rest
    short = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    gpt4o = f"{head}{upper}*{lower}+{short}|{head}{upper}+{lower}*{short}" + r"|\p{N}{1,3}" + rest
    qwen35 = transformers.models.qwen3_5.tokenization_qwen3_5.PRETOKENIZE_REGEX
    assert gguf_vocab.WORDS[(qwen35,)] == "qwen35"
    assert gguf_vocab.WORDS[(tekken,)] == "tekken"
    assert gguf_vocab.WORDS[(gpt4o,)] == "gpt-4o"


# ------------------------------------------------------------------------------------------------
# llama.cpp itself, where its Python binding is installed


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_llama_cpp_makes_the_same_ids(kind, with_tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp")
    path, tokenizer = with_tokenizer(kind)
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    ids = model.tokenize(TEXT.encode(), add_bos=False, special=True)
    assert ids == tokenizer.encode(TEXT)
    with_bos = model.tokenize(TEXT.encode(), add_bos=True, special=True)
    assert with_bos == [*tokenizer.added[0], *ids]


def loss_of(logits: torch.Tensor, ids: np.ndarray) -> float:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()


def llama_cpp_loss(ids: np.ndarray, path: Path, **files: str) -> float:
    llama_cpp = pytest.importorskip("llama_cpp")
    how = {"logits_all": True, "n_ctx": 64, "n_threads": 1, "verbose": False}
    model = llama_cpp.Llama(model_path=str(path), **how, **files)
    model.eval(ids.tolist())
    return loss_of(torch.tensor(np.array(model.scores[: len(ids)])), ids)


@torch.no_grad()
def torch_logits(model, ids: np.ndarray) -> torch.Tensor:
    return model(torch.tensor(ids)[None]).logits[0]


@pytest.mark.parametrize("name", NAMED)
def test_llama_cpp_finds_the_same_loss(name, tmp_path):
    """Within 0.1 % in F16 and in Q8_0, on as many tokens as the shortest window has."""
    pytest.importorskip("llama_cpp")
    windows = {"qwen2_untied": 5, "mistral": 11, "phi3": 7}
    ids = np.random.default_rng(0).integers(3, VOCAB, windows.get(name, 48))
    loss = loss_of(torch_logits(hf_model(name, **CHANGED.get(name, {})), ids), ids)
    for dtype in ("fp16", "q8_0"):
        path = tmp_path / f"{dtype}.gguf"
        export(source(name), path, to="gguf", dtype=dtype)
        assert llama_cpp_loss(ids, path) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_llama_cpp_adds_adapters_as_peft_does(name, tmp_path):
    pytest.importorskip("llama_cpp")
    peft_adapter(name, tmp_path / "a", r=4, lora_alpha=32)
    ids = np.random.default_rng(0).integers(3, VOCAB, 48)
    model = hf_model(name)
    before = loss_of(torch_logits(model, ids), ids)
    loss = loss_of(torch_logits(peft.PeftModel.from_pretrained(model, tmp_path / "a"), ids), ids)
    export(source(name), tmp_path / "m.gguf", to="gguf", dtype="fp32")
    export(tmp_path / "a", tmp_path / "a.gguf", base=str(source(name)), to="gguf", dtype="fp32")
    found = llama_cpp_loss(ids, tmp_path / "m.gguf", lora_path=str(tmp_path / "a.gguf"))
    assert found == pytest.approx(loss, rel=1e-4) and abs(loss - before) > 0.005
