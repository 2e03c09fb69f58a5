"""Scratch files: the memory of the tier "ssd", which only copies reach, through pinned buffers.

The files have no names: the system frees them when the process ends, however the process ends.
Reads and writes go past the page cache (O_DIRECT) where the file system can.

    load    a thread reads a chunk into a slot; the current stream waits for the slot's flag, copies
            the slot to the GPU, and writes the flag
    store   the current stream waits for the slot's flag, copies to the slot, and writes the flag; a
            thread writes the slot to the files

Each slot has a thread, so that DEPTH reads and DEPTH writes are under way at a time. Threads call
no CUDA. Slots are used in the order in which copies are enqueued. A copy waits only for copies that
were enqueued before, so that no wait is a circle, whatever the streams.
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
CHUNK = 8 << 20  # bytes of one read or write, and of one stripe
DEPTH = 4  # number of reads under way at a time, and of writes
SLOT = CHUNK + 3 * BLOCK  # a chunk may begin and end inside a block; the last block is spare
# Room for alignment, one block of flags, the slots of reads and of writes, and a slot for copies
# that the host waits for.
BUFFER_BYTES = 2 * BLOCK + (2 * DEPTH + 1) * SLOT
SLOW = 5.0  # a read or write of more seconds causes a warning
NAP = (2e-5, 1e-3)  # seconds between two looks at a flag, the first and the longest


class Files:
    """A range of bytes, striped over one unnamed file in each directory. All bytes are zero at
    first."""

    def __init__(self, folders: Sequence[Path], nbytes: int, buffers: np.ndarray):
        """nbytes: size of the range. buffers: uint8 (BUFFER_BYTES,), pinned if a GPU copies.
        DiskError if a directory cannot hold its part of nbytes."""
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
            with contextlib.suppress(OSError):  # some file systems, such as tmpfs, refuse
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)

    def _move(self, call: Callable[..., int], start: int, data: np.ndarray) -> None:
        """Read or write whole blocks from byte `start` on. call: os.preadv or os.pwritev.
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
        """Read at most CHUNK bytes into a slot; return the part of the slot that has them."""
        first, stop = start // BLOCK * BLOCK, -(-(start + nbytes) // BLOCK) * BLOCK
        self._move(os.preadv, first, slot[: stop - first])
        return slot[start - first : start - first + nbytes]

    def write(self, start: int, nbytes: int, slot: np.ndarray) -> None:
        """Write at most CHUNK bytes, which lie in a slot behind start % BLOCK bytes. Blocks that
        are written in part keep the rest."""
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

    # -- copies that the host waits for --

    def load(self, target: np.ndarray, start: int) -> None:
        """Fill uint8 (n,) with the bytes from `start` on."""
        for at in range(0, target.size, CHUNK):
            part = target[at : at + CHUNK]
            part[:] = self.read(start + at, part.size, self.slots[-1])

    def save(self, start: int, source: np.ndarray) -> None:
        """Write uint8 (n,) from byte `start` on."""
        for at in range(0, source.size, CHUNK):
            part, inside = source[at : at + CHUNK], (start + at) % BLOCK
            self.slots[-1][inside : inside + part.size] = part
            self.write(start + at, part.size, self.slots[-1])

    def zero(self, start: int, nbytes: int) -> None:
        """Write zeros. Does nothing while the files are untouched, since they are zero."""
        for at in range(0, 0 if self._untouched else nbytes, CHUNK):
            self.save(start + at, np.zeros(min(CHUNK, nbytes - at), np.uint8))

    def close(self) -> None:
        for _, file in self._files:
            file.close()


class Stream(Protocol):
    """Operations of the current stream on addresses. A CudaDevice has them."""

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None: ...

    def wait_word(self, address: int, value: int) -> None:
        """Wait until the 32-bit word at the address has reached the value, modulo 2**32."""

    def write_word(self, address: int, value: int) -> None:
        """Write the word; a reader of it also sees all earlier copies."""


class _Chunk(NamedTuple):
    """A read or write of a slot. turn: counts the uses of the slot. before: reads and writes
    of the same blocks that were enqueued earlier and must come first. done: set when the files have
    been read or written."""

    start: int
    nbytes: int
    turn: int
    before: list[threading.Event]
    done: threading.Event


class Traffic:
    """Copies between a GPU and files. The methods only enqueue. The flag of a slot counts: 2 n for
    turn n if the slot waits to be filled, 2 n + 1 if it is full. moved: number of chunks so far.
    After an error threads move nothing, and let streams go on; `check` raises the error."""

    def __init__(self, files: Files, buffers: Tensor, stream: Stream):
        """buffers: the buffers that the files use, as a tensor. stream: enqueues the GPU's
        operations."""
        self.files, self._stream, self._buffers = files, stream, buffers
        self.moved = 0
        self._error: BaseException | None = None
        self._closed = False
        self._turns = [0] * 2 * DEPTH
        self._used = {False: 0, True: 0}  # slots of loads, and of stores
        # Bytes [start, stop) of whole blocks, the event after them, and True for stores.
        self._under_way: deque[tuple[int, int, threading.Event, bool]] = deque()
        self._chunks: list[queue.SimpleQueue[_Chunk | None]] = []
        self._threads = []
        for index in range(2 * DEPTH):
            self._chunks.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._serve, args=(index,), name="ssd", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the error of a thread, if there was one."""
        if self._error is not None:
            raise self._error

    def load(self, target: int, start: int, nbytes: int) -> None:
        """Copy bytes of the files, from `start` on, to an address."""
        self._enqueue(target, start, nbytes, stores=False)

    def store(self, start: int, source: int, nbytes: int) -> None:
        """Copy bytes at an address to the files."""
        self._enqueue(source, start, nbytes, stores=True)

    def _address(self, data: np.ndarray) -> int:
        """Return the GPU's address of a part of the buffers."""
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
            except Exception as error:  # `check` raises it in the rank's thread
                self._error = error
            self.files.flags[index] = _word(chunk.turn + 1 + stores)
            chunk.done.set()

    def _reaches(self, index: int, value: int) -> bool:
        """Wait until a slot's flag has reached a value; False if the traffic was closed."""
        nap, longest = NAP
        while _word(int(self.files.flags[index]) - value) >= 1 << 31:
            if self._closed:
                return False
            time.sleep(nap)
            nap = min(2 * nap, longest)
        return True

    def drain(self) -> None:
        """Wait until all stores are in the files, after the streams are done."""
        for _, _, done, _ in self._under_way:
            done.wait()
        self.check()

    def close(self) -> None:
        """End the threads and close the files; the streams are done, or were stopped."""
        self._closed = True
        for chunks in self._chunks:
            chunks.put(None)
        for thread in self._threads:
            thread.join()
        self.files.close()


def _word(value: int) -> int:
    return value & 0xFFFFFFFF
