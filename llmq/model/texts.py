"""Texts that a `Generator` continues: what is asked, what comes, and what it keeps of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """A text to be continued, and how.

    prompt: ids, at least one. max_new_tokens: at most so many follow. temperature: 0: always the
    likeliest token. top_k: only the k likeliest; 0: all. top_p: only the likeliest that have
    together this probability. min_p: only those with at least this part of the likeliest one's.
    repetition: logits of tokens that the text has are divided by it if positive, else multiplied.
    seed: decides the choice, with the position of the token and its logits. stop: ids that end the
    text.
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
    """The continuation of a text. ids: the new tokens, with the one of `stop` that ended it.
    logprobs: F32, of each of them under the model, whatever temperature and limits chose it.
    finish: "stop" or "length"."""

    ids: list[int]
    logprobs: np.ndarray
    finish: str

    @property
    def shown(self) -> list[int]:
        """The new tokens without the one that ended the text."""
        return self.ids[:-1] if self.finish == "stop" else self.ids


class NewToken(NamedTuple):
    """The next token of a text. index: of its request. finish: as of Completion; None: the text
    goes on."""

    index: int
    id: int
    logprob: float
    finish: str | None


# ------------------------------------------------------------------------------------------------
# What a generator keeps of them


@dataclass(slots=True, eq=False)
class Text:
    """A request and what it has so far. ids: with its prompt. blocks: the numbers of those that
    hold its tokens. slot: its row of states; -1 while it waits."""

    index: int
    request: Request
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    slot: int = -1

    def ends(self, length: int, positions: int) -> bool:
        """Whether it ends with so many tokens, prompt included, whatever they are."""
        return length - len(self.request.prompt) >= self.request.max_new_tokens or (
            length >= positions
        )

    def finish(self, new: int, positions: int) -> str | None:
        """Its `finish` behind a new token, which `ids` has already; None: it goes on."""
        if new in self.request.stop:
            return "stop"
        return "length" if self.ends(len(self.ids), positions) else None


class Prompt(NamedTuple):
    """A prompt whose tokens but the last are computed. blocks: numbers of the blocks with keys and
    values of these tokens. ring: its number among prompts with rings. The latest prompt's states
    lie in the row behind those of texts."""

    ids: list[int]
    blocks: list[int]
    ring: int


class FreeBlocks:
    """The blocks that are free, and the number of users of each other one."""

    def __init__(self, count: int):
        self._free = list(range(count))[::-1]
        self._users = [0] * count

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many blocks, which must be free."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more user of each of them."""
        for block in blocks:
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
