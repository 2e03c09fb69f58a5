"""--lora-init pissa: adapters that begin as a part of the model, beside what is left of it."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from llmq.base.dtypes import BF16
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.merge import as_kept, merge_adapter
from llmq.checkpoint.principal import EXACT, Split, principal
from llmq.options.adapters import adapters_of
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.options.rules import RULES
from llmq.plan.disk import checkpoint_bytes
from llmq.state.params import weight_table
from llmq.state.placement import place, table_of
from tests.adapters import batches, targets
from tests.bases import block_weights
from tests.models import exported, hf_model, torch_loss, trainer_for

PISSA = {"lora_rank": 4, "lora_alpha": 6.0, "lora_init": "pissa", "learning_rate": 1e-2}


@pytest.mark.parametrize("name, rs", [("qwen2", True), ("phi3", False), ("gpt2", True)])
def test_equals_peft(tmp_path, name, rs):
    """The matrices are split alike, and four steps are equal; then its files on the model as it
    was."""
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=rs, target_modules=targets(name),
        fan_in_fan_out=name == "gpt2", init_lora_weights="pissa",
    )  # fmt: skip
    model = peft.get_peft_model(hf_model(name), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.1)
    options = PISSA | {"lora_scaling": "rs" if rs else "standard", "weight_decay": 0.1}
    with trainer_for(exported(name), **options) as trainer:
        modules = dict(model.named_modules())
        for param, values in block_weights(trainer).items():
            for part in param.hf:
                module = modules[f"base_model.model.{part.name.removesuffix('.weight')}"]
                theirs = module.base_layer.weight.detach().numpy()
                stored = part.stored(values[part.start : part.stop])
                # F32 sums of products in another order, from SVDs by other routines.
                np.testing.assert_allclose(stored, theirs, atol=2e-6, err_msg=part.name)
        for step, batch in enumerate(batches()[:4]):
            loss = torch_loss(model, [batch])
            result = trainer.step([batch])
            assert result.loss == pytest.approx(loss.item(), abs=1e-5), step  # as test_lora.py
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.param_groups[0]["lr"] = trainer.learning_rate(step)
            optimizer.step()
        trainer.export(tmp_path / "out")
        want = trainer.step([batches()[4]]).loss
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert said["r"] == 8 and said["lora_alpha"] == pytest.approx(6 * (2**0.5 if rs else 2))
    original = peft.PeftModel.from_pretrained(hf_model(name), tmp_path / "out")
    assert torch_loss(original, [batches()[4]]).item() == pytest.approx(want, abs=1e-5)  # F32
    merge_adapter(str(exported(name)), tmp_path / "out", tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged") as trainer:
        assert trainer.step([batches()[4]]).loss == pytest.approx(want, abs=1e-5)  # F32
    with trainer_for(exported(name), adapter=tmp_path / "out") as trainer:
        assert trainer.config.lora_rank == 8 and trainer.config.lora_init == "zero"
        assert trainer.step([batches()[4]]).loss == pytest.approx(want, abs=1e-5)  # F32


BASES = {"fp32": {}, "bf16": {"model_dtype": "bf16"}}
BASES |= {base: {"base_dtype": base} for base in ("e4m3", "int8", "nf4")}


@pytest.mark.parametrize("base", BASES)
def test_bases(base, tmp_path):
    """The rest is what is kept in their format; with it the adapters are the model again."""
    with (
        trainer_for(exported("phi3"), **PISSA, **BASES[base]) as trainer,
        HfWeights(exported("phi3")) as files,
    ):
        initial_adapters = {n: x for n, x in trainer.weights().items() if "lora" in n}
        split = Split(trainer.model, adapters_of(trainer.config), initial_adapters)
        read = as_kept(lambda param: split.rest(param, files.read(param)), base)
        for param, values in block_weights(trainer).items():
            rest = read(param)
            rest = rest.astype(BF16.numpy).astype(np.float32) if base == "bf16" else rest
            np.testing.assert_array_equal(values, rest, err_msg=param.name)
        for batch in batches()[:2]:
            trainer.step([batch])
        trainer.export(tmp_path / "out")
        want = trainer.step([batches()[2]]).loss
        assert trainer.usage == trainer.plan.usage
    merge_adapter(str(exported("phi3")), tmp_path / "out", tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged", **BASES.get(base if base == "bf16" else "fp32")) as one:
        loss = one.step([batches()[2]]).loss
    # F32 sums; or weights, adapters and activations that are rounded to BF16.
    assert loss == pytest.approx(want, abs=2e-6 if base != "bf16" else 2e-2)


def test_adapter_beside_another_rest(tmp_path, capsys):
    with trainer_for(exported("qwen3"), **PISSA, base_dtype="nf4") as trainer:
        trainer.step([batches()[0]])
        trainer.export(tmp_path / "out")
    capsys.readouterr()
    with trainer_for(exported("qwen3"), adapter=tmp_path / "out", base_dtype="nf4"):
        assert "beside what --lora-init pissa had left of the model in nf4" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize("base", [None, "nf4"])
def test_resume(tmp_path, monkeypatch, base):
    """On other ranks, too: what was taken from the model is in the checkpoint."""
    options = PISSA | {"batch_size": 1, "base_dtype": base, "train": "norms"}
    steps = [[tuple(x[i : i + 1] for x in batch) for i in (0, 1)] for batch in batches()[:4]]
    with trainer_for(exported("qwen3"), gpus=2, **options) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        path = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
        want = [trainer.step(step).loss for step in steps[2:]]
        weights = trainer.weights()
        planned = checkpoint_bytes(trainer.config, trainer.model, trainer.plan.placement)
    stored = [load_file(file) for file in path.glob("*.safetensors")]
    assert planned == sum(x.nbytes for tensors in stored for x in tensors.values())
    export(path, tmp_path / "again")
    found = [load_file(tmp_path / n / "adapter_model.safetensors") for n in ("out", "again")]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)

    def another(w, *_):
        raise AssertionError("it is computed once")

    with trainer_for(exported("qwen3"), gpus=2, **options) as trainer:
        monkeypatch.setattr("llmq.checkpoint.principal.principal", another)
        trainer.load(path)
        assert [trainer.step(step).loss for step in steps[2:]] == want
        for name, value in trainer.weights().items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
    monkeypatch.undo()
    with trainer_for(exported("qwen3"), grad_accumulation=2, **options) as one:
        one.load(path)
        # F32 sums over ranks in another order.
        assert [one.step(step).loss for step in steps[2:]] == pytest.approx(want, abs=1e-5)
    with (
        trainer_for(exported("qwen3"), **options | {"lora_init": "zero"}) as other,
        pytest.raises(LlmqError, match="made with --lora-init=pissa: continue it so"),
    ):
        other.load(path)


@pytest.mark.parametrize("columns", [EXACT, EXACT + 44])
def test_leading_singular_values(columns):
    """The matrix has values that fall slowly, as those of models do: the best of its rank."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((n, columns)))[0] for n in (400, columns))
    values = np.arange(1, columns + 1, dtype=np.float64) ** -0.5
    w = (u * values @ v.T).astype(np.float32)
    a, b = principal(w, 16, 2.0, 0)
    left = np.linalg.norm(w - 2.0 * b @ a)
    assert left == pytest.approx(np.linalg.norm(values[16:]), rel=1e-6)  # F32
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-4)
    again = principal(w, 16, 2.0, 0)
    np.testing.assert_array_equal(again[0], a)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_parts_of_what_is_left(rows, monkeypatch):
    """Whatever elements are asked for together."""
    model = preset("tiny")
    config = TrainConfig(lora_rank=3, lora_alpha=3.0).normalized()
    adapters = adapters_of(config)
    rng = np.random.default_rng(0)
    split = Split(model, adapters)
    weight = split.matrices[0]
    values = rng.standard_normal(weight.shape, np.float32)
    split.initial_adapters = split.begin(weight, values, np.dtype(np.float32))
    whole = split.rest(weight, values).reshape(-1)
    assert 0 < np.linalg.norm(whole) < np.linalg.norm(values)
    monkeypatch.setattr("llmq.checkpoint.principal.PIECE", rows * weight.shape[1])
    flat = values.reshape(-1)
    for start, stop in ((0, 64), (5, 5 + 3 * weight.shape[1]), (1000, flat.size)):
        part = split.rest_of(weight, start, flat[start:stop])
        np.testing.assert_array_equal(part, whole[start:stop])
    table = weight_table(model)
    np.testing.assert_array_equal(split.rest(table[0].params[0], values), values)


