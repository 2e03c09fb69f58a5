"""Heads for multi-token prediction: losses and gradients of torch, and what is refused."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from llmq.base.errors import LlmqError
from llmq.checkpoint.merge import merge_adapter
from tests.arch.test_families import FAMILIES
from tests.data.test_document_mask import batch_of, documents
from tests.models import (
    CONFIGS,
    GRADIENT_RTOL,
    LOSS_RTOL,
    VOCAB,
    exported,
    hf_model,
    random_batch,
    randomized,
    trainer_for,
)
from tests.mtp import PARTS, MtpHead, with_head

LORA = {"lora_rank": 2, "train": ("mtp",), "mtp_share": 1.0}


def model_of(name: str) -> transformers.PreTrainedModel:
    if name in CONFIGS:
        return hf_model(name)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]())
    return randomized(model.float())


def losses_of(model, head: MtpHead, parts: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the head of all targets ahead, and those of the trunk of the same targets."""
    found = []
    for inputs, targets in (map(torch.from_numpy, part) for part in parts):
        inputs, targets = inputs.long(), targets.long()
        if inputs.shape[1] > 1:
            at = targets[:, 1:] >= 0
            every = (head(model, inputs), model(inputs).logits[:, 1:])
            found.append(
                [
                    torch.nn.functional.cross_entropy(
                        logits[at].view(-1, VOCAB), targets[:, 1:][at], reduction="none"
                    )
                    for logits in every
                ]
            )
    ahead, trunk = zip(*found, strict=True)
    return torch.cat(ahead), torch.cat(trunk).detach()


ALONE = LORA | {"lora_targets": "none"}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("name", PARTS)
def test_losses_and_gradients_are_those_of_torch(name, packed, tmp_path):
    model = model_of(name)
    head, named = with_head(name, model, tmp_path / "m")
    rng = np.random.default_rng(0)
    batch = batch_of(rng) if packed else random_batch(rng)
    with trainer_for(tmp_path / "m", **LORA, document_mask=packed) as trainer:
        result = trainer.step([batch])
        assert trainer.usage == trainer.plan.usage
        ahead, trunk = losses_of(model, head, list(documents(batch)) if packed else [batch[:2]])
        ahead.sum().backward()
        assert result.numbers["mtp_loss"] == pytest.approx(ahead.mean().item(), rel=LOSS_RTOL)
        accepted = torch.exp(trunk - ahead.detach()).clamp(max=1).mean().item()
        assert result.numbers["mtp_acceptance"] == pytest.approx(accepted, rel=1e-4)
        gradients = trainer.gradients()
        params = [p for s in trainer._step.table if s.name == "mtp" for p in s.params]
    found = {}
    for param in params:
        rows = param.by_row(gradients[param.name])
        for part in [param.fused] if param.fused else param.hf:
            found[part.name] = part.stored(rows[part.start : part.stop])
    wanted = {key: p.grad.numpy() for key, p in named.items() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        error = np.linalg.norm(found[key] - want)
        assert error <= GRADIENT_RTOL * np.linalg.norm(want) > 0, key


def test_the_first_sequences_train_the_head(tmp_path):
    """The head's numbers are of these sequences; gradients are sums over their targets."""
    model = model_of("qwen3_5_moe")
    head, named = with_head("qwen3_5_moe", model, tmp_path / "m")
    inputs, targets = random_batch(np.random.default_rng(0), B=5)
    options = LORA | {"mtp_share": 0.5, "batch_size": 5, "attn_bwd_chunks": 5, "lmhead_chunks": 10}
    with trainer_for(tmp_path / "m", **options) as trainer:
        result = trainer.step([(inputs, targets)])
        assert trainer.usage == trainer.plan.usage
        fc = trainer.gradients()["mtp.fc.weight"]
    ahead, trunk = losses_of(model, head, [(inputs[:2], targets[:2])])
    ahead.sum().backward()
    assert result.numbers["mtp_loss"] == pytest.approx(ahead.mean().item(), rel=LOSS_RTOL)
    accepted = torch.exp(trunk - ahead.detach()).clamp(max=1).mean().item()
    assert result.numbers["mtp_acceptance"] == pytest.approx(accepted, rel=1e-4)
    want = named["mtp.fc.weight"].grad.numpy()
    assert np.linalg.norm(fc - want) <= GRADIENT_RTOL * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe"])
def test_heads_are_written_read_and_merged_under_published_names(name, tmp_path):
    model = model_of(name)
    _, named = with_head(name, model, tmp_path / "m")
    rng = np.random.default_rng(0)
    first, then = random_batch(rng), random_batch(rng)
    options = LORA | {"learning_rate": 1e-2}
    with trainer_for(tmp_path / "m", **options) as trainer:
        trainer.step([first])
        trainer.export(tmp_path / "adapters")
        checkpoint = trainer.save(tmp_path / "checkpoint")
        want = trainer.step([then]).numbers["mtp_loss"]
    with trainer_for(tmp_path / "m", **options) as trainer:
        trainer.load(checkpoint)
        assert trainer.step([then]).numbers["mtp_loss"] == want
    with trainer_for(tmp_path / "m", adapter=tmp_path / "adapters", mtp_share=1.0) as trainer:
        assert trainer.config.train == ("mtp",)
        assert trainer.step([then]).numbers["mtp_loss"] == want
    peft.PeftModel.from_pretrained(model, tmp_path / "adapters")  # which knows no head
    merge_adapter(str(tmp_path / "m"), tmp_path / "adapters", tmp_path / "out", "fp32")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("m", "out"))
    assert before.keys() == after.keys()
    changed = {key for key in named if not torch.equal(before[key], after[key])}
    assert changed == {key for key, p in named.items() if isinstance(p, torch.nn.Parameter)}
    with trainer_for(tmp_path / "out", **options) as trainer:
        assert trainer.step([then]).numbers["mtp_loss"] == pytest.approx(want, rel=1e-5)


