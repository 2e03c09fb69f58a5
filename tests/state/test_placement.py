"""The placement of everything of a slab: the table of a plan, and slabs that are not trained."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from llmq.base.run_id import RunId
from llmq.base.tensor import TIERS
from llmq.checkpoint.checkpoint import CheckpointReader, CheckpointWriter, read_group, write_group
from llmq.checkpoint.manifest import Manifest
from llmq.commands.cli import _run
from llmq.ops.common import SCALE_BLOCK
from llmq.plan.placement_table import placement_table
from llmq.plan.plan import make_plan
from llmq.runtime.arena import align_up
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import weight_table
from llmq.state.placement import Placement, place
from tests.covering import pairwise
from tests.sharded import (
    FP8,
    FP32,
    LR,
    QWEN2,
    UNTIED,
    assert_same,
    assert_same_run,
    config,
    run,
    train_steps,
)

BLOCKS = [f"layers.{i}" for i in range(QWEN2.num_layers)]
HALF = ["embed", *BLOCKS[:2]]
MIXED = {"master_dtype": "fp32", "grad_accum_dtype": "fp32", "opt_m_dtype": "e4m3"}
STREAMED = {"zero_level": 3, "offload_master": True, "offload_gradients": True}
KEPT = FP8 | STREAMED | {"persistent_quants": True, "offload_quants": True}


@pytest.mark.parametrize(
    ("world", "options", "table"),
    [
        (
            1,
            {},
            """
  slabs       group     work  gradient  m           v
  embed       matrices  bf16  bf16      fp32 shard  fp32 shard
  layers.0-2  matrices  bf16  bf16      fp32 shard  fp32 shard
  vectors     vectors   bf16  bf16      fp32 shard  fp32 shard""",
        ),
        (
            2,
            {"shard_weights": True, "memcpy_all_gather": True, "mirror_weights": True, **MIXED},
            """
  slabs       group     work            master      part        mirror              gradient  m           v
  embed       matrices  bf16            fp32 shard  -           -                   fp32      e4m3 shard  fp32 shard
  layers.0-2  matrices  bf16, in slots  fp32 shard  bf16 shard  bf16 shard, pinned  fp32      e4m3 shard  fp32 shard
  vectors     vectors   bf16            fp32 shard  -           -                   fp32      e4m3 shard  fp32 shard""",  # noqa: E501
        ),
        (
            1,
            KEPT | {"write_combined": True, "head_dtype": "e4m3"},
            """
  slabs       group     work            master                      part                        transposed      gradient                              m           v
  embed       matrices  bf16            -                           -                           -               bf16                                  fp32 shard  fp32 shard
  layers.0-2  matrices  e4m3, in slots  bf16 shard, write-combined  e4m3 shard, write-combined  e4m3, in slots  bf16 shard, write-combined, in slots  fp32 shard  fp32 shard
  vectors     vectors   bf16            -                           -                           -               bf16                                  fp32 shard  fp32 shard
  LM head: e4m3 beside these""",  # noqa: E501
        ),
    ],
)
def test_table(world, options, table):
    placement = place(config(world, 1, **options).for_step, weight_table(QWEN2, world), world)
    assert placement_table(placement) == table.splitlines()[1:]


def test_table_of_frozen_slabs():
    placement = place(config(1, 1).for_step, weight_table(QWEN2), frozen=HALF)
    assert [line.split() for line in placement_table(placement)] == [
        ["slabs", "group", "work", "gradient", "m", "v"],
        ["embed", "frozen", "bf16", "-", "-", "-"],
        ["layers.0-1", "frozen", "bf16", "-", "-", "-"],
        *(
            [name, group, "bf16", "bf16", "fp32", "shard", "fp32", "shard"]
            for name, group in (("layers.2", "matrices"), ("vectors", "vectors"))
        ),
    ]


def test_command_shows_the_placement(capsys):
    args = ["plan", "--model", "tiny", "--from-scratch", "--placement"]
    assert _run(args) == 0
    head, rows = capsys.readouterr().out.split("\n\n[Placement]\n")
    assert "[Plan]\n" in head
    assert rows.splitlines()[1].split()[:3] == ["embed", "matrices", "bf16"]
    assert _run([*args, "--json", "--master-dtype", "fp32"]) == 0
    placement = json.loads(capsys.readouterr().out)["placement"]
    assert placement["head"] is None
    assert placement["slabs"][1]["master"] == {
        "dtype": "fp32",
        "memory": "device",
        "sharded": True,
        "streamed": False,
    }
    assert _run([*args, "--fit", "--gpu-memory", "1GiB"]) == 2
    assert capsys.readouterr().err.startswith("error: --placement: ")


# ------------------------------------------------------------------------------------------------
# Slabs that are not trained: no option makes any

OPTIONS = {
    "fp32": FP32,
    "mixed": MIXED,
    "streamed": STREAMED,
    "fp8": FP8 | {"head_dtype": "e4m3"},
    "kept": KEPT,
}


def stored(placement: Placement, world: int) -> Counter:
    """Bytes by place of what lies there all the time, of one rank."""
    sizes: Counter = Counter()
    for slab in weight_table(QWEN2, world):
        at = placement[slab.name]
        stores = [at.master, at.part, at.gradient, *at.moments.values()]
        for store in [store for store in stores if store is not None]:
            elements = slab.shard_size if store.sharded else slab.size
            sizes[store.memory] += align_up(elements * store.dtype.itemsize)
        for moment in at.moments.values():
            if moment.is_scaled:
                sizes["device"] += align_up(slab.shard_size // SCALE_BLOCK * 4)
    return sizes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_frozen_slabs_take_less_memory(name, world):
    """Frozen slabs have no gradients, moments and masters: the plan has exactly so much less."""
    cfg = config(world, 2, **OPTIONS[name])
    table, sizes = weight_table(QWEN2, world), []
    for frozen in ((), HALF):
        plan = make_plan(cfg, QWEN2, HOST_SPEC, world_size=world, frozen=frozen)
        kinds = ("Weights", "Quants", "Master", "Gradients", "Adam M", "Adam V")
        found = {p: sum(plan.usage.categories[p].get(k, 0) for k in kinds) for p in TIERS}
        expected = stored(place(cfg.for_step, table, world, frozen), world)
        sizes.append({place: found[place] - expected[place] for place in TIERS})
        assert sizes[-1] == sizes[0]
    frozen_at = [plan.placement[slab] for slab in HALF]
    assert not any(at.gradient or at.moments for at in frozen_at)
    assert {at.master is None for at in frozen_at if not at.is_coded} == {True}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_frozen_slabs_stay_and_the_others_train(name, world):
    """One step of what is trained is the same, bit for bit, whether or not the rest is, too."""
    options = OPTIONS[name] | {"grad_clip": 0.0}
    start, all_, part = (
        run(world, 2, train_steps(1, lr), frozen=frozen, **options)
        for lr, frozen in ((0.0, ()), (LR, ()), (LR, HALF))
    )
    frozen = {p.name for slab in weight_table(QWEN2) if slab.name in HALF for p in slab.params}
    assert part.state["adam.m"].keys() == all_.state["adam.m"].keys() - frozen - set(HALF)
    for key in frozen:
        was, now = start.state["weights"][key], part.state["weights"][key]
        assert_same({key: was.astype(now.dtype)}, {key: now})
        assert (all_.state["weights"][key] != was).any()
    for group in ("weights", "adam.m", "adam.v"):
        trained = part.state[group].keys() - frozen
        assert_same(
            {key: part.state[group][key] for key in trained},
            {key: all_.state[group][key] for key in trained},
        )
    assert (part.results[0].loss, part.results[0].tokens) == (
        all_.results[0].loss,
        all_.results[0].tokens,
    )
    assert 0 < part.results[0].norm < all_.results[0].norm


FROZEN = {"blocks": BLOCKS, "vectors": ["vectors"], "the rest": ["embed", "vectors", "head"]}


@pytest.mark.parametrize(
    ("frozen", "world", "kept"), pairwise(frozen=tuple(FROZEN), world=(1, 3), kept=(False, True))
)
def test_places_of_frozen_slabs_change_no_bit(frozen, world, kept):
    base = (FP8 if kept else {}) | {"zero_level": 2}
    one, other = (
        run(world, 2, of=UNTIED, frozen=FROZEN[frozen], **base | more)
        for more in ({}, KEPT if kept else STREAMED)
    )
    assert_same_run(one, other)


def test_checkpoints_of_frozen_slabs(tmp_path):
    """Moments of what is trained, weights of all in one format; they come back as they were."""

    def program(session):
        step, dev = session.step, session.dev
        session.train(0)
        before = {g: [dev.download(p.tensor) for p in ps] for g, ps in step.state().items()}
        writer = CheckpointWriter(tmp_path, 1)
        groups = step.state().items()
        files = [write_group(dev.download, writer, *group, lambda: None) for group in groups]
        own = {"tokenizer": None, "run": RunId.new("a")}
        manifest = Manifest(model=QWEN2, loader={}, state={}, options={}, **own)
        path = writer.commit(manifest, files)
        session.train(1)
        with CheckpointReader(path) as reader:
            reader.check(step.table, step.optimizer.trained)
            for group, pieces in step.state().items():
                read_group(dev, reader, group, pieces, lambda: None)
            dtypes = {group: reader.dtype(group) for group in reader.groups}
        step.weights.refresh()
        for group, pieces in step.state().items():
            for piece, was in zip(pieces, before[group], strict=True):
                np.testing.assert_array_equal(dev.download(piece.tensor), was)
        return dtypes

    outcome = run(1, 2, program, frozen=HALF, **MIXED)
    assert outcome.results["weights"] == np.float32
