"""Terminal output: every printed text is made safe, so that foreign text cannot steer the terminal.

llmq's own colours and the cursor moves of a live view bypass the filter by `Door.own`.
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

# These are control characters except \n and \t, some of which begin terminal commands, and
# characters that change the direction of text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with U+FFFD for each character that steers a terminal."""
    return _STEERING.sub("\ufffd", text)


class Door(io.TextIOWrapper):
    """A standard stream that writes only printable text, and never raises for text that its
    encoding lacks. lost: the error of a failed write; None if no write has failed."""

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
        """Write text of llmq, which may contain terminal commands."""
        try:
            return super().write(text)
        except OSError as error:
            self.lost = error
            raise


@contextmanager
def doors() -> Iterator[None]:
    """Inside the block, replace standard output and standard error by `Door` objects."""
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
            with suppress(OSError, ValueError):  # the program that reads the pipe has ended
                door.detach()


def print_own(text: str, end: str = "\n") -> None:
    """Print text of llmq, which may contain terminal commands, to standard output."""
    getattr(sys.stdout, "own", sys.stdout.write)(text + end)
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Print a part of a model's text; the text is unchanged if standard output is no terminal."""
    print_own(printable(text) if sys.stdout.isatty() else text, end="")


class _PastTheDoor:
    """A file for rich's console; its writes bypass `Door` because rich's texts are already
    printable."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.write = door.own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


def printable_console(*, stderr: bool = False) -> Console:
    """Return rich's console on a standard stream; the console makes every drawn text printable."""
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
