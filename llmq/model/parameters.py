"""The weights and the gradients of each part of a model, by the keys of the weight table.

Weights are tensors, matrices of blocks and the LM head may be fp8 operands. Gradients are where
they go. C: hidden size, Vp: padded vocabulary.

    embedding   embed (Vp, C), its adapters; positions (P, C), where they are learned
    block       what the architecture declares for the layer: matrices (out_features, in_features),
                biases (out_features,). Norms around the halves are (C,): ln1, ln2, of what goes
                into a half, and ln1_post, ln2_post, of what the half before has put out
    head        norm and its bias (C,); ln1_post (C,), with post_norm, of what the last block puts
                out; lm_head (Vp, C), its adapters

KEY_a, KEY_b, KEY_m are of adapters, as `state/params.py` says. new_rows (R, C): those of the
embedding, or of the LM head, that are trained alone.
"""

from typing import TypeVar

from llmq.base.operand import Operand
from llmq.base.tensor import Accumulator

T = TypeVar("T")


class PartParameters(dict[str, T]):
    """Those of one part. A parameter that does not exist, or is not needed, or is frozen, lacks its
    key: `get` gives None."""

    def bias(self, key: str) -> T | None:
        return self.get(f"{key}_bias")

    def adapters(self, key: str) -> tuple[T | None, T | None]:
        return self.get(f"{key}_a"), self.get(f"{key}_b")

    def magnitudes(self, key: str) -> T | None:
        return self.get(f"{key}_m")


PartWeights, PartGrads = PartParameters[Operand], PartParameters[Accumulator]
