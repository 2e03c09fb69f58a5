"""Weights and gradients of each block of the weight table, by the table's keys.

Weights are tensors; matrices of blocks and of the LM head may be fp8 operands. Gradients are
Accumulators of ops/. C: hidden size, Vp: padded vocabulary.

    embedding   embed (Vp, C) and adapters; positions (P, C) if learned, P: number of positions
    block       the architecture's declaration: matrices (out_features, in_features), biases
                (out_features,), and norms (C,): ln1, ln2 in front of a half, ln1_post, ln2_post of
                the output of the half before
    head        norm and norm_bias (C,); with post_norm ln1_post (C,), of the last block's output;
                lm_head (Vp, C) and adapters

KEY_a, KEY_b, KEY_m: matrices and magnitudes of adapters (`state/params.py`). new_rows (R, C): rows
of the embedding or the LM head, if only these rows are trained.
"""

from typing import TypeVar

from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator

T = TypeVar("T")


class PartParameters(dict[str, T]):
    """The parameters of one block of the weight table. `get` returns None for a parameter that does
    not exist, or whose gradient is not wanted."""

    def bias(self, key: str) -> T | None:
        return self.get(f"{key}_bias")

    def adapters(self, key: str) -> tuple[T | None, T | None]:
        return self.get(f"{key}_a"), self.get(f"{key}_b")

    def magnitudes(self, key: str) -> T | None:
        return self.get(f"{key}_m")


PartWeights, PartGrads = PartParameters[Operand], PartParameters[Accumulator]
