"""Each part of a model has its own learning rate, wherever its state lies."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError
from llmq.options.option_file import fewest_values
from llmq.options.options import OPTIONS
from llmq.options.options_io import make_config
from llmq.options.rules import RULES
from tests.models import exported, pieces, random_batch, trainer_for
from tests.sharded import FP32, QWEN2, UNTIED, assert_same_run, config, run, train_steps

RATES = {"learning_rate": 1e-2, "lr_parts": ("embedding=0.04", "head=0.005", "vectors=0.02")}
FACTORS = {"embed": 4.0, "head": 0.5, "vectors": 2.0}


def moved(**options):
    """The changes of a first step, by slab and parameter."""
    steps, start = train_steps(1, lr=1e-2), {}

    def program(session):
        for slab in session.step.table:
            master = session.dev.download(session.step.weights.master[slab.name])
            start[slab.name] = {
                p.name: master[p.offset : p.offset + p.size].reshape(p.shape) for p in slab.params
            }
        return steps(session)

    weights = run(1, 1, program, of=UNTIED, **FP32, weight_decay=0.0, **options).state["weights"]
    return {
        name: {p: weights[p].astype(np.float64) - value for p, value in params.items()}
        for name, params in start.items()
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_part_moves_as_much_faster_as_its_rate(optimizer):
    """A first step is in proportion to the rate; with Muon so is that of the matrices."""
    more = {"optimizer": optimizer}
    factors = dict(FACTORS)
    own = dict(RATES)
    if optimizer == "muon":
        factors |= {f"layers.{i}": 3.0 for i in range(UNTIED.num_layers)}
        own |= {"muon_lr": 3e-2}
    one, other = moved(**more, learning_rate=1e-2), moved(**more, **own)
    for name, params in one.items():
        for param, change in params.items():
            # F32 weights of about 1 are rounded at the end, and changes are of about 0.01.
            want = factors.get(name, 1.0) * change
            np.testing.assert_allclose(other[name][param], want, atol=2e-7, err_msg=param)


PARTS = {
    "embedding": {"embed_tokens.weight", "wte.weight", "wpe.weight"},
    "vectors": {
        *("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight", "bias"),
        *("A_log", "dt_bias", "conv1d.weight", "gate.weight", "shared_expert_gate.weight"),
    },
}
"""Ends of names of what each rate is the rate of, as docs/optimizer.md has them."""


@pytest.mark.parametrize("rate", PARTS)
@pytest.mark.parametrize("name", ["gpt2", "qwen2_moe", "qwen3_5"])
def test_a_rate_is_that_of_documented_parameters(name, rate):
    """A first step of AdamW with a rate of 0 for the part changes no parameter of the part."""
    start = load_file(exported(name) / "model.safetensors")
    batch = random_batch(np.random.default_rng(0))
    with trainer_for(exported(name), weight_decay=0.0, lr_parts=(f"{rate}=0",)) as trainer:
        trainer.step([batch])
        after = pieces(trainer, trainer.weights())
    for key, value in after.items():
        belongs = key.endswith(tuple(PARTS[rate]))
        assert np.array_equal(value, start[key]) == belongs, key


@pytest.mark.parametrize("world", [1, 3])
def test_places_change_no_bit(world):
    rates = RATES | {"opt_m_dtype": "bf16"}
    host = {"offload_master": True, "offload_opt_m": True, "offload_opt_v": True}
    assert_same_run(run(world, 1, of=UNTIED, **rates), run(world, 1, of=UNTIED, **rates, **host))


def test_rates_without_effect_are_said():
    with pytest.raises(ConfigError, match="--lr-parts: takes the course of --learning-rate"):
        config(1, 1, learning_rate=0.0, lr_parts=("head=0.001",)).validate()
    (line,) = RULES.idle(config(1, 1, lr_parts=("head=0.001",)), model=QWEN2)
    assert line.startswith(
        "--lr-parts head=0.001 has no effect: this model's LM head is its token table"
    )
    assert RULES.idle(config(1, 1, lr_parts=("head=0.001",)), model=UNTIED) == []
    adapters = {"model": "m", "lora_rank": 4, "lr_parts": ("vectors=0.001",)}
    for part in ("norms", "biases"):
        assert RULES.idle(make_config(adapters | {"train": (part,)})) == []
    (line,) = RULES.idle(make_config(adapters))
    assert line == "--lr-parts vectors=0.001 has no effect beside adapters without --train=norms"


def test_a_cooldown_may_be_a_part_of_the_run():
    """Cooldown as a part of the run, also where the data determine the number of steps."""
    wsd = {"lr-schedule": "wsd", "learning-rate": 1e-3}
    for steps, count in ((50, 10), (7, 1), (2, 0)):
        counted = make_config(wsd | {"cooldown": count})
        for part in ("20%", "0.2", 0.2):
            config = make_config(wsd | {"cooldown": part})
            rates = [config.rate(step, steps) for step in range(steps)]
            assert rates == [counted.rate(step, steps) for step in range(steps)]
            assert rates[: steps - count] == [1e-3] * (steps - count)
            config.check_total(steps)
    for wrong in ("100%", "0%", "1.5", "-20%", "a fifth"):
        with pytest.raises(ConfigError, match="--cooldown: "):
            make_config({"cooldown": wrong})
    (line,) = RULES.idle(make_config(wsd | {"cooldown": "20%", "steps": 10, "warmup": 9}))
    assert line == "--warmup 9 and --cooldown 0.2 do not fit into --steps 10"


CONSTANT = [1e-3] * 11


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_schedule_that_is_named_falls_to_zero(schedule):
    config = make_config({"lr": 1e-3, "lr-schedule": schedule})
    assert rates_of(config)[0] == 1e-3
    assert config.rate(11, 11) == 0 and rates_of(config) != CONSTANT
    assert rates_of(config) == sorted(rates_of(config), reverse=True)


def rates_of(config, steps=11):
    return [config.rate(step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, CONSTANT),  # llm.q's default
        ({"final-lr-fraction": 1, "lr-schedule": "cosine"}, CONSTANT),
        ({"final-lr-fraction": 0.1}, {"lr-schedule": "cosine", "final-lr-fraction": 0.1}),
        ({"lr-schedule": "cosine"}, {"final-lr-fraction": 0}),
        ({"lr-schedule": "linear"}, {"lr-schedule": "linear", "final-lr-fraction": 0}),
        ({"lr-schedule": "wsd"}, {"lr-schedule": "wsd", "cooldown": 2}),
        ({"lr-schedule": "wsd", "cooldown": 5}, {"cooldown": 5}),
        ({"lr-schedule": "wsd", "cooldown": 0}, CONSTANT),
        ({"warmup": "20%", "final-lr-fraction": 0}, {"warmup": 2, "lr-schedule": "cosine"}),
        ({"warmup": 0.2}, {"warmup": 2}),
    ],
)
def test_what_is_not_given_of_a_schedule(options, rates):
    found = make_config({"lr": 1e-3} | options)
    wanted = rates if isinstance(rates, list) else rates_of(make_config({"lr": 1e-3} | rates))
    assert rates_of(found) == wanted
    again = make_config({OPTIONS[n].flags[0]: v for n, v in fewest_values(found).items()})
    assert rates_of(again) == wanted and found.normalized() == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "1e-5, constant"),
        ({"warmup": 20, "lr-schedule": "cosine"}, "1e-5, 20 steps of warm-up, cosine to 0"),
        ({"warmup": "5%", "final-lr-fraction": 0.1}, "1e-5, 10 steps of warm-up, cosine to 1e-6"),
        (
            {"lr": 0.002, "warmup": 1, "lr-schedule": "wsd"},
            "0.002, 1 step of warm-up, constant, 40 steps of cooldown to 0",
        ),
        ({"lr-schedule": "linear", "final-lr-fraction": 1}, "1e-5, constant"),
        (
            {"optimizer": "muon", "muon-lr": 0.02, "lr-schedule": "linear"},
            "1e-5 (Muon 0.02), linear to 0",
        ),
    ],
)
def test_rates_in_words(options, words):
    assert make_config(options).course(200) == words


def test_a_schedule_without_effect_is_said():
    for options, line in [
        ({"lr-schedule": "wsd", "cooldown": 0}, "--lr-schedule wsd has no effect: with --cooldown"),
        ({"lr-schedule": "linear", "final-lr-fraction": 1}, "--lr-schedule linear has no effect"),
        ({"lr-schedule": "wsd", "final-lr-fraction": 0.1}, "--final-lr-fraction has no effect"),
        ({"warmup": "90%", "cooldown": "20%", "steps": 10}, "--warmup 0.9 and --cooldown 0.2 do"),
    ]:
        (found,) = RULES.idle(make_config(options))
        assert found.startswith(line)
    for good in ({"lr-schedule": "cosine"}, {"lr-schedule": "wsd"}, {"final-lr-fraction": 0.1}, {}):
        assert RULES.idle(make_config(good)) == []
    for wrong in ("100%", "0%", "1.5", "-20%", "a fifth", 2**31):
        with pytest.raises(ConfigError, match="--warmup: "):
            make_config({"warmup": wrong})
