"""A rank without its peers, and a warm-up of which nothing remains."""

import numpy as np
import pytest

import llmq
from llmq.base.dtypes import F32
from llmq.comm.collectives import silenced
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mesh import Mesh
from tests.runs import make_workplace, options

SIZES = MemorySizes(device=1 << 12, stack=0, pinned=0)


def test_a_silent_comm_moves_nothing():
    dev = HostDevice(SIZES, mesh=Mesh.of(2, 1))
    x, spare = (dev.alloc(name, (n,), F32, "Weights") for name, n in (("x", 8), ("spare", 4)))
    for tensor in (x, spare):
        dev.upload(tensor, np.arange(tensor.size, dtype=np.float32))
    with silenced(dev):
        dev.mesh.group("shard").all_gather(x, x.rows(4, 8))
        dev.mesh.group("shard").reduce_scatter(x)
        parts = dev.mesh.group("shard").all_to_all(x, spare)
    assert [part.size for part in parts] == [4, 4]
    assert dev.download(x).tolist() == list(range(8))


@pytest.mark.parametrize("recipe", ["jit", "delayed"])
def test_a_warm_up_leaves_no_trace(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    # Memory that nobody has written is NaN, as on a GPU it may be.
    monkeypatch.setitem(HostDevice.__init__.__kwdefaults__, "poison", True)
    fp8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": recipe}
    given = options(gpus=2, zero_level=3, opt_v_dtype="e4m3", steps=3, **fp8)
    losses = []
    for warm in (False, True):
        with llmq.Trainer(**{k.replace("-", "_"): v for k, v in given.items()}) as t:
            if warm:
                t.ranks.run("finishing", lambda rank: rank.dev.synchronize())
                t.ranks.run("warming up", lambda rank, t=t: rank.warm_up(t.model, 1))
                t.load_weights()
            losses.append([t.step() for _ in range(3)] + [t.validate(2)])
    assert losses[0] == losses[1]
