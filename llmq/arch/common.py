"""Code that architectures share: readers of config.json's fields, and the base of their
descriptions.

Both generations are read: transformers 4 (rope_theta, rope_scaling, torch_dtype) and transformers 5
(rope_parameters, dtype). An unsupported value is an error, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.arch.halves import attention, embedding, head, mlp
from llmq.arch.matrix import HalfSpec, Module
from llmq.arch.mtp import MtpNames
from llmq.base.errors import ConfigError

if TYPE_CHECKING:  # --help does not wait for NumPy
    from llmq.base.step_inputs import Input

REQUIRED = object()
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Fields that belong to the text model, but may stand outside its text_config."""


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Fields of ModelConfig with factors that most architectures fix to 1."""

QUANTIZATIONS = ("bitnet", "bitsandbytes", "compressed-tensors", "fp8", "modelopt", "mxfp4")
"""Kinds of codes, by quantization_config's quant_method, that checkpoint/coded decodes."""


@dataclass(frozen=True, slots=True)
class GgufKind:
    """An architecture in GGUF files, with what llama.cpp supports.

    name: the architecture's name in GGUF files. pairs: rows of queries and keys are stored in pairs
    that RoPE rotates together. windows: sliding windows are supported. heads: a layer's heads
    together may be wider or narrower than the hidden size. grouped: queries may share keys.
    renormalize: weights of a token's experts have the sum 1 (see `Experts`). longrope: RoPE scaling
    "longrope" is supported. full_every: all layers except every full_every-th have windows, and
    files do not store the layers; None: files store the layers. needs: tensors that every file must
    have. activation: alpha and limit of paired experts. heads_in_turns: value heads of delta nets
    are stored in turns (`gguf_halves`). routers: files store how routers weigh experts, and the
    number of first layers without experts. factors: files store the factors of embeddings, scores,
    branches and logits. scale: factor of scores, which files do not store; None: 1 / sqrt(channels
    of a head). softcap: files store the soft cap of logits. vocabulary: name of a tokenizer with
    merges and scores; None: the tokenizer's own kind. nextn: files have heads for multi-token
    prediction, as further layers.
    """

    name: str
    pairs: bool = False
    windows: bool = False
    heads: bool = False
    grouped: bool = True
    renormalize: bool = False
    longrope: bool = False
    full_every: int | None = None
    needs: tuple[str, ...] = ()
    activation: tuple[float | None, float | None] = (None, None)
    heads_in_turns: bool = False
    routers: bool = False
    factors: bool = False
    scale: float | None = None
    softcap: bool = False
    vocabulary: str | None = None
    nextn: bool = False


