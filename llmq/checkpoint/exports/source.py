"""Sources of exports: a checkpoint, a model directory, or adapters, behind one class."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError, print_error, warn
from llmq.base.files import json_object
from llmq.base.run_id import RunId
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.export_files import ADAPTER_CONFIG, CONFIG_FILE, HubModel
from llmq.checkpoint.finite import finite
from llmq.checkpoint.folder import problem_of
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.manifest import Manifest
from llmq.checkpoint.merge import check_base, open_merged, source_of, tokenizer_folder
from llmq.checkpoint.peft import AdapterConfig, AdapterFiles
from llmq.checkpoint.source_model import SourceModel
from llmq.checkpoint.states import checkpoint_at, exported_best
from llmq.data.identity import RUN_FILE, TokenizerId, noted_tokenizer
from llmq.options.adapters import Adapters, adapters_of
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.presets import find_directory, resolve_model
from llmq.state.params import Param, Slab, trained_slabs, weight_table
from llmq.text.tokenizer import ByteTokenizer, Tokenizer, tokenizer_names
from llmq.text.tokenizer_id import check_recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model or adapters to export.

    read: reads a parameter of `table` in its shape, F32 or BF16. dtype: default dtype of the
    export, "bf16", "fp32" or "fp16". tokenizer: as in export_model. adapters, settings: None for a
    whole model. origin: as in run_record. began_as: initial model, the `source` of export_model; a
    checkpoint's has no open extra tensors. manifest, step: of a checkpoint. folder: of a model or
    adapters. coded: as in HfWeights. exact: True if values are those of the file's codes.
    """

    name: str
    model: ModelConfig
    read: Callable[[Param], np.ndarray]
    dtype: str
    tokenizer: Tokenizer | Path | None = None
    adapters: Adapters | None = None
    settings: AdapterConfig | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    began_as: SourceModel | None = None
    manifest: Manifest | None = None
    step: int = 0
    folder: Path | None = None
    coded: str | None = None
    exact: bool = False

    @property
    def table(self) -> list[Slab]:
        """The slabs to export: all slabs of a model, or, of adapters, only the trained slabs."""
        table = weight_table(self.model, 1, self.adapters)
        if self.adapters is None:
            return [*table]
        return [slab for slab in table if slab.name in trained_slabs(self.adapters)]


@contextmanager
def open_source(
    where: str | Path,
    *,
    base: str | None = None,
    merge: bool = False,
    force: bool = False,
    text_only: bool = False,
) -> Iterator[Source]:
    """Open adapters, a model directory or cached repository, a checkpoint, or a directory of
    checkpoints.

    base: base model of adapters, or model with a checkpoint's extra tensors; None: as recorded.
    merge: add adapters to their model. force: allow weights that are not finite. text_only: leave
    out tensors that the language model does not have. LlmqError if `where` is none of these or
    incomplete, or for an option without meaning for this kind of source.
    """
    folder = find_directory(str(where))
    is_model = folder is not None and (folder / CONFIG_FILE).is_file()
    if folder is not None and (folder / ADAPTER_CONFIG).is_file():
        if text_only and not merge:
            raise LlmqError(
                "--text-only: adapters have no other parts: add --merge, or leave it out"
            )
        opened = _merged(folder, base, text_only) if merge else _adapters(folder, base)
    elif merge or (base is not None and is_model):
        flag = "--merge" if merge else "--base"
        hint = ": export its adapters first, then merge these" if folder is not None else ""
        raise LlmqError(f"{flag}: '{where}' is no folder of adapters{hint}")
    elif is_model:
        opened = _model(str(where), folder, text_only)
    elif folder is None and isinstance(where, str):  # a Path may hold checkpoints
        raise LlmqError(
            f"'{where}' is neither a checkpoint, nor a model directory or a repository in the "
            "Hugging Face cache, nor adapters"
        )
    else:
        opened = _checkpoint(Path(where), force, text_only)
    with opened as source:
        yield source


