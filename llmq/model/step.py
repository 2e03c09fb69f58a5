"""One optimizer step: micro-steps of forward and backward, then the update. Only calls.

Nothing here waits for the device. Values that vary between steps go to the device through a ring of
pinned slots (scalars, tokens, targets), and come back through another (losses, norms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.dtypes import (
    F64,
    I32,
    I64,
    NO_LIMITS,
    STAT,
    STATS,
    STEP_BEGIN,
    STEP_END,
    STEP_OF_RANKS,
    STEP_REPORT_WORDS,
    STEP_SCALARS,
    STEP_SCALARS_WORDS,
    Limits,
)
from llmq.base.tensor import Tensor
from llmq.model.model import Model
from llmq.ops import clock, cross_entropy
from llmq.options.options import TrainConfig
from llmq.runtime.device import Clock, Device
from llmq.runtime.mesh import DATA
from llmq.runtime.ring import Ring
from llmq.state.grads import Gradients
from llmq.state.optimizer import Optimizer
from llmq.state.pieces import Piece, State
from llmq.state.placement import Placement, table_of
from llmq.state.snapshot import Snapshot
from llmq.state.weights import Weights

RESULTS = 4  # steps whose results can be read; older ones are overwritten
MOST_SLOTS = 1024  # for micro-steps on their way to the device
HEADER = 64  # words before the tokens in a slot: StepScalars, padded so that tokens are aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurements of a step or an evaluation; losses are means over unmasked target tokens.

    tokens counts these targets. lse_max and lse_mean describe the logits' log-sum-exp. norm is
    the gradient norm before clipping, 0 for evaluations. saturated: elements that were too large
    for their fp8 scales, with delayed ones. communication: milliseconds of the step in which a rank
    did nothing but wait for others, the mean of all; None with one rank, 0 for evaluations. waits:
    the same of each rank; () with one.
    begin, end: of a step, nanoseconds on the clock of the rank's device, from some time in the past
    on; end is that of the update.
    """

    loss: float
    loss_1k: float
    tokens: int
    norm: float
    lse_max: float
    lse_mean: float
    saturated: int = 0
    communication: float | None = field(default=None, compare=False)  # a time is never the same
    waits: tuple[float, ...] = field(default=(), compare=False)
    begin: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)

    @classmethod
    def from_stats(cls, stats: np.ndarray, world_size: int) -> Result:
        """stats: F64, sums of all ranks as llmq.base.dtypes.STATS names them, times, and of several
        ranks what each one's sums were.
        """
        times = stats.view(np.int64)
        of_ranks = stats[STEP_OF_RANKS:].reshape(-1, len(STATS))
        value = {name: float(stats[i]) for name, i in STAT.items()}
        tokens, tokens_1k = value["tokens"], value["tokens_1k"]
        return cls(
            loss=value["loss"] / tokens if tokens else float("nan"),
            loss_1k=value["loss_1k"] / tokens_1k if tokens_1k else float("nan"),
            tokens=int(tokens),
            norm=value["norm"],
            lse_max=value["lse_max"],
            lse_mean=value["lse_sum"] / tokens if tokens else float("nan"),
            saturated=int(value["saturated"]),
            communication=value["exposed"] / world_size if world_size > 1 else None,
            waits=tuple(of_ranks[:, STAT["exposed"]].tolist()),
            begin=int(times[STEP_BEGIN]),
            end=int(times[STEP_END]),
        )


