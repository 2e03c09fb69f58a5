"""The identity of a loaded tokenizer, or of the tokenizer files in a folder.

The fingerprint of a folder is computed from the tokenizer's files, and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from contextlib import suppress
from pathlib import Path

from llmq.base.errors import DataError
from llmq.base.files import check_readable, read_own, write_shared
from llmq.base.worker import BoundsError
from llmq.data.identity import TokenizerId, noted_tokenizer
from llmq.runtime.compile import cache_dir
from llmq.text.guarded import look_into
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer

_CACHE_VERSION = b"1"


def identity_of(tokenizer: Tokenizer) -> TokenizerId:
    """Identity of a loaded tokenizer."""
    name = _folder_name(tokenizer.folder) if isinstance(tokenizer, HfTokenizer) else "bytes"
    return TokenizerId(name, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.bos_id)


def _folder_name(folder: Path) -> str:
    """Readable name of a folder: the repository's for a snapshot in the Hugging Face cache."""
    folder = Path(os.path.abspath(folder))
    for part in reversed(folder.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return f"{folder.parent.name}/tokenizer" if folder.name == "tokenizer" else folder.name


def tokenizer_of_folder(folder: Path) -> TokenizerId | None:
    """Identity of the tokenizer files in a folder, with the name in the folder's llmq.json if there
    is one, else with the folder's name. Without tokenizer files, the identity in llmq.json. None
    without both, or for files that cannot be read."""
    noted = noted_tokenizer(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return noted
    fingerprint = _fingerprint_of_files(folder)
    if noted is not None and noted.fingerprint == fingerprint:
        return noted
    return fingerprint and TokenizerId(_folder_name(folder), fingerprint)


def check_recorded(
    source: str | Path, made: TokenizerId | None, vocab_size: int, model: str
) -> None:
    """Raise DataError unless the tokenizer of `source` is the tokenizer of a model's training.
    source: "bytes" or a folder; a folder without a tokenizer is not checked. made: tokenizer of the
    training; None if unknown, then only the number of ids is checked. model: name of the model, for
    messages."""
    if source == "bytes":
        now, size = identity_of(ByteTokenizer()), ByteTokenizer.vocab_size
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
        cached = read_own(path).decode(errors="replace")
        fingerprint = cached.partition(" ")[0]
        if cached == _with_checksum(fingerprint):
            return fingerprint
    try:
        fingerprint = look_into(folder, _fingerprint)
    except BoundsError:
        raise
    except DataError:  # reported when the tokenizer is loaded
        return None
    with suppress(OSError):
        write_shared(path, _with_checksum(fingerprint).encode())
    return fingerprint


def _fingerprint(folder: Path) -> str:
    return HfTokenizer(folder).fingerprint


def ids_of(folder: Path) -> int:
    """Number of ids of a folder's tokenizer, gaps included."""
    return HfTokenizer(folder).vocab_size


def _with_checksum(text: str) -> str:
    return f"{text} {zlib.crc32(text.encode()):08x}"
