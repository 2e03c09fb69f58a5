"""Tokens to residual stream, and back."""

from __future__ import annotations

from llmq.base.tensor import Tensor
from llmq.model.parameters import EmbeddingGrads, EmbeddingWeights
from llmq.ops import embedding
from llmq.runtime.device import Device


def forward(
    dev: Device, w: EmbeddingWeights, residual: Tensor, tokens: Tensor, first_position: int = 0
) -> None:
    """residual (B,T,C) = the tokens' embeddings, plus learned positions where the model has them.

    tokens: I32 (B,T), each below V. first_position: of tokens[:, 0] in their sequences.
    """
    embedding.forward(dev, residual, tokens, w.embed, w.positions, first_position)


def backward(
    dev: Device, g: EmbeddingGrads, d_residual: Tensor, tokens: Tensor, *, tied: bool
) -> None:
    """Add the gradient of the embedding. A tied head has already written to the same matrix."""
    if g.embed is not None:
        if not tied and not g.embed.accumulate:
            dev.zero(g.embed.tensor)  # rows of tokens that do not occur
        embedding.backward(dev, g.embed._replace(accumulate=True), d_residual, tokens)
    if g.positions is not None:
        embedding.backward_positions(dev, g.positions, d_residual)
