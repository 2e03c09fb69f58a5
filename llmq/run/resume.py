"""Options and log of a continued run, and comparison with the options of the checkpoint's run.

A run with several sequence lengths has stages of one length each. A stage has its own plan, graphs
and order of the data, and continues from the previous stage's last checkpoint with its steps,
learning rate and moments. Micro-steps of all stages have the same number of tokens: --batch-size
counts the longest sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, warn
from llmq.base.run_id import RunId
from llmq.checkpoint.folder import check_shared
from llmq.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from llmq.checkpoint.states import NoCheckpoint, find_checkpoint
from llmq.checkpoint.store import checkpoint_owner, saved_options
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.data import DataOptions
from llmq.options.groups.model import ModelOptions
from llmq.options.groups.optim import OptimOptions
from llmq.options.groups.precision import PrecisionOptions
from llmq.options.groups.rl import RlOptions
from llmq.options.option_file import fewest_values, flag
from llmq.options.option_types import NEWEST, lengths_of
from llmq.options.options import ONCE, OPTIONS, TrainConfig
from llmq.options.removed import current_options
from llmq.options.sizes import SIZES
from llmq.plan.checks import plan_run
from llmq.run.agreement import compare
from llmq.run.initial_weights import ADAPTED_BY
from llmq.run.run_paths import log_of_run
from llmq.runtime.machine import choose_machine
from llmq.runtime.world import World


class Stage(NamedTuple):
    """The options of a stage, whose steps are [first, stop) of the run. stop: None for the last
    stage."""

    config: TrainConfig
    first: int
    stop: int | None

    def resumed(self, step: int) -> Stage:
        """Return the stage if --continue goes on from a checkpoint of `step`. At the stage's first
        step the stage's data begin anew."""
        begins = step == self.first > 0
        config = replace(self.config, new_data=begins or self.config.new_data)
        return self._replace(config=config)

    def following(self) -> Stage:
        """Return the stage as it follows the previous stage in the same process. The stage
        continues from the previous stage's last checkpoint, not from the user's --continue."""
        config = replace(self.config, continue_from=str(self.first))
        return self._replace(config=config).resumed(self.first)


