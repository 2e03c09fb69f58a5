"""`llmq export`: the model of a checkpoint for Hugging Face, or its adapters for PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import LlmqError, warn
from llmq.base.run_id import RunId
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.checkpoint import INITIAL_ADAPTERS, CheckpointReader
from llmq.checkpoint.export_files import HubModel, export_owner, exported_files
from llmq.checkpoint.finite import finite
from llmq.checkpoint.hf_export import export_model
from llmq.checkpoint.manifest import Manifest
from llmq.checkpoint.peft import AdapterConfig
from llmq.checkpoint.peft_export import export_adapter
from llmq.checkpoint.principal import doubled
from llmq.checkpoint.store import checkpoint_at
from llmq.data.identity import TokenizerId, check_recorded
from llmq.data.tokenizer import ByteTokenizer, Tokenizer
from llmq.options.adapters import adapters_of
from llmq.options.options import OPTIONS, TrainConfig
from llmq.state.adapter_rows import trained_slabs
from llmq.state.params import Param, Slab, weight_table


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
    checkpoint: Path, out_dir: Path, model_dtype: str | None = None, *, force: bool = False
) -> list[str]:
    """Write the model of a checkpoint for Hugging Face, or its adapters for PEFT; returns the names
    of the files.

    checkpoint: as for checkpoint_at.
    model_dtype: "bf16" or "fp32", None: that of the run. Tokenizer files come along if their source
    still exists. force: weights that are no finite numbers, too. LlmqError if there are such, if
    the directory holds the model of another run, or that source another tokenizer.
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
        origin["hub"] = HubModel.of(saved_config(reader.manifest))
        return export(reader, read, out_dir, model_dtype, tokenizer, **origin)


def _export_model(
    reader: CheckpointReader,
    read: Callable[[Param], np.ndarray],
    out_dir: Path,
    model_dtype: str | None,
    tokenizer: Tokenizer | Path | None,
    **origin: Any,
) -> list[str]:
    reader.check(weight_table(reader.manifest.model))
    dtype = OPTION_DTYPES[model_dtype or saved_config(reader.manifest).model_dtype]
    return export_model(out_dir, reader.manifest.model, read, dtype, tokenizer, **origin)


def _export_adapter(
    reader: CheckpointReader,
    read: Callable[[Param], np.ndarray],
    out_dir: Path,
    model_dtype: str | None,
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
        initial_adapters = partial(read, group=INITIAL_ADAPTERS)
        adapters, read = doubled(manifest.model, adapters, read, initial_adapters)
        saved = saved.doubled
    return export_adapter(out_dir, manifest.model, adapters, saved, read, tokenizer, **origin)


def saved_config(manifest: Manifest) -> TrainConfig:
    """The options of a checkpoint's run, as far as this version has them."""
    saved = {n: v for n, v in manifest.options.items() if n in OPTIONS}
    return TrainConfig(**saved).normalized()


def saved_slabs(manifest: Manifest) -> list[Slab]:
    """The slabs of the weight table that a checkpoint holds: all, or with adapters those that are
    trained."""
    if manifest.base is None:
        return [*weight_table(manifest.model)]
    adapters = adapters_of(saved_config(manifest))
    trained = trained_slabs(adapters)
    return [s for s in weight_table(manifest.model, 1, adapters) if s.name in trained]


def _read(reader: CheckpointReader, param: Param, group: str = "weights") -> np.ndarray:
    return reader.read(group, param).reshape(param.shape)
