"""Families that are a file each: the whole way of one, from config.json to text, as in
transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.checkpoint.hf import HfWeights
from llmq.model.generator import Request
from llmq.options.presets import preset, resolve_model
from llmq.run.sampling import Sampler
from llmq.runtime.machine import choose_machine
from llmq.state.params import weight_table
from tests.models import _SHARED as SHARED
from tests.models import (
    CONFIGS,
    LOSS_RTOL,
    VOCAB,
    exported,
    random_batch,
    randomized,
    same_gradients,
    step_as_torch,
    trainer_for,
)
from tests.models import pieces as by_file

FOUR = SHARED | {"num_hidden_layers": 4, "pad_token_id": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = FOUR | {
    "num_key_value_heads": 4, "kv_lora_rank": 48, "qk_rope_head_dim": 8, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
}  # fmt: skip
FAMILIES = {
    "smollm3": lambda: transformers.SmolLM3Config(**FOUR),
    "smollm3_all": lambda: transformers.SmolLM3Config(
        **FOUR, no_rope_layers=[1, 0, 0, 1], attention_bias=True, tie_word_embeddings=False
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **FOUR, sliding_window=5, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            "full_attention": YARN | {"rope_theta": 5e5},
        },
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**FOUR, head_dim=32),
    "exaone4": lambda: transformers.Exaone4Config(**FOUR, sliding_window=5),
    "exaone4_whole": lambda: transformers.Exaone4Config(
        **FOUR, sliding_window=None, layer_types=["full_attention"] * 4
    ),
    "gemma": lambda: transformers.GemmaConfig(**FOUR, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(  # small caps, which scores and logits reach
        **FOUR, head_dim=32, sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma4_unified": lambda: transformers.Gemma4UnifiedTextConfig(
        **FOUR, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, sliding_window=5,
        attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_separate": lambda: transformers.Gemma4TextConfig(
        **FOUR, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0, sliding_window=90,
        final_logit_softcapping=30.0,
    ),
    "gemma4_a4b": CONFIGS["gemma4_a4b"],
    "gemma4_e4b": lambda: transformers.Gemma4TextConfig(
        **FOUR | {"num_hidden_layers": 6}, head_dim=16, global_head_dim=32, sliding_window=5,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **FOUR | {"intermediate_size": 150}, block_multiple_of=16, conv_L_cache=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **FOUR, head_dim=32, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=48,
        n_shared_experts=2, routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True,
        n_group=2, topk_group=1,
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(  # heads of one size
        **LATENT | {"num_hidden_layers": 3}, q_lora_rank=40, qk_nope_head_dim=24, v_head_dim=32,
        routed_scaling_factor=1.8,
    ),
    "deepseek_v3_plain": lambda: transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=None, qk_nope_head_dim=16, v_head_dim=16, n_group=3, topk_group=2,
        first_k_dense_replace=2, num_nextn_predict_layers=0,
        rope_parameters=YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(  # values longer than keys
        **LATENT, q_lora_rank=40, qk_nope_head_dim=8, v_head_dim=24, first_k_dense_replace=1,
        norm_topk_prob=False, routed_scaling_factor=1.5, topk_method="group_limited_greedy",
        n_group=3, topk_group=2,
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **FOUR, head_dim=32, num_local_experts=6, num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **FOUR, head_dim=32, sliding_window=5,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **FOUR, head_dim=32, rope_parameters=YARN | {
            "rope_theta": 1e6, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    ),
    "cwm": lambda: transformers.CwmConfig(**FOUR, head_dim=32, sliding_window=5),
    "starcoder2": lambda: transformers.Starcoder2Config(**FOUR, sliding_window=7),
    "glm": lambda: transformers.GlmConfig(**FOUR, head_dim=32),
    "glm4": lambda: transformers.Glm4Config(**FOUR, head_dim=32),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**FOUR, head_dim=32, use_bias=True),
    "granite": lambda: transformers.GraniteConfig(
        **FOUR, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0,
        attention_multiplier=0.015625,
    ),
    "granite_plain": lambda: transformers.GraniteConfig(**FOUR, attention_bias=True, mlp_bias=True),
    "granitemoehybrid_experts": lambda: transformers.GraniteMoeHybridConfig(
        **FOUR | {"intermediate_size": 48}, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=6.0, attention_multiplier=0.1, num_local_experts=6, num_experts_per_tok=3,
        shared_intermediate_size=80, layer_types=["mamba", "attention"] * 2, mamba_n_heads=8,
        mamba_d_state=16,
    ),
    "granitemoehybrid_groups": lambda: transformers.GraniteMoeHybridConfig(
        **FOUR, num_local_experts=0, shared_intermediate_size=160, position_embedding_type="rope",
        layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_state=32,
        mamba_n_groups=4, mamba_d_conv=3, mamba_conv_bias=False, attention_bias=True,
    ),
    "nemotron_h_dense": lambda: transformers.NemotronHConfig(
        **FOUR, layers_block_type=["mlp", "linear_attention", "full_attention"], n_groups=4,
        head_dim=16, ssm_state_size=32, mamba_num_heads=4, mamba_head_dim=64, use_conv_bias=False,
    ),
    "arcee": lambda: transformers.ArceeConfig(**FOUR, mlp_bias=True),
    "helium": lambda: transformers.HeliumConfig(**FOUR, head_dim=16),
}  # fmt: skip


@pytest.fixture(params=FAMILIES, scope="module")
def model(request, tmp_path_factory):
    """A random model in torch, and its export."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).float().eval()
    randomized(made)
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return made, path


