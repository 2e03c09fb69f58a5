"""The checkpoints of a run: find the one to go on from, delete old ones, export one as a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.json_file import json_object
from llmq.base.run_id import RunId
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.checkpoint import BEGUN, CheckpointReader
from llmq.checkpoint.export_files import export_owner, exported_files
from llmq.checkpoint.finite import finite
from llmq.checkpoint.folder import delete, entries, is_complete, leftovers
from llmq.checkpoint.hf_export import export_model
from llmq.checkpoint.manifest import MANIFEST, Manifest, manifest_damage
from llmq.checkpoint.peft import AdapterConfig
from llmq.checkpoint.peft_export import export_adapter
from llmq.checkpoint.principal import doubled
from llmq.checkpoint.retention import Kept, newest_usable, outdated
from llmq.checkpoint.verdict import read_verdict
from llmq.checkpoint.verify import looks_whole
from llmq.data.identity import TokenizerId, check_recorded
from llmq.data.tokenizer import ByteTokenizer, Tokenizer
from llmq.options.adapters import adapters_of
from llmq.options.option_types import NEWEST
from llmq.options.options import OPTIONS, TrainConfig
from llmq.runtime.processes import processes
from llmq.state.adapter_rows import trained_slabs
from llmq.state.params import Param, Slab, weight_table


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by step, oldest first.

    LlmqError if one was renamed to another step: their order would not be what it seems.
    """
    found = checkpoints_by_name(directory)
    for path in found.values():
        _check_name(path)
    return found


