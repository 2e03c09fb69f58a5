"""Batches for one rank: shuffled, sharded over ranks, read ahead, resumable at any batch.

The order is the one llm.q defines. A file of n tokens has (n - 1) // T chunks of T input tokens,
whose targets are the same tokens shifted by one. Each epoch shuffles the files, and the chunks
inside each file. A group is `world_size` consecutive chunks of the shuffled order, one per rank; a
batch is `micro_batch` groups, which may come from two or more files. A file's last, incomplete
group and an epoch's last, incomplete batch are not used in that epoch; or filled up, where
everything counts, as in a validation. Every position is therefore plain arithmetic on (epoch, file,
chunk): resuming costs one shuffle of one file and reads no data.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import DataError
from llmq.data.split import Split, fingerprint
from llmq.data.tokens import MASKED_TARGET, TokenFile, open_token_files

# ------------------------------------------------------------------------------------------------
# Random order: Philox seeds a C++ engine, which drives libstdc++'s shuffle


def philox_4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four random 32-bit words for one counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF
        c2, c3 = (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# The engine is std::default_random_engine of libstdc++: state = state * 16807 mod (2^31 - 1).
_LEHMER_A = 16807
_LEHMER_M = 2**31 - 1
_ENGINE_RANGE = _LEHMER_M - 2  # largest minus smallest value that the engine returns
_BLOCK = 256  # draws computed at once; a rejected draw costs one more block


@functools.cache
def _lehmer_powers() -> np.ndarray:
    """a^1 … a^_BLOCK mod m, uint64: any state times these gives the next _BLOCK states."""
    powers = [pow(_LEHMER_A, k, _LEHMER_M) for k in range(1, _BLOCK + 1)]
    return np.array(powers, np.uint64)


def _uniform_integers(state: int, ends: np.ndarray) -> np.ndarray:
    """std::uniform_int_distribution: draw i is uniform in 0..ends[i]-1, int64.

    state: the engine's, 1 <= state < m. A draw beyond the largest multiple of ends[i] is thrown
    away and drawn again, so everything after it moves by one: draws are made a block at a time and
    a block ends at its first rejected draw.
    """
    out = np.empty(len(ends), np.int64)
    done = 0
    while done < len(ends):
        end = ends[done : done + _BLOCK]
        states = np.uint64(state) * _lehmer_powers()[: len(end)] % np.uint64(_LEHMER_M)
        draws = states.astype(np.int64) - 1
        scale = _ENGINE_RANGE // end
        rejected = draws >= end * scale
        taken = int(rejected.argmax()) if rejected.any() else len(end)
        out[done : done + taken] = draws[:taken] // scale[:taken]
        done += taken
        state = int(states[min(taken, len(end) - 1)])
    return out


def shuffled(n: int, engine_seed: int) -> np.ndarray:
    """The int32 permutation of 0..n-1 that libstdc++'s std::ranges::shuffle makes with that seed.

    Element i is swapped with a random element of 0..i, for i = 1, 2, …. While n * n fits into the
    engine's range, one draw gives the partners of two consecutive elements.
    """
    if n < 2:
        return np.zeros(n, np.int32)
    state = engine_seed % _LEHMER_M or 1
    if _ENGINE_RANGE // n >= n:
        single = 1 - n % 2  # with an even n, element 1 has a draw of its own
        first = np.arange(1 + single, n, 2, dtype=np.int64)  # first element of each pair
        ends = np.concatenate([np.full(single, 2, np.int64), (first + 1) * (first + 2)])
        draws = _uniform_integers(state, ends)
        partners = np.empty(n - 1, np.int64)
        partners[:single] = draws[:single]
        partners[single::2], partners[single + 1 :: 2] = np.divmod(draws[single:], first + 2)
    else:
        partners = _uniform_integers(state, np.arange(2, n + 1, dtype=np.int64))
    order = list(range(n))
    for i, j in enumerate(partners.tolist(), 1):
        order[i], order[j] = order[j], order[i]
    return np.array(order, np.int32)


_FILE_ORDER = 0x73653753  # second counter word of the file shuffle; the i-th file's chunks use i
_order_lock = threading.Lock()


@functools.lru_cache(maxsize=8)
def _cached_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    word = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, 0, 0))[0]
    order = shuffled(n, word)
    order.flags.writeable = False
    return order


def epoch_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """Permutation (n,) int32 of the files (which = _FILE_ORDER) or of the which-th file's chunks.

    Computed once for all ranks of the process: they ask for the same one at about the same time.
    """
    with _order_lock:
        return _cached_order(n, seed, epoch, which)


# ------------------------------------------------------------------------------------------------
# The loader


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the next group starts: a file of the shuffled order and a chunk of its shuffled order.

    chunk_index is the group's first chunk, that is rank 0's, so that it fits any number of ranks.
    """

    epoch: int = 0
    file_index: int = 0
    chunk_index: int = 0


