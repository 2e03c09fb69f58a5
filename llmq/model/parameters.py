"""The weights and the gradients of each part of a model, by the keys of the weight table.

Weights are tensors, matrices of blocks and the LM head may be fp8 operands; None where the model
has no such parameter, or it is not needed. Gradients are where they go; None: not wanted, because
there is no such parameter, or it is frozen. C: hidden size.
"""

from typing import Generic, NamedTuple, TypeVar

from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator

T = TypeVar("T")


class EmbeddingParameters(NamedTuple, Generic[T]):
    """embed: (Vp, C), its adapters embed_a, embed_b as BlockParameters has them. positions: (P, C),
    where they are learned. new_rows: (R, C), those of the embedding that are trained alone."""

    embed: T | None = None
    embed_a: T | None = None
    embed_b: T | None = None
    positions: T | None = None
    new_rows: T | None = None


class BlockParameters(dict[str, T]):
    """By key of the weight table, with what the architecture declares for the layer. Matrices are
    (out_features, in_features); biases (out_features,). Norms around the halves are (C,): ln1, ln2,
    of what goes into a half, and ln1_post, ln2_post, of what the half before has put out. KEY_a,
    KEY_b, KEY_m are of adapters, as `state/params.py` says. A parameter that does not exist, or is
    not needed, or is frozen, lacks its key: `get` gives None."""

    def bias(self, key: str) -> T | None:
        return self.get(f"{key}_bias")

    def adapters(self, key: str) -> tuple[T | None, T | None]:
        return self.get(f"{key}_a"), self.get(f"{key}_b")

    def magnitudes(self, key: str) -> T | None:
        return self.get(f"{key}_m")


class HeadParameters(NamedTuple, Generic[T]):
    """norm, its bias: (C,). ln1_post: (C,), with post_norm, of what the last block puts out.
    lm_head: (Vp, C), its adapters lm_head_a, lm_head_b as BlockParameters has them. new_rows: (R,
    C), those of it that are trained alone."""

    ln1_post: T | None = None
    norm: T | None = None
    norm_bias: T | None = None
    lm_head: T | None = None
    lm_head_a: T | None = None
    lm_head_b: T | None = None
    new_rows: T | None = None


EmbeddingWeights, EmbeddingGrads = EmbeddingParameters[Operand], EmbeddingParameters[Accumulator]
BlockWeights, BlockGrads = BlockParameters[Operand], BlockParameters[Accumulator]
HeadWeights, HeadGrads = HeadParameters[Operand], HeadParameters[Accumulator]
