"""Text of token ids that come one after another, as if all had been decoded at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmq.data.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a character is decoded to while some of its bytes are missing
CONTEXT = 16  # ids before the new ones with which these are decoded
WINDOW = 64  # ids that are decoded again with each new one, at most about


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of new ids behind those of a prompt.

    They are decoded together: some decoders (Llama 2's) strip the space that a text begins with.
    """
    before = tokenizer.decode(prompt) if prompt else ""
    text = tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


class TextStream:
    """Whole characters as soon as nothing can change them any more.

    Together they are `continuation` of all ids. What is held back: U+FFFD at the end, which may be
    the beginning of a character, and the text of tokens that are single bytes, of which some
    decoders make one character or, where they are none, replace them all.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._ids: list[int] = []
        self._said = ""
        # The ids before the window, and how much had been said before it.
        self._context, self._start, self._before = prompt, 0, 0

    def add(self, token: int) -> str:
        """What the text has gained for certain by one more id; often nothing."""
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
        """The rest: what was held back, as it is decoded with nothing behind it."""
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
