"""`llmq merge`: add adapters to the weights of their base model, and write one model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP
from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import LlmqError, ModelError, warn
from llmq.base.locks import lock_beside, locked
from llmq.checkpoint.base_id import base_id, check_same_base
from llmq.checkpoint.export_files import ADAPTER_CONFIG, CONFIG_FILE, exported_files
from llmq.checkpoint.finite import all_finite
from llmq.checkpoint.hf import HfWeights, export_model
from llmq.checkpoint.peft import AdapterFiles, with_additions
from llmq.checkpoint.source_model import SourceModel
from llmq.data.identity import noted_tokenizer
from llmq.formats import STORAGE
from llmq.options.adapters import Adapters, adapted_tables, all_adapted
from llmq.options.option_types import QUANTIZED
from llmq.options.presets import find_directory, resolve_model, revision_of
from llmq.state.params import NEW_ROWS, TABLES, Param, trained_slabs, weight_table
from llmq.text.guarded import look_into
from llmq.text.tokenizer import HfTokenizer
from llmq.text.tokenizer_files import parse_tokens


def merged_reader(
    model: ModelConfig,
    adapters: Adapters,
    base: Callable[[Param], np.ndarray],
    adapter: Callable[[Param], np.ndarray],
) -> Callable[[Param], np.ndarray]:
    """Return a function that reads parameters of the merged model: adapted matrices are F32 with
    adapters added, parts that were trained in full come from `adapter`, all other parts from
    `base`.

    base, adapter: functions that return a parameter of the weight table with adapters, in its
    shape. The returned function raises ModelError for sums that are not finite.
    """
    table, trained = weight_table(model, 1, adapters), trained_slabs(adapters)
    params = {p.name: (p, slab) for slab in table for p in slab.params}
    by_key = {(p.block, p.key): p for p, _ in params.values()}
    matrices = {(block, m.key): m for block, m in all_adapted(model, adapters)}

    def read(param: Param) -> np.ndarray:
        # After untying, the LM head has no parameter in the base: the embedding is its base.
        own, slab = params.get(param.name) or params[table[0].params[0].name]
        if slab.name in trained:
            return adapter(own)
        matrix = matrices.get((param.block, param.key))
        if matrix is None:
            rows = by_key.get((param.block, NEW_ROWS))
            return base(own) if rows is None else _with_rows(base(own), own, rows, adapter)
        weight = base(own).astype(np.float32)
        a, b = (adapter(by_key[param.block, f"{param.key}_{n}"]).astype(np.float32) for n in "ab")
        done, rows_of = 0, param.by_row(weight)  # a view of weight
        for number, (_, start, stop, rank, scale) in enumerate(matrix.parts):
            rows, own = slice(number * matrix.rank, number * matrix.rank + rank), slice(rank)
            with np.errstate(over="ignore", invalid="ignore"):  # ModelError below
                product = b[done : done + stop - start, own] @ a[rows]
                rows_of[start:stop] += np.float32(scale) * product
                if adapters.dora:
                    magnitudes = adapter(by_key[param.block, f"{param.key}_m"])[start:stop]
                    norms = np.linalg.norm(rows_of[start:stop], axis=1)
                    factors = np.ones_like(norms)
                    np.divide(magnitudes, norms, out=factors, where=norms > 0)
                    rows_of[start:stop] *= factors[:, None]
            done += stop - start
        if not all_finite(weight):
            raise ModelError(
                f"{param.name} with its adapters holds NaN or infinity: they are too large, at a "
                f"scaling of {max(matrix.scales):g}"
            )
        return weight

    return read


def _with_rows(
    values: np.ndarray, param: Param, rows: Param, read: Callable[[Param], np.ndarray]
) -> np.ndarray:
    if param.key != TABLES[param.block]:
        return values
    values, last = values.astype(np.float32), rows.first_row + rows.rows
    values[rows.first_row : last] = read(rows)[: rows.rows]
    return values


def as_kept(
    read: Callable[[Param], np.ndarray],
    dtype: str | None,
    codes: Callable[[HfPart, str], object | None] = lambda part, dtype: None,
) -> Callable[..., np.ndarray]:
    """Return a function that reads parameters with the values that a run with --base-dtype computes
    with: quantized and dequantized, F32.

    read: function that returns a parameter of a weight table in its shape. dtype: value of
    --base-dtype; for None, bf16 and fp32 the result is `read` itself. codes: function like
    `HfWeights.codes`; a module for which it returns codes keeps the values that `read` returns,
    because a run keeps these codes.
    """
    if dtype not in QUANTIZED:
        return read

    def read_kept(param: Param) -> np.ndarray:
        values = read(param)
        if not param.block.startswith("layers.") or param.kind != "matrix" or param.of_adapter:
            return values
        exact = [part for part in param.hf if codes(part, dtype) is not None]
        if len(exact) == len(param.hf):
            return values.astype(np.float32)
        rounded = STORAGE[dtype].rounded(param, values.reshape(-1)).reshape(param.shape)
        for part in exact:
            rows = slice(part.start, part.stop)
            param.by_row(rounded)[rows] = param.by_row(values)[rows]
        return rounded

    return read_kept


@contextmanager
def open_merged(
    model: ModelConfig,
    name: str,
    weights: HfWeights,
    directory: Path,
    base_dtype: str | None = None,
) -> Iterator[tuple[ModelConfig, Callable[[Param], np.ndarray]]]:
    """Yield the merged model and its merged_reader, for a checked model and its adapters. The
    merged model has the EOS ids of both.

    name: the base model's name, for messages. weights: the base model. directory: the adapters.
    base_dtype: dtype of the frozen base weights; None: the dtype in the adapters' training.
    LlmqError if model and adapters do not belong together.
    """
    with AdapterFiles(directory) as files:
        if files.config.add_tokens is not None:
            model = _grown(model, weights, directory, files.config.add_tokens)
        model = with_additions(model, directory, files.config)
        adapters = files.adapters(model)
        files.check_adapters(model, adapters)
        if files.base is not None:
            base = base_id(name, weights, weight_table(model))
            check_same_base(f"--adapter: '{directory}'", files.base, base)
        warn(*files.unknown_base(name))
        for param in (p for s in weight_table(model, 1, adapters) for p in s.params):
            if param.block == MTP and files.has(param):
                weights.replace_extra(param, files.read(param))
        kept = base_dtype or files.config.base_dtype
        base_read = as_kept(partial(_base, files, weights), kept, weights.codes)
        read = merged_reader(model, adapters, base_read, files.read)
        yield _untied(model, adapters).ending_at(files.ends), read


def _untied(model: ModelConfig, adapters: Adapters) -> ModelConfig:
    if not model.tied_embeddings or not adapted_tables(model, adapters):
        return model
    return replace(model, tied_embeddings=False)


def _grown(model: ModelConfig, weights: HfWeights, directory: Path, tokens: str) -> ModelConfig:
    """Return the model with rows for the adapters' new tokens (--add-tokens), and enlarge
    `weights`. directory: the adapters' directory, whose tokenizer has the new ids. tokens: value of
    --add-tokens."""
    names = parse_tokens(tokens)
    first = look_into(directory, partial(_first_id, names=names))
    grown = replace(model, vocab_size=max(model.vocab_size, first + len(names)))
    weights.grow(grown, first, len(names))
    return grown


def _first_id(folder: Path, names: Sequence[str]) -> int:
    tokenizer = HfTokenizer(folder)
    return min(tokenizer.encode(name)[0] for name in names)


def tokenizer_folder(adapter: Path, directory: Path) -> Path:
    """Return the folder of the tokenizer for a model with adapters: `adapter` if it has a
    tokenizer, because training used this one's chat template, else the model's `directory`."""
    whole = any((adapter / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return adapter if whole else directory


def source_of(name: str, weights: HfWeights, model: ModelConfig, *, text_only: bool) -> SourceModel:
    """Return the source model of checked weights, with the files and extra tensors that an export
    of `model` copies."""
    source = weights.source_model(name, revision_of(weights.directory))
    warn(*source.notes(model, text_only=text_only))
    return source.for_model(model, text_only=text_only)


def _base(files: AdapterFiles, weights: HfWeights, param: Param) -> np.ndarray:
    """Return a parameter as PEFT loads it: a copy in the adapters' file replaces the model's
    weights."""
    return (files if files.has(param) else weights).read(param)


def merge_adapter(
    base: str,
    adapter: Path,
    out_dir: Path,
    model_dtype: str | None = None,
    base_dtype: str | None = None,
    text_only: bool = False,
) -> list[str]:
    """Write the model with its adapters added in F32; return the names of the files.

    base: a model directory or a cached repository. model_dtype: dtype to write, "bf16" or "fp32";
    None: the base model's. base_dtype: see open_merged. text_only: leave out tensors that the
    language model does not have. LlmqError if model and adapters do not belong together, or if
    out_dir holds a model already.
    """
    with locked(lock_beside(out_dir.resolve()), "--out", out_dir):
        return _merge(base, adapter, out_dir, model_dtype, base_dtype, text_only)


def _merge(
    base: str,
    adapter: Path,
    out_dir: Path,
    model_dtype: str | None,
    base_dtype: str | None,
    text_only: bool,
) -> list[str]:
    if exported_files(out_dir):
        raise LlmqError(f"--out: '{out_dir}' holds a model already: choose another directory")
    check_base(base)
    config, directory = resolve_model(base, from_scratch=False)
    tokenizer = tokenizer_folder(adapter, directory)
    with HfWeights(directory) as weights:
        weights.check(weight_table(config))
        if model_dtype is None and weights.dtype == "fp16":
            warn("the model is in fp16 and is written in bf16: --model-dtype fp32 rounds nothing")
        dtype = OPTION_DTYPES[model_dtype or weights.dtype.replace("fp16", "bf16")]
        with open_merged(config, base, weights, adapter, base_dtype) as (merged, read):
            made = noted_tokenizer(adapter) or noted_tokenizer(directory)
            began_as = source_of(base, weights, merged, text_only=text_only)
            return export_model(out_dir, merged, read, dtype, tokenizer, source=began_as, made=made)


def check_base(base: str, flag: str = "BASE") -> None:
    """LlmqError unless `base` is a model directory or a cached repository. flag: the option, for
    the message."""
    directory = find_directory(base)
    if directory is not None and (directory / CONFIG_FILE).is_file():
        return
    if directory is not None and (directory / ADAPTER_CONFIG).is_file():
        raise LlmqError(f"{flag}: '{base}' holds adapters: give the model they are of, then these")
    raise LlmqError(
        f"{flag}: '{base}' is neither the directory of a model nor a repository in the Hugging "
        "Face cache"
    )
