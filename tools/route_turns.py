"""Gain of a whole step from one fused product: steps with and without this product, in turns.

    python tools/route_turns.py --without glu --model Qwen2.5-0.5B --batch-size 32 [more options of
        llmq train]

`--without` names routes of llmq/ops/product/routes.py, separated by commas. A way leaves one route
out, and the library's product and separate kernels replace this route. All steps run in one
process, in the same memory, on the same batches. The order of the ways changes from turn to turn,
because a card becomes slower as it gets warm. Prints tokens per second and mJ a token of each turn,
their medians, and the speedup of all routes together over each way.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError, LlmqError
from llmq.bench.child import WARM_UP
from llmq.bench.measure import (
    MANY,
    open_trainer,
    planned,
    random_batches,
    steps_for,
    timed_steps,
)
from llmq.commands.common import TrainCommand, train_options
from llmq.ops.product.routes import ROUTES
from llmq.run.sensors import open_sensors

ALL = "all routes"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def ways_of(without: str) -> dict[str, str | None]:
    """Return the ways by name, with the route that each leaves out. ConfigError for an unknown
    route."""
    for name in without.split(","):
        if name not in ROUTES:
            raise ConfigError(f"--without: no route is '{name}'; there are {', '.join(ROUTES)}")
    return {ALL: None} | {f"without {name}": name for name in without.split(",")}


@contextmanager
def without_route(name: str | None) -> Iterator[None]:
    """Remove the route within the block; None removes none."""
    routes = dict(ROUTES)
    ROUTES.pop(name, None)
    try:
        yield
    finally:
        ROUTES.clear()
        ROUTES.update(routes)


def largest(options: dict[str, Any], ways: dict[str, str | None]) -> str | None:
    """Return the route without which a step needs the most memory, so that this memory serves all
    ways; None if a step with all routes needs the most."""

    def memory(name: str | None) -> int:
        with without_route(name):
            return planned(options)[0]["device"]

    return max(ways.values(), key=memory)


@app.command(cls=TrainCommand)
@train_options
def main(
    given: dict[str, Any],
    without: Annotated[str, typer.Option(help="Routes that are left out, one by one.")],
    turns: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Of one way in a turn.")] = 3.0,
) -> None:
    """Time steps with a fused product and without."""
    ways, options = ways_of(without), {"from-scratch": True} | given
    with without_route(largest(options, ways)):
        trainer = open_trainer(options, MANY)
    speed: dict[str, list[float]] = {way: [] for way in ways}
    with trainer:
        dev, batches, graph = trainer.dev, random_batches(trainer), trainer.dev.graph
        print(f"{dev.spec.name}: {given}", flush=True)
        sensors = open_sensors(trainer.ranks.devices)
        gpu, left_out = sensors.sources[0], ""

        def of_way(key: tuple, fn: Callable[[], Any]) -> None:
            graph((left_out, *key), fn)

        def joules() -> float:
            return (gpu and gpu.joules()) or 0.0

        for turn in range(turns + 1):  # turn 0 captures graphs and lets the clock settle
            names = list(ways)
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                left_out = ways[way] or ""
                with without_route(ways[way]), dev.instead(graph=of_way):
                    if turn == 0:
                        for _ in range(WARM_UP):
                            loss = trainer.step(batches).loss
                        print(f"{way}: loss {loss:.4f}", flush=True)
                        continue
                    step = steps_for(trainer, batches, seconds / 3)[-1]
                    count = max(1, round(seconds * 2 / 3 / step))
                    before = joules()
                    step = timed_steps(trainer, batches, count)[0]
                energy, tokens = joules() - before, trainer.plan.tokens
                speed[way].append(tokens / step)
                energy *= 1e3 / (tokens * count)
                print(f"{turn} {way}: {tokens / step:,.0f} tok/s, {energy:.2f} mJ", flush=True)
        sensors.close()
    best = statistics.median(speed[ALL])
    for way, found in speed.items():
        middle = statistics.median(found)
        spread = (max(found) - min(found)) / middle
        print(f"{way}: {middle:,.0f} tok/s +- {spread:.1%}; with all {best / middle - 1:+.2%}")


def run() -> None:
    """Run the command; a user's error is one line."""
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
