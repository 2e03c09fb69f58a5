"""A new number format is one class: everything that keeps, loads and shards matrices follows."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.merge import as_kept
from tests import mx8
from tests.bases import block_weights
from tests.models import exported, random_batch, trainer_for

STREAMED = {"shard_weights": True, "offload_master": True}


@pytest.mark.parametrize("options", [{}, STREAMED, {"gpus": 2, "zero_level": 3}], ids=str)
def test_a_made_up_format_is_loaded_sharded_and_trained_beside(options, monkeypatch):
    """Its weights are those that `llmq merge` makes of the files, whole, streamed and in shards."""
    mx8.register(monkeypatch)
    batches = [random_batch(np.random.default_rng(0))] * 2
    shared = {"lora_rank": 3, "base_dtype": "nf4", "grad_accumulation": 1, "learning_rate": 1e-2}
    with (
        trainer_for(exported("qwen3"), **shared, **options) as trainer,
        HfWeights(exported("qwen3")) as files,
    ):
        read = as_kept(files.read, "nf4")
        for param, values in block_weights(trainer).items():
            np.testing.assert_array_equal(values, read(param), err_msg=param.name)
            # A block's largest, of up to 512 times its power of two, is cut to 448 of it.
            original = files.read(param)
            assert 0 < np.abs(values - original).max() <= np.abs(original).max() / 8
        losses = [trainer.step(batches[: options.get("gpus", 1)]).loss for _ in range(4)]
        assert losses[-1] < losses[0]
        assert trainer.usage == trainer.plan.usage
