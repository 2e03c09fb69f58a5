"""Rows of new tokens that are trained alone beside adapters: PEFT's `trainable_token_indices`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from llmq.base.errors import LlmqError
from llmq.checkpoint.merge import merge_adapter
from tests.adapters import batches, targets
from tests.conftest import gpu_problem
from tests.models import exported, hf_model, torch_loss, trainer_for

IDS = [*range(21, 32)]  # of the tiny models' vocabulary, all in the batches
# PEFT's list is of the embedding alone, also where the head is another table, as in llama.
TABLES = {"qwen2_untied": ["embed_tokens", "lm_head"], "gpt2": ["wte"]}
LORA = {"learning_rate": 1e-2, "weight_decay": 0.1, "master_dtype": "fp32"}


@cache
def adapter(name: str, folder: Path) -> Path:
    """A directory of PEFT's, whose rows and adapters have moved."""
    ids = dict.fromkeys(TABLES.get(name, ["embed_tokens"]), IDS)
    config = peft.LoraConfig(
        r=4, target_modules=targets(name), trainable_token_indices=ids,
        fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(hf_model(name), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def rows(trainer, values) -> dict[str, np.ndarray]:
    """New rows of the trainer by PEFT's names."""
    found = {}
    for slab in trainer._step.table:
        if slab.name in ("lora_a", "lora_b", "new_rows"):
            for param in slab.params:
                for part in param.hf:
                    name = "base_model.model." + part.name.removeprefix("base_model.model.")
                    found[name] = part.stored(values[param.name][part.start : part.stop])
    return found


def assert_near(ours: dict[str, np.ndarray], theirs: dict, scale: dict, rtol: float) -> None:
    """Each tensor beside PEFT's of the same name. scale: tensors, of whose norms errors are."""
    assert len(ours) == len(theirs)
    for key, want in theirs.items():
        error = np.linalg.norm(ours[key.replace(".default", "")] - want)
        assert error < rtol * np.linalg.norm(scale[key]), key


@pytest.mark.parametrize("name", ["qwen3", "qwen2_untied", "gemma3", "gpt2", "llama"])
def test_equals_peft(folder, tmp_path, name):
    """Losses and gradients of what PEFT has written, steps, and what is written for it.

    Gradients are compared at the same weights. AdamW's first steps are those of signs, so that
    rounding of a gradient near 0 moves a weight by up to the rate: weights are beside the change.
    """
    source = adapter(name, folder)
    model = peft.PeftModel.from_pretrained(hf_model(name), source, is_trainable=True)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), weight_decay=0.1)
    with trainer_for(exported(name), adapter=source, lmhead_chunks=2, **LORA) as trainer:
        assert trainer.config.train == ("new-embeddings" if name == "llama" else "new-rows",)
        for step, batch in enumerate(batches()[:3]):
            optimizer.param_groups[0]["lr"] = trainer.learning_rate(step)
            before = {n: p.detach().numpy().copy() for n, p in trained.items()}
            loss = torch_loss(model, [batch])
            optimizer.zero_grad()
            loss.backward()
            result = trainer.step([batch])
            assert result.loss == pytest.approx(loss.item(), abs=1e-5)
            gradients = {n: p.grad.numpy() * result.tokens for n, p in trained.items()}
            assert_near(rows(trainer, trainer.gradients()), gradients, gradients, 1e-5)
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            found = rows(trainer, trainer.weights())
            after = {n: p.detach().numpy() for n, p in trained.items()}
            assert_near(found, after, {n: after[n] - before[n] for n in after}, 5e-3)
            with torch.no_grad():
                for key, p in trained.items():
                    p.copy_(torch.from_numpy(found[key.replace(".default", "")]))
        assert trainer.usage == trainer.plan.usage
        trainer.export(tmp_path / "out")
        want = trainer.step(batches()[3:4]).loss
    again = peft.PeftModel.from_pretrained(hf_model(name), tmp_path / "out")
    assert torch_loss(again, batches()[3:4]).item() == pytest.approx(want, abs=1e-5)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert stored.keys() == load_file(source / "adapter_model.safetensors").keys()
    merge_adapter(str(exported(name)), tmp_path / "out", tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged") as merged:
        assert merged.step(batches()[3:4]).loss == pytest.approx(want, abs=1e-5)


def steps(name: str, folder: Path, **options) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of three steps, and the weights after them."""
    ranks = options.get("gpus", 1)
    given = {"batch_size": 1, "grad_accumulation": 2 // ranks, "lora_dropout": 0.25}
    with trainer_for(exported(name), adapter=adapter(name, folder), **LORA | given | options) as t:
        own = [tuple(x[:1] for x in batch) for batch in batches()]
        return [t.step(own[2 * i : 2 * i + 2]).loss for i in range(3)], t.weights()


@pytest.mark.parametrize("name", ["qwen3", "qwen2_untied"])
def test_options_of_memory_and_ranks(folder, name):
    want, weights = steps(name, folder, model_dtype="bf16")
    offload = {"offload_residual": True, "offload_opt_m": True, "offload_master": True}
    for options in ({"recompute_block": True}, offload | {"shard_weights": True}):
        losses, found = steps(name, folder, model_dtype="bf16", **options)
        assert losses == want
        for key, value in weights.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    want, _ = steps(name, folder)
    for options in ({}, {"zero_level": 3, "memcpy_all_gather": True}):
        losses, _ = steps(name, folder, gpus=2, **options)
        assert losses == pytest.approx(want, abs=1e-5)  # F32 sums over ranks in another order


@pytest.mark.parametrize("base, dtype", [("nf4", "fp32"), ("int8", "bf16"), ("e4m3", "bf16")])
def test_beside_codes_and_in_a_resumed_run(folder, tmp_path, base, dtype):
    """Only the rows are in checkpoints; the table has those of the run that was continued."""
    name, more = "qwen2_untied", LORA | {"base_dtype": base, "model_dtype": dtype}
    more |= {"adapter": adapter(name, folder)}
    with trainer_for(exported(name), **more) as trainer:
        trainer.step(batches()[:1])
        path = trainer.save(tmp_path)
        want = [trainer.step([batch]).loss for batch in batches()[1:3]]
    stored = load_file(next(path.glob("weights.shard_000*")))
    assert all("lora" in key or "new_rows" in key for key in stored)
    with trainer_for(exported(name), **more) as trainer:
        trainer.load(path)
        assert [trainer.step([batch]).loss for batch in batches()[1:3]] == want


def test_other_rows_stay(folder):
    name = "qwen2_untied"
    with trainer_for(exported(name), adapter=adapter(name, folder), **LORA) as trainer:
        before = trainer.weights()
        trainer.step(batches()[:1])
        after = trainer.weights()
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = np.flatnonzero((after[key] != before[key]).any(axis=1))
        assert [*moved] == IDS


@pytest.mark.parametrize(
    "ids, message",
    [
        ({"lm_head": [3, 4]}, "embed_tokens has none, and rows of the head are not trained alone"),
        ({"embed_tokens": [3, 5], "lm_head": [3, 5]}, r"\[3, 5\]: only neighbouring ids, rising"),
        ({"embed_tokens": [3, 4], "lm_head": [4, 5]}, r"\[3, 4\]: only neighbouring ids, rising"),
    ],
)
def test_rows_that_are_not_trained_here(tmp_path, ids, message):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=ids)
    peft.get_peft_model(hf_model("qwen2_untied"), config).save_pretrained(tmp_path / "in")
    for refused in (
        lambda: trainer_for(exported("qwen2_untied"), adapter=tmp_path / "in"),
        lambda: merge_adapter(str(exported("qwen2_untied")), tmp_path / "in", tmp_path / "out"),
    ):
        with pytest.raises(LlmqError, match=message):
            refused()


@pytest.mark.gpu
@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
@pytest.mark.parametrize("name", ["qwen3", "qwen2_untied"])
def test_on_a_gpu(folder, name):
    want, _ = steps(name, folder)
    found = [steps(name, folder, device="cuda", use_cuda_graphs=on)[0] for on in (True, False)]
    assert found[0] == found[1] == pytest.approx(want, abs=1e-4)  # F32 sums in another order
