"""Gated delta nets in whole steps on the CPU device: chunks, documents, files, texts that go on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.checkpoint.hf import HfWeights
from llmq.options.presets import model_warnings, preset
from llmq.plan.sol import flops_per_token
from llmq.state.params import weight_table
from tests.models import (
    exported,
    hf_model,
    random_batch,
    step_as_torch,
    trainer_for,
)

NAME, LONG = "qwen3_5", {"max_position_embeddings": 160}
NAMES = (NAME, "granitemoehybrid")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [4, 136])
def test_loss_and_gradients_match_transformers_at_any_length(name, T, device):
    """Sequences of a few tokens, and of more than two chunks."""
    batch = random_batch(np.random.default_rng(0), B=4, T=T)
    batch[1][:, 0] = 3  # there is a target
    model = hf_model(name, **LONG)
    with trainer_for(exported(name, **LONG), device=device, batch_size=4, seq_len=T) as trainer:
        step_as_torch(trainer, [batch], model)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_one_document_changes_a_bit_of_another(name, device):
    """NaN in one document changes no bit of the losses and gradients of other documents."""
    T, first, stop = 136, 60, 100
    starts = np.zeros((2, T), np.int32)
    starts[:, first:], starts[:, stop:] = first, stop
    starts[:, stop + 1 :] = stop + 1  # a document of one token between
    rng = np.random.default_rng(1)
    inputs, targets = random_batch(rng, T=T)
    targets[:, :first], targets[:, stop:] = -100, -100
    found = []
    for _ in range(2):
        with trainer_for(
            exported(name, **LONG), device=device, seq_len=T, document_mask=True
        ) as trainer:
            result = trainer.step([Batch(inputs, targets, starts)])
            found.append((result, trainer.gradients()))
        inputs = inputs.copy()
        others = np.r_[:first, stop:T]
        inputs[:, others] = rng.integers(0, 131, (2, len(others)))
    (want, gradients), (got, same) = found
    # The gradient of embeddings is summed over the places of each token, other documents' too.
    assert replace(got, norm=want.norm) == want
    np.testing.assert_allclose(got.norm, want.norm, rtol=1e-6)
    for name, gradient in gradients.items():
        if "embed" not in name:
            assert np.array_equal(gradient, same[name]), name


@pytest.mark.parametrize("name", [NAME, "qwen3_5_moe"])
def test_the_language_model_of_one_that_sees_images(name, tmp_path):
    """Parts that see images or guess several tokens are left out. Experts of a layer are one
    tensor, as a model of transformers has them in memory."""
    inner = exported(name)
    hf = json.loads((inner / "config.json").read_text())
    (alone,) = hf.pop("architectures")
    outer = {"architectures": [alone.replace("CausalLM", "ConditionalGeneration")]}
    outer["model_type"] = hf["model_type"].removesuffix("_text")
    outer |= {"text_config": hf, "vision_config": {"model_type": "qwen3_5"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(inner / "model.safetensors")
    fused = dict(hf_model(name).named_parameters())
    assert (fused.keys() == tensors.keys()) == (name == NAME)
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in fused.items()}
    others = {"model.visual.merger.norm.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}
    save_file(renamed | others, tmp_path / "model.safetensors")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((inner / "config.json").read_bytes())
    guesses = {"mtp.layers.0.input_layernorm.weight": torch.ones(4)}
    save_file(tensors | guesses, tmp_path / "alone" / "model.safetensors")
    model = ModelConfig.from_hf(outer)
    assert model == ModelConfig.from_hf(json.loads((inner / "config.json").read_text()))
    assert "images are not trained" in model_warnings(tmp_path)[0]
    for folder in (tmp_path, tmp_path / "alone"):
        with HfWeights(folder) as weights, HfWeights(inner) as own:
            weights.check(weight_table(model))
            for param in (p for slab in weight_table(model) for p in slab.params):
                np.testing.assert_array_equal(weights.read(param), own.read(param))
                part = (param, 3, param.size // 2 + 1)
                if param.kind == "matrix":
                    np.testing.assert_array_equal(weights.elements(*part), own.elements(*part))


def test_fresh_decays_are_those_of_transformers():
    """exp(A_log) is between 0.01 and 16, and dt_bias is 1; every rank has the same values."""
    found = []
    for gpus in (1, 2):
        options = {"from_scratch": True, "gpus": gpus, "shard_weights": gpus > 1}
        with trainer_for("tiny-qwen3.5", seq_len=8, **options) as trainer:
            found.append(trainer.weights())
    for name, values in found[0].items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)
        if name.endswith("A_log"):
            assert ((np.exp(values) > 0.0099) & (np.exp(values) < 16.01)).all()
            assert len(set(values)) == len(values)
        elif name.endswith("dt_bias"):
            assert (values == 1).all()


def test_speed_of_light_grows_with_the_sequence_in_layers_with_attention_alone():
    model = preset("Qwen3.5-4B")
    short, long = (flops_per_token(model, T).attention for T in (4096, 8192))
    states = 3 * 24 * 6 * 32 * 128 * 128
    assert long - states == 2 * (short - states) == 2 * 8 * 6 * 16 * 256 * 4096
