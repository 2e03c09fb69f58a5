"""Import and export of Hugging Face model directories, against transformers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.checkpoint import hf
from llmq.checkpoint.export_files import SINGLE_FILE
from llmq.checkpoint.hf import HfWeights, export_model
from llmq.options.presets import model_warnings, preset
from llmq.state.params import weight_table
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer, copy_tokenizer_files

ROPE = {
    "vocab_size": 301,  # padded to 320
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen2": {**ROPE, "tie_word_embeddings": True, "eos_token_id": 300},
    "qwen3": {**ROPE, "tie_word_embeddings": True, "head_dim": 16},
    "llama": {**ROPE, "attention_bias": True, "mlp_bias": True, "eos_token_id": [2, 7]},
    "mistral": {**ROPE, "sliding_window": None},
    "olmo2": {**ROPE, "eos_token_id": 300, "pad_token_id": 299},
    "phi3": {**ROPE, "eos_token_id": 300, "pad_token_id": 300},
    "gemma3_text": {
        **{**ROPE, "head_dim": 16, "query_pre_attn_scalar": 16, "eos_token_id": [1, 106]},
        **{"final_logit_softcapping": 30.0},
    },
    "qwen3_moe": {
        **{**ROPE, "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "decoder_sparse_step": 2},
    },
    "qwen2_moe": {
        **{**ROPE, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    },
    "olmoe": {
        **{**ROPE, "num_experts": 3, "num_experts_per_tok": 2},
        **{"eos_token_id": 300, "pad_token_id": 299},
    },
    "mixtral": {**ROPE, "num_local_experts": 3, "sliding_window": 20},
    "gpt_oss": {
        **{**ROPE, "num_local_experts": 8, "num_experts_per_tok": 2},
        **{"eos_token_id": 300, "pad_token_id": 299},
    },
    "qwen3_5_text": {
        **ROPE, "head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 16, "eos_token_id": 300,
    },
    "qwen3_5_moe_text": {
        **{n: v for n, v in ROPE.items() if n != "intermediate_size"}, "head_dim": 64,
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "eos_token_id": 300,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    },
    "qwen3_next": {
        **ROPE, "head_dim": 64, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "eos_token_id": 300,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    },
    "gpt2": {
        **{"vocab_size": 301, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        **{"bos_token_id": 300, "eos_token_id": 300},
    },
}  # fmt: skip
TORCH_DTYPES = {BF16: torch.bfloat16, F32: torch.float32}
Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


def random_model(model_type):
    """A model all of whose parameters, norms and biases too, have random values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def read_config(directory):
    return ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source(model_type, dtype): a directory that transformers has written."""

    def get(model_type, dtype=F32):
        directory = tmp_path_factory.getbasetemp() / f"{model_type}-{dtype.name}"
        if not directory.exists():
            random_model(model_type).to(TORCH_DTYPES[dtype]).save_pretrained(directory)
        return directory

    return get


@pytest.fixture
def edited(source, tmp_path):
    """edited(model_type, change): a source directory after change(tensors) in model.safetensors."""

    def get(model_type, change):
        directory = tmp_path / "edited"
        directory.mkdir()
        (directory / "config.json").write_bytes((source(model_type) / "config.json").read_bytes())
        tensors = load_file(source(model_type) / "model.safetensors")
        change(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, directory / hf.SINGLE_FILE)
        return directory

    return get


def convert(source, target, dtype, **options):
    config = read_config(source)
    with HfWeights(source) as weights:
        weights.check(weight_table(config))
        return export_model(target, config, weights.read, dtype, **options)


def load(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(info.values()), info  # missing, unexpected, mismatched keys
    return model


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def bits(directory):
    """Every parameter as the trainer would get it."""
    with HfWeights(directory) as weights:
        table = weight_table(read_config(directory))
        return {p.name: weights.read(p) for slab in table for p in slab.params}


def assert_equal_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)


# ------------------------------------------------------------------------------------------------
# Both ways


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_that_sees_images(source, tmp_path, prefix):
    """Sizes of the language model are in text_config, and its weights beside others."""
    inner, directory = source("gemma3_text"), tmp_path / "images"
    directory.mkdir()
    hf = json.loads((inner / "config.json").read_text())
    hf.pop("architectures")
    outer = {name: hf.pop(name) for name in ("eos_token_id", "bos_token_id")}
    outer |= {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    outer |= {"text_config": hf, "vision_config": {"model_type": "siglip_vision_model"}}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = load_file(inner / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): t for name, t in tensors.items()}
    others = {"vision_tower.vision_model.post_layernorm.weight": torch.ones(4)}
    save_file(renamed | others, directory / SINGLE_FILE)
    assert read_config(directory) == read_config(inner)
    assert_equal_bits(bits(directory), bits(inner))
    convert(directory, tmp_path / "out", F32)
    assert_same_weights(load(tmp_path / "out"), load(inner))
    assert "images are not trained" in model_warnings(directory)[0]
    sparse = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    sparse |= {"model_type": "gemma3_text", "sliding_window": 1024}
    sparse |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # as published
    published = outer | {"text_config": sparse, "eos_token_id": [1, 106]}
    model = dataclasses.replace(preset("gemma-3-4b"), other_eos_token_ids=(106,))
    assert ModelConfig.from_hf(published) == model


@pytest.mark.parametrize("dtype", [BF16, F32], ids=repr)
@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_loads_an_export_as_the_same_model(source, tmp_path, model_type, dtype):
    directory = source(model_type, dtype)
    names = convert(directory, tmp_path / "out", dtype)
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    original, exported = load(directory), load(tmp_path / "out")
    assert type(exported) is type(original)
    assert_same_weights(exported, original)
    ids = torch.arange(24).reshape(2, 12) * 11 % 301
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, original(ids).logits)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == original.config.eos_token_id
    assert generation.bos_token_id == original.config.bos_token_id


@pytest.mark.parametrize("model_type", MODELS)
def test_a_split_export_is_the_same_model(source, tmp_path, model_type):
    names = convert(source(model_type), tmp_path / "out", F32, max_shard_bytes=30_000)
    shards = [name for name in names if name.endswith(".safetensors")]
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    assert hf.INDEX_FILE in names
    for name in shards:
        tensors = load_file(tmp_path / "out" / name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    index = json.loads((tmp_path / "out" / hf.INDEX_FILE).read_text())
    original = load(source(model_type))
    assert index["metadata"]["total_parameters"] == original.num_parameters()
    assert index["metadata"]["total_size"] == 4 * original.num_parameters()
    assert_same_weights(load(tmp_path / "out"), original)
    assert_equal_bits(bits(tmp_path / "out"), bits(source(model_type)))


def test_transformers_own_split_checkpoints_are_read(source, tmp_path):
    load(source("llama")).save_pretrained(tmp_path, max_shard_size="30KB")
    assert not (tmp_path / hf.SINGLE_FILE).exists()
    with HfWeights(tmp_path) as weights:
        weights.check(weight_table(read_config(tmp_path)))
    assert_equal_bits(bits(tmp_path), bits(source("llama")))


def test_padding_is_zero_and_not_exported(source, tmp_path):
    """A trainer whose padded rows are not zero must not matter."""
    config = read_config(source("llama"))
    with HfWeights(source("llama")) as weights:

        def read(param):
            array = weights.read(param)
            assert array.shape == param.shape
            assert (array[param.rows :] == 0).all()
            array[param.rows :] = np.nan
            return array

        export_model(tmp_path / "out", config, read, F32)
    assert_equal_bits(bits(tmp_path / "out"), bits(source("llama")))


# ------------------------------------------------------------------------------------------------
# Import: what is accepted


@pytest.mark.parametrize("model_type", MODELS)
def test_names_without_their_first_component(edited, source, model_type):
    def change(tensors):
        prefix = "transformer." if model_type == "gpt2" else "model."
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    directory = edited(model_type, change)
    HfWeights(directory).check(weight_table(read_config(directory)))
    assert_equal_bits(bits(directory), bits(source(model_type)))


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_fused_matrices(edited, source, model_type):
    def change(tensors):
        fused = {
            "self_attn.qkv": ("q_proj", "k_proj", "v_proj"),
            "mlp.up": ("up_proj", "gate_proj"),
        }
        for layer in ("model.layers.0.", "model.layers.1."):
            for name, parts in fused.items():
                module = layer + name.split(".")[0]
                for kind in ("weight", "bias"):
                    if f"{module}.{parts[0]}.{kind}" in tensors:
                        rows = [tensors.pop(f"{module}.{part}.{kind}") for part in parts]
                        tensors[f"{layer}{name}.{kind}"] = torch.cat(rows)

    directory = edited(model_type, change)
    HfWeights(directory).check(weight_table(read_config(directory)))
    assert_equal_bits(bits(directory), bits(source(model_type)))


def test_fp16_becomes_fp32(edited):
    def change(tensors):
        tensors.update({name: t.half() for name, t in tensors.items()})

    directory = edited("mistral", change)
    HfWeights(directory).check(weight_table(read_config(directory)))
    stored = load_file(directory / hf.SINGLE_FILE)
    down = bits(directory)["model.layers.1.mlp.down_proj.weight"]
    assert down.dtype == np.float32
    assert torch.equal(
        torch.from_numpy(down), stored["model.layers.1.mlp.down_proj.weight"].float()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, None])
def test_numbers_that_are_not_finite_are_found(edited, dtype, value):
    """None: the largest ones that are finite are no reason."""
    name = "model.layers.1.mlp.gate_proj.weight"

    def change(tensors):
        tensors.update({name: t.to(dtype) for name, t in tensors.items()})
        largest = torch.finfo(dtype).max
        tensors[name][0, :2] = torch.tensor([largest, -largest])
        if value is not None:
            tensors[name][2, 3] = value

    directory = edited("qwen2", change)
    if value is None:
        bits(directory)
        return
    message = f"'{directory / hf.SINGLE_FILE}': {name} holds NaN or infinity: the model is damaged"
    with pytest.raises(LlmqError, match=re.escape(message)):
        bits(directory)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_a_tied_checkpoint_may_store_an_equal_head(edited, model_type):
    embed = {"qwen3": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[model_type]
    same = edited(model_type, lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    HfWeights(same).check(weight_table(read_config(same)))


# ------------------------------------------------------------------------------------------------
# Import: what is refused, before anything is loaded


def test_a_tied_checkpoint_with_another_head(edited):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    directory = edited("qwen2", change)
    with pytest.raises(LlmqError, match=r"lm_head.weight differs from .* set it to false"):
        HfWeights(directory).check(weight_table(read_config(directory)))


def test_an_equal_head_excuses_no_other_tensor(edited):
    head = {"lm_head.weight": torch.ones(301, 32), "model.embed_tokens.weight": torch.ones(301, 32)}
    directory = edited("qwen2", lambda t: t.update(head | {"score.weight": torch.ones(1)}))
    with pytest.raises(LlmqError, match=r"holds score\.weight, which"):
        HfWeights(directory).check(weight_table(read_config(directory)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"lacks {Q}, which"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight, .* set tie_word_embeddings"),
        (
            lambda t: [t.pop(n) for n in list(t) if ".1." in n],
            r"lacks model.layers.1.self_attn.q_proj.weight, .* and 13 more tensors",
        ),
        (lambda t: t.update({Q: t[Q][:-1]}), rf"{Q} has shape \[31, 32\], .* \[32, 32\]"),
        (lambda t: t.update({Q: t[Q][0]}), rf"{Q} has shape \[32\], .* \[32, 32\]"),
        (lambda t: t.update({DOWN: t[DOWN].T}), rf"{DOWN} has shape \[48, 32\], .* \[32, 48\]"),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(320, 32)}),
            r"embed_tokens.weight has shape \[320, 32\], .* \[301, 32\]",
        ),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} is F8_E4M3; only BF16, F16"),
        (lambda t: t.update({Q: t[Q].double()}), f"{Q} is F64; only BF16, F16, F32"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q} is I8; only BF16, F16, F32"),
        (lambda t: t.update({Q + "_scale": torch.ones(1)}), f"holds {Q}_scale, which a model"),
        (
            lambda t: t.update({f"model.layers.{i}.x": torch.ones(1) for i in range(5)}),
            r"holds model.layers.0.x, .*2.x and 2 more tensors",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.qkv.weight": torch.ones(64, 32)}),
            "holds model.layers.0.self_attn.[kqv]_proj.weight, .* does not have",
        ),
    ],
)
def test_weights_that_do_not_fit(edited, change, message):
    directory = edited("llama", change)
    with pytest.raises(LlmqError, match=message) as caught:
        HfWeights(directory).check(weight_table(read_config(directory)))
    assert f"'{directory}/{hf.SINGLE_FILE}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpt2_matrices_must_be_stored_transposed(edited):
    name = "transformer.h.0.mlp.c_fc.weight"
    directory = edited("gpt2", lambda t: t.update({name: t[name].T}))
    with pytest.raises(LlmqError, match=rf"{name} has shape \[128, 32\], .* \[32, 128\]"):
        HfWeights(directory).check(weight_table(read_config(directory)))


@pytest.mark.parametrize("value", [-1, "full_attention", {}])
def test_layer_types_that_are_no_list(source, value):
    content = json.loads((source("qwen3") / "config.json").read_text())
    with pytest.raises(LlmqError, match=r"config\.json: layer_types: expected list"):
        ModelConfig.from_hf(content | {"layer_types": value})


def test_a_directory_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(LlmqError, match=r"has neither model\.safetensors nor"):
        HfWeights(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"weight_map": {"a": 1}}', "is damaged"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors': No such file"),
        ('{"weight_map": {"b": "a.safetensors"}}', "holds b, but it does not"),
        (
            '{"weight_map": {"c": "c.safetensors"}}',
            "c.safetensors' is no safetensors file: it has only 5",
        ),
    ],
)
def test_damaged_indices(tmp_path, content, message):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"short")
    (tmp_path / hf.INDEX_FILE).write_text(content)
    with pytest.raises(LlmqError, match=message):
        HfWeights(tmp_path)


# ------------------------------------------------------------------------------------------------
# Export: files


def test_an_older_export_is_replaced_and_other_files_stay(source, tmp_path):
    """The new one is of FP32 weights, which are rounded to the nearest BF16."""
    out = tmp_path / "out"
    convert(source("llama"), out, F32, max_shard_bytes=30_000)
    (out / "notes.txt").write_text("mine")
    convert(source("qwen2"), out, BF16)
    assert sorted(os.listdir(out)) == [
        *("config.json", "generation_config.json", "model.safetensors", "notes.txt")
    ]
    assert_same_weights(load(out), load(source("qwen2")).bfloat16())


def test_an_export_that_fails_leaves_the_older_one(source, tmp_path):
    out = tmp_path / "out"
    convert(source("llama"), out, F32)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def read(param):
        raise LlmqError("the device is gone")

    with pytest.raises(LlmqError, match="the device is gone"):
        export_model(out, read_config(source("qwen2")), read, F32)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_tokenizer_files_are_written_or_copied(source, tmp_path):
    names = convert(source("qwen2"), tmp_path / "a", F32, tokenizer=ByteTokenizer())
    assert "tokenizer.json" in names
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    names = convert(source("qwen2"), tmp_path / "b", F32, tokenizer=tmp_path / "a")
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(names)
    ids = [104, 195, 164, 256]
    for directory in (tmp_path / "a", tmp_path / "b"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert tokenizer.encode("hä<|endoftext|>") == ids
        assert HfTokenizer(directory).encode("hä<|endoftext|>") == ids


def test_a_model_can_be_exported_onto_its_own_tokenizer(source, tmp_path):
    out = tmp_path / "out"
    convert(source("qwen2"), out, F32, tokenizer=ByteTokenizer())
    assert "tokenizer.json" in convert(out, out, F32, tokenizer=out)
    assert_same_weights(load(out), load(source("qwen2")))


def test_copied_tokenizer_files_are_files_even_from_a_cache_of_links(tmp_path):
    snapshot = tmp_path / "snapshots" / "0123"
    for folder in (tmp_path / "blobs", snapshot, tmp_path / "out"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "blobs" / "abc")
    (snapshot / "model.safetensors").touch()
    assert copy_tokenizer_files(snapshot, tmp_path / "out") == ["tokenizer.json"]
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert os.listdir(tmp_path / "out") == ["tokenizer.json"]
