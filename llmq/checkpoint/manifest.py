"""The manifest of a checkpoint, checkpoint.json."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from llmq.base.files import check_readable
from llmq.base.run_id import RunId
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.source_model import SourceModel
from llmq.data.identity import TokenizerId

VERSION = 1
MANIFEST = "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint without its tensors. Dictionaries contain only types of JSON."""

    model: ModelConfig
    loader: dict[str, Any]
    """DataLoader.state(): the position in the training data."""
    state: dict[str, Any]
    """State of the trainer: random seeds, counters, histories. This module does not read its
    fields."""
    options: dict[str, Any]
    """Options of the run by field, to show and to compare."""
    tokenizer: str | None
    """'bytes', or the absolute path of a directory with tokenizer files; None if unknown."""
    run: RunId
    base: dict[str, Any] | None = None
    """BaseId.record() of the base model of adapters; None for a checkpoint of a whole model."""
    tokenizer_id: dict[str, Any] | None = None
    """TokenizerId.record() of the tokenizer that made the training data."""
    source: dict[str, Any] | None = None
    """SourceModel.record() of the initial model; None for random weights and for adapters."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        options: Mapping[str, Any],
        loader: dict[str, Any],
        state: dict[str, Any],
        run: RunId,
        made: tuple[str | None, TokenizerId | None],
        base: BaseId | None = None,
        source: SourceModel | None = None,
    ) -> Manifest:
        """Return the manifest of a run. Dictionaries are copied, so the run may change them later.

        options: the options of all groups, by field. made: values of the fields tokenizer and
        tokenizer_id. base: the adapters' base model. source: the initial model of a run that trains
        a whole model.
        """
        saved = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in options.items()
        }
        return cls(
            model=model,
            loader=copy.deepcopy(loader),
            state=copy.deepcopy(state),
            options=saved,
            tokenizer=made[0],
            run=run,
            tokenizer_id=made[1] and made[1].record(),
            base=base and base.record(),
            source=source and source.record(),
        )


class DamagedManifest(LlmqError):
    """checkpoint.json has changed since it was written: no field of the file can be trusted."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint.json. LlmqError if the file is missing or has another
    version; DamagedManifest if the file is damaged."""
    try:
        check_readable(path)
        document = json.loads(path.read_bytes())
        digest = digest_of(document) if isinstance(document, dict) else None
    except FileNotFoundError:
        raise LlmqError(
            f"'{path.parent}' is not a complete checkpoint: it has no {MANIFEST}"
        ) from None
    except OSError as error:
        kind = DamagedManifest if error.errno == errno.EIO else LlmqError
        raise kind(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedManifest(f"'{path}' is damaged ({error}): use another checkpoint") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        kind = LlmqError if type(version) is int else DamagedManifest
        raise kind(
            f"'{path}' has version {version!r}; only {VERSION} can be read: use the program "
            "that wrote it"
        )
    if document.get("sha256") != digest:
        raise DamagedManifest(f"'{path}' is damaged: wrong checksum; use another checkpoint")
    problem = _wrong_shape(document)
    if problem is not None:
        kind = DamagedManifest if RunId.of(document.get("run")) is None else LlmqError
        raise kind(f"'{path}' is none of llmq's: {problem}; use another checkpoint")
    if RunId.of(document["run"]) is None:
        raise LlmqError(f"'{path}' is of the time before runs had ids: use another checkpoint")
    if document["options"].get("lora_init") == "pissa":  # adapters of a model that was split
        raise LlmqError(
            f"'{path}' is of a run with --lora-init pissa, which has been taken out: use the "
            "program that wrote it"
        )
    return document


def manifest_damage(path: Path) -> str | None:
    """Return the reason why a checkpoint.json is damaged; None if the file is intact, is missing,
    or cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return f"'{path}' is no file"
        read_manifest(path)
    except DamagedManifest as error:
        return error.headline
    except OSError:
        return f"'{path}' is a link that leads nowhere" if path.is_symlink() else None
    except LlmqError:
        pass
    return None


_PARTS = {"distributed": dict, "run": dict, "data-loader": dict, "model": dict, "options": dict}
_PARTS |= {"files": list}
_NAME, _HASH = re.compile(r"[\w.+-]+", re.ASCII), re.compile(r"[0-9a-f]{64}")
_FILE = {"name": str, "group": str, "rank": int, "bytes": int, "sha256": str}


def _wrong_shape(document: dict[str, Any]) -> str | None:
    """Return a text for the user about the first field that `CheckpointWriter` cannot have written;
    None if there is no such field. The checksum has been compared before."""
    problem = _wrong_types(document, _PARTS)
    if problem is not None:
        return problem
    problems = [
        _wrong_types(document["distributed"], {"world": int}),
        _wrong_types(document["run"], {"step": int, "state": dict}),
        *(_wrong_types(entry, _FILE) for entry in document["files"]),
    ]
    if not isinstance(document.get("tokenizer"), str | None):
        problems.append("tokenizer is no text")
    if any(problems):
        return next(filter(None, problems))
    if not isinstance(document["run"]["state"].get("history", {}), dict):
        return "the history of its run is no mapping"
    names = [entry["name"] for entry in document["files"]]
    if outside := [name for name in names if not _NAME.fullmatch(name) or name in (".", "..")]:
        return f"it names {outside[0]!r}, which is no file of a checkpoint"
    hashes = [entry["sha256"] for entry in document["files"]]
    if odd := [value for value in hashes if not _HASH.fullmatch(value)]:
        return f"it has {odd[0][:70]!r} as SHA-256"
    others = [name for entry in document["files"] for name in entry.keys() - _FILE.keys()]
    return f"a file of it has a field '{others[0]}'" if others else None


def _wrong_types(content: Any, types: dict[str, type]) -> str | None:
    """Return a text about the first field that is missing, has another type, or is negative; None
    if all fields are right. types: type of each field."""
    if not isinstance(content, dict):
        return f"a mapping with {', '.join(types)} is missing"
    for name, kind in types.items():
        value = content.get(name)
        if type(value) is not kind or (kind is int and value < 0):
            return f"{name} is {str(value)[:50]!r}"
    return None


def digest_of(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content in hex, independent of the JSON's formatting."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    content = json.loads(json.dumps(content))  # as a reader gets the content: all keys are text
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
