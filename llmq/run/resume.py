"""The options and the log that a run takes over from its checkpoint when it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, warn
from llmq.base.run_id import RunId
from llmq.checkpoint.folder import check_shared
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.store import (
    NoCheckpoint,
    checkpoint_owner,
    find_checkpoint,
    saved_options,
)
from llmq.options.command_line import fewest_values, flag
from llmq.options.option_types import NEWEST
from llmq.options.options import ONCE, OPTIONS, TrainConfig
from llmq.run.agreement import compare
from llmq.run.find_log import log_of_run
from llmq.run.stages import of_longest
from llmq.runtime.processes import processes

_PLACES = ("name", "out_dir", "checkpoint_dir", "log_file", *ONCE)
_WRITTEN = ("out_dir", "checkpoint_dir", "log_file", "tensorboard", "wandb")
_FOUND_BY = ("continue_from", "name", "checkpoint_dir")
_FIXED = ("from_scratch", "init_proj_to_zero")  # of the weights that a run begins with


def inherited_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the checkpoint that --continue names, by field, in place of the defaults.

    Only those that are not as by default, or are implied by others; {} without --continue or where
    no checkpoint is. given: what the user has set, by field. ConfigError for what cannot be
    changed, and for --continue with nothing to begin with.
    """
    spec = given.get("continue_from")
    compare({OPTIONS[name].flag: given.get(name) for name in _FOUND_BY}, ConfigError)
    if spec is None:
        return {}
    where = {name: given[name] for name in ("name", "checkpoint_dir") if name in given}
    directory = TrainConfig(**where).normalized().checkpoint_dir
    if spec == NEWEST or spec.isdecimal():
        check_shared(directory)
    checkpoint = find_checkpoint(directory, spec)
    if checkpoint is None:
        if spec != NEWEST and "model" not in given:
            raise NoCheckpoint(directory, spec)
        if spec == NEWEST and given.keys() <= set(_PLACES):
            raise ConfigError(
                f"--continue: no complete checkpoint in '{directory}' to take the options from: "
                "give the --name or the --checkpoint-dir of a run, or all options of a new one"
            )
        return {}
    document = processes().on_first(lambda: read_manifest(checkpoint / MANIFEST))
    saved, owner = _known(saved_options(document), checkpoint), RunId.of(document["run"])
    homes = [directory, TrainConfig(name=saved.get("name", "")).normalized().checkpoint_dir]
    is_home = checkpoint.resolve().parent in [home.resolve() for home in homes]
    # Before what may differ is looked at.
    log = processes().on_first(lambda: _log_of(saved, owner)) if is_home else None
    saved.pop("adapter", None)  # the checkpoint has gone on from it
    for name in _FIXED:
        if name in given and given[name] != saved.get(name, given[name]):
            raise ConfigError(
                f"{flag(name, given[name])}: cannot be changed, because the weights are those of "
                f"the checkpoint '{checkpoint}'"
            )
    inherited = fewest_values(of_longest(TrainConfig(**saved).normalized()))
    if not is_home:
        _forget_places(given, inherited, checkpoint)
    if owner is not None and given.get("name", owner.name) != owner.name:
        _check_fork(given, inherited, owner)
    elif "log_file" not in given and log is not None:
        inherited |= {"log_file": log}
    return inherited


def _forget_places(given: Mapping[str, Any], inherited: dict[str, Any], checkpoint: Path) -> None:
    """Drop where a checkpoint's run wrote: one that lies elsewhere may be anybody's, and does not
    choose where this run writes."""
    there = {name: inherited.pop(name) for name in _WRITTEN if name in inherited}
    lost = [flag(name, value) for name, value in there.items() if name not in given]
    if lost:
        warn(
            [
                f"--continue: '{checkpoint}' lies in no place of this run, so that the places it "
                f"names are not taken: give {', '.join(lost)} to write there"
            ]
        )


def _log_of(saved: dict[str, Any], owner: RunId | None) -> Path | None:
    """The place where the log of the checkpoint's run is now."""
    if not saved.get("log_file"):
        return None
    return log_of_run(owner or RunId("", "", adopts=True), Path(saved["log_file"]))


def _known(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Those that this version has, without those of a single command."""
    unknown = sorted(saved.keys() - {field.name for field in fields(TrainConfig)})
    if unknown:
        warn([f"checkpoint '{checkpoint}': options not known here: {', '.join(unknown)}"])
    return {name: saved[name] for name in OPTIONS if name in saved and name not in ONCE}


def _check_fork(given: Mapping[str, Any], inherited: dict[str, Any], parent: RunId) -> None:
    """ConfigError if the fork would write to a place of its parent's that has no name in it."""
    for name in ("out_dir", "checkpoint_dir"):
        if name in inherited and name not in given:
            raise ConfigError(
                f"{OPTIONS[name].flag}: '{inherited[name]}' is that of {parent}, from which "
                f"'{given['name']}' forks: give another one"
            )


def fork_lines(run: RunId, checkpoint: Path | None) -> list[str]:
    """The lines on a run that begins as a fork of another one now."""
    if checkpoint is None or run.parent is None or run.owns(checkpoint_owner(checkpoint)):
        return []
    return [f"This is {run}, a fork of {run.parent}"]
