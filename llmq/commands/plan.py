"""Commands before a run: `llmq plan` predicts memory and time, `recipe` chooses the options for a
number of hours, `sweep-lr` finds the best learning rate of a small model."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError
from llmq.bench import BenchOptions
from llmq.commands.common import (
    ConfigFile,
    Json,
    Reserve,
    SaveConfig,
    load_run,
    option,
    save_config,
    size_of,
    starting_with,
    train_options,
)
from llmq.commands.rl import load_rl
from llmq.options.option_types import AUTO
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.presets import PRESETS

if TYPE_CHECKING:
    from llmq.plan.recipe import Recipe, Tried


def _card_names() -> list[str]:
    from llmq.options.cards import CARDS  # imported here, so that --help does not wait

    words = (name.split("RTX ")[-1].removeprefix("NVIDIA ").split() for name in CARDS)
    return sorted({first for first, *_ in words})  # without blanks, at which a shell divides


CardName = option(
    str | None,
    "Card to plan for, such as 4090 or '5060 ti 8gb', or '5090,3090' for two: predicts the speed.",
    metavar="NAME",
    autocompletion=starting_with(_card_names),
)
CardFile = option(
    Path | None,
    "Plan for the rig of this rig.json (llmq rig), with the rates measured there.",
    metavar="FILE",
)
HostMemory = option(str | None, "Host memory of a machine to compare with.", metavar="SIZE")
Search = option(
    bool,
    "Search micro-batch, recomputation, offloading and sharding, beside adapters also "
    "--base-dtype, for what fits and is fastest; what is given stays, micro-batch times "
    "accumulation too.",
    "--fit",
)
Largest = option(
    bool,
    "Search, as --fit, for the preset with most parameters that fits; without --host-memory for "
    "one that fits on the card alone.",
    "--largest",
)


@train_options
def plan(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    gpu_memory: option(
        str | None, "Memory of one GPU to compare with, such as 16GiB.", metavar="SIZE"
    ) = None,
    host_memory: HostMemory = None,
    card: CardName = None,
    card_file: CardFile = None,
    reserve: Reserve = None,
    machines: option(int, "Machines with --gpus GPUs each.", min=1) = 1,
    network: option(
        str | None,
        "Bytes per second that a machine sends, and receives at once, such as 25GB/s.",
        metavar="SIZE",
    ) = None,
    fit: Search = False,
    largest: Largest = False,
    rl: option(bool, "Plan a run of `llmq rl`, with its samples.", "--rl") = False,
    placement: option(
        bool,
        "Show where weights, gradients and moments are, in which format, and what is "
        "divided among GPUs.",
        "--placement",
    ) = False,
    json: Json = False,
) -> None:
    """Show the memory, the FLOPs and the time that `llmq train` with these options would need.

    llmq plan --model Qwen2.5-7B --lora-rank 16 --fit --card "rtx 4090"
    """
    any_model = {"model": next(iter(PRESETS)), "from_scratch": True} if largest else None
    if rl and (largest or machines > 1):
        raise ConfigError("--rl: is of one model on one machine")
    load = load_rl if rl else partial(load_run, defaults=any_model)
    config, model, _, fields = load(given, config_file, plans=True)
    from llmq.plan.target import MachineOptions

    asked = MachineOptions(
        gpu_memory=size_of("--gpu-memory", gpu_memory),
        host_memory=size_of("--host-memory", host_memory),
        card=card,
        card_file=card_file,
        reserve=size_of("--reserve", reserve, least=0),
        machines=machines,
        network=size_of("--network", network and network.removesuffix("/s")),
    )
    if largest:
        from llmq.plan.fit import run_largest

        if placement:
            raise ConfigError("--placement: has no meaning with --largest")
        save_config(save, run_largest(config, fields, asked, json=json))
        return
    from llmq.plan.report import run_plan

    how = {"fit": fields if fit else None, "placement": placement, "json": json}
    save_config(save, run_plan(config, model, asked, teacher=_teacher(config), **how))


def _teacher(config: TrainConfig) -> tuple[TrainConfig, ModelConfig] | None:
    """Return options and model of --teacher; None without a teacher."""
    if config.teacher is None:
        return None
    from llmq.run.teacher import teacher_of

    return teacher_of(config, plans=True)[:2]


# ------------------------------------------------------------------------------------------------


VOCABULARY = 32768  # vocabulary size without data, equal to nanochat's

Data = option(
    Path | None,
    "Folder of `llmq tokenize`: trains on its train*.bin, validates on its eval*.bin.",
    metavar="DIR",
)


Rates = option(Path | None, "The result of `llmq sweep-lr`.", metavar="FILE")
Measure = option(
    bool | None,
    "Try the recipe's steps on this machine, some 20 seconds, and count with their time.",
    "--measure/--no-measure",
    show_default=False,
)


def files_of(data: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options, by field, for which --data stands. Raises ConfigError if the user gives
    one of these options, too."""
    if data is None:
        return {}
    for flag in ("train-file", "eval-file"):
        if flag in given:
            raise ConfigError(f"--data: says which files, leave out --{flag}")
    held_out = any(data.glob("eval*.bin"))
    return {
        "train_file": (f"{data}/train*.bin",),
        "eval_file": f"{data}/eval*.bin" if held_out else "split",
    }


