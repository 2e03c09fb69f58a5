"""Plans of a few layers give those of all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from llmq.options.cards import find_card, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.checks import plan_run
from llmq.plan.estimate import Planner
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.machine import Machine
from llmq.runtime.world import World

CARD = find_card("4090")
EVERYTHING = {
    "shard_weights": True,
    "shard_gradients": True,
    "offload_gradients": True,
    "offload_master": True,
    "offload_opt_m": True,
    "offload_opt_v": True,
    "offload_residual": True,
    "lmhead_chunks": 4,
    "attn_bwd_chunks": 2,
    "grad_accumulation": 8,
}
CASES = {
    "plain": {},
    "fp8": {"matmul_dtype": "e4m3"},
    "recompute": {"recompute_ffn": True, "recompute_qkv": True},
    "offload": EVERYTHING,
    "offload block": EVERYTHING | {"recompute_block": True, "opt_m_dtype": "bf16"},
    "offload fp8": EVERYTHING
    | {"matmul_dtype": "e4m3", "persistent_quants": True, "offload_quants": True},
    "delayed": {"matmul_dtype": "e4m3", "fp8_recipe": "delayed", "head_dtype": "e4m3"},
    "once": {"grad_accumulation": 1, "recompute_swiglu": True},
}


def options(**changes):
    given = {"from_scratch": True, "model": "Qwen2.5-7B", "batch_size": 4} | changes
    return make_config({name.replace("_", "-"): value for name, value in given.items()})


def planner(
    model: str = "Qwen2.5-7B",
    layers: int | None = None,
    world_size: int = 1,
    backend: str = "cudnn",
) -> Planner:
    config = preset(model)
    config = config.with_layers(range(layers)) if layers else config
    return Planner(config, spec_of(CARD), backend, CARD, world_size)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 1) for name in CASES), ("plain", 4), ("offload", 4), ("offload fp8", 4)],
)
def test_estimate_is_the_plan(name, world_size):
    p, config = planner(layers=12, world_size=world_size), options(**CASES[name])
    estimate, exact = p.estimate(config), p.exact(config)
    # Every slab is rounded up, the one of all norms and biases differently for each model.
    assert estimate.device == pytest.approx(exact.device, abs=64 << 10)
    assert estimate.host == pytest.approx(exact.host, abs=64 << 10)
    assert estimate.tokens == exact.tokens == 4 * 1024 * config.grad_accumulation * world_size
    # Between GPUs the first and the last layers wait more or less for transfers than the others.
    # With offload a phase takes as long as its streams, or its bytes on the bus, whichever is
    # longer: with few layers it may be the one, with many the other.
    rel = 1e-4 if world_size == 1 and not config.offload_master else 0.02
    assert estimate.time.total == pytest.approx(exact.time.total, rel=rel)
    assert exact.speed == pytest.approx(exact.tokens / exact.time.total)


@pytest.mark.parametrize("name", ["plain", "recompute"])
def test_layers_of_two_kinds_are_counted_each(name):
    """With and without a window: their attention takes different times."""
    p = planner("gemma-3-1b", backend="native")  # its heads of 256 are too large for cuDNN
    config = options(model="gemma-3-1b", seq_len=4096, **CASES[name])
    config = replace(config, batch_size=1)
    estimate, exact = p.estimate(config), p.exact(config)
    assert estimate.device == pytest.approx(exact.device, abs=64 << 10)
    assert estimate.time.total == pytest.approx(exact.time.total, rel=1e-4)
    full = replace(p.model, windowed_layers=(False,) * 26)
    assert p.of(full).estimate(config).time.total > 1.02 * estimate.time.total


def test_exact_is_what_a_plan_says():
    p, config = planner("Qwen2.5-0.5B"), options(model="Qwen2.5-0.5B")
    plan = p.plan(config)
    beside = (540 << 20) + plan.host_bytes // 512  # the context, and page tables
    assert p.exact(config).device == plan.usage.device_bytes + beside
    assert p.exact(config).host == plan.host_bytes == plan.usage.sizes.host


def test_models_of_few_layers_are_planned_as_they_are():
    p, config = planner(layers=4), options()
    estimate, exact = p.estimate(config), p.exact(config)
    assert (estimate.device, estimate.host) == (exact.device, exact.host)


def test_some_layers_that_recompute_are_between_none_and_all():
    p, all_ = planner(), options(recompute_ffn=True)
    none = p.estimate(replace(all_, recompute_ffn=False, recompute_swiglu=False))
    some = [
        p.estimate(replace(all_, recompute_layers=layers)) for layers in ("3", "0-6", "0-20")
    ] + [p.estimate(all_)]
    for fewer, more in pairwise(some):
        assert fewer.device > more.device
        assert fewer.time.total < more.time.total
    # In a single one little changes; the stack is larger, though.
    assert some[0].device == pytest.approx(none.device, rel=0.05)
    assert some[0].time.total == pytest.approx(none.time.total, rel=0.02)


def test_machines_of_unequal_size():
    """Pinned memory is that of the ranks of one machine, and so are their tables of its pages."""
    config = options(model="tiny", device="cpu", offload_opt_m=True, batch_size=1)
    config = replace(config, shard_over="world")
    plans = {}
    for index in range(2):
        world = World((3, 1), ("a", "b"), index)
        machine = Machine(kind="host", spec=HOST_SPEC, note=None, world=world)
        plans[index] = plan_run(config, preset("tiny"), machine).plan
    pinned = plans[0].usage.sizes.host
    assert pinned > 0 and plans[1].usage == plans[0].usage
    assert [plan.host_bytes for plan in plans.values()] == [3 * pinned, pinned]
