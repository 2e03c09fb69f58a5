"""Texts that are continued together, against transformers, against training, and alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from llmq.base.batch import Batch
from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.hf import HfWeights
from llmq.model.generator import Generator, Request
from llmq.options.cards import find_card, spec_of
from llmq.options.presets import preset, resolve_model
from llmq.runtime.device import HOST_SPEC, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import resident
from llmq.state.weights import Weights
from tests.conftest import gpu_problem
from tests.emulator import device as emulator
from tests.models import CONFIGS, VOCAB, exported, hf_model, trainer_for

NEW = 12
PRECISION = {"atol": 1e-5}  # F32 sums in another order


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def generator_for(name, *, dtype=F32, device=HostDevice, spec=HOST_SPEC, **sizes):
    """A model's generator, in exactly the memory that was planned. device: of `spec`."""
    config, _ = resolve_model(str(exported(name)), from_scratch=False)
    sizes = {"slots": 4, "positions": 48, "blocks": 13} | sizes
    table = weight_table(config)
    plan = PlanDevice(spec)
    placement = resident(table, dtype)
    Generator(plan, config, Weights(plan, table, placement), **sizes).rehearse()
    dev = device(plan.sizes())
    weights = Weights(dev, table, placement)
    generator = Generator(dev, config, weights, **sizes)
    with HfWeights(exported(name)) as files:
        weights.load(files.read)
    return generator


