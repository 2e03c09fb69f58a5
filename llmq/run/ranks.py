"""The ranks of a run that this process has, each in a thread of its own."""

import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import DiskError
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    FileEntry,
    assemble,
    parts_of,
)
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.data.tokens import MASKED_TARGET
from llmq.model.rings import RESULTS, Result
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.plan.plan import Plan, comm_options
from llmq.run.rank import Rank
from llmq.runtime.device import Device
from llmq.runtime.machine import Machine
from llmq.runtime.mesh import DATA, World
from llmq.runtime.processes import processes
from llmq.runtime.timing import time_ranges
from llmq.runtime.workers import Command, RankPool
from llmq.state.frozen import Elements
from llmq.state.params import Param
from llmq.state.pieces import Snapshot
from llmq.state.placement import mesh_of


class Rounds:
    """The batches of an evaluation, of which all ranks take as many, also if it is cut short.

    Otherwise those with fewer would miss the collectives of the others.
    """

    def __init__(
        self, world: World, count: int, stopped: Callable[[], bool], seconds: float = math.inf
    ):
        """stopped: asked before each batch. Once it says yes, ranks only catch up; then `cut` is
        true. After so many seconds they do so too, but not before the first batch. Where ranks are
        of several processes, all of them decide before each round what the others do, too.
        """
        self.cut, self._short = False, False
        self._count, self._stopped = count, stopped
        self._end = time.monotonic() + seconds
        self._taken = dict.fromkeys(world.local, 0)
        self._several = world.several
        self._decided = 0  # rounds that all processes have agreed on
        self._lock = threading.Lock()

    def of(self, rank: int) -> Iterator[None]:
        """One item for every batch that the rank, one of this process, is to take."""
        while self._another(rank):
            yield

    def _another(self, rank: int) -> bool:
        with self._lock:
            if not self._short:
                self._decide(self._taken[rank], self._stopped(), time.monotonic() > self._end)
            if self._taken[rank] == self._count:
                return False
            self._taken[rank] += 1
            return True

    def _decide(self, taken: int, cut: bool, late: bool) -> None:
        """Whether it goes on, for a rank that has taken so many. cut, late: as this process sees
        it now."""
        if self._several:
            if taken < self._decided:
                return
            self._decided += 1
            answers = processes().gather((cut, late))
            cut, late = (any(answer[i] for answer in answers) for i in (0, 1))
        self.cut = cut
        most = max(self._taken.values())
        self._short = cut or (late and 0 < most < self._count)
        self._count = most if self._short else self._count


T = TypeVar("T")
IDLE_SECONDS = 2.0  # that a closing rank waits for the others' devices


class CutShort(Exception):
    """A signal has ended what was asked for."""


