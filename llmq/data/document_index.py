"""Documents of token files: offsets, and numbers of trained tokens.

Offsets come from the `.docs` file beside a token file, else from ids that end a document.
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

_SCAN_TOKENS = 1 << 22  # tokens read at once in the search for a separator


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIndex:
    """Documents of a token file: document i has the tokens [offsets[i], offsets[i + 1]).

    offsets: int64 (n + 1,), from 0 to the number of tokens, read-only. is_cut: True if the last
    document continues in another file, or has no end. was_scanned: True if a separator has found
    the documents. in_pairs: True if every two documents are a pair.
    """

    offsets: np.ndarray
    is_cut: bool
    was_scanned: bool = False
    in_pairs: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def units(self) -> np.ndarray:
        """Offsets of units that are never divided, documents or pairs, int64 (u + 1,)."""
        return self.offsets[:: 1 + self.in_pairs]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 (n,), including the end-of-text token."""
        return np.diff(self.offsets)

    @classmethod
    def read(
        cls, token_file: str | Path | TokenFile, separator: int | None = None
    ) -> DocumentIndex:
        """Documents of a token file. separator: id that ends a document. Without a `.docs` file the
        whole token file is searched for this id, once in a process. DataError without both a
        `.docs` file and a separator, or for a `.docs` file that is damaged or belongs to another
        token file."""
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
    docs = read_document_file(path, None if checksums is None else checksums.verify_documents)
    offsets, problem = np.concatenate([np.zeros(1, np.int64), docs.ends]), ""
    i = int((np.diff(offsets) <= 0).argmax()) if len(docs.ends) else 0
    if docs.num_tokens != file.num_tokens:
        problem = f"it is of {docs.num_tokens} tokens, the file has {file.num_tokens}"
    elif len(docs.ends) and offsets[i + 1] <= offsets[i]:
        problem = f"document {i} would end at {offsets[i + 1]} and begin at {offsets[i]}"
    elif offsets[-1] != file.num_tokens:
        problem = f"its documents end at {offsets[-1]}, the file at {file.num_tokens}"
    elif sample_checksum(file.read_tokens, docs.ends) != docs.checksum:
        problem = "it was written for other tokens"
    elif docs.in_pairs and (docs.is_cut or len(docs.ends) % 2):
        problem = "it is of pairs, and one of them lacks its end"
    file.close()
    if problem:
        raise DataError(
            f"'{path}' contradicts '{file.path}': {problem}; copy the two of them together, or "
            "tokenize the data again"
        )
    offsets.flags.writeable = False
    return DocumentIndex(offsets, docs.is_cut, in_pairs=docs.in_pairs)


def kind_of_pairs(file: TokenFile) -> str | None:
    """The kind of a token file's pairs: "answers" if one document of a pair is preferred, "labels"
    if both documents have the pair's label; None without pairs or without a `.docs` file."""
    if not has_pairs(file.path):
        return None
    second = int(DocumentIndex.read(file).offsets[1])
    one, two = (bool(file.read_mask(at, 1)[0]) for at in (0, second))
    file.close()
    return "labels" if one == two else "answers"


@functools.lru_cache(maxsize=1024)
def _scanned(path: str, size: int, mtime_ns: int, separator: int) -> DocumentIndex:
    """Documents that a separator ends. size, mtime_ns: size and time of the file, part of the
    cache's key because a file may be replaced. DataError if the separator is nowhere in the
    file."""
    file = TokenFile(path)
    ends = []
    for start in range(0, file.num_tokens, _SCAN_TOKENS):
        tokens = file.read_tokens(start, min(_SCAN_TOKENS, file.num_tokens - start))
        ends.append(np.flatnonzero(tokens == separator) + (start + 1))
    file.close()
    offsets = np.concatenate([np.zeros(1, np.int64), *ends])
    if len(offsets) == 1 and file.num_tokens:
        raise DataError(
            f"--document-separator: token {separator} is nowhere in '{path}': give the id with "
            "which its documents end"
        )
    is_cut = bool(offsets[-1] < file.num_tokens)
    offsets = np.append(offsets, file.num_tokens) if is_cut else offsets
    offsets.flags.writeable = False
    return DocumentIndex(offsets, is_cut, was_scanned=True)


_BLOCK = 1 << 23  # mask bits that are read together


def has_trained_tokens(file: TokenFile, block: int = _BLOCK) -> bool:
    """True if a file has a trained token behind its first token. Reads masks up to the first set
    bit, `block` bits at a time."""
    if not file.has_masks:
        return file.num_tokens > 1
    for start in range(1, file.num_tokens, block):
        if file.read_mask(start, min(block, file.num_tokens - start)).any():
            return True
    return False