@contextmanager
def _model(name: str, directory: Path, text_only: bool) -> Iterator[Source]:
    model, _ = resolve_model(name, from_scratch=False)
    with HfWeights(directory) as weights:
        weights.check(weight_table(model))
        yield Source(
            name=name,
            model=model,
            read=weights.read,
            dtype=weights.dtype,
            tokenizer=_with_tokenizer(directory),
            origin=_noted(directory),
            began_as=source_of(name, weights, model, text_only=text_only),
            folder=directory,
            coded=weights.coded,
            exact=True,
        )


def _noted(directory: Path) -> dict[str, Any]:
    """Return the origin that a folder's llmq.json records, as arguments of run_record."""
    run = RunId.of(json_object(directory / RUN_FILE).get("run"))
    return {"made": noted_tokenizer(directory), "run": run}


def _with_tokenizer(directory: Path) -> Path | None:
    return directory if tokenizer_names(directory) else None


def base_of(directory: Path) -> str:
    """Return the name of the base model that the adapters in a directory record; LlmqError if they
    record none, or if there is no such model."""
    with AdapterFiles(directory) as files:
        return _base_of(directory, files, None)


def _base_of(directory: Path, files: AdapterFiles, base: str | None) -> str:
    """Return the name of the base model: `base`, or the name that the adapters record. Errors: see
    base_of."""
    name = base or files.config.base
    if name is None:
        raise LlmqError(f"'{directory}' does not say which model it adapts: give --base")
    check_base(name, "--base")
    return name


@contextmanager
def _adapters(directory: Path, base: str | None) -> Iterator[Source]:
    """Yield adapters as a source; of the base model only config.json is read."""
    with AdapterFiles(directory) as files:
        if files.config.add_tokens is not None or files.config.new_tokens:
            raise LlmqError(f"'{directory}' brings rows of new tokens: add --merge")
        name = _base_of(directory, files, base)
        model, folder = resolve_model(name, from_scratch=False)
        adapters = files.adapters(model)
        files.check_adapters(model, adapters)
        warn(*files.unknown_base(name))
        yield Source(
            name=directory.resolve().name,
            model=model.ending_at(files.ends),
            read=files.read,
            dtype=files.dtype,
            tokenizer=_with_tokenizer(tokenizer_folder(directory, folder)),
            adapters=adapters,
            settings=files.config,
            origin={**_noted(directory), "base": files.base},
            folder=directory,
        )


@contextmanager
def _merged(directory: Path, base: str | None, text_only: bool) -> Iterator[Source]:
    with AdapterFiles(directory) as files:
        name = _base_of(directory, files, base)
    model, folder = resolve_model(name, from_scratch=False)
    with HfWeights(folder) as weights:
        weights.check(weight_table(model))
        with open_merged(model, name, weights, directory) as (merged, read):
            yield Source(
                name=directory.resolve().name,
                model=merged,
                read=read,
                dtype=weights.dtype,
                tokenizer=_with_tokenizer(tokenizer_folder(directory, folder)),
                origin={"made": noted_tokenizer(directory) or noted_tokenizer(folder)},
                began_as=source_of(name, weights, merged, text_only=text_only),
                folder=directory,
                coded=weights.coded,
            )


def _chosen(where: Path) -> Path:
    """Return the checkpoint at a path; in a directory, the best or newest checkpoint. A line on
    standard error names the best checkpoint; standard output is for samples. LlmqError without a
    checkpoint."""
    passed: list[str] = []
    path = checkpoint_at(where, passed)
    if path is None:
        raise LlmqError(f"there is no complete checkpoint in '{where}'")
    exported = None if path == where.expanduser() else exported_best(path)
    if exported is None:
        warn(*passed)
        return path
    best, value = exported
    problem, newest = problem_of(best), f"the newest that can be exported is '{path}'"
    if problem is not None:
        raise LlmqError(f"the best checkpoint of '{where}' is damaged: {problem}; {newest}")
    of = f"{value.value:.6g} at step {value.step}"
    print_error(f"Taking the best checkpoint, '{best}' ({of}); {newest}")
    return best


