"""The identity of a tokenizer: a fingerprint of everything that decides ids, and a readable name.

`llmq tokenize` writes the identity into tokenize.json, a run into checkpoints and llmq.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.base.files import json_object
from llmq.data.checksums import find_token_files

MANIFEST = "tokenize.json"
RUN_FILE = "llmq.json"  # in a model directory, describes the run that made it
SHARD_NAME = re.compile(r"(train|eval)-(\d{3,})\.(bin|docs|sums|mask)(\.partial)?")


@dataclass(frozen=True, slots=True)
class TokenizerId:
    """Identity of a tokenizer. Tokenizers with the same fingerprint make the same ids of every
    text; names may differ."""

    name: str
    fingerprint: str
    eos_id: int | None = None
    bos_id: int | None = None

    def __str__(self) -> str:
        is_bytes = self.fingerprint == self.name
        return self.name if is_bytes else f"{self.name} ({self.fingerprint[:8]})"

    def record(self) -> dict[str, Any]:
        """Fields for a JSON file, which `from_record` reads."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> TokenizerId | None:
        """Identity of a `record`; None for any other value."""
        try:
            identity = cls(**record)
        except TypeError:
            return None
        texts = isinstance(identity.name, str) and isinstance(identity.fingerprint, str)
        ids = all(i is None or type(i) is int for i in (identity.eos_id, identity.bos_id))
        return identity if texts and ids else None


def noted_tokenizer(folder: Path) -> TokenizerId | None:
    """Tokenizer recorded in a model directory's llmq.json; None for models of other programs."""
    return TokenizerId.from_record(json_object(folder / RUN_FILE).get("tokenizer"))


def tokenizers_of_files(pattern: str | Path) -> Iterator[tuple[Path, TokenizerId | None]]:
    """Token files that a glob pattern names, each with its tokenizer, None if unknown."""
    manifests: dict[Path, TokenizerId | None] = {}
    for path in find_token_files(pattern):
        folder = path.parent
        if folder not in manifests:
            record = read_manifest(folder).get("tokenizer")
            manifests[folder] = TokenizerId.from_record(record)
        yield path, manifests[folder] if SHARD_NAME.fullmatch(path.name) else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Content of tokenize.json in a folder that `llmq tokenize` has written into; {} for any other
    folder."""
    manifest = json_object(folder / MANIFEST)
    return manifest if {"complete", "options", "splits", "inputs"} <= manifest.keys() else {}
