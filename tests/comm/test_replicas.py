"""--shard-over machine: several machines, of threads here, each with a replica of the state."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, U8
from llmq.comm.collectives import SilentComm, silenced
from tests.covering import covering
from tests.model.test_sharding import (
    A2A,
    EVERYTHING,
    HEAD,
    LEVEL2,
    MOMENTS,
    QUANTS,
    SMALL,
    STREAMED,
    TWO_STEPS,
    close_to_one_rank,
    flags,
)
from tests.ranks import run_devices
from tests.sharded import (
    DELAYED,
    FP8,
    FP32,
    assert_same,
    assert_same_run,
    move_in_pieces,
    run,
    train_steps,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Buffers so small that a slab in host memory is updated in several pieces."""
    move_in_pieces(monkeypatch, 1024)


# -- steps --

EXTRAS = [{}, MOMENTS, {"offload_gradients": True}, {"recompute_block": True}]
ROWS = covering(
    {"world": world, "machines": machines, "accum": accum, "level": level, "a2a": a2a, "extra": e}
    for (world, machines), accum, level, a2a, e in product(
        ((2, 2), (4, 2), (3, 3), (6, 3)), (1, 2), (1, 2, 3), (False, True), range(len(EXTRAS))
    )
    if (e != 2 or level > 1) and 12 % (world * accum) == 0
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_the_sums_are_those_of_one_rank(row):
    """`run` checks that all machines end with the same bits."""
    options = {"zero_level": row["level"], "all_to_all_reduce": row["a2a"]} | EXTRAS[row["extra"]]
    ranks = (row["world"], row["accum"], TWO_STEPS)
    close_to_one_rank(run(*ranks, machines=row["machines"], **FP32, **options))


# Where memory is, and whether it is divided, changes no bit here either.
BITS = [
    (2, 2, {}, STREAMED),
    (2, 2, FP8, EVERYTHING),
    (4, 3, LEVEL2, STREAMED),
    (4, 1, LEVEL2 | A2A | FP8, EVERYTHING | {"persistent_quants": True}),
    (4, 1, A2A | DELAYED | HEAD, QUANTS | {"offload_quants": True}),
    (4, 1, SMALL, MOMENTS | {"shard_weights": True}),
]


@pytest.mark.parametrize(
    ("world", "accum", "base", "options"),
    BITS,
    ids=lambda v: flags(v) if isinstance(v, dict) else None,
)
def test_bits(world, accum, base, options):
    want = run(world, accum, machines=2, **base)
    assert_same_run(run(world, accum, machines=2, **(base | options)), want)


def test_losses_are_those_of_one_machine():
    """Before the first update; after it gradients were rounded otherwise, but not much."""
    for base in ({}, DELAYED | LEVEL2):
        program = train_steps(1)
        found, want = (run(4, 1, program, machines=m, **base).results for m in (2, 1))
        assert (found[0].loss, found[0].tokens) == (want[0].loss, want[0].tokens)
        # Gradients of BF16 have 8 bits, and the sums of two machines are rounded once more.
        np.testing.assert_allclose(found[0].norm, want[0].norm, rtol=2**-9)
        losses = [[result.loss for result in results] for results in (found, want)]
        np.testing.assert_allclose(*losses, rtol=2**-9)


@pytest.mark.parametrize("base", [FP32, FP8, {"offload_gradients": True, "shard_gradients": True}])
def test_two_machines_of_one_rank_make_the_weights_of_two_ranks(base):
    """A sum of two has one order, and without clipping the norm's rounding does not matter."""
    found, want = (run(2, 1, train_steps(2), machines=m, grad_clip=0.0, **base) for m in (2, 1))
    for group in want.state:
        assert_same(found.state[group], want.state[group])


def test_over_the_world_machines_do_not_matter():
    options = LEVEL2 | FP8 | {"shard_over": "world"}
    assert_same_run(run(4, 1, machines=2, **options), run(4, 1, **options))


# -- groups --


@pytest.mark.parametrize(("world", "shards"), [(2, 1), (4, 2), (6, 2), (6, 3), (4, 4)])
def test_groups(world, shards):
    """Each gathers its own ranks; of the world it gathers all, in order."""

    def fn(dev, _):
        own = dev.alloc("own", (4,), F32, "Weights")
        dev.upload(own, np.full(4, dev.mesh.rank, np.float32))
        found = []
        for comm in (dev.mesh.group("shard"), dev.mesh.group(), dev.mesh.group("replica")):
            whole = dev.alloc("whole", (4 * comm.size,), F32, "Weights")
            comm.all_gather(whole, own)
            found.append(dev.download(whole)[::4].tolist())
        return found

    for rank, (inner, every, cross) in enumerate(run_devices(world, fn, shards=shards)):
        first = rank // shards * shards
        assert inner == list(range(first, first + shards))
        assert every == list(range(world))
        assert cross == list(range(rank % shards, world, shards))


def test_all_reduce_adds_in_order():
    """In F32, rounded once: so 256 + 1 - 256 is 1 also in BF16, where 257 does not exist."""
    values = (256.0, 1.0, -256.0)

    def fn(dev, _):
        sums = dev.alloc("sums", (8,), BF16, "Gradients")
        dev.upload(sums, np.full(8, values[dev.mesh.index("replica")]).astype(BF16.numpy))
        dev.mesh.group("replica").all_reduce(sums)
        return dev.download(sums).astype(np.float32).tolist()

    assert run_devices(6, fn, shards=2) == [[1.0] * 8] * 6


def test_what_all_reduce_refuses():
    def fn(dev, _):
        with pytest.raises(TypeError, match="all_reduce: buffer must be F32 or BF16"):
            dev.mesh.group("replica").all_reduce(dev.alloc("codes", (4,), U8, "Gradients"))

    run_devices(2, fn, shards=1)


def test_silence_is_that_of_all_groups():
    def fn(dev, _):
        with silenced(dev):
            kinds = [type(comm) for comm in (dev.mesh.group("shard"), dev.mesh.group("replica"))]
            dev.mesh.group().all_gather(*(dev.alloc("x", (n,), F32, "Weights") for n in (8, 2)))
        return kinds, dev.mesh.group("replica").size

    assert run_devices(4, fn, shards=2) == [([SilentComm, SilentComm], 2)] * 4
