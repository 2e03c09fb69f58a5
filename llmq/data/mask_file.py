"""The mask bits of a token file that is being written.

They belong behind the tokens, so they wait in a file of their own, `X.mask.partial` beside
`X.bin.partial`, until there are no more tokens. One bit for each token, least significant first.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import disk_errors
from llmq.data.document_file import partial_path


def mask_path(token_file: Path) -> Path:
    """Of the masks that wait for a token file's end; `partial_path` of it is what exists."""
    return token_file.with_name(token_file.name.removesuffix(".bin") + ".mask")


class MaskWriter:
    """Appends bits; all but those of a last, unfinished byte are in the file."""

    def __init__(self, path: Path, keep: np.ndarray | int = 0) -> None:
        """keep: how many bits of the partial file to go on behind, or those bits themselves."""
        self.path = partial_path(path)
        self._rest = np.empty(0, bool)  # fewer than 8 bits
        count = keep if isinstance(keep, int) else 0
        if count and (not self.path.exists() or self.path.stat().st_size < -(-count // 8)):
            raise DataError(f"'{self.path}' is missing or too short: start again with --overwrite")
        with disk_errors(self.path):
            self._file = open(self.path, "r+b" if count else "wb")  # noqa: SIM115 (kept open)
            if count:
                self._file.seek(count // 8)
                last = np.frombuffer(self._file.read(1) * bool(count % 8), np.uint8)
                self._rest = np.unpackbits(last, bitorder="little")[: count % 8].astype(bool)
                self._file.seek(count // 8)
                self._file.truncate()
        if not isinstance(keep, int):
            self.write(keep)

    def write(self, mask: np.ndarray) -> None:
        """Append bits (n,) bool."""
        bits = np.concatenate([self._rest, mask.astype(bool)])
        whole = len(bits) // 8 * 8
        with disk_errors(self.path):
            self._file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def sync(self) -> None:
        """Force all bits to the disk."""
        with disk_errors(self.path):
            self._file.write(np.packbits(self._rest, bitorder="little").tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.seek(-(len(self._rest) > 0), os.SEEK_CUR)

    def copy_to(self, file: BinaryIO) -> None:
        """Write all bits to another file, at its place."""
        self.sync()
        with disk_errors(self.path), open(self.path, "rb") as masks:
            shutil.copyfileobj(masks, file)

    def suspend(self) -> None:
        """Leave the file as it is."""
        self._file.close()

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