def stages_of(config: TrainConfig) -> list[Stage]:
    """Return the stages of a run; a single stage without --seq-stages. config: normalized options
    of any stage."""
    if config.seq_stages is None:
        return [Stage(config, 0, None)]
    stages, first, share = [], 0, 0.0
    for length, part in lengths_of(config.seq_stages):
        share += part
        stop = round(share * config.steps)
        own = replace(config, seq_len=length, batch_size=config.micro_tokens // length)
        if first < stop:
            stages.append(Stage(own, first, stop))
        first = stop
    stages[-1] = stages[-1]._replace(stop=None)
    return stages


def of_longest(config: TrainConfig) -> TrainConfig:
    """Return the options of the whole run, given a stage's options: --batch-size and --seq-len are
    those of the longest sequences."""
    return replace(config, **_sizes_of_longest(asdict(config)))


def _sizes_of_longest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return seq_len and batch_size of the run's longest sequences, by field, from a stage's
    options. Returns {} for a run with one length, and if the options are missing or malformed."""
    stages, *sizes = (options.get(name) for name in ("seq_stages", "seq_len", "batch_size"))
    if not isinstance(stages, str) or not all(type(size) is int for size in sizes):
        return {}
    longest = max(lengths_of(stages))[0]
    return {"seq_len": longest, "batch_size": sizes[0] * sizes[1] // longest}


def left_stages(
    config: TrainConfig, model: ModelConfig, checkpoint: Path | None, world: World
) -> list[Stage]:
    """Return the stages that remain after a checkpoint. Each stage is planned here, so that a stage
    that cannot run raises LlmqError before training. All processes call this function."""
    if config.seq_stages is None:
        return stages_of(config)
    step = None if checkpoint is None else read_manifest(checkpoint / MANIFEST)["run"]["step"]
    left = [s for s in stages_of(config) if s.stop is None or (step or 0) < s.stop]
    machine = choose_machine(config.device, config.gpus, world)
    for stage in left:
        plan_run(stage.config.validate_with(model), model, machine)
    return left if step is None else [left[0].resumed(step), *left[1:]]


_PLACES = ("name", "out_dir", "checkpoint_dir", "log_file", *ONCE)
_WRITTEN = ("out_dir", "checkpoint_dir", "log_file", "tensorboard", "wandb")
_FOUND_BY = ("continue_from", "name", "checkpoint_dir")
_FIXED = ("from_scratch", "init_proj_to_zero")  # options that affect only the first weights


def inherited_options(given: Mapping[str, Any], world: World = World()) -> dict[str, Any]:
    """Return the options of the checkpoint that --continue names, by field, without default and
    implied values; {} without a checkpoint. given: options that the user has set. world: the
    processes, which all call this function. Raises ConfigError for options that cannot be changed,
    and if neither a checkpoint nor options define a run."""
    spec = given.get("continue_from")
    compare({OPTIONS[name].flag: given.get(name) for name in _FOUND_BY}, ConfigError, world)
    if spec is None:
        return {}
    where = {name: given[name] for name in ("name", "checkpoint_dir") if name in given}
    directory = TrainConfig(**where).normalized().checkpoint_dir
    if spec == NEWEST or spec.isdecimal():
        check_shared(directory, world)
    checkpoint = find_checkpoint(directory, spec, world=world)
    if checkpoint is None:
        if spec != NEWEST and "model" not in given:
            raise NoCheckpoint(directory, spec)
        if spec == NEWEST and given.keys() <= set(_PLACES):
            raise ConfigError(
                f"--continue: no complete checkpoint in '{directory}' to take the options from: "
                "give the --name or the --checkpoint-dir of a run, or all options of a new one"
            )
        return {}
    document = world.on_first(lambda: read_manifest(checkpoint / MANIFEST))
    saved, owner = _known(saved_options(document), checkpoint), RunId.of(document["run"])
    homes = [directory, TrainConfig(name=saved.get("name", "")).normalized().checkpoint_dir]
    is_home = checkpoint.resolve().parent in [home.resolve() for home in homes]
    # All processes make this collective call before checks that may differ between processes.
    last = saved.get("log_file") if is_home else None
    log = last and world.on_first(lambda: log_of_run(owner, Path(last)))
    saved.pop("adapter", None)  # the checkpoint holds the adapters, trained further
    for name in _FIXED:
        if name in given and given[name] != saved.get(name, given[name]):
            raise ConfigError(
                f"{flag(name, given[name])}: cannot be changed, because the weights are those of "
                f"the checkpoint '{checkpoint}'"
            )
    own = of_longest(TrainConfig(**saved).normalized())
    inherited = fewest_values(own) | _same_course(given, saved)
    if "seq_len" in given:  # one length replaces all stages of the run
        inherited.pop("seq_stages", None)
    if given.get("new_data") and "data_order" not in document["options"]:
        inherited.pop("data_order", None)  # an old version's default, which the user has not chosen
    if not is_home:
        _forget_places(given, inherited, checkpoint)
    if given.get("name", owner.name) != owner.name:
        _check_fork(given, inherited, owner)
    elif "log_file" not in given and log is not None:
        inherited |= {"log_file": log}
    return inherited


_COURSE = ("final_lr_fraction", "cooldown")


def _same_course(given: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's schedule options if the user gives the same --lr-schedule again; else
    {}. A run of an older version, with another default of --final-lr-fraction, thereby keeps its
    learning rates."""
    if given.get("lr_schedule") is None or given["lr_schedule"] != saved.get("lr_schedule"):
        return {}
    course = {name: saved[name] for name in _COURSE if name in saved}
    if course.get("final_lr_fraction") == 1 and "final_lr_fraction" not in given:
        warn(
            f"{flag('lr_schedule', given['lr_schedule'])}: the checkpoint's run has a constant "
            "rate, which stays: give --final-lr-fraction 0 to let the rate fall"
        )
    return course


def _forget_places(given: Mapping[str, Any], inherited: dict[str, Any], checkpoint: Path) -> None:
    """Drop the output folders in the options of a checkpoint from outside this run's folders: a
    foreign checkpoint must not choose where this run writes."""
    there = {name: inherited.pop(name) for name in _WRITTEN if name in inherited}
    lost = [flag(name, value) for name, value in there.items() if name not in given]
    if lost:
        warn(
            f"--continue: '{checkpoint}' lies in no place of this run, so that the places it "
            f"names are not taken: give {', '.join(lost)} to write there"
        )


def _known(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return saved options that this version knows, without options that hold for one command
    only."""
    saved = current_options(saved, f"checkpoint '{checkpoint}': ")
    unknown = sorted(saved.keys() - {field.name for field in fields(TrainConfig)})
    if unknown:
        warn(f"checkpoint '{checkpoint}': options not known here: {', '.join(unknown)}")
    return {name: saved[name] for name in OPTIONS if name in saved and name not in ONCE}


def _check_fork(given: Mapping[str, Any], inherited: dict[str, Any], parent: RunId) -> None:
    """Raise ConfigError if the fork would inherit its parent's explicit --out-dir or
    --checkpoint-dir."""
    for name in ("out_dir", "checkpoint_dir"):
        if name in inherited and name not in given:
            raise ConfigError(
                f"{OPTIONS[name].flag}: '{inherited[name]}' is that of {parent}, from which "
                f"'{given['name']}' forks: give another one"
            )


def fork_lines(run: RunId, checkpoint: Path | None) -> list[str]:
    """Return a line that names the parent of a run that begins as a fork; else []."""
    if checkpoint is None or run.parent is None or run.owns(checkpoint_owner(checkpoint)):
        return []
    return [f"This is {run}, a fork of {run.parent}"]


# Options without influence on results, besides paths and the length of the run.
_ELSEWHERE = "model from_scratch init_proj_to_zero train_file eval_file eval_seed steps"
_ELSEWHERE += " epochs eval_every_n_steps eval_num_steps allow_other_tokenizer adapter scores"
_ELSEWHERE += " prompts reward_seconds reward_workers context_parallel"

# Options that change only the order in which numbers are added up.
_ROUNDING = ("lmhead_chunks", "attention", "tune")
_ROUNDING_OF_RANKS = ("shard_gradients", "shard_over", "all_to_all_reduce", "share")
_ROUNDING_OF_RANKS += ("context_parallel",)


_COMPUTED = (ModelOptions, DataOptions, BatchOptions, OptimOptions, PrecisionOptions, RlOptions)
"""The groups of options that decide which numbers a run computes."""


class Changes(NamedTuple):
    """Lines about options whose values differ from the values in the checkpoint's run."""

    numbers: list[str]
    """Lines about options that change results."""
    others: list[str]


def changed_options(
    config: TrainConfig,
    world_size: int,
    manifest: Manifest,
    saved_world_size: int,
    *,
    new_data: bool = False,
) -> Changes:
    """Compare the options with the checkpoint's options. Options that only change rounding share
    one line. manifest: the checkpoint's manifest, whose missing options are not compared. new_data:
    True if the data start anew."""
    seed = {"train_seed": manifest.loader["seed"]} if manifest.loader else {}
    saved = current_options(
        {"optimizer": "adamw"} | manifest.options | seed, "the checkpoint: ", quiet=True
    )
    saved, config = saved | _sizes_of_longest(saved), of_longest(config)
    computed = {field.name for group in _COMPUTED for field in fields(group)}
    computed -= {*_ELSEWHERE.split(), *SIZES}
    names = [name for name in OPTIONS if name in computed]
    if config.final_lr_fraction != 1 or config.cooldown > 0 or 0 < config.warmup < 1:
        names += ["steps", "epochs"]  # the learning rate depends on when the run ends
    if not new_data:
        names.remove("train_seed")  # without effect, as a line below says
    parts, parts_before = config.context_parallel, saved.get("context_parallel", 1)
    tokens, before = world_size // parts, saved_world_size // parts_before
    for name in ("batch_size", "seq_len", "grad_accumulation"):
        tokens, before = tokens * getattr(config, name), before * saved.get(name, math.nan)
    if tokens == before:  # equal: each step is the same, shared by more or fewer ranks
        names.remove("grad_accumulation")
    # Adapters are compared by the matrices that these options name (`check_checkpoint`).
    every = [n for n in OPTIONS if n not in ADAPTED_BY and _differs(n, config, saved)]
    told = [name for name in names if name in every]
    lines = _changes(told, config, saved)
    if manifest.options.get("token_weights", config.token_weights) != config.token_weights:
        now = _shown("", config.token_weights)
        lines.append(f"weights of messages are {now} now, unlike in the checkpoint's run")
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
    return Changes(lines, _changes([n for n in every if n not in told], config, saved))


def _differs(name: str, config: TrainConfig, saved: dict[str, Any]) -> bool:
    """Return True if an option differs; options that an older version lacked are not compared."""
    if name not in saved or name in ONCE:
        return False
    try:
        then = None if saved[name] is None else OPTIONS[name].convert(saved[name])
    except ConfigError:  # only another version knows the value
        return True
    return then != getattr(config, name)


def _changes(names: list[str], config: TrainConfig, saved: dict[str, Any]) -> list[str]:
    """Return a line for each changed option; dtypes that changed with --model-dtype share a
    line."""
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