class Ranks:
    """The ranks of this process, driven from one thread, which with one rank is that rank's thread.

    Several processes drive their own, and make the same calls. An error in one rank stops all, and
    is raised by every later call. world, world_size: of all processes. pool: runs the commands.
    links: what was measured between the GPUs, None without any.
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
        self.world, self.world_size = machine.world, machine.world_size
        self._ranks: list[Rank | None] = [None] * self.world.count
        self._enqueued = 0
        self._commands: dict[int, Command[int]] = {}  # the last RESULTS, by ticket
        self._batches: dict[int, Sequence[Sequence[Batch]]] = {}  # theirs, if they are steps
        several = processes().count > 1
        self.pool = RankPool(
            self.world.count,
            watchdog=0 if several else config.watchdog,
            describe=self._describe,
            world=self.world,
        )
        processes().watch(self.pool, self._waits)

        exchange, sizes = comm_options(config, plan.placement), plan.usage.sizes

        def open_device(rank: int) -> None:
            shape = (config, self.world_size, self.world.num_machines)
            mesh = mesh_of(*shape, self.world.base + rank)
            how = {"graphs": config.use_cuda_graphs, "tune": config.tune}
            dev = machine.open(sizes, mesh=mesh, **how)
            self._ranks[rank] = Rank(dev, self.pool.beat)

        def allocate(rank: Rank) -> None:
            rank.step = Step(rank.dev, model, config, plan.placement, backend)

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
        """The devices of this process, by rank."""
        return [rank.dev for rank in self._ranks]

    @property
    def first(self) -> Rank:
        """The first one of this process."""
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
        """fn on every rank of this process, in its thread; the results by rank. name: for
        diagnosis."""
        return self.pool.run(name, fn, dict(enumerate(self._ranks)))

    def run_first(self, name: str, fn: Callable[[Rank], T]) -> T:
        """fn on the first rank of this process."""
        return self.pool.run(name, fn, {0: self.first})[0]

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

        batches: the micro-batches of each rank of this process, equally many.
        """
        count = len(batches[0])
        calls = {
            i: partial(
                rank.step.train, step, lr, grad_clip, rank.counted(batches[i]), limits, count
            )
            for i, rank in enumerate(self._ranks)
        }
        ticket = self._ticket(self.pool.post(f"step {step}", operator.call, calls))
        self._batches[ticket] = batches
        return ticket

    def batches_of(self, ticket: int) -> Sequence[Sequence[Batch]]:
        """Those that this process took for the step with this ticket, one of the last RESULTS."""
        return self._batches[ticket]

    def padding_of(self, ticket: int) -> int:
        """Positions of all ranks in that step that reports do not count, see Batch."""
        own = sum(batch.padding for batches in self._batches[ticket] for batch in batches)
        return sum(processes().gather(own))

    def result(self, ticket: int) -> Result:
        """The result of the step with this ticket on all ranks; waits until it is done."""
        command = self._commands.get(ticket)
        if command is None:
            raise ValueError(f"result: ticket {ticket} is not among the last {RESULTS}")
        return self.run_first("waiting", lambda rank: rank.step.result(command.results[0]))

    def evaluate(self, batches: Sequence[Iterable[Batch]]) -> Result:
        """The mean loss over the batches of all ranks; each rank's thread takes its own."""
        calls = {i: partial(rank.evaluate, batches[i]) for i, rank in enumerate(self._ranks)}
        command = self.pool.post("evaluation", operator.call, calls)
        self._ticket(command)
        return self.pool.wait(command)[0]

    def share(
        self,
        name: str,
        batches: Sequence[Callable[[], Batch]],
        work: Callable[[Rank, int, Batch], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Call work(rank, index, batch) for each of these batches, as many at a time as ranks;
        ranks without one get a batch of nothing, with index -1, for the collectives. stopped: asked
        before each batch; returns whether it never said yes."""
        several = self.first.dev.mesh.size(*DATA)
        rounds = Rounds(self.world, -(-len(batches) // several), stopped)

        def run(rank: Rank) -> None:
            shape = rank.step.tokens.shape
            nothing = Batch(np.zeros(shape, np.int32), np.full(shape, MASKED_TARGET, np.int32))
            for number, _ in enumerate(rounds.of(rank.dev.mesh.rank)):
                self.pool.beat()
                index = number * several + rank.dev.mesh.index(*DATA)
                if index < len(batches):
                    work(rank, index, batches[index]())
                else:
                    work(rank, -1, nothing)

        self.run(name, run)
        return not rounds.cut

    def next_logits(
        self, texts: list[list[int]], stopped: Callable[[], bool] = lambda: False
    ) -> list[np.ndarray]:
        """F32 (V,) behind each text of 1 to T tokens, by a validation's passes over whole rows:
        slower than with a cache, but in the run's own memory, however a model is divided. CutShort
        once stopped() says yes."""
        B, T = shape = self.first.step.tokens.shape
        groups = [texts[first : first + B] for first in range(0, len(texts), B)]
        found: dict[int, np.ndarray] = {}

        def make(group: list[list[int]]) -> Batch:
            inputs = np.zeros(shape, np.int32)
            for b, text in enumerate(group):
                inputs[b, : len(text)] = text
            return Batch(inputs, np.full(shape, MASKED_TARGET, np.int32))

        def work(rank: Rank, index: int, batch: Batch) -> None:
            rank.step.score(batch)
            if index >= 0:
                rows = [b * T + len(text) - 1 for b, text in enumerate(groups[index])]
                found[index] = rank.step.model.next_logits(rows)

        if not self.share("sample", [partial(make, group) for group in groups], work, stopped):
            raise CutShort
        for of_process in processes().gather(found):
            found |= of_process
        return [row for index in range(len(groups)) for row in found[index]]

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
        """Write the files of all ranks, in parallel; the writer that commits, and what to.

        DiskError stops no rank: they go on, without this checkpoint.
        """
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
            of_processes = processes().together(write_all)
        except BaseException:
            writers[self.world.base].discard()
            raise
        files = [entry for each in of_processes for entries in each for entry in entries]
        return writers[self.world.base], files

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Copies of the state of this process's ranks, with --ckpt-background."""
        return {rank.dev.mesh.rank: rank.step.snapshot for rank in self._ranks}

    def extra_state(self) -> dict[str, Any]:
        """The values that a checkpoint's manifest holds: the same on all ranks."""
        return self.run_first("reading scales", lambda rank: rank.step.extra_state())

    def read(self, reader: CheckpointReader) -> None:
        """Take the state of a checkpoint of any number of ranks, in formats that were checked."""
        self.run("loading the checkpoint", lambda rank: rank.read(reader))

    def load(
        self, read: Callable[[Param], np.ndarray | None], elements: Elements | None = None
    ) -> None:
        """Fill the weights. read: a whole parameter, None: a fresh one; elements: a part of one.
        All threads call them."""
        self.run("loading weights", lambda rank: rank.load(read, elements))

    def init(self, model: ModelConfig, seed: int, *, zero_projections: bool) -> None:
        self.run(
            "initializing weights",
            lambda rank: rank.init(model, seed, zero_projections=zero_projections),
        )

    def read_param(self, group: str, param: Param, *, to_all: bool = True) -> np.ndarray:
        """A host copy of one whole parameter, padding included; only one is in memory.

        All processes call it, and get it, or only the first does.
        """
        name = f"reading {param.name}"
        of_ranks = self.run(name, lambda rank: parts_of(rank.dev, param, rank.pieces(group)))
        own = [part for of_rank in of_ranks for part in of_rank]
        parts = processes().gather_arrays(own, to_all=to_all)
        return assemble(param, parts) if to_all or processes().first else np.empty(0)

    def first_reads(self, fn: Callable[[Callable[..., np.ndarray]], T]) -> T:
        """fn(read) on the first process, where read(param, group) gives a whole parameter, without
        a group its weights; the others take part."""

        def read(param: Param, group: str = "weights") -> np.ndarray:
            processes().share((group, param))
            return self.read_param(group, param, to_all=False)

        def whole() -> T:
            try:
                return fn(read)
            finally:
                processes().share(None)

        while not processes().first and (asked := processes().share(None)) is not None:
            self.read_param(*asked, to_all=False)
        return processes().on_first(whole)

    def everywhere(self, name: str, fn: Callable[[Rank], T]) -> list[T]:
        """Call as `run` does, with the results of the ranks of all processes, which must be
        picklable."""
        results = processes().gather(self.run(name, fn))
        return [result for of_process in results for result in of_process]

    def close(self) -> None:
        """Free the devices and end the threads. Once more changes nothing."""
        idle = threading.Barrier(self.world.count)

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
