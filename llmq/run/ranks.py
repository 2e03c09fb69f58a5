"""Ranks of this process: a rank is a device with its step objects, driven by one thread."""

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import DiskError, LlmqError
from llmq.base.result import Result
from llmq.base.tensor import Tensor
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    FileEntry,
    assemble,
    parts_of,
    read_group,
    write_group,
)
from llmq.comm.collectives import silenced
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.data.tokens import MASKED_TARGET
from llmq.model.generator import Completion, Request
from llmq.model.rings import RESULTS
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.plan.plan import Plan, comm_options, plan_generation
from llmq.run.rehearsal import rehearse, rehearse_evaluation
from llmq.runtime.device import Device
from llmq.runtime.machine import Machine
from llmq.runtime.mesh import DATA
from llmq.runtime.timing import time_ranges
from llmq.runtime.workers import Command, RankPool
from llmq.runtime.world import World
from llmq.state.frozen import Stored
from llmq.state.params import Param
from llmq.state.pieces import SlabPiece, Snapshot
from llmq.state.placement import mesh_of
from llmq.state.rules import AVERAGE, FIRST
from llmq.state.rules.rule import OptimizerState

T = TypeVar("T")


class Rank:
    """Holds the objects of one rank, which only the rank's thread uses, except for metadata."""

    def __init__(self, dev: Device, beat: Callable[[], None]):
        """beat: function to call during a long command, as a sign of life for the watchdog."""
        self.dev, self.beat = dev, beat
        self.step: Step
        self.micro_step = 0  # number of the micro-step that is being enqueued, for diagnosis

    def warm_up(self, model: ModelConfig, seed: int) -> None:
        """Run a training step without the other ranks, drop its results, and capture all CUDA
        graphs. CUDA loads kernels only while the GPU is idle, sometimes under a lock of the
        process. Loading kernels in a step whose streams wait for other ranks would deadlock."""
        with silenced(self.dev), self.dev.without_graphs():
            self.step.weights.init(model, seed)
            rehearse(self.step)
            self.dev.synchronize()
        with self.dev.capture_only():
            rehearse(self.step)
            self.reset()
            rehearse_evaluation(self.step)  # the first evaluation, before any step
            self.dev.synchronize()

    def reset(self) -> None:
        """Clear the state that steps change and loading weights does not: scale histories,
        moments."""
        histories = self.step.extra_state().items()
        self.step.load_extra_state({name: [0.0] * len(values) for name, values in histories})
        self.step.load_extra_state({})  # loads what a checkpoint without histories has
        self.step.optimizer.zero_moments()

    def evaluate(self, batches: Iterable[Batch]) -> Result:
        """Return the mean loss over the batches of all ranks."""
        return self.step.evaluate(self.counted(batches))

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; note each batch's number, and give a sign of life to the watchdog."""
        for self.micro_step, batch in enumerate(batches):
            self.beat()
            yield batch

    def pieces(self, group: str) -> list[SlabPiece]:
        """Return the parts of a tensor group that lie on this rank. group: a key of Step.state, or
        "gradients"."""
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
        """Write this rank's files of a checkpoint; a thread for each file hashes and writes."""
        lock, groups = threading.Lock(), self.step.stored_state()

        def fetch(tensor: Tensor) -> np.ndarray:
            with lock:
                return self.dev.download(tensor)

        def write(group: str) -> FileEntry:
            return write_group(fetch, writer, group, groups[group], self.beat)

        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(write, groups))

    def read(self, reader: CheckpointReader) -> None:
        """Read this rank's part of a checkpoint, which any number of ranks may have written and
        whose formats the caller has checked. All ranks call this method. Moments of another update
        rule start at 0."""
        self.step.turn(max(reader.step - 1, 0))  # the checkpoint has the moments of this step
        optimizer = self.step.optimizer
        goes_on = reader.rule is type(optimizer.rule)
        moments = {*optimizer.moment_groups(), *optimizer.scale_groups(), *optimizer.matrix_states}
        for group, pieces in self.step.stored_state().items():
            there = goes_on or group not in moments
            if group in (AVERAGE.group, FIRST.group):
                there = group in reader.groups
            if there:
                read_group(self.dev, reader, group, pieces, self.beat)
                continue
            for piece in pieces:
                self.dev.zero(piece.tensor)
        self.step.load_extra_state(reader.manifest.state)
        if not goes_on:
            optimizer.rule.begun = reader.step
        for moment in (AVERAGE, FIRST):
            if moment.group not in reader.groups:
                optimizer.begin_average(self.step.weights, moment)
        self.step.weights.refresh()

    def load(
        self, read: Callable[[Param], np.ndarray | None], stored: Stored | None = None
    ) -> None:
        """Load the weights; all ranks call this method. read: function that returns a whole
        parameter, or None for a parameter to initialize. stored: functions that read blocks in code
        format from files."""

        def noted(fn: Callable[..., T]) -> Callable[..., T]:
            def call(*args: Any) -> T:
                self.beat()
                return fn(*args)

            return call

        fresh = (self.step.config, self.step.options.optim.seed)
        self.step.weights.load(noted(read), fresh, stored and Stored(*map(noted, stored)))
        self._begin()

    def init(self, model: ModelConfig, seed: int, *, zero_projections: bool) -> None:
        self.step.weights.init(model, seed, zero_projections=zero_projections)
        self._begin()

    def _begin(self) -> None:
        """Compute the state that begins with the first weights: averages, magnitudes of adapters
        (DoRA), and the reference model's weights."""
        options = self.step.options.model
        if options.lora_dora and options.adapter is None:
            self.step.model.begin_magnitudes()
        for moment in (AVERAGE, FIRST):
            self.step.optimizer.begin_average(self.step.weights, moment)

    def exchange_average(self, moment: OptimizerState = AVERAGE, *, back: bool) -> None:
        """Exchange the weights with their average or with FIRST; back=True reverses the exchange.
        All ranks call this method."""
        if self.step.snapshot is not None:
            self.step.snapshot.hold()  # the snapshot's thread may still copy from the device
        self.step.optimizer.exchange_average(self.step.weights, moment, back=back)


