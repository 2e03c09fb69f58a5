"""Every way to divide and to offload a step, on CPU devices, against one rank that does neither."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from llmq.base.dtypes import STEP_SCALARS
from llmq.plan.plan import make_plan
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import weight_table
from tests.covering import covering, pairwise
from tests.sharded import (
    DELAYED,
    FP8,
    FP32,
    GPT2,
    QWEN2,
    UNTIED,
    Session,
    assert_same,
    assert_same_run,
    config,
    model,
    move_in_pieces,
    random_options,
    run,
    train_steps,
)

A2A = {"all_to_all_reduce": True}
MOMENTS = {"offload_opt_m": True, "offload_opt_v": True}
STREAMED = {"shard_weights": True, "shard_gradients": True}
HOST = {"offload_master": True, "offload_gradients": True, "offload_residual": True}
EVERYTHING = STREAMED | HOST | MOMENTS
QUANTS = {"shard_weights": True, "persistent_quants": True}
HEAD = {"head_dtype": "e4m3"}
INT8 = {"matmul_dtype": "int8"}
MASTER = {"master_dtype": "fp32"}
SMALL = {"opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"}
TWO_STEPS = train_steps(2)  # on this device the third is as the second
MODELS = {"qwen2": QWEN2, "untied qwen3": UNTIED, "gpt2": GPT2}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Buffers so small that a slab in host memory is updated in several pieces."""
    move_in_pieces(monkeypatch, 1024)


def flags(options: dict) -> str:
    """For the names of tests."""
    words = [name if value is True else f"{name}={value}" for name, value in options.items()]
    return " ".join(words) or "plain"


@cache
def plain(world: int, accum: int, name: str, options: tuple):
    """The run that a test compares with; made once."""
    return run(world, accum, TWO_STEPS, of=MODELS[name], **dict(options))


def against_plain(world, accum, options, base, name="qwen2"):
    """base | options must give the same bits as base."""
    want = plain(world, accum, name, tuple(base.items()))
    got = run(world, accum, TWO_STEPS, of=MODELS[name], **(base | options))
    assert_same_run(got, want)


# ------------------------------------------------------------------------------------------------
# In F32 it does not matter how sequences are divided among ranks and micro-steps


def close_to_one_rank(got, name="qwen2"):
    want = plain(1, 1, name, tuple(FP32.items()))
    for a, b in zip(got.results, want.results, strict=True):
        assert a.tokens == b.tokens
        # Sums in another order: each rounds at 6e-8, and errors grow from step to step.
        numbers = [[r.loss, r.norm, *r.numbers.values()] for r in (a, b)]
        np.testing.assert_allclose(*numbers, rtol=1e-5)
    for group, parameters in want.state.items():
        for parameter, value in parameters.items():
            # The same, as elements of up to 1; a step changes weights by up to 1e-2.
            found = got.state[group][parameter]
            np.testing.assert_allclose(found, value, rtol=0, atol=2e-6, err_msg=parameter)


DIVISIONS = [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 3)]
# Options that change no result.
EXTRAS = [
    {},
    {"offload_residual": True},
    MOMENTS,
    MOMENTS | {"use_zero_copy": True, "write_combined": True},
    {"recompute_block": True},
    {"shard_weights": True, "offload_master": True},
    {"recompute_block": True, "recompute_layers": "1", "offload_residual": True}
    | {"offload_between": True},
]
F32_RUNS = covering(
    {"world": world, "accum": accum, "level": level, "a2a": a2a, "extra": extra}
    for (world, accum), level, a2a, extra in product(
        DIVISIONS, (1, 2, 3), (False, True), range(len(EXTRAS))
    )
)


@pytest.mark.parametrize("row", F32_RUNS, ids=lambda row: "-".join(map(str, row.values())))
def test_f32(row):
    options = {"zero_level": row["level"], "all_to_all_reduce": row["a2a"]}
    options |= FP32 | EXTRAS[row["extra"]]
    close_to_one_rank(run(row["world"], row["accum"], TWO_STEPS, **options))


@pytest.mark.parametrize("name", ["untied qwen3", "gpt2"])
@pytest.mark.parametrize("level", [1, 3])
def test_f32_of_other_models(name, level):
    options = FP32 | {"zero_level": level, "offload_residual": True}
    close_to_one_rank(run(3, 2, TWO_STEPS, of=MODELS[name], **options), name)


