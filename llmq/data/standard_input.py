"""Standard input as an input among files: its content is kept in a file while it is read.

What it holds has to be known from its size to its end before the first token is written: whether
these are records, where its part for evaluation begins, whether it is what an interrupted run read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from llmq.base.errors import DataError
from llmq.base.files import disk_errors
from llmq.base.unpack import READ_BYTES, packing_of

NAME = "-"
_SPOOLED = re.compile(r"standard-input-[0-9a-f]{16}(\.gz|\.zst)?")
Result = TypeVar("Result")


def is_standard_input(path: Path) -> bool:
    """Whether a file is what `reading_standard_input` has written."""
    return _SPOOLED.fullmatch(path.name) is not None


def reading_standard_input(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function of inputs and of the folder `out`, so that `-` is standard input.

    It becomes a file in `out`, whose name, size and time follow from its content, so that a run
    that goes on knows it again. The file is gone when the function has returned.
    """

    @functools.wraps(function)
    def run(inputs: Sequence[str], *, out: str | Path, **options: Any) -> Result:
        if NAME not in inputs:
            return function(inputs, out=out, **options)
        if [*inputs].count(NAME) > 1:
            raise DataError(f"'{NAME}' is given twice: standard input can be read once")
        made = not Path(out).exists()
        spooled = _spool(Path(out))
        try:
            inputs = [str(spooled) if name == NAME else name for name in inputs]
            return function(inputs, out=out, **options)
        finally:
            spooled.unlink(missing_ok=True)
            with suppress(OSError):  # only if there is nothing else in it
                made and os.rmdir(out)

    return run


def _spool(folder: Path) -> Path:
    digest = hashlib.blake2b(digest_size=8)
    part = folder / f".standard-input-{os.getpid()}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            begin = b""
            with open(part, "wb") as file:
                while block := sys.stdin.buffer.read(READ_BYTES):
                    begin = begin or block
                    digest.update(block)
                    file.write(block)
            os.utime(part, ns=(0, 0))
            name = f"standard-input-{digest.hexdigest()}{packing_of(begin)}"
            return part.rename(folder / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
