"""Every call that changes a file below a folder, on its way to the system.

`install` puts wrappers around what Python offers for that, for the rest of the process, so it is
for processes that are forked to be tried. Reading is left alone.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES)
WHOLE = 64  # bytes: so few are written or not
_COMMITTED = re.compile(r"step_(\d{8})")


class Call(NamedTuple):
    """One call. number: counts from 0. to: the second path of a rename or a link, the offset of a
    write, the length of a truncation. data: what is written."""

    number: int
    kind: str
    path: str
    to: Any = None
    data: bytes = b""


class Shared:
    """Numbers that the parent of the tried process sees.

    calls: how many there were. committed: the newest checkpoint that has its name, plus one.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def reset(self) -> None:
        """For the next process."""
        self._memory[:] = bytes(16)

    def __getitem__(self, index: int) -> int:
        return int.from_bytes(self._memory[8 * index : 8 * index + 8], "little")

    def __setitem__(self, index: int, value: int) -> None:
        self._memory[8 * index : 8 * index + 8] = value.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Fault:
    """The fate of calls at .. at + times - 1.

    how: before, after, or torn: a write of which a part is done. number: the error of the system;
    None: the process dies.
    """

    at: int
    how: str
    number: int | None = None
    times: int = 1

    def strike(self, call: Call) -> None:
        """Die or raise."""
        if self.number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.number, os.strerror(self.number), call.path)


class Calls:
    """The wrappers' common part.

    fault: None to let everything pass. record: gets each call after it was done.
    """

    def __init__(
        self,
        root: Path,
        shared: Shared,
        fault: Fault | None = None,
        record: Callable[[Call], None] | None = None,
    ):
        self.root = f"{os.path.realpath(root)}/"
        self.shared, self.fault, self.record = shared, fault, record
        self._lock = threading.RLock()

    def perform(self, kind: str, path: str, do: Callable[..., Any], to: Any = None) -> Any:
        """Do it, unless the fault says otherwise. For writes do(part) gets what is to be written,
        `to` is (offset, data)."""
        if not path.startswith(self.root) and f"{path}/" != self.root:
            return do(to[1]) if kind == "write" else do()
        with self._lock:
            number = self.shared[0]
            self.shared[0] = number + 1
        data = bytes(to[1]) if kind == "write" else b""
        call = Call(number, kind, path, to[0] if kind == "write" else to, data)
        fault = self.fault
        hit = fault is not None and fault.at <= number < fault.at + fault.times
        if hit and fault.how == "torn" and len(data) > WHOLE:
            do(data[: len(data) // 2])
        if hit and (fault.how != "after" or fault.number is not None):
            fault.strike(call)
        result = do(data) if kind == "write" else do()
        if self.record is not None:
            self.record(call)
        found = kind == "rename" and _COMMITTED.fullmatch(os.path.basename(to))
        if found and os.path.basename(path) == f"{found[0]}.tmp":
            self.shared[1] = max(self.shared[1], int(found[1]) + 1)
        if hit:
            fault.strike(call)
        return result


def _place(path: Any, dir_fd: int | None = None) -> str:
    """The whole path of what a call of the system names, of which the last part may be a link."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    name = os.fsdecode(path)
    if dir_fd is not None:
        name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
    folder, last = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(folder), last)


def install(calls: Calls) -> None:
    """For the rest of this process."""
    _install_paths(calls)
    _install_descriptors(calls)
    _install_open(calls)


def _install_paths(calls: Calls) -> None:
    def wrap(name: str, kind: str) -> None:
        real = getattr(os, name)

        def one(path: Any, *args: Any, dir_fd: int | None = None) -> Any:
            where = {} if dir_fd is None else {"dir_fd": dir_fd}
            return calls.perform(kind, _place(path, dir_fd), lambda: real(path, *args, **where))

        setattr(os, name, one)

    def wrap_two(name: str, kind: str) -> None:
        real = getattr(os, name)

        def two(src: Any, dst: Any, **how: Any) -> Any:
            return calls.perform(kind, _place(src), lambda: real(src, dst, **how), _place(dst))

        setattr(os, name, two)

    wrap("unlink", "unlink")
    wrap("remove", "unlink")
    wrap("mkdir", "mkdir")
    wrap("rmdir", "rmdir")
    wrap_two("rename", "rename")
    wrap_two("replace", "rename")
    wrap_two("link", "link")


def _install_descriptors(calls: Calls) -> None:
    real_fsync, real_cut, real_open = os.fsync, os.ftruncate, os.open
    real_pwrite, real_write = os.pwrite, os.write

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        calls.perform("fsync", _place(number), lambda: real_fsync(number))

    def ftruncate(number: int, length: int) -> None:
        calls.perform("truncate", _place(number), lambda: real_cut(number, length), length)

    def pwrite(number: int, data: Any, offset: int) -> int:
        do = lambda part: real_pwrite(number, part, offset)  # noqa: E731
        return calls.perform("write", _place(number), do, (offset, data))

    def write(number: int, data: Any) -> int:
        return calls.perform(
            "write", _place(number), lambda part: real_write(number, part), (0, data)
        )

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def do() -> int:
            return real_open(path, flags, mode, dir_fd=dir_fd)

        if flags & os.O_TMPFILE == os.O_TMPFILE or not flags & (os.O_CREAT | os.O_TRUNC):
            return do()
        return calls.perform("open", _place(path, dir_fd), do, bool(flags & os.O_TRUNC))

    os.fsync, os.ftruncate, os.open = fsync, ftruncate, open_
    os.pwrite, os.write = pwrite, write


def _install_open(calls: Calls) -> None:
    real = io.open

    class File(io.FileIO):
        def __init__(self, file: Any, mode: str, closefd: bool, opener: Any):
            super().__init__(file, mode, closefd=closefd, opener=opener)
            self._place = _place(self.fileno())

        def write(self, data: Any) -> int:
            do = super().write
            offset = self.tell() if self.seekable() else 0
            return calls.perform("write", self._place, do, (offset, data))

        def truncate(self, size: int | None = None) -> int:
            size = self.tell() if size is None else size
            do = super().truncate
            return calls.perform("truncate", self._place, lambda: do(size), size)

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw_mode = mode.replace("b", "").replace("t", "")

        def do() -> File:
            return File(file, raw_mode, closefd, opener)

        # An opener is that of a temporary file, which has no name and is gone with the process.
        creates = not isinstance(file, int) and opener is None and set(mode) & set("wax")
        raw = calls.perform("open", _place(file), do, "w" in mode) if creates else do()
        if buffering == 0:
            return raw
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    io.open = builtins.open = open_
