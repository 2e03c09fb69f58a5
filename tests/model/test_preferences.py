"""Losses of pairs: numbers and gradients are those of the papers' formulas in torch, however the
data are packed and the work is divided; scores of a reference come from a file or the first step.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmq.base.dtypes import NO_LIMITS
from llmq.base.errors import ConfigError, DataError, LlmqError
from llmq.base.result import Result
from llmq.commands.cli import _run
from llmq.data.document_index import DocumentIndex
from llmq.data.identity import TokenizerId
from llmq.data.scores import HEADER_BYTES, Scored, ScoreFile, ScoreWriter, scores_path
from llmq.data.tokens import TokenFile, TokenWriter
from llmq.model.losses import loss_class
from llmq.options.options_io import config_of, layers_of, make_config
from llmq.report.plot import read_log, series_of
from llmq.run import score
from llmq.run.guard import Guard
from llmq.run.model_of_run import model_of_run
from llmq.run.score import SCORED, score_files
from llmq.run.trainer import Trainer
from tests.model.test_lora import LORA, gradients, peft_model, tensors
from tests.models import LOSS_RTOL, VOCAB, exported, hf_model, pieces, same_gradients, trainer_for
from tests.pairs_data import write_pairs
from tests.runs import make_workplace, records, train

T = 24
LENGTHS = [(6, 9), (5, 4), (12, 12), (4, 7), (8, 6), (3, 5), (10, 5), (4, 4)]
BYTES = TokenizerId("bytes", "bytes")
log_sigmoid = torch.nn.functional.logsigmoid


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "train.bin", LENGTHS, VOCAB)


def answers(path, model):
    """Sums of the log-probabilities of both answers of each pair, each read alone, and how many
    tokens they have: (pairs, 2) tensors."""
    file, offsets = TokenFile(path), DocumentIndex.read(path).offsets
    sums, counts = [], []
    for start, end in itertools.pairwise(offsets):
        ids = torch.from_numpy(file.read_tokens(start, end - start)).long()
        mask = torch.from_numpy(file.read_mask(start, end - start))[1:]
        scores = model(ids[None, :-1]).logits[0].log_softmax(-1)
        sums.append((scores.gather(1, ids[1:, None])[:, 0] * mask).sum())
        counts.append(mask.sum())
    return torch.stack(sums).view(-1, 2), torch.stack(counts).view(-1, 2)


def dpo(logp, reference, count, beta=0.1, smoothing=0.0, sft=0.0, normalize=False):
    gain = (logp - reference) / (count if normalize else 1)
    margin = beta * (gain[:, 0] - gain[:, 1])
    wrong = -log_sigmoid(-margin) * smoothing
    return -log_sigmoid(margin) * (1 - smoothing) + wrong - sft * (logp / count)[:, 0]


def ipo(logp, reference, count, beta=0.1):
    gain = (logp - reference) / count
    return (gain[:, 0] - gain[:, 1] - 1 / (2 * beta)) ** 2


def simpo(logp, reference, count, beta=2.0, gamma=0.5):
    mean = logp / count
    return -log_sigmoid(beta * (mean[:, 0] - mean[:, 1]) - gamma)


def orpo(logp, reference, count, beta=0.1):
    mean = logp / count
    odds = mean - torch.log1p(-torch.exp(mean))
    return -mean[:, 0] - beta * log_sigmoid(odds[:, 0] - odds[:, 1])


FULL = {"loss_params": {"smoothing": 0.1, "sft": 0.5, "normalize": True, "beta": 0.7}}
CASES = {
    "dpo": ({}, lambda *x: dpo(*x)),
    "dpo with all": (FULL, lambda *x: dpo(*x, beta=0.7, smoothing=0.1, sft=0.5, normalize=True)),
    "ipo": ({}, ipo),
    "simpo": ({}, simpo),
    "simpo with margin": ({"loss_params": "gamma=1.5,beta=1"}, lambda *x: simpo(*x, 1.0, 1.5)),
    "orpo": ({}, orpo),
}
WAYS = {
    "packed": {"batch_size": 1, "grad_accumulation": 6},
    "alone, recomputed": {
        **{"packing": "none", "batch_size": 4, "grad_accumulation": 2, "lmhead_chunks": 2},
        "recompute_block": True,
    },
    "ranks": {"batch_size": 2, "grad_accumulation": 2, "gpus": 2, "zero_level": 2},
}


def trainer_of(data, loss, folder, **how):
    how = {"seq_len": T, "packing": "best-fit", "train_file": (str(data),)} | how
    how |= {"eval_file": "none", "loss": loss, "checkpoint_dir": folder, "warmup": 0}
    return trainer_for(exported("qwen2"), **how)


SHOWN = [(way, case) for way in WAYS for case in CASES]
SHOWN = [s for s in SHOWN if s[0] != "ranks" or s[1] in ("dpo with all", "orpo")]


@pytest.mark.parametrize(("way", "case"), SHOWN, ids=map(", ".join, SHOWN))
def test_loss_and_gradients_are_those_of_the_paper(data, tmp_path, way, case):
    """The second step, so that the reference is another model than the one that is trained."""
    loss, (options, formula) = case.split()[0], CASES[case]
    how = options | WAYS[way] | {"learning_rate": 1e-2}
    with trainer_of(data, loss, tmp_path, **how) as trainer:
        assert trainer.steps_per_epoch == 1  # all pairs in each
        trainer.step()
        model = hf_model("qwen2")
        weights = pieces(trainer, trainer.weights())
        result = trainer.step()
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    with torch.no_grad():
        reference, _ = answers(data, model)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].reshape(parameter.shape)))
    logp, count = answers(data, model)
    losses = formula(logp, reference, count)
    losses.sum().backward()
    np.testing.assert_allclose(result.loss, losses.mean().item(), rtol=LOSS_RTOL)
    assert result.tokens == count.sum()
    same_gradients(ours, model, result.norm * len(losses))


def kto(logp, reference, count, labels, beta=0.1, bad=1.5):
    """count: not read. The shift is that of all, which are one micro-batch."""
    gain = logp - reference
    shift = gain[:, 1].mean().clamp(min=0).detach()
    good = 1 - torch.sigmoid(beta * (gain[:, 0] - shift))
    return torch.where(labels, good, bad * (1 - torch.sigmoid(beta * (shift - gain[:, 0]))))


def test_labels_have_the_shift_of_other_answers(tmp_path):
    labels = [True, False, False, True, True, False, True, True]
    path = write_pairs(tmp_path / "train.bin", LENGTHS, VOCAB, labels=labels)
    how = {"batch_size": 6, "learning_rate": 1e-2, "loss_params": "undesirable=1.5"}
    with trainer_of(path, "kto", tmp_path, **how) as trainer:
        first = trainer.step()
        model = hf_model("qwen2")
        with torch.no_grad():
            reference, count = answers(path, model)
            for name, values in pieces(trainer, trainer.weights()).items():
                parameter = dict(model.named_parameters())[name]
                parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
        second = trainer.step()
        ours = pieces(trainer, trainer.gradients())
    logp, _ = answers(path, model)
    losses = kto(logp, reference, count, torch.tensor(labels))
    losses.sum().backward()
    assert first.loss == pytest.approx((5 + 3 * 1.5) / 16, rel=1e-5)
    np.testing.assert_allclose(second.loss, losses.mean().item(), rtol=LOSS_RTOL)
    rewards = 0.1 * (logp - reference)[:, 0].detach().numpy()
    assert second.numbers["reward_rejected"] == pytest.approx(
        rewards[~np.array(labels)].mean(), rel=1e-3
    )
    assert second.tokens == count[:, 0].sum()
    shift = (logp - reference)[:, 1].mean().clamp(min=0).item()
    assert second.numbers["kl"] == pytest.approx(shift, rel=1e-3, abs=1e-5)
    same_gradients(ours, model, second.norm * len(losses))


def test_a_side_without_answers_has_no_number(tmp_path):
    path = write_pairs(tmp_path / "train.bin", LENGTHS, VOCAB, labels=[True] * len(LENGTHS))
    with trainer_of(path, "kto", tmp_path) as trainer:
        result = trainer.step()
    assert np.isnan(result.numbers["margin"]) and "margin" in result.shown
    assert not any(map(np.isnan, result.told.values())) and "accuracy" in result.told


def test_the_shift_is_that_of_all_ranks(tmp_path):
    """Answers have one shift, however many ranks divide a micro-batch."""
    labels = [True, False, False, True, True, False, True, True]
    path = str(write_pairs(tmp_path / "train.bin", LENGTHS, VOCAB, labels=labels))
    found = []
    for ranks, more in ((1, {}), (2, {"zero_level": 3}), (3, {"zero_level": 1})):
        given = {"seq_len": T, "packing": "best-fit", "train_file": (path,), "eval_file": (path,)}
        given |= {"loss": "kto", "checkpoint_dir": tmp_path / str(ranks), "learning_rate": 1e-2}
        given |= {"batch_size": 6 // ranks, "gpus": ranks, "warmup": 0, **more}
        with trainer_for(exported("qwen2"), **given) as trainer:
            results = [trainer.step() for _ in range(3)] + [trainer.validate()]
            assert trainer.usage == trainer.plan.usage
        found.append([(result.loss, result.numbers["kl"]) for result in results])
    one, *others = found
    assert one[1][1] > 1e-3
    for several in others:
        np.testing.assert_allclose(several, one, rtol=1e-4)


def test_weights_are_those_of_the_scores(tmp_path):
    """Weights may be negative, and come from a score file that a program has written."""
    data = tmp_path / "train.bin"
    with TokenWriter(data, VOCAB, with_masks=True, with_documents=True) as writer:
        rng = np.random.default_rng(0)
        writer.write(rng.integers(0, VOCAB, 40), rng.random(40) < 0.7, [9, 20, 40])
    weights, file = rng.normal(size=40).astype(np.float32), TokenFile(data)
    path = scores_path(tmp_path / "s", data)
    path.parent.mkdir()
    scores = ScoreWriter(path, Scored.of(file, {"name": "mine"}, seq_len=T))
    scores.write(0, weights)
    scores.close()
    how = {"scores": tmp_path / "s", "batch_size": 2}
    with trainer_of(data, "weighted", tmp_path, **how) as trainer:
        result = trainer.step()
        ours = pieces(trainer, trainer.gradients())
    model, total, count = hf_model("qwen2"), 0, 0
    for start, end in itertools.pairwise([0, 9, 20, 40]):
        ids = torch.from_numpy(file.read_tokens(start, end - start)).long()
        mask = torch.from_numpy(file.read_mask(start, end - start))[1:]
        each = torch.nn.functional.cross_entropy(
            model(ids[None, :-1]).logits[0], ids[1:], reduction="none"
        )
        total = total + (each * mask * torch.from_numpy(weights[start + 1 : end])).sum()
        count += int(mask.sum())
    total.backward()
    np.testing.assert_allclose(result.loss, total.item() / count, rtol=1e-4)
    same_gradients(ours, model, result.norm * count)
    with pytest.raises(ConfigError, match="--loss weighted: needs --scores"):
        trainer_of(data, "weighted", tmp_path)


def test_gradients_of_adapters_are_those_of_the_paper(data, tmp_path):
    """Beside PEFT's, whose base is the reference: of each loss in the second step."""
    labels = [True, False, False, True, True, False, True, True]
    labelled = write_pairs(tmp_path / "labels.bin", LENGTHS, VOCAB, labels=labels)
    forms = {case: formula for case, (options, formula) in CASES.items() if not options}
    forms["kto"] = lambda *x: kto(*x, torch.tensor(labels), bad=1.0)
    for loss, formula in forms.items():
        path = labelled if loss == "kto" else data
        how = {"batch_size": 6, **LORA, "learning_rate": 1e-2, "warmup": 0}
        with trainer_of(path, loss, tmp_path / loss, **how) as trainer:
            first = trainer.step()
            model = peft_model("qwen2", trainer)
            second, ours = trainer.step(), tensors(trainer, trainer.gradients())
        with torch.no_grad(), model.disable_adapter():
            reference, _ = answers(path, model)
        logp, count = answers(path, model)
        losses = formula(logp, reference, count)
        losses.sum().backward()
        np.testing.assert_allclose(second.loss, losses.mean().item(), rtol=LOSS_RTOL)
        whole = second.norm * len(losses)
        same_gradients(ours, gradients(model, 1), whole)
        assert second.loss < first.loss
        if loss == "dpo":
            assert first.loss == pytest.approx(np.log(2), rel=1e-5)
            assert abs(first.numbers["margin"]) < 1e-4 < second.numbers["margin"]


