"""Passes of a model over texts that a `Generator` continues, and the inputs of these passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from llmq.base.dtypes import F32, I32, I64, DType
from llmq.base.tensor import Tensor
from llmq.model.activations import Cache
from llmq.model.model import Model
from llmq.ops.loss import sample
from llmq.runtime.device import Device

REQUEST_FIELDS = {
    "temperature": F32,
    "top_k": I32,
    "top_p": F32,
    "min_p": F32,
    "repetition": F32,
    "seed": I64,
    "position": I32,
}


class Buffer:
    """Tensors that a single copy moves from host to device. tensors, arrays: the device tensors and
    the host arrays, by name."""

    def __init__(self, dev: Device, name: str, parts: Mapping[str, tuple[tuple[int, ...], DType]]):
        self._dev = dev
        sizes = [prod(shape) * dtype.itemsize // 4 for shape, dtype in parts.values()]
        words = [-(-size // 4) * 4 for size in sizes]  # tensors begin at multiples of 16 bytes
        self._words = dev.alloc(name, (sum(words),), I32, "Activations")
        self._host = np.zeros(sum(words), np.int32)
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        start = 0
        for (key, (shape, dtype)), size, room in zip(parts.items(), sizes, words, strict=True):
            stop = start + size
            self.tensors[key] = self._words.rows(start, stop).view_as(dtype, shape)
            self.arrays[key] = self._host[start:stop].view(dtype.numpy).reshape(shape)
            start += room

    def rows(self, count: int) -> dict[str, Tensor]:
        """Return the first `count` rows of each tensor, by name."""
        return {name: tensor.rows(0, count) for name, tensor in self.tensors.items()}

    def clear(self) -> None:
        self._host[:] = 0

    def upload(self) -> None:
        self._dev.send(self._words, self._host)


class Chosen:
    """The last chosen token of each slot, which the next pass reads, and the token's
    log-probability. Copies to the host may be pending for two passes at a time."""

    def __init__(self, dev: Device, slots: int):
        slots = -(-slots // 4) * 4  # a multiple of 16 bytes
        self._dev, self._slots, self._turn = dev, slots, 0
        both = dev.alloc("chosen", (2, slots), I32, "Activations")
        self._words, self.tokens = both.view(2 * slots), both.rows(0, 1).view(slots)
        self.logprobs = both.rows(1, 2).view(slots).view_as(F32)
        self._host = [dev.host_words(2 * slots) for _ in range(2)]
        self._arrived = [dev.event() for _ in range(2)]

    def put(self, slots: Sequence[int], ids: Sequence[int]) -> None:
        """Write these tokens to these slots, for the next pass to read."""
        tokens = np.zeros(self._slots, np.int32)
        tokens[list(slots)] = ids
        self._dev.send(self.tokens, tokens)

    def send(self) -> int:
        """Enqueue the copy of the last pass's tokens to the host; return the turn that `read`
        needs."""
        self._turn = turn = 1 - self._turn
        self._dev.receive(self._host[turn], self._words)
        self._dev.record(self._arrived[turn])
        return turn

    def read(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities of all slots, for the pass that was sent with this
        turn; the call waits for the copy."""
        self._arrived[turn].synchronize()
        words = self._host[turn]
        return words[: self._slots], words[self._slots :].view(np.float32)


class PassInputs(Buffer):
    """The inputs of passes over at most B texts with T tokens each. blocks: most cache blocks of a
    text. more: dtypes of further inputs (B,). ahead: True if two copies may be pending, and tokens
    are read from Chosen. rings: True if layers with a window have a separate block table."""

    def __init__(
        self,
        dev: Device,
        B: int,
        T: int,
        blocks: int,
        more: Mapping[str, DType],
        *,
        ahead: bool = False,
        rings: bool = False,
    ):
        parts = {
            "tokens": ((B, T), I32),
            "first_key": ((B, T), I32),  # minus the number of tokens before the pass
            "table": ((B, blocks), I32),
            "lengths": ((B,), I32),
            "new": ((B,), I32),
        }
        if ahead:
            del parts["tokens"]
        if rings:
            parts["window_table"] = parts["table"]
        super().__init__(dev, f"inputs.{B}x{T}", parts | {n: ((B,), t) for n, t in more.items()})
        self._turns = [dev.host_words(self._host.size) for _ in range(2 * ahead)]

    def upload(self) -> None:
        if not self._turns:
            super().upload()
            return
        self._turns.reverse()
        self._turns[0][:] = self._host
        self._dev.send(self._words, self._turns[0])

    def put(self, row: int, ids: Sequence[int], start: int, blocks: list[int]) -> None:
        """Write a text's tokens, which begin at position `start` of the text, to a row of the next
        pass."""
        arrays, count = self.arrays, len(ids)
        arrays["tokens"][row, :count] = ids
        arrays["first_key"][row, :count] = -start
        arrays["table"][row, : len(blocks)] = blocks
        arrays["lengths"][row], arrays["new"][row] = start, count


class Pass:
    """A pass over `texts` texts with `tokens` tokens each: the inputs, and a Model of this
    shape."""

    def __init__(self, inputs: PassInputs, model: Model, cache: Cache, texts: int, tokens: int):
        self.inputs, self.model, self.texts, self.tokens = inputs, model, texts, tokens
        self._cache = cache

    def forward(self, stale: bool) -> None:
        self.model.dev.zero(self._cache.arrived)
        self.model.forward(stale=stale, keep=False)

    def decode(self, stale: bool, chosen: Chosen, seen: Tensor, outputs: int) -> None:
        """Enqueue the choice of the next token of each text. seen: I32 (texts or more, words), a
        bit for each token id that a text contains. outputs: number of logits per row."""
        self.forward(stale)
        tensors, dev = self.inputs.rows(self.texts), self.model.dev
        requests = sample.Requests(**{name: tensors[name] for name in REQUEST_FIELDS})
        with self.model.logits() as logits:
            sample.choose(
                dev, *(x.rows(0, self.texts) for x in (chosen.tokens, chosen.logprobs)), logits,
                requests, seen.rows(0, self.texts), vocab_size=outputs,
                softcap=self.model.head.softcap,
            )  # fmt: skip
