"""Ring buffers in pinned memory between the host and a step. Inputs are copied to the device ahead
of the step, and the host reads results one step later."""

from functools import partial
from itertools import pairwise

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import FILLER_TARGET, Batch
from llmq.base.dtypes import F64, I32, I64, NO_LIMITS, STEP_SCALARS, STEP_SCALARS_WORDS, Limits
from llmq.base.result import Result
from llmq.base.step_inputs import ROW, Input, StepInputs
from llmq.base.tensor import Tensor
from llmq.model.losses import loss_class
from llmq.model.losses.loss import Loss
from llmq.ops.pointwise import clock
from llmq.ops.update import global_norm
from llmq.options.groups.optim import OptimOptions
from llmq.options.options import StepOptions
from llmq.runtime.device import Clock, Device
from llmq.runtime.lane import Ring
from llmq.runtime.mesh import DATA, Mesh
from llmq.state.rules.rule import UpdateRule

RESULTS = 4  # number of steps whose results can be read, before newer results overwrite older ones


class Results:
    """Statistics of the running step on the device, and of the last RESULTS steps in pinned memory.
    stats: F64, in the order of Loss.stat, followed by the sums in `more`."""

    def __init__(
        self, dev: Device, loss: type[Loss], more: tuple[str, ...] = (), shown: tuple[str, ...] = ()
    ):
        """more: names of further sums over targets, whose means are reported. shown: names in
        `more` that the console shows if the sum is not 0."""
        self.dev, self._loss, self._stat = dev, loss, loss.stat()
        self._more, self._shown = more, shown
        first = len(self._stat) + len(self._stat) % 2  # aligned to 16 bytes
        self._stat = self._stat | {name: first + i for i, name in enumerate(more)}
        count, W = max(self._stat.values()) + 1, dev.mesh.size()
        # Two I64 follow the stats, aligned: nanoseconds of the device's clock at the start and at
        # the end of the step. With several ranks, the gathered stats of each rank follow.
        self._begin_at = count + count % 2
        self._end_at, self._ranks_at = self._begin_at + 2, self._begin_at + 4
        words = self._end_at + 1 if W == 1 else self._ranks_at + W * count
        self._report = dev.alloc("stats", (words,), F64, "Activations")
        self.stats = self._report.rows(0, count)
        self.more = self._report.rows(first, count) if more else None
        self._begin, self._end = (
            self._report.rows(i, i + 1).view_as(I64) for i in (self._begin_at, self._end_at)
        )
        self._of_ranks: Tensor | None = None
        self._waited: Tensor | None = None  # milliseconds since the last sums of all ranks
        self._goes_on = False  # True if a step made the last call of start()
        if W > 1:
            self._of_ranks = self._report.rows(self._ranks_at, words).view(W, count)
            dev.zero(self._of_ranks)  # in a rehearsal, ranks that do not communicate write nothing
            self._open_clock()
        self._ring = Ring(dev, "stats", RESULTS, words, F64)
        self.last_read = -1

    def _open_clock(self) -> None:
        """Make the device measure how long this rank waits for other ranks."""
        at = self.dev.alloc("clock", (1,), I64, "Activations")
        total = self._waited = self.dev.alloc("exposed", (1,), F64, "Activations")
        start, stop = partial(clock.start, self.dev, at), partial(clock.stop, self.dev, total, at)
        self.dev.clock = Clock(start, stop)

    @property
    def next_ticket(self) -> int:
        return self._ring.used

    def start(self, *, of_step: bool) -> None:
        """Zero the statistics before a step's first micro-step or an evaluation's first batch."""
        if of_step:
            clock.start(self.dev, self._begin)
        self.dev.zero(self.stats)
        # A step that directly follows another step keeps the waits since the earlier step's
        # exchange of sums.
        if of_step and self._waited is not None and not self._goes_on:
            self.dev.zero(self._waited)
        self._goes_on = of_step

    def interrupt(self) -> None:
        """Discard the measured waits before the next step; call this method before any work that is
        not a step."""
        self._goes_on = False

    def take_waits(self) -> None:
        """Move the time that this rank has waited into its statistics."""
        if self._waited is not None:
            at = self._stat["exposed"]
            self.dev.copy(self.stats.rows(at, at + 1), self._waited)
            self.dev.zero(self._waited)

    def combine(self) -> None:
        """Replace this rank's sums by sums over all ranks."""
        if self._of_ranks is not None:
            flat = self._of_ranks.view(self._of_ranks.size)
            self.dev.mesh.group().all_gather(flat, self.stats)
            maxima = [self._stat[name] for name in self._loss.maxima]
            global_norm.combine(self.dev, self.stats, self._of_ranks, maxima)

    def end(self) -> None:
        """Record the end of the step; call this method after the update."""
        clock.start(self.dev, self._end)

    def post(self) -> int:
        """Start copying the stats to the next slot in pinned memory; return the ticket of this
        copy."""
        ticket = self._ring.used
        index = self._ring.advance()
        self.dev.copy(self._ring.slots[index], self._report)
        self.dev.record(self._ring.events[index])
        return ticket

    def result(self, ticket: int) -> Result:
        """Return the result for a ticket of `post`; the call waits for the device. Raise ValueError
        for tickets older than the last RESULTS."""
        if not self._ring.used - RESULTS <= ticket < self._ring.used:
            raise ValueError(f"result: ticket {ticket} is not among the last {RESULTS}")
        index = ticket % RESULTS
        self._ring.events[index].synchronize()
        self.last_read = max(self.last_read, ticket)
        return self._read(self._ring.slots[index].numpy())

    def _read(self, report: np.ndarray) -> Result:
        times, W = report.view(np.int64), self.dev.mesh.size()
        sums = {name: float(report[i]) for name, i in self._stat.items()}
        of_ranks = report[self._ranks_at :].reshape(-1, self.stats.size)
        tokens = int(sums.get("tokens", sums["count"]))
        more = {name: sums[name] / tokens if tokens else float("nan") for name in self._more}
        return Result(
            loss=sums["loss"] / sums["count"] if sums["count"] else float("nan"),
            tokens=tokens,
            norm=sums["norm"],
            numbers=self._loss.numbers(sums) | more,
            validated=self._loss.validated,
            shown=(*self._loss.shown, *(name for name in self._shown if sums[name])),
            saturated=int(sums["saturated"]),
            communication=sums["exposed"] / W if W > 1 else None,
            waits=tuple(of_ranks[:, self._stat["exposed"]].tolist()),
            begin=int(times[self._begin_at]),
            end=int(times[self._end_at]),
        )


