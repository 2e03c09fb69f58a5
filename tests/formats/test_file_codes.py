"""Bases in nvfp4 and e4m3-blocks: codes as the model's files have them, and torch's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmq.base.errors import LlmqError
from llmq.checkpoint.merge import merge_adapter
from llmq.state.params import Param
from tests.adapters import batches, targets
from tests.bases import block_weights
from tests.coded import MATRIX, edited, fp8_blocks, nvfp4
from tests.models import GRADIENT_RTOL, LOSS_RTOL, exported, hf_model, torch_loss, trainer_for

KINDS = {
    "compressed-tensors": ("nvfp4", lambda expected: nvfp4(False, expected)),
    "modelopt": ("nvfp4", lambda expected: nvfp4(True, expected)),
    "deepseek": ("e4m3-blocks", lambda expected: fp8_blocks(False, expected)),
    "float-quantized": ("e4m3-blocks", lambda expected: fp8_blocks(True, expected)),
}
NAMES = {"codes": ("weight_packed", "weight"), "scales": ("weight_scale", "weight_scale_inv")}
"""By the storage's tensors: names in the files."""


def made(kind: str, name: str, folder):
    """The directory of a model, its --base-dtype, and its matrices."""
    expected: dict[str, torch.Tensor] = {}
    base, codes_of = KINDS[kind]
    return edited(name, folder, *codes_of(expected)), base, expected


def kept(trainer) -> dict[Param, Mapping[str, np.ndarray]]:
    """The bytes of the tensors that store each matrix of the blocks."""
    frozen, found = trainer.ranks._ranks[0].step.weights.frozen, {}
    for name, slab in frozen.slabs.items():
        for param in slab.params:
            own = frozen._layouts[name].tensors(frozen.packed[name], param.key)
            read = {n: trainer.ranks._ranks[0].dev.download(t) for n, t in own.items()}
            found[param] = {n: x.reshape(-1).view(np.uint8) for n, x in read.items()}
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_files(kind, name, tmp_path):
    """Phi-3's gate and up are one tensor in the other order: blocks of rows are encoded anew."""
    folder, base, expected = made(kind, name, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    with trainer_for(folder, lora_rank=2, base_dtype=base, lora_targets="o") as trainer:
        weights, codes, compared = block_weights(trainer), kept(trainer), 0
        for param, tensors in codes.items():
            for part in param.hf:
                rows = weights[param].reshape(-1, param.columns)[part.start : part.stop]
                want, found = expected[part.name].numpy(), part.stored(rows)
                anew = base == "e4m3-blocks" and part.order
                close = {"rtol": 2**-4, "atol": 1e-3} if anew else {"rtol": 2**-22}
                np.testing.assert_allclose(found, want, **close)
                compared += 1
            for tensor, names in NAMES.items():
                if any(part.order for part in param.hf):
                    continue
                stems = [part.name.removesuffix("weight") for part in param.hf]
                parts = [stored[f"{s}{n}"] for s in stems for n in names if f"{s}{n}" in stored]
                given = b"".join(x.view(-1).view(torch.uint8).numpy().tobytes() for x in parts)
                own = b"".join(x.tobytes() for n, x in tensors.items() if n.startswith(tensor))
                assert own == given
        assert compared == len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_torch(kind, tmp_path):
    folder, base, expected = made(kind, "qwen3", tmp_path / "m")
    model = hf_model("qwen3")
    model.load_state_dict(model.state_dict() | expected)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets("qwen3"))
    options = {"lora_rank": 4, "lora_alpha": 8.0, "base_dtype": base}
    with trainer_for(folder, **options) as trainer:
        model = peft.get_peft_model(model, lora)
        state, params = {}, [p for s in trainer._step.table for p in s.params if p.of_adapter]
        for param, part in ((p, part) for p in params for part in p.hf):
            values = trainer.weights()[param.name][part.start : part.stop]
            state[part.name] = torch.from_numpy(part.stored(values))
        assert not peft.set_peft_model_state_dict(model, state).unexpected_keys
        batch = batches()[0]
        loss = torch_loss(model, [batch])
        loss.backward()
        result = trainer.step([batch])
        assert result.loss == pytest.approx(loss.item(), rel=LOSS_RTOL)
        trained = [(n, p.grad) for n, p in model.named_parameters() if p.requires_grad]
        theirs = {n.replace(".default", ""): gradient for n, gradient in trained}
        ours = trainer.gradients()
        for param, part in ((p, part) for p in params for part in p.hf):
            own = part.stored(ours[param.name][part.start : part.stop]) / result.tokens
            want = theirs[part.name].numpy()
            assert np.linalg.norm(own - want) <= GRADIENT_RTOL * np.linalg.norm(want), part.name


