"""How the options of a run differ from those of the checkpoint that it goes on from."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError
from llmq.checkpoint.manifest import Manifest
from llmq.options.command_line import flag
from llmq.options.options import ONCE, OPTIONS, TrainConfig

# Options that have nothing to do with what is computed, beside paths and the length of the run.
_ELSEWHERE = "model from_scratch init_proj_to_zero train_file eval_file eval_seed steps"
_ELSEWHERE += " epochs eval_every_n_steps eval_num_steps allow_other_tokenizer adapter scores"

# Options that change nothing but the order in which numbers are added up.
_ROUNDING = ("lmhead_chunks", "attention", "tune")
_ROUNDING_OF_RANKS = ("shard_gradients", "shard_over", "all_to_all_reduce")


_OF_GROUPS = ("model_dtype", "batch_size", "learning_rate", "lora_rank", "loss")
"""An option of each group that decides what is computed."""


class Changes(NamedTuple):
    """Lines about the options that were other ones in the checkpoint's run."""

    numbers: list[str]
    """The options that make other numbers."""
    others: list[str]


def changed_options(
    config: TrainConfig,
    world_size: int,
    manifest: Manifest,
    saved_world_size: int,
    *,
    new_data: bool = False,
) -> Changes:
    """The options that were changed. Options that change numbers by rounding only have one line
    together.

    manifest: what its options lack is not compared. new_data: whether the data starts anew.
    """
    seed = {"train_seed": manifest.loader["seed"]} if manifest.loader else {}
    saved = {"optimizer": "adamw"} | manifest.options | seed
    groups = {OPTIONS[name].group for name in _OF_GROUPS}
    names = [n for n, option in OPTIONS.items() if option.group in groups]
    names = [n for n in names if n not in _ELSEWHERE.split()]
    if config.final_lr_fraction != 1 or config.cooldown > 0:
        names += ["steps", "epochs"]  # the learning rate depends on when the run ends
    if not new_data:
        names.remove("train_seed")  # the order is the checkpoint's, see below
    sizes = ("batch_size", "seq_len", "grad_accumulation")
    tokens, before = world_size, saved_world_size
    for name in sizes:
        tokens, before = tokens * getattr(config, name), before * saved.get(name, math.nan)
    if tokens == before:  # more ranks with fewer micro-steps each take the same step
        names.remove("grad_accumulation")
    every = [name for name in OPTIONS if _differs(name, config, saved)]
    told = [name for name in names if name in every]
    lines = _changes(told, config, saved)
    if "optimizer" in every:
        lines.append("moments begin at zero: those of another --optimizer say something else")
    if not new_data and saved.get("train_seed", config.train_seed) != config.train_seed:
        lines.append(
            f"{flag('train_seed', config.train_seed)} has no effect: the data goes on in the order "
            f"of the checkpoint's run ({saved['train_seed']}); --new-data starts it anew"
        )
    if config.adapter is not None and "adapter" in every:
        told.append("adapter")
        lines.append(
            f"{flag('adapter', config.adapter)} has no effect: the run goes on with the adapters "
            "of its checkpoint"
        )
    if not math.isnan(before) and tokens != before:
        lines.append(f"a step has {tokens} tokens, in the checkpoint's run it had {before}")
    rounding = [*_ROUNDING, *(_ROUNDING_OF_RANKS if max(world_size, saved_world_size) > 1 else ())]
    rounded = [n for n in rounding if n in every]
    if rounded:
        flags = [f"{flag(n, getattr(config, n))} (was {flag(n, saved[n])})" for n in rounded]
        lines.append(
            f"numbers may be rounded otherwise than in the checkpoint's run: {', '.join(flags)}"
        )
    told += [*rounded, *(() if new_data else ("train_seed",))]
    left = [name for name in every if name not in told]
    return Changes(lines, _changes(left, config, saved))


def _differs(name: str, config: TrainConfig, saved: dict[str, Any]) -> bool:
    """Whether an option was another one; what an older version did not have is not compared."""
    if name not in saved or name in ONCE:
        return False
    try:
        then = None if saved[name] is None else OPTIONS[name].convert(saved[name])
    except ConfigError:  # of another version
        return True
    return then != getattr(config, name)


def _changes(names: list[str], config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """One line for each option; formats that changed alike, as those that follow --model-dtype do,
    have one together."""
    lines: dict[Any, list[str]] = {}
    for name in names:
        now, then = _shown(name, getattr(config, name)), _shown(name, saved[name])
        alike = (now, then) if name.endswith("_dtype") else name
        lines.setdefault((alike, now, then), []).append(OPTIONS[name].flag)
    told = []
    for (_, now, then), flags in lines.items():
        several = len(flags) > 1
        told.append(
            f"{', '.join(flags)} {'are' if several else 'is'} {now}, in the checkpoint's run "
            f"{'they were' if several else 'it was'} {then}"
        )
    return told


def _shown(name: str, value: Any) -> Any:
    no_limit = value is None or (name == "steps" and value < 0)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "not given"
    return "not given" if no_limit else value
