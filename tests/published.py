"""The speeds that llm.q publishes: the rows of benchmarks/published.txt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parents[1] / "benchmarks" / "published.txt"
SEQ_LEN = 1024
NUMBERS = {
    "b": "batch-size",
    "a": "grad-accumulation",
    "lm": "lmhead-chunks",
    "ab": "attn-bwd-chunks",
}
SWITCHES = {
    "om": "offload-opt-m",
    "ov": "offload-opt-v",
    "oM": "offload-master",
    "oR": "offload-residual",
    "oQ": "offload-quants",
    "oG": "offload-gradients",
    "sW": "shard-weights",
    "sG": "shard-gradients",
    "pQ": "persistent-quants",
    "mAG": "memcpy-all-gather",
    "mSR": "memcpy-send-recv",
    "a2a": "all-to-all-reduce",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. month: of the program."""

    card: str
    month: str
    gpus: int
    model: str
    dtype: str
    speed: float
    words: tuple[str, ...]

    def number(self, letters: str) -> int:
        """The number behind these letters, else 1."""
        found = [re.fullmatch(rf"{letters}(\d+)", word) for word in self.words]
        return next((int(match[1]) for match in found if match), 1)

    @property
    def micro_batch(self) -> int:
        """Tokens of it."""
        return self.number("b") * SEQ_LEN

    def options(self) -> list[str]:
        """Words of the row as options of the command line."""
        return [spelled(word) for word in self.words]


def spelled(word: str) -> str:
    """A word of the table as an option."""
    if word in SWITCHES:
        return f"--{SWITCHES[word]}"
    if word.startswith("r-"):
        return f"--recompute-{word.removeprefix('r-')}"
    letters = word.rstrip("0123456789")
    return f"--{NUMBERS[letters]}={word.removeprefix(letters)}"


def rows() -> list[Row]:
    """The table."""
    found = []
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            card, month, gpus, model, dtype, speed, *words = line.split()
            found.append(Row(card, month, int(gpus), model, dtype, float(speed), tuple(words)))
    return found
