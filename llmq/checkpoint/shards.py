"""From the parts of slabs that ranks hold to parameters and back: checkpoints, export, tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import ConfigError
from llmq.base.tensor import Tensor
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    FileEntry,
    elements_per_value,
    padded_size,
    slab_ranges,
)
from llmq.options.options import OPTIONS
from llmq.runtime.device import Device
from llmq.state.params import Param
from llmq.state.pieces import SlabPiece, State
from llmq.state.rules.rule import UpdateRule

Part = tuple[int, np.ndarray]
"""Values of a parameter from an index on."""

Beat = Callable[[], None]
"""Called now and then, to show that a long action goes on."""


def _values(group: str, piece: SlabPiece, param: Param, start: int, stop: int) -> Tensor:
    """Values [start, stop) of a parameter inside the tensor of a piece."""
    first = (param.offset - piece.start) // elements_per_value(group) + start
    return piece.tensor.rows(first, first + stop - start)


def write_group(
    fetch: Callable[[Tensor], np.ndarray],
    writer: CheckpointWriter,
    group: str,
    pieces: Sequence[SlabPiece],
    beat: Beat,
) -> FileEntry:
    """Write what is a rank's own of a group into its file of a checkpoint, in one format.

    The widest: weights that are not trained may lie in another one than masters. fetch: gives the
    content of a part of a piece.
    """
    dtype = max((piece.tensor.dtype for piece in pieces), key=lambda dtype: dtype.itemsize)
    ranges, homes = [], {}
    for piece in pieces:
        for found in slab_ranges(group, piece.slab, *piece.written):
            ranges.append(found)
            homes[found[0].name] = piece

    def read(param: Param, start: int, stop: int) -> np.ndarray:
        beat()
        values = fetch(_values(group, homes[param.name], param, start, stop))
        return values.astype(dtype.numpy, copy=False)

    return writer.write(group, dtype, ranges, read)


def read_group(
    dev: Device, reader: CheckpointReader, group: str, pieces: Sequence[SlabPiece], beat: Beat
) -> None:
    """Fill what a rank holds of a group from a checkpoint of any number of ranks.

    Other formats are converted; gaps between parameters, and padding, become zero.
    """
    for piece in pieces:
        dev.zero(piece.tensor)
        for param, start, stop in slab_ranges(group, piece.slab, piece.start, piece.stop):
            beat()
            target = _values(group, piece, param, start, stop)
            values = reader.read(group, param, start, stop)
            dev.upload(target, values.astype(target.dtype.numpy, copy=False))


def check_formats(reader: CheckpointReader, state: State, rule: type[UpdateRule]) -> None:
    """ConfigError where moments of this rule, if the checkpoint has them, would have to be
    converted to or from 8 bits."""
    for moment in rule.moments if reader.rule is rule else ():
        if (moment.scales_group in reader.groups) != (moment.scales_group in state):
            numpy, option = reader.dtype(moment.group), OPTIONS[moment.dtype].flag
            saved = next(name for name, d in OPTION_DTYPES.items() if d.numpy == numpy)
            raise ConfigError(
                f"{option}: checkpoint '{reader.path}' has these moments in {saved}, "
                f"which cannot be converted; use {option} {saved}"
            )


def parts_of(dev: Device, param: Param, pieces: Sequence[SlabPiece]) -> list[Part]:
    """Host copies of what is a rank's own of a parameter."""
    return [
        (start, dev.download(_values("weights", piece, param, start, stop)))
        for piece in pieces
        for found, start, stop in slab_ranges("weights", piece.slab, *piece.written)
        if found.name == param.name
    ]


def assemble(param: Param, parts: Sequence[Part]) -> np.ndarray:
    """The whole parameter in its shape, from the parts of all ranks."""
    if len(parts) == 1 and parts[0][1].size == param.size:
        return parts[0][1].reshape(param.shape)
    whole = np.empty(padded_size("weights", param), parts[0][1].dtype)
    for start, values in parts:
        whole[start : start + values.size] = values
    return whole.reshape(param.shape)
