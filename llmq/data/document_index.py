"""The documents of token files: where they are, and how many of their tokens are trained.

A `.docs` file beside the token file says where they are; else an id that ends them is looked for.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llmq.base.errors import DataError
from llmq.data.document_file import (
    documents_path,
    has_pairs,
    read_document_file,
    sample_checksum,
)
from llmq.data.tokens import TokenFile

_SCAN_TOKENS = 1 << 22  # read at once in the search for a separator


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIndex:
    """The documents of one token file: number i has the tokens from offsets[i] to offsets[i + 1].

    offsets: (n + 1,) int64, from 0 to the number of tokens, read-only. is_cut: the last document
    goes on in another file, or has no end. was_scanned: a separator has found them. in_pairs: every
    two of them are a pair.
    """

    offsets: np.ndarray
    is_cut: bool
    was_scanned: bool = False
    in_pairs: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def units(self) -> np.ndarray:
        """The offsets of what is never divided: documents, or pairs of them; (u + 1,) int64."""
        return self.offsets[:: 1 + self.in_pairs]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, (n,) int64, its end-of-text token included."""
        return np.diff(self.offsets)

    @classmethod
    def read(
        cls, token_file: str | Path | TokenFile, separator: int | None = None
    ) -> DocumentIndex:
        """Read or find the documents of a token file. separator: the id that ends one where there
        is no `.docs` file; the whole file is then read, once in a process. DataError if nothing
        says where documents are, or the `.docs` file is damaged or of another file."""
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
    checksums = file.checksums
    found = read_document_file(path, None if checksums is None else checksums.verify_documents)
    offsets, how = np.concatenate([np.zeros(1, np.int64), found.ends]), ""
    at = int((np.diff(offsets) <= 0).argmax()) if len(found.ends) else 0
    if found.num_tokens != file.num_tokens:
        how = f"it is of {found.num_tokens} tokens, the file has {file.num_tokens}"
    elif len(found.ends) and offsets[at + 1] <= offsets[at]:
        how = f"document {at} would end at {offsets[at + 1]} and begin at {offsets[at]}"
    elif offsets[-1] != file.num_tokens:
        how = f"its documents end at {offsets[-1]}, the file at {file.num_tokens}"
    elif sample_checksum(file.read_tokens, found.ends) != found.checksum:
        how = "it was written for other tokens"
    elif found.in_pairs and (found.is_cut or len(found.ends) % 2):
        how = "it is of pairs, and one of them lacks its end"
    file.close()
    if how:
        raise DataError(
            f"'{path}' contradicts '{file.path}': {how}; copy the two of them together, or "
            "tokenize the data again"
        )
    offsets.flags.writeable = False
    return DocumentIndex(offsets, found.is_cut, in_pairs=found.in_pairs)


def kind_of_pairs(file: TokenFile) -> str | None:
    """The documents of a token file come in pairs of "answers", of which one is preferred, or with
    "labels", which both of a pair then have; None: one by one, as far as a `.docs` file says."""
    if not has_pairs(file.path):
        return None
    second = int(DocumentIndex.read(file).offsets[1])
    one, two = (bool(file.read_mask(at, 1)[0]) for at in (0, second))
    file.close()
    return "labels" if one == two else "answers"


@functools.lru_cache(maxsize=1024)
def _scanned(path: str, size: int, mtime_ns: int, separator: int) -> DocumentIndex:
    """size, mtime_ns: by these another file under the same name is known and scanned anew."""
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


_BLOCK = 1 << 23  # mask bits that are looked at together


def has_trained_tokens(file: TokenFile, block: int = _BLOCK) -> bool:
    """Whether a file has a token whose prediction counts; nothing predicts its first one. Masks are
    read up to the first bit that is set, so many together."""
    if not file.has_masks:
        return file.num_tokens > 1
    for start in range(1, file.num_tokens, block):
        if file.read_mask(start, min(block, file.num_tokens - start)).any():
            return True
    return False


def trained_tokens(file: TokenFile, offsets: np.ndarray, block: int = _BLOCK) -> np.ndarray:
    """By document, (n,) int64, how many of its tokens are predicted and count; never its first.
    offsets: (n + 1,) int64, of the documents. All masks of the file are read, so many together."""
    if not file.has_masks:
        return np.diff(offsets) - 1
    counts = np.zeros(len(offsets), np.int64)  # of the document before each offset
    for start in range(0, file.num_tokens, _BLOCK):
        count = min(_BLOCK, file.num_tokens - start)
        bits = file.read_mask(start, count)
        begin, end = np.searchsorted(offsets, (start, start + count))
        firsts = offsets[begin:end] - start
        bits[firsts] = False
        # A document that begins with the block is there twice, the first time as nothing.
        counts[begin : end + 1] += np.add.reduceat(bits, [0, *firsts], dtype=np.int64)
    return counts[1:]


