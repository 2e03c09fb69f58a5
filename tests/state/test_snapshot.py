"""A copy of the state, which no update may change before it is complete."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.rules import RULES
from llmq.plan.memory import checkpoint_bytes
from llmq.plan.plan import make_plan
from llmq.run.model_of_run import model_of_run
from llmq.run.trainer import Trainer
from llmq.runtime.arena import align_up
from llmq.runtime.device import HOST_SPEC, MemorySizes
from llmq.state.params import weight_table
from llmq.state.pieces import COPIED, SlabPiece, Snapshot
from tests.runs import make_workplace, options
from tests.runtime.fake_streams import StreamDevice
from tests.runtime.races import Span

N = 1000
SLAB = weight_table(preset("tiny"))[0]


class Holder:
    """Three tensors in two kinds of memory that steps read and updates write, on streams."""

    def __init__(self, dev):
        self.dev, self.count = dev, 0
        places = [("a", F32, "device"), ("b", F32, "pinned"), ("c", BF16, "write_combined")]
        self.tensors = [dev.alloc(name, (N,), dtype, "Master", at) for name, dtype, at in places]
        for tensor in self.tensors:
            dev.upload(tensor, np.zeros(N, tensor.dtype.numpy))
        pieces = [SlabPiece(SLAB, 0, N, tensor) for tensor in self.tensors]
        self.snapshot = Snapshot(dev, {"weights": pieces[:1], "adam.m": pieces[1:]}, copied=600)

    def forward(self):
        spans = [Span.of(tensor) for tensor in self.tensors]
        self.dev.call(lambda: None, "forward", reads=spans)

    def update(self, *, holds=True):
        if holds:
            self.snapshot.hold()
        self.count += 1

        def add(value=self.count):
            for tensor in self.tensors:
                tensor.numpy()[...] = value

        self.dev.call(add, "update", writes=[Span.of(tensor) for tensor in self.tensors])

    def copies(self):
        while not self.snapshot.is_done():
            pass
        return [
            set(piece.tensor.numpy().astype(np.float32).tolist())
            for pieces in self.snapshot.copy.values()
            for piece in pieces
        ]


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def dev(request):
    sizes = MemorySizes(device=1 << 25, stack=256, pinned=1 << 15, write_combined=1 << 13)
    device = StreamDevice(sizes, pause=1e-4, graphs=request.param)
    device.has_passed = lambda event: event.mark.reached.is_set()
    yield device
    device.close()


def test_a_copy_is_of_the_moment_at_which_it_was_taken(dev):
    holder = Holder(dev)
    for step in range(1, 4):
        holder.update()
        holder.snapshot.take()
        holder.forward()
        holder.update()
        assert holder.copies() == [{2.0 * step - 1}] * 3, "of all of it, in whatever pieces"
    dev.synchronize()
    assert dev.races.found == []


def test_a_copy_beside_graphs(dev):
    """The wait is before the update's graph, and none of theirs waits for the copy."""
    holder = Holder(dev)
    for step in range(1, 6):
        dev.graph(("forward",), holder.forward)
        holder.snapshot.hold()
        dev.graph(("update",), lambda: holder.update(holds=False))
        if step == 4:
            holder.snapshot.take()
    dev.synchronize()
    assert dev.races.found == []
    values = holder.copies()
    assert values[0] == values[1] == values[2] and len(values[0]) == 1


def test_an_update_has_to_wait_for_it(dev):
    holder = Holder(dev)
    holder.snapshot.take()
    holder.forward()
    holder.update(holds=False)
    dev.synchronize()
    assert any("update" in line and "copy" in line for line in dev.races.found)


@pytest.mark.parametrize(
    "given",
    [{}, {"opt-m-dtype": "e4m3", "opt-v-dtype": "e4m3", "master-dtype": "fp32"}],
    ids=["fp32", "8-bit"],
)
def test_the_plan_counts_the_copy_to_the_byte(given):
    """The copy is as large as a checkpoint, and padding; each rank counts its part, also of a
    replica."""
    model = preset("Qwen2.5-0.5B")
    for world, machines in ((1, 1), (2, 1), (6, 3)):
        plain, copied = (
            make_plan(
                make_config(given | {"ckpt-background": on, "model-dtype": "bf16"}),
                *(model, HOST_SPEC),
                world_size=world,
                machines=machines,
            )
            for on in (False, True)
        )
        assert copied.usage.device_bytes == plain.usage.device_bytes
        found = copied.host_bytes - plain.host_bytes
        config = make_config(given | {"model-dtype": "bf16"})
        size = checkpoint_bytes(config, model, plain.placement)
        assert size <= found <= 1.001 * size
        assert copied.usage.categories["pinned"]["Checkpoint"] * world == found


def test_what_is_in_host_memory_goes_by_way_of_the_device():
    given = {"model-dtype": "bf16", "offload-opt-m": True}
    plans = [
        make_plan(make_config(given | {"ckpt-background": on}), preset("tiny"), HOST_SPEC)
        for on in (False, True)
    ]
    more = plans[1].usage.device_bytes - plans[0].usage.device_bytes
    assert more == align_up(COPIED) == plans[1].usage.categories["device"]["Checkpoint"]


def test_a_run_takes_what_was_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    for more in ({}, {"gpus": 2, "zero_level": 3, "offload_opt_v": True}):
        config = make_config(options(ckpt_background=True, **more))
        with Trainer.from_config(config, *model_of_run(config)) as trainer:
            trainer.load_weights()
            trainer.step()
            assert trainer.usage == trainer.plan.usage
            assert trainer.usage.categories["pinned"]["Checkpoint"] > 0


def test_where_the_copy_has_no_effect():
    never = {"ckpt-background": True, "ckpt-interval": 0, "save-training-state": False}
    (line,) = RULES.idle(make_config(never))
    assert line.startswith("--ckpt-background has no effect but for checkpoints that are asked for")
    for name, value in (("ckpt-interval", 5), ("save-training-state", True)):
        assert RULES.idle(make_config(never | {name: value})) == []
