"""Halves of layers in GGUF files: delta nets, latent attention, short convolutions, experts.

Names and layout follow llama.cpp's converters.

    delta nets         names of state space models; decays as -exp(A_log); the fused projections of
                       Qwen3-Next separately; value heads of Qwen3.5 interleaved, first the first
                       value head of each key head
    state spaces       the same names; A and D (heads, 1), norms (groups, channels)
    latent attention   one key head; kv_b as two tensors, attn_k_b (H, R, N) and attn_v_b (H, V, R)
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llmq.arch.common import GgufKind
from llmq.arch.delta import DeltaNet
from llmq.arch.latent import NORM_EPS
from llmq.arch.mamba import Mamba
from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.arch.rope_family import all_but_every
from llmq.arch.rope_scaling import RopeScaling
from llmq.arch.short_conv import ShortConvs
from llmq.state.params import Param

Made = tuple[str, tuple[int, ...], Callable[[np.ndarray], np.ndarray]]
"""Hugging Face's name of a tensor, its shape, and the function that computes its values."""


def kind_of(model: ModelConfig) -> GgufKind | None:
    """The GGUF declaration of the model's architecture; None without one. A declaration is not
    inherited, because GGUF has another name for a related architecture."""
    return vars(type(model.arch)).get("gguf")


def lacks(model: ModelConfig) -> Iterator[str]:
    """Properties of this model's halves that llama.cpp's implementation lacks."""
    kind, its = kind_of(model), model.experts
    if "delta_in" in model.arch.modules:
        yield from _delta_lacks(model)
    if "mamba_in" in model.arch.modules and (model.mixers is None or model.rope_layers is None):
        yield "without state spaces, or with rotary positions"
    if its is None:
        return
    alone = model.mlp_layers
    if its.layers is not None and (not kind.routers or (alone is not None and its.layers != alone)):
        yield "of which some layers have an MLP"
    if its.groups > 1 and not (kind.routers and model.arch.sigmoid):
        yield "with groups of experts, or groups that are chosen by one score"
    if its.renormalize != kind.renormalize and not kind.routers:
        yield f"with norm_topk_prob {its.renormalize}"
    if (its.alpha, its.limit) != kind.activation:
        own = "swiglu_alpha {:g} and swiglu_limit {:g}"
        yield f"with {own.format(its.alpha, its.limit)}, only {own.format(*kind.activation)}"


def otherwise(model: ModelConfig) -> Iterator[str]:
    """Warnings about small differences between these halves and llama.cpp's."""
    if model.latent is not None and model.norm_eps != NORM_EPS:
        yield (
            f"llama.cpp takes the epsilon {model.norm_eps:g} in norms of latents, this model "
            f"{NORM_EPS:g}"
        )


def own_factor(model: ModelConfig, scaling: RopeScaling) -> float:
    """The attention factor that llama.cpp computes of YaRN's metadata."""
    if (model.latent and scaling.mscale_all_dim) or "query_growth" in model.arch.own_fields:
        return 1.0
    return RopeScaling(kind="yarn", factor=scaling.factor).attention(0)


def by_layer(values: Iterable[int]) -> int | list[int]:
    """Sizes of layers as metadata have them: one number where all are alike."""
    first, *others = values = list(values)
    return first if others == [first] * len(others) else values


def widths(model: ModelConfig) -> int | list[int]:
    """Widths of the MLPs of layers, 0 where a layer has neither an MLP nor experts."""
    layers = range(model.num_layers)
    if model.mlp_layers is None:
        return by_layer(map(model.mlp_size, layers))
    own = model.intermediate_size if model.experts is None else model.expert_size
    return by_layer(own * model.mlp_layers[layer] for layer in layers)


def _key_heads(model: ModelConfig) -> int | list[int]:
    """Heads of keys of layers, 0 where a layer has no attention."""
    without = model.mlp_layers or (False,) * model.num_layers
    return by_layer(
        0 if without[layer] or model.has_mixer(layer) else model.heads_of(layer).kv
        for layer in range(model.num_layers)
    )


