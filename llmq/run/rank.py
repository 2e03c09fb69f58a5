"""One rank of a run: its device and the step over it."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    FileEntry,
    read_group,
    write_group,
)
from llmq.comm.collectives import silenced
from llmq.model.rings import Result
from llmq.model.step import Step
from llmq.runtime.device import Device
from llmq.state.frozen import Elements
from llmq.state.params import Param
from llmq.state.pieces import SlabPiece
from llmq.state.rules import AVERAGE
from llmq.state.rules.rule import ROWS


class Rank:
    """The objects that one rank's thread owns. Used in that thread only, except for metadata."""

    def __init__(self, dev: Device, beat: Callable[[], None]):
        """beat: called to show that a long command goes on."""
        self.dev, self.beat = dev, beat
        self.step: Step
        self.micro_step = 0  # the one that is being enqueued, for diagnosis

    def warm_up(self, model: ModelConfig, seed: int) -> None:
        """Do everything once without the other ranks, whatever comes out; capture all graphs.
        Loading and tuning waits until the GPU is idle, some while holding a lock of the process,
        which would deadlock where streams wait for other ranks."""
        with silenced(self.dev), self.dev.without_graphs():
            self.step.weights.init(model, seed)
            _rehearse(self.step)
            self.dev.synchronize()
        with self.dev.capture_only():
            _rehearse(self.step)
            self.reset()
            _rehearse_evaluation(self.step)  # as before the first step
            self.dev.synchronize()

    def reset(self) -> None:
        """Undo what steps change and loading weights does not."""
        histories = self.step.extra_state().items()
        self.step.load_extra_state({name: [0.0] * len(values) for name, values in histories})
        self.step.load_extra_state({})  # as if there were none
        self.step.optimizer.zero_moments()

    def evaluate(self, batches: Iterable[Batch]) -> Result:
        """The mean loss over the batches of all ranks."""
        return self.step.evaluate(self.counted(batches))

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each one noted when it is taken."""
        for self.micro_step, batch in enumerate(batches):
            self.beat()
            yield batch

    def pieces(self, group: str) -> list[SlabPiece]:
        """The pieces that this rank holds of a group of Step.state, or of the "gradients"."""
        state = self.step.state()
        if group != "gradients":
            return state[group]
        shards = self.step.grads.shard
        return [
            piece._replace(tensor=shards[piece.slab.name])
            for piece in state["weights"]
            if piece.slab.name in shards
        ]

    def write(self, writer: CheckpointWriter) -> list[FileEntry]:
        """Write this rank's files of a checkpoint."""
        groups = self.step.stored_state().items()
        return [write_group(self.dev.download, writer, *group, self.beat) for group in groups]

    def read(self, reader: CheckpointReader) -> None:
        """Take this rank's part of a checkpoint; all ranks do. Moments of another rule begin
        anew."""
        optimizer = self.step.optimizer
        goes_on = reader.rule is type(optimizer.rule)
        moments = optimizer.moment_groups() | optimizer.scale_groups()
        for group, pieces in self.step.stored_state().items():
            there = goes_on or group not in moments
            if group in (AVERAGE.group, ROWS):
                there = group in reader.groups
            if there:
                read_group(self.dev, reader, group, pieces, self.beat)
                continue
            for piece in pieces:
                self.dev.zero(piece.tensor)
        self.step.load_extra_state(reader.manifest.state)
        if not goes_on:
            optimizer.rule.begun = reader.step
        if AVERAGE.group not in reader.groups:
            optimizer.begin_average(self.step.weights)
        self.step.weights.refresh()

    def load(
        self, read: Callable[[Param], np.ndarray | None], elements: Elements | None = None
    ) -> None:
        """Fill the weights; all ranks do. read: a whole parameter; None: a fresh one. elements: a
        part of one."""

        def noted(param: Param) -> np.ndarray | None:
            self.beat()
            return read(param)

        def noted_elements(param: Param, start: int, stop: int) -> np.ndarray:
            self.beat()
            return elements(param, start, stop)

        fresh = (self.step.config, self.step.options.seed)
        self.step.weights.load(noted, fresh, elements and noted_elements)
        self._begin()

    def init(self, model: ModelConfig, seed: int, *, zero_projections: bool) -> None:
        self.step.weights.init(model, seed, zero_projections=zero_projections)
        self._begin()

    def _begin(self) -> None:
        """Begin what follows from the first weights: averages, magnitudes of adapters (DoRA)."""
        options = self.step.options
        if options.lora_dora and options.adapter is None:
            self.step.model.begin_magnitudes()
        self.step.optimizer.begin_average(self.step.weights)

    def exchange_average(self, *, back: bool) -> None:
        """Let the weights be their average, or give both back; all ranks do."""
        if self.step.snapshot is not None:
            self.step.snapshot.hold()  # which may still copy them
        self.step.optimizer.exchange_average(self.step.weights, back=back)


def _rehearse(step: Step) -> None:
    """Do every kind of micro-step, evaluation and update once, over token 0.

    A step of one micro-step may end an epoch, where no more are left.
    """
    _rehearse_evaluation(step)
    if step.options.only_scores:
        return
    for count in {step.options.grad_accumulation, 1}:
        step.start()
        step.weights.updated()
        for micro_step in sorted({0, min(1, count - 1), count - 1}):
            _rehearse_micro_step(step, micro_step, count)
        step.update()
        _rehearse_evaluation(step)
        _rehearse_micro_step(step, 0, count)  # as the first one after an evaluation


def _rehearse_evaluation(step: Step) -> None:
    """Evaluation directly after an update, and once more."""
    step.weights.updated()
    step.evaluate([_nothing(step)] * 2)


def _rehearse_micro_step(step: Step, micro_step: int, count: int) -> None:
    scalars, last = step.scalars_of(0, micro_step, 0.0, 0.0), micro_step == count - 1
    step.dev.graph(*step.micro_step(micro_step, scalars, _nothing(step), last=last))


def _nothing(step: Step) -> Batch:
    shape = step.tokens.shape
    return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
