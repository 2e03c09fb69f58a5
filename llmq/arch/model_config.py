"""ModelConfig: one description of a model for every architecture."""

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
"""Rows of embedding and logits are padded to a multiple of this, which keeps products aligned."""

_SIZES = (
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_positions"
).split()

BY_LAYER = ("windowed_layers", "rope_layers", "mlp_layers")
"""Fields of ModelConfig with a value for each layer; Experts and Mixers have such fields, too."""

_MAX_SIZE = 2**31 - 1  # ids and positions are int32
_LARGEST = {"num_layers": 1 << 16, "head_dim": 1 << 16}


class Heads(NamedTuple):
    """Heads of attention in a layer: query heads, key and value heads, and channels of each."""

    query: int
    kv: int
    channels: int


class Rope(NamedTuple):
    """RoPE of a layer. theta: base of the frequencies. scaling: stretching of the frequencies.
    length: factor of cos and sin. channels: number of rotated channels of a head."""

    theta: float
    scaling: RopeScaling | None
    length: float
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one model. Letters in the field docs name dimensions in the code."""

    architecture: str
    """Hugging Face class name, a key of ARCHITECTURES."""
    vocab_size: int
    """V: number of token ids."""
    hidden_size: int
    """C: channels of the residual stream."""
    intermediate_size: int
    """F: width of the MLP."""
    experts: Experts | None = None
    """The experts that layers have in the place of the MLP; None: no layer has any."""
    num_layers: int
    """L: transformer blocks."""
    num_heads: int
    """Hq: query heads."""
    num_kv_heads: int
    """Hkv: key and value heads, divides Hq."""
    head_dim: int
    """Hd: channels of one head."""
    full_kv_heads: int | None = None
    """Hkv of layers without a window; None: num_kv_heads."""
    full_head_dim: int | None = None
    """Hd of layers without a window; None: head_dim."""
    shared_keys: tuple[bool, ...] | None = None
    """True for each layer that reads the keys and values of layer `keys_of`; None: no layer
    does."""
    wide_mlp: bool = False
    """The MLP of layers that share keys has twice the width."""
    per_layer_size: int | None = None
    """Channels of the vector that each layer adds for every token, made from the embedding and
    another table; None: there are no such vectors."""
    keys_as_values: bool = False
    """In layers without a window, the keys before norm and RoPE are also the values."""
    mixers: Mixers | None = None
    """The delta nets, state spaces or short convolutions that layers have in the place of
    attention; None: there are none."""
    mlp_layers: tuple[bool, ...] | None = None
    """True for each layer that is an MLP or experts alone, False for attention or a mixer alone;
    None: each layer has two halves."""
    latent: LatentAttention | None = None
    """The latent attention that all layers have in the place of attention; None: there is none."""
    max_positions: int
    """Longest sequence in tokens."""
    sliding_window: int | None = None
    """Number of positions that a token sees, itself included, less than `longest`; None: all."""
    windowed_layers: tuple[bool, ...] | None = None
    """True for each layer with the sliding window; None: all layers."""
    rope_layers: tuple[bool, ...] | None = None
    """True for each layer with RoPE; None: all layers, if positions are RoPE."""
    norm: str
    """'rmsnorm' or 'layernorm'."""
    norm_eps: float
    """Added to the mean square (or variance) before the root."""
    activation: str
    """'swiglu', 'geglu', 'gelu', or 'relu2', ReLU's square; GELU by its tanh approximation."""
    positions: str
    """'rope' or 'learned'."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies; None: they are not stretched."""
    query_growth: float | None = None
    """Queries at position p are multiplied by 1 + query_growth * log(1 + p // P), P: rope_scaling's
    original_max_positions; None: no factor."""
    partial_rotary_factor: float = 1.0
    """Share of a head's channels that are rotated; the first channels are."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies, not stretched, of layers with a window; None: as in other
    layers."""
    attention_scale: float | None = None
    """Factor of attention's scores; None: 1 / sqrt(Hd)."""
    attention_softcap: float | None = None
    """A whole number: each score becomes softcap * tanh(score / softcap); None: no cap."""
    embedding_multiplier: float = 1.0
    """Factor of the embedding's rows."""
    residual_multiplier: float = 1.0
    """Factor of each half's output, in the product of its last matrix."""
    logits_scaling: float = 1.0
    """Logits are divided by it, before a soft cap."""
    logit_softcap: float | None = None
    """Each logit becomes softcap * tanh(logit / softcap); None: no cap."""
    qk_norm: bool
    """RMSNorm of queries and keys before RoPE, for each head, or as arch.wide_qk_norm says."""
    qkv_bias: bool
    """Bias on the query, key and value projections."""
    o_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    """Bias on the MLP's projections."""
    tied_embeddings: bool
    """The LM head is the embedding matrix."""
    num_labels: int = 0
    """Rows of the score head that stands in place of the LM head; 0: there is none."""
    bos_token_id: int | None = None
    """Id that begins a sequence."""
    eos_token_id: int | None = None
    """Id that ends a document; if the model has several, the first."""
    other_eos_token_ids: tuple[int, ...] = ()
    """Further ids that end a sequence."""
    pad_token_id: int | None = None
    """Id of padding."""
    new_tokens: tuple[int, int] | None = None
    """Ids [first, stop) added to a trained model. Their rows can be trained beside adapters. None:
    no new ids."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialized matrices."""

    @property
    def arch(self) -> Architecture:
        """The architecture: constants of the family, and names of weights."""
        return architecture(self.architecture).of(self)

    def halves(self, layer: int) -> tuple[HalfSpec, ...]:
        return _halves(self, layer)

    def matrices(self, layer: int) -> tuple[Matrix, ...]:
        return tuple(matrix for half in self.halves(layer) for matrix in half.matrices)

    @property
    def gated(self) -> bool:
        """The MLP has a gate: its up projection has 2F rows, the second F are the gate's."""
        return self.activation in ("swiglu", "geglu")

    @property
    def embedding_scale(self) -> float:
        """The factor of the embedding's rows; ops round it to their format."""
        return self.embedding_multiplier * self.arch.embedding_scale(self.hidden_size)

    @property
    def padding_row(self) -> int | None:
        """Row of the embedding without a gradient, torch's padding_idx: pad_token_id, counted from
        the end if negative; None: no such row."""
        pad, vocab = self.pad_token_id, self.vocab_size
        if pad is None or not self.arch.pads_embedding or not -vocab <= pad < vocab:
            return None
        return pad % vocab

    @property
    def rotary_dim(self) -> int:
        return self._rotary(self.head_dim)

    def _rotary(self, channels: int) -> int:
        """Number of rotated channels of a head."""
        its = self.latent
        return int(channels * self.partial_rotary_factor) if its is None else its.rotary

    @property
    def longest(self) -> int:
        """Length in tokens of the longest sequence whose positions the model knows."""
        return longest_sequence(self.rope_scaling, self.max_positions)

    def windowed(self, layer: int) -> bool:
        """True if the layer has the window, if the model has one."""
        return self.windowed_layers is None or self.windowed_layers[layer]

    def heads_of(self, layer: int) -> Heads:
        if self.windowed(layer):
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        kv, channels = self.full_kv_heads, self.full_head_dim
        return Heads(self.num_heads, kv or self.num_kv_heads, channels or self.head_dim)

    @property
    def every_heads(self) -> tuple[Heads, ...]:
        """The different `Heads` of all layers."""
        return tuple(dict.fromkeys(map(self.heads_of, range(self.num_layers))))

    def values_of(self, layer: int) -> int:
        """Number of value heads that a layer computes itself; 0: its keys are its values."""
        shared = self.keys_as_values and not self.windowed(layer)
        return 0 if shared else self.heads_of(layer).kv

    def shares_keys(self, layer: int) -> bool:
        return self.shared_keys is not None and self.shared_keys[layer]

    def keys_of(self, layer: int) -> int | None:
        """The layer that computes the keys and values of this layer: itself, or the last earlier
        layer that computes its own and has a window if and only if this one has. None: there is no
        such layer."""
        if not self.shares_keys(layer):
            return layer
        alike = [i for i in range(layer) if self.windowed(i) == self.windowed(layer)]
        return next((i for i in reversed(alike) if not self.shares_keys(i)), None)

    def mlp_size(self, layer: int) -> int:
        """F of a layer's MLP."""
        wide = self.wide_mlp and self.shares_keys(layer)
        return self.intermediate_size * (2 if wide else 1)

    def rope_of(self, layer: int) -> Rope | None:
        """Rotary frequencies of a layer; None without RoPE."""
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
        """Vp: rows of the embedding and of the LM head in memory."""
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def outputs(self) -> int:
        """Logits behind each token: one for each id, or for each label of a score head."""
        return self.num_labels or self.vocab_size

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // VOCAB_PADDING) * VOCAB_PADDING

    def window_of(self, layer: int) -> int | None:
        """Number of positions that a token sees in a layer, itself included; None: all."""
        return self.sliding_window if self.windowed(layer) else None

    def has_experts(self, layer: int) -> bool:
        """True if the layer has experts in the place of the MLP."""
        its = self.experts
        return its is not None and (its.layers is None or its.layers[layer])

    @property
    def expert_size(self) -> int:
        return self.experts.size or self.intermediate_size

    def has_mixer(self, layer: int) -> bool:
        """True if the layer has one of `mixers` in the place of attention."""
        return self.mixers is not None and self.mixers.layers[layer]

    @property
    def windows(self) -> set[int | None]:
        return {self.window_of(layer) for layer in range(self.num_layers)}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, eos_token_id first."""
        return (
            () if self.eos_token_id is None else (self.eos_token_id,)
        ) + self.other_eos_token_ids

    def ending_at(self, ids: Iterable[int]) -> ModelConfig:
        """A copy with more ids that end a sequence, as far as the vocabulary has them."""
        known = dict.fromkeys(self.eos_token_ids)
        known |= {i: None for i in ids if type(i) is int and 0 <= i < self.vocab_size}
        first, *others = known or [None]
        return replace(self, eos_token_id=first, other_eos_token_ids=tuple(others))

    @property
    def layer_kinds(self) -> dict[int, int]:
        """By the first layer of each kind: the number of layers of this kind. Kinds differ in
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
        """A copy with a layer like each of these layers, which may repeat."""
        layers, experts, mixers, shared = tuple(layers), self.experts, self.mixers, self.shared_keys
        if shared is not None:  # only if an earlier layer in the copy has keys
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
        """A copy without special tokens outside the vocabulary: defaults may come from a larger
        vocabulary."""

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
        """Return self; ConfigError if sizes contradict, or the architecture cannot express the
        model."""
        for name in _SIZES:
            value, largest = getattr(self, name), _LARGEST.get(name, _MAX_SIZE)
            if not 0 < value <= largest:
                raise ConfigError(f"model {name}: must be positive and at most {largest}: {value}")
        for name, most in (("norm_eps", 1.0), ("initializer_range", 1e3)):
            value = getattr(self, name)
            if not 0 <= value <= most:  # nor is NaN
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
        """Read a parsed config.json of transformers 4 or 5; ConfigError names a field at fault."""
        try:
            return cls(**read_fields(hf)).validate()
        except (TypeError, AttributeError, KeyError) as error:  # values have other types
            raise ConfigError(f"config.json has a value of the wrong type ({error})") from error

    def to_hf(self, dtype: str = "bf16") -> dict[str, Any]:
        """config.json for weights stored as dtype ('bf16', 'fp32'), for transformers 4 and 5."""
        return self.arch.write(self.without_foreign_tokens(), dtype)


@lru_cache(maxsize=1024)
def _halves(config: ModelConfig, layer: int) -> tuple[HalfSpec, ...]:
    return config.arch.layers(config, layer)