FP8 = {"matmul_dtype": "e4m3", "head_dtype": "e4m3", "base_dtype": "e4m3", "model_dtype": "bf16"}


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("qwen3_5", {}, r"--train: .* lacks mtp.pre_fc_norm_embedding.weight"),
        ("qwen3", {}, "no MTP head of Qwen3ForCausalLM can be trained"),
        ("qwen3_5", {"loss": "dpo", "packing": "best-fit"}, "learns with --loss ce alone"),
        ("qwen3_5", FP8, "shares the LM head, in bf16"),
        ("qwen3_5", FP8 | {"lora_targets": "none"}, "an MTP head alone has products in bf16"),
    ],
    ids=["no head", "no names", "loss", "fp8", "fp8 alone"],
)
def test_what_cannot_be_is_refused(name, options, message):
    with pytest.raises(LlmqError, match=message):
        trainer_for(exported(name), **LORA | options)


def test_gradients_of_adapters_do_not_know_of_the_head(tmp_path):
    with_head("qwen3_5", hf_model("qwen3_5"), tmp_path / "m")
    batch, found = random_batch(np.random.default_rng(0)), []
    for options in ({"lora_rank": 2}, LORA, LORA | {"gpus": 2, "zero_level": 3}):
        batches = [batch] * options.get("gpus", 1)
        with trainer_for(tmp_path / "m", **options, grad_clip=0.0) as trainer:
            trainer.step(batches)
            gradients = trainer.gradients()
            found.append({n: g for n, g in gradients.items() if ".lora_" in n})
            assert trainer.usage == trainer.plan.usage
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(found[1][name], gradient, err_msg=name)
        np.testing.assert_allclose(found[2][name], 2 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_heads_alone_train_as_beside_adapters(name, tmp_path):
    """And need less memory. The trunk is computed in forward alone."""
    with_head(name, model_of(name), tmp_path / "m")
    batch, found = random_batch(np.random.default_rng(0)), []
    for options in (LORA, ALONE, ALONE | {"gpus": 2}):
        batches = [batch] * options.get("gpus", 1)
        with trainer_for(tmp_path / "m", **options, grad_clip=0.0) as trainer:
            result = trainer.step(batches)
            found.append((result, trainer.weights(), trainer.usage.device_bytes))
            assert trainer.usage == trainer.plan.usage
    (beside, weights, large), (alone, own, small), (_, ranks, _) = found
    assert (alone.loss, alone.numbers["mtp_loss"]) == (beside.loss, beside.numbers["mtp_loss"])
    assert alone.numbers["mtp_acceptance"] == beside.numbers["mtp_acceptance"]
    assert own.keys() == {key for key in weights if ".lora_" not in key} and small < large
    for key, values in own.items():
        np.testing.assert_array_equal(values, weights[key], err_msg=key)
        np.testing.assert_allclose(ranks[key], values, rtol=1e-4, atol=1e-6)


def test_heads_alone_are_written_read_and_merged(tmp_path):
    _, named = with_head("qwen3_5", hf_model("qwen3_5"), tmp_path / "m")
    rng = np.random.default_rng(0)
    first, then = random_batch(rng), random_batch(rng)
    with trainer_for(tmp_path / "m", **ALONE, learning_rate=1e-2, base_dtype="nvfp4") as trainer:
        trainer.step([first])
        trainer.export(tmp_path / "head")
        want = trainer.step([then]).numbers["mtp_loss"]
    with trainer_for(tmp_path / "m", adapter=tmp_path / "head", base_dtype="nvfp4") as trainer:
        assert (trainer.config.train, trainer.config.lora_targets) == (("mtp",), "none")
        assert trainer.step([then]).numbers["mtp_loss"] == want
    merge_adapter(str(tmp_path / "m"), tmp_path / "head", tmp_path / "out", "fp32", "fp32")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("m", "out"))
    assert {key for key in before if not torch.equal(before[key], after[key])} == named.keys()
    with pytest.raises(LlmqError, match="none is for --train mtp alone"):
        trainer_for(tmp_path / "m", lora_rank=2, lora_targets="none")


@pytest.mark.parametrize("matmul", ["e4m3", "int8"])
def test_heads_beside_products_of_codes_are_in_bf16(matmul, tmp_path):
    with_head("qwen3_5", hf_model("qwen3_5"), tmp_path / "m")
    batch, losses = random_batch(np.random.default_rng(0)), []
    for products in (matmul, "bf16"):
        options = {"model_dtype": "bf16", "base_dtype": matmul, "matmul_dtype": products}
        with trainer_for(tmp_path / "m", **LORA, **options) as trainer:
            losses.append(trainer.step([batch]).numbers["mtp_loss"])
            assert trainer.usage == trainer.plan.usage
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]