def completions(generator, requests):
    found = dict(generator.run(requests))
    assert sorted(found) == list(range(len(requests)))
    assert len(generator._free) == generator.num_blocks  # all are given back
    return [found[index] for index in range(len(requests))]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert (a.ids, a.finish) == (b.ids, b.finish)
        np.testing.assert_allclose(a.logprobs, b.logprobs, **PRECISION)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_likeliest_tokens_are_those_of_transformers(name):
    """More texts than slots, too few blocks for all texts, and two texts of one prompt."""
    model, given = hf_model(name), prompts(1, 5, 17, 30, 16, 9)
    given.insert(3, given[2])
    generator = generator_for(name, blocks=8)
    found = completions(generator, [Request(ids, NEW, temperature=0) for ids in given])
    for ids, made in zip(given, found, strict=True):
        with torch.no_grad():
            want = model.generate(
                torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
            logprobs = model(want).logits[0].log_softmax(-1)
        places = np.arange(len(ids) - 1, len(ids) + NEW - 1)
        assert made.ids == want[0, len(ids) :].tolist()
        np.testing.assert_allclose(
            made.logprobs, logprobs[places, want[0, len(ids) :]], **PRECISION
        )


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_5", "deepseek_v3"])
def test_log_probabilities_are_those_of_training(name):
    """Log-probabilities of the trainer's own weights, before and after an update."""
    (prompt,) = prompts(7)
    with trainer_for(exported(name), batch_size=1, learning_rate=1e-2) as trainer:
        rows = np.random.default_rng(0).integers(3, VOCAB, (2, 1, 24)).astype(np.int32)
        before = trainer.generate([prompt], max_new_tokens=NEW, stop=[])[0][0]
        trainer.step([(rows[0], rows[1])])
        ((made,),) = trainer.generate([prompt], max_new_tokens=NEW)
        text = np.array([*prompt, *made.ids], np.int32)
        inputs, targets = np.zeros((1, 24), np.int32), np.full((1, 24), -100, np.int32)
        inputs[0, : len(text) - 1], targets[0, 6 : len(text) - 1] = text[:-1], text[7:]
        losses = trainer._step.score(Batch(inputs, targets))[0, 6 : len(text) - 1]
    np.testing.assert_allclose(-made.logprobs, losses, **PRECISION)
    assert not np.array_equal(before.logprobs, made.logprobs)


def test_a_text_does_not_depend_on_the_others():
    """Neighbours, their number and order, and preemption change nothing of it."""
    given = prompts(*range(1, 17))
    how = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    requests = [Request(ids, 30, **how, seed=i) for i, ids in enumerate(given)]
    alone = [completions(generator_for("qwen3"), [request])[0] for request in requests[::5]]
    together = completions(generator_for("qwen3", slots=16, blocks=40), requests)
    same(alone, together[::5])
    tight = generator_for("qwen3", slots=16, blocks=8)
    begun, prefill = [], tight._prefill
    tight._prefill = lambda prompts: (begun.extend(prompts), prefill(prompts))
    same(completions(tight, requests[::-1])[::-1], together)
    assert len(begun) > len(requests)  # some were computed again


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_5", "qwen3_moe"])
def test_exact_texts_have_the_same_bits_beside_any_others(name):
    """Alone, and among others in another order, in tight memory: every bit is equal."""
    requests = [Request(ids, 8 + i, seed=i) for i, ids in enumerate(prompts(3, 17, 5, 30, 1, 9))]
    generator = generator_for(name, slots=5, blocks=12, exact=True)
    alone = [completions(generator, [request])[0] for request in requests]
    beside = [Request(ids, 11, seed=50) for ids in prompts(4, 4, 20, seed=1)]
    found = completions(generator, beside + requests[::-1])[len(beside) :][::-1]
    for one, other in zip(alone, found, strict=True):
        assert one.ids == other.ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_exact_texts_exclude_products_that_share_scales():
    with pytest.raises(ConfigError, match="--exact: excludes fp8 and int8 products"):
        trainer = trainer_for(
            exported("qwen3"), model_dtype="bf16", matmul_dtype="e4m3", exact=True
        )
        with trainer:
            trainer.generate([[1, 2]], max_new_tokens=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_exact_texts_on_a_gpu(dtype):
    """More texts than the kernels of few rows take, in passes of the library's products."""
    if problem := gpu_problem():
        pytest.skip(problem)
    machine = choose_machine("cuda", 1)
    how = {"dtype": dtype, "device": machine.open, "spec": machine.spec}
    generator = generator_for("qwen3", slots=48, blocks=160, exact=True, **how)
    given = prompts(*range(1, 41))
    requests = [Request(ids[:30], 12, seed=i) for i, ids in enumerate(given)]
    alone = [completions(generator, [request])[0] for request in requests[::7]]
    together = completions(generator, requests[::-1])[::-1]
    for one, other in zip(alone, together[::7], strict=True):
        assert one.ids == other.ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_passes_ahead_of_the_host_change_nothing():
    """Texts that stop have a token computed too many, others enter and are preempted meanwhile, and
    one is dropped; every bit stays."""
    given = prompts(3, 17, 30, 9, 9, 21, 1)
    requests = [Request(ids, 6 + 5 * i, seed=i) for i, ids in enumerate(given)]
    known = completions(generator_for("qwen3"), requests)
    for i in (1, 2, 5):
        requests[i] = requests[i]._replace(stop={known[i].ids[3]})
    found = []
    for ahead in (False, True):
        generator = generator_for("qwen3", slots=3, blocks=7)
        generator.goes_ahead = ahead
        passes, replay = [], generator.dev.replay
        generator.dev.replay = lambda key, fn, to=passes, do=replay: (to.append(key), do(key, fn))
        made, tokens = completions(generator, requests), generator.stream(requests)
        some = [next(tokens) for _ in range(12)]
        generator.drop(len(requests))  # the first one of the second call
        texts = {}
        for token in (*some, *tokens):
            texts.setdefault(token.index, []).append(token.id)
        assert len(texts.pop(0)) < len(made[0].ids)
        found.append((made, texts, len(passes)))
    (one, texts, few), (two, others, many) = found
    same(one, two)
    assert texts == others and len(texts) == len(requests) - 1
    assert [made.finish for made in one].count("stop") == 3 and few <= many


def test_samples_of_a_prompt_share_its_memory():
    (prompt,) = prompts(40)
    requests = [Request(prompt, 8, seed=i) for i in range(8)]
    generator = generator_for("llama", slots=8, blocks=19)
    passes, replay = [], generator.dev.replay
    generator.dev.replay = lambda key, fn: (passes.append(key[0]), replay(key, fn))
    found = completions(generator, requests)
    assert passes == ["prefill"] + ["decode"] * 8  # nothing was computed twice
    assert len({tuple(made.ids) for made in found}) == 8
    same(found, completions(generator_for("llama"), requests))


def test_what_ends_a_text():
    generator = generator_for("qwen2")
    request = Request(prompts(5)[0], 6, temperature=0)
    (whole,) = completions(generator, [request])
    assert (len(whole.ids), whole.finish, whole.logprobs.dtype) == (6, "length", np.float32)
    (ended,) = completions(generator, [request._replace(stop={whole.ids[2]})])
    assert (ended.ids, ended.finish) == (whole.ids[: whole.ids.index(whole.ids[2]) + 1], "stop")
    assert ended.shown == ended.ids[:-1]
    (full,) = completions(generator, [request._replace(max_new_tokens=99)])
    assert (len(full.ids), full.finish) == (48 - 5, "length")


def test_tokens_that_a_text_has_are_penalized_as_in_transformers():
    model, given = hf_model("qwen3"), prompts(9, 14, seed=1)
    requests = [Request(ids, NEW, temperature=0, repetition=1.4) for ids in given]
    found = completions(generator_for("qwen3"), [Request(given[0], 3), *requests])[1:]
    for ids, made in zip(given, found, strict=True):
        want = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            eos_token_id=None, repetition_penalty=1.4,
        )  # fmt: skip
        assert made.ids == want[0, len(ids) :].tolist()


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
@pytest.mark.parametrize(
    "name, dtype, kv_dtype",
    [("qwen3_5", F32, None), ("gemma3", BF16, E4M3), ("deepseek_v3", BF16, None)],
)
def test_kernels_continue_texts(name, dtype, kv_dtype):
    """Passes of kernels in the emulator choose the tokens of their references."""
    hows = ({"temperature": 0}, {"temperature": 0}, {"top_k": 40, "top_p": 0.9, "seed": 3})
    given = zip(prompts(1, 21, 6), hows, strict=True)
    requests = [Request(ids, 4, **how) for ids, how in given]
    spec = emulator.EmulatorDevice(MemorySizes()).spec
    sizes = {"dtype": dtype, "slots": 2, "blocks": 8, "piece": 16, "kv_dtype": kv_dtype}
    made = generator_for(name, device=emulator.EmulatorDevice, spec=spec, **sizes)
    error = 1e-5 if dtype is F32 else 0.01 if kv_dtype is None else 0.03  # codes round more
    for a, b in zip(
        completions(made, requests),
        completions(generator_for(name, **sizes), requests),
        strict=True,
    ):
        assert a.ids == b.ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=error)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_keys_and_values_in_codes_are_near(name):
    """And a text does not depend on the others."""
    given = prompts(20, 3, 37, 20)
    requests = [Request(ids, NEW, temperature=0) for ids in given]
    exact = completions(generator_for(name), requests)
    rounded = completions(generator_for(name, kv_dtype=E4M3, blocks=7), requests)
    same(completions(generator_for(name, kv_dtype=E4M3), requests[1:3]), rounded[1:3])
    for a, b in zip(exact, rounded, strict=True):
        assert 0 < abs(a.logprobs[0] - b.logprobs[0]) < 0.02
    assert generator_for(name, kv_dtype=E4M3).block_bytes < generator_for(name).block_bytes / 2


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_layers_with_a_window_keep_what_they_see(name):
    """Rings change no bit, neither of long prompts in pieces, nor of texts that move or share a
    prompt: what is overwritten is not read."""
    given = prompts(90, 3, 41, 70, 70, 17)
    requests = [Request(ids, 20 + 9 * i, seed=i) for i, ids in enumerate(given)]
    sizes = {"slots": 3, "positions": 160, "blocks": 50, "piece": 16, "kv_dtype": E4M3}
    whole, ringed = (
        generator_for(name, device=partial(HostDevice, poison=True), rings=rings, **sizes)
        for rings in (False, True)
    )
    assert whole._rings is None and ringed._rings.length < 10 and ringed._rings.layers
    assert ringed.dev.sizes()["device"] < whole.dev.sizes()["device"]
    for one, other in zip(completions(whole, requests), completions(ringed, requests), strict=True):
        assert one.ids == other.ids and np.array_equal(one.logprobs, other.logprobs)


