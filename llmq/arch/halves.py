"""Declarations of the modules that most architectures share: attention, MLP, embedding and head.

The `Architecture` gives the Hugging Face names, the positions of norms, and the biases. An
architecture with other modules declares a HalfSpec for these modules in its method `layers`. C:
hidden size, F: width of the MLP. `config` is a ModelConfig.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.arch.matrix import HalfSpec, Matrix, Module, Order, Part


def attention(config: Any, layer: int) -> HalfSpec:
    """Return the declaration of attention: the product of queries, keys and values, and the output
    product. qkv: the rows of all query heads, key heads and value heads; with gated_attention, a
    gate's rows follow those of each query head. q_norm, k_norm: with qk_norm (Hd,), the channels of
    a head; with wide_qk_norm (Hq*Hd,) and (Hkv*Hd,), for Hq query and Hkv key heads. sinks: (Hq,),
    if the architecture has sinks. In layers with keys_as_values, qkv has no rows of values. In
    layers that share another layer's keys, qkv has only rows of queries, and k_norm is missing."""
    C, heads = config.hidden_size, config.heads_of(layer)
    Hq, Hkv, Hd = heads
    at = f"model.layers.{layer}.self_attn"
    gated = config.arch.gated_attention
    shares, values = config.shares_keys(layer), config.values_of(layer)
    rows = {"q": Hq * Hd * (2 if gated else 1)}
    if not shares:
        rows |= {"k": Hkv * Hd} | ({"v": Hkv * Hd} if values else {})
    qkv = matrix(
        config, layer, "qkv", f"{at}.qkv", rows, C,
        bias=config.qkv_bias, input="ln1", gradient="d_qkv",
    )  # fmt: skip
    if config.arch.rope_pairs:
        q, k, v = qkv.parts
        q, k = (replace(part, order=_heads_in_pairs(config, part.rows // Hd)) for part in (q, k))
        qkv = replace(qkv, parts=(q, k, v))
    inner: tuple[Module, ...] = ()
    if config.qk_norm:
        normed = (Hq, Hkv) if config.arch.wide_qk_norm else (1, 1)
        inner = tuple(
            _norm(config, key, f"{at}.{key}", n * Hd, layer)
            for key, n in zip(("q_norm", "k_norm")[: 1 if shares else 2], normed, strict=False)
        )
    if config.arch.sinks:
        part = Part(module=config.arch.modules["sinks"][0].format(layer), rows=Hq)
        sinks = {"key": "sinks", "name": at, "tensor": "sinks", "shape": (Hq,), "parts": (part,)}
        inner += (Module(**sinks, kind="vector", initial="zero"),)
    o = matrix(
        config, layer, "o", f"{at}.o_proj", {"o": C}, Hq * Hd,
        bias=config.o_bias, initial="residual", input="att_gated" if gated else "att",
        gradient="d_att",
    )  # fmt: skip
    return HalfSpec(
        kind="attention",
        name="att",
        norm="ln1",
        norms=norms(config, "ln1", layer),
        modules=(qkv, *inner, o),
        output="o",
        activations=("qk_raw", "qkv", "att", *(("att_gated",) if gated else ())),
        cached={} if shares else {"k": (Hkv, Hd), "v": (Hkv, Hd)},
        reads=config.keys_of(layer) if shares else None,
        sizes={
            "heads": heads,
            "window": config.window_of(layer),
            "qk_norm": config.qk_norm,
            "wide_qk_norm": config.arch.wide_qk_norm,
            "value_norm": config.arch.value_norm and not shares,
            "keys_as_values": not (shares or values),
            "gated": gated,
            "sinks": config.arch.sinks,
        },
    )


def _heads_in_pairs(config: Any, heads: int) -> Order:
    """Return the order of heads' rows in files that store RoPE pairs as neighbours: channel i of a
    head's first half, then channel i of the second half."""
    Hd, turned = config.head_dim, config.rotary_dim
    order = []
    for first in range(0, heads * Hd, Hd):
        order += in_pairs(first, turned)
        if turned < Hd:
            order.append((first + turned, first + Hd))
    return tuple(order)


def in_pairs(first: int, channels: int) -> list[tuple[int, int]]:
    """Return the order of rows [first, first + channels) stored in RoPE pairs: d, d + channels/2, d
    + 1, ..."""
    half = channels // 2
    return [(i + j, i + j + 1) for i in range(first, first + half) for j in (0, half)]


def mlp(config: Any, layer: int) -> HalfSpec:
    """Return the declaration of an MLP. up: (F, C), or with a gate (2F, C), the rows of up before
    the rows of the gate. down: (C, F)."""
    C, F, at = config.hidden_size, config.mlp_size(layer), f"model.layers.{layer}.mlp"
    up = matrix(
        config, layer, "up", f"{at}.up", {"up": F} | ({"gate": F} if config.gated else {}), C,
        bias=config.mlp_bias, input="ln2", gradient="d_mlp_up",
        gate_first=config.arch.gate_first,
    )  # fmt: skip
    down = matrix(
        config, layer, "down", f"{at}.down_proj", {"down": C}, F,
        bias=config.mlp_bias, initial="residual", input="mlp_act", gradient="d_mlp",
    )  # fmt: skip
    return HalfSpec(
        kind="mlp",
        name="mlp",
        norm="ln2",
        norms=norms(config, "ln2", layer),
        modules=(up, down),
        output="down",
        activations=("mlp_up", "mlp_act"),
        coded=("mlp_up", "d_mlp_act"),
    )


def embedding(config: Any) -> tuple[Module, ...]:
    """Return the modules embed: (Vp, C), with Vp the padded vocabulary, and, if positions are
    learned, positions: (P, C)."""
    name = "model.embed_tokens"
    modules = [_table(config, "embed", name, config.vocab_size, target="embedding")]
    if config.positions == "learned":
        count = config.max_positions
        modules.append(_table(config, "positions", "model.position_embedding", count, padded=count))
    return tuple(modules)


def head(config: Any) -> tuple[Module, ...]:
    """Return the norms after the last block, and the LM head or score head, unless the LM head is
    the embedding."""
    post = tuple(m for m in norms(config, "ln1", config.num_layers) if m.key != "ln1")
    post = post if config.arch.post_norm else ()
    layernorm = config.norm == "layernorm"
    norm = _norm(config, "norm", "model.norm", config.hidden_size, bias=layernorm)
    if config.tied_embeddings:
        return (*post, norm)
    sizes = (config.outputs, config.padded_outputs)
    own = _table(config, "lm_head", "lm_head", *sizes, target="head")
    if config.num_labels:  # a score head replaces the LM head
        own = replace(own, name="score", parts=(Part(module="score", rows=config.outputs),))
    return (*post, norm, own)


def norms(config: Any, key: str, layer: int) -> tuple[Module, ...]:
    """Return the norms KEY_post, of the preceding output, and KEY, of the next input, if the model
    has such norms. In files, ln1_post belongs to the preceding layer. layer: the number of layers
    for the norms of the head."""
    names, found = config.arch.norm_names, []
    for key_, of in ((f"{key}_post", layer - (key == "ln1")), (key, layer)):
        if key_ in names and of >= 0:
            name, bias = f"model.layers.{of}.{names[key_]}", config.norm == "layernorm"
            found.append(_norm(config, key_, name, config.hidden_size, of, bias=bias))
        if key_ == "ln1_post" and config.arch.layer_scale and of >= 0:
            found.append(_layer_scale(config, of))
    return tuple(found)


def inner_norm(config: Any, layer: int, key: str) -> Module:
    """Return a norm (C,) inside attention, MLP or experts."""
    name = config.arch.modules[key][0].format(layer)
    return _norm(config, key, name, config.hidden_size, layer)


def _layer_scale(config: Any, layer: int) -> Module:
    """Return the module ln1_scale: (1,), the factor of the residual stream after a layer."""
    part = Part(module=config.arch.modules["ln1_scale"][0].format(layer), rows=1)
    return Module(
        key="ln1_scale", name=part.module, tensor="layer_scalar", shape=(1,), parts=(part,),
        kind="vector", initial="one",
    )  # fmt: skip


def _norm(
    config: Any, key: str, name: str, size: int, layer: int | None = None, *, bias: bool = False
) -> Module:
    (module,) = config.arch.modules[key]
    return Module(
        key=key,
        name=name,
        shape=(size,),
        parts=(Part(module=module.format(layer), rows=size),),
        kind="norm",
        initial="zero" if config.arch.norm_offset else "one",
        bias=bias,
    )


def _table(
    config: Any, key: str, name: str, rows: int, padded: int | None = None, target: str = ""
) -> Module:
    """Return a table with a row of C channels for each token or position. target: the table's name
    in --lora-targets."""
    (module,) = config.arch.modules[key]
    return Module(
        key=key,
        name=name,
        shape=(config.padded_vocab if padded is None else padded, config.hidden_size),
        parts=(Part(module=module, rows=rows, targets=(target,) if target else ()),),
        kind="embedding",
    )


def matrix(
    config: Any,
    layer: int,
    key: str,
    name: str,
    targets: Mapping[str, int],
    columns: int,
    *,
    gate_first: bool = False,
    order: Order = (),
    **declared: Any,
) -> Matrix:
    """Return a matrix of a block. targets: number of rows by name in --lora-targets; each name may
    be a Hugging Face module. gate_first: True if files store the second half of the rows first.
    order: the field `order` of HfPart."""
    transposed = config.arch.transposed
    modules = config.arch.modules[key][: len(targets)]
    each = [((name,), n) for name, n in targets.items()]
    if len(modules) == 1:
        each = [(tuple(targets), sum(targets.values()))]
    parts = tuple(
        Part(
            module=module.format(layer), rows=rows, transposed=transposed,
            targets=tuple(name for name in names if name in config.arch.targets),
            order=((rows // 2, rows), (0, rows // 2)) if gate_first else order,
        )
        for module, (names, rows) in zip(modules, each, strict=True)
    )  # fmt: skip
    shape = (sum(targets.values()), columns)
    return Matrix(key=key, name=name, shape=shape, parts=parts, **declared)