# ------------------------------------------------------------------------------------------------


class Rounds:
    """Counts the batches of an evaluation. All ranks take the same number of batches, even if the
    evaluation is cut short, because every batch runs collectives."""

    def __init__(self, world: World, count: int, stopped: Callable[[], bool]):
        """count: batches of each rank. stopped: called before each batch; True sets `cut`. With
        `cut` each rank stops at the number of batches that the fastest rank has taken. Several
        processes decide together before each round."""
        self.cut = False
        self._count, self._stopped = count, stopped
        self._taken = dict.fromkeys(world.local, 0)
        self._world = world
        self._decided = 0  # rounds that all processes have agreed on
        self._lock = threading.Lock()

    def of(self, rank: int) -> Iterator[None]:
        """Yield None once for every batch that this rank takes."""
        while self._another(rank):
            yield

    def _another(self, rank: int) -> bool:
        with self._lock:
            if not self.cut:
                self._decide(self._taken[rank], self._stopped())
            if self._taken[rank] == self._count:
                return False
            self._taken[rank] += 1
            return True

    def _decide(self, taken: int, cut: bool) -> None:
        """Decide whether ranks go on after `taken` batches. cut: True if this process must stop."""
        if self._world.several:
            if taken < self._decided:
                return
            self._decided += 1
            cut = any(self._world.gather(cut))
        self.cut = cut
        if cut:
            self._count = max(self._taken.values())


IDLE_SECONDS = 2.0  # longest wait in seconds of a closing rank for the devices of other ranks


class CutShort(Exception):
    """Raised if a signal ended the work early."""


