"""How many documents and trained tokens token files have, and what --seq-len does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.data.document_index import DocumentIndex
from llmq.data.tokens import TokenFile
from llmq.data.trained import trained_tokens


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all documents of some token files.

    trained: tokens whose prediction counts; nothing predicts the first of a document. longest:
    tokens of the longest document. cut: documents longer than seq_len, None if none was given.
    untrained: those without a trained token, with seq_len among the first ones.
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
    """Trained tokens of each document, and those among its first `seq_len` ones, (n,) int64."""
    whole = trained_tokens(file, offsets)
    starts = offsets[:-1]
    is_cut = np.diff(offsets) > (seq_len or np.inf)
    if not is_cut.any():
        return whole, whole
    # The same of documents that are cut in two, of which only the first parts matter.
    parts = np.union1d(offsets, starts[is_cut] + seq_len)
    return whole, trained_tokens(file, parts)[np.searchsorted(parts, starts)]
