"""The `.scores` file of a token file: log-probabilities of a model for each token.

    offset 0     8 bytes  b"BIN.SCR\n"
           8     int32    version, 1
          12     int32    bytes of the JSON description
          16     int64    number of tokens of the token file
          24     int64    number of finished units (documents or pairs), -1 = all
          32     JSON     description, a `Scored`
        4096     n records  one for each token

With top_k = 0 a record is a float32, the log-probability of the token given the earlier tokens of
its document: 0 if the token file masks the token, NaN for a token that is never a target. With
top_k = k a record has the k most likely tokens at a position, in the layout below.

All numbers are little-endian. `mine-train.scores` belongs to `mine/train.bin`; all scores are in
one folder. `mine-train.scores.sums` has checksums of pieces, as token files do.

A record of the k largest probabilities at a position takes 3 k + 8 bytes: 200 for k = 64.

    k uint16     lower halves of ids, in rising order of ids
    k uint8      log-probabilities: code c stands for -deepest * (c / 255)^2
    4 uint8      number of ids below 65536, 2 * 65536, 3 * 65536; 0
    float16      deepest: the smallest log-probability without its sign
    uint16       65535 * the probability of all other tokens together

The square makes likely tokens precise: with a deepest of -16, codes are 0.01 apart at a
log-probability of -0.1. A reader scales probabilities to a sum of 1, with at least 2^-16 for all
other tokens.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import disk_errors, open_file, read_errors, sync_directory
from llmq.data.checksums import Checksums, checksums_path, write_checksums
from llmq.data.document_file import PartialFile, partial_path
from llmq.data.identity import TokenizerId, tokenizers_of_files
from llmq.data.tokens import TokenFile

MOST = 255
LARGEST_ID = 4 << 16
LEAST_REST = 2.0**-16  # minimum probability of all tokens outside the k largest
_LEVELS = 255


def record_bytes(k: int) -> int:
    """Number of bytes of a record of k probabilities."""
    return 3 * k + 8


def encoded(teacher_logprobs: np.ndarray) -> np.ndarray:
    """Records, uint8 (n, record_bytes(k)), of teacher_logprobs float32 (n, 2 k): k rising ids, as
    the bits of int32, and k log-probabilities."""
    n, k = len(teacher_logprobs), teacher_logprobs.shape[1] // 2
    ids = np.ascontiguousarray(teacher_logprobs[:, :k]).view(np.int32)
    logs = np.minimum(teacher_logprobs[:, k:], 0)
    # Round up to the next float16, so that no log-probability is below the range of codes.
    deepest = np.maximum(-logs.min(axis=1), 2.0**-14)
    deepest = np.nextafter(deepest.astype(np.float16), np.float16(np.inf))
    codes = np.rint(_LEVELS * np.sqrt(-logs / deepest.astype(np.float32)[:, None]))
    rest = np.clip(1 - np.exp(logs.astype(np.float64)).sum(axis=1), 0, 1)
    below = np.stack([(ids < high << 16).sum(axis=1) for high in (1, 2, 3)] + [np.zeros(n)], axis=1)
    parts = (
        (ids & 0xFFFF).astype("<u2").view(np.uint8),
        codes.astype(np.uint8),
        below.astype(np.uint8),
        deepest.astype("<f2").view(np.uint8).reshape(n, 2),
        np.rint(65535 * rest).astype("<u2").view(np.uint8).reshape(n, 2),
    )
    return np.concatenate([part.reshape(n, -1) for part in parts], axis=1)


def decoded(records: np.ndarray) -> np.ndarray:
    """Inverse of `encoded`, float32 (n, 2 k); log-probabilities are NaN for records that were never
    written, whose bytes are all 0xFF."""
    n, k = len(records), (records.shape[1] - 8) // 3
    low, codes, below, tail = np.split(records, [2 * k, 3 * k, 3 * k + 4], axis=1)
    places = np.arange(k)
    high = (places >= below[:, :3, None].astype(np.int32)).sum(axis=1)
    ids = np.ascontiguousarray(low).view("<u2").astype(np.int32) | high.astype(np.int32) << 16
    deepest = np.ascontiguousarray(tail[:, :2]).view("<f2").astype(np.float32)
    rest = np.ascontiguousarray(tail[:, 2:]).view("<u2") / 65535
    logs = -deepest * (codes.astype(np.float32) / _LEVELS) ** 2
    mass = np.exp(logs.astype(np.float64)).sum(axis=1, keepdims=True)
    rest = np.maximum(rest, LEAST_REST)
    scale = np.log(np.maximum(1 - rest, 2.0**-24) / mass).astype(np.float32)
    nothing = (records == 0xFF).all(axis=1)
    ids[nothing], logs[nothing] = 0, np.nan
    return np.concatenate([ids.view(np.float32).reshape(n, k), logs + scale], axis=1)


MAGIC = b"BIN.SCR\n"
VERSION = 1
HEADER_BYTES = 4096
SUFFIX = ".scores"
COMPLETE = -1
_FIELDS = struct.Struct("<8s2i2q")
_SCORE = np.dtype("<f4")
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Description of scores: the token file, and the model that computed the scores.

    model: `BaseId.record` of the model. tokens, num_bytes: number of tokens and size of the token
    file. sample: its `TokenFile.sample`. tokenizer: identity of its tokenizer; None if unknown.
    seq_len: length of the longest unit that is scored as a whole. top_k: number of tokens with a
    probability at each position; 0: only the token of the file.
    """

    model: dict[str, Any]
    tokens: int
    num_bytes: int
    sample: int
    tokenizer: dict[str, Any] | None
    seq_len: int
    top_k: int = 0

    @classmethod
    def of(cls, file: TokenFile, model: dict[str, Any], seq_len: int, top_k: int = 0) -> Scored:
        """Description of a model's scores of a token file."""
        ((_, made),) = tokenizers_of_files(file.path)
        return cls(
            model=model,
            tokens=file.num_tokens,
            num_bytes=file.num_bytes,
            sample=file.sample(),
            tokenizer=made and made.record(),
            seq_len=seq_len,
            top_k=top_k,
        )

    @property
    def record(self) -> np.dtype:
        """Dtype of a record."""
        return _SCORE if not self.top_k else np.dtype((np.uint8, record_bytes(self.top_k)))

    @property
    def name(self) -> str:
        """Name of the model, for messages."""
        return str(self.model.get("name"))


