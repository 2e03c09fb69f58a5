"""Multi-head latent attention: a short row per token gives the keys and values of all heads.

    q         = q_b @ rmsnorm(q_a @ x), or q_proj @ x      a head: N channels, and P with RoPE
    c, k_rope = kv_a @ x                                   R channels, and P with RoPE
    k, v      = kv_b @ rmsnorm(c)                          a head: N channels, V channels
    out       = o @ attention(q, (k, k_rope), v)

Generation caches only rmsnorm(c) and k_rope of each token, which all heads share. C: hidden size,
H: number of heads. Rows of weights are ordered as kernels read the rows, channels with RoPE first;
the `order` of a part says where Hugging Face stores each row.
"""

from dataclasses import dataclass
from typing import Any

from llmq.arch.halves import in_pairs, matrix, norms
from llmq.arch.matrix import HalfSpec, Matrix, Module, Order, Part
from llmq.arch.rope_scaling import RopeScaling
from llmq.base.errors import ConfigError

LATENT_TARGETS = ("q_a", "q_b", "kv_a", "kv_b")
"""Names in --lora-targets of the matrices that only latent attention has."""
LATENT_SIZES = {
    "query_rank": "q_lora_rank",
    "rank": "kv_lora_rank",
    "plain": "qk_nope_head_dim",
    "rotary": "qk_rope_head_dim",
    "values": "v_head_dim",
}
"""Names in config.json of the sizes of latent attention."""
NORM_EPS = 1e-6
"""Epsilon of the norms of latent rows; rms_norm_eps in config.json applies to all other norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of a model's latent attention."""

    query_rank: int | None
    """Rq: channels of a token's latent row for queries; None if queries are computed from x."""
    rank: int
    """R: channels of a token's latent row for keys and values."""
    plain: int
    """N: channels of a query or key head without RoPE."""
    rotary: int
    """P: channels of a query head with RoPE, and of the key that all heads share."""
    values: int
    """V: channels of a value head."""

    @property
    def keys(self) -> int:
        """N + P: channels of a query head or key head."""
        return self.plain + self.rotary

    @property
    def head_dim(self) -> int:
        """Return the number of channels of a head in attention's kernels; zeros pad shorter
        heads."""
        return max(self.keys, self.values)

    def scale(self, scaling: RopeScaling | None) -> float:
        """Return the factor of attention scores, which mscale_all_dim of YaRN increases."""
        growth = 1.0 if scaling is None else scaling.mscale_growth
        return self.keys**-0.5 * growth**2

    def validate(self) -> None:
        """Raise ConfigError if a size is not positive, or P is odd."""
        for name in ("query_rank", "rank", "plain", "rotary", "values"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 16:
                raise ConfigError(f"model latent {name}: must be positive and below 65536: {value}")
        if self.rotary % 2:
            raise ConfigError(f"model latent rotary: RoPE needs an even number, got {self.rotary}")


def latent_attention(config: Any, layer: int) -> HalfSpec:
    """Return the declaration of a layer's latent attention. latents: (Rq + R + P, C); (H (P + N) +
    R + P, C) if queries are computed from x. q_latent_norm: (Rq,). kv_latent_norm: (R,). q_b: (H (P
    + N), Rq). kv_b: (H N + H V, R), rows of keys before rows of values. o: (C, H V)."""
    its, C, H = config.latent, config.hidden_size, config.num_heads
    at = f"model.layers.{layer}.self_attn"
    queries = Part(
        module=f"{at}.q_b_proj", rows=H * its.keys, targets=("q_b",), order=_of_queries(its, H)
    )
    of_x, inner = _part(queries, f"{at}.q_proj", "q"), []
    if its.query_rank is not None:
        of_x = Part(module=f"{at}.q_a_proj", rows=its.query_rank, targets=("q_a",))
        inner += [
            _norm("q_latent_norm", f"{at}.q_a_layernorm", its.query_rank),
            _matrix("q_b", queries, its.query_rank, "q_latent"),
        ]
    both = Part(
        module=f"{at}.kv_a_proj_with_mqa", rows=its.rank + its.rotary, targets=("kv_a",),
        order=((0, its.rank), *in_pairs(its.rank, its.rotary)),
    )  # fmt: skip
    keys_values = Part(
        module=f"{at}.kv_b_proj", rows=H * (its.plain + its.values), targets=("kv_b",),
        order=_of_keys(its, H),
    )  # fmt: skip
    inner.insert(1, _norm("kv_latent_norm", f"{at}.kv_a_layernorm", its.rank))
    latents = Matrix(
        key="latents", name=f"{at}.latents", shape=(of_x.rows + both.rows, C), parts=(of_x, both),
        input="ln1", gradient="d_latents",
    )  # fmt: skip
    o = matrix(
        config, layer, "o", f"{at}.o_proj", {"o": C}, H * its.values, initial="residual",
        input="att", gradient="d_att",
    )  # fmt: skip
    heads = config.heads_of(layer)
    return HalfSpec(
        kind="latent_attention",
        name="att",
        norm="ln1",
        norms=norms(config, "ln1", layer),
        modules=(latents, *inner, _matrix("kv_b", keys_values, its.rank, "kv_latent"), o),
        output="o",
        activations=("latents", "q_latent", "kv_latent", "qkv", "att"),
        cached={"latent": (1, its.rank + its.rotary)},
        sizes={
            "heads": heads._replace(channels=(its.keys + its.values) // 2),  # mean of both
            "window": config.window_of(layer),
        },
    )


def _part(part: Part, module: str, target: str) -> Part:
    return Part(module=module, rows=part.rows, targets=(target,), order=part.order)


def _norm(key: str, module: str, size: int) -> Module:
    part = Part(module=module, rows=size)
    return Module(key=key, name=module, shape=(size,), parts=(part,), kind="norm", initial="one")


def _matrix(key: str, part: Part, columns: int, x: str) -> Matrix:
    return Matrix(
        key=key, name=part.module, shape=(part.rows, columns), parts=(part,), input=x,
        gradient=f"d_{key}",
    )  # fmt: skip


def _of_queries(its: LatentAttention, heads: int) -> Order:
    """Return the stored order of the queries' rows: the rows with RoPE come last in each head, in
    pairs."""
    order = []
    for first in range(0, heads * its.keys, its.keys):
        plain = first + its.rotary
        order += [(plain, plain + its.plain), *in_pairs(first, its.rotary)]
    return tuple(order)


def _of_keys(its: LatentAttention, heads: int) -> Order:
    """Return the stored order of the rows of keys and values: one head after another."""
    order, N, V = [], its.plain, its.values
    for head in range(heads):
        first = heads * N + head * V
        order += [(head * N, (head + 1) * N), (first, first + V)]
    return tuple(order)
