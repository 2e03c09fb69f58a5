"""Blocks that are not trained and are kept as codes with scales: --base-dtype e4m3, int8 and nf4.

Where products read codes of this format they lie as they are, whole or in a slot; else a block is
decoded into a slot, before it is used:

    kept      whole on the device | a shard of each rank, on the device or in host memory
    arrives                       | gathered: into a slot, or if it is decoded into `arriving`
    used      as it is            | decoded into a slot, in the model's format or as fp8 codes

All of it happens on the stream on which the slot arrives, while the block before is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmq.base.dtypes import E4M3, F32, I8, NF4, U8
from llmq.base.operand import Fp8, Int8, Operand
from llmq.base.tensor import Tensor
from llmq.ops import nf4, quantize, quantize_int8
from llmq.ref.nf4 import scale_levels
from llmq.runtime.device import Device
from llmq.state.packed import Layout, Span
from llmq.state.params import Slab, planes
from llmq.state.placement import Placement


class Bases:
    """All such blocks of a model, as far as this rank holds them.

    packed: by slab, U8, the whole bytes of its layout or this rank's part of them.
    """

    def __init__(self, dev: Device, table: tuple[Slab, ...], placement: Placement):
        """table: the slabs that are kept so."""
        self.dev, self.placement = dev, placement
        self.slabs = {slab.name: slab for slab in table}
        first = placement[table[0].name]  # all are placed alike
        self._store, self._work, self._transposes = first.base, first.work, first.transposed
        dtype, ranks = first.base.dtype, dev.mesh.size("shard")
        self.layouts = {slab.name: Layout(slab, dtype, ranks) for slab in table}
        self.decodes = first.decodes
        self._codes = self._work.dtype in (E4M3, I8)  # are what products read
        as_codes = {s.name: Layout(s, self._work.dtype) for s in table if self._codes}
        self._slot_layouts = as_codes if self.decodes else self.layouts
        self.packed = {name: self._alloc(name) for name in self.slabs}
        self.levels: Tensor | None = None  # of NF4's scales
        self._ones: Tensor | None = None
        if self._work.dtype == I8:
            widest = max(param.columns for slab in table for param in slab.params)
            self._ones = dev.alloc("int8_ones", (widest,), F32, "Activations")
            dev.upload(self._ones, np.ones(widest, np.float32))
        self._arriving: Tensor | None = None
        if dtype == NF4:
            self.levels = dev.alloc("nf4_levels", (nf4.NUM_LEVELS,), F32, "Quants")
            dev.upload(self.levels, scale_levels())
        if self.decodes and self._store.sharded:
            longest = max(layout.nbytes for layout in self.layouts.values())
            self._arriving = dev.alloc("base.arriving", (longest,), U8, "Quants")
        self._transposed: dict[str, dict[str, Tensor]] = {}  # of each slab, or of any
        if self._transposes is not None:
            shared: dict[str, Tensor] | None = {} if self._transposes.streamed else None
            for slab in table:
                self._transposed[slab.name] = self._alloc_transposed(slab, shared)

    def _alloc(self, name: str) -> Tensor:
        size = self.layouts[name].nbytes
        if self._store.sharded:
            size //= self.dev.mesh.size("shard")
        return self.dev.alloc(f"{name}.base", (size,), U8, "Quants", self._store.memory)

    def first_byte(self, name: str) -> int:
        """The first byte of all that a block's layout has, where `packed` begins."""
        return self.dev.mesh.index("shard") * self.packed[name].nbytes if self._store.sharded else 0

    def _alloc_transposed(self, slab: Slab, shared: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """By key. shared: of any block, to which what it lacks is added; None: each has its own."""
        found, prefix = ({}, f"{slab.name}.") if shared is None else (shared, "")
        for p in slab.params:
            if p.key not in found:
                name, dtype = f"{prefix}{p.key}.q_t", self._transposes.dtype
                found[p.key] = self.dev.alloc(name, p.transposed_shape, dtype, "Quants")
        return found

    def alloc_slot(self, index: int) -> Tensor:
        """For the work weights of any block."""
        name = f"weights.slot.{index}"
        if not self._codes:
            longest = max(slab.size for slab in self.slabs.values())
            return self.dev.alloc(name, (longest,), self._work.dtype, "Weights")
        longest = max(layout.nbytes for layout in self._slot_layouts.values())
        return self.dev.alloc(name, (longest,), U8, "Quants")

    # -- use -------------------------------------------------------------------------------------

    def arrive(self, name: str, slot: Tensor, mirror: Tensor | None) -> None:
        """Fill a slot with a block's work weights. mirror: of this rank's part, or None."""
        packed, layout = self.packed[name], self.layouts[name]
        if self._store.sharded:
            whole = (self._arriving if self.decodes else slot).rows(0, layout.nbytes)
            self.dev.mesh.group("shard").all_gather(whole, packed, mirror)
            packed = whole
        if self.decodes:
            self._decode(name, packed, slot)

    def _decode(self, name: str, packed: Tensor, slot: Tensor) -> None:
        slab = self.slabs[name]
        targets = {}
        if self._codes:
            targets = {s.param.key: s.named(slot) for s in self._slot_layouts[name].spans}
        for span in self.layouts[name].spans:
            own = span.named(packed)
            if targets:
                to = targets[span.param.key]
                if span.first == 0:
                    self.dev.copy(to["scale"], own["scale"])
                self._decode_span(span, own, to["codes"], to["scale"])
            else:
                self._decode_span(span, own, slab.view(slot, span.param), None)

    def _decode_span(
        self, span: Span, own: Mapping[str, Tensor], out: Tensor, scale: Tensor | None
    ) -> None:
        """Into its elements of a matrix; scale: of fp8 codes."""
        if self._store.dtype == I8:
            shape = (out.size // out.shape[-1], out.shape[-1])
            out, codes = (t.view(*shape) for t in (out, own["codes"]))
            quantize_int8.decode(self.dev, out, codes, own["scale"])
            return
        flat = out.view(out.size).rows(span.first, span.first + span.size)
        if "groups" not in own:
            codes = own["codes"]
            quantize.dequantize(self.dev, flat, codes.view(codes.size), own["scale"])
            return
        coded = (own["codes"], own["scale_codes"], own["groups"], own["mean"], self.levels)
        nf4.decode(self.dev, flat, *coded, fp8_scale=scale)

    def operands(self, name: str, slot: Tensor | None) -> dict[str, Operand]:
        """A block's matrices by key, as products take them. slot: where it is, if it takes one."""
        slab = self.slabs[name]
        if not self._codes:
            return {p.key: slab.view(slot, p) for p in slab.params}
        bytes_ = self.packed[name] if slot is None else slot
        made = {}
        for span in self._slot_layouts[name].spans:
            own, key = span.named(bytes_), span.param.key
            transposed = self._transposed[name][key]
            made[key] = self._operand(own["codes"], transposed, own["scale"])
        return made

    def _operand(self, codes: Tensor, transposed: Tensor, scale: Tensor) -> Operand:
        if codes.dtype == I8:
            ones = self._ones.rows(0, codes.shape[-1])
            return Int8(codes=codes, transposed=transposed, scale=scale, ones=ones)
        return Fp8(source=None, codes=codes, transposed=transposed, scale=scale)

    def make_transposed(self, operands: Mapping[str, Operand]) -> None:
        """Make the transposed codes of a block if it does not keep its own; until another one does
        so."""
        if self._transposes is not None and self._transposes.streamed:
            self._transpose(operands)

    def _transpose(self, operands: Mapping[str, Operand]) -> None:
        for operand in operands.values():
            if isinstance(operand, Fp8 | Int8):
                # Bytes, whatever they are: the kernel moves them.
                both = (t.view_as(E4M3) for t in (operand.transposed, operand.codes))
                for pair in zip(*map(planes, both), strict=True):
                    quantize.transpose(self.dev, *pair)

    def filled(self, name: str) -> None:
        """Say that a block's codes have been written: make of them what is kept beside."""
        if self._transposes is not None and not self._transposes.streamed:
            self._transpose(self.operands(name, None))
