"""transformers' BitNet layers, without the compiler that their module asks for at its import."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "compile", lambda function: function)
    from transformers.integrations.bitnet import (
        ActQuant,
        AutoBitLinear,
        BitLinear,
        WeightQuant,
        replace_with_bitnet_linear,
    )

__all__ = ["ActQuant", "AutoBitLinear", "BitLinear", "WeightQuant", "as_bitnet"]


def as_bitnet(path: str, others: str = "lm_head") -> transformers.PreTrainedModel:
    """A model whose linear layers are those of BitNet in training. others: expression of the names
    of modules that stay as they are."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = model.state_dict()
    how = transformers.BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="online")
    kept = [name for name, _ in model.named_modules() if re.search(others, name)]
    model = replace_with_bitnet_linear(model, kept, how)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.requires_grad_(True)