@cache
def untrained(world: int, options: tuple):
    """A run that leaves the weights as they are."""
    return run(world, 1, train_steps(1, lr=0.0), **dict(options))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fresh_weights_are_those_of_one_rank(world):
    """Random weights are equal to one rank's, in F32 and rounded to BF16."""
    for options in (FP32, FP32 | STREAMED, {}, FP8):
        got, want = (untrained(w, tuple(options.items())) for w in (world, 1))
        assert_same(got.state["weights"], want.state["weights"])
        assert_same(got.work, want.work)


# ------------------------------------------------------------------------------------------------
# Where memory is, and whether it is divided, changes no bit


ONE_RANK = [
    STREAMED,
    {"shard_gradients": True, "offload_gradients": True},
    MOMENTS,
    {"offload_opt_v": True, "use_zero_copy": True},
    {"shard_weights": True, "offload_master": True},
    {"offload_residual": True},
    EVERYTHING,
    EVERYTHING | {"use_zero_copy": True},
    EVERYTHING | {"write_combined": True},
    {"recompute_block": True, "recompute_layers": "1-2", "offload_residual": True},
    {"recompute_swiglu": True, "recompute_norm": True, "recompute_qkv": True},
]
ONE_RANK_FP8 = [  # moments are updated alike
    STREAMED,
    {"shard_gradients": True, "offload_gradients": True},
    {"shard_weights": True, "offload_master": True},
    EVERYTHING,
    {"recompute_block": True, "recompute_layers": "1-2", "offload_residual": True},
    {"recompute_swiglu": True, "recompute_norm": True, "recompute_qkv": True},
    {"shard_weights": True, "recompute_att": True},
    {"shard_weights": True, "recompute_block": True, "recompute_layers": "0"},
    {"offload_master": True},
    {"keep_transposed": False},
    QUANTS,
    QUANTS | {"offload_quants": True},
    EVERYTHING | {"persistent_quants": True},
    EVERYTHING | {"persistent_quants": True, "offload_quants": True, "write_combined": True},
]
BITS = [
    *((1, 2, {}, options) for options in ONE_RANK),
    *((1, 2, MASTER, options) for options in (MOMENTS, EVERYTHING, {"offload_master": True})),
    *((1, 3, FP8, options) for options in ONE_RANK_FP8),
    *((1, 2, DELAYED | HEAD, options) for options in (EVERYTHING, QUANTS)),
    *((1, 2, SMALL, options) for options in (MOMENTS, EVERYTHING)),
    *((1, 2, INT8, options) for options in (EVERYTHING, {"recompute_block": True})),
    (3, 1, INT8, {"zero_level": 3}),
    (2, 2, INT8 | {"zero_level": 2}, EVERYTHING),
]
# Several ranks round BF16 sums where they are made, so gradients must be divided alike.
LEVEL2 = {"zero_level": 2}
BITS += [
    (2, 2, LEVEL2, STREAMED),
    (2, 2, LEVEL2 | A2A | FP8, STREAMED),
    (3, 2, LEVEL2 | FP8, EVERYTHING | {"persistent_quants": True}),
    (3, 2, LEVEL2 | A2A, EVERYTHING),
    (3, 1, LEVEL2 | A2A | MASTER, EVERYTHING),
    (4, 1, LEVEL2 | FP8 | HEAD, QUANTS | {"offload_quants": True}),
    (2, 2, LEVEL2 | A2A | DELAYED, EVERYTHING | {"keep_transposed": False}),
    (2, 3, {}, MOMENTS | {"offload_residual": True, "use_zero_copy": True}),
    (3, 1, A2A | SMALL, MOMENTS | {"shard_weights": True}),
    (2, 2, FP8, {"shard_weights": True}),
]
# With one micro-step there is only one sum.
BASES = [{}, A2A, FP8, FP8 | A2A, DELAYED | A2A]
for world, base, level in pairwise(world=(2, 3, 4), base=range(len(BASES)), level=(2, 3)):
    BITS.append((world, 1, BASES[base], {"zero_level": level}))


@pytest.mark.parametrize(
    ("world", "accum", "base", "options"),
    BITS,
    ids=lambda v: flags(v) if isinstance(v, dict) else None,
)
def test_bits(world, accum, base, options):
    against_plain(world, accum, options, base)


