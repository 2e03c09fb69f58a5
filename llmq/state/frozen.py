"""Frozen blocks, stored as codes with scales: --base-dtype e4m3, e4m3-blocks, int8, nf4, mxfp4 and
nvfp4.

If products multiply the stored format, products read the stored codes, resident or in a slot of
device memory that blocks share. If products multiply another format, a block is decoded into a slot
before its use:

    stored    whole on the device | a shard of each rank, on the device or in host memory
    arrives                       | gathered into a slot, or into `arriving` to be decoded
    used      as stored           | decoded into a slot, in the model's dtype or as fp8 codes

Gathering and decoding run on the stream on which the slot arrives: gathered blocks beside the
products of the block before, blocks whole on the device on the main stream (`weights.py`).

Matrices are encoded in pieces while weights are read. Codes of the same format in the files are
copied without encoding. Each rank encodes the whole block and keeps its share of the bytes: scales
are equal on all ranks, and ranks need not communicate.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from llmq.arch.matrix import HfPart
from llmq.base.dtypes import BF16, F32, U8, DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats import storage_of
from llmq.formats.storage import CodeLayout, Encoder, Write
from llmq.ref.quantize.four_bits import BLOCK
from llmq.runtime.device import Device
from llmq.state.codes import Transposes
from llmq.state.params import Param, Slab
from llmq.state.placement import Placement

Source = Callable[[Param], tuple[Write, DType]]
"""Function that returns a parameter's `Write`, and F32 or BF16, the dtype of the written
elements."""


class Stored(NamedTuple):
    """Functions that read frozen blocks from a model's files. elements(param, start, stop): returns
    the elements [start, stop) of a flat parameter, F32 or BF16. codes(part, format): returns a
    module's codes and scales in this --base-dtype, as `CodesOf` does."""

    elements: Callable[[Param, int, int], np.ndarray]
    codes: Callable[[HfPart, str], Mapping[str, Iterator[np.ndarray]] | None]

    @classmethod
    def of(cls, read: Callable[[Param], np.ndarray]) -> "Stored":
        """Return functions for a model whose parameters are whole arrays without codes. read:
        returns a parameter's array, as in `Weights.load`."""
        last: dict[str, np.ndarray] = {}

        def elements(param: Param, start: int, stop: int) -> np.ndarray:
            if param.name not in last:
                last.clear()
                values = read(param).reshape(-1)
                is_bf16 = values.dtype == BF16.numpy
                last[param.name] = values if is_bf16 else values.astype(np.float32, copy=False)
            return last[param.name][start:stop]

        return cls(elements, lambda part, kind: None)

    def source(self, dev: Device) -> Source:
        """Return a source that uploads the elements to the device."""

        def source(param: Param) -> tuple[Write, DType]:
            def write(target: Tensor, first: int) -> None:
                dev.upload(target, self.elements(param, first, first + target.size))

            return write, BF16 if self.elements(param, 0, BLOCK).dtype == BF16.numpy else F32

        return source


