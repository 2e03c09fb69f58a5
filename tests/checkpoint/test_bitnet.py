"""Exports of ternary matrices in 2 bits, as transformers and gguf read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from llmq.base.errors import LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.exports.bitnet import multiplied
from llmq.checkpoint.exports.source import open_source
from llmq.ref.quantize.ternary import ternary_of
from tests.bitnet import AutoBitLinear, BitLinear
from tests.models import LOSS_RTOL, exported, random_batch, torch_loss, trainer_for


def trained(path, folder, **options):
    """A checkpoint behind a step, and the loss of a batch there."""
    batch = random_batch(np.random.default_rng(1))
    with trainer_for(path, matmul_dtype="ternary", **options) as trainer:
        trainer.step([batch])
        trainer.save(folder)
        return trainer._step.evaluate([batch]).loss, batch


@pytest.mark.parametrize(("name", "of"), [("qwen2", "all"), ("phi3", "mlp")])
def test_transformers_has_the_loss_of_the_training(name, of, tmp_path):
    loss, batch = trained(exported(name), tmp_path / "c", ternary_of=of)
    for to, kind in {"bitnet": BitLinear, "hf": AutoBitLinear}.items():
        export(tmp_path / "c", tmp_path / to, to=to, verify=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / to, dtype="float32")
        layers = [m for m in model.model.layers[0].modules() if isinstance(m, kind)]
        assert len(layers) == {"qwen2": 7, "phi3": 2}[name]
        with torch.no_grad():
            assert torch_loss(model, [batch]).item() == pytest.approx(loss, rel=LOSS_RTOL)


def test_gguf_has_the_codes(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = exported("qwen3", hidden_size=256, intermediate_size=272)
    trained(path, tmp_path / "c")
    export(tmp_path / "c", tmp_path / "m.gguf", to="gguf", dtype="tq2_0", verify=True)
    export(tmp_path / "c", tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "f.gguf", to="gguf", dtype="fp32")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    plain = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "f.gguf").tensors}
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name, kind, module in (
        ("blk.1.ffn_up", "TQ2_0", "layers.1.mlp.up_proj"),
        ("blk.0.attn_q", "TQ2_0", "layers.0.self_attn.q_proj"),
        ("blk.0.ffn_down", "F16", "layers.0.mlp.down_proj"),  # whose rows are no multiple of 256
    ):
        found = read[f"{name}.weight"]
        assert found.tensor_type.name == kind
        codes, scale = ternary_of(weights[f"model.{module}.weight"].numpy())
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        np.testing.assert_array_equal(values, codes * np.float32(np.float16(scale)))
        np.testing.assert_allclose(plain[f"{name}.weight"].data, codes * scale, rtol=1e-6)
    assert read["token_embd.weight"].tensor_type.name == "F16"


def test_samples_have_the_values_of_products(tmp_path):
    """A checkpoint and its exports read the same; matrices that are not rounded stay."""
    trained(exported("qwen3"), tmp_path / "c", ternary_of="mlp")
    found = []
    for to in ("hf", "bitnet"):
        export(tmp_path / "c", tmp_path / to, to=to)
    for where in ("c", "hf", "bitnet"):
        with open_source(tmp_path / where) as source:
            params = {p.key: p for slab in source.table for p in slab.params if "1" in p.block}
            read = multiplied(source)
            found.append([read(params[key]) for key in ("down", "o")])
            assert np.array_equal(found[-1][1], source.read(params["o"]))
    assert len(np.unique(found[0][0])) == 3
    for down, o in found[1:]:
        np.testing.assert_allclose(down, found[0][0], rtol=1e-6)
        np.testing.assert_array_equal(o, found[0][1])


@pytest.mark.parametrize("options", [{"to": "bitnet"}, {"to": "gguf", "dtype": "tq2_0"}], ids=str)
def test_other_weights_have_no_codes(options, tmp_path):
    with pytest.raises(LlmqError, match="only checkpoints of runs with --matmul-dtype ternary"):
        export(exported("qwen3"), tmp_path / "m.gguf", **options)
