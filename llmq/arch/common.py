"""Code that architectures share: readers for fields of config.json, and the base class
Architecture.

The readers accept config.json files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and
transformers 5 (rope_parameters, dtype). An unsupported value of a field is an error and never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.arch.halves import attention, embedding, head, mlp
from llmq.arch.matrix import HalfSpec, Module
from llmq.arch.mtp import MtpNames
from llmq.base.errors import ConfigError

if TYPE_CHECKING:  # --help need not wait for NumPy
    from llmq.base.step_inputs import Input

REQUIRED = object()
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Fields of the text model that may stand outside of text_config."""


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Fields of ModelConfig with a factor that is 1 in most architectures."""

QUANTIZATIONS = ("bitnet", "bitsandbytes", "compressed-tensors", "fp8", "modelopt", "mxfp4")
"""Values of quant_method in quantization_config whose codes checkpoint/coded can decode."""


@dataclass(frozen=True, slots=True)
class GgufKind:
    """An architecture's name and layout in GGUF files, and the features that llama.cpp supports.

    name: the architecture's name in GGUF files. pairs: the two channels that RoPE rotates together
    are neighbouring rows of queries and keys. windows: sliding windows are supported. heads: all
    heads of a layer together may be wider or narrower than the hidden size. grouped: several query
    heads may share a key head. renormalize: the weights of a token's experts have the sum 1
    (`Experts.renormalize`). longrope: RoPE scaling "longrope" is supported. full_every: every
    full_every-th layer has no window, and files do not say which layers; None: files list the
    layers. needs: names of tensors that every file must have. activation: constants alpha and limit
    of the activation of paired experts. heads_in_turns: value heads of delta nets are stored in
    another order (`gguf_halves`). routers: files store how routers weigh experts, and how many
    first layers have no experts. factors: files store the multipliers of embeddings, attention
    scores, residual branches and logits. scale: multiplier of attention scores, which files do not
    store; None: 1 / sqrt(channels of a head). softcap: files store the soft cap of the logits.
    vocabulary: name of a tokenizer with merges and scores; None: the name follows from the
    tokenizer. nextn: files store heads for multi-token prediction as further layers.
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
    """One family of models: the constants of its Hugging Face class, and its names of weights. A
    subclass declares the differences from this base class, in a file of its own. Arguments called
    `model` are a llmq.arch.model_config.ModelConfig; the method `read` returns the fields of a
    ModelConfig."""

    name: str
    """Hugging Face class, in "architectures" of config.json."""
    model_type: str
    """"model_type" in config.json."""
    wrapper: str | None = None
    """Hugging Face class of larger models, for example with images, that contain a language model
    of this architecture."""
    text_defaults: Mapping[str, Any] = {}
    """Default values of fields in the wrapper's text_config."""
    label: str
    """Name that [Options] and the log print."""

    def of(self, model: Any) -> Architecture:
        """Return the architecture of a model, which may depend on the model's size."""
        return self

    def embedding_scale(self, hidden_size: int) -> float:
        """Return a factor of the embedding's rows besides embedding_multiplier, rounded to the
        rows' dtype."""
        return 1.0

    def inputs(self, model: Any) -> tuple[Input, ...]:
        """Return the arrays of a batch that the model reads besides tokens and targets."""
        return ()

    @property
    def classifier(self) -> str | None:
        """Return the Hugging Face class of models with a score head; None if the class does not
        exist."""
        return self.name.replace("ForCausalLM", "ForSequenceClassification")

    gguf: GgufKind | None = None
    """Description of the architecture's GGUF files; None if llmq writes no such files. Subclasses
    do not inherit this value."""

    norm = "rmsnorm"
    """Kind of norms: 'rmsnorm' or 'layernorm'."""
    activation = "swiglu"
    """Activation of the MLP: 'swiglu', 'geglu', 'gelu', or 'relu2', the square of ReLU; GELU is its
    tanh approximation."""
    positions = "rope"
    """Kind of positions: 'rope' or 'learned'."""
    qk_norm = False
    """True if RMSNorm is applied to queries and keys before RoPE."""
    wide_qk_norm = False
    """True if qk_norm normalizes all query channels of a token together, and all key channels;
    False if qk_norm normalizes each head."""
    norm_offset = False
    """True if norms, qk_norm included, multiply by 1 + weight, and round once, after this product.
    Without the offset, all norms except post_norm also round before the product."""
    norm_once = False
    """True if norms, qk_norm included, round once, and multiply by the weight without an offset."""
    value_norm = False
    """True if each value head has an RMSNorm without weights; with keys_as_values, heads that are
    both keys and values have this norm."""
    layer_scale = False
    """True if each layer's output is multiplied by a number of the layer, which is loaded and never
    trained."""
    rope_pairs = False
    """True if two channels that RoPE rotates as a pair are neighbours in files; False if they are
    half a head apart."""
    gated_attention = False
    """True if attention's output is multiplied by the sigmoid of a gate. The query projection then
    has the channels of a gate after each head."""
    sinks = False
    """True if attention has sinks: the softmax of each query head has one more score, whose value
    is zero."""
    pads_embedding = True
    """True if the row of pad_token_id gets no gradient as an input embedding."""
    qkv_bias: bool | None = False
    """True if query, key and value projections have biases; None: attention_bias in config.json
    decides."""
    o_bias: bool | None = False
    """True if attention's output projection has a bias; None: the same value as qkv_bias."""
    mlp_bias: bool | None = False
    """True if the MLP has biases; None: mlp_bias in config.json decides."""
    head_dim: int | None = None
    """Default value of head_dim; None: hidden_size / number of heads."""
    mlp_factor: int | None = None
    """Default value of intermediate_size / hidden_size; None: config.json must have
    intermediate_size."""
    own_tokenizer_class: str | None = None
    """Tokenizer class that transformers uses whatever tokenizer_config.json says; None:
    tokenizer_config.json decides."""
    wrapper_tokenizer_class: str | None = None
    """Tokenizer class, like own_tokenizer_class, for models of the class `wrapper`."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    """Default values of the config.json fields with these names."""

    own_fields: tuple[str, ...] = ()
    """Fields of ModelConfig that this architecture sets and most architectures lack."""
    modules: Mapping[str, tuple[str, ...]]
    """By parameter, the Hugging Face modules whose rows are concatenated to the parameter; {}
    stands for the layer."""
    file_prefix = ""
    """Prefix of tensor names in files, if the prefix is not "model."; else empty."""
    transposed = False
    """True if files store matrices of blocks as (in_features, out_features)."""
    gate_first = False
    """True if the gate's rows come first in a stored matrix of gate and up."""
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    """Names that --lora-targets accepts, in the order of the help text; a model may lack some."""
    mtp: MtpNames | None = None
    """Module names of a head for multi-token prediction; None if such a head cannot be trained."""
    norm_names: Mapping[str, str] = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    """Hugging Face names of norms, by place in a block. ln1, ln2: norms of the inputs of a block's
    two halves: attention, and MLP. ln2_post: norm of attention's output. ln1_post: norm of the
    MLP's output in the preceding layer."""

    @property
    def pre_norm(self) -> bool:
        """Return True if norms are applied to the inputs of attention and MLP."""
        return "ln1" in self.norm_names

    @property
    def post_norm(self) -> bool:
        """Return True if RMSNorms are applied to the outputs of attention and MLP."""
        return "ln1_post" in self.norm_names

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ModelConfig for a parsed config.json of this architecture. Raise
        ConfigError naming the first field that is missing, malformed, or asks for a computation
        that is not implemented. Dropout is ignored (ignored_fields)."""
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
            labels = get(hf, "id2label", dict, None)  # transformers' default has two labels
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
        """Return what `read` returns, for the language model in a config.json of the class
        `wrapper`."""
        return self.read(self.text_config(hf))

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the language model in a config.json of the class `wrapper`."""
        outer = {name: hf[name] for name in _OUTER if name in hf}
        return {**self.text_defaults, **outer, **get(hf, "text_config", dict)}

    def write(self, model: Any, dtype: str) -> dict[str, Any]:
        """Return the content of config.json for a model whose weights are stored as dtype ('bf16'
        or 'fp32'). transformers 4 and 5 load the same model, because positions and dtype are
        written in the spellings of both versions."""
        eos = model.eos_token_ids
        hf_dtype = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        labels = [f"LABEL_{i}" for i in range(model.num_labels)]  # transformers' names
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
        """Return fields of ModelConfig that only this architecture reads; `read` adds the common
        fields."""
        raise NotImplementedError

    def write_sizes(self, model: Any) -> dict[str, Any]:
        raise NotImplementedError

    def kinds(self, qkv_bias: bool = False, mlp_bias: bool = False) -> dict[str, Any]:
        """Return the fields of ModelConfig for norm, activation, positions and biases. qkv_bias,
        mlp_bias: values in config.json, used if the architecture does not fix the biases."""
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
        """Return fields that a model of this architecture must have, given the model's other
        fields."""
        names = "windowed_layers rope_layers local_rope_theta query_growth attention_scale".split()
        names += "logit_softcap experts mixers latent full_kv_heads full_head_dim".split()
        names += ["shared_keys", "per_layer_size", "mlp_layers", "attention_softcap"]
        others = dict.fromkeys(names) | dict.fromkeys(MULTIPLIERS, 1.0)
        others |= dict.fromkeys(("keys_as_values", "wide_mlp"), False)
        others = {name: value for name, value in others.items() if name not in self.own_fields}
        return self.kinds(model.qkv_bias, model.mlp_bias) | others

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        """Return the halves of a block, usually attention and MLP, in order; layers may differ."""
        mixed = model.has_mixer(layer)
        first = model.mixers.half(model, layer) if mixed else attention(model, layer)
        return first, mlp(model, layer)

    def embedding(self, model: Any) -> tuple[Module, ...]:
        return embedding(model)

    def head(self, model: Any) -> tuple[Module, ...]:
        return head(model)

    def beside(self, model: Any) -> dict[str, tuple[Module, ...]]:
        """Return the modules outside of embedding, layers and head, by block."""
        return {}


def ignored_fields(hf: Mapping[str, Any]) -> list[str]:
    """Return lines about fields of config.json that training ignores, such as dropout and
    images."""
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
    """Return hf[name] after a check that the value has the type `kind`; null is allowed if the
    default is None."""
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
    """Return hf[name] after a check that the value is a positive int. Numbers of layers and heads
    have an upper bound, because some lists have an item per layer or head."""
    value = get(hf, name, int)
    largest = 1 << 16 if "layer" in name or "head" in name else 2**31 - 1
    if value > largest:
        raise ConfigError(f"config.json: {name}: must be at most {largest}, got {value}")
    if value <= 0:
        raise ConfigError(f"config.json: {name}: must be positive, got {value}")
    return value


def reject(hf: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise ConfigError unless the field is absent or has one of the supported values."""
    if name in hf and hf[name] not in supported:
        wanted = " or ".join(repr(value) for value in supported)
        raise ConfigError(f"config.json: {name}: {hf[name]!r} is not supported, only {wanted}")
