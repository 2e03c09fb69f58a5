"""Weights on the device: the work copy that products read, and the master copy that updates change.

A block's weights pass through gather(block), get(block) and release(block). Each rank updates its
shard of every slab; other ranks gather the shard on the communication stream, one block ahead of
its use:

    whole      the slab is resident. Ranks gather a trained slab in the first micro-step after an
               update, and a frozen slab once, after loading
    streamed   (--shard-weights) one of two slots holds the block; ranks gather it at every use
    decoded    (--base-dtype) frozen blocks whose codes are whole on the device share one slot, into
               which the main stream decodes: decoding one block ahead would take multiprocessors
               from the block in use

In fp8, ranks exchange blocks as codes; transposed codes are made after the gather.

With `--mirror-weights` the shards that ranks gather at every use have copies in pinned memory. A
GPU without peer access to another GPU reads that GPU's mirror. A shard is thus copied to host
memory once per update, and not once per gather.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import FP8_MAX, DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.storage import Write
from llmq.ops.pointwise import elementwise
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane
from llmq.state.codes import HeadCodes, Transposes, WeightCodes
from llmq.state.frozen import FrozenBlocks, Stored
from llmq.state.grads import PIECE
from llmq.state.params import NEW_ROWS, SHARED, TABLES, Param, Slab, by_block
from llmq.state.placement import Placement, Store

SLOTS = 2  # one slot is in use while the next block arrives in the other


def _parts(*tensors: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of elements for one kernel launch: all elements, or PIECE elements
    if a tensor must be copied to the device first. tensors: tensors of equal length."""
    size = tensors[0].size
    step = size if all(tensor.direct for tensor in tensors) else PIECE
    for start in range(0, size, step):
        yield start, min(start + step, size)


class Mirrors:
    """Pinned copies of the blocks' shards, in the order in which forward gathers the blocks."""

    def __init__(self, dev: Device):
        self.dev = dev
        self._shards: dict[str, Tensor] = {}
        self._mirrors: dict[str, Tensor] = {}
        self._lane = Lane(dev, arrive="stage")
        # Both attributes are used only while a CUDA graph is captured. _next: the index of the
        # first block whose mirror is out of date.
        self._stale, self._next = False, 0

    def add(self, block: str, shard: Tensor, category: str) -> None:
        """Allocate the mirror of a block's shard (n,)."""
        self._shards[block] = shard
        self._mirrors[block] = self.dev.alloc(
            f"{block}.mirror", shard.shape, shard.dtype, category, "pinned"
        )
        self._lane.add(block)

    def start_micro_step(self, stale: bool) -> None:
        """Prepare the mirrors for the first gather of a micro-step. stale: True in the first
        micro-step after an update."""
        self._stale, self._next = stale, 0

    def get(self, block: str) -> Tensor | None:
        """Return the mirror that peers may read in the current stream's next gather; None if the
        block has no mirror. If mirrors are out of date, the next block's mirror is copied during
        this gather."""
        mirror = self._mirrors.get(block)
        if mirror is not None and self._stale:
            self._write(block)
            self._lane.use(block)
        return mirror

    def _write(self, block: str) -> None:
        blocks = list(self._mirrors)
        due = blocks[self._next : blocks.index(block) + 2]
        self._next += len(due)
        if due:
            self._lane.follow()
        for name in due:
            copy = partial(self.dev.copy, self._mirrors[name], self._shards[name])
            self._lane.arrive(name, copy)


