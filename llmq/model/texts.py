"""Texts that a `Generator` continues: requests, results, and the generator's record of each
text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """A text to be continued, with sampling options.

    prompt: token ids, at least one. max_new_tokens: most tokens to be added. temperature: number by
    which logits are divided; 0: choose the likeliest token. top_k: choose among the k likeliest
    tokens; 0: among all tokens. top_p: choose among the likeliest tokens that together have this
    probability. min_p: least probability of a token, as a fraction of the likeliest token's
    probability. repetition: number that divides positive logits, and multiplies negative logits, of
    tokens in the text. seed: number that, with the token's position and logits, determines the
    choice. stop: token ids that end the text.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 200
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    stop: Collection[int] = ()


class Completion(NamedTuple):
    """The continuation of a text. ids: the new tokens, including the `stop` token that ended the
    text. logprobs: F32 (new tokens,), log-probabilities in the model's distribution, at temperature
    1 and without top_k, top_p and min_p. finish: "stop" if a `stop` token ended the text, "length"
    if the text is at its longest."""

    ids: list[int]
    logprobs: np.ndarray
    finish: str

    @property
    def shown(self) -> list[int]:
        """Return the new tokens without the `stop` token that ended the text."""
        return self.ids[:-1] if self.finish == "stop" else self.ids


class NewToken(NamedTuple):
    """The next token of a text. index: index of the request. logprob: log-probability of the token,
    as in Completion. finish: "stop" or "length" if the text ends; None if the text goes on."""

    index: int
    id: int
    logprob: float
    finish: str | None


# ------------------------------------------------------------------------------------------------ A
# generator's record of its texts


@dataclass(slots=True, eq=False)
class Text:
    """A request, and the text generated so far. ids: the prompt and the new tokens. blocks: numbers
    of the cache blocks that hold the tokens. slot: the text's row of states; -1 if the text
    waits."""

    index: int
    request: Request
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    slot: int = -1

    def ends(self, length: int, positions: int) -> bool:
        """Return True if a text of this length, prompt included, has no room for more tokens."""
        return length - len(self.request.prompt) >= self.request.max_new_tokens or (
            length >= positions
        )

    def finish(self, new: int, positions: int) -> str | None:
        """Return the text's `finish` after the token `new`, the last of `ids`; None if the text
        goes on."""
        if new in self.request.stop:
            return "stop"
        return "length" if self.ends(len(self.ids), positions) else None


class Prompt(NamedTuple):
    """A prompt whose keys, values and states have been computed. ids: the tokens of the prompt
    except the last. blocks: numbers of the cache blocks with keys and values of these tokens. ring:
    number of the prompt among prompts with rings. The states of the latest prompt are in the row
    after the texts' rows."""

    ids: list[int]
    blocks: list[int]
    ring: int


class FreeBlocks:
    """The numbers of free cache blocks, and the number of users of each other block."""

    def __init__(self, count: int):
        self._free = list(range(count))[::-1]
        self._users = [0] * count

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks; so many blocks must be free."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
