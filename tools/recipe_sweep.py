"""Show how near a recipe comes to the best of twelve runs around it, which take as long.

    python tools/recipe_sweep.py RECIPE.yaml --data DIR --out OUT [--card NAME] [--part 1/4]
    [--minutes M]

RECIPE.yaml is of `llmq recipe`. The twelve have one or two sizes more or less, twice or half the
tokens a step, rates of all weights or of what AdamW trains beside Muon up to twice or half as high.
Each has as many steps as the plan says that the recipe's time is enough for. The rates of other
widths and steps follow as those of recipes do.

OUT.json has the runs, and what it has is not made again: --part divides them among GPUs, each with
an OUT of its own, and a last call with --join OUT1.json,OUT2.json writes OUT.md of all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import read_json, write_file
from llmq.bench.losses import best_of, loss_of, measure_losses
from llmq.bench.sweep_file import Row
from llmq.options.option_file import read_option_file
from llmq.options.option_types import MUONS
from llmq.options.options import OPTIONS
from llmq.options.options_io import make_config
from llmq.plan.recipe import DEPTHS, WARMUP, round_rate, sizes_of
from llmq.plan.report import target_here
from llmq.plan.target import MachineOptions, target
from llmq.run.model_of_run import model_of_run

RATES = ("learning-rate", "muon-lr")
WITHOUT = "max-hours eval-every-n-steps ckpt-interval ckpt-every-minutes train-file eval-file"
EVERYTHING = 1 << 20  # batches of a validation: more than there are

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def around(recipe: Row) -> dict[str, Row]:
    """The options of the recipe and of the twelve, by what they change, with its steps."""
    if recipe.get("optimizer") in MUONS:
        recipe = {"muon-lr": recipe["learning-rate"]} | recipe
    place = DEPTHS.index(recipe["num-layers"])
    found = {"the recipe": recipe}
    for by in (-1, 1, -2, 2):
        depth = DEPTHS[min(max(place + by, 0), len(DEPTHS) - 1)]
        sizes = {OPTIONS[name].flags[0]: size for name, size in sizes_of(depth).items()}
        scale = (recipe["hidden-size"] / sizes["hidden-size"]) ** 0.5
        found[f"{depth} blocks"] = recipe | sizes | _rates(recipe, scale)
    for name, by in (("half", 0.5), ("twice", 2)):
        size = {"batch-size": max(int(recipe["batch-size"] * by), 1)}
        found[f"{name} the tokens a step"] = recipe | size | _rates(recipe, by**0.5)
    for by in (0.5, 0.7, 1.4, 2):
        found[f"rates times {by:g}"] = recipe | _rates(recipe, by)
    for by in (0.5, 2):
        rate = {"learning-rate": round_rate(recipe["learning-rate"] * by)}
        if "muon-lr" not in recipe:
            rate = {"lr-parts": f"embedding={rate['learning-rate']}"}
        found[f"rates of tables times {by:g}"] = recipe | rate
    return found


def _rates(recipe: Row, by: float) -> Row:
    return {name: round_rate(recipe[name] * by) for name in RATES if name in recipe}


def as_long(rows: dict[str, Row], card: str | None) -> dict[str, Row]:
    """With as many steps as take the time of the first one's, by the plan."""
    seconds: dict[str, float] = {}
    for name, row in rows.items():
        config = make_config(row)
        model, _ = model_of_run(config, weights=False)
        if card is None:
            where = target_here(config, model)
        else:
            where = target(config, model, MachineOptions(card=card), search=True)
        seconds[name] = where.planner(model).estimate(config).time.total
    first = next(iter(seconds.values()))
    steps = {name: round(row["steps"] * first / seconds[name]) for name, row in rows.items()}
    return {
        name: row | {"steps": steps[name], "warmup": max(round(WARMUP * steps[name]), 1)}
        for name, row in rows.items()
    }


def _key(row: Row) -> str:
    """A text that tells a run from the others, on whichever machine it is made."""
    others = (*WITHOUT.split(), "steps", "warmup", "eval-num-steps")
    return json.dumps({k: v for k, v in row.items() if k not in others}, sort_keys=True)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """The runs from the best to the worst, and how far the recipe is from the best."""
    lines = ["| run | parameters | tokens | a step | rate | Muon's | loss |", f"|{' --- |' * 7}"]
    for run in sorted(runs, key=lambda run: (run["loss"] is None, run["loss"])):
        rate = run["options"].get("muon-lr", "-")
        sizes = f"{run['parameters'] / 1e6:.1f}M | {run['tokens'] / 1e6:.0f}M"
        rates = f"{run['tokens_per_step']:,} | {run['learning_rate']:g} | {rate}"
        lines.append(f"| {run['around']} | {sizes} | {rates} | {loss_of(run)} |")
    best, own = best_of(runs), [run for run in runs if run["around"] == "the recipe"]
    if own and None not in (own[0]["loss"], best["loss"]):
        off = own[0]["loss"] / best["loss"] - 1
        lines += ["", f"The recipe is {off:.2%} above the best of {len(runs)}, {best['around']}."]
    return lines


@app.command()
def main(
    recipe: Path,
    data: Annotated[Path, typer.Option(help="Folder with train*.bin and eval*.bin.")],
    out: Annotated[Path, typer.Option(help="Results, without an ending.")],
    card: Annotated[str | None, typer.Option(help="Of whose plan the steps are.")] = None,
    part: Annotated[str, typer.Option(help="Which of the runs: 2/4 is every fourth.")] = "1/1",
    join: Annotated[str, typer.Option(help="Results of parts, instead of runs.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="After which no run begins.")] = 0.0,
) -> None:
    """Train the recipe and twelve runs around it."""
    base = {k: v for k, v in read_option_file(recipe).items() if k not in WITHOUT.split()}
    base |= {"train-file": f"{data}/train*.bin", "eval-file": f"{data}/eval*.bin"}
    rows = around(base | {"eval-num-steps": EVERYTHING})
    head = [
        f"# Around {recipe.name}",
        "",
        f"`{' '.join(['tools/recipe_sweep.py', *sys.argv[1:]])}`",
    ]
    if join:
        runs = [run for file in join.split(",") for run in read_json(Path(file))["runs"]]
    else:
        number, count = map(int, part.split("/"))
        rows = dict(list(as_long(rows, card).items())[number - 1 :: count])
        out.parent.mkdir(parents=True, exist_ok=True)
        runs = measure_losses(list(rows.values()), out.with_suffix(".json"), seconds=60 * minutes)
    if not runs:
        raise ConfigError("--minutes: are too few to begin a run")
    names = {_key(row): name for name, row in around(base).items()}
    lines = [*head, "", *table([{"around": names[_key(run["options"])]} | run for run in runs])]
    write_file(out.with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines[4:]))


if __name__ == "__main__":
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")
