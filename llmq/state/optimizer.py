"""The optimizer: runs the update rule on this rank's shards, and copies state in host memory to the
device and back.

State in host memory passes through three sets of buffers on the device, a few megabytes at a time.
While one piece is updated, the next piece arrives on the copy stream, and the last piece leaves on
the store stream. Encoding weights in fp8 needs the whole master, because a scale depends on a whole
matrix. The two slots of streamed gradients are free during the update. Each slot can hold a whole
master, so that each master is copied to the device only once.

A rule for whole matrices has three stages (`_update_matrices`): the rule proposes a change element
by element, transforms the change of each whole matrix, and applies the result element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from llmq.base.dtypes import E4M3, F32, I64, DType
from llmq.base.tensor import Tensor
from llmq.comm.collectives import part
from llmq.ops.common import SCALE_BLOCK
from llmq.ops.pointwise import elementwise
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device
from llmq.runtime.kernel import ceil_div
from llmq.runtime.lane import Lane
from llmq.state.grads import PIECE, SLOTS, Gradients
from llmq.state.params import Slab
from llmq.state.pieces import SlabPiece
from llmq.state.placement import Placement
from llmq.state.rules import AVERAGE, FIRST, kept, rule_of
from llmq.state.rules.rule import SCALES, FullMatrix, MatrixState, OptimizerState, ShardSlice
from llmq.state.weights import Weights

BUFFERS = 3  # one buffer is filled, one updated, one emptied
TOGETHER = 1 << 27  # most elements of several slabs that a rank transforms at once
WEIGHTS = ("master", "work", AVERAGE.name)  # names of weights in _State.movable


class _State(NamedTuple):
    """Tensors that the update of a slab's shard, or of a piece of the shard, reads and writes.
    name: the slab's name. movable: tensors that may be in host memory: "master", "work", "grad" and
    moments. scales: scales of moments, always on the device. codes: codes of a whole shard whose
    master is copied from host memory, made after the update of the whole master; None if no such
    codes are made."""

    name: str
    movable: dict[str, Tensor]
    scales: dict[str, Tensor]
    codes: Tensor | None = None

    def rows(self, start: int, stop: int) -> _State:
        blocks = start // SCALE_BLOCK, stop // SCALE_BLOCK
        return _State(
            self.name,
            {name: tensor.rows(start, stop) for name, tensor in self.movable.items()},
            {name: scale.rows(*blocks) for name, scale in self.scales.items()},
        )

    def of_weights(self) -> _State:
        """Return the tensors that `apply` changes: the master, the work weights and the moving
        average."""
        kinds = {name: t for name, t in self.movable.items() if name in WEIGHTS}
        return _State(self.name, kinds, {}, self.codes)

    def beside_weights(self) -> _State:
        """Return all tensors but the weights; `propose` computes a change from these tensors."""
        kinds = {name: t for name, t in self.movable.items() if name not in WEIGHTS}
        return _State(self.name, kinds, self.scales)


class Optimizer:
    """Moments of this rank's shards, zero at the start, and the update by the run's rule. table:
    the slabs that are trained. trained: the names of these slabs. moments: tensors by moment and
    slab. scales: scales of 8-bit moments, by moment and slab; one F32 for SCALE_BLOCK elements."""

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        placement: Placement,
        optim: OptimOptions,
        *,
        zero_copy: bool = False,
    ):
        """optim: options of the update rule. zero_copy: True if kernels update host memory
        directly."""
        self.dev, self.placement, self.rule = dev, placement, rule_of(optim)
        self.zero_copy = zero_copy
        self.table = [slab for slab in table if placement[slab.name].trainable]
        self.trained = {slab.name for slab in self.table}
        self.kept, self.decay = kept(optim), optim.ema
        self.moments: dict[str, dict[str, Tensor]] = {m.name: {} for m in self.kept}
        self.scales: dict[str, dict[str, Tensor]] = {m.name: {} for m in self.kept}
        self.segments: dict[str, Tensor] = {}
        matrices = [slab for slab in self.table if placement[slab.name].by_matrix]
        self._rounds = _rounds(matrices, dev.mesh.size("shard"))
        for slab in self.table:
            self._alloc_slab(slab)
        self.matrix_states: dict[str, dict[str, SlabPiece]] = {}
        for state in self.rule.matrix_states:
            self._alloc_of_matrices(state)
        self.zero_moments()
        self.pieces, self.wholes = Lane(dev, range(BUFFERS)), Lane(dev, range(SLOTS))

    def _alloc_slab(self, slab: Slab) -> None:
        dev, name, shape = self.dev, slab.name, (slab.shard_size,)
        stores = self.placement[name].moments
        moments = [m for m in self.kept if m.name in stores]
        for m in moments:
            store = stores[m.name]
            self.moments[m.name][name] = dev.alloc(
                f"{name}.{m.name}", shape, store.dtype, m.category, store.memory
            )
        blocks = (slab.shard_size // SCALE_BLOCK,)
        for m in moments:
            if stores[m.name].is_scaled:
                self.scales[m.name][name] = dev.alloc(
                    f"{name}.{m.name}_scale", blocks, F32, m.category
                )
        segments = slab.segments()
        self.segments[name] = dev.alloc(f"{name}.segments", segments.shape, I64, "Activations")
        dev.upload(self.segments[name], segments)

    def _alloc_of_matrices(self, state: MatrixState) -> None:
        """Allocate a state for the matrices that this rank transforms: one tensor for each turn,
        named like the first slab of the turn. A rank with no slab in a turn allocates a tensor that
        is not saved, so that all ranks use the same amount of memory."""
        dev, mesh, options = self.dev, self.dev.mesh, self.rule.options
        ranks, index = mesh.size("shard"), mesh.index("shard")
        turns = (
            slabs[i : i + ranks] for slabs in self._rounds for i in range(0, len(slabs), ranks)
        )
        for turn in turns:
            comes = index < len(turn)
            slab = state.slab(options, turn[index if comes else 0])
            own = (0, slab.size if comes and mesh.index("replica") == 0 else 0)
            dtype = state.format(options, self.placement[turn[0].name].gradient.dtype)
            sizes = {state.group: (state.name, slab.size, dtype)}
            if dtype == E4M3:
                scales = (f"{state.name}_scale", slab.size // SCALE_BLOCK, F32)
                sizes[state.scales_group] = scales
            for group, (name, size, of) in sizes.items():
                tensor = dev.alloc(f"{slab.name}.{name}", (size,), of, state.category)
                piece = SlabPiece(slab, 0, slab.size, tensor, own)
                self.matrix_states.setdefault(group, {})[turn[0].name] = piece

    def zero_moments(self) -> None:
        """Zero the moments, their scales and the states of matrices."""
        for tensors in (*self.moments.values(), *self.scales.values()):
            for tensor in tensors.values():
                self.dev.zero(tensor)
        for pieces in self.matrix_states.values():
            for piece in pieces.values():
                self.dev.zero(piece.tensor)

    def moment_groups(self) -> dict[str, dict[str, Tensor]]:
        return {m.group: self.moments[m.name] for m in self.kept}

    def scale_groups(self) -> dict[str, dict[str, Tensor]]:
        groups = {m.scales_group: self.scales[m.name] for m in self.kept}
        return {group: scales for group, scales in groups.items() if scales}

    def update(self, weights: Weights, grads: Gradients, scalars: Tensor, kind: str) -> None:
        """Enqueue the update of every trained slab. scalars: StepScalars after
        `global_norm.finish`. kind: a name from the rule's `kinds`."""
        weights.start_update()
        states = {slab.name: self._state(weights, grads, slab) for slab in self.table}
        with ExitStack() as temps:
            staging = _Staging(self, temps, states.values(), grads.slots, weights.slots)
            work = _Work(weights, scalars, staging, kind)
            for slab in self.table:
                if not self.placement[slab.name].by_matrix:
                    self._update_shard(slab, states[slab.name], work, self.rule.update)
            for slabs in self._rounds:
                self._update_matrices(slabs, states, work)
            staging.finish()
        weights.finish_update()

    def begin_average(self, weights: Weights, state: OptimizerState = AVERAGE) -> None:
        """Copy the weights, which the host has just written, to a state such as the moving average.
        state: AVERAGE or FIRST."""
        for name, tensor in self.moments.get(state.name, {}).items():
            elementwise.convert(self.dev, tensor, weights.master[name])

    def exchange_average(
        self, weights: Weights, state: OptimizerState = AVERAGE, *, back: bool
    ) -> None:
        """Exchange the masters with a state such as the moving average, then compute the work
        weights anew; a second call restores both. state: AVERAGE or FIRST. back: True in the second
        call, which restores. All ranks must call this method. No step may run between the two
        calls."""
        for name, tensor in self.moments[state.name].items():
            elementwise.exchange_average(self.dev, tensor, weights.master[name], back=back)
        weights.refresh()

    def _state(self, weights: Weights, grads: Gradients, slab: Slab) -> _State:
        name = slab.name
        whole = self.placement.stays_whole(name) and not self.zero_copy
        tensors = {
            "master": weights.master[name],
            "work": weights.work[name],
            "grad": grads.shard[name],
        }
        updated = {kind: of for kind, of in self.moments.items() if kind != FIRST.name}
        tensors |= {kind: of[name] for kind, of in updated.items() if name in of}
        return _State(
            name,
            movable={kind: tensor for kind, tensor in tensors.items() if tensor is not None},
            scales={moment: of[name] for moment, of in self.scales.items() if name in of},
            codes=weights.codes(name) if whole else None,
        )

    def _update_shard(
        self,
        slab: Slab,
        state: _State,
        work: _Work,
        method: Callable[[Device, ShardSlice, Tensor], None],
        change: Tensor | None = None,
    ) -> None:
        """Call a method of the rule on this rank's shard, in pieces if the shard is copied through
        buffers. change: (shard_size,), the field `change` of ShardSlice."""
        shard, size = self.dev.mesh.index("shard") * slab.shard_size, slab.shard_size
        with work.staging.whole(state) as whole:
            step = PIECE if work.staging.passes_through(state) else size
            for first in range(0, size, step):
                rows = (first, min(first + step, size))
                master = whole and whole[0].rows(*rows)
                with work.staging.piece(state.rows(*rows), master) as piece:
                    changed = change and change.rows(*rows)
                    method(self.dev, self._part(slab, shard + first, piece, changed), work.scalars)
                    if "master" in piece.movable:
                        master = piece.movable["master"]
                        work.weights.observe(slab, shard + rows[0], shard + rows[1], master)
                        if self.decay:
                            average = piece.movable[AVERAGE.name]
                            elementwise.average(self.dev, average, master, work.scalars, self.decay)
            if whole:
                work.weights.quantize(slab.name, *whole)

    def _part(self, slab: Slab, first: int, piece: _State, change: Tensor | None) -> ShardSlice:
        tensors = piece.movable
        return ShardSlice(
            slab=slab,
            first=first,
            segments=self.segments[slab.name],
            master=tensors.get("master"),
            work=tensors.get("work"),
            grad=tensors.get("grad"),
            moments={name: tensors[name] for name in self.moments if name in tensors},
            scales=piece.scales,
            change=change,
        )

    def _update_matrices(self, slabs: list[Slab], states: dict[str, _State], work: _Work) -> None:
        """Update slabs of equal layout by a rule for whole matrices. In each turn, each rank
        transforms the whole change of one slab. Shards may cut matrices: the proposed change of a
        slab is sent to the rank that transforms it, and the final change comes back, together as
        much traffic as two shards. A rank without a slab in the turn transforms zeros, so that all
        ranks launch the same kernels."""
        dev, first, group = self.dev, slabs[0], self.dev.mesh.group("shard")
        dtype = self.rule.of_change or self.placement[first.name].gradient.dtype
        turns = [slabs[i : i + group.size] for i in range(0, len(slabs), group.size)]
        with ExitStack() as temps:

            def scratch(name: str, *shape: int) -> Tensor:
                tensor = dev.scratch(f"change.{name}", shape, dtype)
                return temps.enter_context(tensor)

            source, target = (scratch(name, len(turns) * first.size) for name in ("here", "there"))
            spare = scratch("spare", first.shard_size) if group.size > 1 else None

            def turn_of(tensor: Tensor, turn: int) -> Tensor:
                return tensor.rows(turn * first.size, (turn + 1) * first.size)

            for turn, several in enumerate(turns):
                proposed = turn_of(source, turn)
                for index in range(group.size):
                    change = part(proposed, index, group.size)
                    if index < len(several):
                        state = states[several[index].name].beside_weights()
                        self._update_shard(several[index], state, work, self.rule.propose, change)
                    else:
                        dev.zero(change)
                if group.size > 1:
                    for index, piece in enumerate(group.all_to_all(proposed, spare)):
                        dev.copy(part(turn_of(target, turn), index, group.size), piece)
            if group.size > 1:
                source, target = target, source
            wholes = []
            for turn, several in enumerate(turns):
                end, number = 0, 0
                for start, count, rows, columns in (*first.alike(), (first.size, 0, 0, 0)):
                    if end < start:  # the padding between matrices does not change
                        dev.zero(turn_of(target, turn).rows(end, start))
                    end = start + count * rows * columns
                    if count:
                        both = (
                            turn_of(tensor, turn).rows(start, end) for tensor in (source, target)
                        )
                        views = (tensor.view(count, rows, columns) for tensor in both)
                        kept_states = self._states_of(several, number, count)
                        wholes.append(FullMatrix(*views, *kept_states))
                    number += count
            self.rule.transform(dev, wholes, work.scalars, work.kind)
            for turn, several in enumerate(turns):
                made = turn_of(target, turn)
                changes = group.all_to_all(made, spare) if group.size > 1 else [made]
                for slab, change in zip(several, changes, strict=False):
                    state = states[slab.name].of_weights()
                    self._update_shard(slab, state, work, self.rule.apply, change)

    def _states_of(self, turn: list[Slab], number: int, count: int) -> tuple:
        """Return the last fields of a FullMatrix, from `states` on, for `count` matrices of equal
        shape. number: index of the first matrix in the slab that this rank transforms."""
        index = self.dev.mesh.index("shard")
        slab = turn[index if index < len(turn) else 0]
        shapes = [shape for _, *shape in slab.matrices()]
        states: dict[str, dict[str, Tensor]] = {"": {}, SCALES: {}}
        for state in self.rule.matrix_states:
            sizes = [state.size(self.rule.options, *shape) for shape in shapes]
            first, each = sum(sizes[:number]), sizes[number]
            for suffix, found in states.items():
                pieces = self.matrix_states.get(f"{state.group}{suffix}")
                if pieces is not None:
                    block = SCALE_BLOCK if suffix else 1
                    part = (first // block, (first + count * each) // block)
                    tensor = pieces[turn[0].name].tensor.rows(*part)
                    found[state.name] = tensor.view(count, each // block)
        return *states.values(), number, slab.params[0].index, self.segments[slab.name]


class _Work(NamedTuple):
    """Arguments that all methods of one update share."""

    weights: Weights
    scalars: Tensor
    staging: _Staging
    kind: str


def _rounds(slabs: Iterable[Slab], ranks: int) -> list[list[Slab]]:
    """Divide slabs of equal layout into turns. In a turn each rank transforms one slab, or several
    slabs of at most TOGETHER elements."""
    alike: dict[tuple, list[Slab]] = {}
    for slab in slabs:
        alike.setdefault((slab.size, slab.matrices()), []).append(slab)
    rounds = []
    for same in alike.values():
        turns, most = ceil_div(len(same), ranks), max(TOGETHER // same[0].size, 1)
        step = ranks * ceil_div(turns, ceil_div(turns, most))
        rounds += [same[i : i + step] for i in range(0, len(same), step)]
    return rounds


class _Staging:
    """Device buffers of one update, for state in host memory. wholes: free buffers, each long
    enough for the master of any shard; may be empty. codes: buffers for the codes of masters in
    `wholes`."""

    def __init__(
        self,
        optimizer: Optimizer,
        temps: ExitStack,
        states: Collection[_State],
        wholes: list[Tensor],
        codes: list[Tensor],
    ):
        self.dev, self.optimizer = optimizer.dev, optimizer
        self._whole_buffers, self._code_buffers = wholes, codes
        self._pieces, self._wholes = optimizer.pieces, optimizer.wholes
        for lane in (self._pieces, self._wholes):
            lane.forget()
        sizes: dict[str, tuple[int, DType]] = {}
        for state in states:
            for name, tensor in self._moved(state).items():
                longest = min(PIECE, tensor.size)
                if name != "master" or not self._stays(state):
                    sizes[name] = (max(longest, sizes.get(name, (0,))[0]), tensor.dtype)
        self._buffers = {
            name: [
                temps.enter_context(self.dev.scratch(f"{name}.{i}", (size,), dtype))
                for i in range(BUFFERS)
            ]
            for name, (size, dtype) in sizes.items()
        }
        if any(self.passes_through(state) for state in states):
            self._pieces.follow()

    def _moved(self, state: _State) -> dict[str, Tensor]:
        """Return the tensors of a state that are copied through device buffers, by name."""
        zero_copy, tensors = self.optimizer.zero_copy, state.movable.items()
        return {name: t for name, t in tensors if t.on_host and not (zero_copy and t.direct)}

    def _stays(self, state: _State) -> bool:
        """Return True if the master stays on the device until its codes are made."""
        return state.codes is not None

    def passes_through(self, state: _State) -> bool:
        """Return True if the slab is updated in pieces."""
        return bool(self._moved(state))

    @contextmanager
    def whole(self, state: _State) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield device memory for a shard's master and for its codes; None if the update keeps no
        whole master on the device."""
        if not self._stays(state):
            yield None
            return
        slot, size = self._wholes.take(state.name), state.movable["master"].size
        with self.dev.on("copy"):  # the stream on which pieces of the master arrive
            self._wholes.free(slot)
        codes = self._code_buffers[slot].rows(0, size) if state.codes.on_host else state.codes
        yield self._whole_buffers[slot].rows(0, size), codes

        def leave() -> None:
            if state.codes.on_host:
                self.dev.copy(state.codes, codes)

        self._wholes.leave(slot, leave)

    @contextmanager
    def piece(self, state: _State, master: Tensor | None) -> Iterator[_State]:
        """Yield the piece of a state with all tensors on the device. At the end of the with block,
        written tensors are copied to host memory. master: device memory in which the piece's master
        stays; None: the master passes through a buffer."""
        moved = self._moved(state)
        if not moved:
            yield state
            return
        slot = self._pieces.take(state.name)
        buffers = {"master": master} if master else {}
        for name, tensor in moved.items():
            if name not in buffers:
                buffers[name] = self._buffers[name][slot].rows(0, tensor.size)

        def arrive() -> None:
            for name, tensor in moved.items():
                self.dev.copy(buffers[name], tensor)

        def leave() -> None:
            for name, tensor in moved.items():
                if name != "grad":
                    self.dev.copy(tensor, buffers[name])

        self._pieces.arrive(slot, arrive)
        self._pieces.use(slot)
        yield state._replace(movable=state.movable | buffers)
        self._pieces.leave(slot, leave)

    def finish(self) -> None:
        """Let the main stream wait for all copies to host memory."""
        self._pieces.join()
        self._wholes.join()
