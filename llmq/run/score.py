"""Scores of token files by a trainer's model. A score is the log-probability of a trained token."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import DataError, LlmqError
from llmq.base.files import make_directory
from llmq.data.document_index import DocumentIndex
from llmq.data.epoch_plan import spans_of
from llmq.data.packing import Pieces, cut_documents, whole_pairs
from llmq.data.reader import RowReader, Span
from llmq.data.scores import COMPLETE, Scored, ScoreWriter, scores_path
from llmq.data.tokens import TokenFile
from llmq.run.ranks import Rank, Ranks
from llmq.runtime.mesh import DATA

# A model that only scores may be stored in any format, and may be streamed from the host.
SCORED = {
    **{"only_scores": True, "recompute_block": True, "grad_accumulation": 1},
    **{"packing": "best-fit"},
    **{"eval_file": "none", "ckpt_interval": 0, "save_training_state": False},
}
"""Options of a run that scores, by field."""
SAVE_SECONDS = 30.0  # seconds between saved states, and so the most that an interruption costs
ROUNDS = 8  # batches of each rank that are computed before their scores are written

Report = Callable[[int], None]
"""Function that is called with the number of tokens scored so far in all files."""


def score_files(
    ranks: Ranks,
    files: Sequence[TokenFile],
    folder: Path,
    model: dict[str, Any],
    *,
    separator: int | None = None,
    overwrite: bool = False,
    replace_others: bool = False,
    top_k: int = 0,
    report: Report = lambda done: None,
) -> list[Path]:
    """Write scores of token files by the current weights into `folder`; return the paths. All
    processes call this function. Documents longer than a sequence are cut; longer pairs are left
    out. model: identity of the weights. top_k: number of likeliest tokens to write at each
    position, for distillation; 0: log-probabilities of the tokens. separator: see
    DocumentIndex.read. overwrite: True to replace existing files. replace_others: True to replace
    files of another model or other data. Unfinished files are continued. Raises DataError for other
    existing scores, and for two token files with one name. Raises LlmqError for predictions that
    are not finite."""
    paths = [scores_path(folder, file.path) for file in files]
    if len({*paths}) < len(paths):
        raise DataError(f"two of the token files have one name, which '{folder}' cannot hold")
    ranks.world.on_first(lambda: make_directory(folder))
    seq_len = ranks.first.step.inputs.tokens.shape[1]
    before = 0
    for file, path in zip(files, paths, strict=True):
        opened: list[ScoreWriter] = []  # the file's writer, on the first process

        def open_writer(file: TokenFile = file, path: Path = path, to: list = opened) -> int:
            scored = Scored.of(file, model, seq_len, top_k)
            try:
                to.append(ScoreWriter(path, scored, overwrite=overwrite))
            except DataError:
                if not replace_others:
                    raise
                to.append(ScoreWriter(path, scored, overwrite=True))
            return to[0].done

        done = ranks.world.on_first(open_writer)
        if done != COMPLETE:
            scoring = _Scoring(ranks, file, separator, top_k, report)
            scoring.run(opened[0] if opened else None, done, before)
        before += file.num_tokens
        report(before)
    return paths


class _Scoring:
    """Scores a token file. Rows are sequences of the file's units (pieces of documents, or pairs),
    in the order of the file."""

    def __init__(
        self, ranks: Ranks, file: TokenFile, separator: int | None, top_k: int, report: Report
    ):
        self.ranks, self.file, self.top_k, self.report = ranks, file, top_k, report
        self.B, self.T = ranks.first.step.inputs.tokens.shape
        self.units = _units(file, separator, self.T)
        self.rows = [*_rows(self.units.length, self.T)]

    def run(self, writer: ScoreWriter | None, done: int, before: int) -> None:
        """Score all units from unit `done` on. writer: the writer on the first process, None on
        other processes. before: number of tokens in earlier files."""
        first = next((i for i, row in enumerate(self.rows) if row.start >= done), len(self.rows))
        each = ROUNDS * self.B * self.ranks.first.dev.mesh.size(*DATA)
        saved = time.monotonic()
        try:
            for begin in range(first, len(self.rows), each):
                rows = self.rows[begin : begin + each]
                found = self._computed(rows)
                if writer is not None:
                    self._write(writer, rows, found)
                    if time.monotonic() - saved > SAVE_SECONDS:
                        writer.save(rows[-1].stop)
                        saved = time.monotonic()
                last = rows[-1].stop - 1
                self.report(before + int(self.units.start[last] + self.units.length[last]))
            if writer is not None:
                writer.close()
        finally:
            if writer is not None:
                writer.suspend()

    def _computed(self, rows: Sequence[slice]) -> list[np.ndarray]:
        """Return scores of each batch of rows, on all processes: F32 (B, T) for B rows of T tokens,
        or with top_k (B, T, 2 top_k)."""
        batches = [rows[i : i + self.B] for i in range(0, len(rows), self.B)]

        def work(rank: Rank, _: int, batch: Batch) -> np.ndarray:
            return rank.step.score_top_k(batch) if self.top_k else 0 - rank.step.score(batch)

        return self.ranks.share("score", [partial(self._batch, of) for of in batches], work)

    def _spans(self, row: slice) -> list[Span]:
        return spans_of(self.units, np.arange(row.start, row.stop))

    def _batch(self, rows: Sequence[slice]) -> Batch:
        vocab = self.ranks.first.step.config.vocab_size
        reader = RowReader([self.file.path], self.T, vocab, document_mask=True)
        try:
            return reader.read([self._spans(row) for row in rows], [True] * len(rows), self.B)
        finally:
            reader.close()

    def _write(self, writer: ScoreWriter, rows: Sequence[slice], found: list[np.ndarray]) -> None:
        for number, row in enumerate(rows):
            scores, at = found[number // self.B][number % self.B], 0
            for span in self._spans(row):
                own = scores[at : at + span.length - (not span.goes_on)]
                if not np.isfinite(own[..., self.top_k :]).all():
                    raise LlmqError(
                        "the model's predictions are not finite numbers: its weights are damaged, "
                        f"or '{self.file.path}' is of another model's tokens"
                    )
                writer.write(span.start + 1, own)
                at += span.length
        for unit in range(rows[0].start, rows[-1].stop):  # a document's first token has score 0
            if not unit or not self.units.goes_on[unit - 1]:
                nothing = np.zeros((1, *[2 * self.top_k] * (self.top_k > 0)), np.float32)
                writer.write(int(self.units.start[unit]), nothing)


def _units(file: TokenFile, separator: int | None, seq_len: int) -> Pieces:
    index = DocumentIndex.read(file, separator)
    starts, lengths = index.units[:-1], np.diff(index.units)
    if not index.in_pairs:
        return cut_documents(0, starts, lengths, seq_len)
    fits = lengths <= seq_len
    return whole_pairs(0, starts[fits], lengths[fits], index.lengths[::2][fits])


def _rows(lengths: np.ndarray, seq_len: int) -> Iterator[slice]:
    """Yield the units of each row as a slice: as many consecutive units as fit into seq_len tokens.
    lengths: tokens of each unit."""
    first, used = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if used + length > seq_len:
            yield slice(first, number)
            first, used = number, 0
        used += length
    if len(lengths):
        yield slice(first, len(lengths))