def add_metadata(gguf: Any, writer: Any, model: ModelConfig) -> None:
    """The sizes of halves."""
    writer.add_head_count(model.num_heads)
    if kind_of(model).factors:
        scale = model.attention_scale
        writer.add_attention_scale(model.head_dim**-0.5 if scale is None else scale)
        writer.add_embedding_scale(model.embedding_multiplier)
        writer.add_residual_scale(model.residual_multiplier)
        writer.add_logit_scale(model.logits_scaling)
    if model.experts is not None:
        _add_experts(gguf, writer, model)
    if (latent := model.latent) is not None:
        row = latent.rank + latent.rotary
        writer.add_head_count_kv(1)
        writer.add_key_length(row)
        writer.add_value_length(latent.rank)
        writer.add_key_length_mla(latent.keys)
        writer.add_value_length_mla(latent.values)
        writer.add_kv_lora_rank(latent.rank)
        if latent.query_rank is not None:
            writer.add_q_lora_rank(latent.query_rank)
        if (whole := model.rope_scaling and model.rope_scaling.mscale_all_dim) is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * whole)  # as the converter has it
        return
    if model.query_growth is not None:
        writer.add_attn_temperature_scale(model.query_growth)
        writer.add_rope_scaling_yarn_log_mul(model.rope_scaling.mscale_all_dim or 0.0)
    if model.positions == "rope":
        channels = model.heads_of(model.num_layers - 1).channels
        writer.add_key_length(channels)
        writer.add_value_length(channels)
    if "shared_keys" in model.arch.own_fields:
        _add_windows(writer, model)
    mixers = model.mixers
    is_delta = isinstance(mixers, DeltaNet) and not isinstance(mixers, Mamba)
    writer.add_head_count_kv(model.num_kv_heads if is_delta else _key_heads(model))
    if isinstance(mixers, ShortConvs):
        writer.add_shortconv_l_cache(mixers.taps)
    elif isinstance(mixers, Mamba):
        writer.add_rope_scaling_finetuned(False)  # there are no rotary positions
        if model.experts is None and model.mlp_layers is None:
            writer.add_expert_shared_feed_forward_length(model.intermediate_size)
        _add_states(writer, mixers)
    elif is_delta:
        _add_states(writer, model.mixers)
        writer.add_full_attention_interval(_attention_every(model.mixers))
        if kind_of(model).heads_in_turns:
            writer.add_rope_dimension_sections(_AXES)


def _add_windows(writer: Any, model: ModelConfig) -> None:
    """Sizes of Gemma 4 that differ between layers with a window and others."""
    writer.add_key_length_swa(model.head_dim)
    writer.add_value_length_swa(model.head_dim)
    writer.add_shared_kv_layers(sum(model.shared_keys or ()))
    writer.add_embedding_length_per_layer_input(model.per_layer_size or 0)
    if model.logit_softcap is not None:
        writer.add_final_logit_softcapping(model.logit_softcap)