def test_loss_and_every_gradient_are_those_of_transformers(model):
    made, path = model
    made.zero_grad()
    with trainer_for(path) as trainer:
        step_as_torch(trainer, [random_batch(np.random.default_rng(0))], made)


def test_documents_of_a_sequence_do_not_see_each_other(model):
    """Packed, they have the loss and the gradients of each alone."""
    made, path = model
    made.zero_grad()
    inputs, targets = random_batch(np.random.default_rng(1), B=1)
    starts = np.zeros_like(inputs)
    starts[:, 9:] = 9
    total, count = 0.0, 0
    for piece in (slice(0, 9), slice(9, None)):
        logits = made(torch.from_numpy(inputs[:, piece]).long()).logits[0]
        labels = torch.from_numpy(targets[0, piece]).long()
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    options = {"batch_size": 1, "document_mask": True}
    with trainer_for(path, **options) as trainer:
        result = trainer.step([(inputs, targets, starts)])
        found = by_file(trainer, trainer.gradients())
    np.testing.assert_allclose(result.loss, total.item() / count, rtol=LOSS_RTOL)
    ours = {name: gradient / result.tokens for name, gradient in found.items()}
    same_gradients(ours, made, result.norm)


def test_text_goes_on_as_transformers_generates(model):
    made, path = model
    prompt = np.random.default_rng(2).integers(3, 131, 7).tolist()
    with torch.no_grad():
        want = made.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0].tolist()
    config, _ = resolve_model(str(path), from_scratch=False)
    with HfWeights(path) as weights:
        machine = choose_machine("cpu", 1)
        sampler = Sampler(machine, config, lambda w: w.load(weights.read), 32)
    ((_, found),) = sampler.generator.run([Request(prompt, 12, temperature=0)])
    assert prompt + found.ids == want


def test_its_export_is_the_model_for_transformers(model, tmp_path):
    made, path = model
    with trainer_for(path) as trainer:
        trainer.export(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.from_numpy(random_batch(np.random.default_rng(3))[0]).long()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, made(ids).logits, rtol=1e-5, atol=1e-5)
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ModelConfig.from_hf(hf) == ModelConfig.from_hf(
        json.loads((path / "config.json").read_text())
    )


def test_presets_of_gemma_4_are_the_released_sizes():
    """Read configs of transformers with the sizes of the released files, and write these again."""
    shared = {"head_dim": 256, "final_logit_softcapping": 30.0, "bos_token_id": 2}
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    e2b = transformers.Gemma4TextConfig(
        **shared, hidden_size=1536, intermediate_size=6144, num_hidden_layers=35,
        num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True,
        layer_types=kinds * 7,
    )  # fmt: skip
    a4b = transformers.Gemma4TextConfig(
        **shared, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_experts=128,
        num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, enable_moe_block=True, top_k_experts=8, sliding_window=1024,
        moe_intermediate_size=704, max_position_embeddings=262144,
    )  # fmt: skip
    for name, config in (("gemma-4-E2B", e2b), ("gemma-4-26B-A4B", a4b)):
        fields = config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
        assert ModelConfig.from_hf(fields) == preset(name)
        again = transformers.Gemma4TextConfig(**preset(name).to_hf())
        assert again.per_layer_config[-1].head_dim == 512
        assert again.kv_sharing_modes == config.kv_sharing_modes


@pytest.mark.parametrize(("options", "on_host"), [({}, False), ({"lora_rank": 4}, True)])
def test_a_table_of_layers_vectors_that_is_frozen_lies_in_host_memory(options, on_host):
    with trainer_for(exported("gemma4_e2b"), **options) as trainer:
        before = trainer.weights()
        trainer.step([random_batch(np.random.default_rng(0))])
        placement = trainer._step.weights.placement["per_layer_table"]
        moved = (
            before["model.embed_tokens_per_layer.weight"]
            != trainer.weights()["model.embed_tokens_per_layer.weight"]
        )
        assert placement.work.on_host == on_host != moved.any()


