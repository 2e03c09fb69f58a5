"""One rank alone: the same work without its peers, from graphs of its own, and nothing remains."""

import numpy as np
import pytest

import llmq
from llmq.base.dtypes import F32
from llmq.comm.collectives import SilentComm
from llmq.run.monitor import COMPARED, Scaling, alone, time_alone
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mesh import Mesh
from tests.runs import make_workplace, options

SIZES = MemorySizes(device=1 << 12, stack=0, pinned=0)


class NotingDevice(HostDevice):
    """Notes the keys of graphs."""

    keys: list

    def graph(self, key, fn):
        self.keys.append(key)
        super().graph(key, fn)


def test_alone_there_are_no_peers_and_other_graphs():
    dev, keys = NotingDevice(SIZES, mesh=Mesh.of(3, 1)), []
    dev.keys, mesh = keys, dev.mesh
    with alone(dev):
        assert isinstance(dev.mesh.group(), SilentComm)
        dev.graph(("update",), lambda: None)
    dev.graph(("update",), lambda: None)
    assert keys == [("alone", "update"), ("update",)]
    assert dev.mesh is mesh


def test_a_silent_comm_moves_nothing():
    dev = HostDevice(SIZES, mesh=Mesh.of(2, 1))
    x, spare = (dev.alloc(name, (n,), F32, "Weights") for name, n in (("x", 8), ("spare", 4)))
    for tensor in (x, spare):
        dev.upload(tensor, np.arange(tensor.size, dtype=np.float32))
    with alone(dev):
        dev.mesh.group("shard").all_gather(x, x.rows(4, 8))
        dev.mesh.group("shard").reduce_scatter(x)
        parts = dev.mesh.group("shard").all_to_all(x, spare)
    assert [part.size for part in parts] == [4, 4]
    assert dev.download(x).tolist() == list(range(8))


@pytest.mark.parametrize("level", [1, 3])
def test_the_optimizer_is_as_new_afterwards(level, tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    given = options(gpus=2, zero_level=level, model_dtype="bf16", opt_m_dtype="e4m3", steps=2)
    with llmq.Trainer(**{k.replace("-", "_"): v for k, v in given.items()}) as t:
        expected = t.weights()
        assert time_alone(t) > 0
        moments = [p for group, ps in t._step.state().items() if group != "weights" for p in ps]
        assert not any(t.dev.download(p.tensor).astype(np.float32).any() for p in moments)
        weights = t.weights()
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array)  # a learning rate of 0


def test_report_is_of_the_median():
    scaling = Scaling(4, 90.0, reporter=None)
    assert not any(scaling.add(ms) for ms in (100.0, 5000.0, 99.0))
    line, record = scaling.report()
    assert record == {"ranks": 4, "alone_ms": 90.0, "together_ms": 100.0, "efficiency": 0.9}
    assert line == (
        "Scaling: a step takes 100.0 ms on 4 GPUs, 90.0 ms on one without the others: "
        "efficiency 90.0 %"
    )
    assert [scaling.add(100.0) for _ in range(COMPARED - 3)][-1] is True
    assert not scaling.add(100.0), "said once"


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
