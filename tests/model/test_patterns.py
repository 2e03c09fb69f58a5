"""Adapters of other ranks and scalings by patterns, of some layers, and of what an expression
matches: as peft has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.merge import merge_adapter
from llmq.options.adapters import adapted_modules, adapters_of
from tests.adapters import batches, targets
from tests.model.test_lora import gradients, tensors
from tests.models import exported, hf_model, torch_loss, trainer_for

RANKS = {"q_proj": 2, r"layers\.1\..*down_proj": 7, "gate_proj": 5}
ALPHAS = {"q_proj": 3, "v_proj": 9.5, r"layers\.0\..*o_proj": 1}
FUSED = {r"layers\.1\.self_attn\.qkv_proj": 6}
SETTINGS = {
    "patterns": ("qwen2_untied", {"rank_pattern": RANKS, "alpha_pattern": ALPHAS}),
    "rs": ("qwen3", {"rank_pattern": RANKS, "use_rslora": True, "layers_to_transform": [1]}),
    "fused": ("phi3", {"rank_pattern": FUSED, "alpha_pattern": FUSED}),
    "layer": ("qwen3", {"layers_to_transform": 0, "layers_pattern": "layers"}),
    "of gpt2": ("gpt2", {"layers_to_transform": [1], "rank_pattern": {"attn.c_proj": 8}}),
    "expression": ("qwen3", {"target_modules": r".*(0\.self_attn\.[qv]|1\.mlp\.up)_proj"}),
    "biases": ("qwen2", {"bias": "all"}),
    "biases, norms' too": ("gpt2", {"bias": "all", "target_modules": ["c_attn"]}),
    "adapted biases": ("gpt2", {"bias": "lora_only", "target_modules": ["attn.c_proj"]}),
    "biases of adapters": ("llama_biases", {"bias": "lora_only", "layers_to_transform": [1]}),
    "biases, none of experts": ("gpt_oss", {"bias": "all", "target_modules": ["q_proj", "o_proj"]}),
    "biases, no dt_bias": ("qwen3_5", {"bias": "all", "target_modules": ["v_proj"]}),
    "head": ("qwen2_untied", {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
    "tied head": ("qwen3", {"target_modules": ["lm_head"], "rank_pattern": {"lm_head": 7}}),
    "tied, both": ("gpt2", {"target_modules": ["wte", "lm_head", "c_attn"]}),
    "scaled embedding": ("gemma3", {"target_modules": ["embed_tokens", "up_proj"]}),
    "factors": ("granite", {"target_modules": ["embed_tokens", "lm_head", "o_proj", "down_proj"]}),
    "excluded": ("qwen3", {"exclude_modules": r".*0\.mlp.*|.*1\.self_attn\.o_proj"}),
}


CHANGED = {"qwen3_5": {"attention_bias": True}}
"""Fields of a configuration of models.py that differ here."""


def saved(folder: Path, name: str, settings: dict) -> peft.PeftModel:
    """With all of its adapters moved."""
    given = {"r": 4, "lora_alpha": 6, "target_modules": targets(name), "task_type": "CAUSAL_LM"}
    given |= {"fan_in_fan_out": name == "gpt2"} | settings
    model = hf_model(name, **CHANGED.get(name, {}))
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def trained(trainer) -> dict[str, np.ndarray]:
    """The gradients of adapters and of biases, by PEFT's names."""
    values = trainer.gradients()
    found = tensors(trainer, values)
    wrapped = {name.partition(".lora_")[0] for name in found}
    for param in (p for s in trainer._step.table if s.name == "biases" for p in s.params):
        for part in param.hf:
            name = f"base_model.model.{part.name}"
            module = name.removesuffix(".bias")
            name = f"{module}.base_layer.bias" if module in wrapped else name
            found[name] = part.stored(values[param.name][part.start : part.stop])
    return found


