"""ModelConfig, and config.json of both transformers generations in and out."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from llmq.arch.common import ignored_fields
from llmq.arch.experts import Experts
from llmq.arch.model_config import ModelConfig
from llmq.arch.rope_scaling import RopeScaling
from llmq.base.errors import ConfigError
from llmq.options.options_io import make_config
from llmq.options.presets import PRESETS, preset

# The config.json of models as they are published.
PUBLISHED = json.loads((Path(__file__).parent / "golden" / "configs.json").read_text())
QWEN25_05B, QWEN35_27B, QWEN35_35B_A3B, QWEN3_NEXT_80B_A3B = (
    PUBLISHED[name] for name in ("qwen2.5", "qwen3.5", "qwen3.5_moe", "qwen3_next")
)
QWEN3_06B, LLAMA32_1B, MISTRAL_7B, PHI3_MINI = (
    PUBLISHED[name] for name in ("qwen3", "llama3.2", "mistral", "phi3")
)
OLMO2_1B, GEMMA3_1B, QWEN3_30B_A3B, QWEN15_MOE = (
    PUBLISHED[name] for name in ("olmo2", "gemma3", "qwen3_moe", "qwen2_moe")
)
OLMOE_7B, MIXTRAL_8X7B, GPT_OSS_20B, GPT2 = (
    PUBLISHED[name] for name in ("olmoe", "mixtral", "gpt_oss", "gpt2")
)


GRANITE = LLAMA32_1B | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
HYBRID = preset("granite-4.0-h-tiny").to_hf()


@pytest.mark.parametrize(
    ("hf", "preset_name", "differences"),
    [
        (QWEN25_05B, "qwen2.5-0.5b", {}),
        (QWEN3_06B, "qwen3-0.6b", {}),
        (GPT2, "gpt2", {}),
        (QWEN3_30B_A3B, "qwen3-30b-a3b", {}),
        (QWEN15_MOE, "qwen1.5-moe-a2.7b", {}),
        (OLMOE_7B, "olmoe-1b-7b", {}),
        (MIXTRAL_8X7B, "mixtral-8x7b", {}),
        (GPT_OSS_20B, "gpt-oss-20b", {}),
        (PHI3_MINI, "phi-3-mini", {"max_positions": 2047}),
        (OLMO2_1B, "olmo-2-1b", {}),
        (QWEN35_27B, "qwen3.5-27b", {}),
        (QWEN35_35B_A3B, "qwen3.5-35b-a3b", {}),
        (QWEN3_NEXT_80B_A3B, "qwen3-next-80b-a3b", {}),
        (GEMMA3_1B, "gemma-3-1b", {"other_eos_token_ids": (106,)}),
        (
            LLAMA32_1B,
            "llama-3.2-1b",
            {
                "max_positions": 131072,
                "pad_token_id": None,
                "other_eos_token_ids": (128008, 128009),
                "rope_scaling": RopeScaling(
                    kind="llama3",
                    factor=32.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_positions=8192,
                ),
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_configs_equal_presets(hf, preset_name, differences):
    assert ModelConfig.from_hf(hf) == replace(preset(preset_name), **differences)


def test_published_mistral_config():
    assert ModelConfig.from_hf(MISTRAL_7B) == ModelConfig(
        architecture="MistralForCausalLM",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=32768,
        norm="rmsnorm",
        norm_eps=1e-5,
        activation="swiglu",
        positions="rope",
        rope_theta=1e6,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


MODELS = {
    **{name: ModelConfig.from_hf(hf) for name, hf in PUBLISHED.items()},
    "llama_biased_linear_rope": replace(
        preset("tiny-llama"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_dim=32,
        tied_embeddings=False,
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
    ),
    "qwen3_biased": replace(preset("tiny-qwen3"), qkv_bias=True, o_bias=True, rope_theta=1e6),
    "qwen3_moe_some": replace(
        preset("tiny-qwen3-moe"),
        experts=Experts(count=6, active=3, size=40, layers=(True, False) * 3, aux_loss=0.01),
    ),
    "gemma3_27b": preset("gemma-3-27b"),
    "gemma3_full": replace(preset("tiny-gemma3"), windowed_layers=(False,) * 6),
    "gpt2_narrow_mlp": replace(preset("tiny-gpt2"), intermediate_size=256, pad_token_id=0),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_own_config_json_reads_back(model):
    assert ModelConfig.from_hf(json.loads(json.dumps(model.to_hf()))) == model


FIELDS_OF_OTHERS = {
    "both": (),
    "4": ("rope_parameters", "dtype"),
    "5": ("rope_scaling", "rope_theta", "torch_dtype"),
}
"""Fields that config.json of one transformers generation does not have."""


def _layers_as_seen_by_transformers(hf_config):
    """The shapes and constants that transformers would build, from its own config object."""
    names = {"gpt2": ("n_embd", "n_head", "n_layer", "n_positions")}.get(
        hf_config.model_type,
        ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"),
    )
    return {name: getattr(hf_config, name) for name in (*names, "vocab_size")}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("generation", ["both", "4", "5"])
def test_transformers_reads_our_config_json(model, generation, tmp_path):
    transformers = pytest.importorskip("transformers")
    hf = model.to_hf("fp32")
    for field in FIELDS_OF_OTHERS[generation]:
        hf.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)

    assert str(loaded.dtype) == "torch.float32"
    assert _layers_as_seen_by_transformers(loaded).items() <= hf.items()
    if model.positions == "rope":
        rope = loaded.rope_parameters.get("full_attention", loaded.rope_parameters)
        assert rope["rope_theta"] == model.rope_theta
        kind = model.rope_scaling.kind if model.rope_scaling else "default"
        assert rope["rope_type"] == kind
        assert loaded.head_dim == model.head_dim
        assert loaded.num_key_value_heads == model.num_kv_heads
    # The config that transformers writes for what it understood is the same model again.
    loaded.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf({"architectures": [model.architecture], **saved}) == model


WHOLE = [name for name, model in PRESETS.items() if model.mlp_layers is None]


@pytest.mark.parametrize("name", [name for name in WHOLE if name.startswith("tiny")])
def test_weights_of_transformers_have_our_shapes(name):
    """A model that transformers builds from our config.json has our biases, norms and sizes."""
    transformers = pytest.importorskip("transformers")
    model = preset(name)
    model = model.with_layers([*model.layer_kinds][-1:])  # the kind with attention
    hf = model.to_hf()
    built = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{k: v for k, v in hf.items() if k != "dtype"})
    )
    assert type(built).__name__ == model.architecture
    shapes = {key: tuple(weight.shape) for key, weight in built.state_dict().items()}
    names = {key: [m.format(0) for m in ms] for key, ms in model.arch.modules.items()}

    def rows(key):
        """The rows of the matrix that the modules of a parameter make up, whose columns are
        channels."""
        parts = [shapes[f"{name}.weight"] for name in names[key]]
        return sum(p[model.arch.transposed] for p in parts)

    assert shapes[f"{names['embed'][0]}.weight"] == (model.vocab_size, model.hidden_size)
    for matrix in model.matrices(0):
        if not matrix.of_experts:
            parts = [shapes[f"{part.module}.weight"] for part in matrix.parts]
            assert sum(part[model.arch.transposed] for part in parts) == matrix.shape[0]
    biases = {"qkv": model.qkv_bias, "o": model.o_bias} if "qkv" in names else {}
    if model.has_experts(0):
        at, C, F = model.arch.experts_at.format(0), model.hidden_size, model.expert_size
        up, down = (2 * F, C), (C, F)
        stored = (up[::-1], down[::-1]) if model.arch.paired else (up, down)
        for name, shape in zip(("gate_up_proj", "down_proj"), stored, strict=True):
            assert shapes[f"{at}.{name}"] == (model.experts.count, *shape)
    else:
        assert rows("up") == model.intermediate_size * (2 if model.gated else 1)
        assert f"{names['down'][0]}.weight" in shapes
        biases["up"] = model.mlp_bias
    for key, bias in biases.items():
        assert all((f"{name}.bias" in shapes) == bias for name in names[key]), key
    assert any(".q_norm." in name for name in shapes) == model.qk_norm
    assert f"{names['o'][0]}.weight" in shapes


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (
            LLAMA32_1B,
            {"architectures": ["FalconForCausalLM"]},
            "architectures: 'FalconForCausalLM'",
        ),
        (LLAMA32_1B, {"architectures": None}, "architectures must hold one name, got None"),
        (LLAMA32_1B, {"architectures": ["a", "b"]}, "architectures must hold one name"),
        (LLAMA32_1B, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        (LLAMA32_1B, {"hidden_size": "2048"}, "hidden_size: expected int, got '2048'"),
        (LLAMA32_1B, {"hidden_size": 0}, "hidden_size: must be positive, got 0"),
        (LLAMA32_1B, {"num_key_value_heads": 5}, "num_kv_heads: 5 does not divide 32"),
        (LLAMA32_1B, {"head_dim": 63}, "head_dim: RoPE needs an even number"),
        (LLAMA32_1B, {"head_dim": None, "hidden_size": 2050}, "hidden_size 2050 is no multiple"),
        (LLAMA32_1B, {"eos_token_id": "</s>"}, "eos_token_id must be one id"),
        (
            LLAMA32_1B,
            {"rope_scaling": {"type": "axial", "factor": 2.0}},
            "rope_scaling.rope_type: 'axial'",
        ),
        (LLAMA32_1B, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        (
            LLAMA32_1B,
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "factor must be >= 1",
        ),
        (LLAMA32_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (
            QWEN3_06B,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}},
            "beta_slow must be positive and at most beta_fast, got 1.0 and 0.5",
        ),
        (
            QWEN3_06B,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention: parameters per layer type",
        ),
        (QWEN3_06B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            QWEN25_05B,
            {"use_sliding_window": True, "max_window_layers": 23, "sliding_window": 0},
            "sliding_window: must be positive, and use_sliding_window true, where layers have one",
        ),
        (QWEN25_05B, {"model_type": "llama"}, "model_type: 'llama' is not supported, only 'qwen2'"),
        (QWEN25_05B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window: must be positive, got 0"),
        (
            PHI3_MINI,
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "rope_scaling: short_factor must be 48 positive numbers, got 1 values",
        ),
        (PHI3_MINI, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only default, longrope"),
        (PHI3_MINI, {"partial_rotary_factor": 0.7}, "partial_rotary_factor: 0.7 of 96 channels"),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported"),
        (GEMMA3_1B, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: 30.0"),
        (GEMMA3_1B, {"final_logit_softcapping": "x"}, "final_logit_softcapping: expected float"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        (GEMMA3_1B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be positive"),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier: must be positive, got 0"),
        (GRANITE, {"logits_scaling": float("nan")}, "logits_scaling: must be positive, got nan"),
        (GRANITE, {"attention_multiplier": -1.0}, "attention_scale: must be positive, got -1"),
        (
            GRANITE | {"residual_multiplier": 0.22},
            {"attention_bias": True},
            "residual_multiplier: not with biases of attention's output and the MLP",
        ),
        (HYBRID, {"mamba_d_head": 32}, "mamba_d_head: 48 heads of it must be 3072 channels, got"),
        (HYBRID, {"mamba_proj_bias": True}, "mamba_proj_bias: True is not supported"),
        (HYBRID, {"time_step_limit": [0.001, 0.1]}, "time_step_limit: "),
        (HYBRID, {"layer_types": ["mamba"]}, "layer_types: expected 40 of 'mamba' and 'attention'"),
        (HYBRID, {"mamba_n_groups": 5}, "key_heads: 5 do not divide 48 value heads"),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, "layer_types: expected 26 of"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern: must be positive"),
        (GEMMA3_1B, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type: 'yarn'"),
        (
            GEMMA3_1B,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters: expected sliding_attention and full_attention",
        ),
        (
            GEMMA3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            "rope_type: 'linear' is not supported",
        ),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "must meet 1 to 32 of at most 512 experts"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "num_experts and num_local_experts differ"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step: must be positive"),
        (OLMOE_7B, {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported, only None"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        (GPT2, {"activation_function": "relu"}, "activation_function: 'relu'"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights: False"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention: True"),
        (GPT2, {"n_head": 11}, "n_embd 768 is no multiple of n_head 11"),
        (QWEN25_05B, {"rope_theta": 0.0}, "rope_theta: must be positive, got 0.0"),
        (QWEN25_05B, {"rope_theta": math.nan}, "rope_theta: must be positive, got nan"),
        (
            LLAMA32_1B,
            {"rope_scaling": LLAMA32_1B["rope_scaling"] | {"factor": math.nan}},
            "rope_scaling: factor must be >= 1, got nan",
        ),
        (
            LLAMA32_1B,
            {"rope_scaling": LLAMA32_1B["rope_scaling"] | {"low_freq_factor": 4.0}},
            "low_freq_factor must be positive and less than high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_unsupported_configs_name_the_field(base, change, message):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf({**base, **change})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (QWEN25_05B, {"use_sliding_window": True, "max_window_layers": 24}),  # in no layer
        (QWEN3_06B, {"attention_bias": None}),
        (QWEN25_05B, {"max_window_layers": None}),
    ],
)
def test_other_ways_to_say_the_same(base, change):
    assert ModelConfig.from_hf({**base, **change}) == ModelConfig.from_hf(base)


@pytest.mark.parametrize("hf", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_missing_sizes_are_errors_not_defaults(hf):
    sizes = {"architectures", "vocab_size", "hidden_size", "intermediate_size", "n_embd", "n_head"}
    sizes |= {"num_attention_heads", "num_hidden_layers", "n_layer", "n_positions"}
    sizes |= {"max_position_embeddings", "num_experts", "moe_intermediate_size"}
    sizes |= {"num_experts_per_tok", "num_local_experts", "shared_expert_intermediate_size"}
    for name in sizes & set(hf):
        with pytest.raises(ConfigError, match=name):
            ModelConfig.from_hf({key: value for key, value in hf.items() if key != name})


def test_fields_that_may_be_missing_have_the_defaults_of_transformers():
    newer = ("head_dim", "num_key_value_heads")
    model = ModelConfig.from_hf({k: v for k, v in LLAMA32_1B.items() if k not in newer})
    assert (model.head_dim, model.num_kv_heads) == (64, 32)
    bare_qwen3 = {k: v for k, v in QWEN3_06B.items() if k != "head_dim"}
    assert ModelConfig.from_hf(bare_qwen3).head_dim == 128
    mistral = ModelConfig.from_hf({k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"})
    assert mistral.sliding_window == 4096


def test_layers_of_gemma3():
    """Files of transformers 4 say which layers have a window in two ways, 5 has RoPE by kind."""
    model = ModelConfig.from_hf(GEMMA3_1B)
    assert [i for i, window in enumerate(model.windowed_layers) if not window] == [5, 11, 17, 23]
    assert model.rope_of(0) == (1e4, None, 1, 256) and model.rope_of(5) == (1e6, None, 1, 256)
    kinds = ["sliding_attention"] * 25 + ["full_attention"]
    uneven = ModelConfig.from_hf(GEMMA3_1B | {"layer_types": kinds})
    assert uneven.windowed_layers == (True,) * 25 + (False,)
    uneven = ModelConfig.from_hf(GEMMA3_1B | {"layer_types": ["full_attention", *kinds[1:]]})
    assert "sliding_window_pattern" not in uneven.to_hf()
    assert ModelConfig.from_hf(uneven.to_hf()) == uneven
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    new = {name: value for name, value in GEMMA3_1B.items() if name not in old}
    model = ModelConfig.from_hf(new | {"rope_parameters": rope})
    stretched = RopeScaling(kind="linear", factor=8.0)
    assert model.rope_of(0)[:2] == (3e4, None) and model.rope_of(5)[:2] == (2e6, stretched)
    assert model.layer_kinds == {0: 22, 5: 4}
    assert model.with_layers([0, 5, 0]).windowed_layers == (True, False, True)
    bare = ModelConfig.from_hf(new)
    assert bare == ModelConfig.from_hf(GEMMA3_1B)


def test_a_window_as_long_as_the_positions_is_full_attention():
    windowed = {**MISTRAL_7B, "sliding_window": 4096, "max_position_embeddings": 4096}
    model = ModelConfig.from_hf(windowed)
    assert (model.max_positions, model.sliding_window) == (4096, None)


@pytest.mark.parametrize(
    ("hf", "window"),
    [
        (MISTRAL_7B | {"sliding_window": 1024}, 1024),
        (PHI3_MINI | {"max_position_embeddings": 4096}, 2047),  # as released
    ],
)
def test_windows_of_all_layers(hf, window):
    """Windows are in the config that is written; sequences may be longer."""
    model = ModelConfig.from_hf(hf)
    assert model.windows == {window}
    written = model.to_hf()
    assert written["sliding_window"] == window
    assert written["max_position_embeddings"] == hf["max_position_embeddings"]
    assert ModelConfig.from_hf(written) == model
    make_config({"seq-len": hf["max_position_embeddings"]}).validate_with(model)


def test_qwens_windows_are_those_of_some_layers():
    assert QWEN25_05B["sliding_window"] and ModelConfig.from_hf(QWEN25_05B).windows == {None}
    used = QWEN25_05B | {"use_sliding_window": True, "sliding_window": 512}
    for change, first in (
        ({"max_window_layers": 21}, 21),
        ({"max_window_layers": 0}, 0),
        ({"max_window_layers": 24}, 24),
        ({"layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 4}, 20),
    ):
        model = ModelConfig.from_hf(used | change)
        windows = [model.window_of(layer) for layer in range(24)]
        assert windows == [None] * first + [512] * (24 - first)
        assert model.to_hf()["max_window_layers"] == first
        assert ModelConfig.from_hf(model.to_hf()) == model
    kinds = ["sliding_attention", "full_attention"] * 12
    model = ModelConfig.from_hf(used | {"layer_types": kinds})
    assert model.windowed_layers == (True, False) * 12
    assert ModelConfig.from_hf(model.to_hf()) == model
    assert model.to_hf()["layer_types"] == kinds
    with pytest.raises(ConfigError, match="use_sliding_window true, where layers have one"):
        ModelConfig.from_hf(QWEN25_05B | {"layer_types": kinds})


def test_dropout_is_reported_as_ignored():
    assert [line.split()[1] for line in ignored_fields(GPT2)] == [
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
    ]
    assert ignored_fields(LLAMA32_1B) == []


def test_derived_sizes():
    model = preset("qwen2.5-0.5b")
    assert model.matrices(0)[0].shape == (64 * (14 + 2 * 2), 896)
    assert (model.padded_vocab, preset("gpt2").padded_vocab) == (151936, 50304)
    llama = ModelConfig.from_hf(LLAMA32_1B)
    assert llama.eos_token_id == 128001
    assert llama.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize(
    "change", [{"qk_norm": True}, {"norm": "layernorm"}, {"qkv_bias": False}, {"o_bias": True}]
)
def test_validate_rejects_what_the_architecture_cannot_express(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(preset("tiny"), **change).validate()
