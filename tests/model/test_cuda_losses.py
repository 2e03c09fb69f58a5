"""Losses of pairs, labels, weights and teachers on a GPU, beside the CPU's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.commands.cli import _run
from llmq.model.losses import LOSSES
from llmq.model.losses.preferences import Orpo, SimPo
from llmq.options.loss_params import POLICIES
from tests.conftest import gpu_problem
from tests.model.test_score_head import write_classes
from tests.models import VOCAB, exported, trainer_for
from tests.pairs_data import write_documents, write_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem())),
]
T = 64
LENGTHS = [(6, 9), (25, 24), (12, 40), (24, 7), (8, 16), (3, 25), (10, 5), (14, 24)]


def results(loss, folder, device, **how):
    labels = [True, False] * 4 if loss == "kto" else None
    data = write_pairs(folder / "train.bin", LENGTHS, VOCAB, labels=labels)
    options = {"device": device, "seq_len": T, "packing": "best-fit", "loss": loss, **how}
    options |= {"train_file": (str(data),), "eval_file": "none", "checkpoint_dir": folder / device}
    options |= {"grad_accumulation": 2, "learning_rate": 1e-2}
    with trainer_for(exported("qwen2"), **options) as trainer:
        found = [trainer.step() for _ in range(4)]
        assert trainer.usage == trainer.plan.usage
    numbers = [dict(r.numbers) for r in found]
    if LOSSES[loss] is not SimPo and LOSSES[loss] is not Orpo:
        # The model is its own reference in the first step: signs of margins are those of rounding.
        assert 0 <= numbers[0]["accuracy"] <= 1
        numbers[0]["accuracy"] = 0.0
    return [(r.loss, r.norm, *map(n.get, sorted(n))) for r, n in zip(found, numbers, strict=True)]


@pytest.mark.parametrize(
    "loss", [n for n in LOSSES if n not in ("ce", "kd", "weighted", *POLICIES)]
)
def test_pairs(loss, tmp_path):
    """Their scores, steps and updates; in BF16 nearly, and with graphs as without."""
    cpu, gpu = (results(loss, tmp_path, device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu, cpu, rtol=1e-3, atol=1e-4)
    half = results(loss, tmp_path, "cuda", model_dtype="bf16")
    np.testing.assert_allclose(half[0][0], cpu[0][0], rtol=0.02, atol=0.02)
    eager = results(loss, tmp_path, "cuda", model_dtype="bf16", use_cuda_graphs=False)
    np.testing.assert_array_equal(eager, half)  # kto: NaN where a step has only one label


@pytest.mark.parametrize("loss", ["reward", "ce"])
def test_score_heads(loss, tmp_path):
    """The steps of rewards and of classes, in F32 as on the CPU, and in BF16 nearly."""
    path = tmp_path / "train.bin"
    if loss == "reward":
        write_pairs(path, LENGTHS, VOCAB)
    else:
        write_classes(path, [9, 24, 14, 6, 30, 60, 3, 40], labels=3)
    found = []
    for device, dtype in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        options = {"train_file": (str(path),), "eval_file": "none", "loss": loss}
        options |= {"num_labels": 1 if loss == "reward" else 3, "device": device, "seq_len": T}
        options |= {"packing": "best-fit", "model_dtype": dtype}
        with trainer_for(exported("qwen2"), **options, grad_accumulation=2) as trainer:
            results = [trainer.step() for _ in range(3)]
            assert trainer.usage == trainer.plan.usage
        found.append([(r.loss, r.norm, r.numbers["accuracy"]) for r in results])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[2][0][0], found[0][0][0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("more", [{}, {"mixture": 0.5, "temperature": 2.0}])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_teachers(divergence, more, tmp_path):
    path = write_documents(tmp_path / "train.bin", [9, 24, 14, 6, 30, 60], VOCAB)
    found = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        how = [f"--device={device}", "--gpus=1", "--model-dtype=fp32", f"--seq-len={T}"]
        model = str(exported("qwen2_untied"))
        assert _run(["score", model, str(path), "--out", str(out), "--top-k=8", *how]) == 0
        options = {"train_file": (str(path),), "eval_file": "none", "scores": out, "loss": "kd"}
        options |= {"seq_len": T, "packing": "best-fit", "device": device}
        options |= {"loss_params": {"top-k": 8, "divergence": divergence, **more}}
        with trainer_for(exported("qwen2"), **options) as trainer:
            result = trainer.step()
            found.append((result.loss, result.norm, result.numbers["kl"]))
    np.testing.assert_allclose(found[1], found[0], rtol=5e-3)
