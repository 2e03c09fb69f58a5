"""A score head: classes of documents and rewards of answers, beside transformers and torch."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import transformers

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.data.document_index import DocumentIndex
from llmq.data.tokens import TokenFile, TokenWriter
from tests.models import LOSS_RTOL, VOCAB, exported, pieces, same_gradients, trainer_for
from tests.pairs_data import write_pairs

T, LABELS = 24, 3
LENGTHS = [9, 14, 6, 20, 24, 5]
PAIRS = [(6, 9), (5, 4), (12, 12), (4, 7), (8, 6)]
cross_entropy, log_sigmoid = torch.nn.functional.cross_entropy, torch.nn.functional.logsigmoid


def write_classes(path, lengths, labels=LABELS):
    rng = np.random.default_rng(0)
    with TokenWriter(path, VOCAB, with_masks=True, with_documents=True) as writer:
        for number, length in enumerate(lengths):
            ids = np.append(rng.integers(3, VOCAB, length), number % labels)
            writer.write(ids, np.arange(length + 1) == length, [length + 1])
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    classes = write_classes(folder / "classes.bin", LENGTHS)
    return {"ce": classes, "reward": write_pairs(folder / "pairs.bin", PAIRS, VOCAB)}


def documents(path):
    file = TokenFile(path)
    for start, end in itertools.pairwise(DocumentIndex.read(path).offsets.tolist()):
        yield torch.from_numpy(file.read_tokens(start, end - start)).long()[None]


def formula(model, path, loss):
    """The losses of all documents or pairs, each read alone, and how many of them are right."""
    if loss == "ce":
        logits = torch.cat([model(ids[:, :-1]).logits for ids in documents(path)])
        labels = torch.cat([ids[:, -1] for ids in documents(path)])
        return cross_entropy(logits, labels, reduction="none"), (logits.argmax(1) == labels)
    scores = torch.cat([model(ids).logits[:, 0] for ids in documents(path)]).view(-1, 2)
    margin = scores[:, 0] - scores[:, 1]
    return -log_sigmoid(margin), margin > 0


def trainer_of(data, loss, folder, arch="qwen2", **how):
    options = {"loss": loss, "num_labels": LABELS if loss == "ce" else 1}
    options |= {"train_file": (str(data[loss]),), "eval_file": str(data[loss]), "seq_len": T}
    options |= {"packing": "best-fit", "checkpoint_dir": folder / "ckpt", "batch_size": 6}
    return trainer_for(exported(arch), **options | how)


def classifier(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder)


WAYS = {
    "whole": {},
    "ranks": {"gpus": 2, "zero_level": 2, "batch_size": 3},
    "chunks": {
        "lmhead_chunks": 3,
        "recompute_block": True,
        "batch_size": 3,
        "grad_accumulation": 2,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", ["ce", "reward"])
def test_loss_gradients_and_exports_are_those_of_transformers(data, tmp_path, loss, way):
    """The head begins anew, in place of an LM head that is the embedding."""
    arch = "gpt2" if way == "chunks" else "qwen2"
    with trainer_of(data, loss, tmp_path, arch, **WAYS[way]) as trainer:
        trainer.export(tmp_path / "first")
        result, accuracy = trainer.step(), trainer.validate().numbers["accuracy"]
        ours = pieces(trainer, trainer.gradients())
        trainer.export(tmp_path / "second")
        assert trainer.usage == trainer.plan.usage
    model = classifier(tmp_path / "first")
    losses, right = formula(model, data[loss], loss)
    losses.sum().backward()
    np.testing.assert_allclose(result.loss, losses.mean().item(), rtol=LOSS_RTOL)
    assert result.numbers["accuracy"] == pytest.approx(right.float().mean().item())
    same_gradients(ours, model, result.norm * len(losses))
    _, right = formula(classifier(tmp_path / "second"), data[loss], loss)
    assert accuracy == pytest.approx(right.float().mean().item())
    assert model.config.num_labels == (LABELS if loss == "ce" else 1)


def test_a_run_goes_on_and_begins_with_what_was_exported(data, tmp_path):
    """From a checkpoint with the same numbers, and from a classifier of its labels alone."""
    with trainer_of(data, "ce", tmp_path) as trainer:
        trainer.step()
        saved = trainer.save()
        trainer.export(tmp_path / "model")
        expected = trainer.step().loss
    with trainer_of(data, "ce", tmp_path) as trainer:
        trainer.load(saved)
        assert trainer.step().loss == expected
    again = {"model": str(tmp_path / "model")}
    with trainer_of(data, "ce", tmp_path, **again) as trainer:
        assert trainer.step().loss == pytest.approx(expected, rel=1e-6)
    for how in ({"num_labels": 2}, {"num_labels": None}):
        with pytest.raises(ConfigError, match="has a score head of 3 labels: give --num-labels 3"):
            trainer_of(data, "ce", tmp_path, **again | how)


def test_adapters_are_pefts_of_sequences(data, tmp_path):
    """The head is trained beside them, as one of modules_to_save."""
    peft = pytest.importorskip("peft")
    how = {"lora_rank": 4, "learning_rate": 1e-2}
    with trainer_of(data, "reward", tmp_path, **how) as trainer:
        first = trainer.step()
        trainer.step()
        trainer.export(tmp_path / "adapters")
        accuracy, loss = trainer.validate().numbers["accuracy"], trainer.validate().loss
    written = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert written["task_type"] == "SEQ_CLS" and written["modules_to_save"] == ["score"]
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        exported("qwen2"), num_labels=1
    )
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    losses, right = formula(model, data["reward"], "reward")
    np.testing.assert_allclose(loss, losses.mean().item(), rtol=1e-4)
    assert accuracy == pytest.approx(right.float().mean().item()) and loss < first.loss
    with trainer_of(data, "reward", tmp_path, adapter=tmp_path / "adapters") as trainer:
        assert trainer.validate().loss == pytest.approx(loss, rel=1e-6)


def test_texts_get_their_class_behind_them(tmp_path, capsys):
    """Their ids are those of transformers, with no end that the texts of users lack."""
    records = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}, {"text": "", "label": 2}]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records[:2]))
    how = ["--tokenizer=bytes", "--format=classes", "--eval-fraction=0"]
    assert _run(["tokenize", str(path), "--out", str(tmp_path / "out"), *how]) == 0
    file = TokenFile(tmp_path / "out" / "train-000.bin")
    assert file.read_tokens(0, 9).tolist() == [*b"good", 1, *b"bad", 0]
    assert np.flatnonzero(file.read_mask(0, 9)).tolist() == [4, 8]
    path.write_text(json.dumps({"text": "x", "label": "good"}) + "\n")
    assert _run(["tokenize", str(path), "--out", str(tmp_path / "o"), *how]) == DataError.STATUS
    assert "field 'label' is 'good', which is no class" in capsys.readouterr().err


def test_adapters_are_merged_and_evaluated(tmp_path, capsys):
    """A classifier of a model and its adapters is judged on texts, as transformers judges it."""
    words = ["good", "bad", "so so", "fine", "poor"] * 3
    records = [{"text": word, "label": i % LABELS} for i, word in enumerate(words)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    base = tmp_path / "base"
    how = ["--tokenizer=bytes", "--format=classes", "--eval-fraction=0"]
    assert _run(["tokenize", str(path), "--out", str(tmp_path / "d"), *how]) == 0
    own = {"train_file": (str(tmp_path / "d" / "train-000.bin"),), "eval_file": "none"}
    with trainer_for("tiny", from_scratch=True, vocab_size=257, **own) as trainer:
        trainer.export(base)
    own |= {"model": str(base), "lora_rank": 4, "learning_rate": 3e-2}
    own |= {"num_labels": LABELS, "packing": "best-fit", "batch_size": 8}
    with trainer_for(base, **own) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.export(tmp_path / "adapters")
    merged = str(tmp_path / "merged")
    assert _run(["merge", str(base), str(tmp_path / "adapters"), "--out", merged]) == 0
    task, how = f"--task=classes={path}", ["--device=cpu", "--model-dtype=fp32"]
    assert _run(["eval", merged, task, *how, f"--out={tmp_path / 'a'}"]) == 0
    adapter = f"--adapter={tmp_path / 'adapters'}"
    assert _run(["eval", str(base), task, adapter, *how, f"--out={tmp_path / 'b'}"]) == 0
    found = [json.loads((tmp_path / name).read_text())["tasks"]["classes"] for name in "ab"]
    model = classifier(merged)
    logits = [model(torch.tensor([[*word.encode()]])).logits[0].argmax().item() for word in words]
    right = np.mean([i % LABELS == k for i, k in enumerate(logits)])
    assert found[0]["acc"] == found[1]["acc"] == pytest.approx(right)
    capsys.readouterr()
    assert _run(["sample", merged, "--prompt", "a", *how]) == ConfigError.STATUS
    assert "score head, which predicts no tokens" in capsys.readouterr().err
    assert _run(["eval", str(base), task, *how]) == ConfigError.STATUS
    assert "the model has no score head" in capsys.readouterr().err


def test_what_does_not_fit_is_refused(data, tmp_path):
    for how, error in (
        ({"loss": "dpo"}, "--num-labels: does not go with --loss dpo"),
        ({"loss": "reward", "num_labels": 2}, "a reward is one number"),
        ({"long": "cut"}, "reads whole documents"),
        ({"packing": "concat"}, "windows of the files would cut documents"),
    ):
        with pytest.raises(ConfigError, match=error):
            trainer_of(data | {"dpo": data["reward"]}, how.pop("loss", "ce"), tmp_path, **how)
    with (
        trainer_of(data, "ce", tmp_path, num_labels=2) as trainer,
        pytest.raises(DataError, match="2 is none of the labels 0 to 1 of --num-labels"),
    ):
        trainer.step()


def test_records_get_numbers(tmp_path, monkeypatch, capsys):
    """Those of transformers; the best answer of each prompt is kept, and pairs have an accuracy."""
    monkeypatch.chdir(tmp_path)
    answers = [("q", "good"), ("q", "bad"), ("r", "so so"), ("q", "fine"), ("r", "poor")]
    records = [{"prompt": p, "completion": a, "id": i} for i, (p, a) in enumerate(answers)]
    pairs = [{"prompt": "q", "chosen": "good", "rejected": "bad"}]
    pairs += [{"prompt": "r", "chosen": "poor", "rejected": "so so"}]
    for name, lines in (("answers", records), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    tokenize = ["tokenize", "pairs.jsonl", "--tokenizer=bytes", "--out=data", "--eval-fraction=0"]
    assert _run(tokenize) == 0
    own = {"train_file": ("data/train-000.bin",), "eval_file": "none", "packing": "best-fit"}
    own |= {"from_scratch": True, "vocab_size": 257, "loss": "reward", "num_labels": 1}
    with trainer_for("tiny", **own) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.export("reward")
    model, how = classifier("reward"), ["--device=cpu", "--model-dtype=fp32"]

    def score(prompt: str, answer: str) -> float:
        ids = [*(prompt + answer).encode(), 256]  # the end of a completion is a part of it
        return model(torch.tensor([ids])).logits[0, 0].item()

    words = ["score", "reward", "answers.jsonl", "--out=scored.jsonl"]
    assert _run([*words, "--gpus=1", "--seq-len=32", *how]) == 0
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").open()]
    expected = [score(*answer) for answer in answers]
    np.testing.assert_allclose([record.pop("score") for record in scored], expected, rtol=1e-4)
    assert scored == records
    best = ["score", "reward", "answers.jsonl", "--out=best.jsonl", "--best-of", *how]
    assert _run(best) == 0
    kept = [json.loads(line)["id"] for line in (tmp_path / "best.jsonl").open()]
    assert kept == [max((0, 1, 3), key=expected.__getitem__), max((2, 4), key=expected.__getitem__)]
    assert _run(["eval", "reward", "--task=pairs.jsonl", "--out=a.json", *how]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["tasks"]["pairs"]["acc"]
    right = np.mean(
        [score(r["prompt"], r["chosen"]) > score(r["prompt"], r["rejected"]) for r in pairs]
    )
    assert found == right
    capsys.readouterr()
    assert _run(["score", "reward", "pairs.jsonl", "--out=p.jsonl", *how]) == 0
    assert f"the chosen answer scores higher in {right:.1%}" in capsys.readouterr().out
    assert _run(best) == ConfigError.STATUS
    assert _run(["score", "reward", "answers.jsonl", "--out=x.jsonl", "--lr=1"]) == 2
    assert "--learning-rate: has no effect on records" in capsys.readouterr().err
