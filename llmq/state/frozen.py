"""Blocks that are not trained and are kept as codes with scales: --base-dtype e4m3, int8 and nf4.

Where products read codes of this format they lie as they are, whole or in a slot; else a block is
decoded into a slot, before it is used:

    kept      whole on the device | a shard of each rank, on the device or in host memory
    arrives                       | gathered: into a slot, or if it is decoded into `arriving`
    used      as it is            | decoded into a slot, in the model's format or as fp8 codes

All of it happens on the stream on which the slot arrives, while the block before is computed.

Codes are made while weights are read, piece by piece. A rank makes those of all of a block and
keeps its part of the bytes. So scales are the same on all ranks, and nothing has to be exchanged.
"""

from collections.abc import Callable

import numpy as np

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
"""How a parameter's elements are written, and in which format, F32 or BF16."""
Elements = Callable[[Param, int, int], np.ndarray]
"""Elements [start, stop) of a parameter, flat, F32 or BF16."""


def of_host(dev: Device, elements: Elements) -> Source:
    """Parameters as they are read."""

    def source(param: Param) -> tuple[Write, DType]:
        def write(target: Tensor, first: int) -> None:
            dev.upload(target, elements(param, first, first + target.size))

        return write, BF16 if elements(param, 0, BLOCK).dtype == BF16.numpy else F32

    return source


class FrozenBlocks:
    """All such blocks of a model, as far as this rank holds them. packed: by slab, U8, the whole
    bytes of its layout or this rank's part of them."""

    def __init__(
        self, dev: Device, table: tuple[Slab, ...], placement: Placement, transposes: Transposes
    ):
        """table: the slabs that are kept so."""
        self.dev, self.transposes = dev, transposes
        self.slabs = {slab.name: slab for slab in table}
        first = placement[table[0].name]  # all are placed alike
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
        """For the work weights of any block."""
        name = f"weights.slot.{index}"
        if self._multiplied is None:
            longest = max(slab.size for slab in self.slabs.values())
            return self.dev.alloc(name, (longest,), self._work.dtype, "Weights")
        longest = max(layout.nbytes for layout in self._slot_layouts.values())
        return self.dev.alloc(name, (longest,), U8, "Quants")

    # -- use -------------------------------------------------------------------------------------

    def arrive(self, name: str, slot: Tensor, mirror: Tensor | None) -> None:
        """Fill a slot with a block's work weights. mirror: of this rank's part, or None."""
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
        """A block's matrices by key, as products take them. slot: where it is, None: in place."""
        slab = self.slabs[name]
        if self._multiplied is None:
            return {p.key: slab.view(slot, p) for p in slab.params}
        packed, layout = slot or self.packed[name], self._slot_layouts[name]
        kept = {p.key: layout.tensors(packed, p.key) for p in slab.params}
        transposed = self.transposes[name]
        return {key: self._multiplied.weight(own, transposed[key]) for key, own in kept.items()}

    # -- loading ---------------------------------------------------------------------------------

    def fill(self, source: Source) -> None:
        """Make the bytes of all blocks."""
        for name, slab in self.slabs.items():
            for param in slab.params:
                write, dtype = source(param)
                regions = self._layouts[name].regions[param.key]

                def put(part: str, made: Tensor, first: int, name=name, regions=regions) -> None:
                    self._put(name, regions[part].offset + first, made)

                with self._encoder.of(param, write, dtype, put) as made:
                    self._storage.encode(made)
            if name in self.transposes.own:
                self.transposes.written(name, self.operands(name, None))

    def _put(self, name: str, begin: int, made: Tensor) -> None:
        """Keep a block's bytes from this one on, as far as they are this rank's."""
        packed = self.packed[name]
        own = self._first_byte(name)
        low, high = max(begin, own), min(begin + made.nbytes, own + packed.nbytes)
        if low < high:
            raw = Tensor(made.name, (made.nbytes,), U8, made.storage, made.offset)
            self.dev.copy(packed.rows(low - own, high - own), raw.rows(low - begin, high - begin))

    def _first_byte(self, name: str) -> int:
        """The byte of a block's layout that `packed` begins with."""
        return self.dev.mesh.index("shard") * self.packed[name].nbytes if self._store.sharded else 0
