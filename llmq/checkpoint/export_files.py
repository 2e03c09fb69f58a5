"""The parts of an export beside weights: its files, its tokenizer, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.files import file_names, json_object, staged_directory
from llmq.base.run_id import RunId
from llmq.data.identity import RUN_FILE
from llmq.options.groups.model import ModelOptions
from llmq.text.tokenizer import HfTokenizer, Tokenizer, copy_tokenizer_files, tokenizer_names
from llmq.text.tokenizer_files import take_as_it_is

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
MODEL_FILES = (CONFIG_FILE, SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors", RUN_FILE)
MODEL_FILES += (ADAPTER_CONFIG, ADAPTER_FILE)
"""An export replaces these. RUN_FILE says which run it is of; other readers do not look at it."""


class HubModel(NamedTuple):
    """The repository of the hub that a run's first weights are from, and its commit."""

    name: str
    revision: str

    @classmethod
    def of(cls, options: ModelOptions) -> HubModel | None:
        """The one of these options; None where they name none of the hub."""
        known = options.revision is not None and not options.from_scratch
        return cls(options.model, options.revision) if known else None

    def record(self) -> dict[str, str]:
        return self._asdict()


def run_record(**origin: Any) -> dict[str, Any]:
    """The content of an export's llmq.json. made: what made the data's ids; run; hub: where the
    first weights are from; base: of adapters."""
    records = {name: known.record() for name, known in origin.items() if known is not None}
    return {"tokenizer" if name == "made" else name: record for name, record in records.items()}


def tokenizer_files(tokenizer: Tokenizer | Path | None) -> tuple[str, ...]:
    """The files that an export replaces if this tokenizer comes with it."""
    brings = tokenizer_names(tokenizer) if isinstance(tokenizer, Path) else tokenizer is not None
    return tuple(HfTokenizer.WRITTEN) if brings else ()


def save_tokenizer(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | Path | None, *, wrapped: bool = False
) -> None:
    """Write a tokenizer into an export, or copy the tokenizer of a model directory. wrapped: True
    if config.json describes a model with other parts."""
    if isinstance(tokenizer, Path):
        copy_tokenizer_files(tokenizer, folder)
    elif tokenizer is not None:
        tokenizer.save(folder)
    theirs = tokenizer if isinstance(tokenizer, Path) else getattr(tokenizer, "folder", None)
    arch = config.arch
    own = arch.wrapper_tokenizer_class if wrapped else arch.own_tokenizer_class
    take_as_it_is(folder, own=own, theirs=theirs)


def exported_files(directory: Path) -> list[Path]:
    """The files of a model directory that an export into it would replace; empty if there is no
    model."""
    found = [path for pattern in MODEL_FILES for path in sorted(directory.glob(pattern))]
    if not found:
        return []
    beside = (GENERATION_FILE, *PROCESSOR_FILES, *HfTokenizer.WRITTEN)
    others = (path for name in beside for path in sorted(directory.glob(name)))
    return found + [path for path in others if path.is_file()]


def export_owner(directory: Path) -> RunId | None:
    return RunId.of(json_object(directory / RUN_FILE).get("run"))


def recorded_sums(directory: Path) -> dict[str, str]:
    """SHA-256 by name of the files of weights, where the model's run has noted them."""
    found = json_object(directory / RUN_FILE).get("sha256")
    found = found if isinstance(found, dict) else {}
    return {str(name): str(digest) for name, digest in found.items() if "/" not in name}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


@contextmanager
def staged_export(
    out_dir: Path,
    config: ModelConfig,
    tokenizer: Tokenizer | Path | None,
    check: Callable[[Path], None] | None,
    names: list[str],
    *,
    wrapped: bool = False,
) -> Iterator[Path]:
    """The folder of an export's files until all are there, to which the tokenizer is added. check:
    called with it before it has its name. names: gets those of all files. wrapped: as of
    save_tokenizer. LlmqError where the disk is full or refuses; an older export is replaced, and
    nothing else."""
    replaces = MODEL_FILES + tokenizer_files(tokenizer)
    if exported_files(out_dir):
        replaces += (GENERATION_FILE, *PROCESSOR_FILES)
    with staged_directory(out_dir, replaces, RUN_FILE) as staging:
        yield staging
        save_tokenizer(staging, config, tokenizer, wrapped=wrapped)
        if check is not None:
            check(staging)
        names += sorted(file_names(staging))
