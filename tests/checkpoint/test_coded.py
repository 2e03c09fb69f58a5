"""Files whose matrices are codes: those that are exported in FP8, and those of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmq.base.errors import LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.hf import HfWeights, StoredAs
from llmq.formats import STORAGE
from llmq.options.presets import resolve_model
from llmq.ref.common import NF4_LEVELS
from llmq.ref.quantize.four_bits import scale_levels
from llmq.state.params import weight_table
from tests.coded import edited
from tests.models import CONFIGS, exported, hf_model, random_batch, torch_loss, trainer_for

BATCH = [random_batch(np.random.default_rng(0))]


def values(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory as Hugging Face names them, F32, as the trainer reads them."""
    model, _ = resolve_model(str(folder), from_scratch=False)
    found = {}
    with HfWeights(folder) as weights:
        table = weight_table(model)
        weights.check(table)
        for param in (p for slab in table for p in slab.params):
            rows = param.by_row(weights.read(param).astype(np.float32))
            for part in param.hf:
                found[part.name] = part.stored(rows[part.start : part.stop])
            if param.kind == "matrix":  # and in part, wherever that begins
                some = weights.elements(param, 7, param.size - 70).astype(np.float32)
                np.testing.assert_array_equal(some, rows.reshape(-1)[7:-70])
    return found


# ------------------------------------------------------------------------------------------------
# Exports in FP8


