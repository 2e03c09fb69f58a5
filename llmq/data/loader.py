"""Batches for one rank: shuffled, sharded over ranks, read ahead, resumable at any batch.

An `EpochPlan` gives the order: parts of an epoch, and sequences of each part. A group is
`world_size` consecutive sequences of a part, one per rank; a batch is `micro_batch` groups, perhaps
of several parts. A part's incomplete last group and an epoch's incomplete last batch are filled up
with masked repetitions, or left out (--drop-last, in training). Positions are arithmetic on (epoch,
part, sequence), so resuming costs one shuffle and reads no data.

By default the sequences of all files are one part. A file of n tokens has (n - 1) // T sequences
of T input tokens, whose targets are the same tokens shifted by one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import DataError, warn
from llmq.base.files import Closing
from llmq.data.dataset import DataSet, SequenceLayout
from llmq.data.epoch_plan import FilesInTurn, Split
from llmq.data.reader import RowReader, Span
from llmq.data.tokens import TokenFile

_STATE = dict.fromkeys(("seed", "epoch", "file_index", "chunk_index", "seq_len"), int)
_STATE |= {"file_name": str, "files": str}


@dataclass(frozen=True, slots=True)
class _EpochPlace:
    """Place of the next group: a part of the epoch, and a sequence of the part. Names are llm.q's,
    where a part is a file and a sequence a chunk. chunk_index: number of done sequences of the
    part, summed over ranks, so that a place is valid for any number of ranks."""

    epoch: int = 0
    file_index: int = 0
    chunk_index: int = 0


class DataLoader(Closing):
    """Loader of the batches of rank `rank` out of `world_size`, which reads ahead in a thread.

    data: the files and the plan of their epochs, shared by the loaders of all ranks.
    batches_per_epoch: number of batches of an epoch. Any thread may read attributes; one thread
    calls methods.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        seq_len: int,
        micro_batch: int,
        seed: int,
        vocab_size: int,
        rank: int = 0,
        world_size: int = 1,
        everything: bool = False,
        split: Split | None = None,
        layout: SequenceLayout | None = None,
        drop_last: bool = False,
        prefetch: int = 4,
        **reading: Any,
    ) -> None:
        """files: glob patterns. seed: uint64. vocab_size: size of the model's vocabulary. prefetch:
        number of batches to read ahead.

        everything: as in DataSet, for validation. drop_last: True to leave out incomplete groups
        and batches; False to fill these up with repeated sequences, whose targets are masked and
        which bring no new values into the model. split: side of a split of the files' sequences;
        None: all sequences. layout: layout of sequences; None: windows of all files, shuffled
        together. reading: inputs, scores, labels and pad as in RowReader; sidecars need not exist
        before the first batch is read. DataError for damaged files, or files without a batch.
        """
        if not (seq_len > 0 and micro_batch > 0 and prefetch > 0 and 0 <= rank < world_size):
            raise ValueError(
                "DataLoader: seq_len, micro_batch and prefetch must be positive and rank below "
                f"world_size, got {seq_len}, {micro_batch}, {prefetch}, {rank} of {world_size}"
            )
        self.data = DataSet(
            [files] if isinstance(files, str | Path) else files,
            seq_len=seq_len,
            vocab_size=vocab_size,
            split=split,
            layout=layout or SequenceLayout(),
            everything=everything,
        )
        self.seq_len, self.micro_batch, self.seed = seq_len, micro_batch, seed % 2**64
        self.world_size, self._reading = world_size, reading
        self._drop_last, self._prefetch = drop_last, prefetch
        self._counts = self.data.plan.counts
        self._groups = [self._parts(count, world_size) for count in self._counts]
        self.batches_per_epoch = self._parts(sum(self._groups), micro_batch)
        if self.batches_per_epoch == 0:
            raise self._too_short()
        self._start(rank)

    def of_rank(self, rank: int) -> DataLoader:
        """Loader for another rank, at the start of epoch 0, with the same files and plan."""
        other = copy.copy(self)
        other._start(rank)
        return other

    def _start(self, rank: int) -> None:
        self.rank = rank
        self._position = _EpochPlace()  # place of the batch that next_batch returns next
        self._ahead: _EpochPlace | None = self._position  # of the batch to read; None: end
        self._pending: deque[tuple[Future, _EpochPlace]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"loader-{rank}")
        data = self.data
        self._reader = RowReader(  # only the reading thread uses it
            [file.path for file in data.files],
            self.seq_len,
            data.vocab_size,
            document_mask=data.layout.document_mask,
            **self._reading,
        )

    @property
    def files(self) -> list[TokenFile]:
        """Checked token files in sorted order."""
        return self.data.files

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole data, as DataSet counts them."""
        return self.data.total_tokens

    def _parts(self, count: int, size: int) -> int:
        """Number of groups of `size` elements in `count` elements; an incomplete group counts
        unless drop_last."""
        return count // size if self._drop_last else -(-count // size)

    def _too_short(self) -> DataError:
        have, usable = sum(self._counts), sum(self._groups) * self.world_size
        shared = f", {usable} of which all ranks can share," if usable < have else ","
        needed = (
            f"one batch needs {self.micro_batch * self.world_size} ({self.micro_batch} x "
            f"{self.world_size} ranks): use more data, a shorter sequence length or a smaller batch"
        )
        if not self._drop_last:
            needed = "one is needed: use more data or a shorter sequence length"
        return DataError(
            f"'{self.files[0].path}'{' …' * (len(self.files) > 1)} has {have} sequences of "
            f"{self.seq_len} tokens{shared} but {needed}"
        )

    def sequences(self, batches: int) -> int:
        """Number of sequences in the first batches of the current epoch, on all ranks."""
        return sum(count for _, count in self._taken(batches))

    def tokens(self, batches: int) -> int:
        """Number of tokens, without padding, in the first batches of the current epoch, on all
        ranks."""
        plan = self.data.plan
        return sum(
            int(plan.lengths(self.seed, self.epoch, place)[:count].sum())
            for place, count in self._taken(batches)
        )

    def _taken(self, batches: int) -> Iterator[tuple[int, int]]:
        """Place of each part in the epoch, and number of the part's sequences in the batches."""
        left = batches * self.micro_batch
        for place, part in enumerate(self._order(self.epoch)):
            yield place, min(self._counts[part], min(left, self._groups[part]) * self.world_size)
            left -= min(left, self._groups[part])

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._position.epoch

    @property
    def batches_left(self) -> int:
        """Number of batches left in the current epoch."""
        at = self._position
        order = self._order(at.epoch)
        current = order[at.file_index : at.file_index + 1]  # empty at the end of the epoch
        counts = [max(self._counts[i] - at.chunk_index, 0) for i in current]
        left = sum(self._parts(n, self.world_size) for n in counts)
        left += sum(self._groups[i] for i in order[at.file_index + 1 :])
        return self._parts(left, self.micro_batch)

    def step_batches(self, most: int) -> int:
        """Number of batches of the next step, which takes at most `most` batches."""
        return min(most, self.batches_left)

    @property
    def passed(self) -> float:
        """Fraction of the current epoch's sequences that was returned in batches, 0 to 1."""
        done = self.batches_per_epoch - self.batches_left
        return self.sequences(done) / self.sequences(self.batches_per_epoch)

    @property
    def unused_files(self) -> int:
        """Number of files that no epoch reads, because they have too few sequences."""
        in_turn = isinstance(self.data.plan, FilesInTurn)
        return self._groups.count(0) if in_turn else self.data.empty_files

    def next_batch(self) -> Batch:
        """Next batch, arrays int32 (micro_batch, seq_len); masked targets are -100. DataError for
        data that cannot be read, or an id outside the vocabulary; further calls raise it again.
        RuntimeError at the end of the epoch."""
        self._read_ahead()
        if not self._pending:
            raise RuntimeError(
                f"DataLoader: epoch {self.epoch} has no further batch; call advance_epoch() first"
            )
        future, after = self._pending[0]
        batch = future.result()
        self._pending.popleft()
        self._position = after
        self._read_ahead()
        return batch

    def advance_epoch(self) -> None:
        """Go to the start of the next epoch from any place of the current epoch."""
        self._move(_EpochPlace(epoch=self.epoch + 1))

    def reset(self) -> None:
        """Go to the start of epoch 0, for a fresh pass over an evaluation set."""
        self._move(_EpochPlace())

    def state(self) -> dict[str, Any]:
        """State behind the last batch that `next_batch` returned, in JSON types, for
        `set_state`."""
        at = self._position
        names = [file.path.name for file in self.files]
        in_turn = isinstance(self.data.plan, FilesInTurn)
        state = {
            "seed": self.seed,
            "epoch": at.epoch,
            "file_index": at.file_index,
            "chunk_index": at.chunk_index,
            "file_name": names[self._order(at.epoch)[at.file_index]] if in_turn else names[0],
            "seq_len": self.seq_len,
            "files": self.data.fingerprint,
            "contents": self.data.contents,
        }
        return state if self.data.order is None else state | {"order": self.data.order}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state`, on any number of ranks, without reading data. DataError for
        a state of other files, another sequence length, or another order."""
        if wrong := [name for name, kind in _STATE.items() if type(state.get(name)) is not kind]:
            raise DataError(
                f"the checkpoint does not say where the training data was ({wrong[0]} is "
                f"{state.get(wrong[0])!r}): pass --new-data to start the data from its beginning"
            )
        changed = {
            "sequence length": state["seq_len"] != self.seq_len,
            "training files": state["files"] != self.data.fingerprint,
            "documents, --packing, --data-order or the weights of --train-file": (
                state.get("order") != self.data.order
            ),
        }
        if any(changed.values()):
            what = next(name for name, has_changed in changed.items() if has_changed)
            hint, layout = "", self.data.layout
            if what == "training files":
                hint = " (or the part of them that --eval-file splits off)"
            elif "order" in what and "order" not in state and not (layout.packs or layout.weighs):
                what, hint = "order of the data", " (its run began with --data-order llmq)"
            raise DataError(
                f"the {what} changed since the checkpoint{hint}, which was at "
                f"'{state['file_name']}' with sequences of {state['seq_len']} tokens: restore the "
                "old one, or pass --new-data to start the data from its beginning"
            )
        # Names and sizes are the same: a damaged file may have been replaced.
        if self.rank == 0 and state.get("contents", self.data.contents) != self.data.contents:
            warn(
                "the content of the training files changed since the checkpoint: the run goes "
                "on at the same place of what is there now; --new-data starts anew"
            )
        place, done, epoch = state["file_index"], state["chunk_index"], state["epoch"]
        if not (0 <= place < len(self._counts) and done >= 0 and 0 <= epoch < 2**31):
            raise DataError(
                f"the checkpoint's place in the training data, sequence {done} of part {place}, "
                "does not exist: pass --new-data to start the data from its beginning"
            )
        self.seed = state["seed"]
        # Older versions counted an incomplete group as a full group, past the end of the part.
        done = min(done, self._counts[self._order(epoch)[place]])
        self._move(_EpochPlace(epoch, place, done))

    def close(self) -> None:
        """Stop the reading thread and close the files."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._reader.close()

    def _order(self, epoch: int) -> np.ndarray:
        return self.data.plan.parts(self.seed, epoch)

    def _move(self, position: _EpochPlace) -> None:
        """Drop batches that were read ahead, and continue from `position`."""
        for future, _ in self._pending:
            future.cancel()
        self._pending.clear()
        self._position = self._ahead = position

    def _read_ahead(self) -> None:
        """Keep the reading thread `prefetch` batches ahead of the consumer, within the epoch."""
        while self._ahead is not None and len(self._pending) < self._prefetch:
            at = self._ahead
            rows, self._ahead = self._plan_batch(at)
            if self._ahead is not None:
                future = self._thread.submit(self._read_batch, self.seed, at.epoch, rows)
                self._pending.append((future, self._ahead))

    def _plan_batch(self, at: _EpochPlace) -> tuple[list[tuple[int, int]], _EpochPlace | None]:
        """(file_index, chunk_index) of the next groups, micro_batch or fewer, and the place behind
        these groups; None if the epoch has no batch left."""
        order = self._order(at.epoch)
        file_index, chunk_index = at.file_index, at.chunk_index
        rows: list[tuple[int, int]] = []
        while len(rows) < self.micro_batch:
            count = self._counts[order[file_index]]
            if self._parts(count - chunk_index, self.world_size) > 0:
                rows.append((file_index, chunk_index))
                chunk_index = min(chunk_index + self.world_size, count)
            elif file_index + 1 < len(order):
                file_index, chunk_index = file_index + 1, 0
            elif rows and not self._drop_last:
                break
            else:
                return rows, None
        return rows, _EpochPlace(at.epoch, file_index, chunk_index)

    def _read_batch(self, seed: int, epoch: int, groups: list[tuple[int, int]]) -> Batch:
        """Batch of this rank's sequences, one from each group. Runs on the reading thread, in
        order."""
        plan, order = self.data.plan, self._order(epoch)
        rows: list[list[Span]] = []
        counted = []
        for place, first in groups:
            index, last = first + self.rank, self._counts[order[place]] - 1
            rows.append(plan.spans(seed, epoch, place, min(index, last)))
            counted.append(index <= last)  # else the group is incomplete
        return self._reader.read(rows, counted, self.micro_batch)