def test_bf16_is_near():
    requests = [Request(ids, NEW, temperature=0) for ids in prompts(8, 20)]
    exact, rounded = (completions(generator_for("qwen3", dtype=d), requests) for d in (F32, BF16))
    for a, b in zip(exact, rounded, strict=True):
        assert not np.array_equal(a.logprobs, b.logprobs)
        assert abs(a.logprobs[0] - b.logprobs[0]) < 0.02


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_what_is_not_written_is_not_read(name):
    """Memory that is full of NaN changes nothing, and all that was planned is used."""
    requests = [Request(ids, NEW, temperature=0) for ids in prompts(3, 20, 33, 5, 18)]
    clean = generator_for(name)
    poisoned = generator_for(name, device=partial(HostDevice, poison=True))
    for a, b in zip(completions(clean, requests), completions(poisoned, requests), strict=True):
        assert a.ids == b.ids
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    clean.rehearse()
    dev = clean.dev
    assert dev.sizes() == {name: dev.arenas[name].capacity for name in dev.arenas} | {
        "stack": dev.stack.capacity
    }


@pytest.mark.parametrize("count", [0, 48])
def test_prompts_that_do_not_fit(count):
    with pytest.raises(ValueError, match=f"a prompt has {count} tokens; there have"):
        list(generator_for("qwen2").run([Request([5]), Request([5] * count)]))


