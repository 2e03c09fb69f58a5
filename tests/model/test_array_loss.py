"""A user's loss in arrays has the gradients of torch's, alone, with micro-steps and with ranks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import llmq
from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.model.losses import LOSSES
from llmq.model.losses.arrays import rounded, widened
from llmq.options.loss_params import LOSS_PARAMS, OF_LOGITS
from tests.conftest import gpu_problem
from tests.models import LOSS_RTOL, exported, hf_model, pieces, random_batch, same_gradients
from tests.runs import make_workplace, options, records

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
T, B = 24, 2
HOW = {"device": "cpu", "gpus": 1, "model_dtype": "fp32", "batch_size": B, "seq_len": T}
HOW |= {"grad_accumulation": 1, "steps": 10, "learning_rate": 1e-3, "tune": False}
LOW, HIGH, SMOOTH = 0.8, 1.2, 0.1


@pytest.fixture(autouse=True)
def tables():
    """Tables of losses, restored after the test."""
    names = set(LOSS_PARAMS)
    yield
    for name in set(LOSS_PARAMS) - names:
        del LOSS_PARAMS[name], LOSSES[name]
        OF_LOGITS.discard(name)


def documented() -> dict[str, type]:
    """The classes of docs/python.md."""
    found: dict[str, type] = {}
    code = re.search(r"( {4}class Reinforce\(.*?)^ {4}with ", PAGE, re.DOTALL | re.MULTILINE)[1]
    exec(compile(textwrap.dedent(code), "python.md", "exec"), {"llmq": llmq}, found)
    return found


class Smoothed(llmq.ArrayLoss):
    """Cross-entropy with smoothed labels, each token's times a weight."""

    name = "smoothed"
    arrays = ("weights",)

    def row_weights(self, xp, targets, losses, weights):
        assert losses is None
        return weights

    def of_logits(self, xp, logits, targets, weights):
        top = logits.max(axis=1, keepdims=True)
        scores = logits - top - xp.log(xp.exp(logits - top).sum(axis=1, keepdims=True))
        rows = xp.arange(len(targets))
        losses = -(1 - SMOOTH) * scores[rows, targets] - SMOOTH * scores.mean(axis=1)
        gradient = xp.exp(scores) - SMOOTH / logits.shape[1]
        gradient[rows, targets] -= 1 - SMOOTH
        return losses, gradient


def batches_of(count: int, *names: str) -> list[Batch]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        inputs, targets = random_batch(rng, B, T)
        arrays = {name: rng.normal(0, 1, (B, T)).astype(np.float32) for name in names}
        if "old" in names:  # log-probabilities near those of the model, for ratios around 1
            arrays["old"] = (arrays["old"] * 0.2 - np.log(131)).astype(np.float32)
        found.append(Batch(inputs, targets, named=arrays))
    return found


def in_torch(batches: list[Batch], of_tokens) -> tuple[float, float, dict[str, np.ndarray]]:
    """Mean loss, and gradients of the sum of of_tokens(log-probabilities (V), arrays, targets)."""
    model, losses, reported, count = hf_model("qwen2"), [], [], 0
    for batch in batches:
        targets = torch.from_numpy(batch.targets).long()
        scores = model(torch.from_numpy(batch.inputs).long()).logits.log_softmax(-1)
        arrays = {name: torch.from_numpy(array) for name, array in batch.named.items()}
        own = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0]
        value, told = of_tokens(scores, own, arrays)
        losses.append((value * (targets >= 0)).sum())
        reported.append((told * (targets >= 0)).sum().item())
        count += (targets >= 0).sum().item()
    sum(losses).backward()
    return sum(reported) / count, count, {n: p.grad.numpy() for n, p in model.named_parameters()}


def reinforce(scores, own, arrays):
    return -own * arrays["advantages"], -own * arrays["advantages"]


