"""FP8 copies of weight matrices, made once per update: codes, transposed codes, one scale each.

A rank quantizes the part of each matrix that it owns, with a scale from the whole matrix: every
rank records the largest values of its parts, and the ranks' maxima give the scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import groupby

from llmq.base.dtypes import E4M3_MAX, F32, DType
from llmq.base.operand import Fp8, Operand
from llmq.base.tensor import Tensor
from llmq.ops import abs_max, quantize
from llmq.ops.fp8_scale import STRIDE, slots
from llmq.runtime.device import Device
from llmq.state.params import Param, Slab, planes
from llmq.state.placement import Placement, Store


class Quants:
    """The codes of the blocks' matrices. Codes lie in tensors of a slab's layout, whole or a rank's
    shard."""

    def __init__(self, dev: Device, table: tuple[Slab, ...], placement: Placement):
        """table: the slabs that have codes."""
        self.dev, self.placement = dev, placement
        self.slabs = {slab.name: slab for slab in table}
        matrices = [param for slab in self.slabs.values() for param in slab.params]
        n = len(matrices) * STRIDE
        self._abs_maxes = dev.alloc("weight_abs_maxes", (n,), F32, "Quants")
        self._scales = dev.alloc("weight_scales", (n,), F32, "Quants")
        names = [param.name for param in matrices]
        self._abs_max_of, self._scale_of = slots(self._abs_maxes, names), slots(self._scales, names)
        self._gathered = (
            dev.alloc("weight_abs_maxes.all", (n * dev.mesh.size("shard"),), F32, "Quants")
            if dev.mesh.size("shard") > 1
            else None
        )
        self._codes: dict[str, dict[str, Tensor]] = {}  # of whole slabs, by slab and key
        self._transposed: dict[str, dict[str, Tensor]] = {}
        self._shared: dict[str, Tensor] = {}

    def alloc_transposed(self, whole: Mapping[str, Tensor]) -> None:
        """Transposed codes: of slabs that keep their own, which are in `whole`; else one set."""
        for name, slab in self.slabs.items():
            store = self.placement[name].transposed
            if not store.streamed:
                self._codes[name] = {p.key: slab.view(whole[name], p) for p in slab.params}
                self._transposed[name] = {
                    p.key: self._alloc_transposed(p, p.name, store) for p in slab.params
                }
            for p in slab.params if store.streamed else ():
                if p.key not in self._shared:
                    self._shared[p.key] = self._alloc_transposed(p, p.key, store)

    def _alloc_transposed(self, param: Param, name: str, store: Store) -> Tensor:
        shape = param.transposed_shape
        return self.dev.alloc(f"{name}.q_t", shape, store.dtype, "Quants", store.memory)

    def operands(self, name: str, codes: Tensor) -> dict[str, Operand]:
        """A block's matrices by key, as products take them. codes: the whole slab."""
        slab = self.slabs[name]
        transposed = self._transposed.get(name, self._shared)
        return {
            p.key: Fp8(
                source=None,
                codes=slab.view(codes, p),
                transposed=transposed[p.key],
                scale=self._scale_of[p.name],
            )
            for p in slab.params
        }

    # -- after an update -------------------------------------------------------------------------

    def forget(self, names: Collection[str]) -> None:
        """Begin to record largest values of these slabs anew."""
        first = 0
        for changes, run in groupby(self.slabs.values(), key=lambda slab: slab.name in names):
            stop = first + STRIDE * sum(len(slab.params) for slab in run)
            if changes:
                self.dev.zero(self._abs_maxes.rows(first, stop))
            first = stop

    def observe(self, slab: Slab, start: int, stop: int, master: Tensor) -> None:
        """Record the largest values of elements [start, stop) of a slab, which are in `master`."""
        for param, first, last in slab.pieces(start, stop):
            piece = master.rows(first - start, last - start)
            abs_max.abs_max(self.dev, self._abs_max_of[param.name], piece)

    def finish_scales(self) -> None:
        """Scales from the largest values of all shards."""
        if self._gathered is not None:
            self.dev.mesh.group("shard").all_gather(self._gathered, self._abs_maxes)
            abs_max.combine(self.dev, self._abs_maxes, self._gathered)
        abs_max.scales(self.dev, self._scales, self._abs_maxes, E4M3_MAX)

    def quantize(
        self, name: str, master: Tensor, codes: Tensor, keys: Collection[str] | None = None
    ) -> None:
        """codes (n,) of a rank's shard from its master (n,); of these matrices, None: of all."""
        slab = self.slabs[name]
        start = self.dev.mesh.index("shard") * slab.shard_size
        for param, first, last in slab.pieces(start, start + slab.shard_size):
            if keys is not None and param.key not in keys:
                continue
            x, q = (t.rows(first - start, last - start) for t in (master, codes))
            scale, largest = self._scale_of[param.name], self._abs_max_of[param.name]
            quantize.quantize(self.dev, q, None, scale, x, largest)

    def keep_transposed(self, name: str) -> None:
        """Make the transposed codes of a whole slab, if they are kept."""
        for key, codes in self._codes.get(name, {}).items():
            self._transpose(self._transposed[name][key], codes)

    def make_transposed(self, name: str, operands: Mapping[str, Operand]) -> None:
        """Make the transposed codes of a block if they are not kept; until another one does so."""
        for operand in operands.values() if name not in self._codes else ():
            if isinstance(operand, Fp8):
                self._transpose(operand.transposed, operand.codes)

    def turned(
        self, name: str, operands: Mapping[str, Operand], master: Tensor, there: Collection[str]
    ) -> dict[str, Operand]:
        """Do as make_transposed, for a block of which only some codes are there; the operands then.

        The other matrices' transposed codes are made of the whole slab's master (n,).
        """
        made = dict(operands)
        for p in self.slabs[name].params:
            operand = operands[p.key]
            if p.key in there:
                self._transpose(operand.transposed, operand.codes)
                continue
            x, largest = self.slabs[name].view(master, p), self._abs_max_of[p.name]
            for q_t, part in zip(planes(operand.transposed), planes(x), strict=True):
                quantize.quantize(self.dev, None, q_t, operand.scale, part, largest)
            made[p.key] = replace(operand, codes=None)
        return made

    def _transpose(self, transposed: Tensor, codes: Tensor) -> None:
        for pair in zip(planes(transposed), planes(codes), strict=True):
            quantize.transpose(self.dev, *pair)


class HeadQuants:
    """The codes of the LM head's matrix, which every rank quantizes as a whole."""

    def __init__(self, dev: Device, matrix: Tensor, dtype: DType):
        self.dev = dev
        rows, columns = matrix.shape
        self._abs_max = dev.alloc("lm_head.abs_max", (1,), F32, "Quants")
        self.operand = Fp8(
            source=matrix,
            codes=dev.alloc("lm_head.q", (rows, columns), dtype, "Quants"),
            transposed=dev.alloc("lm_head.q_t", (columns, rows), dtype, "Quants"),
            scale=dev.alloc("lm_head.scale", (1,), F32, "Quants"),
        )

    def quantize(self) -> None:
        """Codes in both layouts from the matrix as it is now."""
        dev, made, largest = self.dev, self.operand, self._abs_max
        dev.zero(largest)
        abs_max.abs_max(dev, largest, made.source)
        quantize.quantize(dev, made.codes, made.transposed, made.scale, made.source, largest)
