"""Models by name: presets for training from scratch, and model directories on this machine."""

import difflib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.arch import ARCHITECTURES
from llmq.arch.common import ignored_fields
from llmq.arch.delta import DeltaNet
from llmq.arch.experts import Experts
from llmq.arch.latent import LatentAttention
from llmq.arch.mamba import Mamba
from llmq.arch.model_config import ModelConfig
from llmq.arch.rope_family import all_but_every
from llmq.arch.rope_scaling import RopeScaling
from llmq.arch.short_conv import ShortConvs
from llmq.base.errors import ConfigError
from llmq.base.files import read_json

_SIZES = (
    "hidden_size intermediate_size num_heads num_kv_heads num_layers norm_eps tied_embeddings"
).split()
_QWEN25 = {
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 24, 1e-6, True),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 28, 1e-6, True),
    "Qwen2.5-3B": (2048, 11008, 16, 2, 36, 1e-6, True),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 28, 1e-6, False),
    "Qwen2.5-14B": (5120, 13824, 40, 8, 48, 1e-5, False),
    "Qwen2.5-32B": (5120, 27648, 40, 8, 64, 1e-5, False),
    "Qwen2.5-72B": (8192, 29568, 64, 8, 80, 1e-5, False),
}
_QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 16, 8, 28, 1e-6, True),
    "Qwen3-1.7B": (2048, 6144, 16, 8, 28, 1e-6, True),
    "Qwen3-4B": (2560, 9728, 32, 8, 36, 1e-6, True),
    "Qwen3-8B": (4096, 12288, 32, 8, 36, 1e-6, False),
}
_QWEN35 = {
    "Qwen3.5-4B": (2560, 9216, 16, 4, 32, 1e-6, True),
    "Qwen3.5-9B": (4096, 12288, 16, 4, 32, 1e-6, False),
    "Qwen3.5-27B": (5120, 17408, 24, 4, 64, 1e-6, False),
}
_QWEN35_MOE = {
    "Qwen3.5-35B-A3B": (2048, 512, 16, 2, 40, 1e-6, False),
    "Qwen3.5-122B-A10B": (3072, 1024, 32, 2, 48, 1e-6, False),
}
_QWEN3_NEXT = {"Qwen3-Next-80B-A3B": (2048, 5120, 16, 2, 48, 1e-6, False)}
_LLAMA2 = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 1e-5, False),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 1e-5, False),
}
_LLAMA3 = {
    "llama-3-1b": (2048, 8192, 32, 8, 16, 1e-5, True),
    "llama-3-3b": (3072, 8192, 24, 8, 28, 1e-5, True),
    "llama-3-8b": (4096, 14336, 32, 8, 32, 1e-5, False),
}
_GPT2 = {
    "gpt2-124m": (768, 3072, 12, 12, 12, 1e-5, True),
    "gpt2-355m": (1024, 4096, 16, 16, 24, 1e-5, True),
    "gpt2-774m": (1280, 5120, 20, 20, 36, 1e-5, True),
    "gpt2-1558m": (1600, 6400, 25, 25, 48, 1e-5, True),
}
_PHI3 = {"Phi-3-mini": (3072, 8192, 32, 32, 32, 1e-5, False)}
_OLMO2 = {
    "OLMo-2-1B": (2048, 8192, 16, 16, 16, 1e-6, False),
    "OLMo-2-7B": (4096, 11008, 32, 32, 32, 1e-6, False),
    "OLMo-2-13B": (5120, 13824, 40, 40, 40, 1e-6, False),
    "OLMo-2-32B": (5120, 27648, 40, 8, 64, 1e-6, False),
}
_OLMO3 = {"OLMo-3-7B": (4096, 11008, 32, 32, 32, 1e-6, False)}
_SMOLLM3 = {"SmolLM3-3B": (2048, 11008, 16, 4, 36, 1e-6, True)}
_GEMMA2 = {
    "gemma-2-2b": (2304, 9216, 8, 4, 26, 1e-6, True),
    "gemma-2-9b": (3584, 14336, 16, 8, 42, 1e-6, True),
    "gemma-2-27b": (4608, 36864, 32, 16, 46, 1e-6, True),
}
_GEMMA3 = {
    "gemma-3-270m": (640, 2048, 4, 1, 18, 1e-6, True),
    "gemma-3-1b": (1152, 6912, 4, 1, 26, 1e-6, True),
}
_GEMMA3_LARGE = {
    "gemma-3-4b": (2560, 10240, 8, 4, 34, 1e-6, True),
    "gemma-3-12b": (3840, 15360, 16, 8, 48, 1e-6, True),
    "gemma-3-27b": (5376, 21504, 32, 16, 62, 1e-6, True),
}
_GEMMA4 = {
    "gemma-4-E2B": (1536, 6144, 8, 1, 35, 1e-6, True),
    "gemma-4-E4B": (2560, 10240, 8, 2, 42, 1e-6, True),
}
_GEMMA4_UNIFIED = {"gemma-4-12B": (3840, 15360, 16, 8, 48, 1e-6, True)}
_GEMMA4_LARGE = {
    "gemma-4-31B": (5376, 21504, 32, 16, 60, 1e-6, True),
    "gemma-4-26B-A4B": (2816, 2112, 16, 8, 30, 1e-6, True),
}
_QWEN3_MOE = {
    "Qwen3-30B-A3B": (2048, 6144, 32, 4, 48, 1e-6, False),
    "Qwen3-235B-A22B": (4096, 12288, 64, 4, 94, 1e-6, False),
}
_QWEN15_MOE = {"Qwen1.5-MoE-A2.7B": (2048, 5632, 16, 16, 24, 1e-6, False)}
_OLMOE = {"OLMoE-1B-7B": (2048, 1024, 16, 16, 16, 1e-5, False)}
_MIXTRAL = {"Mixtral-8x7B": (4096, 14336, 32, 8, 32, 1e-5, False)}
_GPT_OSS = {
    "gpt-oss-20b": (2880, 2880, 64, 8, 24, 1e-5, False),
    "gpt-oss-120b": (2880, 2880, 64, 8, 36, 1e-5, False),
}
_GRANITE_HYBRID = {
    "granite-4.0-h-micro": (2048, 8192, 32, 8, 40, 1e-5, True),
    "granite-4.0-h-tiny": (1536, 512, 12, 4, 40, 1e-5, True),
}
_GLM47_FLASH = {"GLM-4.7-Flash": (2048, 10240, 20, 20, 47, 1e-5, False)}
_DEEPSEEK_V2 = {"DeepSeek-V2-Lite": (2048, 10944, 16, 16, 27, 1e-6, False)}
_GLM45 = {"GLM-4.5-Air": (4096, 10944, 96, 8, 46, 1e-5, False)}
_MINIMAX_M2 = {"MiniMax-M2": (3072, 1536, 48, 8, 62, 1e-6, False)}
_LFM2 = {"LFM2-1.2B": (2048, 8192, 32, 8, 16, 1e-5, True)}
_NEMOTRON = {"Nemotron-3-Nano-30B-A3B": (2688, 1856, 32, 2, 52, 1e-5, False)}
_TINY_LATENT = (128, 512, 4, 4, 6, 1e-6, True)
_TINY_ROPE = (128, 512, 2, 1, 6, 1e-6, True)
_TINY_EXPERTS = (128, 64, 2, 1, 6, 1e-6, True)
_TINY_HALVES = (128, 256, 2, 1, 8, 1e-5, False)
_TINY_GPT2 = (128, 512, 2, 2, 6, 1e-5, True)
_BYTES = (257, None, 256, None, 1024, 1e4, None)

