"""The weights and the gradients of each part of a model, by the keys of the weight table.

Weights are tensors, matrices of blocks and the LM head may be fp8 operands; None where the model
has no such parameter, or it is not needed. Gradients are where they go; None: not wanted, because
there is no such parameter, or it is frozen. C: hidden size, F: width of the MLP.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator

T = TypeVar("T")


class EmbeddingParameters(NamedTuple, Generic[T]):
    """embed: (Vp, C). positions: (P, C), where they are learned."""

    embed: T | None = None
    positions: T | None = None


class BlockParameters(NamedTuple, Generic[T]):
    """Matrices are (out_features, in_features); a bias, where the model has one, (out_features,).

    ln1, ln2, with pre_norm, and their biases: (C,). ln1_post, ln2_post, with post_norm: (C,), of
    what the half before has put out, so that the first block has no ln1_post. q_norm, k_norm, with
    qk_norm: (Hd,), or if it is wide (Hq*Hd,) and (Hkv*Hd,). qkv: the rows of all query heads, key
    heads, value heads. up: (F, C), or of a gated MLP (2F, C), up before gate. qkv_a, qkv_b, …: of
    adapters, as `state/adapter_rows.py` says.
    """

    ln1_post: T | None = None
    ln1: T | None = None
    ln1_bias: T | None = None
    qkv: T | None = None
    qkv_bias: T | None = None
    q_norm: T | None = None
    k_norm: T | None = None
    o: T | None = None
    o_bias: T | None = None
    ln2_post: T | None = None
    ln2: T | None = None
    ln2_bias: T | None = None
    up: T | None = None
    up_bias: T | None = None
    down: T | None = None
    down_bias: T | None = None
    qkv_a: T | None = None
    qkv_b: T | None = None
    o_a: T | None = None
    o_b: T | None = None
    up_a: T | None = None
    up_b: T | None = None
    down_a: T | None = None
    down_b: T | None = None


class HeadParameters(NamedTuple, Generic[T]):
    """norm, its bias: (C,). ln1_post: (C,), with post_norm, of what the last block puts out.
    lm_head: (Vp, C).
    """

    ln1_post: T | None = None
    norm: T | None = None
    norm_bias: T | None = None
    lm_head: T | None = None


EmbeddingWeights, EmbeddingGrads = EmbeddingParameters[Operand], EmbeddingParameters[Accumulator]
BlockWeights, BlockGrads = BlockParameters[Operand], BlockParameters[Accumulator]
HeadWeights, HeadGrads = HeadParameters[Operand], HeadParameters[Accumulator]
