"""`llmq recipe`: machine and data, printed report, and the option file."""

import json as json_module
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.data.tokens import open_token_files
from llmq.options.cards import CARDS
from llmq.options.option_file import check_new, save_options
from llmq.options.option_types import MUONS
from llmq.options.options import TrainConfig
from llmq.plan.law import OTHER_TEXT
from llmq.plan.recipe import CHOSEN, Recipe, Search, Tried, Wanted, read_rates
from llmq.plan.target import MachineOptions, PlanTarget, target, target_here

JOULES_PER_KWH = 3.6e6
POWER_ERROR = 0.1  # relative error of energy: other cards draw another share of their limit


def run_recipe(
    config: TrainConfig,
    model: ModelConfig,
    fixed: frozenset[str],
    asked: MachineOptions,
    *,
    hours: float,
    data: bool,
    rates: Path | None = None,
    price: float | None = None,
    kwh_price: float | None = None,
    timed: Callable[[Recipe], Tried] | None = None,
    out: Path = Path("recipe.yaml"),
    json: bool = False,
) -> TrainConfig:
    """Choose the options of a run of `hours` hours, print the prediction, and write the options to
    `out`. config, model: the options as given; fixed: names of options that keep their values.
    asked: the machine; without a card, this machine. data: True if the training files exist. rates:
    file of `llmq sweep-lr`. price: price of an hour of one GPU; kwh_price: price of a kWh. timed:
    function that tries a recipe; the measured seconds then replace the planned ones. Raises
    OutOfMemory if nothing fits, and ConfigError if no prediction is possible."""
    check_new(out, "--out")
    _check(config, fixed)

    def where(config: TrainConfig, model: ModelConfig) -> PlanTarget:
        if asked.is_elsewhere:
            return target(config, model, asked, search=True)
        return _known(target_here(config, model, asked.reserve))

    read = None if rates is None else read_rates(rates)
    wanted = Wanted(hours=hours, rates=read, **(_of_data(config) if data else {}))
    search = Search(config, model, fixed, where, wanted)
    search.best()
    best = search.refined()
    if timed is not None:
        best = search.tried_at(best, timed(best))
    record = recipe_record(best, search, price, kwh_price)
    if json:
        print(json_module.dumps(record, indent=2))
    else:
        print("\n".join(recipe_report(best, record)))
    command = f"llmq train --config {out}" + ("" if data else " --train-file …")
    head = [f"Written by `llmq recipe --hours {hours:g}`; `{command}` trains it."]
    save_options(
        out, best.config, flag="--out", head=[*head, *_promise(best, record)], notes=_notes(best)
    )
    if not json:
        print(f"\nWritten: {command}")
    return best.config


def _check(config: TrainConfig, fixed: frozenset[str]) -> None:
    """Raise ConfigError for options that no recipe supports."""
    for name in sorted(CHOSEN & fixed):
        raise ConfigError(f"--{name.replace('_', '-')}: follows from --hours, leave it out")
    if config.wants_adapters:
        raise ConfigError("--lora-rank: adapters need a trained model, a recipe begins with none")
    if config.loss != "ce" or config.head != "lm":
        name = config.loss if config.head == "lm" else f"a {config.head} head"
        raise ConfigError(f"--loss: a scaling law says nothing of {name}, only of text by ce")


def _known(where: PlanTarget) -> PlanTarget:
    """Return `where`; ConfigError if the speed of its card is unknown."""
    if where.card is None:
        raise ConfigError(
            "--card: nothing is known of the speed of a CPU: name the card to plan for"
        )
    if where.card.measured is None and where.card.name not in CARDS:
        raise ConfigError(
            f"there is no promise for a {where.card.name}, which no table has: run `llmq rig`, "
            "which measures it, or name a card that is as fast as --card"
        )
    return where


def _of_data(config: TrainConfig) -> dict[str, Any]:
    """Fields of Wanted that follow from the token files."""
    train = sum(file.num_tokens for file in open_token_files(config.train_patterns))
    held = 0
    if config.splits:
        held = round(config.eval_fraction * train)
        train -= held
    elif config.validates:
        held = sum(file.num_tokens for file in open_token_files([config.eval_pattern]))
    return {"train_tokens": train, "eval_tokens": held}


# ------------------------------------------------------------------------------------------------
# Reports