def first_values(
    dev: Device, param: Param, target: Tensor, first: int, config: ModelConfig, seed: int
) -> None:
    """Write initial values of a parameter, from its element `first` on, to `target`, which is
    zero."""
    if param.init == "one":
        elementwise.fill(dev, target, 1.0)
    elif param.init == "log_uniform":  # init of vectors only, which are small
        rng = np.random.default_rng((seed & 0xFFFFFFFF, param.index))
        values = np.log(rng.uniform(0.01, 16, param.size))[first : first + target.size]
        dev.upload(target, values.astype(target.dtype.numpy))
    elif param.init != "zero":
        std = config.initializer_range
        if param.init == "residual":
            std /= np.sqrt(2.0 * config.num_layers)
        elif param.init == "unit":
            std = 1.0
        elif param.init == "adapter":  # the standard deviation of PEFT's uniform values
            std = 1.0 / np.sqrt(3.0 * param.columns)
        param_seed = (param.index << 32) | (seed & 0xFFFFFFFF)
        elementwise.normal(dev, target, float(std), param_seed, first)
    for start, stop in param.gaps:
        low, high = (min(max(row * param.columns - first, 0), target.size) for row in (start, stop))
        if low < high:
            dev.zero(target.rows(low, high))


@dataclass(slots=True, kw_only=True)
class _Pass:
    """State of one micro-step, evaluation or update while the host enqueues its work; used only
    while a CUDA graph is captured. stale: True if updates of other ranks are not gathered yet.
    to_gather: resident slabs that are not gathered yet. held: blocks between gather and release.
    partly: by block in a slot, the keys of the matrices in the slot, if some matrices are missing.
    later: a block that waits for the next released slot. coded: True if products read frozen
    blocks' stored codes. changing: slabs whose masters the update writes. quantized: slabs whose
    codes the update has made."""

    stale: bool = False
    to_gather: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    partly: dict[str, Collection[str]] = field(default_factory=dict)
    later: str | None = None
    coded: bool = False
    changing: set[str] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)


