"""Weights on the device: the work copy that products read, the master copy that AdamW updates.

Life cycle of a block's weights: gather(block) -> get(block) -> release(block). Each rank updates
its shard of every slab; the others get it by a gather on the comm stream, one block ahead of its
use:

    whole      all of a slab is resident; gathered in the first micro-step after an update
    streamed   (--shard-weights) one of two slots holds the block, gathered at every use

In fp8 the blocks travel as codes, from which the transposed codes are made after the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llmq.base.dtypes import DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.ops import convert, fill, random
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane
from llmq.state.mirrors import Mirrors
from llmq.state.params import Param, Slab, by_block
from llmq.state.quants import HeadQuants, Quants

SLOTS = 2  # one block is used, the next one arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Formats and places of the weights.

    fp8: the blocks' products run in this format, else in dtype. fp8_head: those of the LM head too.
    shard: blocks are streamed. persistent_quants: a shard keeps its codes from update to update.
    keep_transposed: so do the transposed codes of blocks that are not streamed. mirror: of streamed
    blocks, a shard is in pinned memory too, where peers read it that cannot be reached directly.
    *_place: "device", "pinned" or "write_combined".
    """

    dtype: DType
    master_dtype: DType
    fp8: DType | None = None
    fp8_head: bool = False
    shard: bool = False
    persistent_quants: bool = False
    keep_transposed: bool = True
    mirror: bool = False
    master_place: str = "device"
    quants_place: str = "device"


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One micro-step, evaluation or update while it is enqueued: of capture time, as lanes are.

    stale: what other ranks updated is not here yet; to_gather: the resident slabs that it is in.
    held: blocks between gather and release. quantized: slabs whose codes the update has made.
    """

    stale: bool = False
    to_gather: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)


class Weights:
    """All slabs of a model, as far as this rank holds them.

    master[name]: this rank's shard, of the work weights themselves where formats and places agree.
    work[name]: what AdamW also writes, rounded: this rank's shard of the work weights, or None.
    slots: of streamed blocks; what nobody needs in an update.
    """

    def __init__(self, dev: Device, table: tuple[Slab, ...], options: WeightOptions):
        self.dev, self.table, self.options = dev, table, options
        self.slabs = {slab.name: slab for slab in table}
        self.master: dict[str, Tensor] = {}
        self.work: dict[str, Tensor | None] = {}
        self._whole: dict[str, Tensor] = {}
        self._part: dict[str, Tensor] = {}  # of streamed blocks: this rank's shard, for gathers
        self._mirrors = Mirrors(dev)
        self.quants = Quants(dev, table, options.fp8) if options.fp8 else None
        for slab in table:
            if slab.is_block and self._is_streamed():
                self._alloc_streamed(slab)
            else:
                self._alloc_whole(slab)
        others = {name: w for name, w in self._whole.items() if not self.slabs[name].is_block}
        self._views = by_block(table, others)
        if self.quants is not None:
            self.quants.alloc_transposed(self._whole, keep=options.keep_transposed)
        self._lm_head = self._views["head"].get("lm_head", self._views["embed"]["embed"])
        self._lm_head_slab = "head" if "head" in self.slabs else "embed"
        self._head_quants = (
            HeadQuants(dev, self._lm_head, options.fp8) if options.fp8_head else None
        )
        streamed = [slab.size for slab in table if slab.name not in self._whole]
        size, dtype = max(streamed, default=0), options.fp8 or options.dtype
        self._lane = Lane(dev, range(SLOTS if size else 0), arrive="comm")
        category = "Weights" if dtype.itemsize > 1 else "Quants"
        self.slots = [
            dev.alloc(f"weights.slot.{i}", (size,), dtype, category)
            for i in range(SLOTS if size else 0)
        ]
        self._resident = Lane(dev, self._whole, arrive="comm")
        self._operands: dict[tuple, dict[str, Operand]] = {}
        self._updated = False  # of the time of calls: since the last micro-step or evaluation
        self._pass = _Pass()

    # -- storage ---------------------------------------------------------------------------------

    def _is_plain(self, slab: Slab) -> bool:
        """Whether a slab's work weights are in the model's format."""
        return self.options.fp8 is None or not slab.is_block

    def _is_streamed(self) -> bool:
        """One rank needs slots only for blocks whose work weights are not on the device anyway."""
        options = self.options
        if not options.shard or self.dev.world_size > 1:
            return options.shard
        if options.fp8:
            return not options.persistent_quants or options.quants_place != "device"
        return options.master_dtype == options.dtype and options.master_place != "device"

    def _alloc_master(self, slab: Slab) -> Tensor:
        name, shape, options = f"{slab.name}.master", (slab.shard_size,), self.options
        return self.dev.alloc(name, shape, options.master_dtype, "Master", options.master_place)

    def _alloc_whole(self, slab: Slab) -> None:
        name, plain = slab.name, self._is_plain(slab)
        dtype = self.options.dtype if plain else self.options.fp8
        category = "Weights" if plain else "Quants"
        self._whole[name] = self.dev.alloc(name, (slab.size,), dtype, category)
        own = slab.shard(self._whole[name], self.dev.rank)
        same = plain and self.options.master_dtype == dtype
        self.master[name] = own if same else self._alloc_master(slab)
        self.work[name] = own if plain and not same else None

    def _alloc_streamed(self, slab: Slab) -> None:
        options, name, shape = self.options, slab.name, (slab.shard_size,)
        self.master[name] = self._alloc_master(slab)
        self.work[name] = None
        if options.fp8:
            if options.persistent_quants:
                args = (f"{name}.q", shape, options.fp8, "Quants", options.quants_place)
                self._part[name] = self.dev.alloc(*args)
        elif options.master_dtype == options.dtype:
            self._part[name] = self.master[name]
        else:
            part = self.dev.alloc(f"{name}.part", shape, options.dtype, "Weights")
            self._part[name] = self.work[name] = part
        part = self._part.get(name)
        if options.mirror and part is not None and not part.on_host and self.dev.world_size > 1:
            self._mirrors.add(name, part, "Quants" if options.fp8 else "Weights")

    # -- use -------------------------------------------------------------------------------------

    def _takes_slot(self, block: str) -> bool:
        return block in self.slabs and block not in self._whole

    def take_stale(self) -> bool:
        """Whether the micro-step or evaluation that is enqueued now is the first after an update.

        It has to gather what later ones find in place, so it is another graph.
        """
        stale, self._updated = self._updated and self.dev.world_size > 1, False
        return stale

    def start_micro_step(self, stale: bool) -> None:
        """Before the first gather of a micro-step or evaluation. stale: as take_stale said."""
        self._pass = _Pass(stale=stale, to_gather=set(self._whole) if stale else set())
        self._lane.forget()
        self._mirrors.start_micro_step(stale)
        if stale or self.slots:
            self._lane.follow()
        if stale:
            self._gather_whole("vectors")

    def gather(self, block: str) -> None:
        """Start bringing a block's weights to where `get` can hand them out."""
        self._pass.held.add(block)
        if block in self._pass.to_gather:
            self._gather_whole(block)
        elif self._takes_slot(block) and not self._lane.keep(block):
            slot = self._lane.take(block)
            self._lane.arrive(slot, partial(self._gather_streamed, block, self.slots[slot]))

    def _gather_whole(self, name: str) -> None:
        self._pass.to_gather.remove(name)
        self._resident.arrive(name, partial(self._gather_resident, name))

    def _gather_resident(self, name: str) -> None:
        slab, whole = self.slabs[name], self._whole[name]
        self.dev.comm.all_gather(whole, slab.shard(whole, self.dev.rank))
        if not self._is_plain(slab):
            self.quants.keep_transposed(name)
        if self._head_quants is not None and name == self._lm_head_slab:
            self._head_quants.quantize()

    def _gather_streamed(self, name: str, slot: Tensor) -> None:
        slab = self.slabs[name]
        whole = slot.rows(0, slab.size)
        part = self._part.get(name)
        if part is None:
            part = slab.shard(whole, self.dev.rank)
            self.quants.quantize(name, self.master[name], part)
        self.dev.comm.all_gather(whole, part, self._mirrors.get(name))

    def get(self, block: str, *, transposed: bool = False) -> dict[str, Operand]:
        """The work weights of a gathered block, by key. transposed: for products in backward."""
        if block not in self._pass.held:
            raise AssertionError(f"weights: get({block!r}) without gather")
        if self._pass.stale:
            for name in ("vectors", block):
                if name in self._whole:
                    self._resident.use(name)
        slot = self._arrived(block) if self._takes_slot(block) else None
        key = (block, slot and slot.offset)
        if key not in self._operands:
            self._operands[key] = self._views.get(block, {}) | self._matrices(block, slot)
        if transposed and self.quants is not None:
            self.quants.make_transposed(block, self._operands[key])
        return self._operands[key]

    def _arrived(self, block: str) -> Tensor:
        """The slot of a streamed block."""
        slot = self._lane.slot_of(block)
        self._lane.use(slot)
        return self.slots[slot]

    def _matrices(self, block: str, slot: Tensor | None) -> dict[str, Operand]:
        """Those of a transformer block, by key."""
        slab, matrices = self.slabs.get(block), slot or self._whole.get(block)
        if slab is None or not slab.is_block:
            return {}
        if self.quants is not None:
            return self.quants.operands(block, matrices)
        return {p.key: slab.view(matrices, p) for p in slab.params}

    def lm_head(self) -> Operand:
        """The matrix that makes logits; its block must have been got in this micro-step."""
        return self._lm_head if self._head_quants is None else self._head_quants.operand

    def release(self, block: str) -> None:
        """Say that enqueued work was the last to read this block's work weights."""
        if block not in self._pass.held:
            raise AssertionError(f"weights: release({block!r}) without gather")
        self._pass.held.remove(block)
        if self._takes_slot(block):
            self._lane.release(self._lane.slot_of(block))

    # -- after an update -------------------------------------------------------------------------

    def start_update(self) -> None:
        """Before the masters are written."""
        self._pass = _Pass()
        if self.quants is not None:
            self.quants.forget()

    def observe(self, slab: Slab, start: int, stop: int, master: Tensor) -> None:
        """Look at elements [start, stop) of a slab, which have just been written, in `master`."""
        if self.quants is not None and slab.is_block:
            self.quants.observe(slab, start, stop, master)

    def codes(self, name: str) -> Tensor | None:
        """This rank's codes of a slab, where it keeps any from update to update."""
        if self.quants is None or name not in self.quants.slabs:
            return None
        if name not in self._whole:
            return self._part.get(name)
        return self.slabs[name].shard(self._whole[name], self.dev.rank)

    def quantize(self, name: str, master: Tensor, codes: Tensor) -> None:
        """codes (n,) of this rank's shard, from `master` (n,), all of which was observed."""
        self.quants.finish_scales()
        self.quants.quantize(name, master, codes)
        self._pass.quantized.add(name)

    def finish_update(self) -> None:
        """Make from the updated masters what products and peers read. Only launches."""
        alone = self.dev.world_size == 1
        if self.quants is not None:
            self.quants.finish_scales()
            for name in self.quants.slabs:
                codes = self.codes(name)
                if codes is not None and name not in self._pass.quantized:
                    self.quants.quantize(name, self.master[name], codes)
                if name in self._whole and alone:
                    self.quants.keep_transposed(name)
        if self._head_quants is not None and alone:
            self._head_quants.quantize()

    def updated(self) -> None:
        """Say that an update has been enqueued: what others gathered is no longer right."""
        self._updated = True

    def refresh(self) -> None:
        """Make everything from the masters, after the host has written these; all ranks."""
        self.start_update()
        for slab in self.table:
            master, work = self.master[slab.name], self.work[slab.name]
            if work is not None:
                convert.convert(self.dev, work, master)
            first = self.dev.rank * slab.shard_size
            self.observe(slab, first, first + slab.shard_size, master)
        self.finish_update()
        self.updated()

    # -- contents --------------------------------------------------------------------------------

    def init(self, config: ModelConfig, seed: int, *, zero_projections: bool = False) -> None:
        """Fresh weights: normal(0, std), projections into the residual stream / sqrt(2L).

        Depends on the seed and the parameter only, never on ranks or dtypes beyond rounding.
        """
        std = config.initializer_range
        stds = {"normal": std, "residual": std / np.sqrt(2.0 * config.num_layers)}
        for slab in self.table:
            self.dev.zero(self.master[slab.name])
            for param, target, first in self._owned(slab):
                if param.init == "one":
                    fill.constant(self.dev, target, 1.0)
                elif param.init in stds and not (zero_projections and param.init == "residual"):
                    param_seed = (param.index << 32) | (seed & 0xFFFFFFFF)
                    random.normal(self.dev, target, float(stds[param.init]), param_seed, first)
        self.refresh()

    def load(self, read: Callable[[Param], np.ndarray]) -> None:
        """Fill the masters from host arrays of the parameters' shapes, any float dtype."""
        for slab in self.table:
            master = self.master[slab.name]
            self.dev.zero(master)
            for param, target, first in self._owned(slab):
                flat = read(param).reshape(-1)[first : first + target.size]
                self.dev.upload(target, flat.astype(master.dtype.numpy, copy=False))
        self.refresh()

    def _owned(self, slab: Slab) -> list[tuple[Param, Tensor, int]]:
        """This rank's part of each parameter, without padding, and its first element there."""
        start = self.dev.rank * slab.shard_size
        owned = []
        for param, first, last in slab.pieces(start, start + slab.shard_size):
            end = min(last, param.offset + param.rows * (param.size // param.shape[0]))
            if first < end:
                target = self.master[slab.name].rows(first - start, end - start)
                owned.append((param, target, first - param.offset))
        return owned
