"""Codes of trained weight matrices, made after each update, and transposed codes of all matrices.

A rank quantizes its shard of each matrix with one scale for the whole matrix. Every rank records
the largest |x| of its shard; the scale follows from the maximum over ranks.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from llmq.base.dtypes import E4M3, F32, DType
from llmq.base.operand import Fp8, Int8, Operand
from llmq.base.tensor import Tensor
from llmq.ops.quantize import fp8_scale, quantize
from llmq.ops.quantize.fp8_scale import STRIDE, slots
from llmq.runtime.device import Device
from llmq.state.params import Slab, planes
from llmq.state.placement import Placement


class Transposes:
    """Transposed codes of the blocks' matrices: each block has its own set, or blocks share one
    set. own: names of the blocks with a set of their own."""

    def __init__(self, dev: Device, table: Iterable[Slab], placement: Placement):
        self.dev, self.own = dev, set[str]()
        self._of: dict[str, dict[str, Tensor]] = {}
        shared: dict[tuple, Tensor] = {}  # by key and shape, as shapes may differ between blocks
        for slab in table:
            store = placement[slab.name].transposed
            if store is None:
                continue
            there, prefix = (shared, "") if store.streamed else ({}, f"{slab.name}.")
            for p in slab.params:
                name, which = f"{prefix}{p.key}.q_t", (p.key, p.transposed_shape)
                if which not in there:
                    args = (p.transposed_shape, store.dtype, "Quants", store.memory)
                    there[which] = dev.alloc(name, *args)
            self._of[slab.name] = {p.key: there[p.key, p.transposed_shape] for p in slab.params}
            if not store.streamed:
                self.own.add(slab.name)

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return self._of[name]

    def written(self, name: str, operands: Mapping[str, Operand]) -> None:
        """Write a block's transposed codes after its codes have changed, if the block has its own
        set."""
        if name in self.own:
            self._make(operands)

    def used(self, name: str, operands: Mapping[str, Operand]) -> None:
        """Write a block's transposed codes into the shared set before the block's use."""
        if name in self._of and name not in self.own:
            self._make(operands)

    def _make(self, operands: Mapping[str, Operand]) -> None:
        for operand in operands.values():
            if isinstance(operand, Fp8 | Int8):
                # The kernel moves bytes, whatever the dtype of the codes.
                by_columns = operand.transposed.view_as(E4M3)
                quantize.transpose(self.dev, by_columns, operand.codes.view_as(E4M3))


class WeightCodes:
    """Codes of the blocks' matrices, laid out like a whole slab or like a rank's shard of a
    slab."""

    def __init__(self, dev: Device, table: tuple[Slab, ...], transposes: Transposes, limit: float):
        """table: the slabs whose matrices are encoded. limit: the largest finite value of a
        code."""
        self.dev, self.transposes = dev, transposes
        self.slabs = {slab.name: slab for slab in table}
        self._limit = limit
        names = [param.name for slab in table for param in slab.params]
        n = len(names) * STRIDE
        self._abs_maxes = dev.alloc("weight_abs_maxes", (n,), F32, "Quants")
        self._scales = dev.alloc("weight_scales", (n,), F32, "Quants")
        self._abs_max_of, self._scale_of = slots(self._abs_maxes, names), slots(self._scales, names)
        self._gathered = (
            dev.alloc("weight_abs_maxes.all", (n * dev.mesh.size("shard"),), F32, "Quants")
            if dev.mesh.size("shard") > 1
            else None
        )

    def operands(self, name: str, codes: Tensor) -> dict[str, Operand]:
        """Return a block's operands, by matrix key. codes: the codes of the whole slab."""
        slab, transposed = self.slabs[name], self.transposes[name]
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
        """Zero the recorded largest |x| of the slabs with these names."""
        first = 0
        for changes, run in groupby(self.slabs.values(), key=lambda slab: slab.name in names):
            stop = first + STRIDE * sum(len(slab.params) for slab in run)
            if changes:
                self.dev.zero(self._abs_maxes.rows(first, stop))
            first = stop

    def observe(self, slab: Slab, start: int, stop: int, master: Tensor) -> None:
        """Record the largest |x| of a slab's elements [start, stop), which are in `master`."""
        for param, first, last in slab.pieces(start, stop):
            piece = master.rows(first - start, last - start)
            fp8_scale.abs_max(self.dev, self._abs_max_of[param.name], piece)

    def finish_scales(self) -> None:
        """Compute the scales from the largest |x| over the shards of all ranks."""
        if self._gathered is not None:
            self.dev.mesh.group("shard").all_gather(self._gathered, self._abs_maxes)
            fp8_scale.combine(self.dev, self._abs_maxes, self._gathered)
        fp8_scale.scales(self.dev, self._scales, self._abs_maxes, self._limit)

    def quantize(
        self,
        name: str,
        master: Tensor,
        codes: Tensor,
        keys: Collection[str] | None = None,
        start: int = 0,
    ) -> None:
        """Write codes (n,) of this rank's shard from the shard's master weights (n,). start: the
        element of the shard at which codes and master begin. keys: keys of the matrices to
        quantize; None: all matrices."""
        slab = self.slabs[name]
        start += self.dev.mesh.index("shard") * slab.shard_size
        for param, first, last in slab.pieces(start, start + master.size):
            if keys is not None and param.key not in keys:
                continue
            x, q = (t.rows(first - start, last - start) for t in (master, codes))
            scale, largest = self._scale_of[param.name], self._abs_max_of[param.name]
            quantize.quantize(self.dev, q, None, scale, x, largest)

    def with_transposed(
        self, name: str, operands: Mapping[str, Operand], master: Tensor, coded: Collection[str]
    ) -> dict[str, Operand]:
        """Write a block's transposed codes like `Transposes.used`, and return the block's operands.
        coded: keys of the matrices that have codes. Transposed codes of other matrices are made
        from the slab's whole master (n,)."""
        made = dict(operands)
        for p in self.slabs[name].params:
            operand = operands[p.key]
            if p.key in coded:
                quantize.transpose(self.dev, operand.transposed, operand.codes)
                continue
            x, largest = self.slabs[name].view(master, p), self._abs_max_of[p.name]
            for q_t, part in zip(planes(operand.transposed), planes(x), strict=True):
                quantize.quantize(self.dev, None, q_t, operand.scale, part, largest)
            made[p.key] = replace(operand, codes=None)
        return made


class HeadCodes:
    """Codes of the LM head's matrix; each rank encodes the whole matrix."""

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
        """Encode the current matrix as codes and as transposed codes."""
        dev, operand, largest = self.dev, self.operand, self._abs_max
        dev.zero(largest)
        fp8_scale.abs_max(dev, largest, operand.source)
        quantize.quantize(
            dev, operand.codes, operand.transposed, operand.scale, operand.source, largest
        )
