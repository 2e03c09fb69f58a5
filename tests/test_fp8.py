"""fp8 products in the whole step, on the CPU device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import hf_model, random_batch, trainer_for

T = 24
FLAGS = ("swiglu", "norm", "ffn", "qkv", "att", "block")


@pytest.fixture(params=["qwen2", "qwen3", "llama_biases", "gpt2"])
def path(request, tmp_path):
    hf_model(request.param).save_pretrained(tmp_path)
    return tmp_path


def run(path, steps=2, **options):
    """Results and weights after some steps of two micro-steps."""
    rng = np.random.default_rng(0)
    with trainer_for(path, grad_accumulation=2, **options) as trainer:
        results = [trainer.step([random_batch(rng) for _ in range(2)]) for _ in range(steps)]
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_gradients_are_close_to_f32(path, gradient):
    batches = [random_batch(np.random.default_rng(1))]
    found = []
    fp8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "gradient_dtype": gradient}
    for options in ({}, fp8):
        with trainer_for(path, **options) as trainer:
            found.append((trainer.step(batches), trainer.gradients()))
    (want, reference), (got, ours) = found
    # E4M3 keeps 4 bits of a value, E5M2 3: a product's relative error is some percent per element,
    # and it averages out over a tensor.
    assert abs(got.loss - want.loss) < 0.01 * want.loss
    least = {"e4m3": 0.98, "e5m2": 0.95}[gradient]
    largest = max(np.linalg.norm(g) for g in reference.values())
    for name, expected in reference.items():
        size = np.linalg.norm(expected)
        if size < 0.02 * largest:
            continue  # nearly zero, such as a bias of keys: rounding of its large neighbours
        cosine = np.vdot(ours[name].astype(np.float32), expected) / (
            np.linalg.norm(ours[name].astype(np.float32)) * size
        )
        assert cosine > least, (name, cosine)
        norm = np.linalg.norm(ours[name].astype(np.float32))
        assert abs(norm / size - 1) < 0.05, name


def test_recompute_is_bitwise_equal(path):
    options = {"matmul_dtype": "e4m3", "model_dtype": "bf16"}
    plain, weights = run(path, **options)
    for flag in FLAGS:
        again, same = run(path, **options, **{f"recompute_{flag}": True})
        assert again == plain, flag
        assert all(np.array_equal(weights[n], same[n]) for n in weights), flag


def test_kept_activations_take_less_memory(path):
    options = {"model_dtype": "bf16"}
    with (
        trainer_for(path, **options) as plain,
        trainer_for(path, matmul_dtype="e4m3", **options) as fp8,
    ):
        before, after = (t.plan.usage.categories["device"] for t in (plain, fp8))
        assert after["Activations"] < before["Activations"]
        assert after["Quants"] > 0 and "Quants" not in before