@pytest.mark.parametrize("base", [SMALL, MASTER], ids=flags)
@pytest.mark.parametrize("piece", [512, 1536, 17664, 1 << 20])
def test_pieces_of_any_size(monkeypatch, piece, base):
    """Shards have 15360, 17664 and 1664 elements: multiples or not, longer and shorter."""
    move_in_pieces(monkeypatch, piece)
    against_plain(1, 2, MOMENTS | HOST | STREAMED, base)


@pytest.mark.parametrize("seed", range(6))
def test_bits_of_random_options(seed):
    world, accum, base, options = random_options(seed)
    against_plain(world, accum, options, base, list(MODELS)[seed % 3])


@pytest.mark.parametrize("name", ["untied qwen3", "gpt2"])
@pytest.mark.parametrize("base", [LEVEL2, LEVEL2 | FP8 | HEAD | A2A], ids=flags)
def test_bits_of_other_models(name, base):
    against_plain(2, 2, EVERYTHING, base, name)


def test_ways_to_reduce_agree_in_f32():
    """The CPU's library adds in the order of ranks, too; so do both kinds of gradients."""
    for level in (1, 2):
        base = FP32 | {"zero_level": level}
        against_plain(3, 1, A2A, base)
    options = FP32 | {"zero_level": 1}
    want, got = (run(2, 2, TWO_STEPS, **(options | a2a)) for a2a in ({}, A2A))
    assert_same_run(want, got)


# ------------------------------------------------------------------------------------------------
# Memory: a slot holds one block, and there are two of each kind

DEEP = model("tiny", num_layers=12)
HOSTED = {
    "offload_opt_m": "Adam M",
    "offload_opt_v": "Adam V",
    "offload_master": "Master",
    "offload_gradients": "Gradients",
    "offload_quants": "Quants",
    "offload_residual": "Activations",
}


def memory(world: int, place: str = "device", **options) -> Counter:
    """Bytes by category that a plan has in a place, without the stack."""
    plan = make_plan(config(world, 1, **options), DEEP, HOST_SPEC, world_size=world)
    return Counter(plan.usage.categories[place] | {"Stack": 0})


def blocks(world: int) -> tuple[int, int]:
    """Elements of one transformer block, and of all."""
    sizes = [slab.size for slab in weight_table(DEEP, world) if slab.is_block]
    return sizes[0], sum(sizes)


@pytest.mark.parametrize("option", HOSTED)
@pytest.mark.parametrize("world", [1, 4])
def test_offloading_moves_bytes(world, option):
    """One rank has slots only where the blocks themselves are in host memory."""
    base = FP8 | STREAMED | {"persistent_quants": True, "keep_transposed": False}
    before, after = (memory(world, **(base | more)) for more in ({}, {option: True}))
    here, there = (memory(world, "pinned", **(base | more)) for more in ({}, {option: True}))
    slots = 0
    if world == 1:
        slots = 2 * blocks(1)[0] * {"offload_gradients": 2, "offload_quants": 1}.get(option, 0)
    moved = there - here
    assert list(moved) == [HOSTED[option]] and not here - there
    assert before - after == moved - Counter({HOSTED[option]: slots}) and not after - before


@pytest.mark.parametrize("world", [2, 4])
def test_levels_save_memory(world):
    one = memory(1)
    first, second, third = (memory(world, zero_level=level) for level in (1, 2, 3))
    block, total = (2 * elements for elements in blocks(world))  # bytes of BF16
    assert first["Adam M"] * world == 2 * first["Weights"] >= one["Adam M"]
    saved = total - total // world - 2 * block
    assert first - second == Counter({"Gradients": saved})
    assert second["Weights"] - third["Weights"] - third["Master"] == saved
    assert second["Gradients"] == third["Gradients"]


# ------------------------------------------------------------------------------------------------
# Evaluations, formats


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, HEAD | FP8),
        (1, DELAYED | EVERYTHING),
        (2, FP8 | {"zero_level": 3}),
        (3, HEAD | FP8 | A2A),
    ],
    ids=lambda v: flags(v) if isinstance(v, dict) else None,
)
def test_evaluations_leave_no_trace(world, options):
    """At the start, after an update, repeated; and they see the weights of the last update."""

    def evaluating(session: Session):
        found = [session.evaluate(), session.evaluate()]
        for step in range(2):
            ticket = session.train(step)
            found += [session.step.result(ticket), session.evaluate(), session.evaluate()]
        return found

    got, want = run(world, 2, evaluating, **options), run(world, 2, train_steps(2), **options)
    first, again, step1, after1, again1, step2, after2, again2 = got.results
    assert first == again and after1 == again1 and after2 == again2
    assert len({first.loss, after1.loss, after2.loss}) == 3
    assert_same_run(replace(got, results=[step1, step2, after2]), want)


