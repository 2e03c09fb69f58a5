"""The weight table against transformers' state dicts, and the geometry of slabs."""

from __future__ import annotations

import dataclasses
from math import prod

import numpy as np
import pytest
import torch
import transformers

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Storage, Tensor
from llmq.checkpoint.hf import stored_shape
from llmq.options.presets import PRESETS, preset
from llmq.state.params import ELEMENT_ALIGN, by_block, parameter_count, weight_table
from tests.models import as_stored

TINY = {
    "tiny": ("qwen2", preset("tiny")),
    "tiny-qwen3": ("qwen3", preset("tiny-qwen3")),
    "tiny-llama": ("llama", preset("tiny-llama")),
    "llama-with-biases": (
        "llama",
        dataclasses.replace(
            preset("tiny-llama"), qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=False
        ),
    ),
    "tiny-mistral": ("mistral", preset("tiny-mistral")),
    "tiny-olmo2": ("olmo2", preset("tiny-olmo2")),
    "olmo2-with-biases": (
        "olmo2",
        dataclasses.replace(preset("tiny-olmo2"), qkv_bias=True, o_bias=True),
    ),
    "tiny-phi3": ("phi3", preset("tiny-phi3")),
    "tiny-gemma3": ("gemma3_text", preset("tiny-gemma3")),
    "tiny-qwen3-moe": ("qwen3_moe", preset("tiny-qwen3-moe")),
    "tiny-qwen2-moe": ("qwen2_moe", preset("tiny-qwen2-moe")),
    "tiny-olmoe": ("olmoe", preset("tiny-olmoe")),
    "tiny-mixtral": ("mixtral", preset("tiny-mixtral")),
    "tiny-gpt-oss": ("gpt_oss", preset("tiny-gpt-oss")),
    "tiny-qwen3.5": ("qwen3_5_text", preset("tiny-qwen3.5")),
    "tiny-qwen3.5-moe": ("qwen3_5_moe_text", preset("tiny-qwen3.5-moe")),
    "tiny-qwen3-next": ("qwen3_next", preset("tiny-qwen3-next")),
    "tiny-granite-hybrid": ("granitemoehybrid", preset("tiny-granite-hybrid")),
    "tiny-gpt2": ("gpt2", preset("tiny-gpt2")),
    "untied-gpt2": ("gpt2", dataclasses.replace(preset("tiny-gpt2"), tied_embeddings=False)),
}
ODD_VOCAB = dataclasses.replace(preset("tiny"), vocab_size=257, tied_embeddings=False)


def hf_model(config: ModelConfig):
    """The transformers model of this config, without memory."""
    with torch.device("meta"):
        hf = transformers.AutoConfig.for_model(**config.to_hf())
        return transformers.AutoModelForCausalLM.from_config(hf)


def all_params(config):
    return [param for slab in weight_table(config) for param in slab.params]


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_those_of_transformers(name):
    model_type, config = TINY[name]
    model = hf_model(config)
    assert model.config.model_type == model_type
    stored = as_stored(model, dict(model.named_parameters()))
    expected = {n: tuple(p.shape) for n, p in stored.items()}
    table = {}
    for param in all_params(config):
        for part in param.hf:
            assert part.name not in table
            table[part.name] = stored_shape(param, part)
    assert table == expected
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_decay_is_for_matrices_only(name):
    for param in all_params(TINY[name][1]):
        assert param.decay == (len(param.shape) >= 2), param.name
        assert (param.init in ("normal", "residual")) == param.decay, param.name
        if not param.decay:
            of_delta = "linear_attn" in param.name
            offset = TINY[name][1].arch.norm_offset and not of_delta
            one = param.name.endswith(("weight", "dt_bias", ".D")) and not offset
            init = "log_uniform" if param.name.endswith("A_log") else "one" if one else "zero"
            assert param.init == init, param.name


@pytest.mark.parametrize("name", PRESETS)
def test_slabs_are_aligned_and_hold_their_parameters_in_order(name):
    config = PRESETS[name].with_layers([*PRESETS[name].layer_kinds] * 2)
    table = weight_table(config)
    beside = config.arch.beside(config)
    names = ["embed", *beside, *(f"layers.{i}" for i in range(config.num_layers)), "vectors"]
    names += ["constants"] * (config.experts is not None and config.arch.sigmoid)
    assert [slab.name for slab in table] == names + ["head"] * (not config.tied_embeddings)
    for slab in table:
        end = 0
        for param in slab.params:
            assert param.offset % ELEMENT_ALIGN == 0
            assert end <= param.offset < end + ELEMENT_ALIGN
            assert param.size == prod(param.shape)
            end = param.offset + param.size
        assert end <= slab.size < end + ELEMENT_ALIGN
        assert slab.size % ELEMENT_ALIGN == 0
    params = all_params(config)
    assert sorted(param.index for param in params) == list(range(len(params)))
    assert len({param.name for param in params}) == len(params)


