"""A loss that llmq does not have trains, is planned, divided and reported as others are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmq.data.tokens import TokenFile
from llmq.model.losses import LOSSES, OF_SCORES
from llmq.options.loss_params import LOSS_PARAMS
from tests import preference
from tests.models import (
    LOSS_RTOL,
    exported,
    hf_model,
    pieces,
    random_batch,
    same_gradients,
    trainer_for,
)
from tests.preference import BETA, NEEDS, register
from tests.runs import make_workplace, records, train

T, B = 24, 4
BATCH = {"batch_size": B, "seq_len": T, "lmhead_chunks": 2}


@pytest.fixture(autouse=True)
def loss(monkeypatch):
    register(monkeypatch)


def batches_of(count: int, seed: int = 0) -> list[tuple]:
    """Batches of B sequences, with what another model thinks of their tokens; one pair is all
    masked."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        inputs, targets = random_batch(rng, B, T)
        targets[2] = -100
        reference = -4 - rng.random((B, T)).astype(np.float32)
        found.append((inputs, targets, None, 0, {"reference": reference}))
    return found


def torch_losses(model, batches: list[tuple]) -> list[torch.Tensor]:
    """-log sigmoid(beta * (what the first has gained - what the second has)) of each pair."""
    found = []
    for inputs, targets, _, _, more in batches:
        ids = torch.from_numpy(targets).long()
        scores = model(torch.from_numpy(inputs).long()).logits.log_softmax(-1)
        own = scores.gather(2, ids.clamp(min=0)[..., None])[..., 0]
        gained = ((own - torch.from_numpy(more["reference"])) * (ids >= 0)).sum(1)
        pairs = [b for b in range(0, B, 2) if (ids[b : b + 2] >= 0).any(1).all()]
        found += [
            -torch.nn.functional.logsigmoid(BETA * (gained[b] - gained[b + 1])) for b in pairs
        ]
    return found


def gradients_in_torch(batches: list[tuple], **changed: object) -> dict[str, np.ndarray]:
    model = hf_model("qwen2", **changed)
    torch.stack(torch_losses(model, batches)).sum().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def test_a_loss_needs_itself_and_three_files():
    root = Path(__file__).parents[2]
    assert len(NEEDS) <= 3
    assert [name for name in NEEDS if (root / name).exists()] == ["llmq/options/loss_params.py"]
    source = Path(preference.__file__).read_text()
    assert '"loss/preference.cu"' in source and '"llmq.ref.loss.preference"' in source
    for path in (root / "llmq").rglob("*.py"):
        assert "preference_stats" not in path.read_text(), path


def test_every_name_of_a_loss_has_a_class():
    assert {*LOSSES, *OF_SCORES} == {*LOSS_PARAMS}


@pytest.mark.parametrize(
    "how",
    [
        {"grad_accumulation": 2},
        {"gpus": 2, "zero_level": 2},
        {"grad_accumulation": 2, "recompute_block": True},
    ],
    ids=["micro-steps", "ranks", "recompute"],
)
def test_loss_and_gradients_are_those_of_the_formula(how):
    batches = batches_of(2)
    with trainer_for(exported("qwen2"), **BATCH, **how) as trainer:
        result = trainer.step(batches)
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    losses = [loss.item() for loss in torch_losses(hf_model("qwen2"), batches)]
    np.testing.assert_allclose(result.loss, np.mean(losses), rtol=LOSS_RTOL)
    assert result.numbers["preferred"] == np.mean([loss < np.log(2) for loss in losses])
    assert result.tokens == sum((targets >= 0).sum() for _, targets, *_ in batches)
    whole = result.norm * len(losses)
    same_gradients(ours, gradients_in_torch(batches), whole)


@pytest.mark.parametrize(
    "how, error",
    [
        ({}, 0.02),
        # E5M2 rounds the targets' elements, which are nearly minus the weight, to within 1/8.
        ({"matmul_dtype": "e4m3", "head_dtype": "e4m3"}, 2**-3),
    ],
    ids=["logits", "codes"],
)
def test_every_way_of_the_head_weighs_rows(how, error):
    """The head's and the last norm's gradients are near those in F32, times as much as this margin
    is another: one pair counts."""
    batches, even = batches_of(1), {"vocab_size": 144}
    options = BATCH | {"model_dtype": "bf16", "grad_accum_dtype": "fp32"} | how
    with trainer_for(exported("qwen2", **even), **options) as trainer:
        slope = 1 - np.exp(-trainer.step(batches).loss)  # sigmoid(-margin)
        ours = pieces(trainer, trainer.gradients())
    want = gradients_in_torch(batches, **even)
    (loss,) = torch_losses(hf_model("qwen2", **even), batches)
    factor = slope / (1 - np.exp(-loss.item()))
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        a, b = ours[name].ravel().astype(np.float64), want[name].ravel()
        assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b), name
        assert abs(np.linalg.norm(a) / np.linalg.norm(b) / factor - 1) < error, name


def test_log_validation_and_guard_have_its_numbers(tmp_path, monkeypatch, capsys):
    """And a resumed run goes on with it."""
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=1) == 2
    assert "train-0.reference.npy': the loss or the model reads" in capsys.readouterr().err
    for path in Path("data").glob("*.bin"):
        count = TokenFile(path).num_tokens
        np.save(path.with_suffix(".reference.npy"), np.full(count, -1, np.float32))
    how = {"steps": 3, "eval-every-n-steps": 3, "gpus": 2, "guard": "skip", "ckpt-interval": 2}
    assert train(**how) == 0
    steps, (validation, *_) = records("step"), records("eval")
    assert len(steps) == 3 and all(0 <= step["preferred"] <= 1 for step in steps)
    assert {"margin", "loss", "trained_tokens"} <= steps[0].keys() and "lse_max" not in steps[0]
    assert "preferred" in validation and "margin" not in validation
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), rtol=0.2)  # of margins near 0


def test_what_it_reads_is_checked():
    inputs, targets, *rest = batches_of(1)[0][:4]
    with trainer_for(exported("qwen2"), **BATCH) as trainer:
        with pytest.raises(ValueError, match=r"read \['reference'\] beside tokens, got \[\]"):
            trainer.step([(inputs, targets)])
        with pytest.raises(ValueError, match=r"reference must be float32 \(4, 24\), got float64"):
            trainer.step([(inputs, targets, *rest, {"reference": np.zeros((B, T))})])
