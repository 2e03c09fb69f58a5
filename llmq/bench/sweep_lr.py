"""`llmq sweep-lr`: a short ladder of learning rates at small size, for `llmq recipe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import write_file
from llmq.base.json_file import read_json
from llmq.bench.losses import best_of, loss_of, measure_losses
from llmq.bench.sweep_file import Row, read_runs
from llmq.options.options import OPTIONS
from llmq.plan.recipe import BASE, round_rate, sizes_of

STEP = 2.0  # from one rate to the next
MOST_FURTHER = 3  # rates beyond an end of the ladder at which the best one lies
FEWEST = 3  # a curve through less has no lowest point
# Options that are not given. 16 million tokens are three for each parameter of four blocks: too few
# for the lowest loss, and enough to tell rates apart.
USUAL = {"batch-size": 16, "grad-accumulation": 1, "steps": 1000, "eval-num-steps": 32}
USUAL |= {"learning-rate": 0.002, "lr-schedule": "linear", "final-lr-fraction": 0.0}


def run_sweep_lr(given: dict[str, Any], *, depth: int, rates: int, out: Path) -> None:
    """Train a model of so many blocks at each rate of a ladder, and note the best one in `out`.

    given: options of the runs, by flag name; with --model it is that model. rates: of the ladder,
    STEP times one another, around --learning-rate; where the best one is at an end, the ladder goes
    on. Raises ConfigError and LlmqError.
    """
    if rates < FEWEST:
        raise ConfigError(f"--rates: must be at least {FEWEST}, got {rates}")
    own = {"model": BASE, "from-scratch": True, "vocab-size": "auto"}
    own |= {OPTIONS[name].flags[0]: size for name, size in sizes_of(depth).items()}
    own = ({} if "model" in given else own) | USUAL | given
    middle = float(own["learning-rate"])
    own.setdefault("warmup", max(int(own["steps"]) // 20, 1))
    ladder = [middle * STEP ** (n - rates // 2) for n in range(rates)]
    found = _measured(own, ladder, out)
    for _ in range(MOST_FURTHER):
        place = found.index(best_of(found))
        if 0 < place < len(found) - 1:
            break
        further = found[place]["learning_rate"] * (STEP if place else 1 / STEP)
        found = _measured(own, [run["learning_rate"] for run in found] + [further], out)
    rate = lowest(found)
    first = found[0]
    result = {
        "rate": rate,
        "width": first["width"],
        "optimizer": first["optimizer"],
        "tokens": first["tokens"],
        "tokens_per_step": first["tokens_per_step"],
    }
    write_file(out, json.dumps(result | read_json(out), indent=1) + "\n")
    for run in found:
        mark = "  <" if run is best_of(found) else ""
        print(f"  {run['learning_rate']:10.3g}  {loss_of(run)}{mark}")
    print(f"The best rate of {first['optimizer']} at {first['width']} channels: {rate:g}")
    print(f"llmq recipe --hours … --rates {out}")


def _measured(own: Row, ladder: list[float], out: Path) -> list[dict[str, Any]]:
    """The runs with these rates, in their order."""
    rows = [own | {"learning-rate": round_rate(rate)} for rate in sorted(ladder)]
    for row in rows:
        read_runs(row, None, trains=True)
    return measure_losses(rows, out)


def lowest(runs: list[dict[str, Any]]) -> float:
    """The rate at which a parabola through the best run and its neighbours is lowest, in the
    logarithm of the rate; the best run's own where it is at an end. LlmqError if all diverged."""
    place = runs.index(best_of(runs))
    rate, losses = runs[place]["learning_rate"], [run["loss"] for run in runs]
    if losses[place] is None:
        raise LlmqError("all runs diverged: begin with a lower --learning-rate")
    if not 0 < place < len(runs) - 1 or None in losses[place - 1 : place + 2]:
        return rate
    before, at, behind = losses[place - 1 : place + 2]
    curvature = before - 2 * at + behind
    shift = 0.5 * (before - behind) / curvature if curvature > 0 else 0.0
    return round_rate(rate * STEP**shift)