def trained_tokens(file: TokenFile, offsets: np.ndarray) -> np.ndarray:
    """Number of trained tokens of each document, int64 (n,), without first tokens, which are never
    targets. offsets: offsets of the documents, int64 (n + 1,). Reads all masks of the file, many
    bits at a time."""
    if not file.has_masks:
        return np.diff(offsets) - 1
    counts = np.zeros(len(offsets), np.int64)  # count of the document that ends at each offset
    for start in range(0, file.num_tokens, _BLOCK):
        count = min(_BLOCK, file.num_tokens - start)
        bits = file.read_mask(start, count)
        begin, end = np.searchsorted(offsets, (start, start + count))
        firsts = offsets[begin:end] - start
        bits[firsts] = False
        # A document that begins where the block begins is counted twice, but its first count has no
        # bits.
        counts[begin : end + 1] += np.add.reduceat(bits, [0, *firsts], dtype=np.int64)
    return counts[1:]


def targets_of_parts(file: TokenFile, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Counts of parts of documents, int64 (n, 3): trained targets; trained targets behind the
    part's first untrained token; untrained tokens, which are a question. starts: (n,), first token
    of each part. counts: (n,), number of targets of each part."""
    targets = np.zeros((len(starts), 3), np.int64)
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        mask = file.read_mask(start, count + 1)
        question = int(mask.argmin()) if not mask.all() else count + 1
        targets[i] = mask[1:].sum(), mask[question:].sum(), (~mask).sum()
    return targets


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over all documents of token files. trained: trained tokens. longest: tokens of the
    longest document. cut: documents longer than seq_len, None without seq_len. untrained: documents
    without a trained token, among the first seq_len tokens if seq_len is given."""

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
        """Lines about documents that training cuts, or that have no trained token."""
        lines = []
        if self.cut:
            lines.append(
                f"{self.cut} of {self.documents} documents are longer than --seq-len "
                f"{self.seq_len}: a sequence has only a part of them"
            )
        if self.untrained:
            where = f" among the first {self.seq_len}" if self.cut else ""
            lines.append(f"{self.untrained} documents have no trained token{where}")
        return lines


def count_documents(
    files: Sequence[TokenFile], seq_len: int | None = None, separator: int | None = None
) -> Counts:
    """Counts over all files; a document that continues in another file counts twice. separator: as
    in DocumentIndex.read. DataError for a file without known documents."""
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
    """Trained tokens of each document, and of its first seq_len tokens, int64 (n,) each."""
    whole = trained_tokens(file, offsets)
    starts = offsets[:-1]
    is_cut = np.diff(offsets) > (seq_len or np.inf)
    if not is_cut.any():
        return whole, whole
    # Cut longer documents in two at seq_len, and take the counts of the first parts.
    parts = np.union1d(offsets, starts[is_cut] + seq_len)
    return whole, trained_tokens(file, parts)[np.searchsorted(parts, starts)]


def count_duplicates(train: Sequence[TokenFile], held_out: Sequence[TokenFile]) -> tuple[int, int]:
    """Number of held-out documents whose ids are also a document of the training files, and number
    of all held-out documents. A document that is cut between two files counts as two. A training
    document is read only if a held-out one has the same length."""
    digests: Counter[bytes] = Counter()
    for index, file in _indexed(held_out):
        digests.update(_hashes(file, index, np.arange(len(index))))
    lengths = np.unique(np.concatenate([i.lengths for i, _ in _indexed(held_out)] or [_NONE]))
    duplicates: set[bytes] = set()
    for index, file in _indexed(train):
        alike = np.flatnonzero(np.isin(index.lengths, lengths))
        duplicates.update(digests.keys() & {*_hashes(file, index, alike)})
    return sum(digests[digest] for digest in duplicates), digests.total()


_NONE = np.empty(0, np.int64)


def _indexed(files: Sequence[TokenFile]) -> Iterator[tuple[DocumentIndex, TokenFile]]:
    for file in files:
        yield DocumentIndex.read(file), file
        file.close()


def _hashes(file: TokenFile, index: DocumentIndex, numbers: np.ndarray) -> Iterator[bytes]:
    """Hashes of the documents with these numbers, read about _SCAN_TOKENS tokens at a time."""
    blocks = index.offsets[numbers] // _SCAN_TOKENS
    for block in np.split(numbers, np.flatnonzero(np.diff(blocks)) + 1):
        if not len(block):
            continue
        start = int(index.offsets[block[0]])
        tokens = file.read_tokens(start, int(index.offsets[block[-1] + 1]) - start)
        for number in block:
            own = tokens[index.offsets[number] - start : index.offsets[number + 1] - start]
            yield xxhash.xxh3_128_digest(own)
