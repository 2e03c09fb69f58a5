"""Latent attention of texts that are continued: beside adapters and codes, and what it keeps."""

import numpy as np
import pytest

from llmq.base.batch import Batch
from llmq.base.dtypes import BF16
from llmq.model.activations import Cache
from llmq.options.presets import resolve_model
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC
from tests.models import VOCAB, exported, trainer_for

NAME, NEW, T = "deepseek_v3", 12, 24
LORA = {"lora_rank": 4, "lora_targets": "q_a,q_b,kv_a,kv_b,o", "lora_alpha": 64.0}
CASES = {
    "adapters": LORA,
    "magnitudes": LORA | {"lora_dora": True},
    "nf4": LORA | {"base_dtype": "nf4"},
    "int8": LORA | {"base_dtype": "int8"},
    "e4m3": LORA | {"base_dtype": "e4m3"},
    "fp8": {"matmul_dtype": "e4m3", "model_dtype": "bf16"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_log_probabilities_are_those_of_training(options):
    """Matrices of heads, which multiply queries and outputs there, have adapters and codes."""
    prompt = np.random.default_rng(0).integers(3, VOCAB, 7).tolist()
    with trainer_for(exported(NAME), batch_size=1, learning_rate=2e-2, **options) as trainer:
        rows = np.random.default_rng(0).integers(3, VOCAB, (2, 1, T)).astype(np.int32)
        before = trainer.generate([prompt], max_new_tokens=NEW, stop=[])[0][0]
        for _ in range(3):
            trainer.step([(rows[0], rows[1])])
        ((made,),) = trainer.generate([prompt], max_new_tokens=NEW, stop=[])
        text = np.array([*prompt, *made.ids], np.int32)
        inputs, targets = np.zeros((1, T), np.int32), np.full((1, T), -100, np.int32)
        inputs[0, : len(text) - 1], targets[0, 6 : len(text) - 1] = text[:-1], text[7:]
        losses = trainer._step.score(Batch(inputs, targets))[0, 6 : len(text) - 1]
    # BF16, and codes of other activations: queries and outputs meet one matrix more.
    error = 0.05 if "matmul_dtype" in options else 1e-5
    np.testing.assert_allclose(made.logprobs, -losses, atol=error)
    assert np.abs(np.subtract(made.logprobs, before.logprobs)).max() > 0.1  # it has learned


def test_a_token_leaves_its_latent_and_one_key():
    """Latents have 48 channels and keys 16, whatever the number of heads."""
    config, _ = resolve_model(str(exported(NAME)), from_scratch=False)
    dev, blocks = PlanDevice(GPU_SPEC), 3
    cache = Cache(dev, config, BF16, blocks, 1)
    (first, _), (second, _) = ([*halves] for halves in map(config.halves, range(2)))
    for layer, spec in enumerate((first, second)):
        (latent,) = cache.blocks[layer, spec.name].values()
        assert latent.shape == (blocks, 16, 1, 48 + 16) and latent.dtype is BF16
