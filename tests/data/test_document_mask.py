"""Documents within sequences: the whole step on the CPU device, against each document alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.batch import Batch
from llmq.checkpoint.hf import HfWeights
from llmq.model.step import Step
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import place
from tests.arch.test_arch import FORMATS
from tests.models import (
    CONFIGS,
    exported,
    hf_model,
    random_batch,
    step_as_torch,
    trainer_for,
)

B, T = 2, 24
# The documents of two sequences start here, in steps that follow each other.
FIRSTS = [[(0, 1, 10, 19), (0, 12)], [(0, 4), (0,)], [(0,), (0, 8, 16, 23)]]


def starts_of(firsts, T=T):
    """I32 (B, T) of documents that start there."""
    rows = [np.repeat(row, np.diff([*row, T])) for row in firsts]
    return np.array(rows, np.int32)


def batch_of(rng, firsts=FIRSTS[0], T=T):
    return Batch(*random_batch(rng, T=T), starts_of(firsts, T))


def documents(batch):
    """Each document's (1, length) inputs and targets."""
    for inputs, targets, starts in zip(*batch[:3], strict=True):
        for first in np.unique(starts):
            yield inputs[starts == first][None], targets[starts == first][None]


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_match_those_of_documents_alone(name, device):
    model, batch = hf_model(name), batch_of(np.random.default_rng(0))
    with trainer_for(exported(name), device=device, document_mask=True) as trainer:
        step_as_torch(trainer, [batch], model, list(documents(batch)))
        assert trainer.usage == trainer.plan.usage


def run(path, **options):
    """Results and weights after steps whose documents differ."""
    rng, T = np.random.default_rng(1), options.get("seq_len", 24)
    options = {"grad_accumulation": 2, "document_mask": True} | options
    with trainer_for(path, **options) as trainer:
        micro_batches = options["grad_accumulation"] * trainer.world_size
        results = []
        for firsts in FIRSTS:
            batches = [batch_of(rng, row, T) for row in (firsts, FIRSTS[0])]
            results.append(trainer.step(batches[:micro_batches]))
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


@pytest.mark.parametrize(
    "name, dtype", [("gpt2", "bf16"), ("mistral", "fp32"), ("qwen2", "delayed"), ("qwen3", "jit")]
)
def test_recompute_offload_and_chunks_are_bitwise_equal(name, dtype):
    options = FORMATS[dtype] | ({"seq_len": 32} if dtype in ("jit", "delayed") else {})
    want, weights = run(exported(name), **options)
    for change in (
        {"recompute_att": True},
        {"recompute_block": True, "offload_residual": True, "recompute_layers": "0"},
        {"attn_bwd_chunks": 2},
    ):
        got, same = run(exported(name), **(options | change))
        assert got == want, change
        assert all(np.array_equal(weights[n], same[n]) for n in weights), change


def test_ranks_compute_what_one_does():
    want, weights = run(exported("qwen2_untied"))
    options = {"gpus": 2, "grad_accumulation": 1, "zero_level": 3}
    got, sharded = run(exported("qwen2_untied"), **options)
    for one, two in zip(want, got, strict=True):  # sums in another order
        np.testing.assert_allclose([two.loss, two.norm], [one.loss, one.norm], rtol=1e-5)
    for name, expected in weights.items():
        np.testing.assert_allclose(sharded[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_starts_that_are_all_zero_change_no_bit(name, dtype):
    batch = random_batch(np.random.default_rng(2))
    found = []
    for starts in ((), (np.zeros((B, T), np.int32),)):
        options = FORMATS[dtype] | {"document_mask": bool(starts)}
        with trainer_for(exported(name), **options) as trainer:
            results = [trainer.step([(*batch, *starts)]) for _ in range(2)]
            found.append((results, trainer.weights()))
    (want, weights), (got, same) = found
    assert got == want
    assert all(np.array_equal(weights[n], same[n]) for n in weights)


def load_with_row(trainer, path, token, value):
    """The weights of a directory, but for this one's row of the embedding."""
    with HfWeights(path) as weights:

        def read(param):
            values = np.array(weights.read(param))
            if param.name == "model.embed_tokens.weight":
                values[token] = value
            return values

        trainer.ranks.load(read)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen2_untied"])
def test_nan_in_one_document_changes_no_bit_of_another(name, dtype, device):
    """It changes none of its losses, nor of its tokens' gradients; weights have gradients of all
    documents."""
    rng = np.random.default_rng(3)
    inputs, targets, starts = batch_of(rng)[:3]
    poisoned = 7
    inputs[inputs == poisoned] = 8
    bad = (starts == 10) | (starts == 12)  # a document in the middle, and one at the end
    inputs[bad], targets[bad] = poisoned, -100
    found = []
    for value in (0.5, np.nan):
        options = {"device": device, "document_mask": True} | FORMATS[dtype]
        with trainer_for(exported(name), **options) as trainer:
            load_with_row(trainer, exported(name), poisoned, value)
            result = trainer.step([(inputs, targets, starts)])
            found.append((result.loss, trainer.gradients()["model.embed_tokens.weight"]))
    (want, gradients), (got, same) = found
    assert np.isfinite(want) and got == want
    clean = np.unique(inputs[~bad])
    assert np.abs(gradients[clean].astype(np.float32)).max() > 0
    np.testing.assert_array_equal(same[clean], gradients[clean])
    assert np.isnan(same[poisoned].astype(np.float32)).any()


def test_graphs_and_their_keys_do_not_depend_on_documents():
    """Starts are data: the same graphs are captured, and captured once."""
    with trainer_for(exported("qwen2"), document_mask=True) as trainer:
        config, model = trainer.config, trainer.model
    keys, inboxes = [], []
    for options in (replace(config, document_mask=False), config):
        dev = PlanDevice(HOST_SPEC)
        step = Step(dev, model, options.for_step, place(options.for_step, weight_table(model)))
        rng = np.random.default_rng(4)
        for firsts in FIRSTS:
            step.train(0, 0.0, 0.0, [batch_of(rng, firsts)])
        step.evaluate_batch(batch_of(rng))
        keys.append([key for key, _ in dev.graphs])
        taken = {tensor.name: tensor.nbytes for _, tensor in dev.arenas["device"].tensors}
        inboxes.append(taken["inbox"])
    assert keys[0] == keys[1]
    assert inboxes[1] - inboxes[0] == 4 * B * T


def test_batches_and_the_option_belong_together():
    batch = random_batch(np.random.default_rng(5))
    starts = starts_of(FIRSTS[0])
    with trainer_for(exported("qwen2")) as trainer, pytest.raises(ValueError, match="starts need"):
        trainer.step([(*batch, starts)])
    with trainer_for(exported("qwen2"), document_mask=True) as trainer:
        for change, message in (
            (None, "starts are needed with --document-mask"),
            (starts.astype(np.int64), "must be int32"),
            (starts[:, :20], "must be int32"),
            (starts[:, ::-1].copy(), "must not fall along a row"),
            (starts - 1, "must not fall along a row"),
            (np.maximum(starts, 1), "be in 0..t at position t"),
            (np.maximum(starts, np.arange(T, dtype=np.int32) // 2), "the first position of each"),
        ):
            with pytest.raises(ValueError, match=message):
                trainer.step([Batch(*batch, change)])