class DataLoader:
    """Batches of rank `rank` out of `world_size`, read ahead by a thread of its own.

    files        the checked token files in sorted order
    total_tokens tokens in all files;  batches_per_epoch  how many batches one epoch yields

    Attributes may be read at any time; the methods are for one thread.
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
        prefetch: int = 4,
    ) -> None:
        """files: glob pattern(s). seed: uint64. vocab_size: the model's. prefetch: batches ahead.

        everything: fill incomplete groups and batches with masked targets instead of leaving them
        out. Their inputs are those of another sequence, so that no other values arise in the model.
        split: the side of the files that is read; None: all of them.
        Every file is checked here; DataError if one is damaged or all together hold no batch.
        """
        if not (seq_len > 0 and micro_batch > 0 and prefetch > 0 and 0 <= rank < world_size):
            raise ValueError(
                "DataLoader: seq_len, micro_batch and prefetch must be positive and rank below "
                f"world_size, got {seq_len}, {micro_batch}, {prefetch}, {rank} of {world_size}"
            )
        self.seq_len, self.micro_batch = seq_len, micro_batch
        self.rank, self.world_size = rank, world_size
        self.seed, self.vocab_size = seed % 2**64, vocab_size
        self.files: list[TokenFile] = open_token_files(files, vocab_size)
        self._fingerprint = fingerprint(self.files, split)
        self.total_tokens = sum(file.num_tokens for file in self.files)
        self._chunks = [max(file.num_tokens - 1, 0) // seq_len for file in self.files]
        self._first = [0] * len(self.files)  # chunk of each file
        if split is not None:
            self._first, self._chunks = split.of(self._chunks)
            self.total_tokens = sum(self._chunks) * seq_len
        self._everything = everything
        self._groups = [self._parts(chunks, world_size) for chunks in self._chunks]
        self.batches_per_epoch = self._parts(sum(self._groups), micro_batch)
        if self.batches_per_epoch == 0:
            raise self._too_short()
        self._position = _Position()  # of the next batch that next_batch will return
        self._ahead: _Position | None = self._position  # of the next batch to be read; None: end
        self._prefetch = prefetch
        self._pending: deque[tuple[Future, _Position]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"loader-{rank}")
        self._open_file: TokenFile | None = None  # only the reading thread uses it

    def _parts(self, count: int, size: int) -> int:
        """How many parts of this size that many things make."""
        return -(-count // size) if self._everything else count // size

    def _too_short(self) -> DataError:
        have, usable = sum(self._chunks), sum(self._groups) * self.world_size
        shared = f", {usable} of which all ranks can share," if usable < have else ","
        needed = (
            f"one batch needs {self.micro_batch * self.world_size} ({self.micro_batch} x "
            f"{self.world_size} ranks): use more data, a shorter sequence length or a smaller batch"
        )
        if self._everything:
            needed = "one is needed: use more data or a shorter sequence length"
        return DataError(
            f"'{self.files[0].path}'{' …' * (len(self.files) > 1)} has {have} sequences of "
            f"{self.seq_len} tokens{shared} but {needed}"
        )

    def sequences(self, batches: int) -> int:
        """How many the first batches of the current epoch hold, for all ranks together."""
        left, count = batches * self.micro_batch, 0
        for i in self._file_order(self.epoch):
            count += min(self._chunks[i], min(left, self._groups[i]) * self.world_size)
            left -= min(left, self._groups[i])
        return count

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._position.epoch

    @property
    def batches_left(self) -> int:
        """Of the current epoch."""
        return self._parts(self._groups_left(), self.micro_batch)

    @property
    def unused_files(self) -> int:
        """Files that are too short for a sequence of every rank: no epoch takes any of theirs."""
        return self._groups.count(0)

    def has_next(self, batches: int = 1) -> bool:
        """Whether this epoch still has that many batches."""
        return self.batches_left >= batches

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The next batch: inputs and targets, both int32 (B, T); masked targets are -100.

        DataError, again at every call, where the data cannot be read or holds an id outside the
        vocabulary. RuntimeError at the end of the epoch.
        """
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
        """Go to the start of the next epoch, whatever is left of this one."""
        self._move(_Position(epoch=self.epoch + 1))

    def reset(self) -> None:
        """Go to the start of epoch 0, for a fresh pass over an evaluation set."""
        self._move(_Position())

    def state(self) -> dict[str, Any]:
        """What `set_state` needs to go on after the last batch that was handed out; JSON types."""
        at = self._position
        names = [file.path.name for file in self.files]
        return {
            "seed": self.seed,
            "epoch": at.epoch,
            "file_index": at.file_index,
            "chunk_index": at.chunk_index,
            "file_name": names[self._file_order(at.epoch)[at.file_index]],
            "seq_len": self.seq_len,
            "files": self._fingerprint,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken, on any number of ranks.

        Reads no data. DataError if the state belongs to other files or another sequence length.
        """
        if state["files"] != self._fingerprint or state["seq_len"] != self.seq_len:
            what = "training files" if state["seq_len"] == self.seq_len else "sequence length"
            raise DataError(
                f"the {what} changed since the checkpoint, which was at '{state['file_name']}' "
                f"with sequences of {state['seq_len']} tokens: restore the old one, or pass "
                "--new-data to start the data from its beginning"
            )
        self.seed = state["seed"]
        self._move(_Position(state["epoch"], state["file_index"], state["chunk_index"]))

    def close(self) -> None:
        """Stop the reading thread and close the files."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        for file in self.files:
            file.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file_order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.files), self.seed, epoch, _FILE_ORDER)

    def _groups_left(self) -> int:
        at = self._position
        order = self._file_order(at.epoch)
        here = order[at.file_index : at.file_index + 1]
        chunks = [max(self._chunks[i] - at.chunk_index, 0) for i in here]
        rest = order[at.file_index + 1 :]
        left = sum(self._parts(n, self.world_size) for n in chunks)
        return left + sum(self._groups[i] for i in rest)

    def _move(self, position: _Position) -> None:
        """Drop what was read ahead and go on from `position`."""
        for future, _ in self._pending:
            future.cancel()
        self._pending.clear()
        self._position = self._ahead = position

    def _read_ahead(self) -> None:
        """Keep the reading thread `prefetch` batches ahead of the consumer, within the epoch."""
        while self._ahead is not None and len(self._pending) < self._prefetch:
            epoch = self._ahead.epoch
            rows, self._ahead = self._plan_batch(self._ahead)
            if self._ahead is not None:
                future = self._thread.submit(self._read_batch, epoch, rows)
                self._pending.append((future, self._ahead))

    def _plan_batch(self, at: _Position) -> tuple[list[tuple[int, int]], _Position | None]:
        """(file_index, chunk_index) of the next groups, B or less, and the position after them.

        The position is None where the epoch has no batch left.
        """
        order = self._file_order(at.epoch)
        file_index, chunk_index = at.file_index, at.chunk_index
        rows: list[tuple[int, int]] = []
        while len(rows) < self.micro_batch:
            if self._parts(self._chunks[order[file_index]] - chunk_index, self.world_size) > 0:
                rows.append((file_index, chunk_index))
                chunk_index += self.world_size
            elif file_index + 1 < len(order):
                file_index, chunk_index = file_index + 1, 0
            elif rows and self._everything:
                break
            else:
                return rows, None
        return rows, _Position(at.epoch, file_index, chunk_index)

    def _read_batch(self, epoch: int, rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Read this rank's chunk of each group. Runs on the reading thread, in order."""
        inputs = np.empty((self.micro_batch, self.seq_len), np.int32)
        targets = np.full_like(inputs, MASKED_TARGET)
        file_order = self._file_order(epoch)
        for row, (file_index, chunk_index) in enumerate(rows):
            which = file_order[file_index]
            order = epoch_order(self._chunks[which], self.seed, epoch, file_index)
            chunk = chunk_index + self.rank
            index = self._first[which] + int(order[min(chunk, len(order) - 1)])
            start = index * self.seq_len
            file = self.files[which]
            if file is not self._open_file:
                if self._open_file is not None:
                    self._open_file.close()
                self._open_file = file
            tokens = file.read_tokens(start, self.seq_len + 1)
            self._check_ids(file, start, tokens)
            inputs[row] = tokens[:-1]
            if chunk >= len(order):  # an incomplete group
                continue
            targets[row] = tokens[1:]
            # The bit of the target token itself decides, so that the first token of an answer is
            # trained and the token after its end is not.
            if file.has_masks:
                targets[row][~file.read_mask(start + 1, self.seq_len)] = MASKED_TARGET
        inputs[len(rows) :] = inputs[0]  # of an incomplete batch
        return inputs, targets

    def _check_ids(self, file: TokenFile, start: int, tokens: np.ndarray) -> None:
        bad = tokens.view(np.uint32) >= self.vocab_size  # a negative id is a large unsigned one
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                f"'{file.path}' has token id {tokens[at]} at position {start + at}, outside the "
                f"model's vocabulary of {self.vocab_size}: the file is damaged or was made for "
                "another tokenizer; tokenize the data again"
            )
