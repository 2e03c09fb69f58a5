"""Rotary positions beyond a first training: numbers and files are those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.model.generator import Request
from llmq.run.sampling import Sampler, open_model
from llmq.runtime.machine import choose_machine
from tests.models import exported, hf_model, random_batch, step_as_torch, torch_loss, trainer_for

T = 48
FACTORS = [1.0 + 0.25 * i for i in range(8)]
LONG = {"rope_type": "longrope", "long_factor": FACTORS[::-1], "short_factor": FACTORS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Heads of these models have 16 channels.
KINDS = {
    "yarn": ("qwen2", YARN),
    "yarn of all fields": (
        "qwen2",
        YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    ),
    "dynamic": ("qwen2", {"rope_type": "dynamic", "factor": 2.0}),
    "linear": ("mistral", {"rope_type": "linear", "factor": 2.5}),
    "longrope": ("mistral", LONG | {"original_max_position_embeddings": 32}),
    "longrope, short": ("qwen2", LONG | {"original_max_position_embeddings": 60}),
    "llama3": (
        "qwen2_untied",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ),
}  # fmt: skip


def save(folder, name: str, rope: dict, **changed: object) -> transformers.PreTrainedModel:
    """A model with these positions, which is written to the folder."""
    model = hf_model(name, rope_parameters={"rope_theta": 10000.0} | rope, **changed)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).float()


def check(model: transformers.PreTrainedModel, folder, **options: object) -> None:
    """A step's loss and gradients are the model's, and what is exported computes the same."""
    batch = random_batch(np.random.default_rng(0), T=T)
    with trainer_for(folder, seq_len=T, **options) as trainer:
        step_as_torch(trainer, [batch], model)
        trainer.export(folder / "out")
        want = trainer.step([batch]).loss
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").float()
    assert again.config.rope_parameters == model.config.rope_parameters
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    assert torch_loss(again, [batch]).item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name, rope", KINDS.values(), ids=KINDS)
def test_equals_transformers(tmp_path, name, rope):
    positions = {"max_position_embeddings": 32} if rope["rope_type"] == "dynamic" else {}
    check(save(tmp_path, name, rope, **positions), tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_a_part_of_the_channels_is_rotated(tmp_path, kind, dtype):
    """Phi-4-mini has it, and Phi-3.5 a first length that stands beside its positions."""
    rope = {"rope_type": kind, "partial_rotary_factor": 0.5}
    if kind == "longrope":
        rope |= {"long_factor": FACTORS[::-1], "short_factor": FACTORS}
    model = save(tmp_path, "phi3", rope, hidden_size=128, original_max_position_embeddings=32)
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5
    if dtype == "fp32":
        check(model, tmp_path)
        return
    batch = random_batch(np.random.default_rng(0), T=T)
    with trainer_for(tmp_path, seq_len=T, model_dtype="bf16") as trainer:
        assert trainer.step([batch]).loss == pytest.approx(torch_loss(model, [batch]).item(), 2e-3)


def test_configs_as_published():
    """Phi-4-mini's fields, and Phi-3.5's, which older files call su."""
    hf = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 200064,
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "sliding_window": 262144,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "rope_theta": 10000.0,
        "rope_scaling": {"type": "su", "long_factor": [2.0] * 48, "short_factor": [1] * 48},
    }  # fmt: skip
    model = ModelConfig.from_hf(hf)
    rope = model.rope_of(0)
    assert rope.channels == 96 and rope.length == pytest.approx((1 + 5 / 12) ** 0.5)
    again = ModelConfig.from_hf(model.to_hf())
    assert again == model
    theirs = transformers.AutoConfig.for_model(**model.to_hf())
    assert theirs.rope_parameters["long_factor"] == [2.0] * 48
    assert theirs.rope_parameters["original_max_position_embeddings"] == 4096


STRETCHED = {
    "yarn:2": YARN | {"factor": 2.0, "original_max_position_embeddings": 64},
    "linear:2": {"rope_type": "linear", "factor": 2.0},
    '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}': YARN
    | {"factor": 2.0},
    "yarn:4,original_max_position_embeddings=16,beta_fast=8": YARN | {"beta_fast": 8.0},
}


@pytest.mark.parametrize("text", STRETCHED)
def test_options_stretch_a_trained_model(tmp_path, text):
    """Beyond its positions, whose file then says it, as transformers computes it."""
    changed = {"rope_parameters": {"rope_theta": 10000.0} | STRETCHED[text]}
    model = hf_model("qwen2", max_position_embeddings=96, **changed)
    batch = random_batch(np.random.default_rng(0), T=96)
    given = {"seq_len": 96, "max_positions": 96, "rope_scaling": text}
    with trainer_for(exported("qwen2"), **given) as trainer:
        result = trainer.step([batch])
        assert result.loss == pytest.approx(torch_loss(model, [batch]).item(), abs=1e-5)
        path = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
        want = trainer.step([batch]).loss
    said = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert said.max_position_embeddings == 96
    assert said.rope_parameters == model.config.rope_parameters
    with trainer_for(exported("qwen2"), **given) as trainer:
        trainer.load(path)
        assert trainer.step([batch]).loss == want
    ids = batch[0][0].tolist()
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    with open_model(str(tmp_path / "out")) as (config, read, _), torch.no_grad():
        machine = choose_machine("cpu", 1)
        with Sampler(machine, config, lambda w: w.load(read), 96) as sampler:
            ((_, found),) = sampler.generator.run([Request(ids[:-1], 1, temperature=0)])
        want = net(torch.tensor([ids[:-1]])).logits[0, -1].log_softmax(-1)
        assert found.ids == [want.argmax()]
        np.testing.assert_allclose(found.logprobs, want.max(), atol=1e-5)


def test_longer_ones_of_other_kinds(tmp_path):
    """longrope's factor follows from the positions; none takes a scaling away; a new model has as
    many positions as it is given."""
    save(tmp_path / "long", "mistral", LONG | {"original_max_position_embeddings": 16})
    with trainer_for(tmp_path / "long", seq_len=96, max_positions=96) as trainer:
        length = trainer.model.rope_of(0).length
        assert length == pytest.approx((1 + np.log(6) / np.log(16)) ** 0.5)
    save(tmp_path / "yarn", "qwen2", YARN)
    with trainer_for(tmp_path / "yarn", rope_scaling="none") as trainer:
        assert trainer.model.rope_scaling is None
    new = {"from_scratch": True, "seq_len": 2048, "max_positions": 2048, "batch_size": 1}
    with trainer_for("tiny", **new, rope_scaling={"rope_type": "dynamic", "factor": 2}) as trainer:
        assert trainer.model.longest == 4096 and trainer.model.rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    "name, options, message",
    [
        (
            "qwen2",
            {"seq_len": 96},
            "the model's 64 positions: --max-positions and --rope-s",
        ),
        ("qwen2", {"rope_scaling": "yarn"}, None),
        ("qwen2", {"rope_scaling": "linear"}, "--rope-scaling: factor is missing"),
        (
            "qwen2",
            {"rope_scaling": "axial:2"},
            "rope_type: 'axial' is not supported",
        ),
        ("qwen2", {"rope_scaling": "yarn:0.5"}, "--rope-scaling: factor must be >= 1, got 0.5"),
        ("qwen2", {"rope_scaling": "yarn:x"}, "--rope-scaling: Expecting value"),
        ("phi3", {"rope_scaling": "yarn:2"}, "'yarn' is not supported, only default, longrope"),
        ("gpt2", {"rope_scaling": "linear:2"}, "--rope-scaling: has no effect, this model's posit"),
        ("gpt2", {"max_positions": 96}, "--max-positions: the learned positions of --model have"),
        ("qwen2", {"rope_scaling": "yarn:2", "lora_rank": 2}, "files of adapters cannot say it"),
    ],
)
def test_positions_that_are_refused(name, options, message):
    if message is None:  # yarn's factor may follow from the positions
        with trainer_for(exported(name), **options) as trainer:
            assert trainer.model.rope_scaling.factor == 1
        return
    with pytest.raises(ConfigError, match=message):
        trainer_for(exported(name), **options)