@pytest.mark.parametrize("name, scales", [("qwen3", "row"), ("phi3", "tensor")])
def test_transformers_computes_with_exported_codes(name, scales, tmp_path):
    """Matrices of transformers equal llmq's; transformers rounds activations to FP8, too."""
    pytest.importorskip("compressed_tensors")
    export(exported(name), tmp_path / "m", to="fp8", scales=scales, verify=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    loss = torch_loss(model, BATCH).item()
    read = values(tmp_path / "m")
    with trainer_for(tmp_path / "m") as trainer:
        assert trainer.step(BATCH).loss == pytest.approx(loss, rel=1e-3)
    for key, tensor in model.state_dict().items():
        if key in read:
            np.testing.assert_array_equal(tensor.float().numpy(), read[key], err_msg=key)
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == {"row": "channel", "tensor": "tensor"}[scales]
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == (
        "token",
        True,
    )


def test_codes_are_those_of_the_training(tmp_path):
    """And with delayed scales, those of the activations are."""
    options = {"matmul_dtype": "e4m3", "model_dtype": "bf16", "fp8_recipe": "delayed"}
    with trainer_for(exported("qwen3"), **options) as trainer:
        trainer.step(BATCH)
        weights = trainer.ranks._ranks[0].step.weights
        slab = weights._whole["layers.1"]
        qkv = weights.weight_codes.operands("layers.1", slab)["qkv"]
        codes, scale = (weights.dev.download(t).copy() for t in (qkv.codes, qkv.scale))
        history = trainer.ranks.extra_state()["fp8_abs_max.layers.1.ln2"]
        trainer.save(tmp_path / "c")
    export(tmp_path / "c", tmp_path / "m", to="fp8", activations="static", verify=True)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    prefix, first = "model.layers.1.self_attn", 0
    for x in "qkv":
        own = stored[f"{prefix}.{x}_proj.weight"].view(torch.uint8).numpy()
        np.testing.assert_array_equal(own, codes.view(np.uint8)[first : first + len(own)])
        assert stored[f"{prefix}.{x}_proj.weight_scale"].numpy() == scale
        first += len(own)
    for x in ("gate", "up"):
        found = stored[f"model.layers.1.mlp.{x}_proj.input_scale"].item()
        assert found == pytest.approx(2 * max(history) / 448)  # a margin of 2
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_what_has_no_fp8_codes_is_refused(tmp_path):
    out, source = tmp_path / "m", exported("qwen3")
    for where, message, options in [
        (exported("gpt2"), "no codes for the layers of GPT2LMHeadModel", {}),
        (source, "--activations static: only checkpoints of runs with", {"activations": "static"}),
        (source, "--scales: expected tensor or row, got 'block'", {"scales": "block"}),
        (source, "--scales has no meaning with --format hf", {"scales": "row", "to": "hf"}),
        (source, "--dtype: fp8 is fp32 or bf16, got 'fp16'", {"dtype": "fp16"}),
    ]:
        with pytest.raises(LlmqError, match=message):
            export(where, out, **{"to": "fp8"} | options)
        assert not out.exists()


@pytest.mark.parametrize("to", ["hf", "fp8"])
def test_a_directory_that_is_not_what_was_meant_never_gets_its_name(to, tmp_path, monkeypatch):
    real = StoredAs.arrays
    monkeypatch.setattr(StoredAs, "arrays", lambda self, param, x: real(self, param, x * 2))
    with pytest.raises(LlmqError, match=r"embed_tokens.weight is not what was written"):
        export(exported("qwen3"), tmp_path / "m", to=to)
    assert not [*tmp_path.iterdir()]
    export(exported("qwen3"), tmp_path / "m", to=to, verify=False)


# ------------------------------------------------------------------------------------------------
# Files of others


def nf4(nested: bool, expected: dict[str, torch.Tensor]):
    """Random codes as bitsandbytes stores them; expected gets the values."""
    rng = np.random.default_rng(1)

    def change(key, matrix):
        codes = rng.integers(0, 256, (matrix.numel() // 2, 1)).astype(np.uint8)
        blocks = matrix.numel() // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = list(matrix.shape)
        made = {key: codes, f"{key}.quant_map": NF4_LEVELS.copy()}
        if nested:
            made[f"{key}.absmax"] = rng.integers(128, 256, blocks).astype(np.uint8)
            made[f"{key}.nested_absmax"] = rng.random(-(-blocks // 256)).astype(np.float32) / 16
            made[f"{key}.nested_quant_map"] = scale_levels().copy()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.07}
            of_block = np.repeat(made[f"{key}.nested_absmax"], 256)[:blocks]
            scales = scale_levels()[made[f"{key}.absmax"]] * of_block + np.float32(0.07)
        else:
            scales = made[f"{key}.absmax"] = rng.random(blocks).astype(np.float32) / 16
        flat = np.stack([codes >> 4, codes & 15], 1).reshape(-1, 64)
        expected[key] = (NF4_LEVELS[flat] * scales[:, None]).reshape(matrix.shape)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        made[f"{key}.quant_state.bitsandbytes__nf4"] = text
        found = {name: torch.from_numpy(array) for name, array in made.items()}
        if not nested:  # as bnb_4bit_quant_storage has it for FSDP
            found[key] = found[key].view(-1).view(torch.bfloat16)[:, None]
        return found

    return change


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_of_bitsandbytes(nested, tmp_path):
    expected: dict = {}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = edited("qwen3", tmp_path / "m", config, nf4(nested, expected))
    found = values(folder)
    for key, matrix in expected.items():
        np.testing.assert_array_equal(found[key], matrix, err_msg=key)
    with trainer_for(folder, lora_rank=2, base_dtype="nf4") as trainer:
        assert np.isfinite(trainer.step(BATCH).loss)


def test_a_base_of_nf4_codes_is_as_bitsandbytes_has_it(tmp_path):
    """--base-dtype nf4 finds the same codes; scales are coded anew, to less than a hundredth."""
    expected: dict = {}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = edited("llama_biases", tmp_path / "m", config, nf4(True, expected))
    model, _ = resolve_model(str(folder), from_scratch=False)
    with HfWeights(folder) as weights:
        for param in (p for s in weight_table(model) for p in s.params if p.kind == "matrix"):
            x = weights.read(param).reshape(-1)
            whole = np.abs(x.reshape(-1, 64)).max(1) == 0
            again = STORAGE["nf4"].rounded(param, x)
            ratio = again[x != 0] / x[x != 0]
            assert not whole.any() and np.abs(ratio - 1).max() < 0.01
            assert np.array_equal(x == 0, again == 0)


def in_blocks(rows: int, columns: int, expected: dict, ending: str):
    """FP8 codes with a scale for each such block, of which the last may be smaller."""
    rng = np.random.default_rng(2)

    def change(key, matrix):
        out, width = matrix.shape
        codes = matrix.to(torch.float8_e4m3fn)
        high, wide = min(rows, out), min(columns, width)
        shape = (-(-out // high), -(-width // wide))
        scales = torch.from_numpy(rng.random(shape).astype(np.float32))
        spread = scales.repeat_interleave(high, 0)[:out].repeat_interleave(wide, 1)[:, :width]
        expected[key] = (codes.float() * spread).numpy()
        scales = scales.reshape(1) if shape == (1, 1) else scales
        return {key: codes, f"{key}{ending}": scales}

    return change


FP8, COMPRESSED = "fp8", "compressed-tensors"


@pytest.mark.parametrize(
    "kind, block, weights",
    [
        (FP8, (48, 40), {"weight_block_size": [48, 40]}),
        (FP8, (1 << 20, 1 << 20), {"activation_scheme": "static"}),
        (COMPRESSED, (1, 1 << 20), {"strategy": "channel"}),
        (COMPRESSED, (1, 32), {"strategy": "group", "group_size": 32}),
        (COMPRESSED, (48, 40), {"strategy": "block", "block_structure": [48, 40]}),
    ],
    ids=["deepseek", "tensor", "rows", "groups", "blocks"],
)
def test_fp8_of_others(kind, block, weights, tmp_path):
    expected: dict = {}
    config, ending = {"quant_method": FP8} | weights, "_scale_inv"
    if kind == COMPRESSED:
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"format": "float-quantized", "config_groups": groups, "quant_method": kind}
        ending = "_scale"
    folder = edited("phi3", tmp_path / "m", config, in_blocks(*block, expected, ending))
    found = values(folder)
    for key, matrix in expected.items():
        np.testing.assert_array_equal(found[key], matrix, err_msg=key)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method: 'gptq' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits of bitsandbytes cannot"),
        ({"quant_method": COMPRESSED, "format": "pack-quantized"}, "'pack-quantized' .* cannot be"),
        ({"quant_method": COMPRESSED, "format": "int-quantized"}, "cannot be read .KeyError"),
        ({"quant_method": FP8, "weight_block_size": [7, 9]}, "has not as many scales as"),
    ],
    ids=["gptq", "8-bit", "packed", "damaged", "blocks"],
)
def test_codes_that_cannot_be_read(config, message, tmp_path):
    folder = edited("qwen3", tmp_path / "m", config, in_blocks(1, 1 << 20, {}, "_scale"))
    with pytest.raises(LlmqError, match=message):
        trainer_for(folder)


@pytest.mark.parametrize("size", [-16, 0, float("inf"), 1.5, True])
@pytest.mark.parametrize("kind", ["weight_block_size", "block_structure", "group_size"])
def test_sizes_of_blocks_are_positive_numbers(kind, size, tmp_path):
    config = {"quant_method": FP8, kind: [size, 16]}
    if kind != "weight_block_size":
        strategy = kind.partition("_")[0]
        weights = {"strategy": strategy, kind: [16, size] if strategy == "block" else size}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"format": "float-quantized", "config_groups": groups, "quant_method": COMPRESSED}
    folder = edited("qwen3", tmp_path / "m", config, in_blocks(16, 16, {}, "_scale"))
    with pytest.raises(LlmqError, match=f"{kind}: sizes must be positive, got"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["blocksize", "nested_blocksize"])
@pytest.mark.parametrize("size", [0, -64, float("inf")])
def test_sizes_of_nf4_blocks_are_positive_numbers(field, size, tmp_path):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = edited("qwen3", tmp_path / "m", config, nf4(True, {}))
    tensors = load_file(folder / "model.safetensors")
    state = next(name for name in tensors if "quant_state" in name)
    known = json.loads(bytes(tensors[state].tolist())) | {field: size}
    tensors[state] = torch.tensor([*json.dumps(known).encode()], dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LlmqError, match=r"the codes of .* are damaged"):
        HfWeights(folder)


def test_damaged_nf4_is_refused(tmp_path):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = edited("qwen3", tmp_path / "m", config, nf4(True, {}))
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[f"{key}.absmax"] = tensors[f"{key}.absmax"][:-1]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LlmqError, match=f"the codes of {key} are damaged"):
        HfWeights(folder)


def test_a_model_of_codes_is_exported_as_their_values(tmp_path):
    """Its config.json has no quantization_config."""
    expected: dict = {}
    config = {"quant_method": FP8, "weight_block_size": [32, 32]}
    folder = edited("qwen3", tmp_path / "m", config, in_blocks(32, 32, expected, "_scale_inv"))
    export(folder, tmp_path / "out", dtype="fp32", verify=True)
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, matrix in expected.items():
        np.testing.assert_array_equal(state[key].numpy(), matrix)


# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_embeddings_are_by_default_those_of_transformers(name, tmp_path):
    content = json.loads((exported(name) / "config.json").read_text())
    content.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    model, _ = resolve_model(str(tmp_path), from_scratch=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert model.tied_embeddings == config.tie_word_embeddings
    assert type(hf_model(name).config) is type(config)
