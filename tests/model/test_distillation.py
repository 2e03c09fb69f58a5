"""Distillation: a teacher's probabilities in files, and losses and gradients beside torch's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.data.document_index import DocumentIndex
from llmq.data.scores import ScoreFile, decoded, encoded, record_bytes, scores_path
from llmq.data.tokens import TokenFile, TokenWriter
from tests.models import LOSS_RTOL, VOCAB, exported, hf_model, pieces, same_gradients, trainer_for
from tests.pairs_data import write_documents
from tests.ref.loss.test_distill import teacher_of

T, K = 24, 8
LENGTHS = [9, 24, 14, 6, 30]  # the last one is cut


def test_records_are_small_and_near(rng):
    """Ids are kept, on both sides of multiples of 65536; what is left is that of 16 bits."""
    assert record_bytes(64) == 200
    told = teacher_of(rng, 12, 200_000, 64)
    order = np.argsort(told[:, :64].view(np.int32), axis=1)
    told = np.concatenate([np.take_along_axis(half, order, 1) for half in np.split(told, 2, 1)], 1)
    records = encoded(told)
    found = decoded(records)
    np.testing.assert_array_equal(found[:, :64].view(np.int32), told[:, :64].view(np.int32))
    likely, deepest = told[:, 64:].astype(np.float64), -told[:, 64:].min(axis=1, keepdims=True)
    # Half a step of the codes' roots, and what scaling to a sum of 1 adds to that.
    bound = 2.5 * np.sqrt(-likely * deepest) / 255 + 1e-3
    assert (np.abs(found[:, 64:] - likely) < bound).all()
    left = 1 - np.exp(found[:, 64:].astype(np.float64)).sum(1)
    np.testing.assert_allclose(left, 1 - np.exp(likely).sum(1), atol=2**-16)
    assert np.isnan(decoded(np.full((2, 200), 0xFF, np.uint8))[:, 64:]).all()
    sure = told.copy()
    sure[:, 64:] -= np.logaddexp.reduce(told[:, 64:].astype(np.float64), axis=1)[:, None]
    left = 1 - np.exp(decoded(encoded(sure))[:, 64:].astype(np.float64)).sum(1)
    np.testing.assert_allclose(left, 2.0**-16, rtol=2.0**-5)  # F32 rounds 64 log-probabilities


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("documents") / "train.bin", LENGTHS, VOCAB)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher: another model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    hf_model("llama", seed=5).save_pretrained(folder)
    return folder


def scored(model, data, out, *more):
    how = ["--device=cpu", "--gpus=1", "--model-dtype=fp32", f"--seq-len={T}", "--batch-size=2"]
    return _run(["score", str(model), str(data), "--out", str(out), f"--top-k={K}", *how, *more])


@pytest.fixture(scope="module")
def scores(data, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    assert scored(teacher, data, folder) == 0
    return folder


def parts(data):
    """Ids, mask of what is predicted, and first token, of each part of a document that fits."""
    file, offsets = TokenFile(data), DocumentIndex.read(data).offsets
    for start, end in itertools.pairwise(offsets.tolist()):
        for first in range(start, end - 1, T):
            stop = min(first + T + 1, end)
            ids = torch.from_numpy(file.read_tokens(first, stop - first)).long()
            yield ids, torch.from_numpy(file.read_mask(first, stop - first))[1:], first


def test_scores_are_the_teachers(data, teacher, scores, tmp_path):
    file, model = ScoreFile(scores_path(scores, data)), hf_model("llama", seed=5)
    for ids, _, first in parts(data):
        told = file.read(first + 1, len(ids) - 1)
        logs = model(ids[None, :-1]).logits[0].log_softmax(-1)
        top = logs.topk(K)
        np.testing.assert_array_equal(told[:, :K].view(np.int32), top.indices.sort()[0])
        want = logs.gather(1, torch.from_numpy(told[:, :K].view(np.int32)).long()).detach()
        np.testing.assert_allclose(told[:, K:], want, atol=0.03)  # of codes of 8 bits
    assert scored(teacher, data, tmp_path, "--gpus=2") == 0
    same = scores_path(tmp_path, data).read_bytes()
    assert same == scores_path(scores, data).read_bytes()


def formula(model, data, scores, mixture, temperature, reverse):
    """The sum of losses, of divergences, and how many tokens they are of."""
    file, loss, divergence, count = ScoreFile(scores_path(scores, data)), 0, 0, 0
    for ids, mask, first in parts(data):
        told = file.read(first + 1, len(ids) - 1)
        columns = torch.from_numpy(told[:, :K].view(np.int32)).long()
        logs = torch.from_numpy(told[:, K:].astype(np.float64))
        x = model(ids[None, :-1]).logits[0].double()
        rest = 1 - logs.exp().sum(1, keepdim=True)
        p = torch.cat([(logs / temperature).softmax(1) * (1 - rest), rest], 1)
        q = (x / temperature).softmax(1).gather(1, columns)
        q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
        one, other = (q, p) if reverse else (p, q)
        kl = (one * (one.log() - other.log())).sum(1)
        ce = torch.nn.functional.cross_entropy(x, ids[1:], reduction="none")
        both = mixture * ce + (1 - mixture) * temperature**2 * kl
        loss, divergence = loss + (both * mask).sum(), divergence + (kl * mask).sum()
        count += int(mask.sum())
    return loss, divergence, count


def trainer_of(data, scores, **how):
    defaults = {"seq_len": T, "packing": "best-fit", "train_file": (str(data),), "loss": "kd"}
    defaults |= {"eval_file": "none", "loss_params": {"top-k": K}, "scores": scores}
    return trainer_for(exported("qwen2"), **defaults | how)


@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        ({"batch_size": 4, "lmhead_chunks": 2}, (0.0, 1.0, False)),
        ({"grad_accumulation": 2, "recompute_block": True}, (0.3, 2.0, False)),
        ({"gpus": 2, "zero_level": 2}, (0.5, 1.5, True)),
    ],
    ids=["chunks", "micro-steps", "ranks, reverse"],
)
def test_loss_and_gradients_are_those_of_the_formula(data, scores, how, numbers):
    mixture, temperature, reverse = numbers
    params = {"top-k": K, "mixture": mixture, "temperature": temperature}
    params["divergence"] = "reverse" if reverse else "forward"
    with trainer_of(data, scores, loss_params=params, **how) as trainer:
        assert trainer.steps_per_epoch == 1
        result = trainer.step()
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    model = hf_model("qwen2")
    loss, divergence, count = formula(model, data, scores, *numbers)
    loss.backward()
    assert result.tokens == count
    np.testing.assert_allclose(result.loss, loss.item() / count, rtol=10 * LOSS_RTOL)
    np.testing.assert_allclose(result.numbers["kl"], divergence.item() / count, rtol=1e-4)
    same_gradients(ours, model, result.norm * count)


def test_a_model_comes_near_its_teacher(data, scores):
    """Training of all weights and of adapters, and validation, on the tokens of the training."""
    how = {"batch_size": 4, "learning_rate": 1e-2, "steps": 12, "lora_rank": 8}
    how |= {"eval_file": str(data), "lora_plus": 4.0, "train": ("norms",)}
    with trainer_of(data, scores, **how) as trainer:
        first = trainer.validate()
        results = [trainer.step() for _ in range(12)]
        last = trainer.validate()
    np.testing.assert_allclose(first.numbers["kl"], results[0].numbers["kl"], rtol=1e-5)
    assert last.numbers["kl"] < 0.9 * first.numbers["kl"]
    assert first.validated == ("loss_1k", "kl")


def test_other_scores_are_refused(data, scores, teacher, tmp_path, capsys):
    with TokenWriter(tmp_path / "text.bin", VOCAB, with_documents=True) as writer:
        writer.write(np.arange(3, 20), None, [17])
    assert scored(teacher, tmp_path / "text.bin", tmp_path) == 0
    assert "as --loss kd does not: give --packing best-fit" in capsys.readouterr().err
    with (
        trainer_of(data, scores, loss_params="top-k=4") as trainer,
        pytest.raises(DataError, match="has 8 probabilities of each token, and the loss reads 4"),
    ):
        trainer.step()
    with pytest.raises(ConfigError, match="--loss kd: needs --scores of a teacher"):
        trainer_of(data, None)
    with pytest.raises(ConfigError, match="documents are scored one by one"):
        trainer_of(data, scores, packing="concat")
    with pytest.raises(ConfigError, match="--loss-params: temperature: must be more than 0"):
        trainer_of(data, scores, loss_params="temperature=0")
