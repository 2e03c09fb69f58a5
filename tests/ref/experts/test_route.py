"""References of routers against torch and transformers."""

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llmq.base.batch import FILLER_TARGET
from llmq.ref.experts import route as ref

KINDS = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sigmoid", True)]


def torch_route(logits, top_k, kind, renormalize, scale, bias=None):
    scores = torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, dim=-1)
    by = scores if bias is None else scores + bias
    chosen = by.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if bias is not None else 0))
    return chosen, weights * scale


def routed(logits, top_k, kind, renormalize, scale=1.0, bias=None, sums=None, targets=None):
    rows, E = logits.shape
    chosen = np.full((rows, top_k), -1, np.int32)
    weights = np.full((rows, top_k), np.nan, logits.dtype)
    how = {"by_sigmoid": kind == "sigmoid", "renormalize": renormalize}
    ref.route(chosen, weights, sums, logits, bias, targets, rows, E, top_k, scale, **how)
    return chosen, weights


@pytest.mark.parametrize("kind, renormalize", KINDS)
@pytest.mark.parametrize("rows, E, top_k", [(1, 8, 2), (50, 60, 4), (9, 4, 4)])
def test_choice_weights_and_gradient_equal_torch(kind, renormalize, rows, E, top_k):
    rng = np.random.default_rng(rows)
    logits, d = rng.normal(size=(rows, E)), rng.normal(size=(rows, top_k))
    bias = rng.normal(size=E) if kind == "sigmoid" else None
    x = torch.tensor(logits, requires_grad=True)
    shift = None if bias is None else torch.tensor(bias)
    want_chosen, want = torch_route(x, top_k, kind, renormalize, 2.5, shift)
    (want_gradient,) = torch.autograd.grad(want, x, torch.tensor(d))
    chosen, weights = routed(logits, top_k, kind, renormalize, 2.5, bias)
    np.testing.assert_array_equal(chosen, want_chosen.numpy())
    np.testing.assert_allclose(weights, want.detach().numpy(), rtol=1e-13)
    d_logits = np.full_like(logits, np.nan)
    how = {"by_sigmoid": kind == "sigmoid", "renormalize": renormalize}
    of_experts = np.random.default_rng(9).normal(size=logits.shape)
    d = d - np.take_along_axis(of_experts, chosen, axis=1)
    sizes = (None, None, rows, E, top_k, 2.5)
    ref.route_backward(d_logits, d, of_experts, logits, chosen, *sizes, **how)
    np.testing.assert_allclose(d_logits, want_gradient.numpy(), rtol=1e-11, atol=1e-14)


def test_a_softmax_over_the_chosen_logits_is_one_that_is_renormalized():
    """Routing of gpt-oss: a softmax over the chosen logits."""
    logits = np.random.default_rng(0).normal(size=(20, 32)) * 5
    top = torch.tensor(logits).topk(4, dim=-1)
    chosen, weights = routed(logits, 4, "softmax", True)
    np.testing.assert_array_equal(chosen, top.indices.numpy())
    np.testing.assert_allclose(weights, torch.softmax(top.values, dim=1).numpy(), rtol=1e-13)


def test_ties_go_to_the_lowest_number_and_nan_to_nobody():
    nan, inf = np.nan, np.inf
    logits = np.array(
        [[1, 2, 2, 1, 2], [0.0, -0.0, 0.0, -1, 0], [nan, -inf, 3, nan, 1], [nan] * 5], np.float32
    )
    chosen, weights = routed(logits, 3, "softmax", True)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [2, 4, 1], [0, 1, 2]]
    assert np.isnan(weights[2:]).all() and np.isfinite(weights[:2]).all()


@pytest.mark.parametrize("filler", [0, 15])
@pytest.mark.parametrize("kind, renormalize", [("softmax", False), ("softmax", True)])
def test_losses_and_their_gradients_equal_transformers(kind, renormalize, filler):
    """Over two layers of one micro-batch, for a mean over 30 targets; transformers has an
    attention mask where rows are filler."""
    rng = np.random.default_rng(3)
    L, rows, E, top_k, aux, z = 2, 50, 12, 3, 0.01, 0.003
    logits, d = rng.normal(size=(L, rows, E)), rng.normal(size=(rows, top_k))
    targets = np.where(np.arange(rows) < 30, 5, -100).astype(np.int32)
    targets[rows - filler :] = FILLER_TARGET
    owned = targets != FILLER_TARGET

    layers = [torch.tensor(x, requires_grad=True) for x in logits]
    mask = torch.tensor(owned).long().view(5, 10) if filler else None
    want_aux = load_balancing_loss_func(tuple(layers), E, top_k, mask)
    lse = torch.cat([torch.logsumexp(x[owned], dim=-1) for x in layers])
    want_z = (lse**2).mean()
    total = 30 * (aux * want_aux + z * want_z)
    for x in layers:
        total = total + (torch_route(x, top_k, kind, renormalize, 1.0)[1] * torch.tensor(d)).sum()
    total.backward()

    sums = np.zeros((L, ref.sums_size(E)), np.int64)
    chosen = [
        routed(x, top_k, kind, renormalize, 1.0, None, s, targets)[0]
        for x, s in zip(logits, sums, strict=True)
    ]
    loads = [np.bincount(c[owned].reshape(-1), minlength=E) for c in chosen]
    np.testing.assert_array_equal(sums[1, :E], loads[1])
    factors, losses = np.full(E + 1, np.nan), np.ones(4)
    totals = np.ones_like(sums)
    before = sums.copy()
    ref.route_balance(factors, losses, totals, sums, targets, None, L, E, rows, aux, z)
    np.testing.assert_array_equal(totals, before + 1)
    assert not sums.any()
    # Probabilities are summed in units of 2^-32, squares in 2^-20.
    routers = torch.stack(layers)[:, owned]
    entropy = torch.distributions.Categorical(logits=routers).entropy().mean()
    want = [want_aux.item(), want_z.item(), entropy.item(), np.max(loads) / owned.sum()]
    np.testing.assert_allclose((losses - 1) / 30, want, rtol=1e-6)
    for x, c, layer in zip(logits, chosen, layers, strict=True):
        d_logits = np.full_like(x, np.nan)
        how = {"by_sigmoid": False, "renormalize": renormalize}
        sizes = (factors, targets, rows, E, top_k, 1.0)
        ref.route_backward(d_logits, d, None, x, c, *sizes, **how)
        # Transformers divides the rows of experts in F32.
        np.testing.assert_allclose(d_logits, layer.grad.numpy(), rtol=1e-6, atol=1e-9)


def test_rows_that_are_not_finite_are_counted_and_left_out_of_probabilities():
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = np.nan
    sums = np.zeros(ref.sums_size(4), np.int64)
    routed(logits, 2, "softmax", True, sums=sums)
    # The row with NaN has experts 0 and 1 like the others.
    assert sums[:9].tolist() == [3, 3, 0, 0, *[2 << 30] * 4, 3]
    # Logarithms of F32.
    np.testing.assert_allclose(
        sums[9:11] / [2**32, 2**20], 2 * np.log(4) ** np.array([1, 2]), rtol=1e-6
    )
    assert sums[11] == 1


def test_nothing_that_counts_gives_no_losses():
    factors, losses = np.full(5, np.nan, np.float32), np.zeros(4)
    sums = np.zeros((2, 12), np.int64)
    targets = np.full(3, -1, np.int32)
    ref.route_balance(factors, losses, sums.copy(), sums, targets, None, 2, 4, 3, 1, 1)
    assert not factors.any() and not losses.any()
