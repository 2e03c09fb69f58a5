"""Files on SSDs hold what is offloaded, and change no bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

import llmq
from llmq.base.dtypes import F32
from llmq.base.errors import DiskError, MachineError
from llmq.ops.pointwise import elementwise
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from tests.runs import make_workplace, options
from tests.sharded import (
    FP8,
    UNTIED,
    assert_same,
    assert_same_run,
    move_in_pieces,
    run,
    train_steps,
)

MASTER32 = {"master_dtype": "fp32", "opt_m_dtype": "fp32"}
MOMENTS = {"offload_opt_m": True, "offload_opt_v": True}
CODES = {"shard_weights": True, "persistent_quants": True}


def on_ssd(tmp_path: Path, kinds: str, **more: object) -> dict[str, object]:
    return more | {"offload_dir": [str(tmp_path / "a"), str(tmp_path / "b")], "ssd": kinds}


@pytest.mark.parametrize(
    "world, base, kinds, more",
    [
        (1, MASTER32, "opt-m,opt-v,master", {"use_zero_copy": True, "offload_master": True}),
        (2, {"opt_m_dtype": "e4m3"}, "opt-m,opt-v,master", {"shard_weights": True}),
        (1, FP8, "opt-m,opt-v,master,weights,gradients", CODES | {"shard_gradients": True}),
        (2, FP8 | MASTER32 | {"zero_level": 2}, "master,weights,gradients", CODES),
        (1, {"optimizer": "muon"}, "opt-m,gradients", {"shard_gradients": True}),
    ],
    ids=["zero-copy", "streamed", "fp8", "fp8-fp32", "muon"],
)
def test_it_changes_no_bit(tmp_path, monkeypatch, world, base, kinds, more):
    """`run` checks that each rank takes the memory of the plan, to the byte."""
    move_in_pieces(monkeypatch, 4096 + 512)
    given = base | on_ssd(tmp_path, kinds, **more)
    make = partial(HostDevice, folders=[Path(name) for name in given["offload_dir"]])
    program = train_steps(2)
    moved = run(world, 2, program, of=UNTIED, make=make, **given)
    assert_same_run(run(world, 2, program, of=UNTIED, **base), moved)
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def test_no_kernel_gets_what_it_does_not_reach(tmp_path):
    dev = HostDevice(MemorySizes(device=1 << 12, ssd=1 << 13, pinned=1 << 27), folders=[tmp_path])
    here, there = (dev.alloc("x", (8,), F32, "Activations", place) for place in ("device", "ssd"))
    elementwise.fill(dev, here, 3.0)
    dev.copy(there, here)
    assert dev.download(there).tolist() == [3.0] * 8
    with pytest.raises(TypeError, match="no kernel reaches x, which is ssd"):
        elementwise.fill(dev, there, 1.0)
    dev.close()


def trainer(**changes: object) -> llmq.Trainer:
    given = options(grad_accumulation=1, steps=4, **changes)
    return llmq.Trainer(**{n.replace("-", "_"): v for n, v in given.items() if v is not None})


def test_it_is_planned_saved_and_gone_on_from(tmp_path, monkeypatch):
    """State in files does not count as host memory, and checkpoints need no files."""
    monkeypatch.chdir(make_workplace(tmp_path))
    with trainer(**on_ssd(tmp_path, "opt-m,opt-v")) as t, trainer(**MOMENTS) as pinned:
        sizes, without = t.plan.usage.sizes, pinned.plan.usage.sizes
        buffers = t.plan.usage.categories["pinned"].pop("SSD buffers")
        assert sizes["ssd"] >= without["pinned"] - sizes["pinned"] + buffers > 0
        t.step()
        path, rest = t.save(), [t.step(), t.step()]
        weights = t.weights()
    with trainer(**MOMENTS) as t:
        t.load(path)
        assert [t.step(), t.step()] == rest
        assert_same(t.weights(), weights)
    with trainer(**on_ssd(tmp_path, "opt-m")) as t:
        t.load(path)
        assert [t.step(), t.step()] == rest


def test_a_disk_that_fails_is_named_and_checkpoints_stay_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    with trainer(**on_ssd(tmp_path, "opt-m,opt-v")) as t:
        t.step()
        path = t.save()

        def fails(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "pwritev", fails)
        with pytest.raises(MachineError, match=r"/a': the scratch file cannot be written \(Input"):
            t.step()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with trainer() as t:
        t.load(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"/a': 0.0 GiB of scratch files cannot be had \(No space"):
        trainer(**on_ssd(tmp_path, "opt-m"))
