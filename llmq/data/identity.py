"""The tokenizer that made some ids, by a fingerprint of what decides them, and a name for people.

`llmq tokenize` writes both into tokenize.json, a run into checkpoints and its model (llmq.json).
For other folders the fingerprint follows from the tokenizer's files, which the cache folder
remembers.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.base.errors import DataError
from llmq.base.files import check_readable, json_object, read_own, write_shared
from llmq.base.worker import BoundsError
from llmq.data.checksums import find_token_files
from llmq.data.guarded import look_into
from llmq.data.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from llmq.runtime.compile import cache_dir

MANIFEST = "tokenize.json"
RUN_FILE = "llmq.json"  # in a model directory, describes the run that made it
SHARD_NAME = re.compile(r"(train|eval)-(\d{3,})\.(bin|docs|sums|mask)(\.partial)?")
_CACHE_VERSION = b"1"


@dataclass(frozen=True, slots=True)
class TokenizerId:
    """Tokenizers of one fingerprint make the same ids of every text, whatever their names are."""

    name: str
    fingerprint: str
    eos_id: int | None = None
    bos_id: int | None = None

    def __str__(self) -> str:
        known = self.fingerprint == self.name  # bytes
        return self.name if known else f"{self.name} ({self.fingerprint[:8]})"

    def record(self) -> dict[str, Any]:
        """For a JSON file; `from_record` reads it."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> TokenizerId | None:
        """Read what `record` returns; None for anything else."""
        try:
            found = cls(**record)
        except TypeError:
            return None
        texts = isinstance(found.name, str) and isinstance(found.fingerprint, str)
        ids = all(i is None or type(i) is int for i in (found.eos_id, found.bos_id))
        return found if texts and ids else None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerId:
        """The identity of a loaded tokenizer."""
        named = _folder_name(tokenizer.folder) if isinstance(tokenizer, HfTokenizer) else "bytes"
        return cls(named, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.bos_id)


def _folder_name(folder: Path) -> str:
    """A folder's name for people; a snapshot in the Hugging Face cache has its repository's."""
    folder = Path(os.path.abspath(folder))
    for part in reversed(folder.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return f"{folder.parent.name}/tokenizer" if folder.name == "tokenizer" else folder.name


def tokenizer_of_folder(folder: Path) -> TokenizerId | None:
    """The identity of the tokenizer files in a folder, under the name that a run of ours has noted,
    else the folder's. Without files it is the run's note; None if there is neither, or none can be
    read."""
    noted = noted_tokenizer(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return noted
    fingerprint = _fingerprint_of_files(folder)
    if noted is not None and noted.fingerprint == fingerprint:
        return noted
    return fingerprint and TokenizerId(_folder_name(folder), fingerprint)


def noted_tokenizer(folder: Path) -> TokenizerId | None:
    """The tokenizer that a run of ours has noted in a model directory; None for other models."""
    return TokenizerId.from_record(json_object(folder / RUN_FILE).get("tokenizer"))


def check_recorded(
    source: str | Path, made: TokenizerId | None, vocab_size: int, model: str
) -> None:
    """Raise DataError unless the tokenizer that is there now is the one of a model's training.
    source: "bytes" or a folder; without a tokenizer in it nothing is checked. made: the training's;
    if it is None, the ids must at least be in the vocabulary. model: for messages."""
    if source == "bytes":
        now, size = TokenizerId.of(ByteTokenizer()), ByteTokenizer.vocab_size
    else:
        now, size = tokenizer_of_folder(Path(source)), None
    if now is None:
        return
    if made is not None and made.fingerprint != now.fingerprint:
        raise DataError(
            f"{model} was trained with the tokenizer {made}, but '{source}' now holds {now}: put "
            "the files of the first one back there"
        )
    if made is None:
        size = look_into(Path(source), ids_of) if size is None else size
        if size > vocab_size:
            raise DataError(
                f"the tokenizer '{source}' has {size} ids, more than the vocabulary of {model}, "
                f"which has {vocab_size}: they do not belong together"
            )


def _fingerprint_of_files(folder: Path) -> str | None:
    digest = hashlib.sha256(_CACHE_VERSION)
    for name in HfTokenizer.DECIDING:
        with suppress(OSError):
            check_readable(folder / name)
            content = (folder / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    path = cache_dir() / "tokenizers" / digest.hexdigest()
    with suppress(OSError):
        found, _, _ = kept = read_own(path).decode(errors="replace").partition(" ")
        if "".join(kept) == _with_checksum(found):
            return found
    try:
        fingerprint = look_into(folder, _fingerprint)
    except BoundsError:
        raise
    except DataError:  # whoever loads the tokenizer reports this
        return None
    with suppress(OSError):
        write_shared(path, _with_checksum(fingerprint).encode())
    return fingerprint


def _fingerprint(folder: Path) -> str:
    return HfTokenizer(folder).fingerprint


def ids_of(folder: Path) -> int:
    """The number of ids of a folder's tokenizer."""
    return HfTokenizer(folder).vocab_size


def _with_checksum(text: str) -> str:
    return f"{text} {zlib.crc32(text.encode()):08x}"


def tokenizers_of_files(pattern: str | Path) -> Iterator[tuple[Path, TokenizerId | None]]:
    """Every token file that a glob pattern names, and its tokenizer, None if unknown."""
    manifests: dict[Path, TokenizerId | None] = {}
    for path in find_token_files(pattern):
        folder = path.parent
        if folder not in manifests:
            record = read_manifest(folder).get("tokenizer")
            manifests[folder] = TokenizerId.from_record(record)
        yield path, manifests[folder] if SHARD_NAME.fullmatch(path.name) else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """tokenize.json of a folder that `llmq tokenize` has written into, {} of any other one."""
    manifest = json_object(folder / MANIFEST)
    return manifest if {"complete", "options", "splits", "inputs"} <= manifest.keys() else {}
