"""Adapters of parameters with all experts of a layer, PEFT's target_parameters, beside peft."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.merge import merge_adapter
from llmq.checkpoint.peft import by_module
from llmq.options.adapters import adapted_modules, adapters_of
from llmq.options.options_io import make_config
from llmq.options.presets import resolve_model
from llmq.run.initial_weights import with_adapter
from llmq.state.params import weight_table
from tests.models import exported, random_batch, torch_loss, trainer_for

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ONE_LAYER = ["model.layers.0.mlp.experts.down_proj"]


def peft_model(name, parameters, modules=("q_proj",), **more):
    """A model beside random adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(name))
    config = peft.LoraConfig(
        r=8, lora_alpha=12, target_modules=[*modules], target_parameters=parameters,
        task_type="CAUSAL_LM", **more,
    )  # fmt: skip
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_B" in key:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.parametrize(
    ("name", "parameters", "more"),
    [
        ("gpt_oss", BOTH, {}),
        ("gpt_oss", BOTH[:1], {"modules": (), "rank_pattern": {"experts.gate_up_proj": 16}}),
        ("gpt_oss", ONE_LAYER, {}),
        ("qwen3_moe", BOTH, {}),
        ("mixtral", BOTH[1:], {"use_rslora": True}),
    ],
)
def test_adapters_of_peft_train_as_there_and_go_back(name, parameters, more, tmp_path):
    """Loss and every gradient, the directory that is written, and the merged model."""
    model, batch = peft_model(name, parameters, **more), random_batch(np.random.default_rng(4))
    model.save_pretrained(tmp_path / "theirs")
    loss = torch_loss(model, [batch])
    loss.backward()
    theirs = {
        key.replace(".default.", "."): p.grad.numpy()
        for key, p in model.named_parameters()
        if p.requires_grad
    }
    options = {"adapter": str(tmp_path / "theirs"), "learning_rate": 0.02}
    with trainer_for(exported(name), **options) as trainer:
        result = trainer.step([batch])
        np.testing.assert_allclose(result.loss, loss.item(), rtol=1e-5)
        gradients, ours, its = trainer.gradients(), {}, adapters_of(trainer.config)
        table, adapted = weight_table(trainer.model, 1, its), adapted_modules(trainer.model, its)
        for param in (p for slab in table for p in slab.params if p.of_adapter):
            for part in param.hf:
                rows = part.stored(gradients[param.name][part.start : part.stop])
                ours[by_module(part.name, adapted)] = rows
        assert ours.keys() == theirs.keys()
        for key, gradient in theirs.items():
            error = np.linalg.norm(ours[key] / result.tokens - gradient)
            assert error <= 1e-4 * max(np.linalg.norm(gradient), 1e-3 * result.norm), key
        trainer.export(tmp_path / "ours")
        after = trainer.step([batch]).loss
    files = [load_file(tmp_path / x / "adapter_model.safetensors") for x in ("theirs", "ours")]
    assert {k: v.shape for k, v in files[0].items()} == {k: v.shape for k, v in files[1].items()}
    if name == "mixtral":  # which has a name there
        with pytest.raises(LlmqError, match="no adapters of experts: add --merge"):
            export(str(tmp_path / "ours"), tmp_path / "a.gguf", to="gguf")
    base = transformers.AutoModelForCausalLM.from_pretrained(exported(name))
    trained = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    np.testing.assert_allclose(torch_loss(trained, [batch]).item(), after, rtol=1e-5)
    merge_adapter(str(exported(name)), tmp_path / "ours", tmp_path / "merged", "fp32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    want = trained.merge_and_unload().state_dict()
    for key, value in merged.state_dict().items():
        np.testing.assert_allclose(value.numpy(), want[key].numpy(), rtol=1e-5, atol=1e-6)


def test_new_adapters_of_fused_experts_are_found_by_peft(tmp_path):
    """Adapters of one layer alone, so that PEFT needs whole names."""
    options = {"lora_rank": 8, "lora_targets": "v,fused_experts", "lora_layers": "0"}
    path, batch = exported("qwen3_moe"), random_batch(np.random.default_rng(5))
    with trainer_for(path, learning_rate=0.02, **options) as trainer:
        trainer.step([batch])
        trainer.export(tmp_path)
        want = trainer.step([batch]).loss
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["target_parameters"][:1] == ["model.layers.0.mlp.experts.gate_up_proj"]
    assert (said["target_modules"], said["layers_to_transform"]) == (["v_proj"], [0])
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    np.testing.assert_allclose(torch_loss(model, [batch]).item(), want, rtol=1e-5)
    config = make_config({"model": str(path), "adapter": str(tmp_path)}).normalized()
    read = with_adapter(config, resolve_model(str(path), from_scratch=False)[0])
    assert (read.lora_targets, read.lora_layers) == ("v,fused_experts", "0")


def test_what_cannot_be_is_one_line(tmp_path):
    options = {"lora_rank": 8, "lora_targets": "experts,fused_experts"}
    with pytest.raises(ConfigError, match="experts and fused_experts are the same matrices"):
        trainer_for(exported("qwen3_moe"), **options)
    options = {"lora_rank": 8, "lora_targets": "experts", "train": "biases"}
    with pytest.raises(ConfigError, match="PEFT has no biases beside adapters of fused experts"):
        trainer_for(exported("gpt_oss"), **options)
    peft_model("gpt_oss", ["mlp.router.weight"]).save_pretrained(tmp_path)
    with pytest.raises(LlmqError, match=r"target_parameters 'mlp.router.weight' is not supported"):
        trainer_for(exported("gpt_oss"), adapter=str(tmp_path))
