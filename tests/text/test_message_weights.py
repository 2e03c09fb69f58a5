"""Messages with weights between 0 and 1: of each token in the files, in losses, in their mean."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.data.document_index import DocumentIndex
from llmq.data.tokens import TokenFile, TokenWriter
from llmq.run.model_of_run import packing_of_data
from tests.models import LOSS_RTOL, VOCAB, exported, hf_model, pieces, same_gradients, trainer_for

T = 24


def write_weights(path, lengths):
    rng = np.random.default_rng(0)
    with TokenWriter(path, VOCAB, with_weights=True, with_documents=True) as writer:
        for length in lengths:
            weights = rng.choice([0, 0.005, 0.3, 1], length)
            writer.write(rng.integers(0, VOCAB, length), weights, [length])
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "train.bin", [9, 14, 6, 20, 24, 5])


def test_files_keep_them_and_go_on(data, tmp_path):
    """Exactly, also where a writer goes on with a file, complete or not."""
    file = TokenFile(data)
    weights = file.read_weights(0, file.num_tokens)
    assert file.has_weights and {*weights.tolist()} <= {*np.float32([0, 0.005, 0.3, 1]).tolist()}
    np.testing.assert_array_equal(file.read_mask(3, 40), weights[3:43] > 0)
    ids = file.read_tokens(0, file.num_tokens)
    writer = TokenWriter(tmp_path / "a.bin", VOCAB, with_weights=True)
    writer.write(ids[:30], weights[:30])
    writer.suspend()
    writer = TokenWriter(tmp_path / "a.bin", VOCAB, with_weights=True, keep_tokens=20)
    writer.write(ids[20:], weights[20:])
    writer.close()
    np.testing.assert_array_equal(TokenFile(tmp_path / "a.bin").read_weights(0, len(ids)), weights)


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 6},
        {"batch_size": 2, "grad_accumulation": 3, "lmhead_chunks": 2, "recompute_block": True},
        {"batch_size": 3, "gpus": 2, "zero_level": 2},
    ],
    ids=["whole", "micro-steps", "ranks"],
)
def test_losses_and_gradients_are_means_by_weight(data, how):
    """Losses are weighted means over the whole step, however this is divided."""
    options = {"train_file": (str(data),), "eval_file": str(data), "seq_len": T}
    with trainer_for(exported("qwen2"), **options, **how) as trainer:
        assert trainer.config.token_weights and trainer.config.packing == "best-fit"
        validated = trainer.validate()
        result = trainer.step()
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    model, file, total, mass, tokens = hf_model("qwen2"), TokenFile(data), 0, 0, 0
    offsets = DocumentIndex.read(data).offsets.tolist()
    for start, end in itertools.pairwise(offsets):
        ids = torch.from_numpy(file.read_tokens(start, end - start)).long()
        weights = torch.from_numpy(file.read_weights(start, end - start))[1:]
        logits = model(ids[None, :-1]).logits[0]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, mass = total + (weights * each).sum(), mass + weights.sum().item()
        tokens += int((weights > 0).sum())
    total.backward()
    np.testing.assert_allclose(result.loss, total.item() / mass, rtol=LOSS_RTOL)
    np.testing.assert_allclose(validated.loss, total.item() / mass, rtol=LOSS_RTOL)
    assert result.tokens == tokens
    norm = np.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters())) / mass
    assert result.norm == pytest.approx(norm, rel=1e-4)
    same_gradients(ours, model, norm * mass)


def test_tokens_of_a_message_have_its_weight(tmp_path, capsys):
    """Without --weights a weight that is neither 0 nor 1 is refused."""
    talk = [("user", "ab", None), ("assistant", "cd", 0.3), ("user", "e", 0.5)]
    talk += [("assistant", "fg", None), ("user", "h", None), ("assistant", "ij", 0)]
    messages = [
        {"role": r, "content": c} | ({} if w is None else {"weight": w}) for r, c, w in talk
    ]
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    how = ["--tokenizer=bytes", "--chat-template=chatml", "--eval-fraction=0", "--overwrite"]
    words = ["tokenize", str(path), "--out", str(tmp_path / "out"), *how]
    assert _run([*words, "--weights"]) == 0
    file = TokenFile(tmp_path / "out" / "train-000.bin")
    text = bytes(file.read_tokens(0, file.num_tokens).clip(0, 255).astype(np.uint8).tolist())
    weights = file.read_weights(0, file.num_tokens)
    for said, weight in ((b"cd", 0.3), (b"fg", 1.0), (b"ij", 0.0), (b"ab", 0.0), (b"e<", 0.0)):
        at = text.index(b"\n" + said) + 1
        np.testing.assert_array_equal(weights[at : at + len(said.rstrip(b"<"))], np.float32(weight))
    assert packing_of_data({"train_file": (str(file.path),)})["token_weights"]
    assert _run(words) == DataError.STATUS
    assert "message 2 has the weight 0.3: give --weights" in capsys.readouterr().err
    assert _run([*words, "--weights", "--train-on=last"]) == ConfigError.STATUS
    messages[1]["weight"] = 0.1234
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert _run([*words, "--weights"]) == DataError.STATUS
    assert "may also be a multiple of 0.005" in capsys.readouterr().err


def test_weights_are_for_cross_entropy_of_tokens(data, capsys):
    how = {"train_file": (str(data),), "eval_file": "none", "seq_len": T}
    for other, said in (({"num_labels": 2}, "score head"), ({"loss": "dpo"}, "--loss dpo")):
        assert "token_weights" not in packing_of_data(how | other)
        assert f"warning: {said}: weights of messages" in capsys.readouterr().err
    assert packing_of_data(how)["token_weights"]
