"""RoPE scaling, which extends positions beyond the original length, as in transformers.

`KINDS` lists the fields of each kind in rope_parameters of config.json, for reading, writing and
`--rope-scaling`. The frequencies are computed in `llmq/ops/attention/rope.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.arch.common import REQUIRED, get, size
from llmq.base.errors import ConfigError

FIRST = "original_max_position_embeddings"
KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "yarn": (FIRST, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "truncate"),
    "longrope": (FIRST, "attention_factor", "short_factor", "long_factor"),
    "llama3": (FIRST, "low_freq_factor", "high_freq_factor"),
    "proportional": ("partial_rotary_factor",),
}  # fmt: skip
"""Fields in config.json of each kind, besides the factor that all kinds have."""
_OLD_KINDS = {"su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences beyond the original length."""

    kind: str
    """'linear': positions are divided by the factor. 'llama3': frequencies are stretched depending
    on their wavelength. 'yarn': frequencies are stretched depending on their number of turns within
    the original length. 'longrope': each frequency is divided by a factor of its own. 'dynamic':
    the base grows for sequences longer than the original length; shorter sequences are not scaled.
    'proportional': only the first frequencies of a head rotate."""
    factor: float | None
    """Stretch factor, at least 1. For longrope, None means max_positions /
    original_max_positions."""
    original_max_positions: int = 8192
    """Original length: the sequence length before stretching, in tokens; for dynamic,
    max_positions."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_positions / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_positions / high_freq_factor are not stretched."""
    attention_factor: float | None = None
    """yarn, longrope: factor of cos and sin; None: computed from the stretch factor."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns than this within the original length are not stretched."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer turns than this are stretched fully."""
    mscale: float | None = None
    """yarn: weight of log(factor) in the attention factor, used if mscale_all_dim is given."""
    mscale_all_dim: float | None = None
    """yarn: weight of log(factor) in the attention factor's divisor."""
    truncate: bool = True
    """yarn: True if the range of frequencies between beta_fast and beta_slow is rounded to whole
    indices."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency in sequences up to the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency in longer sequences."""

    partial_rotary_factor: float = 1.0
    """proportional: share of the frequencies that rotate."""

    def attention(self, max_positions: int) -> float:
        """Return the factor of cos and sin in a model with this many positions."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            factor = self.factor or max_positions / self.original_max_positions
            root = 1 + math.log(max(factor, 1)) / math.log(self.original_max_positions)
            return math.sqrt(root)
        if self.kind != "yarn" or self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * math.log(self.factor) + 1) / self.mscale_growth
        return 0.1 * math.log(self.factor) + 1

    @property
    def mscale_growth(self) -> float:
        """Return the divisor of the attention factor, from mscale_all_dim; latent attention
        multiplies scores by the divisor's square."""
        return 0.1 * (self.mscale_all_dim or 0.0) * math.log(max(self.factor or 1, 1)) + 1

    def check(self, frequencies: int) -> None:
        """Raise ConfigError for numbers that do not fit this many frequencies."""
        if self.kind not in KINDS:
            raise ConfigError(f"model rope_scaling: kind {self.kind!r} is not supported")
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ConfigError(f"model rope_scaling: factor must be >= 1, got {self.factor}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and not 0 < low < high:
            raise ConfigError(
                "model rope_scaling: low_freq_factor must be positive and less than "
                f"high_freq_factor, got {low} and {high}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ConfigError(
                "model rope_scaling: beta_slow must be positive and at most beta_fast, got "
                f"{self.beta_slow} and {self.beta_fast}"
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ConfigError(
                f"model rope_scaling: attention_factor must be positive: {self.attention_factor}"
            )
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            factors = getattr(self, name)
            if len(factors) != frequencies or not all(0 < x < math.inf for x in factors):
                raise ConfigError(
                    f"model rope_scaling: {name} must be {frequencies} positive numbers, got "
                    f"{len(factors)} values"
                )

    def write(self) -> dict[str, Any]:
        """Return the fields of rope_parameters, without the base and without fields that have their
        defaults."""
        found: dict[str, Any] = {"rope_type": self.kind}
        if self.factor is not None and (self.kind != "proportional" or self.factor != 1):
            found["factor"] = self.factor
        fresh = RopeScaling(kind=self.kind, factor=None)
        for name in KINDS[self.kind]:
            own = "original_max_positions" if name == FIRST else name
            value = getattr(self, own)
            if name == FIRST or self.kind == "llama3" or value != getattr(fresh, own):
                found[name] = list(value) if isinstance(value, tuple) else value
        return found


def longest_sequence(scaling: RopeScaling | None, max_positions: int) -> int:
    """Return the length in tokens of the longest sequence whose positions the model knows."""
    grows = scaling is not None and scaling.kind == "dynamic"
    return int(max_positions * (scaling.factor if grows else 1))


def read_scaling(
    rope: Mapping[str, Any], outer: str, kinds: tuple[str, ...], max_positions: int, first: int
) -> RopeScaling | None:
    """Return the scaling in `rope`, which is config.json's field `outer`; None for the default
    kind. max_positions: longest sequence of the model, in tokens. first: default value of the
    sequence length before stretching."""
    named = {f"{outer}.{name}": value for name, value in rope.items()}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = _OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "default":
        return None
    if kind not in kinds:
        known = ", ".join(("default", *kinds))
        raise ConfigError(
            f"config.json: {outer}.rope_type: {kind!r} is not supported, only {known}"
        )
    fields: dict[str, Any] = {"kind": kind}
    if kind == "dynamic":
        fields["original_max_positions"] = max_positions
    for name in KINDS[kind]:
        at = f"{outer}.{name}"
        if name == FIRST:
            there = at in named or kind == "llama3"
            fields["original_max_positions"] = size(named, at) if there else first
        elif name in ("short_factor", "long_factor"):
            values = get(named, at, list)
            fields[name] = tuple(get({at: value}, at, float) for value in values)
        elif kind == "llama3" or named.get(at) is not None:
            fields[name] = get(named, at, bool if name == "truncate" else float)
    factor = get(named, f"{outer}.factor", float, None) if kind in ("yarn", "longrope") else None
    if kind not in ("yarn", "longrope"):
        default = 1.0 if kind == "proportional" else REQUIRED
        factor = get(named, f"{outer}.factor", float, default)
    elif kind == "yarn" and factor is None:
        factor = max_positions / fields["original_max_positions"]
    return RopeScaling(factor=factor, **fields)