def checkpoints_by_name(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by the step in their name, in this order.

    Also those that have something else in the place of their checkpoint.json: they are damaged.
    LlmqError if it cannot be listed.
    """
    found = {}
    for path in entries(directory):
        step = _named_step(path)
        if step is not None and (is_complete(path) or os.path.lexists(path / MANIFEST)):
            found.setdefault(step, path)
    return dict(sorted(found.items()))


def _named_step(path: Path) -> int | None:
    name = re.fullmatch(r"step_(\d+)(\.llmq-old|\.old)?", path.name)  # see publish_directory
    return int(name[1]) if name else None


def _recorded(path: Path) -> dict[str, Any]:
    """Step and run of a complete checkpoint; {} if it is damaged."""
    if manifest_damage(path / MANIFEST) is not None:
        return {}
    run = json_object(path / MANIFEST).get("run")
    return run if isinstance(run, dict) and type(run.get("step", 0)) is int else {}


def damaged_checkpoints(directory: Path) -> dict[Path, str]:
    """Those in a directory whose checkpoint.json is damaged, each with the reason.

    They are nobody's. LlmqError if the directory cannot be listed.
    """
    steps = (path for path in entries(directory) if _named_step(path) is not None)
    found = {path: manifest_damage(path / MANIFEST) for path in steps}
    return {path: why for path, why in found.items() if why is not None}


def checkpoint_owner(path: Path) -> RunId | None:
    """Whose checkpoint it is; None before runs had ids, and where it is damaged."""
    return RunId.of(_recorded(path))


def checkpoint_step(path: Path) -> int:
    """Of a complete checkpoint, whatever it is called; 0 where it is damaged."""
    return _recorded(path).get("step", 0)


def saved_options(document: dict[str, Any]) -> dict[str, Any]:
    """The options of a checkpoint's run, by field, with the seed its data really has."""
    seed = document["data-loader"].get("seed")
    return document["options"] | ({} if seed is None else {"train_seed": seed})


def saved_log(path: Path) -> Path | None:
    """Where the run of a complete checkpoint wrote its log; None where it does not say so."""
    options = json_object(path / MANIFEST).get("options")
    log = options.get("log_file") if isinstance(options, dict) else None
    return Path(log) if isinstance(log, str) else None


def recorded_tokenizer(path: Path) -> TokenizerId | None:
    """What made the data of a complete checkpoint's run, None where it does not say so."""
    return TokenizerId.from_record(json_object(path / MANIFEST).get("tokenizer-id"))


def _check_name(path: Path) -> None:
    named, recorded = _named_step(path), _recorded(path).get("step")
    if None not in (named, recorded) and named != recorded:
        raise LlmqError(
            f"'{path}' holds step {recorded}, though its name says {named}: rename it to "
            f"step_{recorded:08d}, or to a name that is no step"
        )


def find_checkpoint(
    directory: Path, spec: str = NEWEST, passed: list[str] | None = None
) -> Path | None:
    """The checkpoint that --continue names, None if there is no complete one.

    All processes call it, and get what the first one finds.

    spec: NEWEST in `directory`; a step in `directory`; or a path as for checkpoint_at. passed: as
    there.
    """
    if spec.isdecimal():
        return _of_first(directory).get(int(spec))
    if spec == NEWEST:
        return checkpoint_at(directory, passed)
    return checkpoint_at(Path(os.path.abspath(os.path.expanduser(spec))), passed)


class NoCheckpoint(ConfigError):
    """The step or the path that --continue names has no complete checkpoint."""

    def __init__(self, directory: Path, spec: str):
        there = ", ".join(map(str, checkpoints_by_name(directory))) or "none"
        where = f" of this step in '{directory}', which has {there}" if spec.isdecimal() else ""
        super().__init__(f"--continue {spec}: no complete checkpoint{where or ' there'}")


def checkpoint_at(path: Path, passed: list[str] | None = None) -> Path | None:
    """A complete checkpoint, whatever its directory is called, or the newest in a directory.

    Of a directory the newest that is whole and not known to be bad, see `newest_usable`; passed
    gets a line for each newer one. LlmqError if it is called like another step, or none is whole.
    """
    path = Path(os.path.expanduser(path))
    if processes().on_first(lambda: is_complete(path)):
        processes().on_first(lambda: _check_name(path))
        return path
    return newest_usable(_of_first(path), [] if passed is None else passed)


def _of_first(directory: Path) -> dict[int, Path]:
    """As list_checkpoints, what the first process finds."""
    return processes().on_first(lambda: list_checkpoints(directory))


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


def clean_old(
    directory: Path,
    keep_n: int,
    major: int,
    saved: int,
    run: RunId | None = None,
    spared: Collection[int] = (),
    interval: int = 0,
    found: dict[int, Kept] | None = None,
) -> list[Path]:
    """Delete what --ckpt-keep-n and --ckpt-major let go; returns the deleted directories.

    run: whose checkpoints; those of another run stay, not counted. None: those without an id.
    keep_n: 0 or less keeps all; else see `outdated`, also about the others. saved: the step of the
    checkpoint that was written last. A checkpoint that was renamed to another step is the user's
    business: it stays, not counted. What interrupted saves left behind goes too, so no save may be
    under way. What cannot be deleted is warned of, and links stay. found: the kept_checkpoints, if
    they are known.
    """
    gone: list[int] = []
    if keep_n > 0:
        if found is None:
            found = kept_checkpoints(directory, run)
        gone = outdated(found, keep_n, major, saved, spared=spared, interval=interval)

    own = own_checkpoints(directory, run) if gone else {}
    return delete([*leftovers(directory), *(own[step] for step in gone if step in own)])


def kept_checkpoints(directory: Path, run: RunId | None) -> dict[int, Kept]:
    """By step those of this run that were not renamed."""
    own = own_checkpoints(directory, run).items()
    return {step: Kept(path, read_verdict(path), looks_whole(path)) for step, path in own}


def own_checkpoints(directory: Path, run: RunId | None) -> dict[int, Path]:
    """By step those of this run that were not renamed, whole or not."""
    found = checkpoints_by_name(directory).items()
    return {step: path for step, path in found if _may_go(path, step, run)}


def _may_go(path: Path, step: int, run: RunId | None) -> bool:
    """Whether it is a checkpoint of this run that was not renamed, and no link to one."""
    if path.is_symlink() or manifest_damage(path / MANIFEST) is not None:
        return False
    recorded = _recorded(path)
    owner = RunId.of(recorded)
    mine = owner is None if run is None else run.owns(owner)
    return mine and recorded.get("step") in (step, None)


def _check_free(out_dir: Path, run: RunId | None) -> None:
    """LlmqError if a directory holds a model of another run than this one."""
    owner = export_owner(out_dir)
    mine = owner is None if run is None else run.owns(owner)
    if exported_files(out_dir) and not mine:
        whose = "no run of llmq's" if owner is None else str(owner)
        raise LlmqError(
            f"--out-dir: '{out_dir}' holds the model of {whose}, not of the checkpoint's "
            f"{run or 'run'}: choose another directory, or move it away"
        )


def export_checkpoint(
    checkpoint: Path, out_dir: Path, model_dtype: str = "bf16", *, force: bool = False
) -> list[str]:
    """Write the model of a checkpoint for Hugging Face, or its adapters for PEFT; returns the names
    of the files.

    checkpoint: as for checkpoint_at.
    model_dtype: "bf16" or "fp32". Tokenizer files come along if their source still exists. force:
    weights that are no finite numbers, too. LlmqError if there are such, if the directory holds the
    model of another run, or that source another tokenizer.
    """
    passed: list[str] = []
    path = checkpoint_at(checkpoint, passed)
    warn(passed)
    if path is None:
        raise LlmqError(f"there is no complete checkpoint in '{checkpoint}'")
    with CheckpointReader(path) as reader:
        config, source = reader.manifest.model, reader.manifest.tokenizer
        made = TokenizerId.from_record(reader.manifest.tokenizer_id)
        _check_free(out_dir, reader.manifest.run)
        if source is not None:
            check_recorded(source, made, config.vocab_size, f"checkpoint '{path}'")
        tokenizer = ByteTokenizer() if source == "bytes" else None
        if tokenizer is None and source is not None:
            tokenizer = Path(source)
        export = _export_adapter if reader.manifest.base is not None else _export_model
        read = partial(_read, reader)
        read = read if force else finite(read)
        origin = {"made": made, "run": reader.manifest.run}
        return export(reader, read, out_dir, model_dtype, tokenizer, **origin)


def _export_model(
    reader: CheckpointReader,
    read: Callable[[Param], np.ndarray],
    out_dir: Path,
    model_dtype: str,
    tokenizer: Tokenizer | Path | None,
    **origin: Any,
) -> list[str]:
    reader.check(weight_table(reader.manifest.model))
    dtype = OPTION_DTYPES[model_dtype]
    return export_model(out_dir, reader.manifest.model, read, dtype, tokenizer, **origin)


def _export_adapter(
    reader: CheckpointReader,
    read: Callable[[Param], np.ndarray],
    out_dir: Path,
    model_dtype: str,
    tokenizer: Tokenizer | Path | None,
    **origin: Any,
) -> list[str]:
    """In the format of the checkpoint: adapters are small."""
    manifest = reader.manifest
    config = saved_config(manifest)
    adapters = adapters_of(config)
    reader.check(weight_table(manifest.model, 1, adapters), trained_slabs(adapters))
    origin["base"] = BaseId.of(manifest.base)
    saved = AdapterConfig.of(config)
    if config.splits_model:
        begun = partial(read, group=BEGUN)
        adapters, read = doubled(manifest.model, adapters, read, begun)
        saved = saved.doubled
    return export_adapter(out_dir, manifest.model, adapters, saved, read, tokenizer, **origin)


def saved_config(manifest: Manifest) -> TrainConfig:
    """The options of a checkpoint's run, as far as this version has them."""
    saved = {n: v for n, v in manifest.options.items() if n in OPTIONS}
    return TrainConfig(**saved).normalized()


def saved_slabs(manifest: Manifest) -> list[Slab]:
    """What of the weight table a checkpoint holds: all, or with adapters what is trained."""
    if manifest.base is None:
        return [*weight_table(manifest.model)]
    adapters = adapters_of(saved_config(manifest))
    trained = trained_slabs(adapters)
    return [s for s in weight_table(manifest.model, 1, adapters) if s.name in trained]


def _read(reader: CheckpointReader, param: Param, group: str = "weights") -> np.ndarray:
    return reader.read(group, param).reshape(param.shape)
