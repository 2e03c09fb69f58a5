"""Adapters of the embedding and the LM head: with the options that cut a step, and where they are
refused. `test_patterns.py` compares them with peft."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.exports.gguf import Gguf
from llmq.checkpoint.exports.source import open_source
from tests.adapters import batches
from tests.conftest import gpu_problem
from tests.model.test_patterns import saved
from tests.models import exported, hf_model, torch_loss, trainer_for

TABLES = ["embed_tokens", "lm_head", "q_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Adapters of a model whose head is its embedding, all of them moved."""
    path = tmp_path_factory.mktemp("in")
    saved(path, "qwen3", {"target_modules": TABLES, "r": 5})
    return path


def test_chunks_recomputation_and_ranks_change_no_place_of_dropout(folder):
    """Dropped are the same of the head's inputs, whoever has their sequences."""

    def losses(**options) -> list[float]:
        count = options.get("gpus", 1) * options.get("grad_accumulation", 1)
        with trainer_for(exported("qwen3"), adapter=folder, **options) as trainer:
            parts = [
                [tuple(np.array_split(x, count)[i] for x in batch) for i in range(count)]
                for batch in batches()[:3]
            ]
            return [trainer.step(each).loss for each in parts]

    want = losses(lora_dropout=0.4)
    assert want != pytest.approx(losses(), abs=1e-4)
    for cut in ({"lmhead_chunks": 4}, {"gpus": 2, "batch_size": 1}, {"recompute_block": True}):
        assert losses(lora_dropout=0.4, **cut) == pytest.approx(want, abs=2e-6), cut
    assert losses(lora_dropout=0.4, grad_accumulation=2, batch_size=1) == pytest.approx(
        want, abs=2e-6
    )


def test_they_begin_without_effect_and_are_written_for_peft(tmp_path):
    options = {"lora_rank": 3, "lora_targets": "embedding,head,q", "lora_layers": "1"}
    with trainer_for(exported("qwen3")) as plain:
        want = plain.step(batches()[:1]).loss
    with trainer_for(exported("qwen3"), learning_rate=1e-2, **options) as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(want, abs=1e-6)
        for batch in batches()[1:3]:
            trainer.step([batch])
        trainer.export(tmp_path)
        ((said,),) = trainer.generate([[5, 7, 11]], max_new_tokens=1, temperature=0)
        want = trainer.step(batches()[3:4]).loss
    model = peft.PeftModel.from_pretrained(hf_model("qwen3"), tmp_path)
    assert torch_loss(model, batches()[3:4]).item() == pytest.approx(want, abs=1e-5)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 7, 11]])).logits[0, -1]
    assert said.ids == [logits.argmax()]
    np.testing.assert_allclose(said.logprobs, logits.log_softmax(-1).max(), atol=1e-5)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert named.split("|")[0] == r"model\.embed_tokens" and named.count("|") == 2


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("qwen3", {"train": "embeddings"}, "head has no adapters beside --train=embeddings"),
        ("qwen2_untied", {"train": "head"}, "head has no adapters beside --train=head, which"),
        ("qwen3", {"lora_dora": True}, "head has no magnitudes: leave it out, or --lora-dora"),
        ("qwen3", {"lora_rank": 99}, "--lora-rank: 99 is larger than the matrix of lm_head"),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_for(exported(name), **{"lora_rank": 4, "lora_targets": "head"} | options)


def test_an_embedding_may_have_them_beside_a_head_that_is_trained():
    options = {"lora_rank": 4, "lora_targets": "embedding", "train": "head"}
    with trainer_for(exported("qwen2_untied"), **options) as trainer:
        trainer.step(batches()[:1])
        moved = trainer.step(batches()[1:2]).loss
    assert np.isfinite(moved)


@pytest.mark.parametrize("setting", ["ensure_weight_tying", "use_dora"])
def test_settings_that_these_do_not_have_are_refused(tmp_path, folder, setting):
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {setting: True}))
    (tmp_path / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
    with pytest.raises(LlmqError, match=f"{setting} is not supported of adapters of embed"):
        trainer_for(exported("qwen3"), adapter=tmp_path)


def test_gguf_files_of_adapters_have_none(folder):
    pytest.importorskip("gguf")
    with (
        open_source(folder, base=str(exported("qwen3"))) as source,
        pytest.raises(LlmqError, match="no adapters of embedding and head: add --merge"),
    ):
        Gguf().check(replace(source, tokenizer=None), "fp16")


@pytest.mark.gpu
@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_on_a_gpu(folder, dropout):
    """Losses of three steps, in F32 as on the CPU, and in bf16 near them; graphs change none."""

    def losses(**options) -> list[float]:
        options |= {"adapter": folder, "lora_dropout": dropout, "lmhead_chunks": 3}
        with trainer_for(exported("qwen3"), **options) as trainer:
            return [trainer.step([batch]).loss for batch in batches()[:3]]

    want = losses()
    for dtype, error in (("fp32", 1e-4), ("bf16", 0.02)):
        options = {"device": "cuda", "model_dtype": dtype}
        found = [losses(use_cuda_graphs=on, **options) for on in (True, False)]
        assert found[0] == found[1] == pytest.approx(want, abs=error), dtype
