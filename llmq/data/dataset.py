"""The data set of training or validation: token files, the layout of sequences, and a report."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.base.errors import DataError
from llmq.data.checksums import find_token_files
from llmq.data.document_index import (
    DocumentIndex,
    has_trained_tokens,
    kind_of_pairs,
    targets_of_parts,
    trained_tokens,
)
from llmq.data.epoch_plan import (
    EpochPlan,
    FilesInTurn,
    FileWindows,
    Mixture,
    PackedSource,
    SequenceSource,
    Split,
    WindowSource,
)
from llmq.data.packing import Pieces, cut_documents, joined, whole_pairs
from llmq.data.tokens import TokenFile, open_token_files
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.data import DataOptions

_BLOCK = 1 << 20  # documents that are cut together
_LEFT_OUT = {
    None: "parts of longer documents have no question and are left out (--long cut keeps them)",
    "truncate": "parts of longer documents are left out (--long truncate)",
    "drop": "documents are longer than a sequence and are left out (--long drop)",
}
_HAS = {
    None: "single documents",
    "answers": "pairs, of which one answer is to be preferred",
    "labels": "answers with labels",
}
_FOR = {None: "--loss ce", "answers": "--loss dpo, ipo, simpo and orpo", "labels": "--loss kto"}
_TOO_LONG = "pairs are longer than a sequence, which has to hold both answers, and are left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Layout of sequences of token files.

    packing: content of a sequence, "concat" (a window of a file), "best-fit" (as many documents as
    fit) or "none" (one document). data_order: order of windows, "shuffle" (all files mixed) or
    "llmq" (file after file, as llm.q). document_mask: True if batches have starts of documents.
    separator: id that ends a document in files without a `.docs` file. long: parts that are kept of
    a packed document longer than a sequence, "cut" (all), "truncate" (the first), "drop" (none) or
    None (parts with a question, by masks). weights: weight of each pattern's files in an epoch;
    None: every sequence once an epoch. pairs: "answers" or "labels" for losses of pairs of
    documents, else None.
    """

    packing: str = "concat"
    data_order: str = "shuffle"
    document_mask: bool = False
    separator: int | None = None
    long: str | None = None
    weights: tuple[float, ...] | None = None
    pairs: str | None = None

    @classmethod
    def of(
        cls, data: DataOptions, batch: BatchOptions, pairs: str | None, *, held_out: bool = False
    ) -> SequenceLayout:
        """Layout of a run's training data. pairs: as OptimOptions.pairs. held_out: layout of the
        run's validation data, without weights."""
        return cls(
            packing=data.packing,
            data_order=data.data_order,
            document_mask=batch.document_mask,
            separator=data.document_separator,
            long=data.long,
            weights=None if held_out else data.train_weights,
            pairs=pairs,
        )

    @property
    def packs(self) -> bool:
        """True for sequences of documents, False for windows of files."""
        return self.packing != "concat"

    @property
    def weighs(self) -> bool:
        """True if patterns of files have weights."""
        return self.weights is not None

    @property
    def needs_documents(self) -> bool:
        return self.packs or self.document_mask