def _add_experts(gguf: Any, writer: Any, model: ModelConfig) -> None:
    its, kind = model.experts, kind_of(model)
    writer.add_expert_count(its.count)
    writer.add_expert_used_count(its.active)
    writer.add_expert_feed_forward_length(model.expert_size)
    if kind.routers or model.arch.sigmoid:
        gating = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(gating.SIGMOID if model.arch.sigmoid else gating.SOFTMAX)
    if kind.routers:
        writer.add_expert_weights_scale(its.scale)
        writer.add_expert_weights_norm(its.renormalize)
    if its.groups > 1:
        writer.add_expert_group_count(its.groups)
        writer.add_expert_group_used_count(its.active_groups)
    if model.arch.dense_first:
        writer.add_expert_shared_count((its.shared_size or 0) // model.expert_size)
        writer.add_leading_dense_block_count((its.layers or (True,)).count(False))
    elif its.shared_size is not None:
        writer.add_expert_shared_feed_forward_length(its.shared_size)
        if kind.routers:
            writer.add_expert_shared_count(1)


def made_of(model: ModelConfig, param: Param, part: HfPart) -> Iterator[Made] | None:
    """The tensors of a part that has a layout of its own; None for other parts."""
    if _AT in part.name:
        return _delta_tensors(model, param, part)
    if isinstance(model.mixers, Mamba) and (found := _MAMBA.search(part.name)) is not None:
        return _mamba_tensors(model, part, found)
    of_experts = part.experts or ".router." in part.name
    if kind_of(model).scale is not None and of_experts:
        return _gemma_tensors(param, part)
    if (found := _GRANITE.search(part.name)) is not None:
        return _granite_tensors(model, param, part, found)
    return _latent_tensors(model, part) if part.name.endswith(".kv_b_proj.weight") else None


def _gemma_tensors(param: Param, part: HfPart) -> Iterator[Made]:
    """Experts of Gemma 4, gate above up, and the factors of its routers and experts."""
    stem, _, own = part.name.rpartition(".")
    if own == "per_expert_scale":
        name = f"{stem.removesuffix('.router')}.experts.down_proj.scale"
    else:
        name = {"scale": f"{stem}.proj.scale", "weight": part.name}.get(own, f"{part.name}.weight")
    shape = part.as_stored(np.empty((part.stop - part.start, *param.row_shape), np.bool_)).shape
    yield name, shape, lambda values: part.stored(values[part.start : part.stop])


_MAMBA = re.compile(r"^(.+\.(?:mamba|mixer))\.(A_log|D|dt_bias|norm\.weight)$")


def _mamba_tensors(model: ModelConfig, part: HfPart, found: re.Match) -> Iterator[Made]:
    """A and D (heads, 1), dt_bias, or the norm (groups, channels)."""
    stem, own = found.groups()
    heads, groups = model.mixers.value_heads, model.mixers.key_heads
    one = lambda values: values.reshape(heads, 1)  # noqa: E731
    made: dict[str, Made] = {
        "A_log": (part.name, (heads, 1), lambda values: -np.exp(one(values).astype(np.float32))),
        "D": (part.name, (heads, 1), one),
        "dt_bias": (f"{stem}.dt_proj.bias", (heads,), lambda values: values),
        "norm.weight": (
            part.name,
            (groups, model.mixers.values // groups),
            lambda values: values.reshape(groups, -1),
        ),
    }
    yield made[own]


_GRANITE = re.compile(r"\.(block_sparse_moe|shared_mlp)\.(input|output)_linear\.(.+)")


def _granite_tensors(
    model: ModelConfig, param: Param, part: HfPart, found: re.Match
) -> Iterator[Made]:
    """Gate and up of Granite's fused projections apart, of experts (experts, rows, columns). The
    parameter has up's rows before gate's."""
    experts, module = max(part.experts, 1), "mlp.experts"
    if not part.experts:
        module = "mlp.shared_expert" if model.experts is not None else "mlp"
    keys = {"up_proj": 0, "gate_proj": 1} if found[2] == "input" else {"down_proj": 0}
    rows = part.stop - part.start if "lora_A" in found[3] else 0
    parts = 1 if rows else len(keys)
    rows = rows or (part.stop - part.start) // (experts * parts)
    outer, width = (experts,) * (part.experts > 0), param.row_shape
    for key, place in keys.items():

        def made(values: np.ndarray, place: int = min(place, parts - 1)) -> np.ndarray:
            whole = values[part.start : part.stop].reshape(experts, parts, rows, *width)
            return whole[:, place].reshape(*outer, rows, *width)

        stem, end = part.name[: found.start()], found[3]
        yield f"{stem}.{module}.{key}.{end}", (*outer, rows, *width), made


def _latent_tensors(model: ModelConfig, part: HfPart) -> Iterator[Made]:
    """attn_k_b and attn_v_b of kv_b, whose rows of keys come first."""
    its, H = model.latent, model.num_heads
    N, V, R, stem = its.plain, its.values, its.rank, part.name.removesuffix("kv_b_proj.weight")
    keys = lambda values: values[: H * N].reshape(H, N, R).swapaxes(1, 2)  # noqa: E731
    yield f"{stem}k_b_proj.weight", (H, R, N), keys
    yield f"{stem}v_b_proj.weight", (H, V, R), lambda values: values[H * N :].reshape(H, V, R)


_AT = ".linear_attn."
_AXES = (11, 11, 10, 0)
"""Pairs of rotary channels for each axis of images: the converter's values for a model without
images. GGUF requires this field for models with interleaved value heads."""


def _delta_lacks(model: ModelConfig) -> Iterator[str]:
    """Properties of this model that llama.cpp's delta nets lack."""
    net = model.mixers
    if net is None:
        yield "without delta nets"
        return
    if net.key_dim != net.value_dim:
        yield f"with keys of {net.key_dim} and values of {net.value_dim} channels"
    if net.layers != all_but_every(_attention_every(net), model.num_layers):
        yield "whose layers with attention stand at several distances"


def _attention_every(net: DeltaNet) -> int:
    return [*net.layers, False].index(False) + 1


def _add_states(writer: Any, net: DeltaNet) -> None:
    writer.add_ssm_conv_kernel(net.taps)
    writer.add_ssm_state_size(net.key_dim)
    writer.add_ssm_group_count(net.key_heads)
    writer.add_ssm_time_step_rank(net.value_heads)
    writer.add_ssm_inner_size(net.values)


def _delta_tensors(model: ModelConfig, param: Param, part: HfPart) -> Iterator[Made]:
    """The tensors of a part of a delta net. Names are Hugging Face's, or in Hugging Face's style if
    a module is separate only in GGUF."""
    stem, _, own = part.name.partition(_AT)
    net, module, count = model.mixers, own.split(".")[0], part.stop - part.start
    of_inputs, of_outputs = (".lora_B." not in own, ".lora_A." not in own)
    columns: Any = slice(None)
    heads = np.arange(net.value_heads)
    if kind_of(model).heads_in_turns:
        heads = heads.reshape(net.key_heads, -1).T.ravel()
    channels = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).ravel()
    with_keys = np.concatenate(
        [np.arange(net.channels - net.values), net.channels - net.values + channels]
    )
    rows = {own: np.arange(count)}
    if module == "in_proj_qkvz":
        both = np.split(np.arange(count), [net.channels]) if of_outputs else 2 * [rows[own]]
        rows = {own.replace("qkvz", name): of for name, of in zip(("qkv", "z"), both, strict=True)}
    elif module == "out_proj" and of_inputs:
        columns = channels
    elif of_outputs and module in ("in_proj_qkv", "conv1d"):
        rows = {own: with_keys}
    elif of_outputs and module == "in_proj_z":
        rows = {own: channels}
    elif of_outputs and module == "in_proj_ba":
        rows = {own: np.asarray(part.rows_of(slice(None)))}
    elif of_outputs and module in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        rows = {own.replace("dt_bias", "dt_proj.bias"): heads}

    for name, order in rows.items():

        def made(values: np.ndarray, order: np.ndarray = order) -> np.ndarray:
            rows = values[part.start : part.stop][order]
            rows = rows if part.columns is None else rows[:, : part.columns]
            if module == "A_log":
                return -np.exp(rows.astype(np.float32))
            return rows[:, columns] if rows.ndim > 1 else rows

        width = param.row_shape if part.columns is None else (part.columns,)
        yield f"{stem}{_AT}{name}", (len(order), *width), made