@cache
def three_steps_in_f32():
    return run(1, 1, train_steps(3, lr=1e-3), **FP32).results


@pytest.mark.parametrize("options", [FP8, FP8 | HEAD, DELAYED | HEAD, SMALL, {}], ids=flags)
def test_low_precision_is_close_to_f32(options):
    """On one rank and on three: a scale or a shard in the wrong place is farther off."""
    want = three_steps_in_f32()
    for world, level in ((1, 1), (3, 3)):
        options = options | {"adam_epsilon": 1e-3, "zero_level": level}
        got = run(world, 2, train_steps(3, lr=1e-3), **options).results
        # The formats' rounding, and what three steps with it make of it.
        np.testing.assert_allclose([r.loss for r in got], [r.loss for r in want], rtol=5e-4)
        np.testing.assert_allclose([r.norm for r in got], [r.norm for r in want], rtol=0.01)


@pytest.mark.parametrize("options", [{"zero_level": 3}, FP8, FP8 | {"zero_level": 3}], ids=flags)
def test_weights_can_be_written_again(options):
    """A checkpoint that is loaded does so; also when nothing is done before they are loaded
    again."""

    def program(session: Session):
        masters = session.step.weights.master
        start = {name: session.dev.download(tensor) for name, tensor in masters.items()}
        found = [session.step.result(session.train(0)), session.evaluate()]
        for factor in (2, 1):
            for name, array in start.items():
                session.dev.upload(masters[name], array * array.dtype.type(factor))
            session.step.weights.refresh()
        return [*found, session.evaluate()]

    _, untrained = run(2, 1, train_steps(1, lr=0.0), **options).results
    *_, again = run(2, 1, program, **options).results
    assert again == untrained


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers):
    """Models with as many layers as there are slots, with fewer, and with one more."""
    of = model("tiny", num_layers=layers)
    for world, base in ((1, {}), (2, LEVEL2 | FP8)):
        want, got = (run(world, 2, TWO_STEPS, of=of, **(base | m)) for m in ({}, EVERYTHING))
        assert_same_run(got, want)


def test_delayed_scales_follow_from_all_ranks():
    """Whoever has which sequences, the largest values are the same, and all ranks know them."""
    want, *others = (run(world, 1, train_steps(1), **DELAYED).extra for world in (1, 2, 4))
    for found in others:
        assert found.keys() == want.keys()
        for name, history in found.items():
            # In the rehearsal each rank has scales of its own, and rounds with them: a factor of
            # the element that is largest may differ by E4M3's rounding, 1 / 16.
            np.testing.assert_allclose(history, want[name], rtol=2.0**-4, err_msg=name)
            assert all(history[-2:]) and not any(history[:-2])  # the rehearsal and the step


def test_all_micro_steps_have_random_numbers_of_their_own():
    found = []

    def program(session: Session):
        scalars = [session.step.scalars_of(5, i, 0.0, 0.0) for i in range(3)]
        found.extend(int(words.view(STEP_SCALARS)[0]["micro_step"]) for words in scalars)
        return train_steps(1)(session)

    run(4, 3, program)
    assert sorted(found) == list(range(12))


@pytest.mark.parametrize("moments", ["bf16", "e4m3"])
@pytest.mark.parametrize("level", [1, 3])
def test_ranks_round_weights_as_one_does(level, moments):
    """With random numbers of the slab, not of the shard."""
    dtypes = {"grad_accum_dtype": "fp32", "opt_m_dtype": moments, "opt_v_dtype": moments}
    options = dtypes | {"zero_level": level}
    one, three = (run(world, 1, train_steps(1), **options).state for world in (1, 3))
    for group in ("weights", "adam.m", "adam.v"):
        for name, value in one[group].items():
            same = np.mean(three[group][name] == value)
            # Gradients that differ by 1e-7 are rounded to different sides now and then; other
            # random numbers round half of all elements to another side.
            assert same > 0.9, (group, name, same)
