"""References of the gated delta rule against transformers' torch, and against each other."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from llmq.ops.delta.delta_rule import Heads
from llmq.ref.delta import delta_rule as ref
from tests.delta import BEGINS, GATES, Chunked, gates_of, starts_of

B, DK, DV = 2, 16, 24
HEADS = Heads(2, 4, DK, DV)
# F64 on both sides: sums in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def inputs(rng, T: int, batch: int = B, heads: Heads = HEADS) -> tuple[np.ndarray, np.ndarray]:
    """qkv and gates in F64."""
    decay = -rng.exponential(size=(batch, T, heads.Hv)) * 0.3
    qkv = rng.normal(size=(batch, T, heads.channels))
    return qkv, np.stack([decay, rng.uniform(size=(batch, T, heads.Hv))], axis=2)


def split(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    """Queries, keys (B, T, Hk, DK) and values (B, T, Hv, DV)."""
    q, k, v = qkv.split([heads.Hk * DK, heads.Hk * DK, heads.Hv * DV], -1)
    return q.unflatten(-1, (-1, DK)), k.unflatten(-1, (-1, DK)), v.unflatten(-1, (-1, DV))


def by_definition(qkv, gates, state, heads=HEADS, starts=None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and the last state, token by token, as transformers computes them in F32."""
    q, k, v = split(qkv, heads)
    q, k = (x * (x.square().sum(-1, keepdim=True) + ref.EPS).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads.Hv // heads.Hk, 2) for x in (q, k))
    outs = []
    for t in range(qkv.shape[1]):
        state = state * gates[:, t, 0].exp()[..., None, None]
        if starts is not None and starts[0, t] == t:
            state = state * 0
        rest = v[:, t] - torch.einsum("bhdn,bhd->bhn", state, k[:, t])
        change = gates[:, t, 1, :, None] * rest
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhdn,bhd->bhn", state, q[:, t]) * DK**-0.5)
    return torch.stack(outs, 1).flatten(2), state


def assert_as_defined(qkv, gates, state, d_out, d_state, *, heads=HEADS, starts=None) -> None:
    """Chunks have the results and gradients that autograd has of the definition. state, d_state:
    None beside documents, which begin without one."""
    zero = np.zeros((len(qkv), heads.Hv, DK, DV))
    given = (qkv, gates, zero if state is None else state)
    leaves = [torch.tensor(x, requires_grad=True) for x in given]
    out, last = by_definition(*leaves, heads, starts)
    value = (out * torch.tensor(d_out)).sum()
    if d_state is not None:
        value = value + (last * torch.tensor(d_state)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, leaves)]
    own, d_own = (None if x is None else x.copy() for x in (state, d_state))
    chunked = Chunked(qkv, gates, heads, starts, own)
    np.testing.assert_allclose(chunked.forward(), out.detach().numpy(), **EXACT)
    got = chunked.backward(d_out, d_own)
    if state is not None:
        np.testing.assert_allclose(chunked.state, last.detach().numpy(), **EXACT)
        got = (*got, d_own)
    for one, other in zip(got, want, strict=state is not None):
        np.testing.assert_allclose(one, other, **EXACT)


def test_recurrence_and_chunks_equal_transformers(rng):
    qkv, gates = (x.astype(np.float32) for x in inputs(rng, 131))
    tensors = [torch.tensor(x) for x in (qkv, gates)]
    chunked = Chunked(qkv, gates, HEADS, state=np.zeros((B, HEADS.Hv, DK, DV), np.float32))
    chunked.forward()
    out, state = np.empty_like(chunked.out), np.zeros_like(chunked.state)
    ref.delta_rule_recurrence(out, state, qkv, gates, 131, HEADS.Hk, HEADS.Hv, dk=DK, dv=DV)
    for rule in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        decay, beta = tensors[1].unbind(2)
        how = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        want, want_state = rule(*split(tensors[0], HEADS), g=decay, beta=beta, **how)
        want = want.flatten(2).numpy()
        for got, got_state in ((out, state), (chunked.out, chunked.state)):
            # F32 on all sides, 131 steps in different orders.
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got_state, want_state.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "T, key_heads, value_heads",
    [(1, 2, 4), (63, 1, 3), (64, 2, 4), (65, 3, 3), (130, 1, 1), (193, 1, 4)],
)
def test_chunks_and_gradients_equal_the_recurrence_in_f64(rng, T, key_heads, value_heads):
    """A state is carried in, and a gradient comes back from the one behind."""
    heads = Heads(key_heads, value_heads, DK, DV)
    qkv, gates = inputs(rng, T, heads=heads)
    state, d_state = rng.normal(size=(2, B, value_heads, DK, DV))
    d_out = rng.normal(size=(B, T, value_heads * DV))
    assert_as_defined(qkv, gates, state, d_out, d_state, heads=heads)
    plain, steps = np.empty_like(d_out), state.copy()
    ref.delta_rule_recurrence(plain, steps, qkv, gates, T, key_heads, value_heads, dk=DK, dv=DV)
    out, last = by_definition(*map(torch.tensor, (qkv, gates, state)), heads)
    np.testing.assert_allclose(plain, out.numpy(), **EXACT)
    np.testing.assert_allclose(steps, last.numpy(), **EXACT)


