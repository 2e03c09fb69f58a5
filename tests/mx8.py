"""A format that llmq does not have: fp8 codes of frozen matrices, 32 of which share a power of two.

It is the OCP's MXFP8 with E4M3 elements. NEEDS says what such a format needs beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

import numpy as np
import pytest

from llmq.base.dtypes import E4M3, U8
from llmq.base.tensor import Tensor
from llmq.formats import STORAGE
from llmq.formats.storage import Encoder, Frozen, Storage, StorageLayout
from llmq.runtime.kernel import Kernel

NEEDS = ("llmq/formats/__init__.py", "llmq/base/dtypes.py", "llmq/options/option_types.py")
"""The table of storages, the name of its bytes, QUANTIZED; kernels with their references."""

BLOCK = 32
BIAS, LARGEST = 127, 8  # of exponents; of E4M3's
ENCODE = Kernel(
    "quantize/mx8.cu",
    "mx8_encode",
    args="out e4m3[*codes] codes, out u8[*exponents] exponents, T[*x] x, i64 n",
)
DECODE = Kernel(
    "quantize/mx8.cu",
    "mx8_decode",
    args="out T[*out] out, e4m3[*codes] codes, u8[*exponents] exponents, i64 n",
)


def mx8_encode(codes: np.ndarray, exponents: np.ndarray, x: np.ndarray, n: int) -> None:
    """The reference of the kernel."""
    blocks = x.astype(np.float32).reshape(-1, BLOCK)
    _, exponent = np.frexp(np.abs(blocks).max(axis=1))
    exponents[...] = np.clip(exponent - 1 - LARGEST + BIAS, 0, 254)
    scaled = blocks / np.exp2(exponents.astype(np.float32) - BIAS)[:, None]
    codes[...] = np.clip(scaled, -448, 448).astype(codes.dtype).reshape(-1)


def mx8_decode(out: np.ndarray, codes: np.ndarray, exponents: np.ndarray, n: int) -> None:
    """The reference of the kernel."""
    scale = np.exp2(exponents.astype(np.float32) - BIAS)
    out[...] = (codes.astype(np.float32).reshape(-1, BLOCK) * scale[:, None]).reshape(out.shape)


class Mx8Storage(Storage):
    """Frozen matrices only: products take what was decoded."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        return {"codes": ((matrix.size,), E4M3), "exponents": ((matrix.size // BLOCK,), U8)}

    def encode(self, made: Encoder) -> None:
        for start, count in made.pieces(made.matrix.size, BLOCK):
            codes, blocks = made.codes.view_as(E4M3).rows(0, count), count // BLOCK
            exponents = made.scales.rows(0, blocks)
            exponents = Tensor("exponents", (blocks,), U8, exponents.storage, exponents.offset)
            self.dev.launch(ENCODE, 1, 128, (codes, exponents, made.read(start, count), count))
            made.put("codes", codes, start)
            made.put("exponents", exponents, start // BLOCK)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        flat = out.view(matrix.size)
        self.dev.launch(DECODE, 1, 128, (flat, kept["codes"], kept["exponents"], matrix.size))

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        codes, exponents = np.empty(x.size, E4M3.numpy), np.empty(x.size // BLOCK, np.uint8)
        mx8_encode(codes, exponents, x, x.size)
        out = np.empty(x.size, np.float32)
        mx8_decode(out, codes, exponents, x.size)
        return out


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it what --base-dtype nf4 means, as a line of the table would."""
    reference = ModuleType("llmq.ref.quantize.mx8")
    reference.mx8_encode, reference.mx8_decode = mx8_encode, mx8_decode
    monkeypatch.setitem(sys.modules, reference.__name__, reference)
    monkeypatch.setitem(STORAGE, "nf4", Mx8Storage)
