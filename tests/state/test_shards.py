"""The state of ranks goes into checkpoints and comes back, on any number of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.errors import ConfigError
from llmq.base.run_id import RunId
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    assemble,
    check_formats,
    parts_of,
    read_group,
    write_group,
)
from llmq.checkpoint.manifest import Manifest
from llmq.ops.common import SCALE_BLOCK
from llmq.options.presets import preset
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.state.params import weight_table
from llmq.state.pieces import SlabPiece
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.rule import SCALES

MODEL = dataclasses.replace(
    preset("tiny"),
    **{"vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2},
    **{"head_dim": 12, "tied_embeddings": False},
)  # embedding and head are padded from 70 to 128 rows; 70 * 24 is no multiple of 128
DTYPES = {
    "weights": BF16,
    "adam.m": E4M3,
    "adam.v": F32,
    "adam.m.scales": F32,
}
PARAMS = {param.name: param for slab in weight_table(MODEL) for param in slab.params}
MANIFEST = Manifest(
    model=MODEL, loader={}, state={}, options={}, tokenizer=None, run=RunId.new("a")
)


def block(group):
    return SCALE_BLOCK if group.endswith(SCALES) else 1


def values_of(group, param):
    """All values of a parameter in the padded shape; zero where nothing is stored."""
    rng = np.random.default_rng([list(DTYPES).index(group), param.index])
    stored = -(-param.rows * (param.size // param.shape[0]) // block(group))
    values = np.zeros(-(-param.size // block(group)), np.float32)
    values[:stored] = rng.standard_normal(stored)
    return values.astype(DTYPES[group].numpy)


def slab_values(group, slab):
    """A whole slab; zero in the gaps."""
    values = np.zeros(slab.size // block(group), DTYPES[group].numpy)
    for param in slab.params:
        at = param.offset // block(group)
        part = values_of(group, param)
        values[at : at + part.size] = part
    return values


class Holder:
    """One rank: a device, and a SlabPiece of each slab of each group."""

    def __init__(self, rank, world, groups=tuple(DTYPES)):
        self.dev = HostDevice(MemorySizes(device=1 << 20, stack=0, pinned=0), poison=True)
        self.table = weight_table(MODEL, world)
        self.rank, self.world, self.beats = rank, world, 0
        self.state = {group: [self.piece(group, slab) for slab in self.table] for group in groups}

    def piece(self, group, slab):
        start, stop = self.rank * slab.shard_size, (self.rank + 1) * slab.shard_size
        shape, dtype = (slab.shard_size // block(group),), DTYPES[group]
        return SlabPiece(slab, start, stop, self.dev.alloc(slab.name, shape, dtype, "Master"))

    def beat(self):
        self.beats += 1

    def expected(self, group, piece):
        n = block(group)
        return slab_values(group, piece.slab)[piece.start // n : piece.stop // n]

    def fill(self):
        for group, pieces in self.state.items():
            for piece in pieces:
                self.dev.upload(piece.tensor, self.expected(group, piece))
        return self

    def write(self, directory):
        writer = CheckpointWriter(directory, 7, self.rank, self.world)
        groups = self.state.items()
        return writer, [write_group(self.dev.download, writer, *g, self.beat) for g in groups]

    def check(self):
        for group, pieces in self.state.items():
            for piece in pieces:
                found = self.dev.download(piece.tensor)
                assert found.tobytes() == self.expected(group, piece).tobytes(), (group, piece)


def save(directory, world, groups=tuple(DTYPES)):
    """A checkpoint of `world` ranks."""
    ranks = [Holder(rank, world, groups).fill() for rank in range(world)]
    written = [rank.write(directory) for rank in ranks]
    assert all(rank.beats > 0 for rank in ranks)
    return written[0][0].commit(MANIFEST, [entry for _, files in written for entry in files])


@pytest.mark.parametrize("readers", [1, 3, 4])
@pytest.mark.parametrize("writers", [1, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, writers, readers):
    """To the bit, 8-bit moments and their scales too, and zero in gaps and padding."""
    with CheckpointReader(save(tmp_path, writers)) as reader:
        reader.check(weight_table(MODEL))
        assert reader.groups == set(DTYPES)
        for rank in range(readers):
            holder = Holder(rank, readers)
            check_formats(reader, holder.state, AdamW)
            for group, pieces in holder.state.items():
                read_group(holder.dev, reader, group, pieces, holder.beat)
            holder.check()
            assert holder.beats > 0


def test_formats_are_converted(tmp_path):
    with CheckpointReader(save(tmp_path, 2)) as reader:
        dev = HostDevice(MemorySizes(device=1 << 20, stack=0, pinned=0))
        slab = weight_table(MODEL)[1]
        wide = dev.alloc("wide", (slab.size,), F32, "Master")
        read_group(dev, reader, "weights", [SlabPiece(slab, 0, slab.size, wide)], lambda: None)
        expected = slab_values("weights", slab).astype(np.float32)
        np.testing.assert_array_equal(dev.download(wide), expected)


def test_eight_bit_moments_are_not_converted(tmp_path):
    with CheckpointReader(save(tmp_path / "a", 1)) as reader:
        plain = Holder(0, 1, ("weights", "adam.m", "adam.v")).state
        with pytest.raises(ConfigError, match=r"^--opt-m-dtype: .* in e4m3, which cannot .* e4m3$"):
            check_formats(reader, plain, AdamW)
    groups = ("weights", "adam.m", "adam.v")
    with CheckpointReader(save(tmp_path / "b", 1, groups)) as reader:
        check_formats(reader, plain, AdamW)
        state = plain | {"adam.v.scales": []}
        with pytest.raises(ConfigError, match=r"^--opt-v-dtype: .* in fp32, which cannot .* fp32$"):
            check_formats(reader, state, AdamW)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_parameters_are_put_together(world):
    ranks = [Holder(rank, world, ("weights",)).fill() for rank in range(world)]
    for param in PARAMS.values():
        parts = [
            part for rank in ranks for part in parts_of(rank.dev, param, rank.state["weights"])
        ]
        whole = assemble(param, parts)
        assert whole.shape == param.shape
        assert whole.tobytes() == values_of("weights", param).tobytes()