_ALIASES = {
    "llama-3.2-1b": "llama-3-1b",
    "llama-3.2-3b": "llama-3-3b",
    "llama-3.1-8b": "llama-3-8b",
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
}

# Architecture, sizes by name, and the fields that all sizes share; head_dim None: hidden / heads.
# Qwen's vocabulary is that of llm.q's presets, so that llm.q's flags keep their meaning. The
# released Qwen2.5-7B and larger have 152,064 rows, smaller ones this number: for a released model's
# shape give its directory. Tiny models read bytes; id 256 ends a document.
_SHARED = (
    "vocab_size bos_token_id eos_token_id pad_token_id max_positions rope_theta head_dim"
).split()
_HYBRID = "GraniteMoeHybridForCausalLM"
_FAMILIES = (
    ("Qwen2ForCausalLM", _QWEN25, 151936, 151643, 151643, None, 32768, 1e6, None),
    ("Qwen3ForCausalLM", _QWEN3, 151936, 151643, 151643, None, 40960, 1e6, 128),
    ("Qwen3MoeForCausalLM", _QWEN3_MOE, 151936, 151643, 151643, None, 40960, 1e6, 128),
    ("Qwen2MoeForCausalLM", _QWEN15_MOE, 151936, 151643, 151643, None, 8192, 1e6, None),
    ("OlmoeForCausalLM", _OLMOE, 50304, None, 50279, 1, 4096, 1e4, None),
    ("MixtralForCausalLM", _MIXTRAL, 32000, 1, 2, None, 32768, 1e6, None),
    ("Qwen3_5ForCausalLM", _QWEN35, 248320, None, 248044, None, 262144, 1e7, 256),
    ("Qwen3_5MoeForCausalLM", _QWEN35_MOE, 248320, None, 248044, None, 262144, 1e7, 256),
    ("Qwen3NextForCausalLM", _QWEN3_NEXT, 151936, 151643, 151645, None, 262144, 1e7, 256),
    ("GptOssForCausalLM", _GPT_OSS, 201088, None, 200002, 199999, 131072, 1.5e5, 64),
    ("Glm4MoeLiteForCausalLM", _GLM47_FLASH, 154880, 0, 154820, 154820, 202752, 1e6, 256),
    ("Glm4MoeForCausalLM", _GLM45, 151552, None, 151329, 151329, 131072, 1e6, 128),
    ("MiniMaxM2ForCausalLM", _MINIMAX_M2, 200064, 200034, 200020, None, 196608, 5e6, 128),
    ("Lfm2ForCausalLM", _LFM2, 65536, 1, 7, 0, 128000, 1e6, None),
    ("DeepseekV2ForCausalLM", _DEEPSEEK_V2, 102400, 100000, 100001, None, 163840, 1e4, 192),
    ("LlamaForCausalLM", _LLAMA2, 32000, 1, 2, 0, 4096, 1e4, None),
    ("LlamaForCausalLM", _LLAMA3, 128256, 128000, 128001, 128255, 4096, 5e5, None),
    ("GPT2LMHeadModel", _GPT2, 50257, 50256, 50256, None, 1024, 1e4, None),
    ("Phi3ForCausalLM", _PHI3, 32064, 1, 32000, 32000, 4096, 1e4, None),
    ("Olmo2ForCausalLM", _OLMO2, 100352, None, 100257, 100277, 4096, 5e5, None),
    ("Olmo3ForCausalLM", _OLMO3, 100278, None, 100257, 100277, 65536, 5e5, None),
    ("SmolLM3ForCausalLM", _SMOLLM3, 128256, 128000, 128012, 128004, 65536, 5e6, None),
    ("Gemma2ForCausalLM", _GEMMA2, 256000, 2, 1, 0, 8192, 1e4, 256),
    ("Gemma3ForCausalLM", _GEMMA3, 262144, 2, 1, 0, 32768, 1e6, 256),
    ("Gemma3ForCausalLM", _GEMMA3_LARGE, 262208, 2, 1, 0, 131072, 1e6, 256),
    (_HYBRID, _GRANITE_HYBRID, 100352, 100257, 100257, 100256, 131072, 1e4, None),
    ("Gemma4ForCausalLM", _GEMMA4, 262144, 2, 1, 0, 131072, 1e6, 256),
    ("Gemma4UnifiedForCausalLM", _GEMMA4_UNIFIED, 262144, 2, 1, 0, 262144, 1e6, 256),
    ("Gemma4ForCausalLM", _GEMMA4_LARGE, 262144, 2, 1, 0, 262144, 1e6, 256),
    ("NemotronHForCausalLM", _NEMOTRON, 131072, 1, 2, 0, 262144, 1e4, 128),
    ("Qwen2ForCausalLM", {"tiny": _TINY_ROPE}, *_BYTES),
    ("Qwen3ForCausalLM", {"tiny-qwen3": _TINY_ROPE}, *_BYTES),
    ("LlamaForCausalLM", {"tiny-llama": _TINY_ROPE}, *_BYTES),
    ("MistralForCausalLM", {"tiny-mistral": _TINY_ROPE}, *_BYTES),
    ("GPT2LMHeadModel", {"tiny-gpt2": _TINY_GPT2}, *_BYTES),
    ("Phi3ForCausalLM", {"tiny-phi3": _TINY_ROPE}, *_BYTES),
    ("Olmo2ForCausalLM", {"tiny-olmo2": _TINY_ROPE}, *_BYTES),
    ("Gemma3ForCausalLM", {"tiny-gemma3": _TINY_ROPE}, *_BYTES),
    ("Gemma4ForCausalLM", {"tiny-gemma4": _TINY_ROPE, "tiny-gemma4-moe": _TINY_ROPE}, *_BYTES),
    ("Qwen3MoeForCausalLM", {"tiny-qwen3-moe": _TINY_ROPE}, *_BYTES),
    ("Qwen2MoeForCausalLM", {"tiny-qwen2-moe": _TINY_ROPE}, *_BYTES),
    ("OlmoeForCausalLM", {"tiny-olmoe": _TINY_EXPERTS}, *_BYTES),
    ("MixtralForCausalLM", {"tiny-mixtral": _TINY_EXPERTS}, *_BYTES),
    ("Qwen3_5ForCausalLM", {"tiny-qwen3.5": _TINY_ROPE}, *_BYTES),
    ("Qwen3_5MoeForCausalLM", {"tiny-qwen3.5-moe": _TINY_EXPERTS}, *_BYTES),
    ("Qwen3NextForCausalLM", {"tiny-qwen3-next": _TINY_ROPE}, *_BYTES),
    ("GptOssForCausalLM", {"tiny-gpt-oss": _TINY_EXPERTS}, *_BYTES),
    (_HYBRID, {"tiny-granite-hybrid": _TINY_ROPE}, *_BYTES),
    ("NemotronHForCausalLM", {"tiny-nemotron-h": _TINY_HALVES}, *_BYTES),
    ("DeepseekV3ForCausalLM", {"tiny-deepseek-v3": _TINY_LATENT}, *_BYTES[:-1], 48),
)


