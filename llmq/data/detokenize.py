"""Text of token ids that come one after another, as if all had been decoded at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmq.data.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # stands for a character while some of its bytes are missing
CONTEXT = 16  # new ids are decoded together with so many before them
WINDOW = 64  # about so many ids at most are decoded again with each new one


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of new ids behind those of a prompt.

    They are decoded together: some decoders (Llama 2's) strip the space that a text begins with.
    """
    before = tokenizer.decode(prompt) if prompt else ""
    text = tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


class TextStream:
    """Gives whole characters as soon as nothing can change them any more.

    Together they are `continuation` of all ids. U+FFFD at the end is held back, because it may be
    the beginning of a character. So is the text of tokens that are single bytes, because some
    decoders make one character of several, or replace them all.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._ids: list[int] = []
        self._said = ""
        # Ids before the window, the number of its first id, and the characters said before it.
        self._context, self._start, self._before = prompt, 0, 0

    def add(self, token: int) -> str:
        """The text that is certain by one more id; often empty."""
        self._ids.append(token)
        if self._tokenizer.is_byte(token):
            return ""
        text = continuation(self._tokenizer, self._context, self._ids[self._start :])
        settled = text.rstrip(INCOMPLETE)
        piece = settled[len(self._said) - self._before :]
        self._said += piece
        if len(self._ids) - self._start > WINDOW and settled == text:
            self._context, self._start = self._ids[-CONTEXT:], len(self._ids)
            self._before = len(self._said)
        return piece

    def end(self) -> str:
        """The text that was held back, decoded with nothing behind it."""
        whole = continuation(self._tokenizer, self._prompt, self._ids)
        return whole[len(self._said) :]


def streamed(tokenizer: Tokenizer, prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """The text of new ids behind those of a prompt, piece by piece, none of them empty."""
    stream = TextStream(tokenizer, prompt)
    for token in new:
        if piece := stream.add(token):
            yield piece
    if rest := stream.end():
        yield rest
