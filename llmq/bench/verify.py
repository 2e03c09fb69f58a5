"""`llmq verify`: checks that options which save memory change no number.

Two runs make the same steps, one run with and one run without these options. Losses, gradient norms
and log-sum-exps must agree bit by bit.
"""

import json as json_module
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import warn
from llmq.base.result import Result
from llmq.bench.measure import random_batches
from llmq.options.conditions import Ranks
from llmq.options.option_file import flag
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.rule import IDLE
from llmq.options.rules import RULES
from llmq.plan.memory import OutOfMemory
from llmq.run.trainer import Trainer
from llmq.runtime.machine import Machine, choose_machine


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of two runs. options: the flags whose effect is tested. without, having: the
    results of each step without and with these options, then of an evaluation on the last step's
    first batches, which compares the weights."""

    options: tuple[str, ...]
    without: tuple[Result, ...]
    having: tuple[Result, ...]

    @property
    def equal(self) -> list[bool]:
        """Return True for each result that is equal in both runs."""
        return [
            np.array_equal([*numbers(one).values()], [*numbers(other).values()], equal_nan=True)
            for one, other in zip(self.without, self.having, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        return [*(f"step {i}" for i in range(len(self.without) - 1)), "evaluation"]


def numbers(result: Result) -> dict[str, float]:
    """Return the numbers of a result that are compared: all numbers except times."""
    found = {f.name: getattr(result, f.name) for f in fields(result) if f.compare}
    return found | found.pop("numbers")


def run_verify(
    config: TrainConfig,
    model: ModelConfig,
    model_dir: Path | None,
    *,
    steps: int,
    synthetic: bool = False,
    json: bool = False,
    given: frozenset[str],
) -> bool:
    """Run `llmq verify` and print the comparison; return True if all results are equal.

    given: fields set on the command line; a warning names fields without effect on the comparison.
    """
    idle = [rule for rule in RULES.of(config, IDLE, "measuring") if rule.option in given]
    if idle:
        warn(f"{', '.join(OPTIONS[rule.option].flag for rule in idle)}: {idle[0].text}")
    warn(*RULES.idle(config, verification=steps))
    found = compare(config, model, model_dir, steps=steps, synthetic=synthetic)
    if json:
        print(json_module.dumps(record(found), indent=1, allow_nan=False))
    else:
        print("\n".join(report(found)))
    return all(found.equal)


def compare(
    config: TrainConfig,
    model: ModelConfig,
    model_dir: Path | None,
    *,
    steps: int,
    synthetic: bool = False,
) -> Comparison:
    """Make the run without the options, then the run with the options. The learning rate follows
    the schedule of a run of `steps` steps. synthetic: True to train on random tokens. Raises the
    errors of training, and OutOfMemory if the run does not fit without the options."""
    RULES.check(config, verification=steps)
    config = replace(config, steps=steps, epochs=None)
    machine = choose_machine(config.device, config.gpus)
    warn(*RULES.idle(config, ranks=_ranks(machine)))
    plain = without_options(config, machine)
    try:
        without = _results(plain, model, model_dir, synthetic)
    except OutOfMemory:  # the plan's error would advise to add the options
        raise OutOfMemory(
            "without the options that are to be verified the run does not fit into memory or "
            "--memory-limit: verify them with a smaller --model, --batch-size or --seq-len"
        ) from None
    having = _results(config, model, model_dir, synthetic)
    tested = [name for name in OPTIONS if getattr(config, name) != getattr(plain, name)]
    return Comparison(
        options=tuple(flag(name, getattr(config, name)) for name in tested),
        without=tuple(without),
        having=tuple(having),
    )


def without_options(config: TrainConfig, machine: Machine) -> TrainConfig:
    """Return the config without the options that save memory and must change no number."""
    return replace(config, **RULES.exact(config, ranks=_ranks(machine)))


def _ranks(machine: Machine) -> Ranks:
    return Ranks(machine.world_size, on_cpu=machine.kind == "host")


def _results(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, synthetic: bool
) -> list[Result]:
    """Return the results of all steps, then of an evaluation. Each step is enqueued before the
    previous result is read, as in training."""
    with Trainer.from_config(config, model, model_dir) as trainer:
        trainer.load_weights()
        results, ticket = [], None
        for step in range(config.steps):
            batches = random_batches(trainer, seed=step) if synthetic else None
            previous, ticket = ticket, trainer.enqueue_step(batches)
            if previous is not None:
                results.append(trainer.result(previous))
        results.append(trainer.result(ticket))
        firsts = [of_rank[:1] for of_rank in trainer.ranks.batches_of(ticket)]
        results.append(trainer.ranks.evaluate(firsts))
    return results


def report(found: Comparison) -> list[str]:
    """Return the comparison as console lines: a line for each result, with all digits if the
    results differ."""
    options = " ".join(found.options) or "none, the same run twice"
    lines = ["[Verify]", f"  Options: {options}", ""]
    rows = zip(found.names, found.equal, found.without, found.having, strict=True)
    for name, equal, one, other in rows:
        if equal:
            lines.append(f"{name:>10} | loss {one.loss:10f} | norm {one.norm:10f} | equal")
            continue
        pairs = zip(numbers(one).items(), numbers(other).values(), strict=True)
        changes = [f"{key} {a!r} -> {b!r}" for (key, a), b in pairs if a != b]
        lines.append(f"{name:>10} | DIFFERENT: {', '.join(changes)}")
    return [*lines, "", _verdict(found.names, found.equal)]


def _verdict(names: Sequence[str], equal: Sequence[bool]) -> str:
    if all(equal):
        return f"Bitwise equal: {names[0]} to {names[-1]}."
    return f"Different: {equal.count(False)} of {len(equal)}, from {names[equal.index(False)]} on."


def record(found: Comparison) -> dict[str, Any]:
    """Return the comparison as a record for JSON; numbers that are not finite become None."""

    def finite(result: Result) -> dict[str, float | None]:
        return {k: v if math.isfinite(v) else None for k, v in numbers(result).items()}

    rows = zip(found.names, found.equal, found.without, found.having, strict=True)
    return {
        "equal": all(found.equal),
        "options": list(found.options),
        "results": [
            {"name": name, "equal": equal, "without": finite(one), "with": finite(other)}
            for name, equal, one, other in rows
        ],
    }