@pytest.mark.parametrize("name, settings", SETTINGS.values(), ids=SETTINGS)
def test_equals_peft(tmp_path, name, settings):
    """Losses and gradients beside what PEFT has written, and what is written for it again."""
    changed = CHANGED.get(name, {})
    model = saved(tmp_path / "in", name, settings)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [p for n, p in named.items() if n.endswith("bias") == bias],
            "weight_decay": decay,
        }
        for bias, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4)
    # AdamW makes steps of full size of gradients that are nothing but rounding, of keys' biases.
    options = {"adapter": tmp_path / "in", "weight_decay": 0.1, "adam_epsilon": 1e-4}
    with trainer_for(exported(name, **changed), **options) as trainer:
        for step, batch in enumerate(batches()[:3]):
            for group in optimizer.param_groups:
                group["lr"] = trainer.learning_rate(step)
            loss = torch_loss(model, [batch])
            optimizer.zero_grad()
            loss.backward()
            result = trainer.step([batch])
            assert result.loss == pytest.approx(loss.item(), abs=1e-5)
            got, want = trained(trainer), gradients(model, result.tokens)
            assert got.keys() == want.keys()
            for key, value in want.items():
                # Biases of keys have no gradient (softmax ignores them).
                bound = 1e-4 * max(np.linalg.norm(value), 1e-3 * result.norm)
                assert np.linalg.norm(got[key] - value) < bound, (step, key)
            torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
            optimizer.step()
        path = trainer.save(tmp_path / "ckpt")
        want = trainer.step(batches()[3:4]).loss
        trainer.load(path)
        assert trainer.step(batches()[3:4]).loss == want
        trainer.load(path)
        trainer.export(tmp_path / "out")
        adapters, model_config = adapters_of(trainer.config), trainer.model
    again = peft.PeftModel.from_pretrained(hf_model(name, **changed), tmp_path / "out")
    assert torch_loss(again, batches()[3:4]).item() == pytest.approx(want, abs=1e-5)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "in" / "adapter_model.safetensors")
    # PEFT writes the tables that it has wrapped, too, as they were.
    theirs = {n: x for n, x in theirs.items() if not n.endswith("base_layer.weight")}
    assert {n: x.shape for n, x in stored.items()} == {n: x.shape for n, x in theirs.items()}
    assert sum("lora_" in n for n in stored) == 2 * len(adapted_modules(model_config, adapters))
    merge_adapter(str(exported(name, **changed)), tmp_path / "out", tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged") as merged:
        assert merged.step(batches()[3:4]).loss == pytest.approx(want, abs=1e-5)
    with trainer_for(exported(name, **changed), adapter=tmp_path / "out") as trainer:
        assert trainer.step(batches()[3:4]).loss == pytest.approx(want, abs=1e-5)


def test_options_begin_them(tmp_path):
    """Ranks that differ have zeros in what pads them, which stay zeros, on several ranks too."""
    options = {
        "lora_rank": 3, "lora_layers": "1", "lora_targets": r".*(q|v|down)_proj",
        "lora_rank_pattern": "q_proj=5,.*mlp.down_proj=2", "lora_alpha_pattern": {"v_proj": 12},
        "gpus": 2, "batch_size": 1, "grad_accum_dtype": "bf16", "model_dtype": "bf16",
    }  # fmt: skip
    every = [tuple(x[:1] for x in batch) for batch in batches()]
    with trainer_for(exported("qwen3"), **options) as trainer:
        for step in range(2):
            trainer.step(every[2 * step : 2 * step + 2])
        weights, shapes = trainer.weights(), {}
        for param in (p for slab in trainer._step.table for p in slab.params if p.of_adapter):
            rest = weights[param.name].copy()
            for part in param.hf:
                shapes[part.name.partition("layers.")[2]] = part.stored(
                    rest[part.start : part.stop]
                ).shape
                rest[part.start : part.stop, : part.columns] = 0
            assert not rest.any()
        assert trainer.config.lora_rank_pattern == ("q_proj=5", ".*mlp.down_proj=2")
        trainer.export(tmp_path)
    ranks = {name.split(".")[2]: s[0] for name, s in shapes.items() if "lora_A" in name}
    assert ranks == {"q_proj": 5, "v_proj": 3, "down_proj": 2}
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["alpha_pattern"] == {"v_proj": 12} and said["rank_pattern"]["q_proj"] == 5
    peft.PeftModel.from_pretrained(hf_model("qwen3"), tmp_path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lora_layers": "1-2"}, "--lora-layers: 1-2 names layers that a model of 2 does not"),
        ({"lora_targets": ".*x_proj"}, r"--lora-targets: Qwen3.* has no modules that match '.*x_p"),
        ({"lora_targets": "(q"}, r"--lora-targets: '\(q' is no regular expression"),
        ({"lora_rank_pattern": "x_proj=3"}, "--lora-rank-pattern: no module with adapters is cal"),
        ({"lora_alpha_pattern": "q_proj"}, "--lora-alpha-pattern: expected PATTERN=NUMBER, with"),
        ({"lora_rank_pattern": "q_proj=2.5"}, "a rank is a whole number, got"),
        ({"lora_rank_pattern": "q_proj=99"}, "--lora-rank: 99 is larger than the matrix of q_proj"),
        ({"lora_rank_pattern": "q_proj=0"}, "--lora-rank-pattern: must be greater than 0"),
        ({"train": "biases"}, "--train: Qwen3ForCausalLM has no biases"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_for(exported("qwen3"), lora_rank=4, **options)


def test_a_file_that_lacks_a_layer_of_its_own(tmp_path):
    saved(tmp_path, "qwen3", {})
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers_to_transform": [0]}))
    with pytest.raises(LlmqError, match=r"holds .*layers\.1.*, which the adapters of this model"):
        trainer_for(exported("qwen3"), adapter=tmp_path)


def test_a_part_of_a_bias_is_not_trained(tmp_path):
    saved(tmp_path, "qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]})
    message = "q_proj, v_proj share a bias with others: adapt all of them"
    with pytest.raises(LlmqError, match=f"bias 'lora_only': {message}"):
        trainer_for(exported("qwen2"), adapter=tmp_path)
    with pytest.raises(ConfigError, match=f"--train: adapted-biases: {message}"):
        trainer_for(exported("qwen2"), lora_rank=2, lora_targets="q,v", train="adapted-biases")
    with pytest.raises(ConfigError, match="biases are all biases: leave adapted-biases out"):
        trainer_for(exported("qwen2"), lora_rank=2, train="biases,adapted-biases")
