"""AdamW on this rank's shards: global norm, clip, update; state in host memory passes through.

What is kept in host memory goes through three sets of buffers on the device, a few megabytes at a
time: while one piece is updated, the next one arrives on the copy stream and the last one leaves
on the store stream. fp8 codes need all of a master, because the scales depend on a whole matrix.
Where blocks of gradients are streamed, their two slots are free now and hold a whole master each,
which so need not arrive twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from llmq.base.dtypes import E4M3, F32, I64, DType
from llmq.base.tensor import Tensor
from llmq.ops import adamw, global_norm
from llmq.ops.adamw import SCALE_BLOCK
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane
from llmq.state.grads import PIECE, SLOTS, Gradients
from llmq.state.params import Slab
from llmq.state.placement import Placement
from llmq.state.weights import Weights

BUFFERS = 3  # one arrives, one is updated, one leaves
MOVABLE = ("master", "work", "grad", "m", "v")  # what of a _State may be in host memory


class _State(NamedTuple):
    """All that the update of one slab's shard reads and writes, or of a piece of it.

    Scales stay on the device. codes: of a whole shard, what is made at the end of its master, which
    all comes from host memory.
    """

    master: Tensor
    work: Tensor | None
    grad: Tensor
    m: Tensor
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    codes: Tensor | None = None

    def rows(self, start: int, stop: int) -> _State:
        """Elements [start, stop)."""
        *tensors, m_scale, v_scale, _ = self
        tensors = [t and t.rows(start, stop) for t in tensors]
        blocks = start // SCALE_BLOCK, stop // SCALE_BLOCK
        return _State(*tensors, *(scale and scale.rows(*blocks) for scale in (m_scale, v_scale)))


class AdamW:
    """First and second moments of this rank's shards, zero at start.

    m_scale, v_scale: of 8-bit moments, F32 per 128 elements.
    """

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        placement: Placement,
        options: TrainConfig,
        gathered: Tensor | None = None,
    ):
        """options: betas, epsilon and decay are baked into captured launches.

        gathered: F64 (W, 10), where the stats of all ranks come; None with one rank.
        """
        self.dev, self.placement, self.options = dev, placement, options
        self.zero_copy = options.use_zero_copy  # the update works in host memory directly
        self.table = [slab for slab in table if placement[slab.name].trainable]
        self.m: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.m_scale: dict[str, Tensor] = {}
        self.v_scale: dict[str, Tensor] = {}
        self.segments: dict[str, Tensor] = {}
        for slab in self.table:
            name, shape, stores = slab.name, (slab.shard_size,), placement[slab.name]
            m, v = stores.m, stores.v
            self.m[name] = dev.alloc(f"{name}.m", shape, m.dtype, "Adam M", m.memory)
            self.v[name] = dev.alloc(f"{name}.v", shape, v.dtype, "Adam V", v.memory)
            scales = (slab.shard_size // SCALE_BLOCK,)
            if m.dtype == E4M3:
                self.m_scale[name] = dev.alloc(f"{name}.m_scale", scales, F32, "Adam M")
            if v.dtype == E4M3:
                self.v_scale[name] = dev.alloc(f"{name}.v_scale", scales, F32, "Adam V")
            segments = slab.segments()
            self.segments[name] = dev.alloc(f"{name}.segments", segments.shape, I64, "Activations")
            for moments in (self.m, self.v, self.m_scale, self.v_scale):
                if name in moments:
                    dev.zero(moments[name])
            dev.upload(self.segments[name], segments)
        self._gathered = gathered
        if gathered is not None:
            dev.zero(gathered)  # sums over silent ranks must be numbers, too
        self.pieces, self.wholes = Lane(dev, range(BUFFERS)), Lane(dev, range(SLOTS))

    def update(self, weights: Weights, grads: Gradients, stats: Tensor, scalars: Tensor) -> None:
        """Norm of all gradients, clip factor, then every slab's update. Only launches.

        stats: F64 (10,), this rank's sums in, those of all ranks out.
        """
        if self.dev.replica == 0:  # the others have the same sums
            grads.norm_squared(stats)
        self.combine(stats)
        global_norm.finish(self.dev, stats, scalars)
        weights.start_update()
        states = [self._state(weights, grads, slab) for slab in self.table]
        with ExitStack() as temps:
            staging = _Staging(self, temps, states, grads.slots, weights.slots)
            for slab, state in zip(self.table, states, strict=True):
                self._update_slab(slab, state, weights, scalars, staging)
            staging.finish()
        weights.finish_update()

    def combine(self, stats: Tensor) -> None:
        """Sums of this rank become sums of all ranks."""
        if self._gathered is not None:
            self.dev.comm.world.all_gather(self._gathered.view(self._gathered.size), stats)
            global_norm.combine(self.dev, stats, self._gathered)

    def _state(self, weights: Weights, grads: Gradients, slab: Slab) -> _State:
        name = slab.name
        whole = self.placement.stays_whole(name) and not self.zero_copy
        return _State(
            master=weights.master[name],
            work=weights.work[name],
            grad=grads.shard[name],
            m=self.m[name],
            v=self.v[name],
            m_scale=self.m_scale.get(name),
            v_scale=self.v_scale.get(name),
            codes=weights.codes(name) if whole else None,
        )

    def _update_slab(
        self, slab: Slab, state: _State, weights: Weights, scalars: Tensor, staging: _Staging
    ) -> None:
        step = PIECE if staging.passes_through(state) else slab.shard_size
        first = self.dev.shard * slab.shard_size
        with staging.whole(state) as whole:
            for start in range(0, slab.shard_size, step):
                stop = min(start + step, slab.shard_size)
                master = whole and whole[0].rows(start, stop)
                with staging.piece(state.rows(start, stop), master) as piece:
                    self._launch(slab, piece, scalars, first + start)
                    weights.observe(slab, first + start, first + stop, piece.master)
            if whole:
                weights.quantize(slab.name, *whole)

    def _launch(self, slab: Slab, piece: _State, scalars: Tensor, first: int) -> None:
        options = self.options
        adamw.update(
            self.dev,
            piece.master,
            piece.work,
            piece.grad,
            piece.m,
            piece.v,
            self.segments[slab.name],
            scalars,
            beta1=options.beta_1,
            beta2=options.beta_2,
            epsilon=options.adam_epsilon,
            weight_decay=options.weight_decay,
            salt=slab.params[0].index,
            lr_scale=options.lora_plus if self.placement[slab.name].group == "lora_b" else 1.0,
            first=first,
            m_scale=piece.m_scale,
            v_scale=piece.v_scale,
        )


class _Staging:
    """Buffers on the device for what the update needs of host memory, for one update.

    wholes: free buffers, each long enough for a shard's master, or none. codes: for its codes.
    """

    def __init__(
        self,
        optimizer: AdamW,
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
        for state in states:
            for name, tensor in self._moved(state).items():
                if name != "master" or not self._stays(state):
                    size = max(min(tensor.size, PIECE), sizes.get(name, (0,))[0])
                    sizes[name] = (size, tensor.dtype)
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
        """What of a slab's state goes through buffers, by name."""
        if self.optimizer.zero_copy:
            return {}
        pairs = zip(MOVABLE, state[: len(MOVABLE)], strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None and tensor.on_host}

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
        yield state._replace(**here)
        self._pieces.leave(slot, leave)

    def finish(self) -> None:
        """What follows on the main stream comes after all that leaves."""
        self._pieces.join()
        self._wholes.join()
