"""The halves of blocks, one file a kind: each trains, evaluates and decodes.

`half.py` says what a half does; which halves a layer has, its architecture says by their kinds.
Imports arch, ops, and what model has below blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.model.halves.attention import AttentionDecoder, AttentionHalf
from llmq.model.halves.half import Half, HalfDecoder
from llmq.model.halves.mlp import MlpDecoder, MlpHalf


class HalfKind(NamedTuple):
    """The classes of a kind: for a step, and for decoding with a cache."""

    half: type[Half]
    decoder: type[HalfDecoder]


HALVES: dict[str, HalfKind] = {
    "attention": HalfKind(AttentionHalf, AttentionDecoder),
    "mlp": HalfKind(MlpHalf, MlpDecoder),
}
"""By HalfSpec.kind."""
