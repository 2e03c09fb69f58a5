"""What a checkpoint says of itself, in checkpoint.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.base.errors import LlmqError
from llmq.base.run_id import RunId
from llmq.config.model import ModelConfig

VERSION = 1
MANIFEST = "checkpoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds beside tensors. Dictionaries contain JSON types only."""

    model: ModelConfig
    loader: dict[str, Any]
    """Where the training data goes on: DataLoader.state()."""
    state: dict[str, Any]
    """The trainer's own: random seeds, counters, histories. Opaque here."""
    options: dict[str, Any]
    """The options of the run, to be shown and compared."""
    tokenizer: str | None
    """'bytes', or the absolute path of a directory with tokenizer files; None if unknown."""
    run: RunId | None = None  # None before runs had ids
    base: dict[str, Any] | None = None
    """BaseId.record() of the model whose adapters these are; None where all of it is here."""
    tokenizer_id: dict[str, Any] | None = None
    """TokenizerId.record() of what made the training data."""


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of this file; LlmqError if it is damaged or not there."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LlmqError(
            f"'{path.parent}' is not a complete checkpoint: it has no {MANIFEST}"
        ) from None
    except OSError as error:
        raise LlmqError(f"cannot read '{path}': {error.strerror}") from error
    except ValueError as error:
        raise LlmqError(f"'{path}' is damaged ({error}): use another checkpoint") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise LlmqError(
            f"'{path}' has version {version!r}; only {VERSION} can be read: use the program that "
            "wrote it"
        )
    if document.get("sha256") != digest_of(document):
        raise LlmqError(f"'{path}' is damaged: wrong checksum; use another checkpoint")
    return document


def digest_of(document: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, however it is formatted."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    content = json.loads(json.dumps(content))  # what a reader gets, e.g. text for every key
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------
# Reading