def targets_of_parts(file: TokenFile, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """By part of a document, (n, 3) int64: how many of its targets count; how many of these stand
    behind one in the part that does not count; and how many do not count: a question. starts,
    counts: (n,), its first token, and how many behind it it predicts."""
    found = np.zeros((len(starts), 3), np.int64)
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        mask = file.read_mask(start, count + 1)
        question = int(mask.argmin()) if not mask.all() else count + 1
        found[i] = mask[1:].sum(), mask[question:].sum(), (~mask).sum()
    return found


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over all documents of some token files. trained: tokens whose prediction counts.
    longest: tokens of the longest document. cut: longer than seq_len, None without it. untrained:
    without a trained token, among the first seq_len ones if it is given."""

    documents: int
    tokens: int
    trained: int
    longest: int
    untrained: int
    seq_len: int | None = None
    cut: int | None = None

    def lines(self) -> list[str]:
        """Lines for the console."""
        share = 100 * self.trained / max(self.tokens, 1)
        lines = [
            f"{self.tokens} tokens, {self.trained} of them trained "
            f"({share:.1f} %), the longest document has {self.longest}"
        ]
        if self.cut is not None:
            lines.append(f"longer than --seq-len {self.seq_len}: {self.cut}")
        return lines

    def warnings(self) -> list[str]:
        """Lines about documents that a training cuts, or gains nothing from."""
        found = []
        if self.cut:
            found.append(
                f"{self.cut} of {self.documents} documents are longer than --seq-len "
                f"{self.seq_len}: a sequence has only a part of them"
            )
        if self.untrained:
            where = f" among the first {self.seq_len}" if self.cut else ""
            found.append(f"{self.untrained} documents have no trained token{where}")
        return found


def count_documents(
    files: Sequence[TokenFile], seq_len: int | None = None, separator: int | None = None
) -> Counts:
    """Count over all files; a document that goes on in another file counts twice. separator: see
    DocumentIndex.read, which raises DataError."""
    documents = tokens = all_trained = longest = untrained = cut = 0
    for file in files:
        index = DocumentIndex.read(file, separator)
        trained, within = _trained(file, index.offsets, seq_len)
        documents += len(index)
        tokens += file.num_tokens
        all_trained += int(trained.sum())
        untrained += int((within == 0).sum())
        longest = max(longest, int(index.lengths.max(initial=0)))
        cut += 0 if seq_len is None else int((index.lengths > seq_len).sum())
        file.close()
    cuts = None if seq_len is None else cut
    return Counts(documents, tokens, all_trained, longest, untrained, seq_len, cuts)


def _trained(
    file: TokenFile, offsets: np.ndarray, seq_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Trained tokens of each document, and those among its first seq_len ones, (n,) int64."""
    whole = trained_tokens(file, offsets)
    starts = offsets[:-1]
    is_cut = np.diff(offsets) > (seq_len or np.inf)
    if not is_cut.any():
        return whole, whole
    # Longer documents are cut in two, and their first parts are looked up.
    parts = np.union1d(offsets, starts[is_cut] + seq_len)
    return whole, trained_tokens(file, parts)[np.searchsorted(parts, starts)]


def count_duplicates(train: Sequence[TokenFile], held_out: Sequence[TokenFile]) -> tuple[int, int]:
    """How many of the documents held out are in the training files too, id by id, and of how many.
    One that is cut between two files counts as its parts. Only documents of equal lengths are
    read."""
    own: Counter[bytes] = Counter()
    for index, file in _indexed(held_out):
        own.update(_hashes(file, index, np.arange(len(index))))
    lengths = np.unique(np.concatenate([i.lengths for i, _ in _indexed(held_out)] or [_NONE]))
    found: set[bytes] = set()
    for index, file in _indexed(train):
        alike = np.flatnonzero(np.isin(index.lengths, lengths))
        found.update(own.keys() & {*_hashes(file, index, alike)})
    return sum(own[each] for each in found), own.total()


_NONE = np.empty(0, np.int64)


def _indexed(files: Sequence[TokenFile]) -> Iterator[tuple[DocumentIndex, TokenFile]]:
    for file in files:
        yield DocumentIndex.read(file), file
        file.close()


def _hashes(file: TokenFile, index: DocumentIndex, numbers: np.ndarray) -> Iterator[bytes]:
    """The hashes of the documents with these numbers, which are read about _SCAN_TOKENS at a
    time."""
    blocks = index.offsets[numbers] // _SCAN_TOKENS
    for block in np.split(numbers, np.flatnonzero(np.diff(blocks)) + 1):
        if not len(block):
            continue
        start = int(index.offsets[block[0]])
        tokens = file.read_tokens(start, int(index.offsets[block[-1] + 1]) - start)
        for number in block:
            own = tokens[index.offsets[number] - start : index.offsets[number + 1] - start]
            yield xxhash.xxh3_128_digest(own)
