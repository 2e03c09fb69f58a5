"""Whole steps over documents that a loader has packed: the same numbers in every packing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmq.data.tokens import TokenWriter
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.run.batches import random_batch
from tests.models import LOSS_RTOL, exported, trainer_for

T = 24


@pytest.fixture
def data(tmp_path):
    """Documents of 2 to 60 tokens; those above T are cut, in every packing at the same places."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 61, 25)
    path = tmp_path / "docs.bin"
    with TokenWriter(path, 64, with_documents=True) as writer:
        writer.write(rng.integers(0, 64, lengths.sum()), ends=np.cumsum(lengths))
    return path, lengths


def test_validation_is_the_same_in_every_packing(data):
    path, lengths = data
    results = {}
    for packing, masked in (("none", True), ("none", False), ("best-fit", True), ("concat", True)):
        with trainer_for(
            exported("qwen3"), eval_file=path, packing=packing, document_mask=masked
        ) as trainer:
            results[packing, masked] = trainer.validate()
    assert {result.tokens for result in results.values()} == {(lengths - 1).sum()}
    alone = results.pop(("none", True)).loss
    results.pop(("concat", True))  # windows cut documents elsewhere
    for result in results.values():
        np.testing.assert_allclose(result.loss, alone, rtol=LOSS_RTOL)


def test_a_step_takes_what_the_loader_gives(data):
    """Documents that are packed together do not see each other: the step is that of its batches."""
    path, _ = data
    options = {"train_file": path, "eval_file": "none", "packing": "best-fit"}
    with trainer_for(exported("qwen3"), **options) as trainer:
        state = trainer.train_loader.state()
        batch = trainer.train_loader.next_batch()
        trainer.train_loader.set_state(state)
        result, weights = trainer.step(), trainer.weights()
    with trainer_for(exported("qwen3"), document_mask=True) as trainer:
        assert trainer.step([batch]) == result
        for name, weight in trainer.weights().items():
            np.testing.assert_array_equal(weight, weights[name])
        with pytest.raises(ValueError, match="starts are needed with --document-mask"):
            trainer.step([batch[:2]])
        wrong = batch._replace(starts=batch.starts[:, ::-1].copy())
        with pytest.raises(ValueError, match=r"must not fall along a row, and be in 0\.\.t"):
            trainer.step([wrong])


def test_random_batches_have_documents():
    """Bench and verify take these: accepted by a step, and the same as
    before."""
    config = make_config({"seq-len": 4096, "batch-size": 2, "document-mask": True})
    model, free = preset("tiny"), replace(config, document_mask=False)
    batch = random_batch(np.random.default_rng(0), config, model)
    plain = random_batch(np.random.default_rng(0), free, model)
    np.testing.assert_array_equal(plain.inputs, batch.inputs)
    assert plain.starts is None
    for starts, targets, free in zip(batch.starts, batch.targets, plain.targets, strict=True):
        firsts = np.unique(starts)
        assert (starts[firsts] == firsts).all() and 4 <= len(firsts) <= 41
        assert (np.diff(firsts) >= 100).all() and (np.diff(firsts) <= 1000).all()
        np.testing.assert_array_equal(targets[firsts[1:] - 1], -100)
        assert (targets != free).sum() == len(firsts) - 1
