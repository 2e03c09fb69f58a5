"""Small random Hugging Face models of every architecture, and trainers on them."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from llmq.base.result import Result
from llmq.checkpoint.hf import name_beside
from llmq.run.trainer import Trainer
from llmq.state.params import weight_table

# Rounding of F32 sums in two orders; the project's own definition of correct.
LOSS_RTOL, GRADIENT_RTOL, TEN_STEPS_RTOL = 1e-5, 1e-4, 1e-4
VOCAB = 131
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**_SHARED, tie_word_embeddings=True),
    "qwen2_untied": lambda: transformers.Qwen2Config(  # a window in the second layer
        **_SHARED, tie_word_embeddings=False,
        use_sliding_window=True, sliding_window=5, max_window_layers=1,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SHARED, head_dim=32, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(
        **_SHARED, rope_parameters=_LLAMA3, head_dim=32, tie_word_embeddings=False
    ),
    "llama_biases": lambda: transformers.LlamaConfig(
        **_SHARED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**_SHARED, sliding_window=11),
    "phi3": lambda: transformers.Phi3Config(**_SHARED, pad_token_id=None, sliding_window=7),
    "olmo2": lambda: transformers.Olmo2Config(**_SHARED, head_dim=32, pad_token_id=None),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHARED, head_dim=32, query_pre_attn_scalar=20, sliding_window=5, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **_SHARED, head_dim=16, global_head_dim=32, sliding_window=5,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4_e2b": lambda: transformers.Gemma4TextConfig(  # layers 2 and 3 have the keys of 1
        **_SHARED | {"num_hidden_layers": 4}, head_dim=16, global_head_dim=32, sliding_window=5,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2,
        use_double_wide_mlp=True, pad_token_id=None,
        layer_types=["sliding_attention", *["full_attention"] * 3],
    ),
    "gemma4_a4b": lambda: transformers.Gemma4TextConfig(
        **_SHARED, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, sliding_window=5,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, pad_token_id=None, num_experts=5,
        top_k_experts=2, moe_intermediate_size=48, enable_moe_block=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_SHARED, tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=2.0, attention_multiplier=0.1,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(  # an MLP in the second layer
        **_SHARED | {"num_hidden_layers": 3}, head_dim=32, tie_word_embeddings=False,
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SHARED, tie_word_embeddings=False, num_experts=5, num_experts_per_tok=3,
        moe_intermediate_size=48, shared_expert_intermediate_size=80,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_SHARED, pad_token_id=None, num_experts=5, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SHARED, num_local_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SHARED | {"intermediate_size": 48}, head_dim=32, pad_token_id=None, sliding_window=5,
        num_local_experts=8, num_experts_per_tok=2, swiglu_limit=0.3,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16,
        },
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(  # an MLP in the first layer
        **_SHARED | {"num_key_value_heads": 4}, q_lora_rank=32, kv_lora_rank=48,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.9,
            "mscale_all_dim": 0.9, "original_max_position_embeddings": 16,
        },
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **_SHARED, head_dim=64, tie_word_embeddings=True, pad_token_id=None,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{k: v for k, v in _SHARED.items() if k != "intermediate_size"}, head_dim=64,
        tie_word_embeddings=False, pad_token_id=None, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=48, shared_expert_intermediate_size=80,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(  # an MLP in the second layer
        **_SHARED, head_dim=64, tie_word_embeddings=True, pad_token_id=None, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=80,
        mlp_only_layers=[1], layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=32,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_SHARED, tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=2.0, attention_multiplier=0.1, num_local_experts=0,
        shared_intermediate_size=160, layer_types=["mamba", "attention"], mamba_n_heads=16,
        mamba_expand=8, mamba_d_state=32, pad_token_id=None,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_SHARED, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=32, ssm_state_size=32, mamba_num_heads=16, mamba_head_dim=32, n_groups=2,
        n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, pad_token_id=None,
        moe_shared_expert_intermediate_size=80, routed_scaling_factor=2.5,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip

WITH_EXPERTS = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss")
WITH_EXPERTS += ("gemma4_a4b", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "nemotron_h")


def hf_model(name: str, seed: int = 0, **changed: object) -> transformers.PreTrainedModel:
    """A model in F32 whose every parameter is random, biases and norms included.

    changed: fields of its configuration, lists as tuples.
    """
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.update({k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for module in model.modules():
        if hasattr(module, "limit"):  # some versions of transformers have gpt-oss's fixed
            module.limit = config.swiglu_limit
    return randomized(model)


def randomized(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The model with random numbers added to every parameter, and to constants of routers. Gemma
    4's layers get factors, and weights of queries that keep their scores, which have no other
    factor, small."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
        for module in model.modules():
            if hasattr(module, "layer_scalar"):
                module.layer_scalar.fill_(0.75)
                module.self_attn.q_norm.weight.mul_(0.15)
    return model


@cache
def exported(name: str, **changed: object) -> Path:
    """The directory of hf_model(name, **changed), written once; for reading only."""
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    atexit.register(folder.cleanup)
    hf_model(name, **changed).save_pretrained(folder.name)
    return Path(folder.name)


def trainer_for(path: Path, **options: object) -> Trainer:
    """A CPU trainer on an exported model; small batches, F32, unless the options say otherwise."""
    defaults = {
        "model": str(path),
        "device": "cpu",
        "gpus": 1,
        "model_dtype": "fp32",
        "batch_size": 2,
        "seq_len": 24,
        "grad_accumulation": 1,
        "steps": 10,
        "learning_rate": 1e-3,
        "tune": False,
    }
    return Trainer(**(defaults | options))


def random_batch(rng: np.random.Generator, B: int = 2, T: int = 24) -> tuple:
    """Inputs and targets, some of them masked."""
    inputs = rng.integers(0, VOCAB, (B, T)).astype(np.int32)
    targets = rng.integers(0, VOCAB, (B, T)).astype(np.int32)
    targets[rng.random((B, T)) < 0.2] = -100
    return inputs, targets


def as_stored(model: transformers.PreTrainedModel, tensors: dict) -> dict[str, torch.Tensor]:
    """Tensors by the names of the model's parameters -> by those of its files, where experts of one
    parameter are modules."""
    return {name: t.contiguous() for name, t in revert_weight_conversion(model, tensors).items()}


def torch_gradients(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The gradients of all parameters, by the names of the model's files."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.numpy() for name, g in as_stored(model, gradients).items()}


def torch_loss(model: transformers.PreTrainedModel, batches: list[tuple]) -> torch.Tensor:
    """Mean loss over all unmasked targets of the batches."""
    total, count = 0.0, 0
    for inputs, targets in batches:
        logits = model(torch.from_numpy(inputs).long()).logits
        labels = torch.from_numpy(targets).long().view(-1)
        total = total + torch.nn.functional.cross_entropy(
            logits.view(-1, VOCAB), labels, ignore_index=-100, reduction="sum"
        )
        count += int((labels != -100).sum())
    return total / count


def pieces(trainer: Trainer, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by our parameter names -> by Hugging Face names."""
    out = {}
    for slab in weight_table(trainer.model):
        for param in slab.params:
            for part in param.hf:
                rows = param.by_row(arrays[param.name])[part.start : part.stop]
                name = name_beside(trainer.model.arch.file_prefix, part.name)
                out[name] = part.stored(rows)
    return out