class Architecture:
    """One family of models: constants of the family's Hugging Face class, and names of weights. A
    subclass, in a file of its own, declares the differences. An argument `model` is a
    llmq.arch.model_config.ModelConfig; the method `read` returns its fields."""

    name: str
    """Class at Hugging Face: config.json's "architectures"."""
    model_type: str
    """config.json's "model_type"."""
    wrapper: str | None = None
    """Hugging Face class of larger models, for example with images, whose language model has this
    architecture."""
    text_defaults: Mapping[str, Any] = {}
    """Defaults of fields of the wrapper's text_config."""
    label: str
    """Name in [Options] and in the log."""

    def of(self, model: Any) -> Architecture:
        """The architecture of a model; other sizes of the same Hugging Face class may have
        another."""
        return self

    def embedding_scale(self, hidden_size: int) -> float:
        """Factor of the embedding's rows besides embedding_multiplier, rounded to the rows'
        format."""
        return 1.0

    def inputs(self, model: Any) -> tuple[Input, ...]:
        """Arrays of a batch that the model reads besides tokens and targets."""
        return ()

    @property
    def classifier(self) -> str | None:
        """Class at Hugging Face of models with a score head; None: there is none."""
        return self.name.replace("ForCausalLM", "ForSequenceClassification")

    gguf: GgufKind | None = None
    """The architecture in GGUF files; None: llama.cpp does not have it. Not inherited."""

    norm = "rmsnorm"
    """'rmsnorm' or 'layernorm'."""
    activation = "swiglu"
    """'swiglu', 'geglu', 'gelu', or 'relu2', ReLU's square; GELU by its tanh approximation."""
    positions = "rope"
    """'rope' or 'learned'."""
    qk_norm = False
    """RMSNorm of queries and keys before RoPE."""
    wide_qk_norm = False
    """qk_norm normalizes all query channels of a token together, and all key channels; else each
    head."""
    norm_offset = False
    """Norms, qk_norm included, multiply by 1 + weight, and round once, behind this product. Without
    the offset, all norms but post_norm also round in front of the product."""
    norm_once = False
    """Norms, qk_norm included, round once, although they multiply by the weight itself."""
    value_norm = False
    """RMSNorm of every value head, without weights; with keys_as_values, of the heads that are both
    keys and values."""
    layer_scale = False
    """A number per layer, which is loaded and never trained, multiplies the layer's output."""
    rope_pairs = False
    """In files, two channels that RoPE rotates as a pair are neighbours; else they are half a head
    apart."""
    gated_attention = False
    """Attention's output is multiplied by the sigmoid of a gate. The query projection has the
    gate's channels behind each head."""
    sinks = False
    """Attention sinks: the softmax of each query head has one more score, whose value is zero."""
    pads_embedding = True
    """The row of pad_token_id gets no gradient as an input embedding."""
    qkv_bias: bool | None = False
    """None: the config's attention_bias decides."""
    o_bias: bool | None = False
    """None: the same value as qkv_bias."""
    mlp_bias: bool | None = False
    """None: the config's mlp_bias decides."""
    head_dim: int | None = None
    """Default of head_dim; None: hidden_size / number of heads."""
    mlp_factor: int | None = None
    """Default of intermediate_size / hidden_size; None: config.json must have intermediate_size."""
    own_tokenizer_class: str | None = None
    """Tokenizer class that transformers takes instead of tokenizer_config.json's; None: the
    file's."""
    wrapper_tokenizer_class: str | None = None
    """The same for models of the class `wrapper`."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    """Defaults of the fields of these names."""

    own_fields: tuple[str, ...] = ()
    """The fields that this architecture sets, among those of ModelConfig that most architectures do
    not have."""
    modules: Mapping[str, tuple[str, ...]]
    """By parameter: the Hugging Face modules whose rows, in this order, are the parameter's; {}
    stands for the layer."""
    file_prefix = ""
    """Prefix of names in files, if it is not "model."; else empty."""
    transposed = False
    """Matrices of blocks are stored (in_features, out_features)."""
    gate_first = False
    """In a stored matrix of gate and up, the gate's rows come first."""
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    """Names that --lora-targets accepts, in the order of its help; a model may lack some."""
    mtp: MtpNames | None = None
    """Module names of a head for multi-token prediction; None: such a head cannot be trained."""
    norm_names: Mapping[str, str] = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    """Hugging Face names of norms by place. ln1, ln2: norm of the input of a block's first and
    second half. ln2_post: norm of the first half's output. ln1_post: norm of the last half's output
    in the preceding layer."""

    @property
    def pre_norm(self) -> bool:
        """Norms stand before the halves of blocks."""
        return "ln1" in self.norm_names

    @property
    def post_norm(self) -> bool:
        """RMSNorms stand behind the halves of blocks."""
        return "ln1_post" in self.norm_names

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ModelConfig for a parsed config.json of this architecture. Raises
        ConfigError naming the first field that is missing or malformed, or that asks for a
        computation which is not implemented. Dropout is ignored: see ignored_fields."""
        coded = get(hf, "quantization_config", dict, None)
        if coded is not None:
            reject(
                {"quantization_config.quant_method": coded.get("quant_method")},
                "quantization_config.quant_method",
                *QUANTIZATIONS,
            )
        reject(hf, "model_type", self.model_type)
        eos = hf.get("eos_token_id", self.eos_token_id)
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int for token in ids):
            raise ConfigError(
                f"config.json: eos_token_id must be one id or a list of ids, got {eos!r}"
            )
        bos, pad = (get(hf, f"{name}_token_id", int, None) for name in ("bos", "pad"))
        head = {}
        if self.classifier is not None and hf.get("architectures") == [self.classifier]:
            labels = get(hf, "id2label", dict, None)  # transformers' default is two labels
            head = {"num_labels": 2 if labels is None else len(labels), "tied_embeddings": False}
        return {
            "architecture": self.name,
            "vocab_size": size(hf, "vocab_size"),
            "bos_token_id": bos if "bos_token_id" in hf else self.bos_token_id,
            "eos_token_id": ids[0] if ids else None,
            "other_eos_token_ids": tuple(ids[1:]),
            "pad_token_id": pad if "pad_token_id" in hf else self.pad_token_id,
            "initializer_range": get(hf, "initializer_range", float, 0.02),
            **self.read_sizes(hf),
            **head,
        }

    def read_wrapped(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read as `read` does, for the language model in a config.json of `wrapper`."""
        return self.read(self.text_config(hf))

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the language model in a config.json of `wrapper`."""
        outer = {name: hf[name] for name in _OUTER if name in hf}
        return {**self.text_defaults, **outer, **get(hf, "text_config", dict)}

    def write(self, model: Any, dtype: str) -> dict[str, Any]:
        """config.json of a model whose weights are stored as dtype ('bf16' or 'fp32'). transformers
        4 and 5 both load it as the same model: positions and dtype are written in both
        spellings."""
        eos = model.eos_token_ids
        hf_dtype = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        labels = [f"LABEL_{i}" for i in range(model.num_labels)]  # names in transformers
        of_labels = {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }
        return {
            "architectures": [self.classifier if model.num_labels else self.name],
            **(of_labels if model.num_labels else {}),
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            **self.write_sizes(model),
            "tie_word_embeddings": model.tied_embeddings,
            "initializer_range": model.initializer_range,
            "bos_token_id": model.bos_token_id,
            "eos_token_id": list(eos) if len(eos) > 1 else model.eos_token_id,
            "pad_token_id": model.pad_token_id,
            "use_cache": True,
            "torch_dtype": hf_dtype,
            "dtype": hf_dtype,
        }

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The other fields of ModelConfig, which `read` adds to its own."""
        raise NotImplementedError

    def write_sizes(self, model: Any) -> dict[str, Any]:
        raise NotImplementedError

    def kinds(self, qkv_bias: bool = False, mlp_bias: bool = False) -> dict[str, Any]:
        """The fields of ModelConfig for norm, activation, positions and biases. qkv_bias, mlp_bias:
        config.json's values, used only if the architecture leaves them open."""
        qkv_bias = qkv_bias if self.qkv_bias is None else self.qkv_bias
        return {
            "norm": self.norm,
            "activation": self.activation,
            "positions": self.positions,
            "qk_norm": self.qk_norm,
            "qkv_bias": qkv_bias,
            "o_bias": qkv_bias if self.o_bias is None else self.o_bias,
            "mlp_bias": mlp_bias if self.mlp_bias is None else self.mlp_bias,
        }

    def fixed(self, model: Any) -> dict[str, Any]:
        """Fields that a model of this architecture must have, given its other fields."""
        names = "windowed_layers rope_layers local_rope_theta query_growth attention_scale".split()
        names += "logit_softcap experts mixers latent full_kv_heads full_head_dim".split()
        names += ["shared_keys", "per_layer_size", "mlp_layers", "attention_softcap"]
        others = dict.fromkeys(names) | dict.fromkeys(MULTIPLIERS, 1.0)
        others |= dict.fromkeys(("keys_as_values", "wide_mlp"), False)
        others = {name: value for name, value in others.items() if name not in self.own_fields}
        return self.kinds(model.qkv_bias, model.mlp_bias) | others

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        """The halves of a block, in order; they may differ from layer to layer."""
        mixed = model.has_mixer(layer)
        first = model.mixers.half(model, layer) if mixed else attention(model, layer)
        return first, mlp(model, layer)

    def embedding(self, model: Any) -> tuple[Module, ...]:
        return embedding(model)

    def head(self, model: Any) -> tuple[Module, ...]:
        return head(model)

    def beside(self, model: Any) -> dict[str, tuple[Module, ...]]:
        """Modules beside the embedding, the layers and the head, by block."""
        return {}


