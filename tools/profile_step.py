"""Profile of a step: whole steps with graphs, then every launch of one step by itself.

    python tools/profile_step.py --model Qwen2.5-0.5B --batch-size 32 [more options of llmq train]

Prints tokens per second and the host's share, then for each kernel of one step: launches, time,
share, and the achieved rate (GB/s from the declared traffic, TFLOP/s where FLOPs are declared).
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llmq.base.batch import Batch
from llmq.base.errors import LlmqError
from llmq.bench.child import WARM_UP
from llmq.bench.measure import (
    idle_share,
    launch_times,
    open_trainer,
    random_batches,
    timed_steps,
)
from llmq.commands.common import TrainCommand, train_options
from llmq.run.trainer import Trainer
from llmq.runtime.timing import LaunchTime

# Marks between launches let the card rest; a card at its power limit then runs at another clock.
CLOCKS = "(clocks differ: a few per cent, negative ones too, are no idle time)"

EXTRA_STEPS = 3  # after the timed steps: one for the host's work, two for the launches

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def host_work(trainer: Trainer, batches: list[Batch]) -> tuple[float, int | None]:
    """Seconds that rank 0 needs to enqueue a step, and the number of waits for its GPU in it (None
    without a GPU). Each graph is enqueued into an empty queue, because waiting for a full queue is
    no work. Driver calls count."""
    dev, step = trainer.dev, trainer.ranks.first.step
    enqueue, train = dev.graph, step.train
    seconds, syncs, waits = 0.0, 0, 0

    def into_an_empty_queue(key: tuple, fn: Callable[[], Any]) -> None:
        nonlocal seconds, syncs
        start = time.perf_counter()
        dev.synchronize()
        seconds, syncs = seconds - (time.perf_counter() - start), syncs + 1
        enqueue(key, fn)

    def timed(*args: Any) -> int:
        nonlocal seconds, waits
        dev.synchronize()
        before, start = getattr(dev, "sync_calls", 0), time.perf_counter()
        ticket = train(*args)
        seconds += time.perf_counter() - start
        waits = getattr(dev, "sync_calls", 0) - before - syncs
        return ticket

    step.train = timed
    try:
        with dev.instead(graph=into_an_empty_queue):
            trainer.result(trainer.enqueue_step(batches))
    finally:
        del step.train  # restores the class's method
    return seconds, waits if dev.kind == "cuda" else None


def breakdown(launches: list[LaunchTime]) -> list[str]:
    """One line for each kernel, the longest first, and their sum."""
    totals: dict[str, list] = defaultdict(lambda: [0, 0.0, 0, 0])
    for launch in launches:
        numbers = (1, launch.ms, launch.traffic, launch.flops)
        totals[launch.name] = [a + b for a, b in zip(totals[launch.name], numbers, strict=True)]
    everything = sum(launch.ms for launch in launches)
    lines = [f"{'kernel':44} {'calls':>6} {'ms':>9} {'share':>6} {'GB/s':>8} {'TFLOP/s':>8}"]
    for name, (count, ms, traffic, flops) in sorted(totals.items(), key=lambda i: -i[1][1]):
        rates = (traffic / ms / 1e6, flops / ms / 1e9) if ms else (0.0, 0.0)
        lines.append(
            f"{name:44} {count:6d} {ms:9.3f} {ms / everything:6.1%} {rates[0]:8.0f} {rates[1]:8.0f}"
        )
    return [*lines, f"{'all':44} {len(launches):6d} {everything:9.3f}"]


@app.command(cls=TrainCommand)
@train_options
def main(
    given: dict[str, Any],
    timed: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 5,
) -> None:
    """Print where a step's time goes."""
    options = {"from-scratch": True} | given
    with open_trainer(options, WARM_UP + timed + EXTRA_STEPS) as trainer:
        batches = random_batches(trainer)
        for _ in range(WARM_UP):
            trainer.step(batches)
        seconds, result = timed_steps(trainer, batches, timed)
        python, waits = host_work(trainer, batches)
        print(
            f"{trainer.plan.tokens / seconds:,.0f} tok/s, {seconds * 1e3:.1f} ms a step, Python "
            f"{python / seconds:.1%}, waits {waits}, loss {result.loss:.4f}"
        )
        launches = launch_times(trainer, batches)
        print("\n".join(breakdown(launches)))
        print(f"step with graphs, less these: {idle_share(launches, seconds):.1%} {CLOCKS}")


def run() -> None:
    """Run the command; a user's error is one line."""
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