def clipped(scores, own, arrays):
    """PPO's surrogate; what is reported is the cross-entropy times the weight."""
    advantages, ratio = arrays["advantages"], (own - arrays["old"]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages)
    outside = torch.where(advantages > 0, ratio > HIGH, ratio < LOW)
    return -surrogate, torch.where(outside, 0, ratio * advantages) * -own


def smoothed(scores, own, arrays):
    loss = (-(1 - SMOOTH) * own - SMOOTH * scores.mean(-1)) * arrays["weights"]
    return loss, loss


@pytest.mark.parametrize("how", [{}, {"grad_accumulation": 2, "gpus": 2, "lmhead_chunks": 2}])
@pytest.mark.parametrize("formula", [reinforce, clipped, smoothed])
def test_loss_and_gradients_are_those_of_the_formula(formula, how):
    classes = documented() | {"Smoothed": Smoothed}
    loss = next(c for name, c in classes.items() if name.lower() == formula.__name__)
    batches = batches_of(how.get("grad_accumulation", 1) * how.get("gpus", 1), *loss.arrays)
    with llmq.Trainer(model=str(exported("qwen2")), loss=loss, **HOW | how) as trainer:
        result = trainer.step(batches)
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    reported, count, gradients = in_torch(batches, formula)
    np.testing.assert_allclose(result.loss, reported, rtol=LOSS_RTOL, atol=1e-6)
    assert result.tokens == count
    same_gradients(ours, gradients, result.norm * count)


def test_logits_in_bf16():
    """The gradient's bits are rounded to nearest, and the step is near that in fp32."""
    values = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    bits = rounded(np, values)
    assert (bits == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert (rounded(np, widened(np, bits)) == bits).all()
    assert np.isnan(widened(np, rounded(np, np.full(1, np.nan, np.float32))))
    found = []
    for dtype in ("fp32", "bf16"):
        how = HOW | {"model_dtype": dtype, "grad_accum_dtype": "fp32"}
        with llmq.Trainer(model=str(exported("qwen2")), loss=Smoothed, **how) as trainer:
            trainer.step(batches_of(1, "weights"))
            found.append(pieces(trainer, trainer.gradients())["model.embed_tokens.weight"].ravel())
    a, b = found
    assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)


def test_a_run_reads_its_arrays_beside_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    for path in Path("data").glob("*.bin"):
        count = (path.stat().st_size - 1024) // 4
        np.save(path.with_suffix(".weights.npy"), np.full(count, 2, np.float32))
    given = options(steps=2, eval_every_n_steps=1, grad_accumulation=1)
    given = {name.replace("-", "_"): value for name, value in given.items()}
    losses = []
    for loss in ("ce", Smoothed):
        with llmq.Trainer(**given | {"loss": loss}) as trainer:
            trainer.train()
        losses.append([records("step")[0]["loss"], records("eval")[0]["loss"]])
    np.testing.assert_allclose(losses[1], np.multiply(losses[0], 2), rtol=0.01)


def test_what_is_no_loss():
    class Unnamed(llmq.ArrayLoss):
        pass

    class Ours(llmq.ArrayLoss):
        name = "dpo"

    for loss, message in ((Unnamed, "with a name"), (dict, "is no loss"), (Ours, "another loss")):
        with pytest.raises(ConfigError, match=message):
            llmq.Trainer(model="tiny", from_scratch=True, loss=loss)
    with pytest.raises(ConfigError, match="without a soft cap"):
        llmq.Trainer(
            model=str(exported("gemma3", final_logit_softcapping=30.0)), loss=Smoothed, **HOW
        )


@pytest.mark.gpu
@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
def test_graphs_replay_it():
    """Steps are those of the launches alone, and near those of the CPU."""
    found = []
    for more in ({}, {"use_cuda_graphs": False}, {"device": "cpu"}):
        how = HOW | {"device": "cuda"} | more
        with llmq.Trainer(model=str(exported("qwen2")), loss=Smoothed, **how) as trainer:
            found.append([trainer.step([batch]).loss for batch in batches_of(4, "weights")])
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], found[2], rtol=1e-3)  # TF32's products
