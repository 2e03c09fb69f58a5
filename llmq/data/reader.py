"""Spans of token files become the rows of a batch: inputs, targets, and where documents start."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import DataError
from llmq.data.tokens import MASKED_TARGET, TokenFile

_OPEN_FILES = 16  # that one reader keeps open


class Span(NamedTuple):
    """Tokens of a file that stand beside each other in a row.

    goes_on: whether the token behind them is what their last one predicts. ends: (k,) int64, rising
    from 1 to length: how many of them come before each end of a document, as far as known.
    """

    file: int
    start: int
    length: int
    goes_on: bool
    ends: np.ndarray


class RowReader:
    """Reads rows of seq_len tokens. For one thread."""

    def __init__(
        self, paths: Sequence[Path], seq_len: int, vocab_size: int, *, document_mask: bool
    ) -> None:
        """paths: of the files that spans number. document_mask: whether batches have starts."""
        self._paths, self.seq_len, self.vocab_size = paths, seq_len, vocab_size
        self.document_mask = document_mask
        self._open: OrderedDict[int, TokenFile] = OrderedDict()

    def read(self, rows: Sequence[Sequence[Span]], counted: Sequence[bool], size: int) -> Batch:
        """A batch of `size` rows; those that are missing are the first one again, all masked.

        counted: whether a row is to be learned; else its targets are masked.
        """
        inputs = np.empty((size, self.seq_len), np.int32)
        targets = np.full_like(inputs, MASKED_TARGET)
        starts = np.zeros_like(inputs) if self.document_mask else None
        padding = 0
        for row, spans in enumerate(rows):
            filled = self._read_row(spans, inputs[row], targets[row], starts, row)
            if counted[row]:
                padding += self.seq_len - filled
            else:
                targets[row], padding = MASKED_TARGET, padding + self.seq_len
        inputs[len(rows) :] = inputs[0]
        if starts is not None:
            starts[len(rows) :] = starts[0]
        return Batch(inputs, targets, starts, padding + (size - len(rows)) * self.seq_len)

    def _read_row(
        self,
        spans: Sequence[Span],
        inputs: np.ndarray,
        targets: np.ndarray,
        starts: np.ndarray | None,
        row: int,
    ) -> int:
        """Fill a row of each; returns how many tokens it has."""
        at = 0
        went_on = True
        for span in spans:
            tokens, counts = self._read_span(span)
            stop = at + span.length
            inputs[at:stop] = tokens[: span.length]
            targets[at : at + len(tokens) - 1] = np.where(counts, tokens, MASKED_TARGET)[1:]
            if starts is not None:
                targets[at + span.ends - 1] = MASKED_TARGET
                starts[row, at] = at
                inner = at + span.ends[span.ends < span.length]
                starts[row, inner] = inner
            elif not went_on and counts[0]:  # as in a file: the next document follows its end
                targets[at - 1] = tokens[0]
            at, went_on = stop, span.goes_on
        if at < self.seq_len:  # with tokens of this row, so that no other values arise
            inputs[at:] = np.resize(inputs[:at], self.seq_len - at)
            if starts is not None:
                starts[row, at] = at
        if starts is not None:
            np.maximum.accumulate(starts[row], out=starts[row])
        return at

    def _read_span(self, span: Span) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, with the one behind if it counts, and whether to predict each of them."""
        file = self._file(span.file)
        count = span.length + span.goes_on
        tokens = file.read_tokens(span.start, count)
        bad = tokens.view(np.uint32) >= self.vocab_size  # a negative id is a large unsigned one
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"'{file.path}' has token id {tokens[at]} at position {span.start + at}, outside "
                f"the model's vocabulary of {self.vocab_size}: the file is damaged or was made for "
                "another tokenizer; tokenize the data again"
            )
        # The bit of the target token itself decides, so that the first token of an answer is
        # trained and the token after its end is not.
        return tokens, file.read_mask(span.start, count)

    def _file(self, number: int) -> TokenFile:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = TokenFile(self._paths[number])
        return self._open[number]

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        while self._open:
            self._open.popitem()[1].close()
