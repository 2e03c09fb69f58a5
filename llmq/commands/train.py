"""`llmq train`: a run, or the plan of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError
from llmq.commands.common import (
    ConfigFile,
    Reserve,
    SaveConfig,
    load_run,
    save_config,
    size_of,
    train_options,
)
from llmq.commands.several import joined
from llmq.config.command_line import command_line
from llmq.runtime.processes import Processes, refuse_several


@train_options
def train(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan the memory, print it and exit.")
    ] = False,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Choose micro-batch, recomputation, offloading and sharding for this machine; "
            "what is given stays, micro-batch times accumulation too.",
        ),
    ] = False,
    reserve: Reserve = None,
) -> None:
    """Train a model, or continue to."""
    if auto:
        refuse_several("--auto", "let `llmq plan --fit` choose the options beforehand")
    if dry_run:
        refuse_several("--dry-run", "use `llmq plan`")
    with joined() as processes:
        _train(processes, given, config_file, save, dry_run, auto, reserve)


def _train(
    processes: Processes,
    given: dict[str, Any],
    config_file: Path | None,
    save: Path | None,
    dry_run: bool,
    auto: bool,
    reserve: str | None,
) -> None:
    if reserve is not None and not auto:
        raise ConfigError("--reserve: needs --auto; use --memory-limit to bound a run without it")
    weights = not dry_run
    config, model, model_dir, fields = load_run(given, config_file, trains=True, weights=weights)
    if config.lora_rank and config.from_scratch and not dry_run:
        raise ConfigError(
            "--lora-rank: adapters need a trained model, and --from-scratch has random weights: "
            "give the directory or the repository of one as --model"
        )
    processes.start_heartbeat(config.watchdog)
    argv = sys.argv
    if auto:
        from llmq.plan.report import choose

        config = choose(config, model, fields, size_of("--reserve", reserve, least=0))
        argv = command_line(config)
    processes.on_first(lambda: save_config(save, config))
    if dry_run:
        from llmq.plan.report import run_plan

        run_plan(config, model)
        return
    from llmq.train.loop import run_training

    run_training(config, model, model_dir, argv)
