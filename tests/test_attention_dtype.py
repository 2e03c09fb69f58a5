"""--attention-dtype e4m3 in the whole step, on the CPU device."""

import numpy as np
import pytest

from llmq.base.errors import ConfigError
from llmq.options.cards import find_card, spec_of
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.options.rules import RULES
from tests.models import exported, random_batch, trainer_for

T = 128
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def steps_of(count=1, **options):
    """Results of steps on one batch."""
    batch = [random_batch(np.random.default_rng(0), T=T)]
    options = {"seq_len": T, "model_dtype": "bf16", "attention_dtype": "e4m3"} | options
    path = exported("qwen3", **HEADS, max_position_embeddings=T)
    with trainer_for(path, learning_rate=3e-3, **options) as trainer:
        return [trainer.step(batch) for _ in range(count)]


def test_learns_as_in_bf16(device):
    """One batch learned by heart."""
    ways = ({"device": device, "attention_dtype": d} for d in ("e4m3", "bf16"))
    codes, bf16 = ([r.loss for r in steps_of(6, **way)] for way in ways)
    assert codes[-1] < 0.95 * codes[0]
    assert codes != bf16
    np.testing.assert_allclose(codes, bf16, rtol=0.01)  # rounding moves an output by up to 2^-4


def test_what_is_recomputed_changes_no_bit(device):
    ways = ({"recompute_att": True}, {"recompute_block": True}, {"use_cuda_graphs": False})
    plain, *found = [steps_of(2, device=device, **more) for more in ({}, *ways)]
    assert found == [plain] * 3


REFUSED = {
    "documents": ("Qwen2.5-1.5B", {"document_mask": True}, "not with --document-mask"),
    "heads": ("gemma-3-1b", {}, "the model's have 256"),
    "windows": ("gpt-oss-20b", {"seq_len": 512}, "in some layers a query sees 128 positions"),
}


@pytest.mark.parametrize("model, options, reason", REFUSED.values(), ids=REFUSED)
def test_is_refused_for_what_it_has_no_kernel(model, options, reason):
    config = TrainConfig(attention_dtype="e4m3", **options).normalized()
    with pytest.raises(ConfigError, match=f"--attention-dtype: .* before them: {reason}"):
        RULES.check(config, model=preset(model))


def test_is_refused_on_other_cards():
    config = TrainConfig(attention_dtype="e4m3").normalized()
    names, refused = ("h100", "4090", "b200"), []
    for card in map(find_card, names):
        try:
            RULES.check(config, gpu=spec_of(card))
        except ConfigError as error:
            assert "--attention-dtype: e4m3 needs compute capability 9.0" in str(error)
            refused.append(card.name)
    assert refused == [find_card(name).name for name in names[1:]]
