"""Losses of labels in NumPy beside torch."""

import numpy as np
import torch

from llmq.ref.loss.labels import labels


def test_loss_and_gradient_are_torchs(rng):
    x = rng.normal(size=(6, 8)).astype(np.float32)
    targets = np.array([0, 4, -100, 2, 1, 3], np.int32)
    weights = rng.normal(size=6).astype(np.float32)
    for linear in (0, 1):
        own = torch.tensor(x[:, :5], requires_grad=True)
        wanted = torch.tensor(targets).long()
        each = torch.nn.functional.cross_entropy(own, wanted, reduction="none")
        if linear:
            each = -own[torch.arange(6), wanted.clamp(min=0)] * (wanted >= 0)
        (each * torch.tensor(weights)).sum().backward()
        found, losses, lse, hits = x.copy(), *np.empty((3, 6), np.float32)
        labels(found, losses, lse, hits, targets, weights, 6, 5, 8, linear, 1)
        np.testing.assert_allclose(losses, each.detach(), rtol=1e-5)
        np.testing.assert_allclose(found[:, :5], own.grad, atol=1e-6)
        assert not found[:, 5:].any() and not found[2].any()
        if not linear:
            right = own.argmax(1).numpy() == targets
            np.testing.assert_array_equal(hits, right)
