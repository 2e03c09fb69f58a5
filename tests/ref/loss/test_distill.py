"""Distillation in NumPy: losses and gradients are those of the formulas in torch."""

import numpy as np
import pytest
import torch

from llmq.ref.loss.distill import distill, top_k


def teacher_of(rng, rows, vocab, k, spread=2):
    """A random distribution's largest probabilities, as (rows, 2 k). spread: of its logits."""
    p = torch.from_numpy(rng.normal(size=(rows, vocab)) * spread).softmax(-1)
    top = p.topk(k)
    ids = top.indices.numpy().astype(np.int32)
    logs = top.values.log().numpy().astype(np.float32)
    return np.concatenate([ids.view(np.float32), logs], axis=1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mixture, temperature", [(0.0, 1.0), (0.3, 2.0), (1.0, 1.0)])
@pytest.mark.parametrize("spread", [2, 9])
def test_is_the_formula(rng, reverse, mixture, temperature, spread):
    """A wide spread leaves other columns less than 2^-16, too."""
    rows, vocab, k = 6, 50, 5
    teacher = teacher_of(rng, rows, vocab, k, spread)
    left = 1 - np.exp(teacher[:, k:].astype(np.float64)).sum(axis=1)
    assert left.min() > 2.0**-30 and (left.min() < 2.0**-17) == (spread == 9)
    logits, targets = rng.normal(size=(rows, 64)).astype(np.float32), rng.integers(0, vocab, rows)
    targets = targets.astype(np.int32)
    targets[1], targets[2] = -100, teacher[2, :1].view(np.int32)[0]
    x = torch.tensor(logits[:, :vocab].astype(np.float64), requires_grad=True)
    ids, logprobs = torch.from_numpy(teacher[:, :k].view(np.int32)).long(), teacher[:, k:]
    logprobs = torch.from_numpy(logprobs.astype(np.float64))
    rest = 1 - logprobs.exp().sum(1, keepdim=True)
    p = torch.cat([(logprobs / temperature).softmax(1) * (1 - rest), rest], 1)
    q = (x / temperature).softmax(1).gather(1, ids)
    q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    one, other = (q, p) if reverse else (p, q)
    kl = (one * (one.log() - other.log())).sum(1)
    ce = torch.nn.functional.cross_entropy(x, torch.from_numpy(targets).long(), reduction="none")
    loss = mixture * ce + (1 - mixture) * temperature**2 * kl
    counted = torch.from_numpy(targets >= 0)
    (loss * counted).sum().backward()
    losses, lse, own = np.empty((3, rows), np.float32)
    numbers = (rows, vocab, 64, k, reverse, 1, mixture, temperature)
    distill(logits, losses, lse, own, targets, teacher, *numbers)
    np.testing.assert_allclose(losses, (loss * counted).detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own, (kl * counted).detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits[:, :vocab], x.grad, rtol=1e-4, atol=1e-6)
    assert not logits[:, vocab:].any() and not logits[1].any()


def test_ascending_columns_of_the_largest():
    logits = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1, 0, 2, 7, 7]], np.float32)
    top = np.empty((2, 6), np.float32)
    top_k(top, logits, np.array([1, 2], np.float32), 2, 7, 8, 3)
    assert top[:, :3].view(np.int32).tolist() == [
        [2, 4, 5],
        [0, 5, 6],
    ]  # the last column is padding
    assert top[:, 3:].tolist() == [[3, 4, 8], [-1, 0, 5]]