MOST_SLOTS = 1024  # most micro-steps whose inputs are being copied
HEADER = 64  # number of 32-bit words for StepScalars in a slot, padded to align tokens


def named_inputs(config: ModelConfig, optim: OptimOptions) -> tuple[Input, ...]:
    """Return the inputs of a step besides tokens and targets: the loss's inputs, then the
    architecture's. Raise ValueError if loss and architecture declare one name differently."""
    declared = (*loss_class(optim).inputs(optim), *config.arch.inputs(config))
    found = {each.name: each for each in declared}
    for each in declared:
        if found[each.name] != each:
            raise ValueError(f"inputs: {each.name} is declared as {each} and {found[each.name]}")
    return tuple(found.values())


class Inbox:
    """Device memory of a micro-step's inputs, and the pinned slots from which inputs are copied.
    scalars: StepScalars, I32 (16,). inputs: tensors that follow the scalars, in the order of
    `StepInputs`."""

    def __init__(self, dev: Device, config: ModelConfig, options: StepOptions):
        self.dev = dev
        B, T = options.batch.batch_size, options.batch.local_seq_len
        place = dev.mesh.index("context")
        self._own = (slice(None), slice(place * T, (place + 1) * T))  # rank's T of whole sequences
        plain = {"tokens": T, "targets": T}
        if options.batch.document_mask:  # attention reads first_key of whole sequences
            plain["first_key"] = options.batch.seq_len
        self._named = named_inputs(config, options.optim)
        sizes = [B * length for length in plain.values()]
        sizes += [each.words(B, T) for each in self._named]
        self._edges = list(pairwise(np.cumsum([HEADER, *sizes]).tolist()))
        words = self._edges[-1][1]
        self._inbox = dev.alloc("inbox", (words,), I32, "Activations")
        self.scalars = self._inbox.rows(0, STEP_SCALARS_WORDS)
        parts = [self._inbox.rows(*edges) for edges in self._edges]
        named = zip(self._named, parts[len(plain) :], strict=True)
        self.inputs = StepInputs(
            *(part.view(B, T) for part, T in zip(parts, plain.values(), strict=False)),
            named={i.name: part.view_as(i.dtype, i.batch_shape(B, T)) for i, part in named},
        )
        # Slots for two steps: the host usually reads the first step's result before enqueueing the
        # third step, when the first step's slots are free without a wait. With more micro-steps
        # than slots, `send` waits for earlier copies.
        slots = min(2 * options.batch.grad_accumulation, MOST_SLOTS)
        self._ring = Ring(dev, "inbox", slots, words, I32)
        self._ticket_of_slot = [-1] * slots  # ticket of the step that last used a slot

    def send(self, scalars: np.ndarray, batch: Batch, results: Results) -> None:
        """Enqueue the copy of a micro-step's inputs to the device. batch: whole sequences, of which
        each rank takes its part; missing `starts` and named arrays become 0; targets beyond
        `lengths` become FILLER_TARGET. results: the results from which `send` learns which slots
        are free."""
        ring = self._ring
        index = ring.advance()
        if self._ticket_of_slot[index] > results.last_read:
            ring.events[index].synchronize()
        self._ticket_of_slot[index] = results.next_ticket
        if self.dev.kind != "plan":
            words = ring.slots[index].numpy()
            words[:STEP_SCALARS_WORDS] = scalars
            arrays = self._arrays(Batch(*batch))
            for array, (first, stop) in zip(arrays, self._edges, strict=True):
                content = words[first:stop].view(np.uint8)
                content[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.dev.copy(self._inbox, ring.slots[index])
        self.dev.record(ring.events[index])

    def _arrays(self, batch: Batch) -> list[np.ndarray]:
        """Return the arrays of a batch in the order of the inbox's tensors."""
        targets, named = batch.targets, batch.named or {}
        if batch.lengths is not None:
            filler = np.arange(targets.shape[1]) >= batch.lengths[:, None]
            targets = np.where(filler, np.int32(FILLER_TARGET), targets)
        own = self._own
        arrays = [batch.inputs[own], targets[own]]
        if self.inputs.first_key is not None:  # None if each sequence is one document
            arrays.append(np.zeros_like(targets) if batch.starts is None else batch.starts)
        for each in self._named:
            array = named.get(each.name, each.zeros(*targets.shape))
            arrays.append(array if each.per == ROW else array[own])
        return arrays


def scalars_of(
    options: StepOptions,
    mesh: Mesh,
    rule: UpdateRule,
    step: int,
    number: int,
    lr: float,
    grad_clip: float,
    limits: Limits = NO_LIMITS,
) -> np.ndarray:
    """Return the StepScalars of one micro-step, int32 (STEP_SCALARS_WORDS,). number: index of the
    micro-batch among those that an equal division gives this rank. An index below 0, or from
    --grad-accumulation on, means a micro-batch of another rank, with the random numbers that it
    would have there."""
    words = np.zeros(STEP_SCALARS_WORDS, np.int32)
    record = words.view(STEP_SCALARS)[0]
    record["lr"] = lr
    rule.prepare(record, max(step + 1 - rule.begun, 1))  # evaluations belong to no step
    record["grad_clip"] = grad_clip
    record["norm_limit"], record["loss_limit"] = limits
    record["seed"] = options.optim.seed & 0xFFFFFFFF
    record["step"] = step
    # The value differs between ranks, so that each rank rounds gradients with different random
    # numbers.
    accumulation = options.batch.grad_accumulation
    record["micro_step"] = mesh.rank * accumulation + number
    # Sequences are numbered in the order of the data, whatever the number of ranks and the batch
    # size. Each rank's part of a divided sequence counts as a sequence.
    dealt_to, place = divmod(mesh.index(*DATA) * accumulation + number, accumulation)
    stride, parts = mesh.size(*DATA), options.batch.context_parallel
    first = place * options.batch.batch_size * stride + dealt_to
    record["sequence_stride"] = stride * parts
    record["first_sequence"] = first * parts + mesh.index("context")
    return words
