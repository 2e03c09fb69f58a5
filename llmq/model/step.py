"""One optimizer step: micro-steps of forward and backward, followed by the update. This module only
calls other modules in order.

Only the methods `result`, `evaluate` and `score` wait for the device. Values that change between
steps are copied to the device by the inbox, and measurements are copied back by results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.result import Result
from llmq.comm.collectives import silenced
from llmq.model.balance import ROUTER_SHOWN, ROUTER_STATS
from llmq.model.generator import Generator
from llmq.model.losses import loss_class
from llmq.model.losses.loss import LossContext
from llmq.model.model import Model
from llmq.model.mtp import MTP_STATS
from llmq.model.rings import Inbox, Results, scalars_of
from llmq.ops.update import global_norm
from llmq.options.options import StepOptions
from llmq.runtime.device import Device
from llmq.state.grads import Gradients
from llmq.state.optimizer import Optimizer
from llmq.state.pieces import Snapshot, State, state_of
from llmq.state.placement import Placement, place, table_of
from llmq.state.turns import period_of
from llmq.state.weights import Weights


class Step:
    """Weights, gradients, optimizer and activations of one rank, and the optimizer step."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: StepOptions,
        placement: Placement,
        backend: str = "native",
        *,
        background: bool = False,
    ):
        """options: with defaults filled in. placement: made from these options by
        state/placement.py. backend: backend of attention, as in halves/attention.directions.
        background: True if checkpoints are written during training."""
        self.dev, self.config, self.options = dev, config, options
        self.table = table_of(options.model, config, dev.mesh.size("shard"))
        loss = loss_class(options.optim)
        inbox = self.inbox = Inbox(dev, config, options)
        self.inputs, self.scalars = inbox.inputs, inbox.scalars
        ahead, alone = options.model.trains_mtp, options.model.trains_mtp_alone
        routers = config.experts is not None and not alone
        more = ROUTER_STATS * routers + MTP_STATS * ahead
        shown = ROUTER_SHOWN * routers + MTP_STATS * ahead
        self.results = Results(dev, loss, more, shown)
        self.stats = self.results.stats
        self.weights = Weights(dev, self.table, placement)
        self._before = {name: arena.used for name, arena in dev.arenas.items()}
        self._period = 0  # number of the period of --layers-per-step
        self._begin_period(placement)
        self.loss = loss(LossContext(dev, options.batch, options.optim, self.inputs.named))
        trained = None if options.model.only_scores else self.loss
        self.model = Model(
            dev, config, options, self.weights, backend, self.inputs,
            scalars=inbox.scalars, loss=trained,
        )  # fmt: skip
        self.scales = self.model.operands.scales
        self._generator: Generator | None = None
        copies = background and trained is not None
        self.snapshot = Snapshot(dev, self.stored_state()) if copies else None

    def _begin_period(self, placement: Placement) -> None:
        """Allocate gradients and moments of the slabs that the placement trains."""
        dev, options = self.dev, self.options
        self.grads = Gradients(
            dev, self.table, placement, self.inbox.scalars,
            all_to_all=options.parallel.all_to_all_reduce,
        )  # fmt: skip
        zero_copy = options.memory.use_zero_copy
        self.optimizer = Optimizer(dev, self.table, placement, options.optim, zero_copy=zero_copy)

    # -- a step ----------------------------------------------------------------------------------

    def turn(self, step: int) -> None:
        """Train the blocks of this step's period (--layers-per-step) from now on; all ranks call
        this method. The moments begin at zero in each period. Gradients and moments reuse the
        memory of the last period's. The call does nothing if the period has not changed."""
        dev, optim, period = self.dev, self.options.optim, period_of(self.options.optim, step)
        if period == self._period:
            return
        self._period = period
        dev.synchronize()
        dev.forget_graphs()  # because graphs hold addresses
        placement = place(self.options, self.table, dev.mesh.size("shard"), step=step)
        with ExitStack() as arenas:
            for name, arena in dev.arenas.items():
                arenas.enter_context(arena.over(self._before[name]))
            self._begin_period(placement)
        self.optimizer.rule.begun = period * optim.layers_period
        self.weights.train(self.optimizer.trained)

    def train(
        self,
        step: int,
        lr: float,
        grad_clip: float,
        batches: Iterable[Batch],
        limits: Limits = NO_LIMITS,
        numbers: Sequence[int] | None = None,
    ) -> int:
        """Enqueue one optimizer step over these micro-batches; return the ticket of the step's
        result. numbers: the micro-batches' indices, as in `rings.scalars_of`; None: 0 to
        --grad-accumulation - 1. step: number of the step, counted from 0. lr: learning rate of the
        step. grad_clip: largest gradient norm; 0: no clipping. limits: bounds of loss and gradient
        norm above which the update is skipped."""
        self.turn(step)
        numbers = range(self.options.batch.grad_accumulation) if numbers is None else numbers
        final = len(numbers) - 1
        self.start()
        for micro_step, (number, batch) in enumerate(zip(numbers, batches, strict=False)):
            scalars = self.scalars_of(step, number, lr, grad_clip, limits)
            self.inbox.send(scalars, batch, self.results)
            self.calibrate()
            self.dev.graph(*self.micro_step(micro_step, last=micro_step == final))
        return self.update(self.optimizer.rule.kind(step))

    def start(self) -> None:
        """Prepare statistics and scales; call this method before the first micro-step of a step."""
        self.results.start(of_step=True)
        self.scales.start_step()

    def scalars_of(self, *of_micro_step: object) -> np.ndarray:
        """Return the StepScalars for step, number, lr, grad_clip and limits, as `rings.scalars_of`
        does."""
        rule = self.optimizer.rule
        return scalars_of(self.options, self.dev.mesh, rule, *of_micro_step)

    def micro_step(self, micro_step: int, *, last: bool) -> tuple[tuple, Callable[[], None]]:
        """Return the arguments of Device.graph for forward and backward over the batch in the
        inbox. micro_step: number of the micro-step in the optimizer step. last: True for the last
        micro-step."""
        key = (micro_step > 0, last and self.grads.has_last, self.weights.take_stale())
        return ("micro_step", *key), partial(self._micro_step, *key)

    def calibrate(self) -> None:
        """Compute the first delayed scales with an extra micro-step over the batch in the inbox; do
        nothing if scales are known."""
        if self.scales.ready:
            return
        stale = self.weights.take_stale()
        with self.dev.range("calibration"):
            self._micro_step(accumulate=False, last=False, stale=stale, counts=False)
            self.scales.calibrate()

    def _micro_step(
        self, accumulate: bool, last: bool, stale: bool, *, counts: bool = True
    ) -> None:
        self.model.forward(stale=stale, keep=True)
        if self.model.balance is not None:
            of_routers = self.results.more.rows(0, len(ROUTER_STATS))
            self.model.balance.finish(of_routers, self.loss.divisor())
        self.model.backward(self.grads, accumulate=accumulate, last=last)
        if counts:
            self.loss.add(self.stats, self.model.rows())
            if self.model.mtp is not None:
                more = self.results.more
                of_mtp = more.rows(more.size - len(MTP_STATS), more.size)
                self.model.mtp.add(of_mtp, self.model.head.losses)

    def update(self, kind: str) -> int:
        """Enqueue an update of one of the rule's kinds; return the ticket of the step's result."""
        if self.snapshot is not None:
            self.snapshot.hold()
        self.dev.graph(("update", kind), partial(self._update, kind))
        self.weights.updated()
        return self.results.post()

    def _update(self, kind: str) -> None:
        with self.dev.range("optimizer"):
            self.scales.finish_step(self.stats)
            self.results.take_waits()
            if self.dev.mesh.index("replica") == 0:  # all replicas have the same sums
                self.grads.norm_squared(self.stats)
            self.results.combine()
            global_norm.finish(self.dev, self.stats, self.scalars)
            self.optimizer.update(self.weights, self.grads, self.scalars, kind)
        self.results.end()

    def result(self, ticket: int) -> Result:
        return self.results.result(ticket)

    # -- an evaluation ---------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch]) -> Result:
        """Return the mean loss over the batches of all ranks; the call waits for the device."""
        self.results.start(of_step=False)
        for batch in batches:
            self.evaluate_batch(batch)
        self.dev.graph(("combine",), self.results.combine)
        return self.result(self.results.post())

    def evaluate_batch(self, batch: Batch) -> None:
        """Enqueue the evaluation of one batch, which adds the batch's losses to the statistics."""
        self.inbox.send(self.scalars_of(0, 0, 0.0, 0.0), batch, self.results)
        stale = self.weights.take_stale()
        key = ("evaluate", stale, self.scales.ready)
        self.dev.graph(key, partial(self._evaluate, stale))

    def _evaluate(self, stale: bool) -> None:
        self.model.forward(stale=stale, keep=False)
        self.model.token_losses()
        rows = self.model.rows()
        self.loss.prepare(rows)
        self.loss.add(self.stats, rows)

    def score(self, batch: Batch) -> np.ndarray:
        """Return the loss of each token of one batch, F32 (B, T), 0 for masked tokens; the call
        waits for the device. Scoring does not change the training state; all ranks must call this
        method equally often."""
        self.results.interrupt()
        self.evaluate_batch(batch)
        return self.dev.download(self.model.head.losses).reshape(self.inputs.targets.shape)

    def score_top_k(self, batch: Batch) -> np.ndarray:
        """Return the k largest log-probabilities of the next token at each position, F32 (B, T, 2
        k), in the format of `ops.loss.distill.top_k`; the loss must read k scores. Scoring does not
        change the training state; all ranks must call this method equally often."""
        self.score(batch)
        scores = self.inputs.named["scores"]  # score() has read the values
        flat = scores.view(self.inputs.targets.size, scores.shape[-1])
        self.dev.graph(("top k",), partial(self.model.top_k, flat))
        return self.dev.download(scores)

    # -- generation ------------------------------------------------------------------------------

    def new_generator(self, **sizes: int) -> Generator:
        """Return a generator that uses this step's weights and the device's free memory."""
        return Generator(
            self.dev, self.config, self.weights, options=self.options, scalars=self.scalars, **sizes
        )

    @contextmanager
    def generating(self, sizes: dict[str, int]) -> Iterator[Generator]:
        """Yield a generator that uses the memory of activations inside the `with` block. sizes: the
        result of plan_generation, always the same."""
        self.results.interrupt()
        self.dev.synchronize()
        if self._generator is None:
            with self.dev.arenas["device"].over(self.model.activations_at):
                self._generator = self.new_generator(**sizes)
        self.dev.restore(self._generator.constants)
        try:
            yield self._generator
        finally:
            self.dev.synchronize()
            self.dev.restore(self.model.constants)

    def warm_up_generation(self, sizes: dict[str, int]) -> None:
        """Load kernels and capture graphs without the other ranks, as `Rank.warm_up` does; all
        ranks call this method before any rank generates. sizes: the result of plan_generation, as
        in `generating`."""
        with self.generating(sizes) as generator:
            with silenced(self.dev), self.dev.without_graphs():
                generator.rehearse()
                self.dev.synchronize()
            with self.dev.capture_only():
                generator.rehearse()

    # -- what checkpoints hold -------------------------------------------------------------------

    def state(self) -> State:
        """Return the weights and moments of this rank, by group of checkpoint files."""
        groups = {"weights": self.weights.master} | self.optimizer.moment_groups()
        state = state_of(self.dev, self.table, groups | self.optimizer.scale_groups())
        of_matrices = self.optimizer.matrix_states.items()
        return state | {group: [*pieces.values()] for group, pieces in of_matrices}

    def stored_state(self) -> State:
        """Return the part of `state` that a checkpoint holds: with adapters, only trained slabs."""
        groups = self.state()
        if self.options.model.has_adapters:
            trained = self.optimizer.trained
            groups["weights"] = [p for p in groups["weights"] if p.slab.name in trained]
        return groups

    def extra_state(self) -> dict[str, list[float]]:
        """Return the values that a checkpoint holds besides `state`, equal on all ranks."""
        begun = self.optimizer.rule.begun
        return self.scales.state() | ({"moments_begun": [float(begun)]} if begun else {})

    def load_extra_state(self, state: Mapping[str, list[float]]) -> None:
        self.scales.load_state(state)
        self.optimizer.rule.begun = int(*state.get("moments_begun", [0]))