@pytest.mark.parametrize("kind", ["modelopt", "deepseek"])
def test_merged_models_have_the_values_of_the_codes(kind, tmp_path, capsys):
    folder, base, _ = made(kind, "qwen3", tmp_path / "m")
    with trainer_for(folder, lora_rank=2, base_dtype=base, learning_rate=1e-2) as trainer:
        assert "rounds the codes" not in capsys.readouterr().err
        trainer.step([batches()[0]])
        trainer.export(tmp_path / "adapter")
        want = trainer.step([batches()[1]]).loss
    assert json.loads((tmp_path / "adapter" / "llmq.json").read_text())["base_dtype"] == base
    merge_adapter(str(folder), tmp_path / "adapter", tmp_path / "out", "fp32")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with trainer_for(tmp_path / "out") as trainer:
        assert trainer.step([batches()[1]]).loss == pytest.approx(want, abs=2e-6)  # F32
    with trainer_for(folder, lora_rank=2, base_dtype="nf4") as trainer:
        assert f"rounds the codes of {folder} anew" in capsys.readouterr().err


def test_modules_that_are_no_codes_are_encoded(tmp_path):
    """Files leave some modules out, of which several may be one matrix here."""
    folder, base, expected = made("modelopt", "qwen3", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    plain = load_file(exported("qwen3") / "model.safetensors")
    for key in [key for key in expected if "k_proj" in key]:
        stem = key.removesuffix("weight")
        tensors = {n: t for n, t in tensors.items() if not n.startswith(stem)} | {key: plain[key]}
    save_file(tensors, folder / "model.safetensors")
    with trainer_for(folder, lora_rank=2, base_dtype=base) as trainer:
        weights = block_weights(trainer)
    for param, part in ((p, part) for p in weights for part in p.hf):
        found, want = weights[param][part.start : part.stop], expected[part.name].numpy()
        if "k_proj" in part.name:
            assert 0.98 < np.corrcoef(found.ravel(), plain[part.name].numpy().ravel())[0, 1] < 1
        else:
            np.testing.assert_array_equal(found, want)


def test_older_files_of_modelopt_have_a_file_for_their_config(tmp_path):
    folder, _, expected = made("modelopt", "qwen3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    own = {"producer": {"name": "modelopt"}, "quantization": config.pop("quantization_config")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    with trainer_for(folder, lora_rank=2, base_dtype="nvfp4") as trainer:
        weights = block_weights(trainer)
    key = f"model.layers.0.self_attn.o{MATRIX}"
    found = next(v for p, v in weights.items() if p.hf[0].name == key)
    np.testing.assert_array_equal(found, expected[key].numpy())


def changed(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


KEY = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("modelopt", lambda t: t.pop(f"{KEY}_scale"), f"{KEY} has not the codes and scales of"),
        (
            "compressed-tensors",
            lambda t: t.update({f"{KEY}_scale": t[f"{KEY}_scale"][:, :-1].contiguous()}),
            f"{KEY}_packed has not the codes and scales of",
        ),
        (
            "modelopt",
            lambda t: t[f"{KEY}_scale"].view(torch.uint8).fill_(0x7F),
            f"{KEY} holds NaN or infinity",
        ),
        (
            "compressed-tensors",
            lambda t: t[f"{KEY}_global_scale"].fill_(0),
            f"{KEY} holds NaN or infinity",
        ),
        (
            "deepseek",
            lambda t: t[KEY].view(torch.uint8)[5].fill_(0xFF),
            f"{KEY} holds NaN or infinity",
        ),
    ],
)
def test_damaged_codes_are_refused(kind, change, message, tmp_path):
    folder, base, _ = made(kind, "qwen3", tmp_path / "m")
    changed(folder, change)
    with pytest.raises(LlmqError, match=message), trainer_for(folder, lora_rank=2, base_dtype=base):
        pass


def test_kinds_that_cannot_be_read(tmp_path):
    for number, (config, message) in enumerate(
        [
            ({"quant_algo": "NVFP4_AWQ"}, "the quant_algo 'NVFP4_AWQ' of modelopt cannot be read"),
            ({}, "the quant_algo None of modelopt cannot be read"),
        ]
    ):
        config = {"quant_method": "modelopt"} | config
        folder = edited("qwen3", tmp_path / str(number), config, nvfp4(True, {})[1])
        with pytest.raises(LlmqError, match=message):
            trainer_for(folder)
    config, change = nvfp4(False, {})
    config["transform_config"] = {"config_groups": {"R1": {"type": "hadamard"}}}
    with pytest.raises(LlmqError, match="weights that a transform_config turns cannot be read"):
        trainer_for(edited("qwen3", tmp_path / "turned", config, change))