class Weights:
    """The weights that this rank holds of all slabs of a model. master[name]: this rank's shard of
    the master, or of the work weights if there is no separate master. work[name]: this rank's shard
    of the work weights, to which an update writes the rounded master; None: an update writes no
    work weights. slots: buffers of streamed blocks, which are free during an update."""

    def __init__(self, dev: Device, table: tuple[Slab, ...], placement: Placement):
        self.dev, self.table, self.placement = dev, table, placement
        self.slabs = {slab.name: slab for slab in table}
        self.master: dict[str, Tensor] = {}
        self.work: dict[str, Tensor | None] = {}
        self._whole: dict[str, Tensor] = {}
        self._part: dict[str, Tensor] = {}  # this rank's shards of streamed blocks, for gathers
        self._mirrors = Mirrors(dev)
        coded = tuple(slab for slab in table if placement[slab.name].is_coded)
        kept = tuple(slab for slab in table if placement[slab.name].base is not None)
        self._transposes = Transposes(dev, table, placement)
        self.weight_codes = None
        if coded:
            limit = FP8_MAX[placement[coded[0].name].work.dtype]
            self.weight_codes = WeightCodes(dev, coded, self._transposes, limit)
        self.frozen = FrozenBlocks(dev, kept, placement, self._transposes) if kept else None
        for slab in table:
            if placement[slab.name].base is None:
                self._alloc_slab(slab)
        for slab in kept:
            self._add_mirror(slab.name, self.frozen.packed[slab.name])
        others = {name: w for name, w in self._whole.items() if not self.slabs[name].is_block}
        self._views = by_block(table, others)
        self._lm_head = self._views["head"].get("lm_head", self._views["embed"]["embed"])
        self._lm_head_slab = "head" if "head" in self.slabs else "embed"
        self._new_rows = self._places_of_new_rows()
        head = placement.head
        self._head_codes = None if head is None else HeadCodes(dev, self._lm_head, head.dtype)
        streamed = [slab for slab in table if placement[slab.name].work.streamed]
        alone = streamed and placement[streamed[0].name].decodes_in_place
        count = (1 if alone else SLOTS) if streamed else 0
        self.slots = [self._alloc_slot(i, streamed) for i in range(count)]
        self._lane = Lane(dev, range(count), arrive="main" if alone else "comm")
        self._wholes = Lane(dev, arrive="comm")
        for name in self._whole:
            self._wholes.add(name)
        self._operands: dict[tuple, dict[str, Operand]] = {}
        self._updated = False  # True between an update and the next pass
        self._trained = {slab.name for slab in table if placement[slab.name].trainable}
        self._pass = _Pass()

    # -- storage ---------------------------------------------------------------------------------

    def _alloc(self, name: str, size: int, store: Store, category: str) -> Tensor:
        return self.dev.alloc(name, (size,), store.dtype, category, store.memory)

    def _alloc_slot(self, index: int, slabs: list[Slab]) -> Tensor:
        if self.frozen is not None:
            return self.frozen.alloc_slot(index)
        longest = max(slabs, key=lambda slab: slab.size)
        stores = self.placement[longest.name]
        category = "Quants" if stores.is_coded else "Weights"
        return self.dev.alloc(f"weights.slot.{index}", (longest.size,), stores.work.dtype, category)

    def _alloc_slab(self, slab: Slab) -> None:
        name, size, stores = slab.name, slab.shard_size, self.placement[slab.name]
        category, own, master = "Quants" if stores.is_coded else "Weights", None, None
        if not stores.work.streamed:
            self._whole[name] = self._alloc(name, slab.size, stores.work, category)
            own = slab.shard(self._whole[name], self.dev.mesh.index("shard"))
        if stores.master is not None:
            master = self._alloc(f"{name}.master", size, stores.master, "Master")
        if stores.part is not None:
            suffix = "q" if stores.is_coded else "part"
            own = self._alloc(f"{name}.{suffix}", size, stores.part, category)
        self.master[name] = own if master is None else master
        self.work[name] = None if master is None or stores.is_coded else own
        if stores.work.streamed and stores.source is not None:
            self._part[name] = self.master[name] if own is None else own
        self._add_mirror(name, self._part.get(name))

    def _add_mirror(self, name: str, part: Tensor | None) -> None:
        stores = self.placement[name]
        if stores.mirror is not None:
            narrow = stores.base is not None or stores.is_coded
            self._mirrors.add(name, part, "Quants" if narrow else "Weights")

    def _places_of_new_rows(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs (place, rows): the added token rows, and the place of these rows in the
        token table that products read."""
        slab = self.slabs.get(NEW_ROWS)
        return [
            (
                self._views[p.block][TABLES[p.block]].rows(p.first_row, p.first_row + p.rows),
                self._views[p.block][NEW_ROWS].rows(0, p.rows),
            )
            for p in (() if slab is None else slab.params)
        ]

    # -- use -------------------------------------------------------------------------------------

    def _takes_slot(self, block: str) -> bool:
        in_place = self._pass.coded and block in self.frozen.slabs
        return block in self.slabs and self.placement[block].work.streamed and not in_place

    def take_stale(self) -> bool:
        """Return True once after an update by several ranks, in the first micro-step or evaluation.
        The graph of this pass also gathers weights; later passes find the weights in place."""
        stale, self._updated = self._updated and self.dev.mesh.size("shard") > 1, False
        return stale

    def start_micro_step(self, stale: bool, *, few_rows: bool = False) -> None:
        """Prepare the weights for the first gather of a micro-step or evaluation. stale: the result
        of take_stale. few_rows: True if products have so few rows that they read frozen blocks'
        stored codes."""
        to_gather = self._trained & self._whole.keys() if stale else set()
        coded = few_rows and self.frozen is not None and self.frozen.multiplied_coded
        self._pass = _Pass(stale=stale, to_gather=to_gather, coded=coded)
        self._lane.forget()
        self._wholes.forget()
        self._mirrors.start_micro_step(stale)
        if stale:
            self._wholes.follow()
        if self.slots:
            self._lane.follow()
        for name in SHARED:
            if name in self._pass.to_gather:
                self._gather_whole(name)

    def gather(self, block: str, products: Collection[str] | None = None) -> None:
        """Start to fetch a block's weights for `get`. products: keys of the matrices that are
        multiplied by plain codes, not by transposed codes; None: all matrices. Backward recomputes
        only some of a block's outputs."""
        self._pass.held.add(block)
        if block in self._pass.to_gather:
            self._gather_whole(block)
        elif self._takes_slot(block) and not self._lane.keep(block):
            if self._lane.full:
                self._pass.later = block
                return
            if products is not None and self._can_turn(block):
                self._pass.partly[block] = products
            slot = self._lane.take(block)
            self._lane.arrive(slot, partial(self._gather_streamed, block, self.slots[slot]))

    def _can_turn(self, block: str) -> bool:
        """Return True if a kernel can make transposed codes from the master at each use. Such a
        kernel moves fewer bytes than an encoding kernel followed by a transposing kernel."""
        alone = self.dev.mesh.size("shard") == 1 and block not in self._part
        return self.weight_codes is not None and alone and not self.master[block].on_host

    def _gather_whole(self, name: str) -> None:
        self._pass.to_gather.remove(name)
        self._wholes.arrive(name, partial(self._gather_resident, name))

    def _gather_resident(self, name: str) -> None:
        slab, whole = self.slabs[name], self._whole[name]
        self.dev.mesh.group("shard").all_gather(
            whole, slab.shard(whole, self.dev.mesh.index("shard"))
        )
        self._keep_transposed(name)
        if name == NEW_ROWS:
            self._put_new_rows()
        if self._head_codes is not None and name == self._lm_head_slab:
            self._head_codes.quantize()

    def _put_new_rows(self) -> None:
        for place, rows in self._new_rows:
            self.dev.copy(place, rows)

    def _keep_transposed(self, name: str) -> None:
        if name in self._transposes.own:
            self._transposes.written(name, self.weight_codes.operands(name, self._whole[name]))

    def _gather_streamed(self, name: str, slot: Tensor) -> None:
        if self.frozen is not None:
            self.frozen.arrive(name, slot, self._mirrors.get(name))
            return
        slab = self.slabs[name]
        whole = slot.rows(0, slab.size)
        part = self._part.get(name)
        if part is None:
            part = slab.shard(whole, self.dev.mesh.index("shard"))
            self.weight_codes.quantize(name, self.master[name], part, self._pass.partly.get(name))
        self.dev.mesh.group("shard").all_gather(whole, part, self._mirrors.get(name))

    def get(self, block: str, *, transposed: bool = False) -> dict[str, Operand]:
        """Return the work weights of a gathered block, by parameter key. transposed: True in
        backward, which reads transposed codes."""
        if block not in self._pass.held:
            raise AssertionError(f"weights: get({block!r}) without gather")
        if self._pass.stale:
            for name in (*SHARED, block):
                if name in self._whole and name in self._trained:
                    self._wholes.use(name)
        slot = self._arrived(block) if self._takes_slot(block) else None
        key = (block, slot and slot.offset)
        if key not in self._operands:
            self._operands[key] = self._views.get(block, {}) | self._matrices(block, slot)
        if transposed and block in self._pass.partly:
            coded = self._pass.partly[block]
            return self.weight_codes.with_transposed(
                block, self._operands[key], self.master[block], coded
            )
        if transposed:
            self._transposes.used(block, self._operands[key])
        return self._operands[key]

    def _arrived(self, block: str) -> Tensor:
        slot = self._lane.slot_of(block)
        self._lane.use(slot)
        return self.slots[slot]

    def _matrices(self, block: str, slot: Tensor | None) -> dict[str, Operand]:
        """Return the matrices of a transformer block, by key; return an empty dict for other
        blocks."""
        slab, matrices = self.slabs.get(block), slot or self._whole.get(block)
        if self.frozen is not None and block in self.frozen.slabs:
            return self.frozen.operands(block, slot)
        if slab is None or not slab.is_block:
            return {}
        if self.weight_codes is not None:
            return self.weight_codes.operands(block, matrices)
        return {p.key: slab.view(matrices, p) for p in slab.params}

    def lm_head(self) -> Operand:
        """Return the matrix that multiplies hidden states to logits. Call `get` for the matrix's
        block earlier in the same micro-step."""
        return self._lm_head if self._head_codes is None else self._head_codes.operand

    def of_logits(self) -> dict[str, Operand]:
        """Return the matrix that multiplies hidden states to logits, and its adapters, by key."""
        keys = (f"{TABLES['head']}_{n}" for n in "ab")
        adapters = {key: self._views["head"][key] for key in keys if key in self._views["head"]}
        return {"lm_head": self.lm_head(), **adapters}

    def release(self, block: str) -> None:
        """Record that no later work of this pass reads the block's work weights."""
        if block not in self._pass.held:
            raise AssertionError(f"weights: release({block!r}) without gather")
        self._pass.held.remove(block)
        if self._takes_slot(block):
            self._lane.release(self._lane.slot_of(block))
            later, self._pass.later = self._pass.later, None
            if later is not None:
                slot = self._lane.take(later)
                self._lane.arrive(slot, partial(self._gather_streamed, later, self.slots[slot]))

    # -- after an update -------------------------------------------------------------------------

    def start_update(self, names: set[str] | None = None) -> None:
        """Prepare the weights for an update of the masters. names: the slabs to update; None: all
        trained slabs."""
        names = self._trained if names is None else names
        self._pass = _Pass(changing=names)
        if self.weight_codes is not None:
            self.weight_codes.forget(names)

    def observe(self, slab: Slab, start: int, stop: int, master: Tensor) -> None:
        """Record the largest |x| of a slab's elements [start, stop), which have just been written
        to `master`."""
        if self.weight_codes is not None and slab.is_block:
            self.weight_codes.observe(slab, start, stop, master)

    def codes(self, name: str) -> Tensor | None:
        """Return this rank's codes of a slab; None if no codes are kept from update to update."""
        if not self.placement[name].keeps_codes:
            return None
        if name in self._part:
            return self._part[name]
        return self.slabs[name].shard(self._whole[name], self.dev.mesh.index("shard"))

    def quantize(self, name: str, master: Tensor, codes: Tensor) -> None:
        """Encode `master` (n,), this rank's shard, as codes (n,). Call `observe` for all elements
        before this method."""
        self.weight_codes.finish_scales()
        self.weight_codes.quantize(name, master, codes)
        self._pass.quantized.add(name)

    def finish_update(self) -> None:
        """Enqueue work that makes codes and copies of the updated masters, for products and
        peers."""
        alone = self.dev.mesh.size("shard") == 1
        if self.weight_codes is not None:
            self.weight_codes.finish_scales()
            for name in [name for name in self.weight_codes.slabs if name in self._pass.changing]:
                codes = self.codes(name)
                if codes is not None and name not in self._pass.quantized:
                    self._make_codes(name, self.master[name], codes)
                if alone:
                    self._keep_transposed(name)
        if alone and NEW_ROWS in self._pass.changing:
            self._put_new_rows()
        if self._head_codes is not None and alone and self._lm_head_slab in self._pass.changing:
            self._head_codes.quantize()

    def _make_codes(self, name: str, master: Tensor, codes: Tensor) -> None:
        for first, last in _parts(master, codes):
            with (
                self.dev.reached(master.rows(first, last)) as x,
                self.dev.reached(codes.rows(first, last), reads=False, writes=True) as q,
            ):
                self.weight_codes.quantize(name, x, q, start=first)

    def train(self, names: set[str]) -> None:
        """Restrict later updates to the slabs of these names. All ranks must call this method."""
        before, self._trained = self._trained, names
        if self.dev.mesh.size("shard") > 1:  # no later pass gathers other slabs' last update
            for name in (name for name in self._whole if name in before - names):
                self._gather_resident(name)

    def updated(self) -> None:
        """Record that an update is enqueued, after which gathered weights of other ranks are out of
        date."""
        self._updated = True

    def refresh(self) -> None:
        """Make work weights, codes and copies from the masters that the host has written. All ranks
        must call this method."""
        self.start_update(set(self.slabs))
        for slab in self._with_masters():
            master, work = self.master[slab.name], self.work[slab.name]
            shard = self.dev.mesh.index("shard") * slab.shard_size
            for first, last in _parts(master):
                with self.dev.reached(master.rows(first, last)) as part:
                    if work is not None:
                        elementwise.convert(self.dev, work.rows(first, last), part)
                    self.observe(slab, shard + first, shard + last, part)
        self.finish_update()
        for name in self._whole if self.dev.mesh.size("shard") > 1 else ():
            if name not in self._trained:
                self._gather_resident(name)
        self.updated()

    # -- contents --------------------------------------------------------------------------------

    def init(self, config: ModelConfig, seed: int, *, zero_projections: bool = False) -> None:
        """Write initial weights: normal(0, std), divided by sqrt(2L) for projections into the
        residual stream of L layers. Weights depend only on the seed and the parameter: not on the
        number of ranks, and on dtypes only by rounding."""

        def begin(param: Param, target: Tensor, first: int) -> None:
            if not (zero_projections and param.init == "residual"):
                first_values(self.dev, param, target, first, config, seed)

        for slab in self._with_masters():
            for start, stop in _parts(master := self.master[slab.name]):
                rows = master.rows(start, stop)
                with self.dev.reached(rows, reads=False, writes=True) as part:
                    self.dev.zero(part)
                    for param, target, first in self._owned(slab, part, start):
                        begin(param, target, first)

        def source(param: Param) -> tuple[Write, DType]:
            def write(target: Tensor, first: int) -> None:
                self.dev.zero(target)
                begin(param, target, first)

            return write, self.placement["embed"].work.dtype

        if self.frozen is not None:
            self.frozen.fill(source)
        self.refresh()

    def load(
        self,
        read: Callable[[Param], np.ndarray | None],
        new: tuple[ModelConfig, int] | None = None,
        stored: Stored | None = None,
    ) -> None:
        """Fill the masters from host arrays, which have the parameters' shapes and any float dtype.
        read: returns a parameter's array, or None for a parameter that gets initial values. new:
        the config and the seed of initial values, as in `init`. stored: the files of frozen blocks
        that are stored as codes; None: the blocks are encoded from the arrays of `read`."""
        for slab in self._with_masters():
            master = self.master[slab.name]
            self.dev.zero(master)
            for param, target, first in self._owned(slab, master):
                values = read(param)
                if values is None:
                    for start, stop in _parts(target):
                        with self.dev.reached(target.rows(start, stop), writes=True) as part:
                            first_values(self.dev, param, part, first + start, *new)
                    continue
                flat = values.reshape(-1)[first : first + target.size]
                start = param.offset + first - self.dev.mesh.index("shard") * slab.shard_size
                part = master.rows(start, start + target.size)
                self.dev.upload(part, flat.astype(master.dtype.numpy, copy=False))
        if self.frozen is not None:
            stored = stored or Stored.of(read)
            self.frozen.fill(stored.source(self.dev), stored)
        self.refresh()

    def _with_masters(self) -> list[Slab]:
        return [slab for slab in self.table if slab.name in self.master]

    def params(self) -> list[Param]:
        return [param for slab in self._with_masters() for param in slab.params]

    def _owned(self, slab: Slab, part: Tensor, start: int = 0) -> list[tuple[Param, Tensor, int]]:
        """Return (param, tensor, first element of the parameter) for each parameter with elements
        in `part`, padding left out. part: elements of this rank's shard from `start` on."""
        start += self.dev.mesh.index("shard") * slab.shard_size
        owned = []
        for param, first, last in slab.pieces(start, start + part.size):
            end = min(last, param.offset + param.rows * param.columns)
            if first < end:
                target = part.rows(first - start, end - start)
                owned.append((param, target, first - param.offset))
        return owned