class FrozenBlocks:
    """The share of a model's frozen blocks that this rank stores. packed: by slab, U8; all bytes of
    the slab's layout, or this rank's shard of these bytes."""

    def __init__(
        self, dev: Device, table: tuple[Slab, ...], placement: Placement, transposes: Transposes
    ):
        """table: the slabs that are stored as codes."""
        self.dev, self.transposes = dev, transposes
        self.slabs = {slab.name: slab for slab in table}
        first = placement[table[0].name]  # all slabs stored as codes have the same placement
        self._store, self._work, self.decodes = first.base, first.work, first.decodes
        self._storage = self._multiplied = storage_of(dev, first.base.dtype)
        self._layouts = self._lay(dev.mesh.size("shard"))
        self._slot_layouts = self._layouts
        if self.decodes:  # products read tensors, or codes of another format
            self._multiplied = first.transposed and storage_of(dev, first.work.dtype)
            self._slot_layouts = self._multiplied and self._lay(1)
        matrices = [param for slab in table for param in slab.params]
        self._storage.start(matrices, multiplied=not self.decodes)
        self.packed = {name: self._alloc(name) for name in self.slabs}
        self._arriving: Tensor | None = None
        if self.decodes and self._store.sharded:
            longest = max(layout.nbytes for layout in self._layouts.values())
            self._arriving = dev.alloc("base.arriving", (longest,), U8, "Quants")
        self._encoder = Encoder(dev, map(self._storage.piece, matrices))

    def _lay(self, shards: int) -> dict[str, CodeLayout]:
        return {
            slab.name: CodeLayout({p.key: self._multiplied.layout(p) for p in slab.params}, shards)
            for slab in self.slabs.values()
        }

    def _alloc(self, name: str) -> Tensor:
        size = self._layouts[name].nbytes
        if self._store.sharded:
            size //= self.dev.mesh.size("shard")
        return self.dev.alloc(f"{name}.base", (size,), U8, "Quants", self._store.memory)

    def alloc_slot(self, index: int) -> Tensor:
        """Allocate a slot: device memory for the weights of any one block."""
        name = f"weights.slot.{index}"
        if self._multiplied is None:
            longest = max(slab.size for slab in self.slabs.values())
            return self.dev.alloc(name, (longest,), self._work.dtype, "Weights")
        longest = max(layout.nbytes for layout in self._slot_layouts.values())
        return self.dev.alloc(name, (longest,), U8, "Quants")

    # -- use -------------------------------------------------------------------------------------

    @property
    def multiplied_coded(self) -> bool:
        """Return True if products of few rows can read the stored codes."""
        in_place = not self._store.sharded and not self._store.on_host
        decoded = self.decodes and self._multiplied is None and self._work.dtype == BF16
        if not (in_place and decoded and self.dev.spec.capability > 0):
            return False
        matrices = (param for slab in self.slabs.values() for param in slab.params)
        return all(map(self._storage.has_coded, matrices))

    def arrive(self, name: str, slot: Tensor, mirror: Tensor | None) -> None:
        """Fill a slot with the weights that products of the block read. mirror: pinned memory for a
        copy of this rank's shard, which peers read."""
        packed = self.packed[name]
        if self._store.sharded:
            whole = self._arriving if self.decodes else slot
            whole = whole.rows(0, self._layouts[name].nbytes)
            self.dev.mesh.group("shard").all_gather(whole, packed, mirror)
            packed = whole
        for param in self.slabs[name].params if self.decodes else ():
            kept = self._layouts[name].tensors(packed, param.key)
            if self._multiplied is None:
                out = {"codes": self.slabs[name].view(slot, param)}
            else:
                out = self._slot_layouts[name].tensors(slot, param.key)
            self._storage.decode(param, kept, out["codes"], out.get("scale"))

    def operands(self, name: str, slot: Tensor | None) -> dict[str, Operand]:
        """Return a block's operands, by matrix key. slot: the slot that holds the block; None: the
        block is resident. Operands of a resident block that other products decode are codes for
        products of few rows."""
        slab = self.slabs[name]
        if self._multiplied is None and slot is not None:
            return {p.key: slab.view(slot, p) for p in slab.params}
        if self._multiplied is None:
            packed, layout = self.packed[name], self._layouts[name]
            kept = {p: layout.tensors(packed, p.key) for p in slab.params}
            return {param.key: self._storage.coded(param, own) for param, own in kept.items()}
        packed, layout = slot or self.packed[name], self._slot_layouts[name]
        kept = {p.key: layout.tensors(packed, p.key) for p in slab.params}
        transposed = self.transposes[name]
        return {
            key: self._multiplied.weight(tensors, transposed[key]) for key, tensors in kept.items()
        }

    # -- loading ---------------------------------------------------------------------------------

    def fill(self, source: Source, stored: Stored | None = None) -> None:
        """Encode all frozen blocks. source: writes the elements of a parameter. stored: files that
        may have codes of this format; these codes are copied."""
        kind = self._store.dtype.name

        def codes_of(part: HfPart) -> Mapping[str, Iterator[np.ndarray]] | None:
            return None if stored is None else stored.codes(part, kind)

        for name, slab in self.slabs.items():
            for param in slab.params:
                write, dtype = source(param)
                regions = self._layouts[name].regions[param.key]

                def put(part: str, content: Tensor, first: int, name=name, regions=regions) -> None:
                    self._put(name, regions[part].offset + first, content)

                with self._encoder.of(param, write, dtype, put, codes_of) as encoder:
                    self._storage.encode(encoder)
            if name in self.transposes.own:
                self.transposes.written(name, self.operands(name, None))

    def _put(self, name: str, begin: int, content: Tensor) -> None:
        """Store the bytes of `content` that lie in this rank's shard. begin: the byte of the
        block's layout at which `content` begins."""
        packed = self.packed[name]
        shard_begin = self._first_byte(name)
        low, high = (
            max(begin, shard_begin),
            min(begin + content.nbytes, shard_begin + packed.nbytes),
        )
        if low < high:
            raw = Tensor(content.name, (content.nbytes,), U8, content.storage, content.offset)
            self.dev.copy(
                packed.rows(low - shard_begin, high - shard_begin),
                raw.rows(low - begin, high - begin),
            )

    def _first_byte(self, name: str) -> int:
        """Return the byte of a block's layout at which `packed` begins."""
        return self.dev.mesh.index("shard") * self.packed[name].nbytes if self._store.sharded else 0