def test_the_reference_has_the_adapters_that_a_run_begins_with(data, tmp_path, capsys):
    """Reference scores of the run and of `llmq score --adapter`, also beside a base in nf4."""
    how = {"batch_size": 6, **LORA, "learning_rate": 3e-2, "warmup": 0}
    with trainer_of(data, "dpo", tmp_path / "sft", **how) as trainer:
        for _ in range(2):
            trainer.step()
        trainer.export(tmp_path / "adapters")
    again = {"batch_size": 6, "adapter": tmp_path / "adapters", "lora_plus": None}
    words = ("score", exported("qwen2"), data, "--adapter", tmp_path / "adapters", "--out")
    for base in (None, "nf4"):
        given = again if base is None else again | {"base_dtype": base}
        more = {} if base is None else {"base-dtype": base}
        scored = tmp_path / f"scores-{base}"
        assert command(*words, scored, **more) == 0
        for scores in ({}, {"scores": scored}):
            with trainer_of(data, "dpo", tmp_path / "dpo", **given | scores) as trainer:
                first = trainer.step()
                assert first.loss == pytest.approx(np.log(2), rel=1e-5)
                assert abs(first.numbers["margin"]) < 1e-4
                assert trainer.usage == trainer.plan.usage
        shutil.rmtree(tmp_path / "dpo")
    assert command("score", exported("qwen2"), data, "--out", tmp_path / "without") == 0
    with (
        trainer_of(data, "dpo", tmp_path / "x", **again, scores=tmp_path / "without") as trainer,
        pytest.raises(LlmqError, match="with that model, and with --adapter"),
    ):
        trainer.step()


