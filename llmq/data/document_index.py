"""Where the documents of a token file are: from the `.docs` file beside it, or found by its ids."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.base.errors import DataError
from llmq.data.document_file import DocumentFile, documents_path, sample_checksum
from llmq.data.tokens import TokenFile

_SCAN_TOKENS = 1 << 22  # read at once in the search for a separator


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIndex:
    """The documents of one token file: number i has the tokens from offsets[i] to offsets[i + 1].

    offsets: (n + 1,) int64, rising from 0 to the number of tokens; not to be written to. is_cut:
    whether the last document goes on in another file, or has no end. was_scanned: whether a
    separator has found them.
    """

    offsets: np.ndarray
    is_cut: bool
    was_scanned: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, (n,) int64, its end-of-text token included."""
        return np.diff(self.offsets)

    @classmethod
    def read(
        cls, token_file: str | Path | TokenFile, separator: int | None = None
    ) -> DocumentIndex:
        """Of a token file. separator: the id that ends a document, where no `.docs` file says it.

        With it such a file is read once as a whole; the process remembers the result. DataError if
        nothing says where the documents are, or the `.docs` file is damaged or of another file.
        """
        file = token_file if isinstance(token_file, TokenFile) else TokenFile(token_file)
        path = documents_path(file.path)
        if path.exists():
            return _of_document_file(file, path)
        if separator is None:
            raise DataError(
                f"nothing says where the documents of '{file.path}' are: copy or rename its "
                f"'{path.name}' along with it, tokenize again with --overwrite, or give "
                "--document-separator ID, the token that ends a document"
            )
        stat = os.stat(file.path)
        return _scanned(str(file.path), stat.st_size, stat.st_mtime_ns, separator)


def _of_document_file(file: TokenFile, path: Path) -> DocumentIndex:
    verify = {} if file.checksums is None else {"verify": file.checksums.verify_documents}
    found = DocumentFile.read(path, **verify)

    def contradicts(how: str) -> DataError:
        return DataError(
            f"'{path}' contradicts '{file.path}': {how}; copy the two of them together, or "
            "tokenize the data again"
        )

    if found.num_tokens != file.num_tokens:
        raise contradicts(f"it is of {found.num_tokens} tokens, the file has {file.num_tokens}")
    offsets = np.concatenate([np.zeros(1, np.int64), found.ends])
    if (wrong := np.diff(offsets) <= 0).any():
        at = int(wrong.argmax())
        raise contradicts(
            f"document {at} would end at {offsets[at + 1]} and begin at {offsets[at]}"
        )
    if offsets[-1] != file.num_tokens:
        raise contradicts(f"its documents end at {offsets[-1]}, the file at {file.num_tokens}")
    if sample_checksum(file.read_tokens, found.ends) != found.checksum:
        raise contradicts("it was written for other tokens")
    file.close()
    offsets.flags.writeable = False
    return DocumentIndex(offsets, found.is_cut)


@functools.lru_cache(maxsize=1024)
def _scanned(path: str, size: int, mtime_ns: int, separator: int) -> DocumentIndex:
    """size, mtime_ns: of the file, so that another file under this name is scanned anew."""
    file = TokenFile(path)
    ends = []
    for start in range(0, file.num_tokens, _SCAN_TOKENS):
        tokens = file.read_tokens(start, min(_SCAN_TOKENS, file.num_tokens - start))
        ends.append(np.flatnonzero(tokens == separator) + (start + 1))
    file.close()
    found = np.concatenate([np.zeros(1, np.int64), *ends])
    if len(found) == 1 and file.num_tokens:
        raise DataError(
            f"--document-separator: token {separator} is nowhere in '{path}': give the id with "
            "which its documents end"
        )
    is_cut = bool(found[-1] < file.num_tokens)
    offsets = np.append(found, file.num_tokens) if is_cut else found
    offsets.flags.writeable = False
    return DocumentIndex(offsets, is_cut, was_scanned=True)
