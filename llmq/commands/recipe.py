"""`llmq recipe`: the options of a run for so many hours."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError, LlmqError
from llmq.bench.bench_options import BenchOptions
from llmq.commands.common import ConfigFile, Reserve, load_run, size_of, train_options
from llmq.commands.plan import CardFile, CardName
from llmq.options.option_types import AUTO
from llmq.options.options import OPTIONS, TrainConfig

VOCABULARY = 32768  # where there are no data: as many as nanochat's tokenizer has

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of `llmq tokenize`: trains on its train*.bin, validates on its eval*.bin.",
    ),
]


HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory of the machine that --card is in."),
]
Law = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Scaling law of tools/scaling_law.py, of your own data."),
]
Rates = Annotated[Path | None, typer.Option(metavar="FILE", help="The result of `llmq sweep-lr`.")]
Measure = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Try the recipe's step on this machine, some 20 seconds, and count with its time.",
        show_default=False,
    ),
]
Price = Annotated[float | None, typer.Option(min=0, help="What an hour of one GPU costs.")]
KwhPrice = Annotated[float | None, typer.Option(min=0, help="What a kilowatt-hour costs.")]


def files_of(data: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The options, by field name, that --data stands for. ConfigError where they are given too."""
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


def _tried(config: TrainConfig) -> tuple[float, float]:
    """Seconds of a step with these options on this machine, and to the first one. Raises
    LlmqError."""
    from llmq.bench.child import run_child
    from llmq.options.command_line import fewest_values

    values = fewest_values(config).items()
    plain = {n: str(value) if isinstance(value, Path) else value for n, value in values}
    options = {OPTIONS[name].flags[0]: value for name, value in plain.items()}
    print("A step of the recipe is tried …", file=sys.stderr)
    outcome = run_child(options, BenchOptions.steps, BenchOptions.repeats)
    if outcome["status"] != "ok":
        raise LlmqError(f"the recipe's step: {outcome['message']}; --no-measure goes without")
    result = outcome["result"]
    return statistics.median(result["step_seconds"]), result["first_step_seconds"]


@train_options
def recipe(
    given: dict[str, Any],
    hours: Annotated[float, typer.Option(min=0.02, help="Hours that the whole run may take.")],
    config_file: ConfigFile = None,
    data: Data = None,
    card: CardName = None,
    card_file: CardFile = None,
    host_memory: HostMemory = None,
    reserve: Reserve = None,
    law: Law = None,
    rates: Rates = None,
    price: Price = None,
    kwh_price: KwhPrice = None,
    out: Annotated[Path, typer.Option(help="File of options to write.")] = Path("recipe.yaml"),
    measure: Measure = None,
    run: Annotated[bool, typer.Option("--run", help="Train it at once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose size, tokens, batch, rates and formats for the hours that there are; what is given
    stays."""
    from llmq.plan.recipe import BASE
    from llmq.plan.recipe_report import run_recipe

    if given.get("from-scratch") is False:
        raise ConfigError("--from-scratch: a recipe begins with random weights")
    elsewhere = card is not None or card_file is not None
    if elsewhere and measure:
        raise ConfigError(
            "--measure: tries a step on this machine, and --card plans for another one"
        )
    files = files_of(data, given)
    has_data = bool(files) or "train-file" in given
    if run:
        if elsewhere:
            raise ConfigError("--run: trains on this machine, and --card plans for another one")
        if not has_data:
            raise ConfigError("--run: on which data? Give --data")
    own = {"model": BASE, "from_scratch": True, "vocab_size": AUTO if has_data else VOCABULARY}
    config, model, _, fields = load_run(given, config_file, plans=True, defaults=own | files)
    sizes = {
        "host_memory": size_of("--host-memory", host_memory),
        "reserve": size_of("--reserve", reserve, least=0),
    }
    where = {"card": card, "card_file": card_file, **sizes}
    how = {"law": law, "rates": rates, "price": price, "kwh_price": kwh_price}
    timed = _tried if measure is not False and not elsewhere else None
    wanted = {"hours": hours, "data": has_data, "out": out, "json": json, "timed": timed}
    run_recipe(config, model, fields, **wanted, **where, **how)
    if run:
        from llmq.run.loop import run_training

        config, model, model_dir, _ = load_run({}, out, trains=True)
        run_training(config, model, model_dir, sys.argv)
