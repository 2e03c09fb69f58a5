"""The ranks of a run: for each a thread, a device and the step over it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmq.base.batch import Batch
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import DiskError
from llmq.checkpoint.checkpoint import CheckpointReader, CheckpointWriter, FileEntry
from llmq.checkpoint.shards import assemble, parts_of, read_group, write_group
from llmq.comm.collectives import silenced
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.data.tokens import MASKED_TARGET
from llmq.model.step import RESULTS, Piece, Result, Step
from llmq.plan.plan import Plan, comm_options
from llmq.runtime.device import Device
from llmq.runtime.machine import Machine
from llmq.runtime.timing import time_ranges
from llmq.runtime.workers import Command, RankPool
from llmq.state.params import Param

T = TypeVar("T")
IDLE_SECONDS = 2.0  # that a closing rank waits for the others' devices


class Rank:
    """What one rank's thread owns. Used in that thread only, except for metadata."""

    def __init__(self, dev: Device, beat: Callable[[], None]):
        """beat: called to show that a long command goes on."""
        self.dev, self.beat = dev, beat
        self.step: Step
        self.micro_step = 0  # the one that is being enqueued, for diagnosis

    def warm_up(self, model: ModelConfig, seed: int) -> None:
        """Do everything once without the other ranks, whatever comes out; capture all graphs.

        So all kernels get loaded, all products tuned, all graphs made. These wait until the GPU is
        idle, some while holding a lock of the whole process, and a GPU whose stream waits for
        another rank is not idle before that rank, which may want the same lock, has gone on.
        """
        with silenced(self.dev), self.dev.without_graphs():
            self.step.weights.init(model, seed)
            self.step.rehearse()
            self.dev.synchronize()
        with self.dev.capture_only():
            self.step.rehearse()
            self.reset()
            self.step.rehearse_evaluation()  # as before the first step
            self.dev.synchronize()

    def reset(self) -> None:
        """Undo what steps change and loading weights does not."""
        histories = self.step.extra_state().items()
        self.step.load_extra_state({name: [0.0] * len(values) for name, values in histories})
        self.step.load_extra_state({})  # as if there were none
        for group, pieces in self.step.state().items():
            for piece in pieces if group.startswith("adam") else []:
                self.dev.zero(piece.tensor)

    def finish(self) -> None:
        """Wait until all that was enqueued is done."""
        self.dev.synchronize()

    def evaluate(self, batches: Iterable[Batch]) -> Result:
        """The mean loss over the batches of all ranks."""
        return self.step.evaluate(self.counted(batches))

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each one noted when it is taken."""
        for self.micro_step, batch in enumerate(batches):
            self.beat()
            yield batch

    def pieces(self, group: str) -> list[Piece]:
        """What this rank holds of a group of Step.state, or of the "gradients"."""
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
        return [write_group(self.dev, writer, *group, self.beat) for group in groups]

    def read(self, reader: CheckpointReader) -> None:
        """Take this rank's part of a checkpoint; all ranks do."""
        for group, pieces in self.step.stored_state().items():
            read_group(self.dev, reader, group, pieces, self.beat)
        self.step.load_extra_state(reader.manifest.state)
        self.step.weights.refresh()

    def load(self, read: Callable[[Param], np.ndarray | None]) -> None:
        """Fill the weights; all ranks do. read: a whole parameter; None: a fresh one."""

        def noted(param: Param) -> np.ndarray | None:
            self.beat()
            return read(param)

        self.step.weights.load(noted, (self.step.config, self.step.options.seed))


class Rounds:
    """The batches of an evaluation, of which all ranks take as many, also if it is cut short.

    Otherwise those with fewer would miss the collectives of the others.
    """

    def __init__(
        self,
        world_size: int,
        count: int,
        stopped: Callable[[], bool],
        seconds: float = math.inf,
    ):
        """stopped: asked before each batch. Once it says yes, ranks only catch up; then `cut` is
        true. After so many seconds they do so too, but not before the first batch.
        """
        self.cut, self._short = False, False
        self._count, self._stopped = count, stopped
        self._end = time.monotonic() + seconds
        self._taken = [0] * world_size
        self._lock = threading.Lock()

    def of(self, rank: int) -> Iterator[None]:
        """One item for every batch that the rank is to take."""
        while self._another(rank):
            yield

    def _another(self, rank: int) -> bool:
        with self._lock:
            if not self._short:
                self.cut = self._stopped()
                most = max(self._taken)
                late = time.monotonic() > self._end
                self._short = self.cut or (late and 0 < most < self._count)
                self._count = most if self._short else self._count
            if self._taken[rank] == self._count:
                return False
            self._taken[rank] += 1
            return True


