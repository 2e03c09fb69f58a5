"""Options of `llmq rl`, samples of the model and their rewards, with their rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.options.loss_params import POLICIES, named_values
from llmq.options.option_types import RL_GROUP, option, parse_bool, switch
from llmq.options.rule import IMPLY, Rule, idle, refused


@dataclass(frozen=True, kw_only=True)
class RlOptions:
    """Options of samples of the model and of their rewards."""

    prompts: Path | None = option(
        None,
        "Records with `prompt`, a text or the messages of a chat, and with all that the reward "
        "reads: JSON, CSV or Parquet",
        group=RL_GROUP,
    )
    reward: str | None = option(
        None,
        "FILE.py:FUNCTION, a Python function of the texts of a prompt's samples and of its record, "
        "which returns a number for each text, or its components by name; or FILE.py:CLASS, an "
        "environment with `reset(record)` and `step(text)`",
    )
    teacher: str | None = option(
        None,
        "Model with the same tokenizer towards whose distribution the samples are trained, by "
        "--loss kd; --reward is only reported then",
    )
    prompts_per_step: int = option(8, "Prompts that are sampled for a step", min=1)
    num_samples: int = option(8, "Samples of each prompt", min=1)
    max_new_tokens: int = option(256, "Tokens of a sample, at most", min=1)
    max_turns: int = option(8, "Turns of the model with an environment, at most", min=1)
    temperature: float = option(1.0, "Temperature of the samples", min=0.01)
    exact: bool = switch("Generate each text in bits that do not depend on other texts")
    updates: int = option(1, "Optimizer steps that train the same samples", min=1)
    scale_rewards: bool | None = option(
        None,
        "Divide advantages by the standard deviation of their prompt's rewards; on if not given, "
        "off with --loss dr-grpo",
        parse=parse_bool,
    )
    skip_cut: bool = switch("Leave samples that --max-new-tokens has cut untrained")
    keep_equal: bool = switch(
        "Train prompts whose samples have equal rewards, too: their advantages are 0, and the mean "
        "of the loss counts them"
    )
    redraws: int = option(
        0,
        "Times that other prompts replace those whose samples have equal rewards, at most, as in "
        "DAPO",
        min=0,
    )
    overlong_buffer: int = option(
        0,
        "Last tokens of --max-new-tokens that cost reward, as in DAPO: none for a sample that ends "
        "before them, 1 for the longest, and in proportion between; 0: none",
        min=0,
    )
    on_reward_error: str = option(
        "stop",
        "Where the function raises, hangs, or returns no numbers; stop: the run ends with a "
        "checkpoint, skip: the samples of the prompt are not trained",
        choices=("stop", "skip"),
    )
    reward_seconds: float = option(60.0, "Longest call of the function", min=0.1)
    reward_workers: int = option(1, "Processes that call the function", min=1)
    chat_template: str | None = option(
        None, "Template of prompts that are messages, as that of `llmq tokenize`"
    )
    samples: bool = False
    """Not an option: True if the run trains samples of the model, as `llmq rl` does."""


RL_RULES = (
    *refused(
        "prompts reward teacher",
        lambda v, o, files: v is not None and not o.samples,
        "is of `llmq rl`, which trains samples of the model",
    ),
    *refused(
        "prompts reward",
        lambda v, o, script: v is not None,
        "is of `llmq rl`: a program passes records and a function to Rollouts",
    ),
    *idle(
        "prompts_per_step num_samples max_new_tokens temperature updates scale_rewards skip_cut "
        "keep_equal redraws overlong_buffer on_reward_error reward_seconds reward_workers",
        lambda v, o: not o.samples,
        "has no effect, it is of `llmq rl`",
    ),
    *idle(
        "exact",
        lambda v, o, script: not (script or o.samples or o.sample_prompt),
        "has no effect, it is of `llmq rl` and --sample-prompt",
    ),
    *idle(
        "chat_template",
        lambda v, o: not o.samples,
        "has no effect, it is of `llmq rl`, and for conversations of `llmq tokenize`",
    ),
    *refused(
        "overlong_buffer",
        lambda v, o: v > o.max_new_tokens,
        "{value} is more than --max-new-tokens {max_new_tokens}",
    ),
    *idle("redraws", lambda v, o: o.keep_equal, "has no effect with --keep-equal"),
    *refused(
        "teacher", lambda v, o: v is not None and o.loss != "kd", "needs --loss kd, got {loss}"
    ),
    *idle(
        "scale_rewards keep_equal redraws overlong_buffer",
        lambda v, o: o.teacher is not None,
        "has no effect with --teacher, which rewards do not train",
    ),
    Rule(
        option="loss_params",
        effect=IMPLY,
        when=lambda v, o: o.samples and o.loss == "dr-grpo" and "length" not in named_values(v),
        sets=lambda o: {"loss_params": (*o.loss_params, f"length={o.max_new_tokens}")},
    ),
    Rule(
        option="keep_reference",
        effect=IMPLY,
        when=lambda v, o: o.samples and o.loss in POLICIES and o.has_reference,
        sets={"keep_reference": True},
    ),
)
