"""`llmq score`: what a model thinks of each token of token files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError
from llmq.commands.common import ConfigFile, load_run, train_options
from llmq.commands.plan import CardName

# A model that is not trained may be kept in any format, and be streamed.
DEFAULTS = {
    **{"only_scores": True, "recompute_block": True, "grad_accumulation": 1},
    **{"packing": "best-fit"},
    **{"eval_file": "none", "ckpt_interval": 0, "save_training_state": False},
}


@train_options
def score(
    given: dict[str, Any],
    scored: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As --model of llmq train: whose scores are wanted."),
    ],
    data: Annotated[list[str], typer.Argument(help="Token files, patterns, folders of tokenize.")],
    out: Annotated[Path, typer.Option(help="Directory of the scores.")],
    config_file: ConfigFile = None,
    top_k: Annotated[
        int, typer.Option(min=0, max=255, help="A teacher's: so many probabilities of each token.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print memory and predicted speed, and stop.")
    ] = False,
    card: CardName = None,
) -> None:
    """Write the log-probability of each trained token of token files, for losses that read it."""
    for name, instead in (("model", "MODEL"), ("train-file", "DATA")):
        if name in given:
            raise ConfigError(f"--{name}: {instead} says it here")
    patterns = [f"{pattern}/*.bin" if Path(pattern).is_dir() else pattern for pattern in data]
    given = given | {"model": scored, "train-file": patterns}
    if top_k:
        given |= {"loss": "kd", "kd-top-k": str(top_k), "scores": str(out)}
    if card is not None and not dry_run:
        raise ConfigError("--card: is for --dry-run")
    how = {"plans": True} if dry_run else {"trains": True}
    config, model, model_dir, _ = load_run(given, config_file, defaults=DEFAULTS, **how)
    if dry_run:
        from llmq.plan.report import run_plan

        run_plan(config, model, card=card)
        return
    from llmq.run.evaluate import run_score

    run_score(config, model, model_dir, out, top_k)