class Step:
    """Weights, gradients, optimizer and activations of one rank, and the step over them."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        placement: Placement,
        backend: str = "native",
    ):
        """options: normalized. placement: of them. backend: see directions."""
        self.dev, self.config, self.options = dev, config, options
        self.table = table_of(options, config, dev.mesh.size("shard"))
        words = self._open_inbox()
        W = dev.mesh.size()
        size = STEP_REPORT_WORDS if W == 1 else STEP_OF_RANKS + W * len(STATS)
        self.report = dev.alloc("stats", (size,), F64, "Activations")
        of_ranks = None if W == 1 else self.report.rows(STEP_OF_RANKS, size).view(W, len(STATS))
        self.stats = self.report.rows(0, len(STATS))
        at = (STEP_BEGIN, STEP_END)
        self.begin, self.end = (self.report.rows(i, i + 1).view_as(I64) for i in at)
        self._exposed: Tensor | None = None  # milliseconds since the last sums of all ranks
        self._goes_on = False  # whether this is directly after another step
        if W > 1:
            self._open_clock()
        # Enough slots for two steps: by the time a third is enqueued, the first one's result has
        # normally been read, and its slots are free without asking the device. Longer steps wait
        # until the device has got what it was sent so many micro-steps ago.
        slots = min(2 * options.grad_accumulation, MOST_SLOTS)
        self.outgoing = Ring(dev, "inbox", slots, words, I32)
        self.incoming = Ring(dev, "stats", RESULTS, size, F64)
        self._ticket_of_slot = [-1] * slots  # of the step that last used it
        self._last_read = -1
        self.weights = Weights(dev, self.table, placement)
        all_to_all = options.all_to_all_reduce
        self.grads = Gradients(dev, self.table, placement, self.scalars, all_to_all=all_to_all)
        self.optimizer = Optimizer(dev, self.table, placement, options, of_ranks)
        self.model = Model(
            dev, config, options, self.weights, backend, self.starts, scalars=self.scalars
        )
        background = options.ckpt_background
        self.snapshot = Snapshot(dev, self.stored_state()) if background else None

    def _open_inbox(self) -> int:
        """Open the inbox from which the device reads one micro-step; returns its words.

        With documents that are masked, starts (B, T) follow tokens and targets.
        """
        B, T = self.options.batch_size, self.options.local_seq_len
        arrays = 3 if self.options.document_mask else 2
        words = HEADER + arrays * B * T
        self.inbox = self.dev.alloc("inbox", (words,), I32, "Activations")
        self.scalars = self.inbox.rows(0, STEP_SCALARS_WORDS)
        edges = range(HEADER, words, B * T)
        parts = [self.inbox.rows(first, first + B * T).view(B, T) for first in edges]
        self.tokens, self.targets = parts[:2]
        self.starts = parts[2] if arrays == 3 else None
        return words

    def _open_clock(self) -> None:
        """Let the device measure how long it waits for other ranks."""
        at = self.dev.alloc("clock", (1,), I64, "Activations")
        total = self._exposed = self.dev.alloc("exposed", (1,), F64, "Activations")
        start, stop = partial(clock.start, self.dev, at), partial(clock.stop, self.dev, total, at)
        self.dev.clock = Clock(start, stop)

    def train(
        self,
        step: int,
        lr: float,
        grad_clip: float,
        batches: Iterable[Batch],
        limits: Limits = NO_LIMITS,
    ) -> int:
        """Enqueue one optimizer step over these micro-batches; returns the ticket of its result.

        step counts from 0. lr is the learning rate of this step; grad_clip 0 switches clipping off.
        """
        self.start()
        for micro_step, batch in enumerate(batches):
            scalars = self.scalars_of(step, micro_step, lr, grad_clip, limits)
            self.dev.graph(*self.micro_step(micro_step, scalars, batch))
        return self.update()

    def start(self) -> None:
        """Before the first micro-step of an optimizer step."""
        clock.start(self.dev, self.begin)
        self.dev.zero(self.stats)
        # Waits of ranks after they have exchanged a step's sums count in the next step.
        if self._exposed is not None and not self._goes_on:
            self.dev.zero(self._exposed)
        self.model.operands.scales.start_step()

    def micro_step(
        self, micro_step: int, scalars: np.ndarray, batch: Batch
    ) -> tuple[tuple, Callable[[], None]]:
        """Send one batch, the micro_step-th of an optimizer step.

        Returns what Device.graph takes: forward and backward over it.
        """
        self._send(scalars, batch)
        if not self.model.operands.scales.ready:
            self.calibrate()
        last = self.grads.has_last and micro_step == self.options.grad_accumulation - 1
        key = (micro_step > 0, last, self.weights.take_stale())
        return ("micro_step", *key), partial(self._micro_step, *key)

    def calibrate(self) -> None:
        """The first delayed scales, from a micro-step over the inbox that is done twice."""
        stale = self.weights.take_stale()
        with self.dev.range("calibration"):
            self._micro_step(accumulate=False, last=False, stale=stale, counts=False)
            self.model.operands.scales.calibrate()

    def rehearse(self) -> None:
        """Every kind of micro-step, evaluation and update, over token 0."""
        count = self.options.grad_accumulation
        self.rehearse_evaluation()
        self.start()
        self.weights.updated()
        for micro_step in sorted({0, min(1, count - 1), count - 1}):
            self._rehearse(micro_step)
        self.update()
        self.rehearse_evaluation()
        self._rehearse(0)  # as the first one after an evaluation

    def _rehearse(self, micro_step: int) -> None:
        scalars = self.scalars_of(0, micro_step, 0.0, 0.0)
        self.dev.graph(*self.micro_step(micro_step, scalars, self._nothing))

    def rehearse_evaluation(self) -> None:
        """Evaluation directly after an update, and once more."""
        self.weights.updated()
        self.evaluate([self._nothing] * 2)

    @property
    def _nothing(self) -> Batch:
        shape = self.tokens.shape
        return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))

    def update(self) -> int:
        """Enqueue the optimizer; returns the ticket of the step's result."""
        if self.snapshot is not None:
            self.snapshot.hold()
        self.dev.graph(("update",), self._update)
        self.weights.updated()
        self._goes_on = True
        return self._post()

    def evaluate(self, batches: Iterable[Batch]) -> Result:
        """The mean loss over the batches of all ranks; waits for the device."""
        self.dev.zero(self.stats)
        self._goes_on = False
        for batch in batches:
            self.evaluate_batch(batch)
        self.dev.graph(("combine",), lambda: self.optimizer.combine(self.stats))
        return self.result(self._post())

    def evaluate_batch(self, batch: Batch) -> None:
        """Enqueue adding one batch's losses to the stats."""
        self._send(self.scalars_of(0, 0, 0.0, 0.0), batch)
        stale = self.weights.take_stale()
        key = ("evaluate", stale, self.model.operands.scales.ready)
        self.dev.graph(key, partial(self._evaluate, stale))

    def score(self, batch: Batch) -> np.ndarray:
        """The loss of each token of one batch, F32 (B, T), 0 where masked; waits for the device.

        It changes nothing of the training, as an evaluation does not; all ranks do as many.
        """
        self._goes_on = False
        self.evaluate_batch(batch)
        return self.dev.download(self.model.head.losses).reshape(self.targets.shape)

    def result(self, ticket: int) -> Result:
        """The result of the step with this ticket; waits until it is done.

        A result can be read until RESULTS - 1 further ones have been enqueued.
        """
        if not self.incoming.used - RESULTS <= ticket < self.incoming.used:
            raise ValueError(f"result: ticket {ticket} is not among the last {RESULTS}")
        index = ticket % RESULTS
        self.incoming.events[index].synchronize()
        self._last_read = max(self._last_read, ticket)
        return Result.from_stats(self.incoming.slots[index].numpy(), self.dev.mesh.size())

    def state(self) -> State:
        """Weights and moments of this rank, by group."""
        groups = {"weights": self.weights.master} | self.optimizer.moment_groups()
        if self.weights.begun:
            groups["adapters.begun"] = self.weights.begun
        groups |= self.optimizer.scale_groups()
        return {
            group: [
                Piece.of(self.dev, slab, tensors[slab.name])
                for slab in self.table
                if slab.name in tensors
            ]
            for group, tensors in groups.items()
        }

    def stored_state(self) -> State:
        """The part of `state` that a checkpoint holds: with adapters not the model, which is
        elsewhere."""
        groups = self.state()
        if self.options.has_adapters:
            trained = self.optimizer.trained
            groups["weights"] = [p for p in groups["weights"] if p.slab.name in trained]
        return groups

    def extra_state(self) -> dict[str, list[float]]:
        """The values that a checkpoint holds beside `state`, the same on all ranks."""
        return self.model.operands.scales.state()

    def load_extra_state(self, state: Mapping[str, list[float]]) -> None:
        """Take what extra_state gave; on all ranks."""
        self.model.operands.scales.load_state(state)

    def _micro_step(
        self, accumulate: bool, last: bool, stale: bool, *, counts: bool = True
    ) -> None:
        self.model.forward(self.tokens, stale=stale, keep=True)
        self.model.backward(self.grads, self.tokens, self.targets, accumulate=accumulate, last=last)
        if counts:
            self._add_stats()

    def _evaluate(self, stale: bool) -> None:
        self.model.forward(self.tokens, stale=stale, keep=False)
        self.model.loss(self.targets)
        self._add_stats()

    def _add_stats(self) -> None:
        shape = self.targets.shape
        losses, lse = (t.view(*shape) for t in (self.model.head.losses, self.model.head.lse))
        cross_entropy.stats(self.dev, self.stats, losses, lse, self.targets)

    def _update(self) -> None:
        with self.dev.range("optimizer"):
            self.model.operands.scales.finish_step(self.stats)
            if self._exposed is not None:
                self.dev.copy(self.stats.rows(STAT["exposed"], STAT["exposed"] + 1), self._exposed)
                self.dev.zero(self._exposed)
            self.optimizer.update(self.weights, self.grads, self.stats, self.scalars)
        clock.start(self.dev, self.end)

    def scalars_of(
        self,
        step: int,
        micro_step: int,
        lr: float,
        grad_clip: float,
        limits: Limits = NO_LIMITS,
    ) -> np.ndarray:
        """StepScalars of one micro-step, int32 (STEP_SCALARS_WORDS,)."""
        words = np.zeros(STEP_SCALARS_WORDS, np.int32)
        record = words.view(STEP_SCALARS)[0]
        options, mesh = self.options, self.dev.mesh
        record["lr"] = lr
        self.optimizer.rule.prepare(record, step + 1)
        record["grad_clip"] = grad_clip
        record["norm_limit"], record["loss_limit"] = limits
        record["seed"] = options.seed & 0xFFFFFFFF
        record["step"] = step
        # Over all ranks, so that each rounds its gradients with random numbers of its own.
        record["micro_step"] = mesh.rank * options.grad_accumulation + micro_step
        # Sequences are numbered as they are dealt, on however many ranks and in whatever batches.
        record["sequence_stride"] = stride = mesh.size(*DATA)
        record["first_sequence"] = micro_step * options.batch_size * stride + mesh.index(*DATA)
        return words

    def _send(self, scalars: np.ndarray, batch: Batch) -> None:
        """Scalars and tokens to the device, in one copy from the next pinned slot."""
        index = self.outgoing.advance()
        if self._ticket_of_slot[index] > self._last_read:
            self.outgoing.events[index].synchronize()
        self._ticket_of_slot[index] = self.incoming.used
        if self.dev.kind != "plan":
            words = self.outgoing.slots[index].numpy()
            words[:STEP_SCALARS_WORDS] = scalars
            inputs, targets, starts, *_ = Batch(*batch)
            parts = [inputs, targets]
            if self.starts is not None:  # None: each sequence is one document
                parts.append(np.zeros_like(inputs) if starts is None else starts)
            np.concatenate([part.reshape(-1) for part in parts], out=words[HEADER:])
        self.dev.copy(self.inbox, self.outgoing.slots[index])
        self.dev.record(self.outgoing.events[index])

    def _post(self) -> int:
        """Start copying the stats to the next pinned slot; returns its ticket."""
        ticket = self.incoming.used
        index = self.incoming.advance()
        self.dev.copy(self.incoming.slots[index], self.report)
        self.dev.record(self.incoming.events[index])
        return ticket
