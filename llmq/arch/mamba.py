"""State spaces (Mamba-2), which replace attention in some layers: sizes and matrices.

    z, x, B, C, a = products of the input        x, B, C pass through a short convolution
    S = exp(-exp(a_log) step) * S + B (step * x)^T         a state of each head, 0 where a
    y = S^T C + skip * x                                   document begins
    out = out_proj @ rmsnorm(y * silu(z))        step = softplus(a + dt_bias)

Mamba-2 is a delta net that does not subtract S^T k from the value; C, B and x are the queries, keys
and values. The heads of a group share C and B, and the norm runs over the channels of a group. Rows
of in_proj are in the order C, B, x, z, a. K: channels of C of all groups, or of B. V: channels of x
of all heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from llmq.arch.delta import DeltaNet
from llmq.arch.halves import matrix, norms
from llmq.arch.matrix import HalfSpec, Order
from llmq.arch.mixers import vector

MAMBA_TARGETS = ("mamba_in", "mamba_o")
"""Names in --lora-targets of a state space's matrices."""
NO_LIMIT = (None, [0.0, inf], [0.0, {"__float__": "Infinity"}])  # last: as in transformers 5
"""Values of time_step_limit that set no limit."""


def mamba_modules(at: str) -> Mapping[str, tuple[str, ...]]:
    """Return the Hugging Face module of each matrix, for `Architecture.modules`. at: name of the
    module that holds a layer's mixer."""
    return {"mamba_in": (f"{at}.in_proj",), "mamba_o": (f"{at}.out_proj",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(DeltaNet):
    """Sizes of a model's state spaces. key_heads: number of groups. key_dim: rows of the state.
    value_heads: number of heads. value_dim: channels of a head."""

    conv_bias: bool
    """True if the short convolution has a bias."""

    def half(self, config: Any, layer: int) -> HalfSpec:
        """Return the declaration of a layer's state space. mamba_in: (2K + V + V + Hv, C), the rows
        of C, B, x, z and a. conv: (2K + V, taps). a_log, dt_bias, skip: (Hv,). mamba_norm: (V,).
        mamba_o: (C, V)."""
        C, V = config.hidden_size, self.values
        (module,) = config.arch.modules["mamba_in"]
        at, heads = module.format(layer).removesuffix(".in_proj"), (self.value_heads,)
        order = self._stored((V, V, self.value_heads))
        in_ = matrix(
            config, layer, "mamba_in", f"{at}.in_proj", {"mamba_in": order[-1][1]}, C, input="ln1",
            gradient="d_mamba_in", order=order,
        )  # fmt: skip
        inner = (
            vector(
                "conv", f"{at}.conv1d", (self.channels, self.taps), "normal", kind="conv",
                order=self._stored((V,)), bias=self.conv_bias,
            ),
            vector("a_log", at, heads, "log_uniform", tensor="A_log"),
            vector("dt_bias", at, heads, "one", tensor="dt_bias"),
            vector("skip", at, heads, "one", tensor="D"),
            vector("mamba_norm", f"{at}.norm", (V,), "one", kind="norm"),
        )  # fmt: skip
        o = matrix(
            config, layer, "mamba_o", f"{at}.out_proj", {"mamba_o": C}, V, initial="residual",
            input="mamba_gated", gradient="d_mamba",
        )  # fmt: skip
        state = (self.value_heads, self.key_dim, self.value_dim)
        return HalfSpec(
            kind="mamba",
            name="mamba",
            norm="ln1",
            norms=norms(config, "ln1", layer),
            modules=(in_, *inner, o),
            output="mamba_o",
            activations=("mamba_in", "mamba_conv", "mamba_state", "mamba_gated"),
            carried={"state": state, "before": (self.taps - 1, self.channels)},
            # Multiplications and additions of k (step x)^T and S^T q for each token.
            flops=4 * self.value_heads * self.key_dim * self.value_dim,
        )

    def _stored(self, rest: tuple[int, ...]) -> Order:
        """Return the stored order of rows that llmq orders as C, B, *rest. rest: numbers of rows of
        x, or of x, z and a."""
        K, ranges = self.key_heads * self.key_dim, []
        for rows in (K, K, *rest):
            first = ranges[-1][1] if ranges else 0
            ranges.append((first, first + rows))
        C, B, x, *others = ranges
        return (*others[:1], x, B, C, *others[1:])
