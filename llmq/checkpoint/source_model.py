"""The source model of a run, which gave the initial weights. Exports copy files, fields of
config.json and extra tensors from this model's folder.

FILES and FIELDS say how an export treats each file and each field of config.json. Extra tensors
(vision tower, MTP layers) are copied byte by byte. A checkpoint holds the texts of the files; of
the extra tensors it holds only the number and the SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.files import check_readable, json_object
from llmq.checkpoint.export_files import CONFIG_FILE, GENERATION_FILE, PROCESSOR_FILES
from llmq.text.tokenizer import HfTokenizer, leaves_folder

COPIED, MERGED, REWRITTEN = "copied", "merged", "written anew"
TOKENIZER, LEFT_OUT = "of the tokenizer", "left out"


class Fate(NamedTuple):
    """How an export treats a file or a field of config.json of the source model. what: a constant
    such as MERGED. why: the reason."""

    what: str
    why: str


FILES: dict[str, Fate] = {
    CONFIG_FILE: Fate(MERGED, "fields that training changed are new, all others stay"),
    GENERATION_FILE: Fate(MERGED, "its fields stay, ids that end a text by config.json are added"),
    **dict.fromkeys(PROCESSOR_FILES, Fate(COPIED, "images are prepared as before")),
    **dict.fromkeys(HfTokenizer.FILES, Fate(TOKENIZER, "that of the data is the one trained with")),
    "model*.safetensors": Fate(REWRITTEN, "trained weights, and tensors that were not trained"),
    "model.safetensors.index.json": Fate(REWRITTEN, "it names the files of weights"),
    "README.md": Fate(REWRITTEN, "`llmq export` describes the new model"),
    "*.py": Fate(LEFT_OUT, "code of others is never copied"),
    "*": Fate(LEFT_OUT, "other formats hold old weights; `README.md` names the licence"),
}
"""Fate of a file in train, merge and export, by name or pattern; the first match counts."""

FIELDS: dict[str, Fate] = {
    "quantization_config": Fate(LEFT_OUT, "codes are written as their values"),
    "auto_map": Fate(LEFT_OUT, "code of others is never copied"),
    "_name_or_path": Fate(LEFT_OUT, "it names a place of another machine"),
    "dtype, torch_dtype": Fate(REWRITTEN, "the format of the written weights"),
    "*": Fate(MERGED, "a changed field is new; others stay, also of text_config, vision_config"),
}
"""Fate of a field of config.json, by name. With --text-only, exports also leave out fields of other
parts."""

_DTYPES = ("dtype", "torch_dtype")
_MTP_FIELDS = ("mtp_*", "num_nextn_predict_layers")
MAX_TEXT = 1 << 20
"""Maximum bytes of a source model's file that a checkpoint keeps."""
HASH_THREADS = 8


