"""ModelConfig, which describes the model of any architecture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from llmq.arch import architecture, read_fields
from llmq.arch.common import MULTIPLIERS, Architecture
from llmq.arch.experts import Experts
from llmq.arch.latent import LatentAttention
from llmq.arch.matrix import HalfSpec, Matrix
from llmq.arch.mixers import Mixers
from llmq.arch.rope_scaling import RopeScaling, longest_sequence
from llmq.base.errors import ConfigError

VOCAB_PADDING = 64
"""The numbers of rows of embedding and logits are padded to a multiple of 64, which keeps products
aligned."""

_SIZES = (
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_positions"
).split()

BY_LAYER = ("windowed_layers", "rope_layers", "mlp_layers")
"""Fields of ModelConfig with one value per layer; Experts and Mixers have such fields, too."""

_MAX_SIZE = 2**31 - 1  # ids and positions are int32
_LARGEST = {"num_layers": 1 << 16, "head_dim": 1 << 16}


class Heads(NamedTuple):
    """The attention heads of a layer: numbers of query heads and of key and value heads, and
    channels per head."""

    query: int
    kv: int
    channels: int


class Rope(NamedTuple):
    """The rotary embedding (RoPE) of a layer. theta: base of the frequencies. scaling: how the
    frequencies are stretched. length: factor of cos and sin. channels: number of rotated channels
    of a head."""

    theta: float
    scaling: RopeScaling | None
    length: float
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and constants of one model. Letters in the glosses of fields are the names of
    dimensions in the code."""

    architecture: str
    """Hugging Face class name, a key of ARCHITECTURES."""
    vocab_size: int
    """V: number of token ids in the vocabulary."""
    hidden_size: int
    """C: channels of the residual stream."""
    intermediate_size: int
    """F: width of the MLP."""
    experts: Experts | None = None
    """The experts that replace the MLP in layers; None if no layer has experts."""
    num_layers: int
    """L: number of transformer blocks."""
    num_heads: int
    """Hq: number of query heads."""
    num_kv_heads: int
    """Hkv: number of key heads, and also of value heads; divides Hq."""
    head_dim: int
    """Hd: channels of one attention head."""
    full_kv_heads: int | None = None
    """Hkv of layers without a window; None: num_kv_heads."""
    full_head_dim: int | None = None
    """Hd of layers without a window; None: head_dim."""
    shared_keys: tuple[bool, ...] | None = None
    """True for each layer that reads the keys and values of layer `keys_of`; None if no layer
    does."""
    wide_mlp: bool = False
    """True if the MLP of layers that share keys has twice the width."""
    per_layer_size: int | None = None
    """Channels of the vector that each layer adds for every token, computed from the embedding and
    another table; None if layers add no vectors."""
    keys_as_values: bool = False
    """True if, in layers without a window, the keys before norm and RoPE are also the values."""
    mixers: Mixers | None = None
    """The delta nets, state spaces or short convolutions that replace attention in layers; None if
    all layers have attention."""
    mlp_layers: tuple[bool, ...] | None = None
    """True for each layer that is only an MLP or experts, False for each layer that is only
    attention or a mixer; None if every layer has both."""
    latent: LatentAttention | None = None
    """The latent attention that replaces attention in all layers; None if layers have ordinary
    attention."""
    max_positions: int
    """Length of the longest sequence, in tokens."""
    sliding_window: int | None = None
    """Number of positions that a token attends to, its own included, less than `longest`; None: all
    positions."""
    windowed_layers: tuple[bool, ...] | None = None
    """True for each layer with the sliding window; None: all layers have the window."""
    rope_layers: tuple[bool, ...] | None = None
    """True for each layer with RoPE; None: all layers have RoPE if `positions` is 'rope'."""
    norm: str
    """Kind of norms: 'rmsnorm' or 'layernorm'."""
    norm_eps: float
    """Number added to the mean square (or variance) before the root."""
    activation: str
    """Activation of the MLP: 'swiglu', 'geglu', 'gelu', or 'relu2', the square of ReLU; GELU is its
    tanh approximation."""
    positions: str
    """Kind of positions: 'rope' or 'learned'."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are stretched; None: not stretched."""
    query_growth: float | None = None
    """Queries at position p are multiplied by 1 + query_growth * log(1 + p // P), P being
    original_max_positions of rope_scaling; None: no factor."""
    partial_rotary_factor: float = 1.0
    """Share of a head's channels that are rotated, counted from the first channel."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies, never stretched, of layers with a window; None: the same as
    in other layers."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(Hd)."""
    attention_softcap: float | None = None
    """An integer: each attention score becomes softcap * tanh(score / softcap); None: no cap."""
    embedding_multiplier: float = 1.0
    """Factor of the embedding's rows."""
    residual_multiplier: float = 1.0
    """Factor of the output of attention and MLP, applied in the product of the last matrix."""
    logits_scaling: float = 1.0
    """Number by which logits are divided, before a soft cap."""
    logit_softcap: float | None = None
    """Each logit becomes softcap * tanh(logit / softcap); None: no cap."""
    qk_norm: bool
    """True if RMSNorm is applied to queries and keys before RoPE, for each head, or as
    arch.wide_qk_norm says."""
    qkv_bias: bool
    """True if query, key and value projections have biases."""
    o_bias: bool
    """True if attention's output projection has a bias."""
    mlp_bias: bool
    """True if the MLP's projections have biases."""
    tied_embeddings: bool
    """True if the LM head is the embedding matrix."""
    num_labels: int = 0
    """Number of rows of the score head that replaces the LM head; 0 if there is no score head."""
    bos_token_id: int | None = None
    """Token id that begins a sequence."""
    eos_token_id: int | None = None
    """Token id that ends a document; the first id if the model has several."""
    other_eos_token_ids: tuple[int, ...] = ()
    """Further token ids that end a sequence."""
    pad_token_id: int | None = None
    """Token id of padding."""
    new_tokens: tuple[int, int] | None = None
    """Token ids [first, stop) added to a trained model; the rows of new ids can be trained beside
    adapters. None: no new ids."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialized matrices."""

    @property
    def arch(self) -> Architecture:
        """Return the architecture: the constants of the family, and the names of weights."""
        return architecture(self.architecture).of(self)

    def halves(self, layer: int) -> tuple[HalfSpec, ...]:
        return _halves(self, layer)

    def matrices(self, layer: int) -> tuple[Matrix, ...]:
        return tuple(matrix for half in self.halves(layer) for matrix in half.matrices)

    @property
    def gated(self) -> bool:
        """Return True if the MLP has a gate: the up projection has 2F rows, and the last F rows are
        the gate's."""
        return self.activation in ("swiglu", "geglu")

    @property
    def embedding_scale(self) -> float:
        """Return the factor of the embedding's rows, which operations round to the rows' dtype."""
        return self.embedding_multiplier * self.arch.embedding_scale(self.hidden_size)

    @property
    def padding_row(self) -> int | None:
        """Return the row of the embedding that gets no gradient, like torch's padding_idx:
        pad_token_id, counted from the end if negative. None if there is no such row."""
        pad, vocab = self.pad_token_id, self.vocab_size
        if pad is None or not self.arch.pads_embedding or not -vocab <= pad < vocab:
            return None
        return pad % vocab

    @property
    def rotary_dim(self) -> int:
        return self._rotary(self.head_dim)

    def _rotary(self, channels: int) -> int:
        """Return the number of rotated channels of a head."""
        its = self.latent
        return int(channels * self.partial_rotary_factor) if its is None else its.rotary

    @property
    def longest(self) -> int:
        """Return the length in tokens of the longest sequence whose positions the model knows."""
        return longest_sequence(self.rope_scaling, self.max_positions)

    def windowed(self, layer: int) -> bool:
        """Return True if the layer has the model's window; the value has no meaning in a model
        without a window."""
        return self.windowed_layers is None or self.windowed_layers[layer]

    def heads_of(self, layer: int) -> Heads:
        if self.windowed(layer):
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        kv, channels = self.full_kv_heads, self.full_head_dim
        return Heads(self.num_heads, kv or self.num_kv_heads, channels or self.head_dim)

    @property
    def every_heads(self) -> tuple[Heads, ...]:
        """Return the distinct `Heads` of all layers."""
        return tuple(dict.fromkeys(map(self.heads_of, range(self.num_layers))))

    def values_of(self, layer: int) -> int:
        """Return the number of value heads that a layer computes; 0 if the layer's keys are its
        values."""
        shared = self.keys_as_values and not self.windowed(layer)
        return 0 if shared else self.heads_of(layer).kv

    def shares_keys(self, layer: int) -> bool:
        return self.shared_keys is not None and self.shared_keys[layer]

    def keys_of(self, layer: int) -> int | None:
        """Return the layer that computes this layer's keys and values: the layer itself, or the
        last earlier layer that computes keys and has a window if and only if this layer has a
        window. None if there is no such layer."""
        if not self.shares_keys(layer):
            return layer
        alike = [i for i in range(layer) if self.windowed(i) == self.windowed(layer)]
        return next((i for i in reversed(alike) if not self.shares_keys(i)), None)

    def mlp_size(self, layer: int) -> int:
        """Return F, the width of a layer's MLP."""
        wide = self.wide_mlp and self.shares_keys(layer)
        return self.intermediate_size * (2 if wide else 1)

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None if the layer has no RoPE."""
        if self.positions != "rope" or not (self.rope_layers or [True] * (layer + 1))[layer]:
            return None
        channels = self._rotary(self.heads_of(layer).channels)
        if self.windowed(layer) and self.local_rope_theta is not None:
            return Rope(self.local_rope_theta, None, 1.0, channels)
        scaling = self.rope_scaling
        length = 1.0 if scaling is None else scaling.attention(self.max_positions)
        return Rope(self.rope_theta, scaling, length, channels)

    @property
    def padded_vocab(self) -> int:
        """Return Vp, the number of rows of the embedding and of the LM head in memory."""
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def outputs(self) -> int:
        """Return the number of outputs for each token: one logit per token id, or one score per
        label."""
        return self.num_labels or self.vocab_size

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // VOCAB_PADDING) * VOCAB_PADDING

    def window_of(self, layer: int) -> int | None:
        """Return the number of positions that a token attends to in a layer, its own included;
        None: all positions."""
        return self.sliding_window if self.windowed(layer) else None

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer has experts in place of the MLP."""
        its = self.experts
        return its is not None and (its.layers is None or its.layers[layer])

    @property
    def expert_size(self) -> int:
        return self.experts.size or self.intermediate_size

    def has_mixer(self, layer: int) -> bool:
        """Return True if the layer has a mixer in place of attention."""
        return self.mixers is not None and self.mixers.layers[layer]

    @property
    def windows(self) -> set[int | None]:
        return {self.window_of(layer) for layer in range(self.num_layers)}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return all token ids that end a sequence, eos_token_id first."""
        return (
            () if self.eos_token_id is None else (self.eos_token_id,)
        ) + self.other_eos_token_ids

    def ending_at(self, ids: Iterable[int]) -> ModelConfig:
        """Return a copy in which these ids also end a sequence, if the vocabulary has the ids."""
        known = dict.fromkeys(self.eos_token_ids)
        known |= {i: None for i in ids if type(i) is int and 0 <= i < self.vocab_size}
        first, *others = known or [None]
        return replace(self, eos_token_id=first, other_eos_token_ids=tuple(others))

    @property
    def layer_kinds(self) -> dict[int, int]:
        """Return the number of layers of each kind, by the first layer of the kind. Kinds differ in
        window, RoPE, experts, mixers, heads, keys of another layer, or an MLP alone."""
        layers = range(self.num_layers)
        kinds = [
            (
                *(self.window_of(i), self.rope_of(i), self.has_experts(i), self.has_mixer(i)),
                *(self.heads_of(i), self.values_of(i), self.shares_keys(i)),
                self.mlp_layers is not None and self.mlp_layers[i],
            )
            for i in layers
        ]
        return {kinds.index(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def with_layers(self, layers: Iterable[int]) -> ModelConfig:
        """Return a copy that consists of these layers, which may repeat."""
        layers, experts, mixers, shared = tuple(layers), self.experts, self.mixers, self.shared_keys
        if shared is not None:  # only if an earlier layer of the copy has keys
            before = [{self.windowed(i) for i in layers[:n]} for n in range(len(layers))]
            both = zip(layers, before, strict=True)
            shared = tuple(shared[i] and self.windowed(i) in kinds for i, kinds in both)
            shared = shared if any(shared) else None
        if experts is not None and experts.layers is not None:
            experts = replace(experts, layers=tuple(map(self.has_experts, layers)))
        if mixers is not None:
            mixers = replace(mixers, layers=tuple(map(self.has_mixer, layers)))
        sizes = {"shared_keys": shared, "experts": experts, "mixers": mixers}
        for name in BY_LAYER:
            each = getattr(self, name)
            sizes[name] = each and tuple(each[layer] for layer in layers)
        return replace(self, num_layers=len(layers), **sizes)

    def without_foreign_tokens(self) -> ModelConfig:
        """Return a copy without special tokens outside of the vocabulary: defaults may come from a
        larger vocabulary."""

        def own(token: int | None) -> int | None:
            return token if token is not None and 0 <= token < self.vocab_size else None

        first, *others = [t for t in self.eos_token_ids if own(t) is not None] or [None]
        return replace(
            self,
            bos_token_id=own(self.bos_token_id),
            eos_token_id=first,
            other_eos_token_ids=tuple(others),
            pad_token_id=own(self.pad_token_id),
        )

    def validate(self) -> ModelConfig:
        """Return self; raise ConfigError if sizes contradict each other, or the architecture cannot
        express the model."""
        for name in _SIZES:
            value, largest = getattr(self, name), _LARGEST.get(name, _MAX_SIZE)
            if not 0 < value <= largest:
                raise ConfigError(f"model {name}: must be positive and at most {largest}: {value}")
        for name, most in (("norm_eps", 1.0), ("initializer_range", 1e3)):
            value = getattr(self, name)
            if not 0 <= value <= most:  # also false for NaN
                raise ConfigError(f"model {name}: must be between 0 and {most:g}, got {value}")
        if self.num_labels and (self.tied_embeddings or self.arch.classifier is None):
            raise ConfigError(f"model num_labels: {self.architecture} has no score head")
        if not 0 <= self.num_labels <= self.vocab_size:
            raise ConfigError(
                f"model num_labels: at most the {self.vocab_size} ids, got {self.num_labels}"
            )
        for token in self.eos_token_ids:
            if token < 0:
                raise ConfigError(f"model eos_token_id: must not be negative, got {token}")
        self._check_heads()
        if self.mixers is not None:
            self.mixers.validate(self.num_layers)
        if self.latent is not None:
            self.latent.validate()
        if not 0 < self.rope_theta < math.inf:
            raise ConfigError(f"model rope_theta: must be positive, got {self.rope_theta}")
        self._check_factors()
        part = self.partial_rotary_factor
        turned = self.rotary_dim if self.positions == "rope" else 2
        if not 0 < part <= 1 or turned < 2 or turned % 2:
            raise ConfigError(
                f"model partial_rotary_factor: {part} of {self.head_dim} channels must be an even "
                f"number, got {turned}"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_dim // 2)
        if self.query_growth is not None and self.rope_scaling is None:
            raise ConfigError("model query_growth: needs rope_scaling, of which it has its length")
        for name in (*BY_LAYER, "shared_keys"):
            each = getattr(self, name)
            if each is not None and len(each) != self.num_layers:
                raise ConfigError(
                    f"model {name}: must be {self.num_layers} values, got {len(each)}"
                )
        if self.experts is not None:
            self.experts.validate(self.num_layers)
        for name, value in self.arch.fixed(self).items():
            if getattr(self, name) != value:
                got = getattr(self, name)
                raise ConfigError(f"model {name}: {self.architecture} needs {value!r}, got {got!r}")
        return self

    def _check_heads(self) -> None:
        """Raise ConfigError for numbers or sizes of heads that are not implemented."""
        for name in ("full_kv_heads", "full_head_dim"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST["head_dim"]:
                raise ConfigError(f"model {name}: must be positive, got {value}")
        for kv_heads in (self.num_kv_heads, self.full_kv_heads or 1):
            if self.num_heads % kv_heads:
                raise ConfigError(
                    f"model num_kv_heads: {kv_heads} does not divide {self.num_heads} heads"
                )
        for layer in range(self.num_layers):
            if self.keys_of(layer) is None:
                raise ConfigError(f"model shared_keys: no layer has the keys of layer {layer}")
        for size in (self.head_dim, self.full_head_dim or 2):
            if self.positions == "rope" and size % 2:
                raise ConfigError(f"model head_dim: RoPE needs an even number, got {size}")

    def _check_factors(self) -> None:
        """Raise ConfigError for factors that are not positive, or not implemented beside other
        fields."""
        scale = self.attention_scale
        if scale is not None and not 0 < scale < math.inf:
            raise ConfigError(f"model attention_scale: must be positive, got {scale}")
        cap = self.attention_softcap
        if cap is not None and not 0 < cap == int(cap) < 1 << 16:
            raise ConfigError(f"model attention_softcap: must be a whole number, got {cap}")
        for name in MULTIPLIERS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model {name}: must be positive, got {getattr(self, name)}")
        biased = self.o_bias or self.mlp_bias
        if self.residual_multiplier != 1 and (biased or self.arch.post_norm):
            raise ConfigError(
                "model residual_multiplier: not with biases of attention's output and the MLP, or "
                f"norms behind halves, got {self.residual_multiplier}"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json of transformers 4 or 5; a ConfigError names the wrong field."""
        try:
            return cls(**read_fields(hf)).validate()
        except (TypeError, AttributeError, KeyError) as error:  # values of other types
            raise ConfigError(f"config.json has a value of the wrong type ({error})") from error

    def to_hf(self, dtype: str = "bf16") -> dict[str, Any]:
        """Return config.json for weights stored as dtype ('bf16', 'fp32'), for transformers 4 and
        5."""
        return self.arch.write(self.without_foreign_tokens(), dtype)


@lru_cache(maxsize=1024)
def _halves(config: ModelConfig, layer: int) -> tuple[HalfSpec, ...]:
    return config.arch.layers(config, layer)
