"""A kind of memory that llmq does not have: a file, which no kernel reaches.

It takes the place of write-combined memory, so that --write-combined chooses it. NEEDS says what
such a tier needs beside this file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llmq.base import tensor
from llmq.base.tensor import Tier

NEEDS = ("llmq/base/tensor.py", "llmq/options/groups/memory.py", "llmq/state/placement.py")
"""The table of tiers; the option that chooses it, and the line that goes by it."""


@dataclass(frozen=True, slots=True)
class Filed(Tier):
    """The bytes are those of a temporary file. files: of all devices that were opened."""

    files: list[Any] = field(default_factory=list, compare=False)

    def memory(self, nbytes: int) -> np.ndarray:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        self.files.append(file)
        return np.memmap(file, np.uint8, "w+", shape=(nbytes,))


def register(monkeypatch: pytest.MonkeyPatch) -> Filed:
    """Make it a tier, as a line of the table would."""
    made = Filed("write_combined", direct=False, in_ram=False)
    monkeypatch.setitem(tensor.TIERS, made.name, made)
    return made
