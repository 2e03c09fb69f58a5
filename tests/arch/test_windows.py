"""Sliding windows of every architecture are in the layers in which transformers has them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers

from llmq.arch.model_config import ModelConfig
from tests.models import LOSS_RTOL, hf_model, random_batch, torch_loss, trainer_for

ALL = {"use_sliding_window": True, "sliding_window": 5}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
CASES = [
    *(
        (name, ALL | {"max_window_layers": first}, windows)
        for name, all_windows in (
            ("qwen2", ("555", "-55", "--5", "---")),
            ("qwen3", ("555", "-55", "--5", "---")),
            ("qwen2_moe", ("---", "5--", "5--", "5-5")),
            ("qwen3_moe", ("555", "555", "555", "555")),
        )
        for first, windows in enumerate(all_windows)
    ),
    ("qwen2", ALL | {"layer_types": KINDS, "max_window_layers": 3}, "-5-"),
    ("qwen2_moe", ALL | {"layer_types": KINDS, "max_window_layers": 3}, "-5-"),
    ("qwen3_moe", ALL | {"layer_types": KINDS, "max_window_layers": 3}, "555"),
    ("qwen2", ALL | {"sliding_window": None, "max_window_layers": 0}, "---"),
    ("qwen3_moe", ALL | {"sliding_window": None}, "---"),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5}, "---"),
    ("mistral", {"sliding_window": 5}, "555"),
    ("mixtral", {"sliding_window": 5}, "555"),
    ("phi3", {"sliding_window": 5}, "555"),
    ("gpt_oss", {"sliding_window_pattern": 3}, "5-5"),
    ("gemma3", {"sliding_window_pattern": 3}, "55-"),
    # A sequence with dynamic positions is longer than max_position_embeddings.
    (
        "mistral",
        {"sliding_window": 5, "max_position_embeddings": 4, "rope_parameters": DYNAMIC},
        "555",
    ),
    (
        "qwen3",
        ALL | {"max_window_layers": 0, "max_position_embeddings": 4, "rope_parameters": DYNAMIC},
        "555",
    ),
]


@pytest.mark.parametrize(("name", "change", "windows"), CASES)
def test_windows_equal_those_of_transformers(tmp_path, name, change, windows):
    """The loss of a config.json as written by hand, and of the file that an export writes."""
    full = ("full_attention",) * 3
    hf_model(name, num_hidden_layers=3, layer_types=full).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["layer_types"]
    file.write_text(json.dumps(fields | change))
    batch = random_batch(np.random.default_rng(0), T=24)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with trainer_for(tmp_path) as trainer:
        found = [trainer.model.window_of(layer) for layer in range(3)]
        assert found == [5 if window == "5" else None for window in windows]
        np.testing.assert_allclose(
            trainer.step([batch]).loss, torch_loss(model, [batch]).item(), rtol=LOSS_RTOL
        )
        assert ModelConfig.from_hf(trainer.model.to_hf()) == trainer.model
