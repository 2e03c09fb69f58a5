"""Reader of spans of token files as rows of a batch: inputs, targets, and starts of documents."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import DataError
from llmq.base.step_inputs import PAIRS, SCORES, TARGET, Input
from llmq.data.sidecars import Column, column_path, open_column
from llmq.data.tokens import MASKED_TARGET, TokenFile

_OPEN_FILES = 16  # maximum number of files that one reader keeps open


class Span(NamedTuple):
    """Consecutive tokens of a file, a part of a row. goes_on: True if the target of the last token
    is the token behind the span. ends: number of tokens of the span in front of each known end of a
    document, rising, 1 to length."""

    file: int
    start: int
    length: int
    goes_on: bool
    ends: Sequence[int] | np.ndarray


def documents_of(spans: Sequence[Span], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions in a row at which documents start, in any order, and positions behind known ends of
    documents, both int64 arrays. Padding counts as a document."""
    edges = np.cumsum([0, *(span.length for span in spans)])
    pairs = zip(spans, edges[:-1].tolist(), strict=True)
    ends = np.array([at + end for span, at in pairs for end in span.ends], np.int64)
    starts = np.concatenate([edges, ends])
    return starts[starts < seq_len], ends


class RowReader:
    """Reader of rows of seq_len tokens, for one thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        seq_len: int,
        vocab_size: int,
        *,
        document_mask: bool,
        inputs: Sequence[Input] = (),
        scores: Path | None = None,
        labels: int = 0,
        pad: int | None = None,
    ) -> None:
        """paths: files by the number in Span.file. document_mask: True if batches have starts of
        documents. inputs: named arrays of batches, from sidecars of the files; with PAIRS each span
        is a pair of documents. scores: folder of `.scores` files. labels: number of labels of a
        score head; 0: targets are tokens. A score head reads each document's last token that is not
        `pad`; its target is the label stored behind the document, or 0 for pairs.
        """
        self._paths, self.seq_len, self.vocab_size = paths, seq_len, vocab_size
        self.document_mask, self.inputs = document_mask, tuple(inputs)
        self._columns = [each for each in self.inputs if each.sidecar != PAIRS]
        self._scores, self._labels, self._pad = scores, labels, pad
        self._open: OrderedDict[int, tuple[TokenFile, list[Column]]] = OrderedDict()

    def read(self, rows: Sequence[Sequence[Span]], counted: Sequence[bool], size: int) -> Batch:
        """Batch of `size` rows; missing rows repeat the first row, all masked. counted: for each
        row, True if its targets are trained. DataError for files that cannot be read, and ids
        outside the vocabulary."""
        inputs = np.empty((size, self.seq_len), np.int32)
        targets = np.full_like(inputs, MASKED_TARGET)
        starts = np.zeros_like(inputs) if self.document_mask else None
        named = {each.name: each.zeros(size, self.seq_len) for each in self.inputs}
        lengths = np.zeros(size, np.int32)
        for row, spans in enumerate(rows):
            of_row = None if starts is None else starts[row]
            named_of_row = {name: array[row] for name, array in named.items()}
            filled = self._read_row(spans, inputs[row], targets[row], of_row, named_of_row)
            if counted[row]:
                lengths[row] = filled
            else:
                targets[row] = MASKED_TARGET
        inputs[len(rows) :] = inputs[0]
        if starts is not None:
            starts[len(rows) :] = starts[0]
        padding = inputs.size - int(lengths.sum())
        return Batch(inputs, targets, starts, padding, named or None, lengths)

    def _read_row(
        self,
        spans: Sequence[Span],
        inputs: np.ndarray,
        targets: np.ndarray,
        starts: np.ndarray | None,
        named: Mapping[str, np.ndarray],
    ) -> int:
        """Fill a row of each array, (seq_len, ...); return the number of tokens in the row. All
        work but reading is on whole rows, because a row may have hundreds of spans."""
        tokens, counts, columns = self._read_spans(spans)
        lengths = np.array([span.length for span in spans])
        goes_on = np.array([span.goes_on for span in spans])
        filled = int(lengths.sum())
        # Place of each input among the tokens read; the target is the token behind this place.
        places = np.arange(filled) + np.repeat(np.cumsum(goes_on) - goes_on, lengths)
        inputs[:filled] = tokens[places]
        targets[:filled] = tokens[places + 1]
        if counts is not None:
            targets[:filled][~counts[places + 1]] = MASKED_TARGET
        if not goes_on[-1]:
            targets[filled - 1] = MASKED_TARGET
        if starts is not None:
            at, ends = documents_of(spans, self.seq_len)
            targets[ends - 1] = MASKED_TARGET
            starts[at] = at
            np.maximum.accumulate(starts, out=starts)
        for each, column in zip(self._columns, columns, strict=True):
            rows = np.arange(filled)
            if each.per == TARGET:
                rows = np.flatnonzero(targets[:filled] != MASKED_TARGET)
            elements = named[each.name][rows] = column[places[rows] + (each.per == TARGET)]
            if np.isnan(elements).any():
                raise self._lacking(each, spans)
        for each in self.inputs:
            if each.sidecar == PAIRS:
                self._read_pairs(spans, counts, inputs, targets, named[each.name])
        if self._labels and (targets[:filled] >= self._labels).any():
            raise self._no_label(spans, int(targets[:filled].max()))
        if filled < self.seq_len:  # padding repeats tokens of the row, which adds no new values
            inputs[filled:] = np.resize(inputs[:filled], self.seq_len - filled)
        return filled

    def _read_pairs(
        self,
        spans: Sequence[Span],
        counts: np.ndarray,
        inputs: np.ndarray,
        targets: np.ndarray,
        partner: np.ndarray,
    ) -> None:
        """Fill a row's `partner`, (seq_len,), from the mask bits of the documents' first tokens.
        With a score head also set the row's targets: label 0 behind each document."""
        # Edges of spans are edges of the tokens read, because no span of a pair goes on.
        edges = np.cumsum([0, *(span.length for span in spans)])
        for begin, span in zip(edges[:-1].tolist(), spans, strict=True):
            middle, end = (begin + length for length in span.ends)
            preferred, other = np.where(counts[[begin, middle]], 1, -1)
            partner[begin:middle] = preferred * (middle + 1)
            partner[middle:end] = other * (begin + 1)
            if self._labels:
                targets[begin:end] = MASKED_TARGET
                for start, stop in ((begin, middle), (middle, end)):
                    read = np.flatnonzero(inputs[start:stop] != self._pad)
                    targets[start + read[-1:]] = 0

    def _read_spans(
        self, spans: Sequence[Span]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """Read the tokens, masks and columns of spans.

        Returns token ids, int32 (n,), with one extra element at the end; masks, bool (n,), True for
        trained tokens, or None if all are trained; and for each column its elements (n, ...).
        """
        sizes = [span.length + span.goes_on for span in spans]
        tokens = np.zeros(sum(sizes) + 1, "<i4")
        counts: np.ndarray | None = None
        columns = [np.zeros((len(tokens), *each.shape), each.dtype.numpy) for each in self._columns]
        at = 0
        for span, size in zip(spans, sizes, strict=True):
            file, opened = self._file(span.file)
            file.read_tokens_into(span.start, tokens[at : at + size])
            if file.has_masks:
                counts = np.ones(len(tokens), bool) if counts is None else counts
                # The target token's own bit decides, so that the first token of an answer is
                # trained, and the token behind the answer is not.
                counts[at : at + size] = file.read_mask(span.start, size)
            for column, elements in zip(opened, columns, strict=True):
                elements[at : at + size] = column.read(span.start, size)
            at += size
        tokens = tokens.astype(np.int32, copy=False)
        bad = tokens.view(np.uint32) >= self.vocab_size  # a negative id is a large unsigned one
        if bad.any():
            raise self._bad_id(spans, sizes, tokens, int(bad.argmax()))
        return tokens, counts, columns

    def _lacking(self, of: Input, spans: Sequence[Span]) -> DataError:
        paths = [self._paths[span.file] for span in spans]
        names = {str(column_path(of, path, self._scores)) for path in paths}
        why = "the sidecar has NaN"
        if of.sidecar == SCORES:
            why = "documents were longer than the --seq-len of `llmq score`; score with this one"
        return DataError(
            f"{', '.join(sorted(names))}: there are no {of.name} of a token that is trained: {why}"
        )

    def _no_label(self, spans: Sequence[Span], label: int) -> DataError:
        names = {str(self._paths[span.file]) for span in spans}
        return DataError(
            f"{', '.join(sorted(names))}: {label} is none of the labels 0 to {self._labels - 1} of "
            "--num-labels: `llmq tokenize --format classes` writes a document's label behind it"
        )

    def _bad_id(
        self, spans: Sequence[Span], sizes: Sequence[int], tokens: np.ndarray, at: int
    ) -> DataError:
        which = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
        position = spans[which].start + at - sum(sizes[:which])
        return DataError(
            f"'{self._paths[spans[which].file]}' has token id {tokens[at]} at position {position}, "
            f"outside the model's vocabulary of {self.vocab_size}: the file is damaged or was made "
            "for another tokenizer; tokenize the data again"
        )

    def _file(self, number: int) -> tuple[TokenFile, list[Column]]:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            if len(self._open) == _OPEN_FILES:
                self._close_one(last=False)
            file = TokenFile(self._paths[number])
            columns = [open_column(each, file, self._scores) for each in self._columns]
            self._open[number] = file, columns
        return self._open[number]

    def _close_one(self, *, last: bool = True) -> None:
        file, columns = self._open.popitem(last=last)[1]
        for each in (file, *columns):
            each.close()

    def close(self) -> None:
        """Close all files, which the next read opens again."""
        while self._open:
            self._close_one()
