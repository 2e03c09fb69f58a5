"""The update of this rank's shards by the rule; state in host memory passes through.

State in host memory goes through three sets of buffers on the device, a few megabytes at a time:
while one piece is updated, the next one arrives on the copy stream and the last one leaves on the
store stream. fp8 codes need all of a master, because the scales depend on a whole matrix. Where
blocks of gradients are streamed, their two slots are free now and hold a whole master each, which
so need not arrive twice. A rule for matrices gets whole ones, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from llmq.base.dtypes import F32, I64, DType
from llmq.base.tensor import Tensor
from llmq.ops.common import SCALE_BLOCK
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane
from llmq.state.grads import PIECE, SLOTS, Gradients
from llmq.state.params import Param, Slab
from llmq.state.placement import Placement
from llmq.state.rules import rule_of
from llmq.state.rules.rule import Matrices, Part
from llmq.state.weights import Weights

BUFFERS = 3  # one arrives, one is updated, one leaves


class _State(NamedTuple):
    """All that the update of one slab's shard reads and writes, or of a piece of it.

    movable: what of it may be in host memory, by name: "master", "work", "grad" and the moments.
    Scales stay on the device. codes: of a whole shard, what is made at the end of its master, which
    all comes from host memory.
    """

    movable: dict[str, Tensor]
    scales: dict[str, Tensor]
    codes: Tensor | None = None

    @property
    def master(self) -> Tensor:
        """The weights that are updated."""
        return self.movable["master"]

    def rows(self, start: int, stop: int) -> _State:
        """Elements [start, stop)."""
        blocks = start // SCALE_BLOCK, stop // SCALE_BLOCK
        return _State(
            {name: tensor.rows(start, stop) for name, tensor in self.movable.items()},
            {name: scale.rows(*blocks) for name, scale in self.scales.items()},
        )


class Optimizer:
    """The moments of this rank's shards, zero at start, and the update by the run's rule.

    table: slabs that are trained; trained: their names. moments, scales: by name of the moment and
    of the slab; scales: of 8-bit moments, F32 per SCALE_BLOCK elements.
    """

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        placement: Placement,
        options: TrainConfig,
    ):
        """options: of the rule."""
        self.dev, self.placement, self.rule = dev, placement, rule_of(options)
        self.zero_copy = options.use_zero_copy  # the update works in host memory directly
        self.table = [slab for slab in table if placement[slab.name].trainable]
        self.trained = {slab.name for slab in self.table}
        self.moments: dict[str, dict[str, Tensor]] = {m.name: {} for m in self.rule.moments}
        self.scales: dict[str, dict[str, Tensor]] = {m.name: {} for m in self.rule.moments}
        self.segments: dict[str, Tensor] = {}
        for slab in self.table:
            self._alloc_slab(slab)
        self.pieces, self.wholes = Lane(dev, range(BUFFERS)), Lane(dev, range(SLOTS))

    def _alloc_slab(self, slab: Slab) -> None:
        dev, name, shape = self.dev, slab.name, (slab.shard_size,)
        stores = self.placement[name].moments
        for m in self.rule.moments:
            store = stores[m.name]
            self.moments[m.name][name] = dev.alloc(
                f"{name}.{m.name}", shape, store.dtype, m.category, store.memory
            )
        blocks = (slab.shard_size // SCALE_BLOCK,)
        for m in self.rule.moments:
            if stores[m.name].is_scaled:
                self.scales[m.name][name] = dev.alloc(
                    f"{name}.{m.name}_scale", blocks, F32, m.category
                )
        segments = slab.segments()
        self.segments[name] = dev.alloc(f"{name}.segments", segments.shape, I64, "Activations")
        for tensors in (*self.moments.values(), *self.scales.values()):
            if name in tensors:
                dev.zero(tensors[name])
        dev.upload(self.segments[name], segments)

    def moment_groups(self) -> dict[str, dict[str, Tensor]]:
        """Moments by their group of checkpoints and by slab."""
        return {m.group: self.moments[m.name] for m in self.rule.moments}

    def scale_groups(self) -> dict[str, dict[str, Tensor]]:
        """The same of the scales that there are."""
        found = {m.scales_group: self.scales[m.name] for m in self.rule.moments}
        return {group: scales for group, scales in found.items() if scales}

    def update(self, weights: Weights, grads: Gradients, scalars: Tensor) -> None:
        """Every slab's update. Only launches. scalars: as `global_norm.finish` leaves them."""
        weights.start_update()
        states = [self._state(weights, grads, slab) for slab in self.table]
        with ExitStack() as temps:
            staging = _Staging(self, temps, states, grads.slots, weights.slots)
            for slab, state in zip(self.table, states, strict=True):
                self._update_slab(slab, state, weights, scalars, staging)
            staging.finish()
        weights.finish_update()

    def _state(self, weights: Weights, grads: Gradients, slab: Slab) -> _State:
        name = slab.name
        whole = self.placement.stays_whole(name) and not self.zero_copy
        tensors = {
            "master": weights.master[name],
            "work": weights.work[name],
            "grad": grads.shard[name],
        } | {moment: of[name] for moment, of in self.moments.items()}
        return _State(
            movable={kind: tensor for kind, tensor in tensors.items() if tensor is not None},
            scales={moment: of[name] for moment, of in self.scales.items() if name in of},
            codes=weights.codes(name) if whole else None,
        )

    def _update_slab(
        self, slab: Slab, state: _State, weights: Weights, scalars: Tensor, staging: _Staging
    ) -> None:
        shard = self.dev.mesh.index("shard") * slab.shard_size
        with staging.whole(state) as whole:
            moved = staging.passes_through(state)
            for start, stop, matrices in _parts(slab, self.dev.mesh.index("shard"), moved=moved):
                first, last = start - shard, stop - shard
                master = whole and whole[0].rows(first, last)
                with staging.piece(state.rows(first, last), master) as piece:
                    self._launch(slab, piece, scalars, start, matrices)
                    weights.observe(slab, start, stop, piece.master)
            if whole:
                weights.quantize(slab.name, *whole)

    def _launch(
        self, slab: Slab, piece: _State, scalars: Tensor, first: int, matrices: Matrices
    ) -> None:
        part = Part(
            slab=slab,
            first=first,
            master=piece.master,
            work=piece.movable.get("work"),
            grad=piece.movable["grad"],
            moments={name: piece.movable[name] for name in self.moments},
            scales=piece.scales,
            segments=self.segments[slab.name],
            group=self.placement[slab.name].group,
            matrices=matrices,
        )
        self.rule.update(self.dev, part, scalars)