class Ranks:
    """All ranks, driven from one thread, which with one rank is that rank's thread.

    An error in one rank stops all, names the rank, and is raised by every later call.
    pool: runs the commands. links: what was measured between the GPUs, None without any.
    """

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        config: TrainConfig,
        model: ModelConfig,
        backend: str = "native",
    ):
        """plan: of config. Raises LlmqError where the devices or their links do not serve."""
        self.world_size = machine.world_size
        self._ranks: list[Rank | None] = [None] * self.world_size
        self._enqueued = 0
        self._commands: dict[int, Command[int]] = {}  # the last RESULTS, by ticket
        self._batches: dict[int, Sequence[Sequence[Batch]]] = {}  # theirs, if they are steps
        self.pool = RankPool(self.world_size, watchdog=config.watchdog, describe=self._describe)

        exchange, sizes = comm_options(config, plan.placement), plan.usage.sizes

        def open_device(rank: int) -> None:
            dev = machine.open(sizes, rank=rank, graphs=config.use_cuda_graphs, tune=config.tune)
            self._ranks[rank] = Rank(dev, self.pool.beat)

        def allocate(rank: Rank) -> None:
            rank.step = Step(rank.dev, model, config, plan.placement, backend)

        def connect_all(_: int) -> LinkTable | None:
            return connect(self.devices, exchange, self.pool.workers)

        try:
            self.pool.run("opening the device", open_device)
            (self.links,) = self.pool.run("connecting the devices", connect_all, [0])
            self.run("allocating", allocate)
            if self.world_size > 1 and machine.kind == "cuda":
                self.run("warming up", lambda rank: rank.warm_up(model, config.seed))
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> list[Device]:
        """By rank."""
        return [rank.dev for rank in self._ranks]

    @property
    def first(self) -> Rank:
        """Rank 0."""
        return self._ranks[0]

    def _describe(self, index: int) -> str:
        rank = self._ranks[index]
        if rank is None:
            return "no device yet"
        last = rank.dev.last_operation
        return f"micro-step {rank.micro_step}, last collective enqueued: {last}"

    def run(self, name: str, fn: Callable[[Rank], T]) -> list[T]:
        """fn on every rank, in its thread; the results by rank. name: for diagnosis."""
        return self.pool.run(name, lambda rank: fn(self._ranks[rank]))

    def run_first(self, name: str, fn: Callable[[Rank], T]) -> T:
        """fn on rank 0."""
        return self.pool.run(name, lambda rank: fn(self._ranks[rank]), [0])[0]

    # -- steps -----------------------------------------------------------------------------------

    def train(
        self,
        step: int,
        lr: float,
        grad_clip: float,
        batches: Sequence[Sequence[Batch]],
        limits: Limits = NO_LIMITS,
    ) -> int:
        """Enqueue an optimizer step on all ranks, without waiting; returns its ticket.

        batches: the micro-batches of each rank.
        """

        def enqueue(index: int) -> int:
            rank = self._ranks[index]
            return rank.step.train(step, lr, grad_clip, rank.counted(batches[index]), limits)

        ticket = self._ticket(self.pool.post(f"step {step}", enqueue))
        self._batches[ticket] = batches
        return ticket

    def batches_of(self, ticket: int) -> Sequence[Sequence[Batch]]:
        """The micro-batches of each rank in the step with this ticket, one of the last RESULTS."""
        return self._batches[ticket]

    def padding_of(self, ticket: int) -> int:
        """Positions of all ranks in that step that reports do not count, see Batch."""
        return sum(batch.padding for batches in self._batches[ticket] for batch in batches)

    def result(self, ticket: int) -> Result:
        """What the step with this ticket measured on all ranks; waits until it is done."""
        command = self._commands.get(ticket)
        if command is None:
            raise ValueError(f"result: ticket {ticket} is not among the last {RESULTS}")
        return self.run_first("waiting", lambda rank: rank.step.result(command.results[0]))

    def evaluate(self, batches: Sequence[Iterable[Batch]]) -> Result:
        """The mean loss over the batches of all ranks; each rank's thread takes its own."""
        command = self.pool.post("evaluation", lambda r: self._ranks[r].evaluate(batches[r]))
        self._ticket(command)
        return self.pool.wait(command)[0]

    def share(
        self,
        name: str,
        batches: Sequence[Callable[[], Batch]],
        work: Callable[[Rank, int, Batch], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Call work(rank, index, batch) for each of these batches, as many at a time as ranks.

        Where the last round has too few, the others get a batch of nothing, whose index is -1, so
        that all take part in collectives. stopped: asked before each batch; returns whether it
        never said yes.
        """
        world = self.world_size
        rounds = Rounds(world, -(-len(batches) // world), stopped)

        def run(rank: Rank) -> None:
            shape = rank.step.tokens.shape
            nothing = Batch(np.zeros(shape, np.int32), np.full(shape, MASKED_TARGET, np.int32))
            for number, _ in enumerate(rounds.of(rank.dev.rank)):
                self.pool.beat()
                index = number * world + rank.dev.rank
                if index < len(batches):
                    work(rank, index, batches[index]())
                else:
                    work(rank, -1, nothing)

        self.run(name, run)
        return not rounds.cut

    def _ticket(self, command: Command) -> int:
        ticket = self._enqueued
        self._enqueued += 1
        self._commands[ticket] = command
        self._commands.pop(ticket - RESULTS, None)
        self._batches.pop(ticket - RESULTS, None)
        return ticket

    @contextmanager
    def time_parts(self) -> Iterator[list[list[tuple[str, float]]]]:
        """Within the block, time the parts of what runs: afterwards name and milliseconds, by rank.

        Runs without graphs.
        """
        stacks = [ExitStack() for _ in range(self.world_size)]

        def begin(rank: Rank) -> list[tuple[str, float]]:
            return stacks[rank.dev.rank].enter_context(time_ranges(rank.dev))

        timings = self.run("timing", begin)
        try:
            yield timings
        finally:
            self.run("timing", lambda rank: stacks[rank.dev.rank].close())

    # -- state -----------------------------------------------------------------------------------

    def write(self, directory: Path, step: int) -> tuple[CheckpointWriter, list[FileEntry]]:
        """Write the files of all ranks, in parallel; the writer that commits, and what to.

        DiskError stops no rank: they go on, without this checkpoint.
        """
        ranks = range(self.world_size)
        writers = [CheckpointWriter(directory, step, r, self.world_size) for r in ranks]
        failed: list[DiskError] = []

        def write(rank: Rank) -> list[FileEntry]:
            try:
                return rank.write(writers[rank.dev.rank])
            except DiskError as error:
                failed.append(error)
                return []

        try:
            files = self.run("checkpoint", write)
            if failed:
                raise failed[0]
        except BaseException:
            writers[0].discard()
            raise
        return writers[0], [entry for entries in files for entry in entries]

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint's manifest holds: the same on all ranks."""
        return self.run_first("reading scales", lambda rank: rank.step.extra_state())

    def read(self, reader: CheckpointReader) -> None:
        """Take the state of a checkpoint of any number of ranks, in formats that were checked."""
        self.run("loading the checkpoint", lambda rank: rank.read(reader))

    def load(self, read: Callable[[Param], np.ndarray | None]) -> None:
        """Fill the weights. read: a whole parameter, None: a fresh one; called by all threads."""
        self.run("loading weights", lambda rank: rank.load(read))

    def init(self, model: ModelConfig, seed: int, *, zero_projections: bool) -> None:
        """Random weights."""
        self.run(
            "initializing weights",
            lambda rank: rank.step.weights.init(model, seed, zero_projections=zero_projections),
        )

    def read_param(self, group: str, param: Param) -> np.ndarray:
        """A host copy of one whole parameter, padding included; only one is in memory."""
        name = f"reading {param.name}"
        parts = self.run(name, lambda rank: parts_of(rank.dev, param, rank.pieces(group)))
        return assemble(param, [part for of_rank in parts for part in of_rank])

    def close(self) -> None:
        """Free the devices and end the threads. Once more changes nothing."""
        idle = threading.Barrier(self.world_size)

        def close(index: int) -> None:
            rank = self._ranks[index]
            try:
                if rank is not None:
                    rank.dev.synchronize()
            finally:
                # Until all are idle, a peer may use this rank's memory, also if ranks were stopped.
                with suppress(threading.BrokenBarrierError):
                    idle.wait(IDLE_SECONDS)
                if rank is not None:
                    rank.dev.close()

        self.pool.close(close)