@pytest.mark.parametrize("kind", GATES)
def test_gates_at_their_limits(rng, kind):
    T = 100
    qkv, _ = inputs(rng, T)
    gates = gates_of(kind, B, T, HEADS.Hv)
    state, d_state = rng.normal(size=(2, B, HEADS.Hv, DK, DV))
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    assert_as_defined(qkv, gates, state, d_out, d_state)


@pytest.mark.parametrize("carried", [False, True])
def test_gradients_are_slopes(rng, carried):
    """Along random directions, of one input at a time, which no automatic gradient knows of."""
    T, h = 90, 1e-5
    qkv, gates = inputs(rng, T, 1)
    starts = None if carried else starts_of((0, 20, 64, 80), T)
    given = [qkv, gates]
    if carried:
        given.append(rng.normal(size=(1, HEADS.Hv, DK, DV)))
    d_out = rng.normal(size=(1, T, HEADS.Hv * DV))
    d_state = rng.normal(size=(1, HEADS.Hv, DK, DV)) if carried else None

    def value(qkv, gates, state=None):
        last = None if state is None else state.copy()
        out = Chunked(qkv, gates, HEADS, starts, last).forward()
        return (out * d_out).sum() + (0 if last is None else (last * d_state).sum())

    state, d_front = (x.copy() if carried else None for x in (given[-1], d_state))
    chunked = Chunked(qkv, gates, HEADS, starts, state)
    chunked.forward()
    gradients = [*chunked.backward(d_out, d_front), *([d_front] if carried else [])]
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        ends = [
            value(*(x + s * h * direction if i == n else x for n, x in enumerate(given)))
            for s in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * h)
        # The third derivative times h^2, and the rounding of values over h, some 1e-9 each.
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_documents_are_as_if_they_were_alone(rng, begins):
    T = 150
    qkv, gates = inputs(rng, T, 1)
    d_out = rng.normal(size=(1, T, HEADS.Hv * DV))
    starts = starts_of(begins, T)
    packed = Chunked(qkv, gates, HEADS, starts)
    got = (packed.forward(), *packed.backward(d_out))
    for first, stop in pairwise((*begins, T)):
        part = slice(first, stop)
        alone = Chunked(qkv[:, part], gates[:, part], HEADS)
        want = (alone.forward(), *alone.backward(d_out[:, part]))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[:, part], other, **EXACT)
    assert_as_defined(qkv, gates, None, d_out, None, starts=starts)


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_a_text_in_two_parts_is_the_text(rng, cut):
    """States go on from part to part, and gradients of states back."""
    T = 140
    qkv, gates = inputs(rng, T)
    state, d_state = rng.normal(size=(2, B, HEADS.Hv, DK, DV))
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    whole, d_whole = Chunked(qkv, gates, HEADS, state=state.copy()), d_state.copy()
    want = (whole.forward(), *whole.backward(d_out, d_whole))
    parts = [np.s_[:, :cut], np.s_[:, cut:]]
    made = []
    for part in parts:
        made.append(Chunked(qkv[part], gates[part], HEADS, state=state))
        made[-1].forward()  # state is now that of the next part
    np.testing.assert_allclose(state, whole.state, **EXACT)
    for chunked, part in zip(made[::-1], parts[::-1], strict=True):
        chunked.backward(d_out[part], d_state)
    np.testing.assert_allclose(d_state, d_whole, **EXACT)
    got = [[c.out, c.d_qkv, c.d_gates] for c in made]
    for one, other in zip(map(np.hstack, zip(*got, strict=True)), want, strict=True):
        np.testing.assert_allclose(one, other, **EXACT)


def test_what_was_written_last_under_a_key_is_read(rng):
    """With betas of 1 and without decay a state is a table: orthogonal keys keep their values, and
    a key that comes again has its value replaced, whatever lies between."""
    order = [0, 1, 2, 3, 1, 0, 15, 4, 1, 15] * 9  # keys of 90 tokens
    keys, values = np.eye(DK)[order] * 3, rng.normal(size=(90, DV))
    asked = np.roll(order, 7)  # each token reads the key of another one
    qkv = np.concatenate([np.eye(DK)[asked] * 5, keys, values], -1)[None]
    gates = np.broadcast_to(np.array([0.0, 1.0])[:, None], (1, 90, 2, 1)).copy()
    out = Chunked(qkv, gates, Heads(1, 1, DK, DV)).forward()[0] * DK**0.5
    for t, key in enumerate(asked):
        written = [n for n in range(t + 1) if order[n] == key]
        want = values[written[-1]] if written else np.zeros(DV)
        np.testing.assert_allclose(out[t], want, rtol=1e-6, atol=1e-6)  # EPS of lengths


