"""The door to the terminal: whatever is printed, no text of others steers it.

Colours of ours and the moves of a live view go past it by `Door.own`.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but \n and \t, of which some begin commands, and those that turn the direction
# of what follows.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with U+FFFD for what would steer a terminal."""
    return _STEERING.sub("\ufffd", text)


class Door(io.TextIOWrapper):
    """A standard stream that lets only printable text through, and never fails to encode text.
    lost: the error of a failed write, else None."""

    lost: OSError | None = None

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            newline="\n",
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=True,
        )
        self.isatty = stream.isatty

    def write(self, text: str) -> int:
        return self.own(printable(text))

    def own(self, text: str) -> int:
        """Write a text of ours, with what steers the terminal."""
        try:
            return super().write(text)
        except OSError as error:
            self.lost = error
            raise


@contextmanager
def doors() -> Iterator[None]:
    """Standard output and standard error are doors inside the block."""
    before = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "buffer") and not isinstance(stream, Door):
            stream.flush()
            before[name] = stream
            setattr(sys, name, Door(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            door = getattr(sys, name)
            setattr(sys, name, stream)
            with suppress(OSError, ValueError):  # whoever read it has gone
                door.detach()


def print_own(text: str, end: str = "\n") -> None:
    """Print a text of ours to standard output, with what steers the terminal."""
    getattr(sys.stdout, "own", sys.stdout.write)(text + end)
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Print a part of a model's text: as it is where no terminal reads it."""
    print_own(printable(text) if sys.stdout.isatty() else text, end="")


class _PastTheDoor:
    """A door as the file of a console that has looked at the texts itself."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.write = door.own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


def printable_console(*, stderr: bool = False) -> Console:
    """rich's console on a standard stream, which makes every text printable that it draws."""
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    stream = sys.stderr if stderr else sys.stdout
    file = _PastTheDoor(stream) if isinstance(stream, Door) else None
    return Printable(file=file, stderr=stderr)
