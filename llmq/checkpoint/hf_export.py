"""Model directories in Hugging Face's format: writing them."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import OPTION_DTYPES, DType
from llmq.base.files import staged_directory
from llmq.base.run_id import RunId
from llmq.checkpoint.export_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MODEL_FILES,
    SINGLE_FILE,
    HubModel,
    run_record,
    save_tokenizer,
    tokenizer_files,
    write_json,
)
from llmq.checkpoint.hf import stored_shape
from llmq.checkpoint.safetensors_file import HashingSink, TensorSpec, write_safetensors
from llmq.data.identity import RUN_FILE, TokenizerId
from llmq.data.tokenizer import Tokenizer
from llmq.state.params import Param, Slab, weight_table

MAX_SHARD_BYTES = 5_000_000_000
"""Larger exports are split into several files, so that readers need not map one huge file."""


class StoredAs:
    """The tensors that a parameter is in a file: those of its modules, in dtype F32 or BF16.

    fields: of config.json, beside the model's.
    """

    fields: Mapping[str, Any] = {}

    def __init__(self, dtype: DType):
        self.dtype = dtype

    def specs(self, param: Param) -> list[TensorSpec]:
        """Names, formats and shapes, in the order of the file."""
        return [TensorSpec(p.name, self.dtype, stored_shape(param, p)) for p in param.hf]

    def values(self, param: Param, values: np.ndarray) -> np.ndarray:
        """The numbers that its tensors stand for."""
        return values.astype(self.dtype.numpy)

    def arrays(self, param: Param, values: np.ndarray) -> Iterator[np.ndarray]:
        """Make the tensors of its values in its shape, in the order of specs."""
        values = param.by_row(values)
        for part in param.hf:
            rows = values[part.start : part.stop].astype(self.dtype.numpy, copy=False)
            yield part.stored(rows)


def export_model(
    out_dir: Path,
    config: ModelConfig,
    read: Callable[[Param], np.ndarray],
    dtype: DType,
    tokenizer: Tokenizer | Path | None = None,
    made: TokenizerId | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    run: RunId | None = None,
    hub: HubModel | None = None,
    check: Callable[[Path], None] | None = None,
    stored: StoredAs | None = None,
) -> list[str]:
    """Write a directory that transformers loads; returns the names of its files.

    read: a parameter in its shape, F32 or BF16; called once each, in table order, and released
    before the next but one is read. dtype: F32 or BF16, of the written weights. tokenizer: saved
    beside them, or the model directory whose tokenizer files are copied, such that AutoTokenizer
    makes the same ids. made, run, hub: what made the ids that the model was trained on, whose model
    it is, and what it began as, noted in llmq.json. check: called with the whole directory before
    it has its name. stored: what becomes of parameters, instead of tensors in dtype. Nothing
    appears in out_dir before everything is on the disk; of what is there already, only an older
    export is replaced.
    Raises LlmqError where the disk is full or refuses.
    """
    option = next(option for option, d in OPTION_DTYPES.items() if d == dtype)
    replaces = MODEL_FILES + tokenizer_files(tokenizer)
    stored = StoredAs(dtype) if stored is None else stored
    with staged_directory(out_dir, replaces, RUN_FILE) as staging:
        write_json(staging / CONFIG_FILE, config.to_hf(option) | stored.fields)
        if not config.num_labels:
            write_json(staging / "generation_config.json", _generation_config(config))
        sums = _write_weights(staging, weight_table(config), read, stored, max_shard_bytes)
        origin = run_record(made=made, run=run, hub=hub)
        if origin:
            write_json(staging / RUN_FILE, origin | {"sha256": sums})
        save_tokenizer(staging, config, tokenizer)
        if check is not None:
            check(staging)
        return sorted(path.name for path in staging.iterdir())


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    config = config.without_foreign_tokens()
    eos = config.eos_token_ids
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    return {"_from_model_config": True} | {k: v for k, v in ids.items() if v is not None}


def _write_weights(
    directory: Path,
    table: tuple[Slab, ...],
    read: Callable[[Param], np.ndarray],
    stored: StoredAs,
    max_shard_bytes: int,
) -> dict[str, str]:
    """Returns the SHA-256 of each file by its name."""
    params = [param for slab in table for param in slab.params]
    shards: list[list[TensorSpec]] = [[]]
    filled = 0  # bytes of the last
    for spec in (spec for param in params for spec in stored.specs(param)):
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        specs = [spec for shard in shards for spec in shard]
        metadata = {
            "total_parameters": sum(prod(s.shape) for s in specs),
            "total_size": sum(s.nbytes for s in specs),
        }
        files = {s.name: name for name, shard in zip(names, shards, strict=True) for s in shard}
        write_json(directory / INDEX_FILE, {"metadata": metadata, "weight_map": files})
    arrays = (array for param in params for array in stored.arrays(param, read(param)))
    sums = {}
    for name, shard in zip(names, shards, strict=True):
        with open(directory / name, "wb") as file:
            sink = HashingSink(file)
            write_safetensors(sink, shard, islice(arrays, len(shard)), {"format": "pt"})
        sums[name] = sink.digest.hexdigest()
    return sums