def _windows(num_layers: int, window: int) -> dict[str, Any]:
    """Fields of Gemma-3: five of six layers have the window, and RoPE with another base."""
    windowed = all_but_every(6, num_layers)
    return {"sliding_window": window, "windowed_layers": windowed, "local_rope_theta": 1e4}


def _gemma2(num_layers: int) -> dict[str, Any]:
    """Fields of Gemma 2."""
    windows = {"sliding_window": 4096, "windowed_layers": all_but_every(2, num_layers)}
    return windows | {"attention_softcap": 50.0, "logit_softcap": 30.0}


def _gemma4(
    num_layers: int,
    window: int,
    every: int = 6,
    *,
    shared: int = 0,
    full_kv_heads: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Fields of Gemma 4: each every-th layer has no window, and heads of 512. shared: number of
    last layers, which read keys of other layers. full_kv_heads: key heads of layers without a
    window, whose keys are their values; None: all layers have equally many key heads, and values of
    their own."""
    own = num_layers - shared
    return {
        "sliding_window": window,
        "windowed_layers": all_but_every(every, num_layers),
        "local_rope_theta": 1e4,
        "rope_scaling": RopeScaling(kind="proportional", factor=1.0, partial_rotary_factor=0.25),
        "full_head_dim": 512,
        "full_kv_heads": full_kv_heads,
        "keys_as_values": full_kv_heads is not None,
        "attention_scale": 1.0,
        "logit_softcap": 30.0,
        "shared_keys": tuple(i >= own for i in range(num_layers)) if shared else None,
    } | more


def _experts(count: int, active: int, size: int | None = None, **more: Any) -> dict[str, Any]:
    return {"experts": Experts(count=count, active=active, size=size, **{"aux_loss": 0.001} | more)}


def _shared(count: int, active: int, size: int | None, shared_size: int) -> dict[str, Any]:
    return _experts(count, active, size, shared_size=shared_size, renormalize=True)


def _delta(num_layers: int, key_heads: int, value_heads: int, size: int = 128) -> dict[str, Any]:
    """Fields of Qwen3.5: three of four layers are delta nets; RoPE turns a quarter of each head in
    the others. size: channels of a key and of a value."""
    layers = all_but_every(4, num_layers)
    heads = {"key_heads": key_heads, "value_heads": value_heads}
    net = DeltaNet(**heads, key_dim=size, value_dim=size, taps=4, layers=layers)
    return {"mixers": net, "partial_rotary_factor": 0.25}


def _granite_hybrid(attention: tuple[int, ...], layers: int, heads: int, **spaces: int) -> dict:
    """Fields of Granite 4 hybrid. attention: numbers of the layers that have attention, without
    positions; all other layers have state spaces. heads, spaces: sizes of the state spaces."""
    spaces = {"key_heads": 1, "key_dim": 128, "value_dim": 64, "taps": 4} | spaces
    layers_ = tuple(layer not in attention for layer in range(layers))
    return {
        "mixers": Mamba(value_heads=heads, conv_bias=True, layers=layers_, **spaces),
        "rope_layers": (False,) * layers,
        "attention_scale": 1 / 64,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "initializer_range": 0.1,
    }


def _nemotron(pattern: str, heads: tuple[int, int], experts: tuple[int, ...], size: int) -> dict:
    """Fields of Nemotron 3. pattern: M, E, * or - for each layer: a state space, experts, attention
    or an MLP. heads: numbers of groups and heads of state spaces. experts: number of experts,
    number of active ones, their width, and the shared expert's width. size: channels of a state."""
    groups, count = heads
    spaces = {"key_heads": groups, "value_heads": count, "key_dim": size, "value_dim": 64}
    *of_experts, shared = experts
    more = {"shared_size": shared, "renormalize": True, "scale": 2.5, "aux_loss": 0.0}
    layers = tuple(kind == "E" for kind in pattern)
    return _experts(*of_experts, layers=layers, **more) | {
        "mixers": Mamba(
            **spaces, taps=4, conv_bias=True, layers=tuple(kind == "M" for kind in pattern)
        ),
        "rope_layers": (False,) * len(pattern),
        "mlp_layers": tuple(kind in "E-" for kind in pattern),
    }


def _gpt_oss(num_layers: int, count: int, active: int, window: int, aux_loss: float) -> dict:
    """Fields of gpt-oss: every other layer has the window."""
    activation = {"renormalize": True, "alpha": 1.702, "limit": 7.0}
    return _experts(count, active, aux_loss=aux_loss, **activation) | {
        "sliding_window": window,
        "windowed_layers": all_but_every(2, num_layers),
        "qkv_bias": True,
        "o_bias": True,
    }


def _behind_first(num_layers: int) -> tuple[bool, ...]:
    """All layers but the first one."""
    return (False, *(True,) * (num_layers - 1))


def _latent(
    num_layers: int,
    query_rank: int | None,
    rank: int,
    sizes: tuple[int, int, int],
    experts: tuple[int, int, int, int],
    **more: Any,
) -> dict[str, Any]:
    """Fields of DeepSeek. sizes: channels of a head without RoPE, with RoPE, and of values.
    experts: number of experts, number of active ones, their width, and the shared expert's
    width."""
    plain, rotary, values = sizes
    ranks = {"query_rank": query_rank, "rank": rank}
    count, active, size, shared = experts
    more = {"aux_loss": 0.0, "shared_size": shared, "layers": _behind_first(num_layers)} | more
    latent = LatentAttention(**ranks, plain=plain, rotary=rotary, values=values)
    return {"latent": latent} | _experts(count, active, size, **more)


_LONG = {"original_max_positions": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
_LONG = {"rope_scaling": RopeScaling(kind="yarn", factor=40.0, **_LONG)}
_FAR = {"original_max_positions": 4096, "truncate": False}
_FAR = {"rope_scaling": RopeScaling(kind="yarn", factor=32.0, **_FAR)}
_OLMO = {"original_max_positions": 8192}
_OLMO = {"rope_scaling": RopeScaling(kind="yarn", factor=8.0, **_OLMO)}
_STRETCHED = {"rope_scaling": RopeScaling(kind="linear", factor=8.0)}
# Additional fields of single models.
_MORE = {
    "OLMo-3-7B": _OLMO
    | {"sliding_window": 4096, "windowed_layers": all_but_every(4, 32), "local_rope_theta": 5e5},
    "SmolLM3-3B": {"rope_layers": all_but_every(4, 36)},
    "gemma-2-2b": _gemma2(26),
    "gemma-2-9b": _gemma2(42),
    "gemma-2-27b": _gemma2(46) | {"head_dim": 128, "attention_scale": 144**-0.5},
    "gemma-3-270m": _windows(18, 512),
    "gemma-3-1b": _windows(26, 512),
    "gemma-3-4b": _windows(34, 1024) | _STRETCHED,
    "gemma-3-12b": _windows(48, 1024) | _STRETCHED,
    "gemma-3-27b": _windows(62, 1024)
    | _STRETCHED
    | {"head_dim": 128, "attention_scale": 168**-0.5},
    "tiny-gemma3": _windows(6, 256),
    "gemma-4-E2B": _gemma4(35, 512, 5, shared=20, per_layer_size=256, wide_mlp=True),
    "gemma-4-E4B": _gemma4(42, 512, shared=18, per_layer_size=256),
    "gemma-4-12B": _gemma4(48, 1024, full_kv_heads=1),
    "gemma-4-31B": _gemma4(60, 1024, full_kv_heads=4),
    "gemma-4-26B-A4B": _gemma4(30, 1024, full_kv_heads=2)
    | _experts(128, 8, 704, renormalize=True, aux_loss=0.0),
    "tiny-gemma4": _gemma4(6, 256, 3, shared=3, per_layer_size=32, wide_mlp=True),
    "tiny-gemma4-moe": _gemma4(6, 256, full_head_dim=128)
    | _experts(8, 2, 64, renormalize=True, aux_loss=0.0),
    "Qwen3-30B-A3B": _experts(128, 8, 768, renormalize=True),
    "Qwen3-235B-A22B": _experts(128, 8, 1536, renormalize=True),
    "Qwen1.5-MoE-A2.7B": _experts(60, 4, 1408, shared_size=5632),
    "OLMoE-1B-7B": _experts(64, 8, aux_loss=0.01),
    "Mixtral-8x7B": _experts(8, 2, renormalize=True, aux_loss=0.02),
    "tiny-qwen3-moe": _experts(8, 2, 64, renormalize=True),
    "tiny-qwen2-moe": _experts(8, 2, 64, shared_size=128),
    "tiny-olmoe": _experts(8, 2, aux_loss=0.01),
    "tiny-mixtral": _experts(8, 2, renormalize=True),
    "Qwen3.5-4B": _delta(32, 16, 32),
    "Qwen3.5-9B": _delta(32, 16, 32),
    "Qwen3.5-27B": _delta(64, 16, 48),
    "tiny-qwen3.5": _delta(6, 4, 8, 32),
    "Qwen3.5-35B-A3B": _shared(256, 8, None, 512) | _delta(40, 16, 32),
    "Qwen3.5-122B-A10B": _shared(256, 8, None, 1024) | _delta(48, 16, 64),
    "Qwen3-Next-80B-A3B": _shared(512, 10, 512, 512) | _delta(48, 16, 32),
    "tiny-qwen3.5-moe": _shared(8, 2, None, 64) | _delta(6, 4, 8, 32),
    "tiny-qwen3-next": _shared(8, 2, 64, 64) | _delta(6, 4, 8, 32),
    "GLM-4.5-Air": _experts(
        128, 8, 1408, shared_size=1408, renormalize=True, layers=_behind_first(46), aux_loss=0.0
    )
    | {"qkv_bias": True, "partial_rotary_factor": 0.5, "other_eos_token_ids": (151336, 151338)},
    "MiniMax-M2": _experts(256, 8, renormalize=True) | {"partial_rotary_factor": 0.5},
    "LFM2-1.2B": {
        "mixers": ShortConvs(
            taps=3, layers=tuple(layer not in (2, 5, 8, 10, 12, 14) for layer in range(16))
        )
    },
    "GLM-4.7-Flash": _latent(
        47, 768, 512, (192, 64, 256), (64, 4, 1536, 1536), scale=1.8, renormalize=True
    )
    | {"other_eos_token_ids": (154827, 154829)},
    "DeepSeek-V2-Lite": _latent(27, None, 512, (128, 64, 128), (64, 6, 1408, 2816)) | _LONG,
    "tiny-deepseek-v3": _latent(
        6, 64, 64, (32, 16, 32), (8, 2, 64, 64), scale=2.5, renormalize=True
    ),
    "gpt-oss-20b": _gpt_oss(24, 32, 4, 128, 0.9) | _FAR,
    "gpt-oss-120b": _gpt_oss(36, 128, 4, 128, 0.9) | _FAR,
    "tiny-gpt-oss": _gpt_oss(6, 8, 2, 256, 0.001),
    "granite-4.0-h-micro": _granite_hybrid((5, 15, 25, 35), 40, 64),
    "granite-4.0-h-tiny": _granite_hybrid((5, 15, 25, 35), 40, 48)
    | {"attention_scale": 1 / 128, "logits_scaling": 6.0}
    | _shared(64, 6, None, 1024),
    "Nemotron-3-Nano-30B-A3B": _nemotron(
        5 * "MEMEM*E" + "MEMEMEM*EMEMEMEME", (8, 64), (128, 6, 1856, 3712), 128
    ),
    "tiny-nemotron-h": _nemotron("MEM*EM-E", (2, 16), (8, 2, 64, 128), 32),
    "tiny-granite-hybrid": _granite_hybrid((3,), 6, 16, key_dim=32, value_dim=32),
}


def _presets() -> Iterator[tuple[str, ModelConfig]]:
    for architecture, models, *shared in _FAMILIES:
        fields = {"architecture": architecture, **ARCHITECTURES[architecture].kinds()}
        fields |= zip(_SHARED, shared, strict=True)
        for name, sizes in models.items():
            own = fields | dict(zip(_SIZES, sizes, strict=True)) | _MORE.get(name, {})
            own["head_dim"] = own["head_dim"] or own["hidden_size"] // own["num_heads"]
            yield name, ModelConfig(**own).validate()


PRESETS: dict[str, ModelConfig] = dict(_presets())
"""All presets by canonical name."""

_BY_LOWER_NAME = {name.lower(): name for name in PRESETS} | _ALIASES

_OWNERS = {"Qwen": "Qwen/", "gemma-": "google/", "gpt-oss": "openai/"}
RELEASED = {n: f"{o}{n}" for n in PRESETS for start, o in _OWNERS.items() if n.startswith(start)}
RELEASED |= {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-3-1b": "meta-llama/Llama-3.2-1B",
    "llama-3-3b": "meta-llama/Llama-3.2-3B",
    "llama-3-8b": "meta-llama/Llama-3.1-8B",
    "gpt2-124m": "openai-community/gpt2",
    "gpt2-355m": "openai-community/gpt2-medium",
    "gpt2-774m": "openai-community/gpt2-large",
    "gpt2-1558m": "openai-community/gpt2-xl",
    "Phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "OLMoE-1B-7B": "allenai/OLMoE-1B-7B-0924",
    "Qwen3-Next-80B-A3B": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro",
    "granite-4.0-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "GLM-4.7-Flash": "zai-org/GLM-4.7-Flash",
    "Nemotron-3-Nano-30B-A3B": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "GLM-4.5-Air": "zai-org/GLM-4.5-Air",
    "MiniMax-M2": "MiniMaxAI/MiniMax-M2",
    "LFM2-1.2B": "LiquidAI/LFM2-1.2B",
    "DeepSeek-V2-Lite": "deepseek-ai/DeepSeek-V2-Lite",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "OLMo-3-7B": "allenai/Olmo-3-1025-7B",
    "SmolLM3-3B": "HuggingFaceTB/SmolLM3-3B",
    "OLMo-2-1B": "allenai/OLMo-2-0425-1B",
    "OLMo-2-7B": "allenai/OLMo-2-1124-7B",
    "OLMo-2-13B": "allenai/OLMo-2-1124-13B",
    "OLMo-2-32B": "allenai/OLMo-2-0325-32B",
}
RELEASED |= {name: f"{RELEASED[name]}-pt" for name in _GEMMA3_LARGE | {"gemma-3-1b": None}}
"""Hub repository of the trained weights, by preset."""


def released(name: str) -> tuple[str, ModelConfig] | None:
    """Return repository and config of the trained model that a preset's or repository's name means.

    Return None for other names, and for presets without released weights. Reads no files.
    """
    known = _BY_LOWER_NAME.get(name.lower())
    canonical = next((n for n, repository in RELEASED.items() if repository == name), known)
    if canonical not in RELEASED:
        return None
    model = PRESETS[canonical]
    if canonical in _QWEN25 and not model.tied_embeddings:
        model = replace(model, vocab_size=152064)
    return RELEASED[canonical], model


def preset(name: str) -> ModelConfig:
    """Return the preset of this name, in any case. ConfigError suggests the closest names."""
    canonical = _BY_LOWER_NAME.get(name.lower())
    if canonical is None:
        raise ConfigError(f"--model: no preset is called {name!r}; {_near_presets(name)}")
    return PRESETS[canonical]


def _near_presets(name: str) -> str:
    """End of an error message: the names that the user may have meant."""
    near = difflib.get_close_matches(name.lower(), _BY_LOWER_NAME, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(PRESETS)}"


def is_preset(name: str) -> bool:
    """True if `preset` knows this name."""
    return name.lower() in _BY_LOWER_NAME


def pinned(name: str, revision: str | None) -> str:
    """NAME@REVISION, the spelling of a revision of a hub repository."""
    return name if revision is None else f"{name}@{revision}"


def revision_of(directory: Path | None) -> str | None:
    """Commit of a snapshot directory in the hub's cache; None for any other directory."""
    is_snapshot = directory is not None and directory.parent.name == "snapshots"
    return directory.name if is_snapshot else None


def find_directory(name: str) -> Path | None:
    """Return the directory of this name, else the cached snapshot of the hub repository of this
    name, which may end in @REVISION; None if neither exists."""
    directory = Path(os.path.expanduser(name))  # pathlib's expanduser raises for unknown users
    return directory if directory.is_dir() else _cached_snapshot(name)


def resolve_model(name: str, from_scratch: bool) -> tuple[ModelConfig, Path | None]:
    """Return config and directory of the model that --model names: a directory, a repository in the
    Hugging Face cache, or with from_scratch a preset (directory None). Raises ConfigError."""
    directory = find_directory(name)
    if directory is not None and ((directory / "config.json").is_file() or not from_scratch):
        content = _read_config_json(directory)
        try:
            return ModelConfig.from_hf(content), directory
        except ConfigError as error:
            raise ConfigError(f"--model: {directory}: {error}") from None
    if from_scratch:
        return preset(name), None
    if is_preset(name):
        trained = released(name)
        way = "" if trained is None else f", or give {trained[0]} with --download"
        raise ConfigError(f"--model: {name} is a preset without weights, add --from-scratch{way}")
    where = f"--model: {name!r} is not a directory and not a repository in the cache {hub_cache()}"
    if name.count("/") == 1 and name[0] not in "./~":
        raise ConfigError(f"{where}: add --download to fetch it from the hub")
    raise ConfigError(f"{where}; presets need --from-scratch, {_near_presets(name)}")


def model_warnings(directory: Path | None) -> list[str]:
    """Lines about parts of the model in this directory that training will leave out."""
    return [] if directory is None else ignored_fields(_read_config_json(directory))


def _read_config_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        if directory == Path():  # the default
            raise ConfigError(
                "--model: is missing: give the directory of a Hugging Face model, a repository of "
                "the hub with --download, or a preset with --from-scratch, such as tiny"
            ) from None
        if (directory / "adapter_config.json").is_file():
            raise ConfigError(
                f"--model: '{directory}' holds adapters: give the model they are of, and these as "
                "--adapter"
            ) from None
        raise ConfigError(
            f"--model: there is no {path}; give the directory of a Hugging Face model, or a preset "
            "with --from-scratch"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--model: {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--model: {path} must hold one JSON object")
    return content


def hub_cache() -> Path:
    """Directory of downloaded repositories, by the rules of huggingface_hub."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.path.expanduser(os.environ["HF_HUB_CACHE"]))
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HOME", cache))) / "hub"


def _cached_snapshot(repository: str) -> Path | None:
    """Snapshot of the revision, else of refs/main, else the newest snapshot; None without
    snapshots."""
    repository, _, revision = repository.partition("@")
    cached = hub_cache() / f"models--{repository.replace('/', '--')}"
    if ".." in revision.split("/"):
        return None
    reference = cached / "refs" / (revision or "main")
    named = reference.read_text().strip() if reference.is_file() else revision
    snapshot = cached / "snapshots" / named
    if named and snapshot.is_dir():
        return snapshot
    if revision:
        return None
    snapshots = [path for path in cached.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
