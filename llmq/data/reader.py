"""Spans of token files become the rows of a batch: inputs, targets, and where documents start."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import DataError
from llmq.data.scores import ScoreFile, scores_path
from llmq.data.tokens import MASKED_TARGET, TokenFile

PARTNER, SCORES = "partner", "scores"  # of Batch.more, with pairs and with scores
_OPEN_FILES = 16  # kept open by one reader


class Span(NamedTuple):
    """Tokens of a file that stand beside each other in a row. goes_on: whether their last token
    predicts the one behind them. ends: rising from 1 to length, how many of them come before each
    end of a document, as far as known."""

    file: int
    start: int
    length: int
    goes_on: bool
    ends: Sequence[int] | np.ndarray


def documents_of(spans: Sequence[Span], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions where documents of a row start, in any order, and where some end, int64. Padding
    counts as a document."""
    edges = np.cumsum([0, *(span.length for span in spans)])
    pairs = zip(spans, edges[:-1].tolist(), strict=True)
    ends = np.array([at + end for span, at in pairs for end in span.ends], np.int64)
    starts = np.concatenate([edges, ends])
    return starts[starts < seq_len], ends


class RowReader:
    """Reads rows of seq_len tokens. For one thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        seq_len: int,
        vocab_size: int,
        *,
        document_mask: bool,
        pairs: bool = False,
        scores: Path | None = None,
        top_k: int = 0,
        weights: bool = False,
        labels: int = 0,
        pad: int | None = None,
    ) -> None:
        """paths: the files, as spans number them. document_mask: whether batches have starts.
        pairs: whether each span is a pair of documents, and batches say where the other one is.
        scores: the folder with what a reference thinks of each token, which batches then have.
        top_k: how many probabilities of each; 0: that of the token itself. weights: whether
        those of the token files are in the place of scores. labels: of a score
        head, which reads the last token of each document but those of id pad; targets are labels,
        which stand behind documents, of pairs 0. 0: targets are tokens.
        """
        self._paths, self.seq_len, self.vocab_size = paths, seq_len, vocab_size
        self.document_mask, self.pairs = document_mask, pairs
        self._scores, self._top_k = scores, top_k
        self._labels, self._pad = labels, pad
        self._weights, self._has_scores = weights, weights or scores is not None
        self._open: OrderedDict[int, tuple[TokenFile, ScoreFile | None]] = OrderedDict()

    def read(self, rows: Sequence[Sequence[Span]], counted: Sequence[bool], size: int) -> Batch:
        """Read a batch of `size` rows; missing rows repeat the first one, all masked. counted:
        whether a row is to be learned. DataError for files that cannot be read, and ids outside the
        vocabulary."""
        inputs = np.empty((size, self.seq_len), np.int32)
        targets = np.full_like(inputs, MASKED_TARGET)
        starts = np.zeros_like(inputs) if self.document_mask else None
        names = [PARTNER] * self.pairs + [SCORES] * self._has_scores
        width = [2 * self._top_k] * (self._top_k > 0)
        shapes = {PARTNER: inputs.shape, SCORES: (*inputs.shape, *width)}
        more = {name: np.zeros(shapes[name], np.float32) for name in names}
        lengths = np.zeros(size, np.int32)
        for row, spans in enumerate(rows):
            of_row = None if starts is None else starts[row]
            more_of_row = {name: array[row] for name, array in more.items()}
            filled = self._read_row(spans, inputs[row], targets[row], of_row, more_of_row)
            if counted[row]:
                lengths[row] = filled
            else:
                targets[row] = MASKED_TARGET
        inputs[len(rows) :] = inputs[0]
        if starts is not None:
            starts[len(rows) :] = starts[0]
        padding = inputs.size - int(lengths.sum())
        return Batch(inputs, targets, starts, padding, more or None, lengths)

    def _read_row(
        self,
        spans: Sequence[Span],
        inputs: np.ndarray,
        targets: np.ndarray,
        starts: np.ndarray | None,
        more: Mapping[str, np.ndarray],
    ) -> int:
        """Fill a row of each array, (seq_len,); returns how many tokens it has. Only reading goes
        span by span: a row may have hundreds."""
        tokens, counts, scores = self._read_spans(spans)
        lengths = np.array([span.length for span in spans])
        goes_on = np.array([span.goes_on for span in spans])
        filled = int(lengths.sum())
        # Each input has this place among the tokens read; its target is the token behind it.
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
        if scores is not None:
            learned = targets[:filled] != MASKED_TARGET
            more[SCORES][:filled][learned] = scores[places[learned] + 1]
            if np.isnan(more[SCORES]).any():
                raise self._lacking(spans)
        if PARTNER in more:  # no span of a pair goes on, so places are those of the row
            at = np.cumsum([0, *lengths])[:-1].tolist()
            for begin, span in zip(at, spans, strict=True):
                middle, end = (begin + length for length in span.ends)
                preferred, other = np.where(counts[[begin, middle]], 1, -1)
                more[PARTNER][begin:middle] = preferred * (middle + 1)
                more[PARTNER][middle:end] = other * (begin + 1)
                if self._labels:
                    targets[begin:end] = MASKED_TARGET
                    for start, stop in ((begin, middle), (middle, end)):
                        read = np.flatnonzero(inputs[start:stop] != self._pad)
                        targets[start + read[-1:]] = 0
        if self._labels and (targets[:filled] >= self._labels).any():
            raise self._no_label(spans, int(targets[:filled].max()))
        if filled < self.seq_len:  # padding repeats tokens of the row: no other values arise
            inputs[filled:] = np.resize(inputs[:filled], self.seq_len - filled)
        return filled

    def _read_spans(
        self, spans: Sequence[Span]
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Tokens of spans, int32, with one more at the end; whether to predict each, None where all
        are; and their scores, None without."""
        sizes = [span.length + span.goes_on for span in spans]
        tokens = np.zeros(sum(sizes) + 1, "<i4")
        counts: np.ndarray | None = None
        width = [2 * self._top_k] * (self._top_k > 0)
        shape = (len(tokens), *width)
        scores = np.zeros(shape, np.float32) if self._has_scores else None
        at = 0
        for span, size in zip(spans, sizes, strict=True):
            file, scored = self._file(span.file)
            file.read_tokens_into(span.start, tokens[at : at + size])
            if file.has_masks:
                counts = np.ones(len(tokens), bool) if counts is None else counts
                # The bit of the target token itself decides, so that the first token of an answer
                # is trained and the token after its end is not.
                counts[at : at + size] = file.read_mask(span.start, size)
            if scores is not None:
                read = file.read_weights if self._weights else scored.read
                scores[at : at + size] = read(span.start, size)
            at += size
        tokens = tokens.astype(np.int32, copy=False)
        bad = tokens.view(np.uint32) >= self.vocab_size  # a negative id is a large unsigned one
        if bad.any():
            raise self._bad_id(spans, sizes, tokens, int(bad.argmax()))
        return tokens, counts, scores

    def _lacking(self, spans: Sequence[Span]) -> DataError:
        names = {str(scores_path(self._scores, self._paths[span.file])) for span in spans}
        return DataError(
            f"{', '.join(sorted(names))}: there is no score of a token that is trained: documents "
            "were longer than the --seq-len that they were scored with; score with this one"
        )

    def _no_label(self, spans: Sequence[Span], found: int) -> DataError:
        names = {str(self._paths[span.file]) for span in spans}
        return DataError(
            f"{', '.join(sorted(names))}: {found} is none of the labels 0 to {self._labels - 1} of "
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

    def _file(self, number: int) -> tuple[TokenFile, ScoreFile | None]:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            if len(self._open) == _OPEN_FILES:
                self._close_one(last=False)
            file, scores = TokenFile(self._paths[number]), None
            if self._scores is not None:
                scores = ScoreFile(scores_path(self._scores, file.path))
                scores.check(file, self._top_k)
            self._open[number] = file, scores
        return self._open[number]

    def _close_one(self, *, last: bool = True) -> None:
        for file in self._open.popitem(last=last)[1]:
            if file is not None:
                file.close()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        while self._open:
            self._close_one()
