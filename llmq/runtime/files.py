"""Scratch files on SSDs are the memory of the tier "ssd"; data reach a GPU only by copies through
pinned buffers.

The files have no names, so the system frees their space when the process ends for any reason. Reads
and writes bypass the page cache (O_DIRECT) if the file system allows this.

    load    a thread reads a chunk into a slot; the current stream waits for the slot's flag, copies
            the slot to the GPU, and writes the flag
    store   the current stream waits for the slot's flag, copies to the slot, and writes the flag; a
            thread writes the slot to the files

A buffer slot holds one chunk and has a thread, so that up to DEPTH reads and DEPTH writes run at
the same time. The threads call no CUDA function. Copies use the slots in the order of enqueuing. A
copy waits only for copies that were enqueued earlier, so that no streams can deadlock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmq.base.dtypes import MIB
from llmq.base.errors import DiskError, MachineError, warn_once
from llmq.base.tensor import SSD, Tensor

BLOCK = SSD.align
CHUNK = 8 << 20  # bytes of one read or write, and of one stripe of a file
DEPTH = 4  # most reads that run at the same time, and most writes
# a chunk may begin and end inside a block; the last block is for writes of partial blocks
SLOT = CHUNK + 3 * BLOCK
# The buffers have space for alignment, a block of flags, the slots of reads and writes, and a slot
# for copies that the host waits for.
BUFFER_BYTES = 2 * BLOCK + (2 * DEPTH + 1) * SLOT
SLOW = 5.0  # a read or write of more seconds causes a warning
NAP = (2e-5, 1e-3)  # first and longest pause, in seconds, between two reads of a flag


class Files:
    """A range of bytes, striped over an unnamed file in each directory. All bytes are zero until
    written."""

    def __init__(self, folders: Sequence[Path], nbytes: int, buffers: np.ndarray):
        """nbytes: size of the range in bytes. buffers: uint8 (BUFFER_BYTES,), in pinned memory if a
        GPU copies. Raises DiskError if a directory has too little space."""
        each = -(-nbytes // (CHUNK * len(folders))) * CHUNK
        self._untouched = True
        self._files: list[tuple[Path, Any]] = []
        start = -buffers.ctypes.data % BLOCK
        self.flags = buffers[start : start + 4 * 2 * DEPTH].view(np.uint32)
        self.flags.fill(0)
        places = range(start + BLOCK, start + BLOCK + (2 * DEPTH + 1) * SLOT, SLOT)
        self.slots = [buffers[place : place + SLOT] for place in places]
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
                self._files.append((folder, file))
                os.posix_fallocate(file.fileno(), 0, each)
            except OSError as error:
                self.close()
                raise DiskError(
                    f"--offload-dir '{folder}': {each / 2**30:.1f} GiB of scratch files cannot be "
                    f"had ({error.strerror}); make room, or give another directory"
                ) from error
            with contextlib.suppress(OSError):  # some file systems, such as tmpfs, refuse O_DIRECT
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)

    def _move(self, call: Callable[..., int], start: int, data: np.ndarray) -> None:
        """Read or write whole blocks from byte `start` on. call: os.preadv or os.pwritev. Raises
        MachineError if the disk fails."""
        while data.size:
            stripe, inside = divmod(start, CHUNK)
            row, which = divmod(stripe, len(self._files))
            folder, file = self._files[which]
            piece, begin = data[: CHUNK - inside], time.monotonic()
            try:
                if call(file.fileno(), [piece], row * CHUNK + inside) != piece.size:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                verb = "read" if call is os.preadv else "written"
                raise MachineError(
                    f"--offload-dir '{folder}': the scratch file cannot be {verb} "
                    f"({error.strerror}); checkpoints are whole: see to the disk, and --continue"
                ) from error
            if (seconds := time.monotonic() - begin) > SLOW:
                warn_once(
                    f"--offload-dir '{folder}': the disk is slow, {piece.size / MIB:.0f} MiB took "
                    f"{seconds:.0f} s: see what else uses it, and whether it is worn out"
                )
            start, data = start + piece.size, data[piece.size :]

    def read(self, start: int, nbytes: int, slot: np.ndarray) -> np.ndarray:
        """Read at most CHUNK bytes into a slot; return the bytes as a view of the slot."""
        first, stop = start // BLOCK * BLOCK, -(-(start + nbytes) // BLOCK) * BLOCK
        self._move(os.preadv, first, slot[: stop - first])
        return slot[start - first : start - first + nbytes]

    def write(self, start: int, nbytes: int, slot: np.ndarray) -> None:
        """Write at most CHUNK bytes, which begin at byte start % BLOCK of a slot. The other bytes
        of a partly written block keep their values."""
        self._untouched = False
        first, stop = start // BLOCK * BLOCK, -(-(start + nbytes) // BLOCK) * BLOCK
        head, tail = start - first, stop - start - nbytes
        blocks, spare = slot[: stop - first], slot[-BLOCK:]
        if head:
            self._move(os.preadv, first, spare)
            blocks[:head] = spare[:head]
        if tail:
            self._move(os.preadv, stop - BLOCK, spare)
            blocks[-tail:] = spare[-tail:]
        self._move(os.pwritev, first, blocks)

    # -- synchronous copies --

    def load(self, target: np.ndarray, start: int) -> None:
        """Fill `target`, uint8 (n,), with the bytes from `start` on."""
        for at in range(0, target.size, CHUNK):
            part = target[at : at + CHUNK]
            part[:] = self.read(start + at, part.size, self.slots[-1])

    def save(self, start: int, source: np.ndarray) -> None:
        """Write `source`, uint8 (n,), from byte `start` on."""
        for at in range(0, source.size, CHUNK):
            part, inside = source[at : at + CHUNK], (start + at) % BLOCK
            self.slots[-1][inside : inside + part.size] = part
            self.write(start + at, part.size, self.slots[-1])

    def zero(self, start: int, nbytes: int) -> None:
        """Write `nbytes` zeros from byte `start` on. Files that were never written are zero
        already, and are not written."""
        for at in range(0, 0 if self._untouched else nbytes, CHUNK):
            self.save(start + at, np.zeros(min(CHUNK, nbytes - at), np.uint8))

    def close(self) -> None:
        for _, file in self._files:
            file.close()


class Stream(Protocol):
    """The operations of a GPU's current stream on addresses. CudaDevice implements these
    methods."""

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None: ...

    def wait_word(self, address: int, value: int) -> None:
        """Make the stream wait until the 32-bit word at the address has reached the value, modulo
        2**32."""

    def write_word(self, address: int, value: int) -> None:
        """Enqueue a write of the 32-bit word; whoever reads the value also sees all earlier
        copies."""


class _Chunk(NamedTuple):
    """One read or write of a slot by the slot's thread. turn: flag value at which the thread may
    begin. before: events of earlier reads and writes of the same blocks, which must come first.
    done: event that is set when the chunk has been read or written. done: set when the files have
    been read or written."""

    start: int
    nbytes: int
    turn: int
    before: list[threading.Event]
    done: threading.Event


class Traffic:
    """Copies between a GPU and scratch files; the methods only enqueue. A slot's flag is a counter:
    2 n if the slot waits to be filled for the n-th time, 2 n + 1 once it is full. moved: number of
    chunks that were enqueued. After an error threads move no data but still advance the flags, so
    that streams go on; `check` raises the error."""

    def __init__(self, files: Files, buffers: Tensor, stream: Stream):
        """buffers: the memory of `files` as a tensor. stream: the object that enqueues the GPU's
        operations."""
        self.files, self._stream, self._buffers = files, stream, buffers
        self.moved = 0
        self._error: BaseException | None = None
        self._closed = False
        self._turns = [0] * 2 * DEPTH
        self._used = {False: 0, True: 0}  # numbers of slots used by loads and by stores
        # Each entry has the bytes [start, stop) of whole blocks, the event that ends the access,
        # and True for a store.
        self._under_way: deque[tuple[int, int, threading.Event, bool]] = deque()
        self._chunks: list[queue.SimpleQueue[_Chunk | None]] = []
        self._threads = []
        for index in range(2 * DEPTH):
            self._chunks.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._serve, args=(index,), name="ssd", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the error of a thread, if a thread has failed."""
        if self._error is not None:
            raise self._error

    def load(self, target: int, start: int, nbytes: int) -> None:
        """Copy `nbytes` bytes of the files, from byte `start` on, to the address `target`."""
        self._enqueue(target, start, nbytes, stores=False)

    def store(self, start: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes at the address `source` to the files."""
        self._enqueue(source, start, nbytes, stores=True)

    def _address(self, data: np.ndarray) -> int:
        """Return the address that the GPU uses for a view of the buffers."""
        return self._buffers.ptr + data.ctypes.data - self._buffers.numpy().ctypes.data

    def _enqueue(self, address: int, start: int, nbytes: int, *, stores: bool) -> None:
        self.check()
        stream, flags = self._stream, self._address(self.files.flags)
        for at in range(0, nbytes, CHUNK):
            size, place = min(CHUNK, nbytes - at), start + at
            index = DEPTH * stores + self._used[stores] % DEPTH
            self._used[stores] += 1
            self.moved += 1
            turn, flag = 2 * self._turns[index], flags + 4 * index
            self._turns[index] += 1
            inside = self._address(self.files.slots[index]) + place % BLOCK
            self._chunks[index].put(self._chunk(place, size, turn, stores=stores))
            stream.wait_word(flag, _word(turn if stores else turn + 1))
            both = (inside, address + at) if stores else (address + at, inside)
            stream.copy_bytes(*both, size)
            stream.write_word(flag, _word(turn + 1 if stores else turn + 2))

    def _chunk(self, start: int, nbytes: int, turn: int, *, stores: bool) -> _Chunk:
        while self._under_way and self._under_way[0][2].is_set():
            self._under_way.popleft()
        first, stop = start // BLOCK * BLOCK, -(-(start + nbytes) // BLOCK) * BLOCK
        before = [
            done
            for low, high, done, stored in self._under_way
            if low < stop and first < high and (stores or stored)
        ]
        done = threading.Event()
        self._under_way.append((first, stop, done, stores))
        return _Chunk(start, nbytes, turn, before, done)

    def _serve(self, index: int) -> None:
        stores, slot = index >= DEPTH, self.files.slots[index]
        move = self.files.write if stores else self.files.read
        while (chunk := self._chunks[index].get()) is not None:
            for done in chunk.before:
                done.wait()
            if not self._reaches(index, chunk.turn + stores):
                return
            try:
                if self._error is None:
                    move(chunk.start, chunk.nbytes, slot)
            except Exception as error:  # `check` raises the error in the rank's thread
                self._error = error
            self.files.flags[index] = _word(chunk.turn + 1 + stores)
            chunk.done.set()

    def _reaches(self, index: int, value: int) -> bool:
        """Wait until a slot's flag has reached a value; return False if `close` was called."""
        nap, longest = NAP
        while _word(int(self.files.flags[index]) - value) >= 1 << 31:
            if self._closed:
                return False
            time.sleep(nap)
            nap = min(2 * nap, longest)
        return True

    def drain(self) -> None:
        """Wait until all stores are in the files; the streams must be done."""
        for _, _, done, _ in self._under_way:
            done.wait()
        self.check()

    def close(self) -> None:
        """End the threads and close the files; the streams must be done or stopped."""
        self._closed = True
        for chunks in self._chunks:
            chunks.put(None)
        for thread in self._threads:
            thread.join()
        self.files.close()


def _word(value: int) -> int:
    return value & 0xFFFFFFFF
