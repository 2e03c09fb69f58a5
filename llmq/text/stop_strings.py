"""Stop strings: the end of a text at a string that the model may write in several pieces."""

from collections.abc import Iterable, Iterator, Sequence


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the text of `pieces` up to the first of the stop strings, which is left out. Characters
    that may begin a stop string are held back until the next pieces decide. Takes no piece behind
    the stop string."""
    held = ""
    for piece in pieces:
        held += piece
        ends = [end for stop in stops if (end := held.find(stop)) >= 0]
        if ends:
            if text := held[: min(ends)]:
                yield text
            return
        ready = len(held) - max((_begun(held, stop) for stop in stops), default=0)
        if ready:
            yield held[:ready]
        held = held[ready:]
    if held:
        yield held


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is also a beginning of the stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