@contextmanager
def _checkpoint(where: Path, force: bool, text_only: bool) -> Iterator[Source]:
    path = _chosen(where)
    with CheckpointReader(path) as reader, TemporaryDirectory() as restored:
        manifest = reader.manifest
        model, config = manifest.model, saved_config(manifest)
        made = TokenizerId.from_record(manifest.tokenizer_id)
        tokenizer = _tokenizer_of(reader, Path(restored))
        if tokenizer is not None:
            place = "bytes" if isinstance(tokenizer, ByteTokenizer) else tokenizer
            check_recorded(place, made, model.vocab_size, f"checkpoint '{path}'")
        read = reader.model if force else finite(reader.model)
        began_as = SourceModel.of_record(manifest.source)
        if began_as is None and manifest.base is None and not config.from_scratch:
            warn(
                f"checkpoint '{path}' is older than what it is exported with: files, fields and "
                f"tensors of '{config.model}' that llmq does not read are left out"
            )
        if began_as is None and text_only:
            warn("--text-only has no effect: the checkpoint has no other parts")
        if began_as is not None:
            warn(*began_as.notes(model, text_only=text_only))
            began_as = began_as.for_model(model, text_only=text_only or config.text_only)
        source = Source(
            name=config.name or path.resolve().parent.name,
            model=model,
            read=read,
            dtype=config.model_dtype,
            tokenizer=tokenizer,
            origin={"made": made, "run": manifest.run, "hub": HubModel.of(config)},
            began_as=began_as,
            manifest=manifest,
            step=reader.step,
        )
        yield _whole(source, reader) if manifest.base is None else _adapted(source, reader, read)


def _tokenizer_of(reader: CheckpointReader, folder: Path) -> Tokenizer | Path | None:
    """Return the tokenizer of a checkpoint's run, from the tokenizer's own folder, or from the
    checkpoint's copy, which is written into `folder`. None if both are missing, with a warning if
    the run had a tokenizer."""
    place = reader.manifest.tokenizer
    if place in (None, "bytes"):
        return ByteTokenizer() if place == "bytes" else None
    if tokenizer_names(Path(place)):
        return Path(place)
    if reader.restore_tokenizer(folder):
        return folder
    warn(f"checkpoint '{reader.path}' has no tokenizer, and '{place}' has none any more")
    return None


def _whole(source: Source, reader: CheckpointReader) -> Source:
    reader.check(weight_table(source.model))
    return source


def _adapted(source: Source, reader: CheckpointReader, read: Callable[..., np.ndarray]) -> Source:
    """Return the source of a run that has trained adapters."""
    config = saved_config(reader.manifest)
    adapters, settings = adapters_of(config), AdapterConfig.of(config)
    reader.check(weight_table(source.model, 1, adapters), trained_slabs(adapters))
    origin = source.origin | {"base": BaseId.of(reader.manifest.base)}
    return replace(source, read=read, adapters=adapters, settings=settings, origin=origin)


def saved_config(manifest: Manifest) -> TrainConfig:
    """Return the options of a checkpoint's run, without options that this version lacks."""
    saved = {n: v for n, v in manifest.options.items() if n in OPTIONS}
    return TrainConfig(**saved).normalized()


def saved_slabs(manifest: Manifest) -> list[Slab]:
    """Return the slabs of the weight table that a checkpoint holds: all slabs, or with adapters
    only the trained slabs."""
    if manifest.base is None:
        return [*weight_table(manifest.model)]
    adapters = adapters_of(saved_config(manifest))
    trained = trained_slabs(adapters)
    return [s for s in weight_table(manifest.model, 1, adapters) if s.name in trained]
