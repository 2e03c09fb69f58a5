"""The JSON log of a run: a single array that is complete after every record.

Numbers that are not finite are written as null. A run that resumes from an earlier checkpoint
undoes the steps after this checkpoint: the log keeps the undone records, and a curve shows each
step once.
"""

import errno
import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from llmq.base.callback import Callback
from llmq.base.errors import DataError, LlmqError, warn
from llmq.base.files import check_readable, disk_errors, free_name
from llmq.base.records import elements
from llmq.base.run_id import RunId

DONE = ("Done. validation loss", "Done. No validation")  # first words of a finished run's message
_EMPTY_LOG = b"[\n]\n"
_LOG_END = b"\n]\n"
RETRY_SECONDS = 0.1
_HEAD_BYTES = 256  # first bytes of a log, which identify the log by its first record's time
_FIRST_RECORD_BYTES = 1 << 20  # longest first record, which has the command line
_RECORD_BEGINS = b'{"log": "'


def _json_value(value: Any) -> Any:
    """Return the value with the types that JSON has; floats that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {k: _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    return value


def _utc_now() -> str:
    """Return the UTC time as YYYY-MM-DD HH:MM:SS with nanoseconds."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{nanoseconds:09d}"


class JsonLog:
    """Writes records during a run into a JSON array on disk, one record a line. Each system call
    writes a record and the array's end, and the file is valid whenever the process stops. Records
    that the disk refuses wait in memory, with one warning, until a later record. A file that
    vanishes or is cut is begun anew, with a warning; if another file has taken the path, the log
    begins anew beside that file. listeners: callbacks that get each record."""

    def __init__(self, path: Path, *, append: bool = False):
        """append: True to continue an existing log; if False, replace the log.

        An incomplete record at the end, left by a machine that stopped, is cut off with a warning.
        Raises LlmqError for a path that cannot be written, or a file to continue that is no log. A
        file to replace must at least begin as a log, because a typing error in the path would cost
        the file.
        """
        self.path = path
        self.listeners: list[Callback] = []
        self._news: list[dict[str, Any]] = []  # records not yet sent to all listeners
        self._waiting: list[bytes] = []
        self._first = b""  # this process's first record, which names the run
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            keep = append and path.exists() and path.stat().st_size > 0
            if not keep and path.is_file():
                with open(path, "rb") as file:
                    if file.read(1) not in (b"", b"["):
                        raise LlmqError(
                            f"'{path}' is no log and is not overwritten: choose another --log-file"
                        )
            # Writes are unbuffered, because a kill would lose the content of a buffer.
            self._file = open(path, "r+b" if keep else "w+b", buffering=0)  # noqa: SIM115
            if not self._file.seekable():
                raise LlmqError(f"'{path}' cannot hold a log: it is no file on a disk")
            self._end = self._file.seek(0, os.SEEK_END) if keep else self._file.write(_EMPTY_LOG)
            self._file.seek(max(self._end - len(_LOG_END), 0))
            if keep and self._file.read() != _LOG_END:
                self._mend()

    def _mend(self) -> None:
        """Cut a log without an end back to the last whole record. Raises LlmqError for other
        damage."""
        with open(self.path, "rb") as file:
            end = count = 0
            with suppress(DataError):
                for text, after in elements(str(self.path), file, 0, growing=True):
                    _parsed(text)
                    end, count = after, count + 1
            file.seek(end)
            rest = file.read()
        is_torn = count > 0 or _is_torn_beginning(rest)
        if not is_torn or any(_is_record(line) for line in rest.splitlines()[1:]):
            where = f": what comes after {count} records is damaged" if count else ""
            raise LlmqError(
                f"'{self.path}' is not a complete log that could be continued{where}: move it "
                "away, or choose another --log-file"
            )
        self._file.seek(end)
        self._end = end + self._file.write(_LOG_END if count else _EMPTY_LOG)
        self._file.truncate()
        if count == 0:
            self._begin_with_first()
            warn(f"'{self.path}' ended in the middle of its first record: begun anew")
        elif rest.strip() != b"]":
            warn(
                f"'{self.path}' ended in the middle of a record: cut back to its {count} whole "
                f"ones ({len(rest)} bytes less)"
            )

    def _begin_with_first(self) -> None:
        if self._first and self._first not in self._waiting:
            self._waiting.insert(0, self._first)

    def write(self, log: str, step: int, **fields: Any) -> None:
        """Add a record; every record has `log`, `time` (UTC) and `step`."""
        record = {"log": log, "time": _utc_now(), "step": step} | _json_value(fields)
        line = json.dumps(record, allow_nan=False).encode()
        self._waiting.append(line)
        self._first = self._first or line
        problem = self._write_waiting()
        if problem is not None and len(self._waiting) == 1:
            warn(
                f"cannot write the log '{self.path}' ({problem}): training goes on, and what "
                "is to be logged waits in memory until it can be written"
            )
        if self.listeners:
            self._tell(_parsed(line))

    def _tell(self, record: dict[str, Any]) -> None:
        """Send a record to all listeners. Records that a listener writes meanwhile follow in
        order."""
        self._news.append(record)
        if len(self._news) > 1:
            return
        try:
            while self._news:
                for listener in list(self.listeners):
                    listener.on_record(self._news[0])
                del self._news[0]
        finally:
            self._news.clear()

    def _write_waiting(self) -> str | None:
        """Write all waiting records. Returns None, or why the records must wait longer."""
        try:
            self._check_place()
            first = self._end == len(_EMPTY_LOG)
            lines = (b"\n  " if first else b",\n  ") + b",\n  ".join(self._waiting)
            self._replace_end(lines + _LOG_END)
        except OSError as error:
            return error.strerror
        self._waiting.clear()
        return None

    def _check_place(self) -> None:
        """Begin the log anew if another file has the log's path or the log was cut. Raises OSError
        for disk errors."""
        mine = os.fstat(self._file.fileno())
        if not stat.S_ISREG(mine.st_mode):
            return
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin_anew(self.path, "vanished")
            return
        if not os.path.samestat(current, mine):
            free = free_name(self.path, "new") if current.st_size else self.path
            self._begin_anew(free, "has been replaced by another file")
        elif current.st_size < self._end:
            self._end = current.st_size
            try:
                self._mend()
            except LlmqError:  # no record is whole any more
                self._begin_anew(self.path, "has been cut by somebody else")

    def _begin_anew(self, path: Path, problem: str) -> None:
        file = open(path, "w+b", buffering=0)  # noqa: SIM115 (kept open)
        self._file.close()
        self._file, self._end = file, file.write(_EMPTY_LOG)
        self._begin_with_first()
        warn(f"the log '{self.path}' {problem}: begun anew in '{path}'")
        self.path = path

    def _replace_end(self, data: bytes) -> None:
        start = self._end - len(_LOG_END)
        try:
            self._file.seek(start)
            written = self._file.write(data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.seek(start)
            self._file.write(_LOG_END)  # overwriting needs no more disk space
            self._file.truncate(self._end)
            raise
        self._end = start + len(data)

    def close(self) -> None:
        """Close the file. Warns of records that could not be written."""
        problem = self._write_waiting() if self._waiting else None
        if problem is not None:
            warn(f"'{self.path}' lacks its last {len(self._waiting)} records: {problem}")
        self._file.close()


def has_records(path: Path) -> bool:
    """Return True if a regular file begins as a log with at least one record."""
    if not path.is_file():
        return False
    with disk_errors(path), open(path, "rb") as file:
        head = file.read(len(_EMPTY_LOG))
    return head[:1] == b"[" and head != _EMPTY_LOG


def log_owner(path: Path) -> RunId | None:
    """Return the run that the first record names, or None."""
    try:
        return RunId.of(json.loads(_first_record(path))["run"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def is_damaged_log(path: Path) -> bool:
    """Return True if the path holds something other than a log: a folder, a pipe, or a file that
    begins neither with a record nor with an incomplete first record."""
    if not path.is_file():
        return path.is_dir() or path.is_fifo()
    with disk_errors(path), open(path, "rb") as file:
        head = file.read(_FIRST_RECORD_BYTES + 1)
    if not head.strip(b"\0") or _is_torn_beginning(head) or _EMPTY_LOG.startswith(head):
        return False
    return head[:1] != b"[" or (head != _EMPTY_LOG and not _is_record(_first_record(path)))


def _first_record(path: Path) -> bytes:
    with disk_errors(path), open(path, "rb") as file:
        file.readline()
        return file.readline(_FIRST_RECORD_BYTES).rstrip(b",\n")


class LogReader:
    """Reads a log that may still grow; each call returns new records only."""

    def __init__(self, path: Path, retry: float = RETRY_SECONDS):
        """retry: seconds until an incomplete record is read a second time."""
        self.path, self._retry = path, retry
        self.count = 0  # records read so far
        self._offset = 0  # offset of the byte behind the last record
        self._head = b""

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Yield the complete new records, with `time` in seconds since 1970.

        Raises LlmqError if the log cannot be read, is no log, or has been replaced or cut.
        """
        try:
            try:
                yield from self._new_records()
            except DataError:  # perhaps a write was under way during the read
                time.sleep(self._retry)
                yield from self._new_records()
        except OSError as error:
            raise DataError(f"cannot read the log '{self.path}': {error.strerror}") from None
        except DataError:
            raise DataError(
                f"'{self.path}' is not a log of llmq train: what comes after {self.count} records, "
                f"from byte {self._offset} on, is no record"
            ) from None

    def _new_records(self) -> Iterator[dict[str, Any]]:
        check_readable(self.path)
        with open(self.path, "rb") as file:
            head = os.pread(file.fileno(), _HEAD_BYTES, 0)
            # A single read, because the next record replaces the log's end.
            size = os.fstat(file.fileno()).st_size - self._offset
            data = os.pread(file.fileno(), max(size, 0), self._offset)
        if not head.startswith(self._head):
            raise LlmqError(f"'{self.path}' has been replaced by another log: start again")
        if size < 0:  # a log begun anew has the same first record
            raise LlmqError(f"'{self.path}' has been cut or begun anew: start again")
        for text, end in elements(str(self.path), BytesIO(data), self._offset, growing=True):
            record = _parsed(text)
            self._offset, self.count, self._head = end, self.count + 1, head[:end]
            yield record


@contextmanager
def as_written(log: Path, what: str) -> Iterator[None]:
    """Turn errors within the context into a DataError that names `what`, a malformed part of this
    log."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(repr(error).split())[:100]
        fault = f"{what} is not as it should be ({reason})"
        raise DataError(f"'{log}' is not a log of llmq train: {fault}") from error


def _is_torn_beginning(data: bytes) -> bool:
    """Return True if the data may be the incomplete beginning of a log's first record."""
    line = data.removeprefix(b"[").strip(b" \n\0")
    begins = line.startswith(_RECORD_BEGINS) or _RECORD_BEGINS.startswith(line)
    torn = begins and b"\n" not in line and not _is_record(line)
    return torn and len(data) <= _FIRST_RECORD_BYTES


def _is_record(line: bytes) -> bool:
    try:
        return bool(_parsed(line.strip(b" ,\r\t")))
    except DataError:
        return False


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
        record["time"] = datetime.fromisoformat(record["time"]).replace(tzinfo=UTC).timestamp()
        steps = (record["step"], record["resumed_at"] if record["log"] == "cmd" else 0)
        if {type(n) for n in steps} != {int} or not isinstance(record["log"], str):
            raise ValueError(record)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError("no record of a log") from error
    return record


# Kinds of records that step s writes; all other kinds are written between two steps.
_OF_STEPS = ("step", "rollout", "gpu", "cpu", "abs-maxes", "fast-products", "choices")


class Course:
    """Finds records of resumed runs that undo earlier records of a log."""

    def __init__(self) -> None:
        self._newest = -1  # newest step

    def back_to(self, record: dict[str, Any]) -> int | None:
        """Return the number of steps after which this record continues, if the record undoes
        earlier steps; else None."""
        if record["log"] not in ("step", "cmd"):
            return None
        is_step = record["log"] == "step"
        step = record["step" if is_step else "resumed_at"]
        after = step if is_step else step - 1
        back = step if step <= self._newest else None
        self._newest = after if back is not None else max(self._newest, after)
        return back


def is_undone(record: dict[str, Any], steps: int) -> bool:
    """Return True if going back to `steps` done steps undoes this record."""
    of_step = record["log"] in _OF_STEPS or record.get("type") == "time-breakdown"
    return record["step"] >= steps if of_step else record["step"] > steps


# Kinds of evaluation records, which a resumed run repeats if its checkpoint is older, with the
# fields that identify an evaluation.
_REPEATED = {"eval": ("name", "eval_tokens"), "task": ("name", "metric"), "sample": ("prompt",)}


def without_undone(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a log without undone steps, and without evaluations that a resumed run
    has repeated."""
    course, kept = Course(), []
    begun = resumed_at = 0  # number of kept records before the newest `cmd`; step of that `cmd`
    for record in records:
        back = course.back_to(record)
        if back is not None:
            kept = [r for r in kept if not is_undone(r, back)]
        if record["log"] == "cmd":
            begun, resumed_at = len(kept), record["resumed_at"]
        elif record["log"] in _REPEATED and record["step"] == resumed_at:
            before = [r for r in kept[:begun] if not _is_repeated(r, record)]
            kept[:begun], begun = before, len(before)
        kept.append(record)
    return kept


def _is_repeated(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two evaluation records have the same name and step."""
    fields = ("log", "step", *_REPEATED[other["log"]])
    return all(one.get(name) == other.get(name) for name in fields)