def _parts(slab: Slab, shard: int, *, moved: bool) -> list[tuple[int, int, Matrices]]:
    """The parts of a shard that are updated at a time: elements [start, stop) of the slab, and the
    matrices among them if the slab is cut between these. moved: it passes through buffers.
    """
    first, end = shard * slab.shard_size, (shard + 1) * slab.shard_size
    if slab.whole_matrices:
        found = slab.pieces(first, end)
        return [(start, stop, _matrices(param, start, stop)) for param, start, stop in found]
    step = PIECE if moved else slab.shard_size
    return [(start, min(start + step, end), ()) for start in range(first, end, step)]


def _longest(slab: Slab) -> int:
    """Elements of the longest part that passes through buffers, on any rank: all have the same."""
    shards = range(slab.size // slab.shard_size if slab.whole_matrices else 1)
    parts = (part for shard in shards for part in _parts(slab, shard, moved=True))
    return max(stop - start for start, stop, _ in parts)


def _matrices(param: Param, start: int, stop: int) -> Matrices:
    """Those of Hugging Face that elements [start, stop) of the slab have of a parameter."""
    found = []
    for part in param.hf:
        first = param.offset + part.start * param.columns
        if start <= first < stop:
            found.append((first - start, part.stop - part.start, param.columns))
    return tuple(found)


class _Staging:
    """Buffers on the device for what the update needs of host memory, for one update.

    wholes: free buffers, each long enough for a shard's master, or none. codes: for its codes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        temps: ExitStack,
        states: list[_State],
        wholes: list[Tensor],
        codes: list[Tensor],
    ):
        self.dev, self.optimizer = optimizer.dev, optimizer
        self._whole_buffers, self._code_buffers = wholes, codes
        self._pieces, self._wholes = optimizer.pieces, optimizer.wholes
        for lane in (self._pieces, self._wholes):
            lane.forget()
        sizes: dict[str, tuple[int, DType]] = {}
        for slab, state in zip(optimizer.table, states, strict=True):
            longest = _longest(slab)
            for name, tensor in self._moved(state).items():
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
        """The state of a slab that goes through buffers, by name."""
        stays = self.optimizer.zero_copy  # where kernels reach it
        found = state.movable.items()
        return {name: t for name, t in found if t.on_host and not (stays and t.direct)}

    def _stays(self, state: _State) -> bool:
        """Whether the master is on the device until codes are made from it."""
        return state.codes is not None

    def passes_through(self, state: _State) -> bool:
        """Whether the slab is updated in pieces."""
        return bool(self._moved(state))

    @contextmanager
    def whole(self, state: _State) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Where a shard's master stays, and where its codes go, on the device; if it has both."""
        if not self._stays(state):
            yield None
            return
        slot, size = self._wholes.take(state.master.name), state.master.size
        with self.dev.on("copy"):  # on which the master arrives, in pieces
            self._wholes.free(slot)
        codes = self._code_buffers[slot].rows(0, size) if state.codes.on_host else state.codes
        yield self._whole_buffers[slot].rows(0, size), codes

        def leave() -> None:
            if state.codes.on_host:
                self.dev.copy(state.codes, codes)

        self._wholes.leave(slot, leave)

    @contextmanager
    def piece(self, state: _State, master: Tensor | None) -> Iterator[_State]:
        """The piece with everything on the device; what is written leaves at the end.

        master: where its master stays, if anywhere.
        """
        moved = self._moved(state)
        if not moved:
            yield state
            return
        slot = self._pieces.take(state.master.name)
        here = {"master": master} if master else {}
        for name, tensor in moved.items():
            if name not in here:
                here[name] = self._buffers[name][slot].rows(0, tensor.size)

        def arrive() -> None:
            for name, tensor in moved.items():
                self.dev.copy(here[name], tensor)

        def leave() -> None:
            for name, tensor in moved.items():
                if name != "grad":
                    self.dev.copy(tensor, here[name])

        self._pieces.arrive(slot, arrive)
        self._pieces.use(slot)
        yield state._replace(movable=state.movable | here)
        self._pieces.leave(slot, leave)

    def finish(self) -> None:
        """Work that follows on the main stream comes after all that leaves."""
        self._pieces.join()
        self._wholes.join()