def fate_of(name: str) -> Fate:
    """Return the fate of a file with this name."""
    return next(fate for pattern, fate in FILES.items() if fnmatch(name, pattern))


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """The folder of a model, without the weights that are trained.

    name: the model's name as the user gave it. folder: absolute path. revision: commit at the hub,
    or None. config: content of config.json. files: texts, by name, of the files that exports copy
    or merge. prefix: prefix of the language model's tensor names in a model with other parts, else
    "". fused: True if the experts of a layer are one tensor. extra: open tensors, by name, that the
    language model does not have. parts: the number of extra tensors in each module. noted: SHA-256
    of the extra tensors if these are not open.
    """

    name: str
    folder: str
    revision: str | None = None
    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    fused: bool = False
    parts: dict[str, int] = field(default_factory=dict)
    noted: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, name: str, revision: str | None, folder: Path, extra: Mapping[str, Any], **layout: Any
    ) -> SourceModel:
        """Return the source model in a folder. extra, and `prefix` and `fused` in layout: see the
        fields."""
        return cls(
            name=name,
            folder=str(folder.resolve()),
            revision=revision,
            config=json_object(folder / CONFIG_FILE),
            files=_texts(folder),
            parts=dict(Counter(map(_part_of, extra))),
            extra=extra,
            **layout,
        )

    @classmethod
    def of_record(cls, record: Any) -> SourceModel | None:
        """Return the source model in a checkpoint's record; None if record is None. LlmqError if
        the record is damaged."""
        if record is None:
            return None
        try:
            source = cls(**record)
            ModelConfig.from_hf(source.config)
        except (TypeError, AttributeError, ConfigError) as error:
            raise LlmqError(f"the checkpoint's model cannot be read ({error})") from error
        return source

    def record(self) -> dict[str, Any]:
        """Return the record for a checkpoint, as JSON. The first call reads all extra tensors."""
        names = ("name", "folder", "revision", "config", "files", "prefix", "fused", "parts")
        return {name: getattr(self, name) for name in names} | {"noted": self.sha256}

    @cached_property
    def sha256(self) -> str | None:
        """SHA-256 of the extra tensors with their names, dtypes and shapes; None without extra
        tensors."""
        if self.noted is not None or not self.extra:
            return self.noted
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = pool.map(lambda item: digest_of_tensor(*item), sorted(self.extra.items()))
            return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    @property
    def copied(self) -> dict[str, str]:
        """The files that an export copies: text by name."""
        return {name: text for name, text in self.files.items() if fate_of(name).what == COPIED}

    @property
    def described(self) -> str:
        """A phrase with the number of extra tensors, in total and by module."""
        parts = ", ".join(f"{part}: {count}" for part, count in sorted(self.parts.items()))
        return f"{sum(self.parts.values())} tensors ({parts})"

    @cached_property
    def _model(self) -> ModelConfig:
        """The language model of config.json."""
        return ModelConfig.from_hf(self.config)

    @property
    def has_parts(self) -> bool:
        """True if config.json describes a model with other parts beside the language model."""
        wrapper = self._model.arch.wrapper
        return wrapper is not None and self.config["architectures"] == [wrapper]

    def text_only(self) -> SourceModel:
        """Return the language model alone, without the other parts' tensors, fields and files."""
        arch, config = self._model.arch, self.config
        if self.has_parts:
            config = arch.text_config(config) | {"architectures": [arch.name]}
        config = {
            name: value
            for name, value in config.items()
            if not any(fnmatch(name, field) for field in _MTP_FIELDS)
        }
        files = {n: text for n, text in self.files.items() if n not in PROCESSOR_FILES}
        own = {"config": config, "files": files, "prefix": "", "parts": {}}
        return replace(self, **own, noted=None, extra={})

    def for_model(self, model: ModelConfig, *, text_only: bool) -> SourceModel:
        """Return the source for an export of `model`: only the language model if text_only is True
        or `model` has a score head, with which other parts cannot be used."""
        text_only |= self.has_parts and model.num_labels > 0
        return self.text_only() if text_only and (self.has_parts or self.parts) else self

    def notes(self, model: ModelConfig, *, text_only: bool) -> list[str]:
        """Return warnings: that --text-only has no effect, or that a score head leaves other parts
        out."""
        if text_only and not (self.has_parts or self.parts):
            return ["--text-only has no effect: the model has no other parts"]
        if not text_only and self.has_parts and model.num_labels:
            return [f"a model with a score head has no other parts: {self.described} are left out"]
        return []

    def config_json(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """Return config.json for an export of `model` with weights of this dtype ('bf16', 'fp32'):
        the source's fields, with new values where the two models differ."""
        before, after = self._model.to_hf(dtype), model.to_hf(dtype)
        whole = {name: value for name, value in self.config.items() if name not in FIELDS}
        dtypes = {name: after[name] for name in _DTYPES}
        if not self.has_parts:
            return _changed(whole, before, after) | dtypes
        inner = _changed(whole["text_config"], before, after)
        if "architectures" not in whole["text_config"]:
            del inner["architectures"]
        outer = whole.keys() - {"architectures", "model_type"}
        changed = {n: after[n] for n in outer & after.keys() if after[n] != before.get(n)}
        return whole | changed | dtypes | {"text_config": inner | dtypes}

    def generation_config(self, model: ModelConfig) -> dict[str, Any] | None:
        """Return the source's generation_config.json, with the EOS ids of source and model; None if
        the source's file is missing or holds no JSON object."""
        if (fields := self._generation) is None:
            return None
        every = list(dict.fromkeys([*self.ends, *model.without_foreign_tokens().eos_token_ids]))
        if every != self.ends:
            fields = fields | {"eos_token_id": every if len(every) > 1 else every[0]}
        return fields

    @property
    def ends(self) -> list[int]:
        """EOS ids of generation_config.json, which may name more ids than config.json."""
        ends = (self._generation or {}).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        return [end for end in ends if type(end) is int]

    @cached_property
    def _generation(self) -> dict[str, Any] | None:
        """The JSON object in generation_config.json; None without the file, or, with a warning, if
        the file is damaged."""
        if GENERATION_FILE not in self.files:
            return None
        try:
            fields = json.loads(self.files[GENERATION_FILE])
            if isinstance(fields, dict):
                return fields
            problem = "it holds no JSON object"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        warn(f"{GENERATION_FILE} of '{self.folder}' is left out: {problem}")
        return None


def _part_of(name: str) -> str:
    """Return the module under which `parts` counts a tensor: the first component of the tensor's
    name, or two after "model"."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "model" else 1])


def _texts(folder: Path) -> dict[str, str]:
    """Return the texts, by name, of the files that an export copies or merges, without
    config.json."""
    texts = {}
    for name in (GENERATION_FILE, *PROCESSOR_FILES):
        path = folder / name
        if not path.is_file():
            continue
        try:
            check_readable(path)
            if leaves_folder(path) or path.stat().st_size > MAX_TEXT:
                raise ValueError("it is a link that leaves its folder, or too large")
            texts[name] = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            warn(f"'{path}' is left out: {error}")
    return texts


_ABSENT = object()


def _changed(
    source: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `source` with the values of `after` for fields in which `before` and `after` differ,
    and for fields that `source` lacks."""
    out = dict(source)
    for name in dict.fromkeys([*before, *after]):
        old, new, there = (each.get(name, _ABSENT) for each in (before, after, source))
        if old == new and there is not _ABSENT:
            continue
        if new is _ABSENT:
            out.pop(name, None)
        elif all(isinstance(each, dict) for each in (old, new, there)):
            out[name] = _changed(there, old, new)
        else:
            out[name] = new
    return out


def digest_of_tensor(name: str, tensor: Any) -> str:
    """Return the SHA-256 of a tensor's name, dtype, shape and bytes, in hex."""
    digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    for piece in tensor.byte_pieces():
        digest.update(piece)
    return digest.hexdigest()
