"""Gated delta nets in GGUF files: what llama.cpp computes of them, and how it stores their weights.

Its names for them are those of state space models. Orders are those of its converter
(conversion/qwen.py): decays are stored as -exp(A_log), Qwen3-Next's products one by one, and value
heads of Qwen3.5 in turns, the first one of each key head before all second ones.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmq.arch.delta import DeltaNet
from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.arch.rope_family import all_but_every
from llmq.state.params import Param

_AT = ".linear_attn."
_AXES = (11, 11, 10, 0)
"""Pairs of rotary channels for each axis of images, which are one for texts: the converter's where
a model's files have none. Models whose value heads are stored in turns have to say them."""


def delta_lacks(model: ModelConfig) -> Iterator[str]:
    """Properties of this model that llama.cpp's delta nets have not."""
    net = model.delta
    if net is None:
        yield "without delta nets"
        return
    if net.key_dim != net.value_dim:
        yield f"with keys of {net.key_dim} and values of {net.value_dim} channels"
    if net.layers != all_but_every(_distance(net), model.num_layers):
        yield "whose layers with attention stand at several distances"


def _distance(net: DeltaNet) -> int:
    """That of layers with attention."""
    return [*net.layers, False].index(False) + 1


def add_delta(writer: Any, model: ModelConfig, *, in_turns: bool) -> None:
    """Add the sizes of delta nets to a GGUFWriter."""
    net = model.delta
    writer.add_ssm_conv_kernel(net.taps)
    writer.add_ssm_state_size(net.key_dim)
    writer.add_ssm_group_count(net.key_heads)
    writer.add_ssm_time_step_rank(net.value_heads)
    writer.add_ssm_inner_size(net.values)
    writer.add_full_attention_interval(_distance(net))
    if in_turns:
        writer.add_rope_dimension_sections(_AXES)


def delta_tensors(
    model: ModelConfig, param: Param, part: HfPart, *, in_turns: bool
) -> Iterator[tuple[str, tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Name, shape and maker of each tensor that a part of a delta net becomes; none: it is of
    another half. The names are those that modules have or could have at Hugging Face."""
    stem, at, own = part.name.partition(_AT)
    if not at:
        return
    net, module, count = model.delta, own.split(".")[0], part.stop - part.start
    of_inputs, of_outputs = (".lora_B." not in own, ".lora_A." not in own)
    columns: Any = slice(None)
    heads = np.arange(net.value_heads)
    if in_turns:
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
            found = values[part.start : part.stop][order]
            found = found if part.columns is None else found[:, : part.columns]
            if module == "A_log":
                return -np.exp(found.astype(np.float32))
            return found[:, columns] if found.ndim > 1 else found

        width = param.row_shape if part.columns is None else (part.columns,)
        yield f"{stem}{at}{name}", (len(order), *width), made
