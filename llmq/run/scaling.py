"""How well several GPUs scale: a step of all of them against one of rank 0 alone.

--measure-scaling. A single GPU that did the same work as all would need more memory than there may
be, so what is timed before training is rank 0's own part of a step, the same graphs without the
collectives, while the other ranks are idle. The ratio says what is lost to communication, to
waiting for each other and to what they share: links, host, power. It does not count that one GPU
would have the whole optimizer to itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import warn
from llmq.comm.collectives import silenced
from llmq.run.batches import random_batch
from llmq.run.events import Member, StepDone
from llmq.run.metrics import Reporter
from llmq.run.rank import Rank
from llmq.run.trainer import Trainer
from llmq.runtime.device import Device

WARM_UP = 2  # steps: launched one by one, captured
TIMED = 5
COMPARED = 20  # steps of training whose times are compared
SKIPPED = 3  # first ones, which launch and capture: they are not counted


@contextmanager
def alone(dev: Device) -> Iterator[None]:
    """Within the block the device runs without its peers, from graphs of its own."""
    graph = dev.graph

    def run(key: tuple, fn: Callable[[], Any]) -> None:
        graph(("alone", *key), fn)

    with dev.instead(graph=run), silenced(dev):
        yield


def time_alone(trainer: Trainer) -> float:
    """Milliseconds of a step of rank 0 alone. Call it before the weights are loaded.

    Weights and optimizer are random and zero, not those of a run, before and after.
    """
    config = trainer.config
    rng = np.random.default_rng(0)
    vocab_size, count = trainer.model.vocab_size, config.grad_accumulation
    batches = [random_batch(rng, config, vocab_size) for _ in range(count)]
    trainer.init_weights()
    # A step of all, so that what is gathered has real content: zeros would be faster. The learning
    # rate is 0: it stays so.
    ranks = trainer.ranks
    ranks.result(ranks.train(0, 0.0, config.grad_clip, [batches] * ranks.world.count))
    ranks.run("finishing", lambda rank: rank.dev.synchronize())
    seconds = ranks.run_first("timing one GPU alone", lambda rank: _timed(rank, batches))
    ranks.run("resetting", Rank.reset)
    return 1000 * seconds


def _timed(rank: Rank, batches: list[Batch]) -> float:
    """Seconds a step, results read one step late as in training."""

    def steps(count: int) -> float:
        rank.dev.synchronize()
        start, ticket = time.perf_counter(), None
        for _ in range(count):
            before, ticket = ticket, rank.step.train(0, 0.0, 0.0, rank.counted(batches))
            if before is not None:
                rank.step.result(before)
        rank.step.result(ticket)
        return (time.perf_counter() - start) / count

    with alone(rank.dev):
        steps(WARM_UP)
        return steps(TIMED)


class Scaling(Member):
    """Compares the times of steps with that of one rank alone."""

    def __init__(self, world_size: int, alone_ms: float, reporter: Reporter):
        self.world_size, self.alone_ms, self._reporter = world_size, alone_ms, reporter
        self._times: list[float] = []

    def after_step(self, done: StepDone) -> None:
        if done.number >= SKIPPED and self.add(done.ms):
            self._reporter.scaling(done.step, *self.report())

    def add(self, ms: float) -> bool:
        """The next step's time; whether it is the last one that was missing."""
        self._times.append(ms)
        return len(self._times) == COMPARED

    @property
    def missing(self) -> bool:
        """Whether there are some times, and fewer than there should be."""
        return 0 < len(self._times) < COMPARED

    def after_steps(self, step: int) -> None:
        """At the end of a run: report what there is, if that is less than what is compared."""
        if not self._times:
            warn([f"--measure-scaling has no effect on fewer than {SKIPPED + 1} steps"])
        elif self.missing:
            self._reporter.scaling(step, *self.report())

    def report(self) -> tuple[str, dict[str, float]]:
        """A line, and the fields of the `scaling` record: milliseconds, and their ratio."""
        together = statistics.median(self._times)
        record = {
            "ranks": self.world_size,
            "alone_ms": self.alone_ms,
            "together_ms": together,
            "efficiency": self.alone_ms / together,
        }
        line = (
            f"Scaling: a step takes {together:.1f} ms on {self.world_size} GPUs, "
            f"{self.alone_ms:.1f} ms on one without the others: "
            f"efficiency {100 * record['efficiency']:.1f} %"
        )
        return line, record