def test_damaged_weights_are_said_to_be():
    generator = generator_for("qwen2")
    generator.weights.master["vectors"].numpy()[:] = np.nan
    with pytest.raises(LlmqError, match="not finite numbers: its weights are damaged"):
        completions(generator, [Request([5])])
    assert len(generator._free) == generator.num_blocks


@pytest.mark.parametrize("ranks", [{}, {"gpus": 2, "zero_level": 3}])
def test_a_trainer_goes_on_with_damaged_weights(ranks):
    """The run itself tells what a loss that is no number means."""
    with trainer_for(exported("qwen2"), **ranks) as trainer:

        def damage(rank):
            rank.step.weights.master["vectors"].numpy()[:] = np.nan
            rank.step.weights.refresh()

        trainer.ranks.run("damaging", damage)
        for _ in range(2):
            with pytest.raises(LlmqError, match="not finite numbers"):
                trainer.generate(prompts(5, 9, 3))
        rows = np.full((2, 24), 5, np.int32)
        assert np.isnan(trainer.step([(rows, rows)] * ranks.get("gpus", 1)).loss)


def test_a_trainer_generates_in_the_memory_of_activations():
    with trainer_for(exported("qwen3")) as trainer:
        usage = trainer.usage
        made = trainer.generate(prompts(4, 9), num_samples=3, max_new_tokens=5, seed=1)
        assert [len(samples) for samples in made] == [3, 3]
        again = trainer.generate(prompts(4, 9), num_samples=2, max_new_tokens=5, seed=1)
        same([m for samples in again for m in samples], [m for s in made for m in s[:2]])
        assert trainer.usage.sizes["device"] == usage.sizes["device"]
        assert trainer.usage.sizes["stack"] <= trainer.plan.usage.sizes["stack"]
        for prompt, said in (
            ([], "prompts: one has 0 tokens, there have to be from 1 to 23"),
            ([5] * 24, "prompts: one has 24 tokens"),
            ([VOCAB], "prompts: its token 131 is outside"),
            ([-1], "prompts: -1 is no token"),
        ):
            with pytest.raises(ConfigError, match=said):
                trainer.generate([prompt])
    small = {"batch_size": 1, "seq_len": 4, "recompute_block": True}
    said = "--batch-size and --seq-len: the activations of a"
    with trainer_for(exported("qwen3"), **small) as trainer, pytest.raises(ConfigError, match=said):
        trainer.generate([[5]])


def test_passes_take_no_memory_of_the_arena():
    """On Hopper, too, where products of our own take the place of two."""
    config = replace(preset("Qwen2.5-0.5B"), num_layers=1, vocab_size=256).validate()
    table, dev = weight_table(config), PlanDevice(spec_of(find_card("h100")))
    weights = Weights(dev, table, resident(table, BF16))
    generator = Generator(dev, config, weights, slots=4, positions=64, blocks=17)
    before = dev.sizes()["device"]
    generator.rehearse()
    assert dev.sizes()["device"] == before
