"""`llmq rl`: from a reward function to a better model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.commands.common import (
    ConfigFile,
    SaveConfig,
    load_run,
    option,
    save_config,
    train_options,
)

Prompts = option(
    Path,
    "Records with `prompt`, a text or the messages of a chat, and with all that the reward reads: "
    "JSON, CSV or Parquet.",
)
Reward = option(
    str,
    "A Python function of the texts of a prompt's samples and of its record, which returns a "
    "number for each text, or its components by name.",
    metavar="FILE.py:FUNCTION",
)
ScaleRewards = option(
    bool | None,
    "Divide advantages by the standard deviation of their prompt's rewards; on if not given, off "
    "with --loss dr-grpo.",
    "--scale-rewards/--no-scale-rewards",
)
SkipCut = option(bool, "Leave samples that --max-new-tokens has cut untrained.", "--skip-cut")
KeepEqual = option(
    bool,
    "Train prompts whose samples have equal rewards, too: their advantages are 0, and the mean of "
    "the loss counts them.",
    "--keep-equal",
)
OnRewardError = option(
    str,
    "Where the function raises, hangs, or returns no numbers; stop: the run ends with a "
    "checkpoint, skip: the samples of the prompt are not trained.",
    metavar="stop|skip",
)


@train_options
def rl(
    given: dict[str, Any],
    prompts: Prompts,
    reward: Reward,
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    prompts_per_step: option(int, "Prompts that are sampled for a step.", min=1) = 8,
    num_samples: option(int, "Samples of each prompt.", min=2) = 8,
    max_new_tokens: option(int, "Tokens of a sample, at most.", min=1) = 256,
    temperature: option(float, "Of the samples.", min=0.01) = 1.0,
    updates: option(int, "Optimizer steps that train the same samples.", min=1) = 1,
    scale_rewards: ScaleRewards = None,
    skip_cut: SkipCut = False,
    keep_equal: KeepEqual = False,
    on_reward_error: OnRewardError = "stop",
    reward_seconds: option(float, "Longest call of the function.", min=0.1) = 60.0,
    reward_workers: option(int, "Processes that call the function.", min=1) = 1,
    chat_template: option(str | None, "As that of `llmq tokenize`.") = None,
) -> None:
    """Train a model on its own samples, by rewards that a function of yours gives.

    llmq rl --model models/mine --prompts sums.jsonl --reward rewards.py:score
    """
    from llmq.base.errors import ConfigError
    from llmq.run.rl import run_rl
    from llmq.run.rollouts import RolloutOptions

    if on_reward_error not in ("stop", "skip"):
        raise ConfigError(f"--on-reward-error: expected stop or skip, got {on_reward_error!r}")
    options = RolloutOptions(
        prompts_per_step=prompts_per_step,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        updates=updates,
        scale=scale_rewards,
        skip_cut=skip_cut,
        keep_equal=keep_equal,
        on_reward_error=on_reward_error,
        chat_template=chat_template,
    )
    defaults = {"loss": "dapo", "train_file": ("none",), "eval_file": "none"}
    defaults |= {"document_mask": True, "packing": "concat"}
    config, model, model_dir, fields = load_run(given, config_file, defaults=defaults)
    if "grad_accumulation" not in fields:  # as many as the samples may fill
        rows = prompts_per_step * num_samples
        config = replace(config, grad_accumulation=-(-rows // config.batch_size))
    if config.loss == "dr-grpo" and "loss_params" not in fields:
        others = [text for text in config.loss_params if not text.startswith("length=")]
        config = replace(config, loss_params=(*others, f"length={max_new_tokens}"))
    if config.has_reference:
        config = replace(config, keep_reference=True)
    save_config(save, config)
    how = {"seconds": reward_seconds, "workers": reward_workers, "options": options}
    run_rl(config, model, model_dir, sys.argv, prompts=prompts, reward=reward, **how)