# ------------------------------------------------------------------------------------------------
# Scores are made once.


def command(*words, **more):
    options = {"device": "cpu", "model-dtype": "fp32", "seq-len": T, "batch-size": 2, "gpus": 1}
    options |= {name.replace("_", "-"): value for name, value in more.items()}
    return _run([*map(str, words), *(f"--{name}={value}" for name, value in options.items())])


def file_of(folder, data):
    return scores_path(folder, data)


def test_scores_are_log_probabilities_and_twice_the_same_bytes(data, tmp_path, monkeypatch):
    """On two ranks as on one, and where an interrupted command goes on."""
    model = exported("qwen2")
    assert command("score", model, data, "--out", tmp_path / "a") == 0
    path = file_of(tmp_path / "a", data)
    scores, (logp, _) = ScoreFile(path), answers(data, hf_model("qwen2"))
    offsets, file = DocumentIndex.read(data).offsets, TokenFile(data)
    found = [scores.read(a, b - a).sum() for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(found, logp.flatten().tolist(), rtol=1e-5)
    masked = ~file.read_mask(0, file.num_tokens)
    masked[offsets[:-1]] = True
    assert not scores.read(0, file.num_tokens)[masked].any()
    monkeypatch.setattr(score, "ROUNDS", 1)
    monkeypatch.setattr(score, "SAVE_SECONDS", 0)
    assert command("score", model, data, "--out", tmp_path / "b", gpus=2) == 0
    assert file_of(tmp_path / "b", data).read_bytes() == path.read_bytes()
    batches, real = [], score._Scoring._batch

    def stopped(scoring, rows):
        if len(batches) == 2:
            raise LlmqError("stopped here")
        batches.append(rows)
        return real(scoring, rows)

    monkeypatch.setattr(score._Scoring, "_batch", stopped)
    assert command("score", model, data, "--out", tmp_path / "c") == LlmqError.STATUS
    monkeypatch.setattr(score._Scoring, "_batch", real)
    assert command("score", model, data, "--out", tmp_path / "c") == 0
    assert file_of(tmp_path / "c", data).read_bytes() == path.read_bytes()
    assert not [*(tmp_path / "c").glob("*.partial")]


def test_scoring_trains_nothing(data, tmp_path):
    """A teacher that streams through the device takes what was planned: no gradients, no moments,
    no adapters; and gives the scores of one that is resident."""
    found = {}
    for name, more in (("resident", {}), ("streamed", {"shard-weights": True})):
        given = {"model": str(exported("qwen2")), "train-file": [str(data)], "base-dtype": "nf4"}
        given |= {"device": "cpu", "gpus": 1, "model-dtype": "fp32", "seq-len": T, "batch-size": 2}
        more = more and more | {"offload-master": True}
        config = config_of(layers_of(given | more), SCORED)
        model, model_dir = model_of_run(config)
        with Trainer.from_config(config, model, model_dir, BYTES) as trainer:
            trainer.load_weights()
            (path,) = score_files(trainer.ranks, [TokenFile(data)], tmp_path / name, {"name": ""})
            usage, plan = trainer.usage, trainer.plan
        assert usage == plan.usage
        taken = {category for of in usage.categories.values() for category, n in of.items() if n}
        assert not taken & {"Gradients", "Adam M", "Adam V", "Master"}
        assert {"embed", "layers.0", "layers.1"} <= plan.placement.slabs.keys()
        assert not {"lora_a", "lora_b"} & plan.placement.slabs.keys()
        found[name] = path.read_bytes(), usage.categories
    assert found["resident"][0] == found["streamed"][0]
    quants = {name: categories["device"]["Quants"] for name, (_, categories) in found.items()}
    assert quants["streamed"] < quants["resident"]


def test_a_teacher_is_planned_before_it_is_scored(data, tmp_path, capsys):
    """For a card that is elsewhere, and with what would make it fit in the command's own words."""
    wide = {"seq-len": 2048, "batch-size": 8, "lmhead-chunks": 16}
    flags = [*(f"--{name}={n}" for name, n in wide.items()), "--from-scratch", "--base-dtype=nf4"]
    words = ["score", "Qwen2.5-72B", str(data), "--out", str(tmp_path / "s"), "--dry-run", *flags]
    how = ["--card=4090", "--memory-limit=24GiB"]
    assert _run([*words, *how, "--shard-weights", "--offload-master"]) == 0
    out = capsys.readouterr().out
    assert "Fits:            yes, into 24079 MiB" in out and "72,704,106,496" in out
    assert "and 0 that are trained" in out and "Checkpoint" not in out
    assert _run([*words, *how, "--lmhead-chunks=8"]) == LlmqError.STATUS
    said = capsys.readouterr().err
    assert "--shard-weights --offload-master" in said
    assert f"  llmq score Qwen2.5-72B {data} --out=OUT" in said


def test_a_run_by_scores_is_that_without(data, tmp_path):
    """A run with scores of a file and one without are equal, and resume from each other."""
    assert command("score", exported("qwen2"), data, "--out", tmp_path / "s") == 0
    losses = {}
    for name, given in (("own", {}), ("given", {"scores": tmp_path / "s"})):
        how = {"batch_size": 2, "learning_rate": 1e-2, **given}
        with trainer_of(data, "dpo", tmp_path / name, **how) as trainer:
            losses[name] = [trainer.step().loss for _ in range(2)]
            saved = trainer.save()
            losses[name].append(trainer.step().loss)
        with trainer_of(data, "dpo", tmp_path / name, **how) as trainer:
            trainer.load(saved)
            losses[f"{name}, resumed"] = [*losses[name][:2], trainer.step().loss]
    for found in losses.values():
        np.testing.assert_allclose(found, losses["own"], rtol=1e-5)
    shutil.rmtree(tmp_path / "own" / "reference")
    with trainer_of(data, "dpo", tmp_path / "own") as trainer:
        trainer.load(saved)
        with pytest.raises(DataError, match="there are no scores"):
            trainer.step()


def test_scores_of_something_else_are_refused(data, tmp_path, monkeypatch):
    """By name: of another model, of other data, damaged, of longer documents than were scored."""
    other = exported("qwen2_untied")
    assert command("score", other, data, "--out", tmp_path / "s") == 0
    given = {"scores": tmp_path / "s"}
    with (
        trainer_of(data, "dpo", tmp_path, **given) as trainer,
        pytest.raises(LlmqError, match=f"scores of the model '{other}', whose weights are not"),
    ):
        trainer.step()
    copied = tmp_path / data.parent.name / "train.bin"
    copied.parent.mkdir()
    write_pairs(copied, LENGTHS, VOCAB, seed=7)
    with (
        trainer_of(copied, "dpo", tmp_path, **given) as trainer,
        pytest.raises(DataError, match="has scores of other tokens than"),
    ):
        trainer.step()
    assert command("score", exported("qwen2"), data, "--out", tmp_path / "s") == DataError.STATUS
    made = {"name": "other", "fingerprint": "0" * 16, "eos_id": None, "bos_id": None}
    sure = ScoreFile(file_of(tmp_path / "s", data))
    sure.scored = replace(sure.scored, tokenizer=made)
    monkeypatch.setattr("llmq.data.scores.tokenizers_of_files", lambda path: [(path, BYTES)])
    with pytest.raises(DataError, match=r"scores of tokens of the tokenizer other \(00000000\), '"):
        sure.check(TokenFile(data))
    monkeypatch.undo()
    again = ("score", exported("qwen2"), data, "--out", tmp_path / "s", "--overwrite")
    assert command(*again, seq_len=20) == 0
    with (
        trainer_of(data, "dpo", tmp_path, **given) as trainer,
        pytest.raises(DataError, match="there are no scores of a token that is trained"),
    ):
        for _ in range(3):
            trainer.step()
    path = file_of(tmp_path / "s", data)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 80] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        ScoreFile(path).read(0, 30)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"packing": "concat"}, "windows of the files would cut pairs"),
        ({"document_mask": False}, "windows of the files would cut pairs"),
        ({"z_loss": 1e-4}, "--z-loss: would be weighted"),
        ({"loss_params": "smoothing=0.5"}, "must be less than 0.5"),
        ({"loss_params": "beta=0"}, "must be more than 0"),
        (
            {"model_dtype": "bf16", "matmul_dtype": "e4m3", "head_dtype": "e4m3"},
            "an fp8 head rounds the weights of rows to within 1/8",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(data, tmp_path, how, error):
    with pytest.raises(ConfigError, match=error):
        trainer_of(data, "dpo", tmp_path, **how)


def test_the_guard_knows_what_guessing_loses():
    """With margins of 0: ten times as much is a bad step of DPO, and a usual one of tokens."""
    found = {}
    for loss in ("ce", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "weighted"):
        given = {"scores": "s", "packing": "best-fit"} if loss != "ce" else {}
        config = make_config({"loss": loss, **given})
        found[loss] = loss_class(config).guessing(config, 1 if loss == "reward" else 100)
    odds = np.log(2) * 0.1 + np.log(100)
    known = {"ce": np.log(100), "dpo": np.log(2), "ipo": 25, "simpo": np.log1p(np.exp(0.5))}
    known |= {"orpo": odds, "kto": 1, "reward": np.log(2), "weighted": np.inf}
    assert found == pytest.approx(known)
    of = Guard(make_config({"guard": "warn"}), guessing=found["dpo"])
    bad = of.judge(0, Result(loss=5.0, norm=1.0, tokens=4), NO_LIMITS).reason
    assert bad == "the loss 5 is 7.2 times that of guessing, 0.6931"


def test_a_run_says_how_answers_are_preferred(tmp_path, monkeypatch, capsys):
    """In log, lines, plots and validation; it goes on by the scores that it has made."""
    monkeypatch.chdir(make_workplace(tmp_path))
    pairs = [(3 + i % 5, 3 + i % 4) for i in range(20)]
    write_pairs(tmp_path / "data" / "pairs.bin", pairs, 257)
    write_pairs(tmp_path / "data" / "held.bin", pairs[:6], 257, seed=1)
    how = {"loss": "dpo", "train-file": "data/pairs.bin", "eval-file": "data/held.bin"}
    how |= {"packing": "best-fit", "steps": 2, "eval-every-n-steps": 2, "save-training-state": True}
    assert train(**how) == 0
    steps, evals = records("step"), records("eval")
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert all({"accuracy", "margin", "reward_chosen", "logp_rejected"} <= s.keys() for s in steps)
    assert all({"accuracy", "margin", "reward_chosen"} <= e.keys() for e in evals)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[T]") and " | accuracy 0.0000 | mar" in line]
    assert [line for line in lines if line.startswith("[V]") and " | accuracy " in line]
    panels = {series.panel for series in series_of(read_log(tmp_path / "log.json"))}
    assert {"pairs preferred as they should be", "margin of rewards"} <= panels
    made = sorted(path.name for path in (tmp_path / "ckpt" / "reference").glob("*.scores"))
    assert made == ["data-held.scores", "data-pairs.scores"]
    again = how | {"steps": 3, "continue": "", "overwrite": None}
    assert train(**again) == 0
    assert [record["step"] for record in records("step")] == [0, 1, 2]
    assert train(**how | {"loss": "ce", "overwrite": "true"}) == 2
    assert "has pairs, of which one answer is to be preferred" in capsys.readouterr().err
