"""Passes of a model over texts that a `Generator` continues, and their inputs."""

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
    """Words that one copy moves between host and device, and their parts by name."""

    def __init__(self, dev: Device, name: str, parts: Mapping[str, tuple[tuple[int, ...], DType]]):
        self._dev = dev
        sizes = [prod(shape) * dtype.itemsize // 4 for shape, dtype in parts.values()]
        words = [-(-size // 4) * 4 for size in sizes]  # parts begin at multiples of 16 bytes
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
        """The first rows of each part."""
        return {name: tensor.rows(0, count) for name, tensor in self.tensors.items()}

    def clear(self) -> None:
        self._host[:] = 0

    def upload(self) -> None:
        self._dev.send(self._words, self._host)

    def download(self) -> None:
        self._dev.receive(self._host, self._words)


class PassInputs(Buffer):
    """The inputs of passes over B texts, or fewer, with T tokens each. more: further parts."""

    def __init__(self, dev: Device, B: int, T: int, blocks: int, more: Mapping[str, DType]):
        parts = {
            "tokens": ((B, T), I32),
            "first_key": ((B, T), I32),  # - (tokens before): positions count from there
            "table": ((B, blocks), I32),
            "lengths": ((B,), I32),
            "new": ((B,), I32),
        }
        super().__init__(dev, f"inputs.{B}x{T}", parts | {n: ((B,), t) for n, t in more.items()})

    def put(self, row: int, ids: Sequence[int], start: int, blocks: list[int]) -> None:
        """Put tokens of a text, from its position `start` on, in a row of a pass."""
        arrays, count = self.arrays, len(ids)
        arrays["tokens"][row, :count] = ids
        arrays["first_key"][row, :count] = -start
        arrays["table"][row, : len(blocks)] = blocks
        arrays["lengths"][row], arrays["new"][row] = start, count


class Pass:
    """Passes over texts with so many tokens each: their inputs, and the model of this shape."""

    def __init__(self, inputs: PassInputs, model: Model, cache: Cache, texts: int, tokens: int):
        self.inputs, self.model, self.texts, self.tokens = inputs, model, texts, tokens
        self._cache = cache

    def forward(self, stale: bool) -> None:
        self.model.dev.zero(self._cache.arrived)
        self.model.forward(stale=stale, keep=False)

    def decode(self, stale: bool, chosen: Buffer, seen: Tensor, outputs: int) -> None:
        """Choose the next token of each text. chosen, seen: of at least `texts` texts. outputs:
        logits of a row."""
        self.forward(stale)
        tensors, dev = self.inputs.rows(self.texts), self.model.dev
        requests = sample.Requests(**{name: tensors[name] for name in REQUEST_FIELDS})
        with self.model.logits() as logits:
            sample.choose(
                dev, *chosen.rows(self.texts).values(), logits, requests, seen.rows(0, self.texts),
                vocab_size=outputs, softcap=self.model.head.softcap,
            )  # fmt: skip
