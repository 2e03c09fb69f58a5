"""The files of an export other than weights: names, tokenizer, and the record of the run."""

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
MODELOPT_FILE = "hf_quant_config.json"  # of models that modelopt quantized
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
MTP_FILE = "mtp.safetensors"  # beside adapters: a head for multi-token prediction
MODEL_FILES = (CONFIG_FILE, SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors", RUN_FILE)
MODEL_FILES += (ADAPTER_CONFIG, ADAPTER_FILE, MTP_FILE)
"""Patterns of the files that an export replaces. RUN_FILE (llmq.json) names the run of an export;
transformers and PEFT ignore this file."""


class HubModel(NamedTuple):
    """The hub repository of a run's initial weights, and the commit."""

    name: str
    revision: str

    @classmethod
    def of(cls, options: ModelOptions) -> HubModel | None:
        """Return the repository that --model names; None for a directory or random weights."""
        known = options.revision is not None and not options.from_scratch
        return cls(options.model, options.revision) if known else None

    def record(self) -> dict[str, str]:
        return self._asdict()


def run_record(**origin: Any) -> dict[str, Any]:
    """Return the content of an export's llmq.json.

    origin: made, the TokenizerId of the training data; run, a RunId; hub, a HubModel; base, the
    BaseId of the adapters' base model. Each may be None.
    """
    records = {name: known.record() for name, known in origin.items() if known is not None}
    return {"tokenizer" if name == "made" else name: record for name, record in records.items()}


def tokenizer_files(tokenizer: Tokenizer | Path | None) -> tuple[str, ...]:
    """Return the names of the tokenizer files that an export with this tokenizer replaces."""
    brings = tokenizer_names(tokenizer) if isinstance(tokenizer, Path) else tokenizer is not None
    return tuple(HfTokenizer.WRITTEN) if brings else ()


def save_tokenizer(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | Path | None, *, wrapped: bool = False
) -> None:
    """Write a tokenizer into an export, or copy the tokenizer files of a model directory.
    wrapped: True if config.json describes a model with other parts, such as a vision tower."""
    if isinstance(tokenizer, Path):
        copy_tokenizer_files(tokenizer, folder)
    elif tokenizer is not None:
        tokenizer.save(folder)
    theirs = tokenizer if isinstance(tokenizer, Path) else getattr(tokenizer, "folder", None)
    arch = config.arch
    own = arch.wrapper_tokenizer_class if wrapped else arch.own_tokenizer_class
    take_as_it_is(folder, own=own, theirs=theirs)


def exported_files(directory: Path) -> list[Path]:
    """Return the files of a model directory that an export into the directory would replace; [] if
    the directory holds no model."""
    weights = [path for pattern in MODEL_FILES for path in sorted(directory.glob(pattern))]
    if not weights:
        return []
    beside = (GENERATION_FILE, *PROCESSOR_FILES, *HfTokenizer.WRITTEN)
    others = (path for name in beside for path in sorted(directory.glob(name)))
    return weights + [path for path in others if path.is_file()]


def export_owner(directory: Path) -> RunId | None:
    """Return the id of the run that wrote the export in a directory; None if llmq.json names no
    run."""
    return RunId.of(json_object(directory / RUN_FILE).get("run"))


def recorded_sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight file, by name, from llmq.json; {} if llmq.json has none."""
    sums = json_object(directory / RUN_FILE).get("sha256")
    sums = sums if isinstance(sums, dict) else {}
    return {str(name): str(digest) for name, digest in sums.items() if "/" not in name}


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
    """Yield a temporary folder for the files of an export. After the `with` block the tokenizer is
    added. Then the files move to out_dir, where they replace an older export and nothing else.

    check: function that gets the folder before the files move. names: list that gets the names of
    all files. wrapped: see save_tokenizer. LlmqError if the disk is full or fails.
    """
    replaces = MODEL_FILES + tokenizer_files(tokenizer)
    if exported_files(out_dir):
        replaces += (GENERATION_FILE, *PROCESSOR_FILES)
    with staged_directory(out_dir, replaces, RUN_FILE) as staging:
        yield staging
        save_tokenizer(staging, config, tokenizer, wrapped=wrapped)
        if check is not None:
            check(staging)
        names += sorted(file_names(staging))