class DataSet:
    """Checked token files and the plan of their epochs, which all ranks and threads share.

    files: the token files in sorted order. fingerprint: hash of names and sizes of the files.
    contents: hash of samples of the tokens. total_tokens: number of tokens of all files, or of all
    sequences with a split or packing. order: hash of all other inputs of the plan; None for llm.q's
    order. is_short: True if no file fills a sequence, so that a shorter window is a sequence.

    Counts: documents: all documents. cut: documents longer than a sequence. untrained: documents
    without a trained token, which packing leaves out. untrained_parts: parts of cut documents
    without a trained token. left_out: parts (with long "drop": documents) that are left out for
    their length. trained: trained tokens. lost: trained tokens in parts that are left out.
    empty_files: files without a sequence. scanned: files whose documents a separator has found. A
    pair counts as two documents, and is left out if it does not fit.
    """

    def __init__(
        self,
        patterns: Sequence[str | Path],
        *,
        seq_len: int,
        vocab_size: int,
        split: Split | None,
        layout: SequenceLayout,
        everything: bool,
    ) -> None:
        """everything: True if every token of every document counts once, not only tokens of full
        sequences. DataError for files that are damaged, contradict each other, or have no trained
        token."""
        self.seq_len, self.vocab_size, self.layout = seq_len, vocab_size, layout
        self._patterns = patterns
        self.files = open_token_files(patterns, vocab_size)
        self.fingerprint, self.contents = _fingerprint(self.files, split), _contents(self.files)
        self.documents = self.cut = self.empty_files = self.scanned = 0
        self.untrained = self.untrained_parts = self.left_out = self.lost = self.trained = 0
        self.is_short = False
        self._indices: list[DocumentIndex] | None = None
        self._check_pairs()
        if layout.needs_documents:
            self._read_documents()
        if not everything:
            self._check_trained()
        groups = self._groups(patterns)
        self.order: str | None = None
        self.plan: EpochPlan
        if layout.packs:
            self._mix([self._packed(i, group, split) for i, group in enumerate(groups)])
            return
        whole = split is None
        self.is_short = everything and whole and max(f.num_tokens for f in self.files) <= seq_len
        tails = everything and (layout.document_mask or self.is_short)
        masked = self._indices if layout.document_mask else None
        windows = FileWindows(self.files, seq_len, split, masked, tails=tails)
        self.total_tokens = sum(f.num_tokens for f in self.files) if whole else windows.tokens()
        self.empty_files = windows.counts.count(0)
        if layout.data_order == "llmq":
            self.plan = FilesInTurn(windows)
            return
        # With weights the order sorts hashes, so that checkpoints of older versions keep their
        # order.
        sorts = layout.weighs
        numbered = enumerate(groups)
        self._mix([WindowSource(windows, group, i, sorts=sorts) for i, group in numbered])

    def _groups(self, patterns: Sequence[str | Path]) -> list[list[int]]:
        """Numbers of the files of each source: one source for each pattern with a weight, or one
        for all files."""
        if not self.layout.weighs:
            return [list(range(len(self.files)))]
        number = {file.path: i for i, file in enumerate(self.files)}
        groups = [[number[path] for path in find_token_files(pattern)] for pattern in patterns]
        seen: set[int] = set()
        for group in groups:
            if twice := seen.intersection(group):
                raise DataError(
                    f"--train-file: '{self.files[min(twice)].path}' is named twice, with two "
                    "weights: leave it out of one of them"
                )
            seen.update(group)
        return groups

    def _read_documents(self) -> None:
        separator = self.layout.separator
        self._indices = [DocumentIndex.read(file, separator) for file in self.files]
        self.scanned = sum(index.was_scanned for index in self._indices)
        self.documents = sum(map(len, self._indices))
        for file, index in zip(self.files, self._indices, strict=True):
            if file.has_masks and not self.layout.packs:  # packing counts untrained ones itself
                self.untrained += int((trained_tokens(file, index.offsets) == 0).sum())
            file.close()

    def _check_pairs(self) -> None:
        for file in self.files:
            kind = kind_of_pairs(file)
            if kind != self.layout.pairs:
                raise DataError(
                    f"'{file.path}' has {_HAS[kind]}, which {_FOR[kind]} is for, and this run's "
                    f"loss needs {_HAS[self.layout.pairs]}"
                )

    def _check_trained(self) -> None:
        """Raise DataError if windows have tokens, but none of these tokens is trained."""
        some = any(file.num_tokens > 1 for file in self.files)
        if some and not self.layout.packs and not any(map(has_trained_tokens, self.files)):
            raise self._nothing_to_train("all tokens are masked")
        for file in self.files:
            file.close()

    def _nothing_to_train(self, why: str) -> DataError:
        more = " …" * (len(self.files) > 1)
        return DataError(
            f"'{self.files[0].path}'{more} has nothing to train on: {why}; its masks say which "
            "tokens count, so tokenize the data again with others"
        )

    def _packed(self, which: int, group: Sequence[int], split: Split | None) -> PackedSource:
        parts = []
        counts = [len(self._indices[i].units) - 1 for i in group]
        first, count = ([0] * len(group), counts) if split is None else split.of(counts)
        for i, begin, n in zip(group, first, count, strict=True):
            cut = self._pairs if self.layout.pairs else self._pieces
            of_file = cut(i, begin, begin + n)
            self.empty_files += not any(map(len, of_file))
            parts += of_file
        pieces = joined(parts)
        if not len(pieces) and sum(count):
            raise self._nothing_to_train("all documents are masked or a single token")
        return PackedSource(pieces, self.seq_len, which, alone=self.layout.packing == "none")

    def _pieces(self, number: int, begin: int, end: int) -> list[Pieces]:
        """Pieces of the documents [begin, end) of a file that have a token to train on. Documents
        are cut in blocks, which keeps intermediate arrays small."""
        file, offsets = self.files[number], self._indices[number].offsets
        counts = trained_tokens(file, offsets) if file.has_masks else None
        parts = []
        for first in range(begin, end, _BLOCK):
            last = min(first + _BLOCK, end)
            starts, lengths = offsets[first:last], np.diff(offsets[first : last + 1])
            targets = lengths - 1 if counts is None else counts[first:last]
            trained = (lengths > 1) & (targets > 0)
            self.untrained += int((~trained).sum())
            self.trained += int(targets[trained].sum())
            if self.layout.long == "drop":
                too_long = trained & (lengths - 1 > self.seq_len)
                self._leave_out(too_long, targets)
                trained &= ~too_long
            pieces = cut_documents(number, starts[trained], lengths[trained], self.seq_len)
            parts.append(self._kept_parts(file, pieces))
        file.close()
        return parts

    def _pairs(self, number: int, begin: int, end: int) -> list[Pieces]:
        """Pairs [begin, end) of a file whose answers both have a token to train on."""
        file, offsets = self.files[number], self._indices[number].offsets
        targets = trained_tokens(file, offsets).reshape(-1, 2)[begin:end]
        lengths = np.diff(offsets).reshape(-1, 2)[begin:end]
        trained = (targets > 0).all(axis=1)
        self.untrained += 2 * int((~trained).sum())
        self.trained += int(targets[trained].sum())
        too_long = trained & (lengths.sum(axis=1) > self.seq_len)
        self._leave_out(too_long, targets.sum(axis=1))
        kept, starts = trained & ~too_long, offsets[2 * begin : 2 * end : 2]
        file.close()
        return [whole_pairs(number, starts[kept], lengths.sum(axis=1)[kept], lengths[kept, 0])]

    def _leave_out(self, chosen: np.ndarray, targets: np.ndarray) -> None:
        self.left_out += int(chosen.sum())
        self.lost += int(targets[chosen].sum())

    def _kept_parts(self, file: TokenFile, pieces: Pieces) -> Pieces:
        """Pieces that --long keeps and that have a token to train on."""
        later = np.zeros(len(pieces), bool)  # parts behind the first part of their document
        ends = pieces.start + pieces.length
        later[1:] = pieces.goes_on[:-1] & (pieces.start[1:] == ends[:-1])
        is_part = later | pieces.goes_on
        targets = pieces.length - ~pieces.goes_on
        chosen = later if self.layout.long == "truncate" else np.zeros(len(pieces), bool)
        if file.has_masks:
            counts = targets_of_parts(file, pieces.start[is_part], targets[is_part])
            targets[is_part] = counts[:, 0]
            if self.layout.long is None:
                document = np.cumsum(~later[is_part]) - 1
                asks = np.bincount(document, counts[:, 2]) > 0  # False: no question
                alone = later[is_part] & (counts[:, 0] > 0) & (counts[:, 1] == 0)
                chosen[is_part] = alone & asks[document]
        useless = is_part & (targets == 0) & ~chosen
        self.untrained_parts += int(useless.sum())
        self._leave_out(chosen, targets)
        left = useless | chosen
        return pieces.only(~left) if left.any() else pieces

    def _mix(self, sources: list[SequenceSource]) -> None:
        """Set the plan: one part, in which sources alternate. DataError for an empty source."""
        weights = self.layout.weights or (1.0,)
        for source, weight in zip(sources, weights, strict=True):
            if source.count == 0 and len(sources) > 1:
                raise DataError(
                    f"--train-file: there is no sequence of {self.seq_len} tokens in what has the "
                    f"weight {weight:g}: use more data or a shorter sequence length"
                )
        digest = hashlib.sha256(f"{self.layout.packing} {self.layout.weights}".encode())
        if self.layout.packs:
            self._indices = None  # the pieces have replaced the indices
            self.total_tokens = sum(source.tokens for source in sources)
            self.documents = sum(source.pieces.documents for source in sources) + self.untrained
            self.cut = sum(source.pieces.cut for source in sources)
            for source in sources:
                digest.update(source.pieces.fingerprint.encode())
        self.plan = Mixture(sources, weights)
        self.order = digest.hexdigest()

    # -- reports ---------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences of an epoch, including sequences that are left out at the end."""
        return sum(self.plan.counts)

    @property
    def padding(self) -> float:
        """Fraction of an epoch's positions that is padding."""
        return 1 - self.plan.tokens() / max(self.sequences * self.seq_len, 1)

    def record(self) -> dict[str, object]:
        """Fields for the log."""
        out: dict[str, object] = {"order": self.layout.data_order}
        if self.layout.needs_documents:
            out |= {"packing": self.layout.packing, "document_mask": self.layout.document_mask}
            out |= {"documents": self.documents, "cut": self.cut, "untrained": self.untrained}
            out |= {"sequences": self.sequences, "padding": self.padding}
            out |= {"left_out": self.left_out, "lost": self.lost}
        if self.layout.weighs:
            out |= {"weights": self.layout.weights, "shares": self.plan.shares}
        return out

    def lines(self, name: str) -> list[str]:
        """Lines about order, documents and weights for the console. name: name of the data set in
        these lines."""
        lines = []
        if self.is_short:
            lines.append(
                f"WARNING: no file of {name} fills a sequence of {self.seq_len} tokens: its loss "
                f"is that of {self.plan.tokens()} tokens, and says little"
            )
        if self.layout.needs_documents:
            kind = f"{self.layout.packing}" + ", masked" * self.layout.document_mask
            text = (
                f"Documents ({name}, {kind}): {self.documents} in {self.sequences} sequences of "
                f"{self.seq_len} tokens, {100 * self.padding:.2f} % padding"
            )
            text += f", {self.cut} longer ones are cut" if self.layout.packs else ""
            if self.untrained_parts:
                text += f" ({self.untrained_parts} parts without a token to train on left out)"
            text += f"; found by a separator in {self.scanned} files" if self.scanned else ""
            lines.append(text)
            if self.left_out:
                what = _TOO_LONG if self.layout.pairs else _LEFT_OUT[self.layout.long]
                share = 100 * self.lost / max(self.trained, 1)
                lines.append(
                    f"WARNING: {self.left_out} {what}, {share:.2f} % of all trained tokens ({name})"
                )
            if self.untrained:
                what = "left out" if self.layout.packs else "only read"
                lines.append(
                    f"WARNING: {self.untrained} of {self.documents} documents ({name}) have no "
                    f"token to train on: {what}"
                )
        if self.layout.weighs:
            lines.append(
                f"An epoch is {self.sequences} sequences, as many as all training files have:"
            )
            mixed = zip(self._patterns, self.plan.sources, self.plan.shares, strict=True)
            for pattern, source, share in mixed:
                part, passes = 100 * share / self.sequences, share / source.count
                lines.append(
                    f"  {pattern}: {part:.2f} % are {share}, {passes:.2f} passes over its "
                    f"{source.count}"
                )
        elif name == "train":
            lines.append(self._order_line())
        return lines

    def _order_line(self) -> str:
        """Line about the order of training files without weights for the console."""
        if self.layout.data_order == "llmq":
            return "Order of the data: file after file, each shuffled (--data-order llmq)"
        count = len(self.files)
        of_all = f"of all {count} files are shuffled together" if count > 1 else "are shuffled"
        return f"Order of the data: {self.sequences:,} sequences {of_all}"


def _contents(files: list[TokenFile]) -> str:
    """SHA-256 in hex of samples of the files' content."""
    samples = " ".join(f"{file.sample():08x}" for file in files)
    return hashlib.sha256(samples.encode()).hexdigest()


def _fingerprint(files: list[TokenFile], split: Split | None) -> str:
    """SHA-256 in hex of names and sizes of the files, and of the split; folders may be moved."""
    lines = [f"{file.path.name} {file.num_bytes}\n" for file in files]
    lines += [f"{split}\n"] if split is not None else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()
