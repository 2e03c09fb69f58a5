"""gpt-oss on the CPU device: steps, files with codes of 4 bits, and a base that is kept so."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.merge import merge_adapter
from llmq.options.presets import resolve_model
from llmq.ref.quantize.four_bits import MXFP4_BLOCK as BLOCK
from llmq.ref.quantize.four_bits import mxfp4_encode
from llmq.state.params import weight_table
from tests.formats.test_fp8 import FP8
from tests.model.test_experts import steps
from tests.models import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    exported,
    hf_model,
    pieces,
    random_batch,
    torch_gradients,
    torch_loss,
    trainer_for,
)

SIZES = {"intermediate_size": 32}  # whole blocks of codes


def test_experts_without_a_token_have_no_gradient(tmp_path):
    model = hf_model("gpt_oss", num_local_experts=64, num_experts_per_tok=1)
    model.save_pretrained(tmp_path)
    batch, idle = random_batch(np.random.default_rng(0)), 0
    with trainer_for(tmp_path) as trainer:
        result = trainer.step([batch])
        ours = pieces(trainer, trainer.gradients())
    loss = torch_loss(model, [batch])
    loss.backward()
    np.testing.assert_allclose(result.loss, loss.item(), rtol=LOSS_RTOL)
    for name, gradient in torch_gradients(model).items():
        experts = range(64) if ".experts." in name else [...]
        for e in experts:
            got, want = ours[name][e] / result.tokens, gradient[e]
            scale = max(np.linalg.norm(want), want.any() * 1e-3 * result.norm)
            assert np.linalg.norm(got - want) <= GRADIENT_RTOL * scale, (name, e)
            idle += e is not ... and not want.any()
    assert idle >= 4 * 2 * (64 - 48)


@pytest.mark.parametrize("formats", [{"model_dtype": "bf16"}, FP8 | {"fp8_recipe": "delayed"}])
def test_memory_and_recomputation_change_no_bit(formats):
    path = exported("gpt_oss")
    want, weights = steps(path, **formats)
    changes = [{"recompute_att": True, "recompute_ffn": True}, {"recompute_block": True}]
    changes[1] |= {"offload_residual": True, "offload_opt_m": True, "shard_weights": True}
    for change in changes:
        got, same = steps(path, **formats, **change)
        assert got == want, change
        assert all(np.array_equal(weights[n], same[n]) for n in weights), change
    # A sink has moved, and so has a bias of each kind.
    with trainer_for(path, model_dtype="bf16") as trainer:
        before = trainer.weights()
    for key in ("self_attn.sinks", "router.bias", "experts_up.bias", "experts_down.bias"):
        name = f"model.layers.0.{key}"
        assert not np.array_equal(before[name], weights[name]), name


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A directory as gpt-oss is released, and one with its values in bf16."""
    root = tmp_path_factory.mktemp("coded")
    hf_model("gpt_oss", **SIZES).bfloat16().save_pretrained(root / "bf16")
    (root / "mxfp4").mkdir()
    tensors = load_file(root / "bf16" / "model.safetensors")
    values = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        x = tensors.pop(name).float().transpose(1, 2).contiguous().numpy()
        count, rows, columns = x.shape
        codes = np.empty((count, rows, columns // BLOCK, BLOCK // 2), np.uint8)
        scales = np.empty(codes.shape[:3], np.uint8)
        mxfp4_encode(codes.reshape(-1), scales.reshape(-1), x.reshape(-1), x.size)
        tensors |= {f"{name}_blocks": torch.tensor(codes), f"{name}_scales": torch.tensor(scales)}
        values[name] = convert_moe_packed_tensors(torch.tensor(codes), torch.tensor(scales))
        values[name] = values[name].contiguous()
    config = json.loads((root / "bf16" / "config.json").read_text())
    (root / "mxfp4" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    save_file(tensors, root / "mxfp4" / "model.safetensors")
    save_file(values, root / "bf16" / "model.safetensors")
    return root


def test_codes_are_read_as_transformers_decodes_them(coded):
    read = {}
    for name in ("mxfp4", "bf16"):
        model, directory = resolve_model(str(coded / name), from_scratch=False)
        with HfWeights(directory) as weights:
            weights.check(weight_table(model))
            read[name] = [
                (weights.read(p), weights.elements(p, 96, p.count - 40))
                for slab in weight_table(model)
                for p in slab.params
                if p.kind == "matrix"
            ]
            assert weights.dtype == "bf16"
    for one, other in zip(read["mxfp4"], read["bf16"], strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


ADAPTERS = {"lora_rank": 8, "lora_targets": "q,v,experts"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_base_of_its_codes_is_exactly_the_released_model(coded, dtype):
    """Steps beside it are those beside the decoded values; and streamed from host memory too."""
    found = []
    for name, options in (
        ("bf16", {}),
        ("mxfp4", {}),
        ("mxfp4", {"base_dtype": "mxfp4"}),
        ("mxfp4", {"base_dtype": "mxfp4", "shard_weights": True, "offload_master": True}),
    ):
        options |= {"model_dtype": dtype, "learning_rate": 0.02} | ADAPTERS
        found.append(steps(coded / name, **options))
    (want, weights), *others = found
    assert want[0].loss != want[1].loss
    for got, same in others:
        assert got == want
        assert all(np.array_equal(weights[n], same[n]) for n in same)
        assert any("experts_up.lora_B" in name for name in same)


def test_merged_adapters_are_the_model_that_was_trained(coded, tmp_path):
    batch = random_batch(np.random.default_rng(2))
    with trainer_for(coded / "mxfp4", base_dtype="mxfp4", learning_rate=0.02, **ADAPTERS) as run:
        run.step([batch])
        run.export(tmp_path / "adapter")
        want = run.step([batch]).loss
    merge_adapter(str(coded / "mxfp4"), tmp_path / "adapter", tmp_path / "out", "fp32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    np.testing.assert_allclose(torch_loss(merged, [batch]).item(), want, rtol=1e-5)


def test_codes_stay_in_a_gguf_file(coded, tmp_path, capsys):
    """The experts of a released model have their values whatever --dtype says, in 4 bits; those of
    a merged one are decoded."""
    gguf = pytest.importorskip("gguf")
    (tmp_path / "m").mkdir()
    shutil.copy(coded / "mxfp4" / "model.safetensors", tmp_path / "m")
    config = json.loads((coded / "mxfp4" / "config.json").read_text()) | {"swiglu_limit": 7.0}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    def read(*source, **how):
        export(*source, tmp_path / "m.gguf", to="gguf", verify=True, overwrite=True, **how)
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        kind = reader.fields["general.file_type"].contents()
        return gguf.LlamaFileType(kind).name, {t.name: t for t in reader.tensors}

    kind, found = read(tmp_path / "m", dtype="q8_0")
    assert kind == "MOSTLY_MXFP4_MOE" and found["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"
    values = load_file(coded / "bf16" / "model.safetensors")
    of_both = values["model.layers.1.mlp.experts.gate_up_proj"].float().transpose(1, 2).numpy()
    down = values["model.layers.1.mlp.experts.down_proj"].float().transpose(1, 2).numpy()
    for name, want in (("gate", of_both[:, ::2]), ("up", of_both[:, 1::2]), ("down", down)):
        tensor = found[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        got = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(got, want)
    with trainer_for(tmp_path / "m", base_dtype="mxfp4", lora_rank=2, lora_targets="q") as run:
        run.export(tmp_path / "adapter")
    capsys.readouterr()
    kind, found = read(tmp_path / "adapter", base=str(tmp_path / "m"), merge=True)
    assert "experts are written decoded" in capsys.readouterr().err
    assert kind == "MOSTLY_BF16"
    assert found["blk.1.ffn_down_exps.weight"].tensor_type.name == "BF16"


def test_bad_files_and_options_are_one_line(coded, tmp_path, capsys):
    with trainer_for(coded / "mxfp4", lora_rank=8, base_dtype="nf4"):
        assert "--base-dtype mxfp4 keeps them" in capsys.readouterr().err
    tensors = load_file(coded / "mxfp4" / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((coded / "mxfp4" / "config.json").read_text())
    with pytest.raises(LlmqError, match=r"down_proj_blocks has no .*down_proj_scales of its shape"):
        HfWeights(tmp_path)
    with pytest.raises(ConfigError, match="mxfp4 is for experts, which Qwen2ForCausalLM has not"):
        trainer_for(exported("qwen2"), lora_rank=4, base_dtype="mxfp4")
