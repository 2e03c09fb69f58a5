"""Helpers of the tests of adapters: batches, and the layers that PEFT's get them in."""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.models import random_batch

FUSED = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
SPLIT = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
FUSED["granitemoehybrid"] = [*SPLIT[:4], "in_proj", "out_proj", "input_linear", "output_linear"]
FUSED["nemotron_h"] = [*SPLIT[:4], "in_proj", "up_proj", "down_proj"]
FUSED["gemma4_e2b"] = [*SPLIT, "per_layer_input_gate", "per_layer_projection"]


def targets(name: str) -> list[str]:
    """Matrices in the blocks of this model of models.py, by Hugging Face's names."""
    return FUSED.get(name, SPLIT)


@cache
def batches(count: int = 10) -> list:
    """The first so many of an endless row."""
    rng = np.random.default_rng(0)
    return [random_batch(rng, T=24) for _ in range(count)]
