"""Losses of pairs in NumPy: values and derivatives are those of the published formulas in torch."""

import numpy as np
import pytest
import torch

from llmq.ref.loss.pairs import (
    IPO,
    KTO,
    ORPO,
    SIGMOID,
    Documents,
    Form,
    of_label,
    of_pair,
)

softplus, log_sigmoid = torch.nn.functional.softplus, torch.nn.functional.logsigmoid


def published(form, gain, logp, count):
    """Each pair's loss; rows of the arguments: chosen, rejected. Written as the papers do."""
    x = gain / count if form.normalize else gain
    mean = logp / count
    if form.kind == SIGMOID:  # DPO with smoothed labels; SimPO's margin is gamma
        m = form.beta * (x[0] - x[1]) - form.gamma
        loss = -log_sigmoid(m) * (1 - form.smoothing) - log_sigmoid(-m) * form.smoothing
    elif form.kind == IPO:
        loss = (x[0] - x[1] - 1 / (2 * form.beta)) ** 2
    else:  # ORPO
        odds = mean - torch.log1p(-torch.exp(mean))
        loss = -form.beta * log_sigmoid(odds[0] - odds[1])
    return loss - form.sft * mean[0]


@pytest.mark.parametrize(
    "form",
    [
        Form(SIGMOID, 0, 0.1, 0.0, 0.2, 0.3),
        Form(SIGMOID, 1, 2.0, 0.5, 0.0, 0.0),
        Form(IPO, 1, 0.1, 0.0, 0.0, 0.5),
        Form(IPO, 0, 0.3, 0.0, 0.0, 0.0),
        Form(ORPO, 0, 0.2, 0.0, 0.0, 1.0),
    ],
)
def test_pairs(rng, form):
    count = rng.integers(1, 30, (2, 50))
    logp, reference = -rng.random((2, 2, 50)) * count
    own = torch.tensor(logp, requires_grad=True)
    loss = published(form, own - torch.tensor(reference), own, torch.tensor(count))
    loss.sum().backward()
    documents = (Documents(logp[i] - reference[i], logp[i], count[i]) for i in (0, 1))
    found = of_pair(form, *documents)
    np.testing.assert_allclose(found.loss, loss.detach(), rtol=1e-9)
    np.testing.assert_allclose([found.d_chosen, found.d_rejected], own.grad, rtol=1e-9, atol=1e-12)


def test_labels(rng):
    form, shift = Form(KTO, 0, 0.1, 1.0, 0.0, 2.0), 0.7
    gain, preferred = rng.normal(size=40) * 9, rng.random(40) < 0.5
    own = torch.tensor(gain, requires_grad=True)
    good = 1 - torch.sigmoid(form.beta * (own - shift))
    bad = form.sft * (1 - torch.sigmoid(form.beta * (shift - own)))
    loss = torch.where(torch.tensor(preferred), good, bad)
    loss.sum().backward()
    found = of_label(form, Documents(gain, gain, np.ones(40)), preferred, shift)
    np.testing.assert_allclose(found.loss, loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(found.d_chosen, own.grad, rtol=1e-9)
