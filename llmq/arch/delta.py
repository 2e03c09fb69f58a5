"""Gated delta nets, which replace attention in some layers: sizes, layers and matrices.

    q, k, v, z, b, a = products of x                 q, k, v pass through a short convolution
    S = exp(-exp(a_log) softplus(a + dt_bias)) * S   a state of each value head, 0 where a
    S = S + k (sigmoid(b) * (v - S^T k))^T           document begins
    out = out_proj @ (rmsnorm(S^T q) * silu(z))

C: hidden size, K: channels of all queries, or of all keys, V: channels of all values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.arch.halves import matrix, norms
from llmq.arch.matrix import HalfSpec
from llmq.arch.mixers import Mixers, vector
from llmq.base.errors import ConfigError

_AT = "model.layers.{}.linear_attn"
DELTA_MODULES: Mapping[str, tuple[str, ...]] = {
    "delta_in": tuple(f"{_AT}.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    "delta_o": (f"{_AT}.out_proj",),
}
"""By matrix of a delta net, the names of its Hugging Face modules, for `Architecture.modules`."""
DELTA_TARGETS = ("delta_qkv", "delta_z", "delta_b", "delta_a", "delta_o")
"""Names in --lora-targets of a delta net's matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(Mixers):
    """Sizes of a model's gated delta nets."""

    key_heads: int
    """Hk: number of query heads, and also of key heads; divides Hv."""
    value_heads: int
    """Hv: number of value heads, each with a state matrix."""
    key_dim: int
    """Number of channels of a query or key head, and rows of a state."""
    value_dim: int
    """Number of channels of a value head, and columns of a state."""

    least_step: float = 0.0
    """Lower bound of softplus(a + dt_bias)."""

    @property
    def channels(self) -> int:
        """2K + V: channels of all query, key and value heads."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def validate(self, num_layers: int) -> None:
        Mixers.validate(self, num_layers)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            if not 0 < value < 1 << 16:
                raise ConfigError(f"model delta {name}: must be positive and below 65536: {value}")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"model delta key_heads: {self.key_heads} do not divide "
                f"{self.value_heads} value heads"
            )

    def half(self, config: Any, layer: int) -> HalfSpec:
        """Return the declaration of a layer's gated delta net. delta_in: (2K + V + V + 2 Hv, C),
        the rows of q, k, v, z, b and a. conv: (2K + V, taps). a_log, dt_bias: (Hv,). delta_norm:
        (value_dim,). delta_o: (C, V)."""
        C, at = config.hidden_size, _AT.format(layer)
        rows = {"delta_qkv": self.channels, "delta_z": self.values}
        rows |= dict.fromkeys(("delta_b", "delta_a"), self.value_heads)
        heads = (self.value_heads,)
        inner = (
            vector("conv", f"{at}.conv1d", (self.channels, self.taps), "normal", kind="conv"),
            vector("a_log", at, heads, "log_uniform", tensor="A_log"),
            vector("dt_bias", at, heads, "one", tensor="dt_bias"),
            vector("delta_norm", f"{at}.norm", (self.value_dim,), "one", kind="norm"),
        )
        delta_in = matrix(
            config, layer, "delta_in", f"{at}.in_proj", rows, C, input="ln1", gradient="d_delta_in"
        )
        delta_o = matrix(
            config, layer, "delta_o", f"{at}.out_proj", {"delta_o": C}, self.values,
            initial="residual", input="delta_gated", gradient="d_delta",
        )  # fmt: skip
        state = (self.value_heads, self.key_dim, self.value_dim)
        return HalfSpec(
            kind="delta",
            name="delta",
            norm="ln1",
            norms=norms(config, "ln1", layer),
            modules=(delta_in, *inner, delta_o),
            output="delta_o",
            activations=("delta_in", "delta_conv", "delta_state", "delta_gated"),
            carried={"state": state, "before": (self.taps - 1, self.channels)},
            # Multiplications and additions of S^T k, k change^T and S^T q for each token.
            flops=6 * self.value_heads * self.key_dim * self.value_dim,
        )
