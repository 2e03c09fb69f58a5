"""The checkpoints of a run: find the one to go on from, delete old ones, export one as a model."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import LlmqError
from llmq.base.files import disk_errors
from llmq.base.run_id import RunId
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.hf import export_model
from llmq.checkpoint.manifest import MANIFEST
from llmq.config.command_line import flag
from llmq.config.model import ModelConfig
from llmq.config.option_types import NEWEST
from llmq.config.options import OPTIONS, TrainConfig
from llmq.data.identity import TokenizerId
from llmq.data.tokenizer import ByteTokenizer
from llmq.state.params import weight_table


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by step, oldest first.

    LlmqError if one was renamed to another step: their order would not be what it seems.
    """
    found = checkpoints_by_name(directory)
    for path in found.values():
        _check_name(path)
    return found


def checkpoints_by_name(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by the step in their name, in this order."""
    found = {}
    for path in sorted(directory.glob("step_*")):
        step = _named_step(path)
        if step is not None and (path / MANIFEST).is_file():
            found.setdefault(step, path)
    return dict(sorted(found.items()))


def _named_step(path: Path) -> int | None:
    name = re.fullmatch(r"step_(\d+)(\.old)?", path.name)  # .old: see publish_directory
    return int(name[1]) if name else None


def _document(path: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself; {} if it is damaged: reading it will tell."""
    try:
        return dict(json.loads((path / MANIFEST).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _recorded(path: Path) -> dict[str, Any]:
    """Step and run of a complete checkpoint; {} if it is damaged."""
    run = _document(path).get("run")
    return run if isinstance(run, dict) else {}


def checkpoint_owner(path: Path) -> RunId | None:
    """Whose checkpoint it is; None before runs had ids, and where it is damaged."""
    return RunId.of(_recorded(path))


def recorded_tokenizer(path: Path) -> TokenizerId | None:
    """What made the data of a complete checkpoint's run, None where it does not say so."""
    return TokenizerId.from_record(_document(path).get("tokenizer-id"))


def _check_name(path: Path) -> None:
    named, recorded = _named_step(path), _recorded(path).get("step")
    if None not in (named, recorded) and named != recorded:
        raise LlmqError(
            f"'{path}' holds step {recorded}, though its name says {named}: rename it to "
            f"step_{recorded:08d}, or to a name that is no step"
        )


def find_checkpoint(directory: Path, spec: str = NEWEST) -> Path | None:
    """The checkpoint that --continue names, None if there is no complete one.

    spec: NEWEST in `directory`; a step in `directory`; or a path as for checkpoint_at.
    """
    if spec.isdecimal():
        return list_checkpoints(directory).get(int(spec))
    if spec == NEWEST:
        return checkpoint_at(directory)
    return checkpoint_at(Path(os.path.abspath(os.path.expanduser(spec))))


def checkpoint_at(path: Path) -> Path | None:
    """A complete checkpoint, whatever its directory is called, or the newest in a directory.

    LlmqError if it is called like another step.
    """
    path = Path(os.path.expanduser(path))
    if (path / MANIFEST).is_file():
        _check_name(path)
        return path
    found = list_checkpoints(path)
    return found[max(found)] if found else None


# Of a model, what changes nothing in what its weights compute.
_NO_CONSTANTS = {"architecture", "max_positions", "initializer_range", "bos_token_id"}
_NO_CONSTANTS |= {"eos_token_id", "other_eos_token_ids", "pad_token_id"}


def check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """LlmqError if the checkpoint's weights would compute something else in this model."""
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


# Options that have nothing to do with what is computed, beside paths and the length of the run.
_ELSEWHERE = "model download from_scratch init_proj_to_zero train_file eval_file eval_seed steps"
_ELSEWHERE += " epochs eval_every_n_steps eval_num_steps allow_other_tokenizer"

# Options that change nothing but the order in which numbers are added up.
_ROUNDING = ("lmhead_chunks", "attention", "tune")
_ROUNDING_OF_RANKS = ("shard_gradients", "all_to_all_reduce")


def changed_options(
    config: TrainConfig,
    world_size: int,
    saved: dict[str, Any],
    saved_world_size: int,
    *,
    new_data: bool = False,
) -> list[str]:
    """One line for each option that makes other numbers than those of a checkpoint's run.

    One more for all that change them by rounding only.

    saved: Manifest.options; what it lacks is not compared. new_data: whether the data starts anew.
    """
    groups = {OPTIONS[name].group for name in ("model_dtype", "batch_size", "learning_rate")}
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
    lines = [
        f"{OPTIONS[name].flag} is {_shown(name, getattr(config, name))}, in the checkpoint's run "
        f"it was {_shown(name, saved[name])}"
        for name in names
        if name in saved and saved[name] != getattr(config, name)
    ]
    if not new_data and saved.get("train_seed", config.train_seed) != config.train_seed:
        lines.append(
            f"{flag('train_seed', config.train_seed)} has no effect: the data goes on in the order "
            f"of the checkpoint's run ({saved['train_seed']}); --new-data starts it anew"
        )
    if not math.isnan(before) and tokens != before:
        lines.append(f"a step has {tokens} tokens, in the checkpoint's run it had {before}")
    rounding = [*_ROUNDING, *(_ROUNDING_OF_RANKS if max(world_size, saved_world_size) > 1 else ())]
    other = [n for n in rounding if n in saved and saved[n] != getattr(config, n)]
    if other:
        flags = ", ".join(f"{flag(n, getattr(config, n))} (was {flag(n, saved[n])})" for n in other)
        lines.append(f"numbers may be rounded otherwise than in the checkpoint's run: {flags}")
    return lines


def _shown(name: str, value: Any) -> Any:
    no_limit = value is None or (name == "steps" and value < 0)
    return "not given" if no_limit else value


def clean_old(
    directory: Path, keep_n: int, major: int, saved: int, run: RunId | None = None
) -> list[Path]:
    """Delete what --ckpt-keep-n and --ckpt-major let go; returns the deleted directories.

    run: whose checkpoints; those of another run stay, not counted. None: those without an id.
    keep_n: 0 or less keeps all. Steps that are multiples of major (if positive) are never deleted
    and are not counted; of the others the keep_n newest stay. saved: the step of the checkpoint
    that was just written, which counts as the newest, also beside later ones of an abandoned run.
    A checkpoint that was renamed to another step is the user's business: it stays, not counted.
    What interrupted saves left behind goes too, so no save may be under way.
    """
    gone = sorted(directory.glob("step_*.tmp"))
    found = checkpoints_by_name(directory)
    if keep_n > 0:
        found = {s: path for s, path in found.items() if _may_go(path, s, run)}
        minors = [step for step in found if major <= 0 or step % major]
        minors.sort(key=lambda step: (step == saved, step))
        gone += [found[step] for step in minors[:-keep_n]]
    for path in gone:
        with disk_errors(path):
            # First, so that half a checkpoint is never taken for a whole one.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
    return gone


def _may_go(path: Path, step: int, run: RunId | None) -> bool:
    """Whether it is a checkpoint of this run that was not renamed."""
    recorded = _recorded(path)
    owner = RunId.of(recorded)
    mine = owner is None if run is None else run.owns(owner)
    return mine and recorded.get("step") in (step, None)


def export_checkpoint(checkpoint: Path, out_dir: Path, model_dtype: str = "bf16") -> list[str]:
    """Write the model of a checkpoint for Hugging Face; returns the names of the files.

    checkpoint: as for checkpoint_at.
    model_dtype: "bf16" or "fp32". Tokenizer files come along if their source still exists.
    """
    path = checkpoint_at(checkpoint)
    if path is None:
        raise LlmqError(f"there is no complete checkpoint in '{checkpoint}'")
    with CheckpointReader(path) as reader:
        config, source = reader.manifest.model, reader.manifest.tokenizer
        reader.check(weight_table(config))
        return export_model(
            out_dir,
            config,
            lambda param: reader.read("weights", param).reshape(param.shape),
            OPTION_DTYPES[model_dtype],
            ByteTokenizer() if source == "bytes" else None if source is None else Path(source),
            TokenizerId.from_record(reader.manifest.tokenizer_id),
            run=reader.manifest.run,
        )