def test_all_blocks_have_one_layout():
    """Offload slots and captured graphs serve any block."""
    _, *blocks, _ = weight_table(preset("Qwen2.5-0.5B"))
    assert all(block.is_block for block in blocks)
    assert len({(b.size, tuple((p.key, p.shape, p.offset) for p in b.params)) for b in blocks}) == 1


@pytest.mark.parametrize("name", TINY)
def test_parts_cover_the_rows_once(name):
    for param in all_params(TINY[name][1]):
        edges = [edge for part in param.hf for edge in (part.start, part.stop)]
        assert edges[0] == 0
        assert edges[1:-1:2] == edges[2::2]
        assert edges[-1] == param.rows <= param.size // param.columns


def test_only_the_vocabulary_is_padded():
    for param in all_params(ODD_VOCAB):
        padded = param.key in ("embed", "lm_head")
        assert param.shape[0] == (320 if padded else param.rows)
        assert param.rows == 257 or not padded


def test_order_of_fused_rows():
    block = {p.key: p for p in weight_table(preset("tiny"))[1].params}
    assert [(p.name.split(".")[-2], p.start, p.stop) for p in block["qkv"].hf] == [
        ("q_proj", 0, 128),
        ("k_proj", 128, 192),
        ("v_proj", 192, 256),
    ]
    assert [(p.name.split(".")[-2], p.start, p.stop) for p in block["up"].hf] == [
        ("up_proj", 0, 512),
        ("gate_proj", 512, 1024),
    ]


@pytest.mark.parametrize("name", TINY)
def test_segments_say_for_every_element_whether_it_decays(name):
    for slab in weight_table(TINY[name][1]):
        segments = slab.segments()
        assert segments.dtype == np.int64
        assert segments[-1, 0] == slab.size
        for param in slab.params:
            inside = np.searchsorted(
                segments[:, 0], [param.offset, param.offset + param.size - 1], side="right"
            )
            assert segments[inside, 1].tolist() == [param.decay] * 2


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_views_lie_where_the_table_says(dtype):
    slab = weight_table(preset("tiny-gpt2"))[-1]
    start = 512
    data = np.zeros(start + slab.size * dtype.itemsize, np.uint8)
    tensor = Tensor("slab", (slab.size,), dtype, Storage("device", 0, data), start)
    views = by_block((slab,), {slab.name: tensor})
    assert sum(len(block) for block in views.values()) == len(slab.params)
    flat = tensor.numpy()
    for number, param in enumerate(slab.params, start=1):
        view = views[param.block][param.key]
        assert (view.name, view.shape, view.dtype) == (param.name, param.shape, dtype)
        view.numpy()[:] = number
    for number, param in enumerate(slab.params, start=1):
        assert (flat[param.offset : param.offset + param.size] == number).all()
    assert (flat != 0).sum() == sum(p.size for p in slab.params)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", TINY)
def test_shards_are_equal_and_pieces_cover_every_parameter_once(name, world_size):
    for slab, whole in zip(
        weight_table(TINY[name][1], world_size), weight_table(TINY[name][1]), strict=True
    ):
        assert slab.params == whole.params
        assert slab.size == world_size * slab.shard_size >= whole.size
        assert slab.shard_size % ELEMENT_ALIGN == 0
        assert slab.size - whole.size < ELEMENT_ALIGN * world_size
        starts = [rank * slab.shard_size for rank in range(world_size)]
        pieces = [p for s in starts for p in slab.pieces(s, s + slab.shard_size)]
        edges = [edge for _, *ends in pieces for edge in ends]
        assert edges[0] == 0
        assert edges[1:-1:2] == edges[2::2]
        assert edges[-1] == slab.size
        assert all(edge % ELEMENT_ALIGN == 0 for edge in edges)
        inside = sum(max(min(b, p.offset + p.size) - a, 0) for p, a, b in pieces)
        assert inside + sum(b - a for a, b in slab.gaps()) >= slab.size
        for start, stop in slab.gaps():
            assert all(stop <= p.offset or p.offset + p.size <= start for p in slab.params)
