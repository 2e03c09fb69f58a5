"""`llmq rl`: trains a model on its own samples, by a reward function or a teacher."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.commands.common import ConfigFile, SaveConfig, load_run, save_config, train_options
from llmq.options.options import TrainConfig


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return default options of a run on samples, by field. values: given options, by field."""
    own = {"samples": True, "train_file": ("none",), "eval_file": "none"}
    own |= {"document_mask": True, "packing": "concat"}
    if values.get("teacher") is None:
        return own | {"loss": "dapo"}
    return own | {"loss": "kd", "loss_params": ("divergence=reverse",)}


def load_rl(
    given: dict[str, Any], file: Path | None, **how: Any
) -> tuple[TrainConfig, ModelConfig, Path | None, frozenset[str]]:
    """Return options and model of a run on samples. Arguments and result: see `load_run`. Without
    --grad-accumulation, a step has as many micro-batches as its samples may fill."""
    config, model, model_dir, fields = load_run(given, file, defaults=_defaults, **how)
    if "grad_accumulation" not in fields:
        needed = -(-config.prompts_per_step * config.num_samples // config.batch_size)
        least = 1 if config.continue_from is None else config.grad_accumulation
        config = replace(config, grad_accumulation=max(needed, least))
    return config, model, model_dir, fields


@train_options
def rl(given: dict[str, Any], config_file: ConfigFile = None, save: SaveConfig = None) -> None:
    """Train a model on its own samples, by rewards from your function.

    llmq rl --model models/mine --prompts sums.jsonl --reward rewards.py:score
    """
    from llmq.run.rl import run_rl

    config, model, model_dir, _ = load_rl(given, config_file)
    save_config(save, config)
    run_rl(config, model, model_dir, sys.argv)
