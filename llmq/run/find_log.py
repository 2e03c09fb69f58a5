"""Find the log of a run, by the run's identity or by its name."""

from __future__ import annotations

import glob
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llmq.base.errors import DataError, LlmqError
from llmq.base.locks import holder, lock_beside
from llmq.base.run_id import RunId
from llmq.checkpoint.store import (
    checkpoint_at,
    checkpoint_owner,
    saved_log,
)
from llmq.options.options import TrainConfig
from llmq.report.json_log import has_records, is_damaged_log, log_owner

RECENT = 600.0  # seconds
_DATED = re.compile(r"-\d{4}-\d\d-\d\dT\d\d_\d\d_\d\d$")  # how %n-DATE ends


def log_of_run(run: RunId, last: Path) -> Path | None:
    """The log of a run that goes on: the file it wrote last, else its newest beside it.

    The file it wrote last, too, if there is none any more, or it is damaged and none is beside it.
    None if all that is there is of others.
    """
    there, damaged = os.path.lexists(last), is_damaged_log(last)
    if there and not damaged and (not has_records(last) or run.owns(log_owner(last))):
        return last
    beside = [path for path in _logs_in(last.parent) if path != last and _is_of(path, run)]
    return max(beside, key=_modified, default=last if damaged or not there else None)


def _is_of(path: Path, run: RunId) -> bool:
    owner = log_owner(path)
    return owner is not None and owner.id == run.id


def find_log(text: str) -> Path:
    """A log, by its path or by the name of its run, of which the newest log is meant.

    Those in logs/ are looked through, and the one that the newest checkpoint in ckpt/NAME names.
    DataError if there is none.
    """
    path = Path(os.path.expanduser(text))  # pathlib's raises where there is no such user
    if os.path.lexists(path) and not path.is_dir():
        return path
    defaults = TrainConfig().normalized()
    if path.name == text and path.suffix != ".json":
        found = set(_logs_called(text, defaults.log_file.parent))
        found |= set(_log_of_checkpoint(text))
        if found:
            return max(found, key=_modified)
        problem = f"no log in '{defaults.log_file.parent}' is of a run of this name"
    else:
        problem = "it is a directory" if path.is_dir() else "No such file or directory"
    raise DataError(f"cannot read the log '{text}': {problem}")


def running_log() -> Path | None:
    """The newest log in logs/ that a run is writing now; None if there is none."""
    logs = _logs_in(TrainConfig().normalized().log_file.parent)
    return next((p for p in sorted(logs, key=_modified, reverse=True) if is_written(p)), None)


def is_written(path: Path) -> bool:
    """Whether a run is writing this log, as its lock says."""
    return bool(has_writer(path))


def has_writer(path: Path) -> bool | None:
    """Whether the run whose lock is there goes on; None where there is no lock. For a run on
    another machine it says whether that has written something of late.
    """
    found = holder(lock_beside(path.resolve()))
    if found is None:
        return None
    process, machine = found
    if machine != socket.gethostname():
        return silence(path) < RECENT
    try:
        os.kill(process, 0)
    except ProcessLookupError:  # it was killed
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def is_written_here(path: Path) -> bool:
    """Whether a run of this machine is writing this log."""
    found = holder(lock_beside(path.resolve()))
    return found is not None and found[1] == socket.gethostname() and is_written(path)


def silence(path: Path) -> float:
    """Seconds since something was written to a log."""
    return time.time() - _modified(path)[0]


def _logs_called(name: str, folder: Path) -> Iterator[Path]:
    for path in _logs_in(folder):
        owner = log_owner(path)
        called = _DATED.sub("", path.stem) if owner is None else owner.name
        if called == name:
            yield path


def _log_of_checkpoint(name: str) -> Iterator[Path]:
    with suppress(LlmqError):  # of a checkpoint that is damaged
        checkpoint = checkpoint_at(TrainConfig(name=name).normalized().checkpoint_dir)
        if checkpoint is not None:
            log, owner = saved_log(checkpoint), checkpoint_owner(checkpoint)
            if None not in (log, owner) and has_records(log) and _is_of(log, owner):
                yield log


def _logs_in(folder: Path) -> list[Path]:
    """Also those that a run began beside one that was replaced, see JsonLog."""
    names = (f"{glob.escape(str(folder))}/{pattern}" for pattern in ("*.json", "*.json.new-*"))
    paths = (Path(path) for name in names for path in glob.glob(name))
    return [path for path in paths if has_records(path)]


def _modified(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