def same_gradients(ours: dict, theirs: Any, whole: float, rtol: float = 2 * GRADIENT_RTOL) -> None:
    """Compare them, to rounding. theirs: by name, or the model that has them. whole: the norm of
    all, for biases of keys: they have none, as softmax ignores them."""
    theirs = theirs if isinstance(theirs, dict) else torch_gradients(theirs)
    assert ours.keys() >= theirs.keys()
    for name, gradient in theirs.items():
        error, scale = np.linalg.norm(ours[name] - gradient), np.linalg.norm(gradient)
        assert error <= rtol * max(scale, 1e-3 * whole), name


def step_as_torch(
    trainer: Trainer,
    batches: list[tuple],
    model: transformers.PreTrainedModel,
    parts: list[tuple] | None = None,
) -> Result:
    """The result of a step whose loss and gradients are the model's in torch. parts: what torch
    computes in place of the batches."""
    result, loss = trainer.step(batches), torch_loss(model, parts or batches)
    loss.backward()
    np.testing.assert_allclose(result.loss, loss.item(), rtol=LOSS_RTOL)
    ours = pieces(trainer, trainer.gradients())
    found = {name: gradient / result.tokens for name, gradient in ours.items()}
    same_gradients(found, model, result.norm, GRADIENT_RTOL)
    return result
