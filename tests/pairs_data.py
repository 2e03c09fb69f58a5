"""Token files of documents and of pairs for the tests of losses that read more than tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmq.data.tokens import TokenWriter


def write_pairs(
    path: Path,
    lengths: list[tuple[int, int]],
    vocab: int,
    seed: int = 0,
    labels: list[bool] | None = None,
) -> Path:
    """Pairs of documents of these lengths: random ids below vocab, of which two are a prompt that
    both share; the first pair has one masked token in an answer, too. labels: of each pair, in
    place of a preferred document.
    """
    rng = np.random.default_rng(seed)
    with TokenWriter(path, vocab, with_masks=True, with_documents=True, in_pairs=True) as writer:
        for number, pair in enumerate(lengths):
            prompt = rng.integers(0, vocab, 2)
            for side, length in enumerate(pair):
                ids = np.concatenate([prompt, rng.integers(0, vocab, length - 2)])
                mask = np.arange(length) >= 2
                mask[0], mask[3:4] = labels[number] if labels else side == 0, number > 0
                writer.write(ids, mask, [length])
    return path


def write_documents(path: Path, lengths: list[int], vocab: int) -> Path:
    """Documents of random ids, of which about 7 in 10 are trained."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, vocab, with_masks=True, with_documents=True) as writer:
        for length in lengths:
            writer.write(rng.integers(0, vocab, length), rng.random(length) < 0.7, [length])
    return path
