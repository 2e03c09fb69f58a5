"""A mesh: the ranks along its axes, and their collectives, also of axes that no run has."""

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mesh import DATA, Mesh
from tests.ranks import SIZES, run_ranks

THREE = {"replica": 2, "batch": 2, "context": 3}  # ranks 0 to 11


@pytest.mark.parametrize(
    ("axes", "ranks", "index"),
    [
        (("replica",), (1, 7), 1),
        (("context",), (6, 7, 8), 1),
        (("batch",), (7, 10), 0),
        (DATA, (1, 4, 7, 10), 2),
        (("shard",), (6, 7, 8, 9, 10, 11), 1),
        (("context", "batch"), (6, 7, 8, 9, 10, 11), 1),
        (("shard", "replica"), tuple(range(12)), 7),
        ((), tuple(range(12)), 7),
    ],
)
def test_ranks_along_axes(axes, ranks, index):
    mesh = Mesh(THREE, 7)
    assert (mesh.ranks(*axes), mesh.index(*axes), mesh.size(*axes)) == (ranks, index, len(ranks))


def test_ranks_of_other_sequences_are_those_that_have_their_parts_of_them():
    """Whoever divides a sequence with this rank reads the same one."""
    found = {}
    for rank in range(12):
        mesh = Mesh(THREE, rank)
        assert mesh.size(*DATA) == 4
        found.setdefault(mesh.index(*DATA), []).append(mesh.ranks("context"))
    assert found == {
        0: [(0, 1, 2)] * 3, 1: [(3, 4, 5)] * 3, 2: [(6, 7, 8)] * 3, 3: [(9, 10, 11)] * 3,
    }  # fmt: skip


def test_axes_of_a_run():
    assert Mesh.of(6).axes == {"replica": 1, "batch": 6, "context": 1}
    mesh = Mesh.of(12, 11, shards=4, context=2)
    assert mesh.axes == {"replica": 3, "batch": 2, "context": 2}
    assert (mesh.index("replica"), mesh.index("shard"), mesh.index(*DATA)) == (2, 3, 5)
    assert Mesh.of().size() == 1


def test_what_a_mesh_refuses():
    with pytest.raises(ValueError, match="rank 12 is none of the 12 of"):
        Mesh(THREE, 12)
    with pytest.raises(ValueError, match="pipeline is no axis of"):
        Mesh(THREE).size("replica", "pipeline")
    with pytest.raises(RuntimeError, match="nothing connects the ranks along replica, batch"):
        Mesh.of(2).group()


def run_axes(axes, fn):
    """fn(dev) on connected devices of such a mesh; the results by rank."""
    count = int(np.prod(list(axes.values())))
    devices = [None] * count

    def rank_fn(rank, workers):
        dev = devices[rank] = HostDevice(SIZES, mesh=Mesh(axes, rank), poison=True)
        workers.barrier()
        if rank == 0:
            connect(devices, CommOptions(), workers)
        workers.barrier()
        return fn(dev)

    return run_ranks(count, rank_fn)


@pytest.mark.parametrize(
    "along", [("context",), ("shard",), ("pipeline", "shard"), ("replica", "pipeline"), ()],
    ids="-".join,
)  # fmt: skip
def test_groups_of_any_axes_gather_their_ranks_in_order(along):
    def fn(dev):
        group = dev.mesh.group(*along)
        own = dev.alloc("own", (4,), F32, "Weights")
        whole = dev.alloc("whole", (4 * group.size,), F32, "Weights")
        dev.upload(own, np.full(4, dev.mesh.rank, np.float32))
        group.all_gather(whole, own)
        return dev.download(whole)[::4].tolist()

    axes = {"pipeline": 2, "replica": 2, "batch": 2, "context": 2}
    for rank, found in enumerate(run_axes(axes, fn)):
        assert found == list(Mesh(axes, rank).ranks(*along))


def test_the_group_of_an_axis_adds_up_its_ranks_alone():
    def fn(dev):
        sums = dev.alloc("sums", (4,), F32, "Gradients")
        dev.upload(sums, np.full(4, 10.0**dev.mesh.rank, np.float32))
        dev.mesh.group("replica").all_reduce(sums)
        return int(dev.download(sums)[0])

    found = run_axes({"replica": 2, "batch": 1, "context": 2}, fn)
    assert found == [101, 1010, 101, 1010]


def test_ranks_along_an_axis_exchange_parts():
    """Part p of a rank goes to rank p of its group, from memory that may be written at once."""

    def fn(dev):
        group = dev.mesh.group("context")
        x, out = (dev.alloc(name, (4 * group.size,), F32, "Weights") for name in ("x", "out"))
        values = 10 * dev.mesh.rank + np.arange(group.size, dtype=np.float32)
        dev.upload(x, values.repeat(4))
        group.exchange(out, x)
        dev.upload(x, np.zeros(x.size, np.float32))
        return dev.download(out).reshape(-1, 4)

    for rank, found in enumerate(run_axes(THREE, fn)):
        mesh = Mesh(THREE, rank)
        expected = [10 * source + mesh.index("context") for source in mesh.ranks("context")]
        assert (found == np.array(expected)[:, None]).all()
