"""Losses of samples in NumPy: values and derivatives are TRL's, in torch."""

import numpy as np
import pytest
import torch

from llmq.ref.loss.grpo import (
    CAPPED,
    PER_DOCUMENT,
    PER_TOKEN,
    SEQUENCE,
    TOKEN,
    Form,
    divergence,
    of_tokens,
)

FORMS = {
    "grpo": Form(TOKEN, 0.8, 1.2, 0.05, PER_DOCUMENT, 0),
    "dr_grpo": Form(TOKEN, 0.8, 1.2, 0.0, PER_DOCUMENT, 50),
    "dapo": Form(TOKEN, 0.8, 1.28, 0.05, PER_TOKEN, 0),
    "gspo": Form(SEQUENCE, 0.98, 1.03, 0.05, PER_DOCUMENT, 0),
    "cispo": Form(CAPPED, 0, 1.3, 0.05, PER_TOKEN, 0),
}


def trl_loss(name, logp, old, reference, advantages, mask):
    """The loss as trl/trainer/grpo_trainer.py of TRL 1.16 computes it in `_compute_loss`, with the
    options of FORMS. logp, old, reference: (B, T). advantages: (B,). mask: float (B, T)."""
    form, advantages = FORMS[name], advantages[:, None]
    weights = logp - old
    if name == "gspo":  # importance_sampling_level="sequence"
        weights = ((weights * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    ratio = torch.exp(weights)
    if name == "cispo":
        each = -torch.clamp(ratio, max=form.high).detach() * advantages * logp
    else:
        held = torch.clamp(ratio, form.low, form.high)
        each = -torch.min(ratio * advantages, held * advantages)
    if form.beta:
        kl = torch.exp(reference - logp) - (reference - logp) - 1
        each = each + form.beta * kl * ratio  # use_bias_correction_kl=True, the default
    if name in ("grpo", "gspo"):
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if name == "dr_grpo":
        return (each * mask).sum() / (each.size(0) * form.length)
    return (each * mask).sum() / mask.sum()


@pytest.mark.parametrize("name", FORMS)
def test_losses_and_weights_are_trls(rng, name):
    form, (B, T) = FORMS[name], (6, 20)
    logp, old, reference = -rng.random((B, T)) * 3, np.zeros((B, T)), -rng.random((B, T)) * 3
    old = logp + rng.normal(size=(B, T)) * 0.3
    advantages, mask = rng.normal(size=B), np.arange(T) < rng.integers(3, T, B)[:, None]
    tensors = [torch.tensor(x) for x in (logp, old, reference, advantages, mask.astype(float))]
    tensors[0].requires_grad_()
    loss = trl_loss(name, *tensors)
    loss.backward()
    count = mask.sum(1, keepdims=True)
    log_ratio, mean_kl, given = logp - old, None, reference if form.beta else None
    if form.kind == SEQUENCE:
        of_rows = (log_ratio, divergence(reference - logp))
        log_ratio, mean_kl = (
            np.tile((x * mask).sum(1, keepdims=True) / count, (1, T)) for x in of_rows
        )
    value = of_tokens(form, advantages[:, None] + 0 * logp, logp, log_ratio, given, mean_kl)
    each = mask / mask.sum() if form.per == PER_TOKEN else mask / (form.length or count) / B
    np.testing.assert_allclose((value.loss * each).sum(), loss.item(), rtol=1e-9)
    np.testing.assert_allclose(-value.weight * each, tensors[0].grad, rtol=1e-9, atol=1e-15)
    assert 0 < value.clipped[mask].mean() < 1


def test_ratios_stay_finite():
    """Where the old probability is almost 0, an advantage of 0 makes no NaN."""
    zero, far = np.zeros(1), np.full(1, 200.0)
    value = of_tokens(FORMS["grpo"], zero, zero, far, far)
    assert np.isfinite(value.loss).all() and np.isfinite(value.weight).all()
