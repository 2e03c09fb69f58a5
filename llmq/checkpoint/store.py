"""The checkpoints in a directory: their steps, their owners, and what their manifests record."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from llmq.base.files import json_object
from llmq.base.run_id import RunId
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.folder import delete, entries, is_complete, leftovers
from llmq.checkpoint.manifest import MANIFEST, DamagedManifest, manifest_damage, read_manifest
from llmq.data.identity import TokenizerId

VERDICT = "verdict.json"


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a directory by step, in ascending order.

    LlmqError if a checkpoint was renamed to another step, which would change the order.
    """
    checkpoints = checkpoints_by_name(directory)
    for path in checkpoints.values():
        check_name(path)
    return checkpoints


def checkpoints_by_name(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a directory, by the step in the name, ascending. Damaged
    checkpoints whose checkpoint.json is no regular file are included. LlmqError if the directory
    cannot be listed."""
    checkpoints = {}
    for path in entries(directory):
        step = _named_step(path)
        if step is not None and (is_complete(path) or os.path.lexists(path / MANIFEST)):
            checkpoints.setdefault(step, path)
    return dict(sorted(checkpoints.items()))


def _named_step(path: Path) -> int | None:
    name = re.fullmatch(r"step_(\d+)(\.llmq-old|\.old)?", path.name)  # see publish_directory
    return int(name[1]) if name else None


def _recorded(path: Path) -> dict[str, Any]:
    """Return step and run of a complete checkpoint as its manifest has them; {} if the manifest is
    damaged."""
    try:
        run = read_manifest(path / MANIFEST)["run"]
    except DamagedManifest:
        return {}
    except LlmqError:  # another version: step and run are still valid
        run = json_object(path / MANIFEST).get("run")
    return run if isinstance(run, dict) and type(run.get("step", 0)) is int else {}


def damaged_checkpoints(directory: Path) -> dict[Path, str]:
    """Return the checkpoints in a directory whose checkpoint.json is damaged, each with the reason.
    Such checkpoints belong to no run. LlmqError if the directory cannot be listed."""
    steps = (path for path in entries(directory) if _named_step(path) is not None)
    reasons = {path: manifest_damage(path / MANIFEST) for path in steps}
    return {path: reason for path, reason in reasons.items() if reason is not None}


def checkpoint_owner(path: Path) -> RunId | None:
    """Return the id of the run that wrote a checkpoint; None if the checkpoint is damaged or names
    no run."""
    return RunId.of(_recorded(path))


def checkpoint_step(path: Path) -> int:
    """Return the step in a complete checkpoint's manifest, whatever its name says; 0 if the
    manifest is damaged."""
    return _recorded(path).get("step", 0)


def saved_options(document: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint's run by field, with the seed and order of data that the
    loader recorded. document: content of the manifest. Versions without --data-order shuffled only
    packed and weighted files."""
    loader = document["data-loader"]
    if "seed" not in loader:
        return document["options"]
    order = {"data_order": "shuffle" if "order" in loader else "llmq"}
    return order | document["options"] | {"train_seed": loader["seed"]}


def saved_log(path: Path) -> Path | None:
    """Return the log file of a complete checkpoint's run; None if the manifest names no log
    file."""
    options = json_object(path / MANIFEST).get("options")
    log = options.get("log_file") if isinstance(options, dict) else None
    return Path(log) if isinstance(log, str) else None


def recorded_tokenizer(path: Path) -> TokenizerId | None:
    """The tokenizer that made the training data of a complete checkpoint; None if not recorded."""
    return TokenizerId.from_record(json_object(path / MANIFEST).get("tokenizer-id"))


def check_name(path: Path) -> None:
    """LlmqError if the step in a checkpoint's name differs from the step in its manifest."""
    named, recorded = _named_step(path), _recorded(path).get("step")
    if None not in (named, recorded) and named != recorded:
        raise LlmqError(
            f"'{path}' holds step {recorded}, though its name says {named}: rename it to "
            f"step_{recorded:08d}, or to a name that is no step"
        )


# ------------------------------------------------------------------------------------------------
# Models


# Fields of a model that do not change the computation with its weights.
_NO_CONSTANTS = {"architecture", "max_positions", "initializer_range", "bos_token_id"}
_NO_CONSTANTS |= {"eos_token_id", "other_eos_token_ids", "pad_token_id", "new_tokens"}


def check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """LlmqError if this model would compute something else with the checkpoint's weights than the
    checkpoint's own model."""
    now = asdict(model)
    changes = [
        f"{name} was {value}, now it is {now[name]}"
        for name, value in asdict(reader.manifest.model).items()
        if name not in _NO_CONSTANTS and value != now[name]
    ]
    if changes:
        raise LlmqError(
            f"checkpoint '{reader.path}' is of another model: {', '.join(changes)}; to change a "
            "model, edit the config.json that `llmq export` writes, and train from there"
        )


# ------------------------------------------------------------------------------------------------
# Checkpoints of one run


def delete_old(directory: Path, run: RunId, steps: Collection[int]) -> list[Path]:
    """Delete a run's checkpoints of these steps, and leftovers of interrupted saves; return the
    deleted directories. No save may be under way. Checkpoints of other runs, renamed checkpoints
    and links stay; a warning names a checkpoint that cannot be deleted."""
    own = own_checkpoints(directory, run) if steps else {}
    return delete([*leftovers(directory), *(own[step] for step in steps if step in own)])


def own_checkpoints(directory: Path, run: RunId) -> dict[int, Path]:
    """Return the checkpoints of this run by step, damaged ones included, but not renamed ones or
    links."""
    checkpoints = {}
    for step, path in checkpoints_by_name(directory).items():
        recorded = {} if path.is_symlink() else _recorded(path)
        if run.owns(RunId.of(recorded)) and recorded.get("step") in (step, None):
            checkpoints[step] = path
    return checkpoints