def test_blocks_of_several_shapes_share_transposed_codes():
    """Products of gradients have the bits that they have with codes of each block."""
    norms = []
    for keeps in (True, False):
        options = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "keep_transposed": keeps}
        with trainer_for(exported("gemma4_e2b"), **options) as trainer:
            norms.append(trainer.step([random_batch(np.random.default_rng(0))]).norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: must be from 0 to 3, got 4"),
        ({"num_kv_shared_layers": 3}, "no layer has the keys of layer 1"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input: 7 is not supported"),
    ],
)
def test_layers_without_keys_to_share_are_refused(fields, message):
    hf = json.loads((exported("gemma4_e2b") / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(hf | fields)


def test_layers_that_predict_further_tokens_stay_in_exports_of_glm(tmp_path):
    """GLM's files have such layers behind the last layer, and config.json has their number."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(FAMILIES["glm4_moe"]()).save_pretrained(tmp_path)
    further = {f"model.layers.4.{name}.weight": torch.ones(6, 64) for name in ("enorm", "mlp.gate")}
    tensors = load_file(tmp_path / "model.safetensors") | further
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for text_only in (False, True):
        with trainer_for(tmp_path, text_only=text_only) as trainer:
            trainer.export(tmp_path / "out")
        kept = load_file(tmp_path / "out" / "model.safetensors").keys() & further.keys()
        assert kept == (set() if text_only else further.keys())
        hf = json.loads((tmp_path / "out" / "config.json").read_text())
        assert ("num_nextn_predict_layers" in hf) != text_only
        shutil.rmtree(tmp_path / "out")


def test_the_pattern_of_exaones_windows_may_be_a_word():
    """The released config.json of 32B has one beside layer_types."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    fields = FAMILIES["exaone4"]().to_dict() | {"architectures": ["Exaone4ForCausalLM"]}
    model = ModelConfig.from_hf(fields | {"sliding_window_pattern": "LLLG", "layer_types": kinds})
    assert model.windowed_layers == model.rope_layers == (True, True, True, False)


@pytest.mark.parametrize("kind", ["Mistral", "Ministral3"])
def test_a_model_with_images_says_of_which_family_its_text_is(kind):
    """Two families have one class beside images."""
    text = getattr(transformers, f"{kind}Config")(**FOUR)
    fields = transformers.Mistral3Config(text_config=text).to_dict()
    fields["architectures"] = ["Mistral3ForConditionalGeneration"]
    assert ModelConfig.from_hf(fields).architecture == f"{kind}ForCausalLM"


PUBLISHED = {
    "LFM2-1.2B": (1_170_340_608, {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rope_theta": 1e6, "vocab_size": 65536,
    }),
    "granite-4.0-h-micro": (3_191_396_096, {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_size": 2048,
        "layer_types": [*["mamba"] * 5, "attention", *(["mamba"] * 9 + ["attention"]) * 3,
                        *["mamba"] * 4],
        "logits_scaling": 8, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "num_local_experts": 0, "position_embedding_type": "nope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "shared_intermediate_size": 8192,
        "tie_word_embeddings": True, "vocab_size": 100352,
    }),
    "MiniMax-M2": (228_689_764_864, {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "rotary_dim": 64,
        "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 5e6, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "use_routing_bias": True, "vocab_size": 200064,
    }),
}  # fmt: skip


NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "conv_kernel": 4,
    "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144,
    "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "n_group": 1, "n_groups": 8,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "rope_theta": 10000, "ssm_state_size": 128,
    "routed_scaling_factor": 2.5, "time_step_limit": [0.0, float("inf")], "topk_group": 1,
    "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip


def test_layers_of_nemotron_have_one_half():
    """Read the fields of the released file, which transformers replaces."""
    model = ModelConfig.from_hf(NEMOTRON_3_NANO)
    assert model == preset("Nemotron-3-Nano-30B-A3B")
    assert [model.halves(i)[0].kind for i in (0, 1, 5)] == ["mamba", "experts", "attention"]
    assert all(len(model.halves(i)) == 1 for i in range(52))
    assert model.with_layers([5, 1]).to_hf()["layers_block_type"] == ["full_attention", "moe"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hybrid_override_pattern": "MEX"}, "expected some of .*, got .*'X'"),
        ({"moe_latent_size": 64}, "moe_latent_size: 64 is not supported"),
        ({"n_group": 16, "topk_group": 17}, "cannot be in 17 of 16 groups"),
        ({"n_group": 128, "topk_group": 4}, "6 of 128 cannot be in 4 of 128 groups"),
        ({"n_group": 32, "topk_group": 1}, "6 of 128 cannot be in 1 of 32 groups"),
    ],
)
def test_other_forms_of_nemotron_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(NEMOTRON_3_NANO | fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_released_files_that_transformers_replaces(name):
    """The number of parameters is that of the model's name."""
    count, fields = PUBLISHED[name]
    model = ModelConfig.from_hf(fields)
    assert sum(param.count for slab in weight_table(model) for param in slab.params) == count
    assert model.rotary_dim == 64
    assert ModelConfig.from_hf(model.to_hf()) == model.without_foreign_tokens()
