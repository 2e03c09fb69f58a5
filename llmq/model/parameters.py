"""The weights and the gradients of each part of a model, by the keys of the weight table.

Matrices of blocks and the LM head may be fp8 operands. A gradient that is None is not wanted: the
model has no such parameter, or it is frozen. C: hidden size, F: width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingWeights:
    """embed: (Vp, C). positions: (P, C), where they are learned."""

    embed: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingGrads:
    """Where the gradients of EmbeddingWeights go."""

    embed: Accumulator | None = None
    positions: Accumulator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """Matrices are (out_features, in_features); a bias, where the model has one, (out_features,).

    ln1, ln2, their biases: (C,). q_norm, k_norm: (Hd,), with qk_norm. qkv: the rows of all query
    heads, key heads, value heads. up: (F, C), or of a gated MLP (2F, C), up before gate.
    """

    ln1: Tensor
    ln1_bias: Tensor | None = None
    qkv: Operand
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o: Operand
    o_bias: Tensor | None = None
    ln2: Tensor
    ln2_bias: Tensor | None = None
    up: Operand
    up_bias: Tensor | None = None
    down: Operand
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrads:
    """Where the gradients of BlockWeights go."""

    ln1: Accumulator | None = None
    ln1_bias: Accumulator | None = None
    qkv: Accumulator | None = None
    qkv_bias: Accumulator | None = None
    q_norm: Accumulator | None = None
    k_norm: Accumulator | None = None
    o: Accumulator | None = None
    o_bias: Accumulator | None = None
    ln2: Accumulator | None = None
    ln2_bias: Accumulator | None = None
    up: Accumulator | None = None
    up_bias: Accumulator | None = None
    down: Accumulator | None = None
    down_bias: Accumulator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """norm, its bias: (C,). lm_head: (Vp, C); None where it is not needed."""

    norm: Tensor
    norm_bias: Tensor | None = None
    lm_head: Operand | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGrads:
    """Where the gradients of HeadWeights go."""

    norm: Accumulator | None = None
    norm_bias: Accumulator | None = None
    lm_head: Accumulator | None = None
