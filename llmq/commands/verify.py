"""`llmq verify`: whether options that save memory change any bit."""

from typing import Annotated, Any

import typer

from llmq.commands.common import ConfigFile, Json, SaveConfig, load_run, save_config, train_options
from llmq.options.options_io import fields_of, layers_of


@train_options
def verify(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    verify_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 10,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random tokens instead of token files.")
    ] = False,
    json: Json = False,
) -> int:
    """Check that recomputation and offloading change no bit: two runs, exit status 0 if equal."""
    config, model, model_dir, _ = load_run(given, config_file, trains=not synthetic)
    save_config(save, config)
    from llmq.bench.verify import run_verify

    options = {"steps": verify_steps, "synthetic": synthetic, "json": json}
    options["given"] = fields_of(layers_of(given))  # a file may be that of a run
    return 0 if run_verify(config, model, model_dir, **options) else 1