def test_adapters_of_more_than_all_values(tmp_path):
    """Twice the rank may be more than a matrix has: a model can be made of them, no more."""
    base, options = exported("qwen3"), PISSA | {"lora_rank": 40}
    with trainer_for(base, **options) as trainer:
        trainer.step(batches()[1:2])
        trainer.export(tmp_path / "a")
        loss = trainer.step(batches()[:1]).loss
    with pytest.raises(ConfigError, match=r"--lora-rank: 80 is larger .* 64: `llmq merge` '.*/a'"):
        trainer_for(base, adapter=tmp_path / "a")
    merge_adapter(str(base), tmp_path / "a", tmp_path / "out", "fp32")
    with trainer_for(tmp_path / "out") as trainer:
        # F32: what was split off and its negative are added again.
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)


def test_options():
    with pytest.raises(ConfigError, match="pissa takes the adapters from a model that was trained"):
        TrainConfig(**PISSA, from_scratch=True).normalized().validate()
    with pytest.raises(ConfigError, match="pissa does not go with --adapter"):
        TrainConfig(adapter="there", lora_init="pissa", model="there").normalized().validate()
    with pytest.raises(ConfigError, match="--lora-init: needs --lora-rank"):
        TrainConfig(lora_init="pissa").normalized().validate()
    config = TrainConfig(**PISSA, model_dtype="fp32", seed=7).normalized()
    config_of_zeros = TrainConfig(lora_rank=4, model_dtype="fp32", seed=7).normalized()
    idle = [[w for w in RULES.idle(c) if "seed" in w] for c in (config, config_of_zeros)]
    assert [len(lines) for lines in idle] == [1, 0]
    placement = place(config, table_of(config, preset("tiny")))
    assert (
        placement["lora_a"].initial_adapters.memory == "pinned"
        and placement["layers.0"].initial_adapters is None
    )
