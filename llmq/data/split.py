"""Which sequences of the training files are kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.data.tokens import TokenFile


@dataclass(frozen=True, slots=True)
class Split:
    """One side of files of which a part is never trained on: the last sequences of each file.

    fraction: of the sequences of all files together, more than 0 and less than 1; at least one
    sequence. held_out: whether this is that part, else the rest.
    """

    fraction: float
    held_out: bool

    def of(self, chunks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first sequence of this side in each file, and how many there are, by file.

        chunks: all sequences of each file.
        """
        held, total = [], 0
        for count in chunks:
            before, total = int(total * self.fraction), total + count
            held.append(int(total * self.fraction) - before)
        if total > 0 and not any(held):
            last = max(i for i, count in enumerate(chunks) if count)
            held[last] = 1
        rest = [count - some for count, some in zip(chunks, held, strict=True)]
        return (rest, held) if self.held_out else ([0] * len(rest), rest)


def contents(files: list[TokenFile]) -> str:
    """Identifies the files by a sample of what is in them."""
    samples = " ".join(f"{file.sample():08x}" for file in files)
    return hashlib.sha256(samples.encode()).hexdigest()


def fingerprint(files: list[TokenFile], split: Split | None) -> str:
    """Identifies the files by names and sizes, and the side of them; folders may be moved."""
    lines = [f"{file.path.name} {file.num_bytes}\n" for file in files]
    lines += [f"{split}\n"] if split is not None else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()