def _tried(recipe: Recipe) -> Tried:
    """Time a recipe's steps on this machine, on random tokens. Raises LlmqError if a step fails."""
    from llmq.bench.child import run_child
    from llmq.options.option_file import fewest_values
    from llmq.plan.recipe import Tried

    print("Steps of the recipe are tried …", file=sys.stderr)
    values = fewest_values(recipe.config).items()
    plain = {n: str(value) if isinstance(value, Path) else value for n, value in values}
    options = {OPTIONS[name].flags[0]: value for name, value in plain.items()}
    outcome = run_child(options, BenchOptions.steps, BenchOptions.repeats)
    if outcome["status"] != "ok":
        raise LlmqError(f"the recipe's step: {outcome['message']}; --no-measure goes without")
    result = outcome["result"]
    return Tried(statistics.median(result["step_seconds"]), result["first_step_seconds"])


@train_options
def recipe(
    given: dict[str, Any],
    hours: option(float, "Hours that the whole run may take.", min=0.004),
    config_file: ConfigFile = None,
    data: Data = None,
    card: CardName = None,
    card_file: CardFile = None,
    host_memory: HostMemory = None,
    reserve: Reserve = None,
    rates: Rates = None,
    price: option(float | None, "What an hour of one GPU costs.", min=0) = None,
    kwh_price: option(float | None, "What a kilowatt-hour costs.", min=0) = None,
    out: option(Path, "File of options to write.") = Path("recipe.yaml"),
    measure: Measure = None,
    run: option(bool, "Train it at once.", "--run") = False,
    json: Json = False,
) -> None:
    """Choose size, tokens, batch, rates and formats for a number of hours; given options stay.

    llmq recipe --hours 24 --card h100 --data data/mine
    """
    from llmq.plan.recipe import BASE
    from llmq.plan.recipe_report import run_recipe
    from llmq.plan.target import MachineOptions

    if given.get("from-scratch") is False:
        raise ConfigError("--from-scratch: a recipe begins with random weights")
    elsewhere = card is not None or card_file is not None
    for flag, used in (("--measure: tries a step", measure), ("--run: trains", run)):
        if elsewhere and used:
            raise ConfigError(f"{flag} on this machine, and --card plans for another one")
    files = files_of(data, given)
    has_data = bool(files) or "train-file" in given
    if run and not has_data:
        raise ConfigError("--run: on which data? Give --data")
    own = {"model": BASE, "from_scratch": True, "vocab_size": AUTO if has_data else VOCABULARY}
    config, model, _, fields = load_run(given, config_file, plans=True, defaults=own | files)
    asked = MachineOptions(
        card=card,
        card_file=card_file,
        host_memory=size_of("--host-memory", host_memory),
        reserve=size_of("--reserve", reserve, least=0),
    )
    run_recipe(
        config,
        model,
        fields,
        asked,
        hours=hours,
        data=has_data,
        rates=rates,
        price=price,
        kwh_price=kwh_price,
        timed=None if elsewhere or measure is False else _tried,
        out=out,
        json=json,
    )
    if run:
        _train(out)


def _train(recipe: Path) -> None:
    """Train with the options of a recipe's file."""
    from llmq.run.training import run_training

    config, model, model_dir, _ = load_run({}, recipe, trains=True)
    run_training(config, model, model_dir, sys.argv)


@train_options
def sweep_lr(
    given: dict[str, Any],
    data: Data = None,
    depth: option(int, "Blocks; the width is 64 times as many.", min=1) = 4,
    rates: option(int, "Rates of the ladder, each twice the last.") = 5,
    out: option(Path, "File with the runs and the best rate.") = Path("rates.json"),
) -> None:
    """Train a small model at a ladder of learning rates, and find the best one.

    llmq sweep-lr --data data/mine
    """
    from llmq.bench.losses import run_sweep_lr
    from llmq.options.options import OPTIONS

    files = {OPTIONS[name].flags[0]: value for name, value in files_of(data, given).items()}
    run_sweep_lr(files | given, depth=depth, rates=rates, out=out)
