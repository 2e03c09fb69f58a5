"""Inference with a cache against the whole-sequence passes of transformers and of training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, F32
from llmq.checkpoint.hf import HfWeights
from llmq.model.inference import Decoder
from llmq.options.cards import find_card, spec_of
from llmq.options.presets import preset, resolve_model
from llmq.run.sampling import Sampler
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import resident
from llmq.state.weights import Weights
from tests.models import CONFIGS, VOCAB, hf_model, trainer_for

LENGTH = 24
# F32 sums in another order; logits are of the order of 1.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def decoder_for(path, dtype=F32, positions=LENGTH):
    config, _ = resolve_model(str(path), from_scratch=False)
    with HfWeights(path) as weights:
        return Sampler(
            choose_machine("cpu", 1), config, lambda w: w.load(weights.read), positions, dtype
        ).decoder


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, LENGTH).astype(np.int32)


def logits_at(decoder, parts):
    """Logits after each part of a sequence, (parts, V)."""
    position, rows = 0, []
    for part in parts:
        rows.append(decoder.forward(part, position))
        position += len(part)
    return np.array(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    sequence = tokens()
    with torch.no_grad():
        expected = model(torch.from_numpy(sequence).long()[None]).logits[0].numpy()
    decoder = decoder_for(tmp_path)
    singly = logits_at(decoder, np.split(sequence, LENGTH))
    np.testing.assert_allclose(singly, expected, **TOLERANCE)
    # In parts of every kind, over what the cache still holds.
    for ends in ([], [1], [7, 8, 20], [23]):
        parts = np.split(sequence, ends)
        got = logits_at(decoder, parts)
        lasts = np.cumsum([len(part) for part in parts]) - 1
        np.testing.assert_allclose(got, expected[lasts], **TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_losses_are_those_of_training(name, tmp_path):
    hf_model(name).save_pretrained(tmp_path)
    sequence = np.append(tokens(1), np.int32(3))
    logits = logits_at(decoder_for(tmp_path), np.split(sequence[:-1], LENGTH)).astype(np.float64)
    lse = np.log(np.exp(logits).sum(axis=1))
    losses = lse - logits[np.arange(LENGTH), sequence[1:]]
    with trainer_for(tmp_path, batch_size=1, seq_len=LENGTH) as trainer:
        result = trainer.step([(sequence[None, :-1].copy(), sequence[None, 1:].copy())])
    np.testing.assert_allclose(losses.mean(), result.loss, rtol=1e-5)
    np.testing.assert_allclose(lse.mean(), result.numbers["lse_mean"], rtol=1e-5)


def test_bf16_is_near(tmp_path):
    hf_model("qwen3").save_pretrained(tmp_path)
    parts = np.split(tokens(), [8, 16])
    exact, rounded = (logits_at(decoder_for(tmp_path, d), parts) for d in (F32, BF16))
    assert not np.array_equal(exact, rounded)
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert error < 0.02  # BF16 has 8 bits, over two layers


def test_what_is_not_written_is_not_read(tmp_path):
    """A longer cache, and memory that is full of NaN, change nothing."""
    hf_model("llama").save_pretrained(tmp_path)
    config, _ = resolve_model(str(tmp_path), from_scratch=False)
    parts = np.split(tokens(), [5, 6])
    expected = logits_at(decoder_for(tmp_path), parts)
    long = decoder_for(tmp_path, positions=64)
    np.testing.assert_array_equal(logits_at(long, parts), expected)
    sizes = MemorySizes(
        device=long.dev.arenas["device"].used, stack=long.dev.stack.capacity, pinned=0
    )
    dev = HostDevice(sizes, poison=True)
    loaded = Weights(dev, weight_table(config), resident(weight_table(config), F32))
    poisoned = Decoder(dev, config, loaded, 64)
    with HfWeights(tmp_path) as weights:
        loaded.load(weights.read)
    np.testing.assert_array_equal(logits_at(poisoned, parts), expected)


@pytest.mark.parametrize(("count", "position"), [(0, 0), (25, 0), (2, 23), (1, 24)])
def test_too_many_tokens(count, position, tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{count} tokens at {position} exceed 24 positions"):
        decoder_for(tmp_path).forward(np.zeros(count, np.int32), position)


def test_what_is_planned_is_enough_for_every_number_of_tokens():
    """Also where a fused product takes the place of two, and needs less memory, on Hopper."""
    config = replace(preset("Qwen2.5-0.5B"), num_layers=1, vocab_size=256).validate()
    table, positions = weight_table(config), 2048

    def sizes(counts=None):
        dev = PlanDevice(spec_of(find_card("h100")))
        decoder = Decoder(dev, config, Weights(dev, table, resident(table, BF16)), positions)
        if counts is None:
            decoder.rehearse()
        for n in counts or ():
            decoder.take_shape(1, n)
            decoder._forward()
        return dev.sizes()

    planned, whole = sizes(), sizes([positions])
    assert whole["stack"] < planned["stack"]  # a kernel that is both keeps no tensor between
    for n in (1, 2, 16, 100, 2047):
        needed = sizes([n])
        assert all(needed[name] <= planned[name] for name in ("stack", "device"))