def ignored_fields(hf: Mapping[str, Any]) -> list[str]:
    """Lines about fields of config.json that training ignores: dropout, and vision parts."""
    names = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
    lines = [
        f"config.json: {name} {hf[name]} is ignored, there is no dropout"
        for name in names
        if hf.get(name)
    ]
    if hf.get("vision_config"):
        lines.append("config.json: vision_config: images are not trained, only texts")
    return lines


def get(hf: Mapping[str, Any], name: str, kind: type, default: Any = REQUIRED) -> Any:
    """Return hf[name], checked to have the type `kind`; null is allowed if the default is None."""
    value = hf.get(name, default)
    if value is REQUIRED:
        raise ConfigError(f"config.json: {name} is missing")
    if value is None and default is None:
        return None
    if kind is float and type(value) is int and abs(value) <= 2**63:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config.json: {name}: expected {kind.__name__}, got {value!r}")
    return value


def size(hf: Mapping[str, Any], name: str) -> int:
    """Return hf[name], checked to be a positive int. Numbers of layers and heads have an upper
    bound, because some lists have an item for each layer or head."""
    value = get(hf, name, int)
    largest = 1 << 16 if "layer" in name or "head" in name else 2**31 - 1
    if value > largest:
        raise ConfigError(f"config.json: {name}: must be at most {largest}, got {value}")
    if value <= 0:
        raise ConfigError(f"config.json: {name}: must be positive, got {value}")
    return value


def reject(hf: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise unless the field is absent or has one of the supported values."""
    if name in hf and hf[name] not in supported:
        wanted = " or ".join(repr(value) for value in supported)
        raise ConfigError(f"config.json: {name}: {hf[name]!r} is not supported, only {wanted}")
