"""How many documents and trained tokens token files have, and what --seq-len does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.data.document_index import DocumentIndex
from llmq.data.tokens import TokenFile

_CHUNK = 1 << 22  # tokens whose masks are read at once


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all documents of some token files.

    trained: tokens whose prediction counts. longest: tokens of the longest document. cut: documents
    longer than seq_len, None if none was given. untrained: those without a trained token, with
    seq_len among the first ones.
    """

    documents: int
    tokens: int
    trained: int
    longest: int
    untrained: int
    seq_len: int | None = None
    cut: int | None = None

    def lines(self) -> list[str]:
        """For people."""
        share = 100 * self.trained / max(self.tokens, 1)
        lines = [
            f"{self.tokens} tokens, {self.trained} of them trained "
            f"({share:.1f} %), the longest document has {self.longest}"
        ]
        if self.cut is not None:
            lines.append(f"longer than --seq-len {self.seq_len}: {self.cut}")
        return lines

    def warnings(self) -> list[str]:
        """What makes a training worse than it could be."""
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
    """Counts over all files; a document that is cut between two files is two.

    separator: see DocumentIndex.read, which raises DataError.
    """
    documents = tokens = all_trained = longest = untrained = cut = 0
    for file in files:
        index = DocumentIndex.read(file, separator)
        trained, within = _trained(file, index, seq_len)
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
    file: TokenFile, index: DocumentIndex, seq_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Trained tokens of each document, and those among its first `seq_len` ones, (n,) int64."""
    lengths, offsets = index.lengths, index.offsets
    if not file.has_masks or not len(index):
        return lengths, lengths
    whole, within = [], []
    first = 0
    while first < len(index):
        reach = np.searchsorted(offsets, offsets[first] + _CHUNK, side="right") - 1
        last = max(first + 1, int(reach))
        start = offsets[first]
        mask = file.read_mask(int(start), int(offsets[last] - start)).view(np.int8)
        starts = offsets[first:last] - start
        whole.append(np.add.reduceat(mask, starts, dtype=np.int64))
        if seq_len is not None:
            place = np.arange(len(mask)) - np.repeat(starts, lengths[first:last])
            mask = mask * (place < seq_len)
            within.append(np.add.reduceat(mask, starts, dtype=np.int64))
        first = last
    total = np.concatenate(whole)
    return total, np.concatenate(within) if seq_len is not None else total