def scores_path(folder: Path, token_file: Path) -> Path:
    """Path of a token file's scores in a folder: MINE-X.scores for MINE/X.bin."""
    folder_name = token_file.absolute().parent.name
    return folder / f"{folder_name}-{token_file.name.removesuffix('.bin')}{SUFFIX}"


class ScoreFile:
    """Scores of a token file, for one thread."""

    def __init__(self, path: Path) -> None:
        """Open a `.scores` file. DataError for a file that is missing, damaged, not complete, or of
        another format."""
        self.path = path
        self._file: BinaryIO | None = None
        try:
            self._file = open_file(path)
            header = self._file.read(HEADER_BYTES)
            size = os.fstat(self._file.fileno()).st_size
        except FileNotFoundError:
            partial = partial_path(path)
            unfinished = f"; '{partial}' is unfinished" if partial.exists() else ""
            raise DataError(
                f"there are no scores '{path}'{unfinished}: `llmq score` makes them of its token "
                "file"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        self.done, self.scored = read_header(path, header)
        self._record = self.scored.record
        if (
            size != HEADER_BYTES + self._record.itemsize * self.scored.tokens
            or self.done != COMPLETE
        ):
            raise DataError(f"'{path}' is truncated: copy it again, or score the data again")
        self._checksums = Checksums.of(path)

    def check(self, file: TokenFile, top_k: int = 0) -> None:
        """Raise DataError unless the scores belong to this token file, with top_k tokens at each
        position."""
        if self.scored.top_k != top_k:
            kinds = (f"{k} probabilities" if k else "one score" for k in (self.scored.top_k, top_k))
            raise DataError(
                "'{}' has {} of each token, and the loss reads {}: score with that --top-k".format(
                    self.path, *kinds
                )
            )
        s = self.scored
        if (s.tokens, s.num_bytes, s.sample) != (file.num_tokens, file.num_bytes, file.sample()):
            raise DataError(
                f"'{self.path}' has scores of other tokens than '{file.path}' has: score the data "
                "again"
            )
        ((_, made),) = tokenizers_of_files(file.path)
        before = TokenizerId.from_record(s.tokenizer)
        if made is not None and before is not None and made.fingerprint != before.fingerprint:
            raise DataError(
                f"'{self.path}' has scores of tokens of the tokenizer {before}, '{file.path}' is "
                f"of {made}: score the data again"
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Scores of the tokens [start, start + count), float32 (count,); with top_k float32
        (count, 2 top_k): ids, as the bits of int32, and log-probabilities. DataError for damage."""
        out = np.empty(count, self._record)
        at = HEADER_BYTES + self._record.itemsize * start
        with read_errors(self.path):
            if self._checksums is not None:
                self._checksums.verify(self._file.fileno(), at, at + out.nbytes)
            got = os.preadv(self._file.fileno(), (out,), at)
        if got != out.nbytes:
            raise DataError(f"'{self.path}' became shorter while it was used: score again")
        return decoded(out) if self.scored.top_k else out.astype(np.float32, copy=False)

    def close(self) -> None:
        self._file.close()


def read_header(path: Path, header: bytes) -> tuple[int, Scored]:
    """Number of finished units and the description in a header. DataError for another file."""
    if not header.startswith(MAGIC) or len(header) < HEADER_BYTES:
        raise DataError(f"'{path}' has no scores: `llmq score` writes such files")
    _, version, size, _, done = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise DataError(f"'{path}' has version {version}; version {VERSION} can be read")
    try:
        return done, Scored(**json.loads(header[_FIELDS.size : _FIELDS.size + size]))
    except (ValueError, TypeError) as error:
        raise DataError(f"'{path}' is damaged: score the data again") from error


class ScoreWriter(PartialFile):
    """Writer of a `.scores` file, in the order of units, which resumes the partial file of an
    interrupted run with the same description. done: number of units on the disk."""

    def __init__(self, path: Path, scored: Scored, *, overwrite: bool = False) -> None:
        """overwrite: remove existing scores; without it, DataError for scores with another
        description."""
        self.path, self.scored, self.done = path, scored, 0
        self._record = scored.record
        text = json.dumps(asdict(scored)).encode()
        if len(text) > HEADER_BYTES - _FIELDS.size:
            raise DataError(f"the name of the model, {scored.name[:80]} …, is too long")
        self._text = text
        partial = partial_path(path)
        if overwrite:
            for existing in (partial, path, checksums_path(path)):
                existing.unlink(missing_ok=True)
        earlier = next((existing for existing in (path, partial) if existing.exists()), None)
        if earlier is not None:
            self.done = self._done_units(earlier)
        with disk_errors(partial):
            if self.done == COMPLETE:  # a run may have been killed before the end of `close`
                if earlier == partial or not checksums_path(path).exists():
                    self._publish(earlier)
                return
            self._file = open(partial, "r+b" if self.done else "w+b")  # noqa: SIM115 (kept open)
            if not self.done:
                self._file.write(self._header(0))
                nothing = b"\xff" * self._record.itemsize * _BLOCK  # NaN
                for first in range(0, scored.tokens, _BLOCK):
                    count = min(scored.tokens - first, _BLOCK)
                    self._file.write(nothing[: count * self._record.itemsize])

    def _done_units(self, path: Path) -> int:
        """Number of finished units in a score file of the same description; 0 for a partial file
        that a kill, a full disk or a power failure has cut off. DataError for another file."""
        with read_errors(path), open_file(path) as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        try:
            done, scored = read_header(path, header)
        except DataError:
            if path == self.path:
                raise
            return 0
        if scored != self.scored:
            before, now = asdict(scored), asdict(self.scored)
            other = ", ".join(name for name in now if now[name] != before[name])
            raise DataError(
                f"'{path}' has scores of another {other} (by the model {scored.name}): choose "
                "another --out, or --overwrite"
            )
        whole = size == HEADER_BYTES + self._record.itemsize * scored.tokens
        if path == self.path and (done != COMPLETE or not whole):
            raise DataError(f"'{path}' is truncated: score the data again, with --overwrite")
        return done if whole else 0

    def _header(self, done: int) -> bytes:
        fields = (MAGIC, VERSION, len(self._text), self.scored.tokens, done)
        return (_FIELDS.pack(*fields) + self._text).ljust(HEADER_BYTES, b"\0")

    def write(self, start: int, scores: np.ndarray) -> None:
        """Write scores of the tokens [start, start + n). scores: as `ScoreFile.read` returns."""
        coded = encoded(scores) if self.scored.top_k else scores.astype(_SCORE)
        with disk_errors(self.path):
            self._file.seek(HEADER_BYTES + self._record.itemsize * start)
            self._file.write(coded.tobytes())

    def save(self, done: int) -> None:
        """Force all scores to the disk, then the number of finished units, `done`."""
        with disk_errors(self.path):
            self.sync()
            self._file.seek(0)
            self._file.write(self._header(done))
            self.sync()
        self.done = done

    def close(self) -> None:
        """Complete the file: write checksums, then give the file its name."""
        self.save(COMPLETE)
        self._file.close()
        self._publish(partial_path(self.path))

    def _publish(self, content: Path) -> None:
        """Write the checksums of a complete file, and give the file its name."""
        write_checksums(self.path, content)
        with disk_errors(self.path):
            os.replace(content, self.path)
            sync_directory(self.path.parent)

    def suspend(self) -> None:
        with suppress(AttributeError):  # a complete file was not opened
            super().suspend()
