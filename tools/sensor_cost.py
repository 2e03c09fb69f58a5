"""Measure what reading sensors and drawing the live view cost a training step, in turns in one
process.

    python tools/sensor_cost.py [--model Qwen2.5-0.5B] [--batch-size 16] [--rounds 21] [--gpus 1]

Each round times the same steps alone, beside the thread that reads the sensors once a second, and
beside that thread and the live view, each as often first as the others. Prints the median time of a
step of each way, the median of what it takes more than the step alone in the same round, in
percent, with the standard error of that, and how often rank 0 waits for its GPU in a step. Random
batches, no checkpoint, no log.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated, Any

import typer

WARM_UP = 10  # steps before the first round, until clocks settle


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Nothing beside the steps."""
    yield


@contextmanager
def sensors(trainer: Any) -> Iterator[Any]:
    """The thread that reads the sensors, as a run has it."""
    from llmq.run.sensors import Sensing

    with closing(Sensing(trainer.ranks.devices, trainer.machine.world, None, 1)) as sensing:
        yield sensing


@contextmanager
def sensors_and_view(trainer: Any) -> Iterator[None]:
    """That thread, and the live view on a terminal of 80 columns that nobody looks at."""
    from rich.console import Console

    from llmq.report.live import LiveView

    with ExitStack() as stack:
        sensing = stack.enter_context(sensors(trainer))
        terminal = stack.enter_context(open(os.devnull, "w"))
        settings = {"force_terminal": True, "width": 80, "height": 40}
        console = Console(file=terminal, _environ={"TERM": "xterm"}, **settings)
        stack.enter_context(closing(LiveView(console, 0, 1, sensing.panel)))
        yield


WAYS = {"alone": alone, "sensors": sensors, "sensors, view": sensors_and_view}


def measured(trainer: Any, steps: int, rounds: int) -> dict[str, tuple[list[float], int | None]]:
    """By way: seconds of a step in each round, and waits of one."""
    from llmq.bench.measure import host_work, random_batches, timed_steps

    batches = random_batches(trainer)
    timed_steps(trainer, batches, WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    waits = {}
    for number in range(rounds):
        for place in range(len(WAYS)):
            name = list(WAYS)[(number + place) % len(WAYS)]
            with WAYS[name](trainer):
                seconds[name].append(timed_steps(trainer, batches, steps)[0])
                waits[name] = host_work(trainer, batches)[1]
    return {name: (seconds[name], waits[name]) for name in WAYS}


def lines(found: dict[str, tuple[list[float], int | None]]) -> list[str]:
    """The table."""
    base = found["alone"][0]
    rows = [
        f"{'beside the steps':<16} {'ms a step':>10} {'more, %':>8} {'error, %':>8} {'waits':>6}"
    ]
    for name, (seconds, waits) in found.items():
        more = [
            100 * (with_it / without - 1) for with_it, without in zip(seconds, base, strict=True)
        ]
        error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
        ms, median = 1e3 * statistics.median(seconds), statistics.median(more)
        rows.append(f"{name:<16} {ms:10.3f} {median:8.3f} {error:8.3f} {waits!s:>6}")
    return rows


def main(
    model: Annotated[str, typer.Option(help="A preset.")] = "Qwen2.5-0.5B",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seq_len: Annotated[int, typer.Option(min=1)] = 1024,
    grad_accumulation: Annotated[int, typer.Option(min=1)] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Of each way in a round.")] = 20,
    rounds: Annotated[int, typer.Option(min=1)] = 21,
    gpus: Annotated[int, typer.Option(min=0, help="0: all.")] = 1,
    device: str = "auto",
) -> None:
    """Measure it and print the table."""
    from llmq.bench.measure import open_trainer

    options = {"model": model, "from-scratch": True, "batch-size": batch_size, "seq-len": seq_len}
    options |= {"grad-accumulation": grad_accumulation, "gpus": gpus, "device": device}
    count = (steps + 2) * len(WAYS) * rounds + WARM_UP + 10
    with open_trainer(options, count) as trainer:
        print("\n".join(lines(measured(trainer, steps, rounds))))


if __name__ == "__main__":
    typer.run(main)