def recipe_record(
    best: Recipe, search: Search, price: float | None, kwh_price: float | None
) -> dict[str, Any]:
    """The recipe for programs; NAME_error is the relative error of NAME."""
    wanted, ranks = search.wanted, best.where.world_size
    energy = best.joules and best.joules / JOULES_PER_KWH
    costs = [] if price is None else [price * ranks * best.time / 3600]
    costs += [] if kwh_price is None or energy is None else [kwh_price * energy]
    tried = {(r.parameters, r.config.optimizer, r.config.matmul_dtype): r for r in search.tried}
    return {
        "hours": wanted.hours,
        "card": best.where.card.name,
        "gpus": ranks,
        "source": best.where.card.source,
        "parameters": best.parameters,
        "tokens": best.tokens,
        "passes": None if wanted.train_tokens is None else best.passes,
        "tokens_per_step": best.need.tokens,
        "steps": best.config.steps,
        "tokens_per_second": best.tokens / best.seconds["steps"],
        "predicted_tokens_per_second": best.need.speed,
        "timed": search.wanted.pace is not None,
        "learning_rate": best.config.learning_rate,
        "loss": _loss(best),
        "loss_error": OTHER_TEXT if best.has_ground else None,
        "law": best.law.source,
        "seconds": best.time,
        "seconds_of": best.seconds,
        "seconds_error": best.time_error,
        "max_hours": best.config.max_hours,
        "kwh": energy,
        "kwh_error": best.time_error + POWER_ERROR,
        "cost": sum(costs) if costs else None,
        "device_bytes": best.need.device,
        "tried": [
            {"parameters": key[0], "optimizer": key[1], "matmul_dtype": key[2]}
            | {"tokens": r.tokens, "loss": _loss(r)}
            for key, r in sorted(tried.items())
        ],
    }


def _loss(recipe: Recipe) -> float | None:
    """The promised loss; None without a promise."""
    return recipe.loss if recipe.has_ground else None


def recipe_report(best: Recipe, record: dict[str, Any]) -> list[str]:
    """Lines for people; the option file has the rest."""
    model, passes = best.model, record["passes"]
    of_data = "" if passes is None else f", {passes:,.2f} passes over the data"
    if best.is_all_data:
        left = _time(3600 * record["hours"] - best.time)
        of_data += f"; more passes are worth little: more data would use {left} more"
    timed = ", as timed here" if record["timed"] else ""
    return [
        "[Recipe]",
        f"  Card:        {record['gpus']} x {record['card']}, {record['source']}",
        f"  Model:       {best.parameters / 1e6:,.1f}M parameters, {model.num_layers} blocks of "
        f"{model.hidden_size} channels, {model.vocab_size:,} ids",
        f"  Data:        {best.tokens / 1e6:,.0f}M tokens{of_data}",
        f"  Steps:       {best.config.steps:,} of {best.need.tokens:,} tokens, "
        f"{record['tokens_per_second']:,.0f} tokens/s ± {100 * best.step_error:.0f} %{timed}",
        *_promise(best, record),
    ]


def _promise(best: Recipe, record: dict[str, Any]) -> list[str]:
    """Lines with loss, time, energy and cost, and their errors."""
    percent = {name: 100 * record[f"{name}_error"] for name in ("seconds", "kwh")}
    parts = ", ".join(f"{name} {_time(s)}" for name, s in record["seconds_of"].items() if s)
    lines = [
        f"  Loss:        {_promised_loss(best)}",
        f"  By the law:  {record['law']}",
        f"  Time:        {_time(record['seconds'])} ± {percent['seconds']:.1f} %: {parts}",
    ]
    if record["kwh"] is None:
        return [*lines, "  Energy:      not known: this card has no power limit of its own"]
    energy = f"{record['kwh']:.3g} kWh ± {percent['kwh']:.0f} %"
    lines.append(f"  Energy:      {energy}, the GPUs alone at their power limit")
    if record["cost"] is not None:
        lines.append(f"  Cost:        {record['cost']:,.2f} ± {percent['seconds']:.0f} %")
    return lines


def _promised_loss(best: Recipe) -> str:
    """Text of the loss and its error, or the reason why none is promised."""
    if not best.has_ground:
        guess, ids = math.log(best.model.vocab_size), f"{best.model.vocab_size:,} ids"
        why = f"{best.loss:.3f} is above {guess:.3f}, which a guess among {ids} has"
        return f"none is promised: {why}"
    text = f"{best.loss:.3f} ± {100 * OTHER_TEXT:.1f} % (nats a token)"
    return f"{text}, by a law of other texts, whose losses differ"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"


def _notes(best: Recipe) -> dict[str, str]:
    """Reason of each chosen option, by field."""
    config, model = best.config, best.model
    muon = config.optimizer in MUONS
    law = f"the lowest loss of all sizes that was found by {best.law.source}"
    law += "" if best.has_ground else ", which has no ground here"
    return {
        "model": "The architecture, of which the sizes below are the recipe's",
        "hidden_size": f"{best.parameters / 1e6:,.1f}M parameters have {law}",
        "steps": f"{best.tokens / 1e6:,.0f}M tokens, as many as there is time for",
        "batch_size": "The fastest division of a step's tokens that fits, by the plan",
        "grad_accumulation": f"{best.need.tokens:,} tokens a step: 0.58 D^0.571 for D tokens, "
        "arXiv:2503.04715, as a power of two"
        + (", for Muon up to four times as many, where these are faster" if muon else ""),
        "warmup": "A thirtieth of the steps",
        "lr_schedule": "To zero in a line, which wins at a fixed length (arXiv:2502.15938)",
        "max_hours": "A seat belt: a run that is later than the promise and twice its error ends "
        "with a checkpoint",
        "eval_every_n_steps": "Validations take at most 2 % of the time",
        "matmul_dtype": "fp8 is faster by more than its numbers cost"
        if config.is_fp8
        else "The format of products",
        "vocab_size": f"As many ids as the data have: {model.vocab_size:,}",
    } | best.notes