def test_lengths_of_queries_and_keys_do_not_matter(rng):
    """Nor has the gradient a part along them."""
    T, width = 70, HEADS.Hk * DK
    qkv, gates = inputs(rng, T)
    factors = np.exp(rng.normal(size=(B, T, 2 * HEADS.Hk, 1))) * 1e4  # beside which EPS is nothing
    q_k = qkv[..., : 2 * width].reshape(B, T, -1, DK)
    scaled = (q_k * factors).reshape(B, T, -1)
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    one, other = (
        Chunked(np.concatenate([x, qkv[..., 2 * width :]], -1), gates, HEADS)
        for x in (scaled, scaled * 4)
    )
    np.testing.assert_allclose(one.forward(), other.forward(), **EXACT)
    (d_one, gates_one), (d_other, gates_other) = (c.backward(d_out) for c in (one, other))
    np.testing.assert_allclose(gates_one, gates_other, **EXACT)
    np.testing.assert_allclose(d_one[..., : 2 * width], 4 * d_other[..., : 2 * width], rtol=1e-9)
    d_q_k = d_one[..., : 2 * width].reshape(B, T, -1, DK)
    along = (d_q_k * q_k).sum(-1) / np.linalg.norm(d_q_k, axis=-1) / np.linalg.norm(q_k, axis=-1)
    assert np.abs(along).max() < 1e-9


def test_nothing_is_read_by_queries_of_zeros_and_written_by_keys_of_zeros(rng):
    """Their lengths are EPS, and all gradients are finite."""
    T, width = 70, HEADS.Hk * DK
    qkv, gates = inputs(rng, T)
    qkv[:, 5, :width], qkv[:, 9, width : 2 * width] = 0, 0
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    state = rng.normal(size=(B, HEADS.Hv, DK, DV))
    chunked = Chunked(qkv, gates, HEADS, state=state.copy())
    assert not chunked.forward()[:, 5].any()
    assert_as_defined(qkv, gates, state, d_out, np.zeros_like(state))
    qkv[:, 9, 2 * width :] *= 100  # values under that key
    again = Chunked(qkv, gates, HEADS, state=state.copy())
    np.testing.assert_array_equal(np.delete(again.forward(), 9, 1), np.delete(chunked.out, 9, 1))


def test_heads_that_share_keys_are_as_if_each_had_its_own(rng):
    """The gradient of what is shared is the sum."""
    T, times, heads = 70, 3, Heads(2, 6, DK, DV)
    qkv, gates = inputs(rng, T, heads=heads)
    width, d_out = heads.Hk * DK, rng.normal(size=(B, T, heads.Hv * DV))
    shared = Chunked(qkv, gates, heads)
    q_k = np.repeat(qkv[..., : 2 * width].reshape(B, T, -1, DK), times, 2).reshape(B, T, -1)
    each = np.concatenate([q_k, qkv[..., 2 * width :]], -1)
    own = Chunked(each, gates, heads._replace(Hk=heads.Hv))
    np.testing.assert_allclose(shared.forward(), own.forward(), **EXACT)
    (d_shared, g_shared), (d_own, g_own) = (c.backward(d_out) for c in (shared, own))
    np.testing.assert_allclose(g_shared, g_own, **EXACT)
    summed = d_own[..., : 2 * width * times].reshape(B, T, 2 * heads.Hk, times, DK).sum(3)
    np.testing.assert_allclose(d_shared[..., : 2 * width], summed.reshape(B, T, -1), **EXACT)
    np.testing.assert_allclose(d_shared[..., 2 * width :], d_own[..., 2 * width * times :], **EXACT)


def test_no_bit_depends_on_other_documents(rng):
    T = 100
    qkv, gates = (x.astype(np.float32) for x in inputs(rng, T, 1))
    d_out = rng.normal(size=(1, T, HEADS.Hv * DV)).astype(np.float32)
    starts = starts_of((0, 30, 75), T)
    results = []
    for factor in (1, 3):
        others = np.ones(T, np.float32)
        others[:30], others[75:] = factor, factor
        qkv_, gates_, d_ = (
            x * others.reshape(1, T, *[1] * (x.ndim - 2)) for x in (qkv, gates, d_out)
        )
        chunked = Chunked(qkv_, gates_, HEADS, starts)
        results.append((chunked.forward(), *chunked.backward(d_)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one[:, 30:75], other[:, 30:75])
        assert (one[:, :30] != other[:, :30]).any()