class Ranks:
    """Runs commands on the ranks of this process, each rank in its own thread; a single rank runs
    in the caller's thread.

    All processes of a run make the same calls, each for its own ranks. An error in one rank stops
    all ranks, and every later call raises the error. world: all processes. world_size: number of
    ranks of all processes. backend: name of the attention backend. pool: threads that run the
    commands. links: measured links between GPUs, or None.
    """

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        config: TrainConfig,
        model: ModelConfig,
        backend: str = "native",
    ):
        """plan: the plan of `config`. Raises LlmqError for unsuitable devices or links between
        them."""
        self.world, self.world_size, self.backend = machine.world, machine.world_size, backend
        self._ranks: list[Rank | None] = [None] * self.world.count
        self._enqueued = 0
        self._commands: dict[int, Command[int]] = {}  # the last RESULTS commands, by ticket
        self._batches: dict[int, Sequence[Sequence[Batch]]] = {}  # batches of steps, by ticket
        several = self.world.several
        self.pool = RankPool(
            self.world.count,
            watchdog=0 if several else config.watchdog,
            describe=self._describe,
            world=self.world,
        )
        if several:
            self.world.mpi.watch(self.pool, self._waits)

        exchange, sizes = comm_options(config, plan.placement), plan.usage.sizes
        of_step = (config, model, machine.spec, backend, plan)
        self._plan_generation = partial(plan_generation, *of_step)

        def open_device(rank: int) -> None:
            shape = (config, self.world_size, self.world.num_machines)
            mesh = mesh_of(*shape, self.world.base + rank)
            dev = machine.open(
                sizes,
                mesh=mesh,
                graphs=config.use_cuda_graphs,
                tune=config.tune,
                folders=[Path(folder) for folder in config.offload_dir],
            )
            self._ranks[rank] = Rank(dev, self.pool.beat)

        def allocate(rank: Rank) -> None:
            rank.step = Step(
                *(rank.dev, model, config.for_step, plan.placement, backend),
                background=config.ckpt_background,
            )

        def connect_all(_: int) -> LinkTable | None:
            return connect(self.devices, exchange, self.pool.workers, self.world)

        try:
            self.pool.run("opening the device", open_device)
            (self.links,) = self.pool.run("connecting the devices", connect_all, {0: 0})
            self.run("allocating", allocate)
            if self.world_size > 1 and machine.kind == "cuda":
                self.run("warming up", lambda rank: rank.warm_up(model, config.seed))
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> list[Device]:
        """Return the devices of this process, by rank."""
        return [rank.dev for rank in self._ranks]

    @property
    def first(self) -> Rank:
        """Return the first rank of this process."""
        return self._ranks[0]

    def _waits(self, index: int) -> bool:
        rank = self._ranks[index]
        return rank is not None and rank.dev.mesh.waits_for is not None

    def _describe(self, index: int) -> str:
        rank = self._ranks[index]
        if rank is None:
            return "no device yet"
        last = rank.dev.last_operation
        waits = rank.dev.mesh.waits_for
        waiting = f", waits for {waits}" if waits else ""
        return f"micro-step {rank.micro_step}, last collective enqueued: {last}{waiting}"

    def run(self, name: str, fn: Callable[[Rank], T]) -> list[T]:
        """Call fn with every rank of this process, in the rank's thread. Returns the results by
        rank. name: name of the command, for diagnosis."""
        return self.pool.run(name, fn, dict(enumerate(self._ranks)))

    def run_first(self, name: str, fn: Callable[[Rank], T]) -> T:
        """Call fn with the first rank of this process."""
        return self.pool.run(name, fn, {0: self.first})[0]

    # -- steps -----------------------------------------------------------------------------------

    def train(
        self,
        step: int,
        lr: float,
        grad_clip: float,
        batches: Sequence[Sequence[tuple[int, Batch]]],
        limits: Limits = NO_LIMITS,
    ) -> int:
        """Enqueue an optimizer step on all ranks without waiting. Returns the step's ticket.

        batches: the micro-batches of each rank of this process, each with the number that
        `rings.scalars_of` takes.
        """
        calls: dict[int, Callable[[], int]] = {}
        own = []
        for i, rank in enumerate(self._ranks):
            numbers, of_rank = zip(*batches[i], strict=True)
            counted = rank.counted(of_rank)
            calls[i] = partial(rank.step.train, step, lr, grad_clip, counted, limits, numbers)
            own.append(of_rank)
        ticket = self._ticket(self.pool.post(f"step {step}", operator.call, calls))
        self._batches[ticket] = own
        return ticket

    def batches_of(self, ticket: int) -> Sequence[Sequence[Batch]]:
        """Return this process's batches, by rank, of one of the last RESULTS steps."""
        return self._batches[ticket]

    def padding_of(self, ticket: int) -> int:
        """Return the padding positions of all ranks in the step with this ticket; see Batch."""
        own = sum(batch.padding for batches in self._batches[ticket] for batch in batches)
        return sum(self.world.gather(own)) // self.first.dev.mesh.size("context")

    def result(self, ticket: int) -> Result:
        """Return the result, over all ranks, of the step with this ticket, after waiting for the
        step."""
        command = self._commands.get(ticket)
        if command is None:
            raise ValueError(f"result: ticket {ticket} is not among the last {RESULTS}")
        return self.run_first("waiting", lambda rank: rank.step.result(command.results[0]))

    def evaluate(self, batches: Sequence[Iterable[Batch]]) -> Result:
        """Return the mean loss over the batches of all ranks. batches: an iterable for each
        rank."""
        calls = {i: partial(rank.evaluate, batches[i]) for i, rank in enumerate(self._ranks)}
        command = self.pool.post("evaluation", operator.call, calls)
        self._ticket(command)
        return self.pool.wait(command)[0]

    def share(
        self,
        name: str,
        batches: Sequence[Callable[[], Batch]],
        work: Callable[[Rank, int, Batch], T],
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[T] | None:
        """Divide batches among all ranks. Returns the results of work(rank, index, batch) by batch,
        on all processes. A rank without a batch gets an empty batch with index -1, because all
        ranks must run the collectives. stopped: function called before each batch; True makes the
        result None."""
        several = self.first.dev.mesh.size(*DATA)
        rounds = Rounds(self.world, -(-len(batches) // several), stopped)
        found: dict[int, T] = {}

        def run(rank: Rank) -> None:
            shape = rank.step.inputs.tokens.shape
            nothing = Batch(np.zeros(shape, np.int32), np.full(shape, MASKED_TARGET, np.int32))
            for number, _ in enumerate(rounds.of(rank.dev.mesh.rank)):
                self.pool.beat()
                index = number * several + rank.dev.mesh.index(*DATA)
                if index < len(batches):
                    found[index] = work(rank, index, batches[index]())
                else:
                    work(rank, -1, nothing)

        self.run(name, run)
        if rounds.cut:
            return None
        of_all = {index: made for own in self.world.gather(found) for index, made in own.items()}
        return [of_all[index] for index in range(len(batches))]

    def generate(
        self, requests: Sequence[Request], stopped: Callable[[], bool] = lambda: False
    ) -> list[Completion]:
        """Complete the requests, in the memory of the step's activations. Each rank completes an
        equal share, and all processes get all completions. stopped: called before each token; True
        raises CutShort. Raises ConfigError if the memory is too small, LlmqError for predictions
        that are NaN."""
        part, sizes = -(-len(requests) // self.world_size), self._generation
        found: dict[int, Completion] = {}
        failed: list[LlmqError] = []  # raised after the loop: no rank may stop alone

        def goes_on() -> bool:
            self.pool.beat()
            return stopped()

        def work(rank: Rank) -> None:
            first = part * rank.dev.mesh.rank
            with rank.step.generating(sizes) as generator:
                try:
                    for index, made in generator.run(requests[first : first + part], goes_on):
                        found[first + index] = made
                except LlmqError as error:
                    failed.append(error)

        self.run("generating", work)
        of_processes = self.world.gather((found, failed))
        for error in (error for _, errors in of_processes for error in errors):
            raise error
        of_all = {index: made for own, _ in of_processes for index, made in own.items()}
        if len(of_all) < len(requests):
            raise CutShort
        return [of_all[index] for index in range(len(requests))]

    @cached_property
    def _generation(self) -> dict[str, int]:
        """Return the memory sizes of each rank's `Generator`."""
        sizes = self._plan_generation().sizes
        if self.world_size > 1 and self.first.dev.kind == "cuda":
            self.run("warming up", lambda rank: rank.step.warm_up_generation(sizes))
        return sizes

    def _ticket(self, command: Command) -> int:
        ticket = self._enqueued
        self._enqueued += 1
        self._commands[ticket] = command
        self._commands.pop(ticket - RESULTS, None)
        self._batches.pop(ticket - RESULTS, None)
        return ticket

    @contextmanager
    def time_parts(self) -> Iterator[list[list[tuple[str, float]]]]:
        """Time the parts of all work within the context, which runs without CUDA graphs.

        Yields a list for each rank, to which the end of the context adds (name, milliseconds) of
        each part.
        """
        stacks = {rank: ExitStack() for rank in self.world.local}

        def begin(rank: Rank) -> list[tuple[str, float]]:
            return stacks[rank.dev.mesh.rank].enter_context(time_ranges(rank.dev))

        timings = self.run("timing", begin)
        try:
            yield timings
        finally:
            self.run("timing", lambda rank: stacks[rank.dev.mesh.rank].close())

    # -- state -----------------------------------------------------------------------------------

    def write(self, directory: Path, step: int) -> tuple[CheckpointWriter, list[FileEntry]]:
        """Write the files of all ranks, in parallel. Returns the writer that commits the files, and
        the files' entries. A DiskError drops this checkpoint, but does not stop the ranks."""
        size = self.world_size
        writers = {r: CheckpointWriter(directory, step, r, size) for r in self.world.local}
        failed: list[DiskError] = []

        def write(rank: Rank) -> list[FileEntry]:
            try:
                return rank.write(writers[rank.dev.mesh.rank])
            except DiskError as error:
                failed.append(error)
                return []

        def write_all() -> list[list[FileEntry]]:
            files = self.run("checkpoint", write)
            if failed:
                raise failed[0]
            return files

        try:
            of_processes = self.world.together(write_all)
        except BaseException:
            writers[self.world.base].discard()
            raise
        files = [entry for each in of_processes for entries in each for entry in entries]
        return writers[self.world.base], files

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Return copies of the state of this process's ranks, by rank, for --ckpt-background."""
        return {rank.dev.mesh.rank: rank.step.snapshot for rank in self._ranks}

    def extra_state(self) -> dict[str, Any]:
        """Return the values for a checkpoint's manifest, which are the same on all ranks."""
        return self.run_first("reading scales", lambda rank: rank.step.extra_state())

    def load(
        self, read: Callable[[Param], np.ndarray | None], stored: Stored | None = None
    ) -> None:
        """Load the weights. read, stored: see Rank.load; the threads of all ranks call both
        functions."""
        self.run("loading weights", lambda rank: rank.load(read, stored))

    def read_param(self, group: str, param: Param, *, to_all: bool = True) -> np.ndarray:
        """Return a host copy of one whole parameter, with padding.

        All processes call this method. to_all: True if all processes get the copy; False: the first
        process only.
        """
        name = f"reading {param.name}"
        of_ranks = self.run(name, lambda rank: parts_of(rank.dev, param, rank.pieces(group)))
        own = [part for of_rank in of_ranks for part in of_rank]
        parts = self.world.gather_arrays(own, to_all=to_all)
        return assemble(param, parts) if to_all or self.world.first else np.empty(0)

    def first_reads(self, fn: Callable[[Callable[[Param], np.ndarray]], T]) -> T:
        """Call fn(read) on the first process; read(param) returns a whole parameter. The other
        processes send the shards of the parameter."""

        def read(param: Param) -> np.ndarray:
            self.world.share(param)
            return self.read_param("weights", param, to_all=False)

        def whole() -> T:
            try:
                return fn(read)
            finally:
                self.world.share(None)

        while not self.world.first and (asked := self.world.share(None)) is not None:
            self.read_param("weights", asked, to_all=False)
        return self.world.on_first(whole)

    def everywhere(self, name: str, fn: Callable[[Rank], T]) -> list[T]:
        """Like `run`, but return the results of all processes' ranks; results must be picklable."""
        results = self.world.gather(self.run(name, fn))
        return [result for of_process in results for result in of_process]

    def close(self) -> None:
        """Free the devices and end the threads. A second call changes nothing."""
        idle = threading.Barrier(self.world.count)

        def close(index: int) -> None:
            rank = self._ranks[index]
            try:
                if rank is not None:
                    rank.dev.synchronize()
            finally:
                # A peer may use this rank's memory until all ranks are idle, even after ranks were
                # stopped.
                with suppress(threading.BrokenBarrierError):
                    idle.wait(IDLE_SECONDS)
                if rank is not None:
                    rank.dev.close()
                self._ranks[index] = None  # drops the last reference, which frees CPU memory

        self.pool.close(close)
        self._commands.clear()
