"""References of Mamba-2's state space against transformers' torch, and against each other."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

from llmq.ops.delta.ssd import Heads
from llmq.ref.delta import ssd as ref
from tests.delta import BEGINS, GATES, gates_of, starts_of
from tests.ssd import Chunked

B, DK, DV = 2, 16, 24
HEADS = Heads(2, 4, DK, DV)
# F64 on both sides: sums in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def inputs(rng, T: int, batch: int = B, heads: Heads = HEADS) -> tuple[np.ndarray, ...]:
    """qkv, gates and skips in F64."""
    decay = -rng.exponential(size=(batch, T, heads.Hv)) * 0.3
    qkv = rng.normal(size=(batch, T, heads.channels))
    gates = np.stack([decay, rng.exponential(size=(batch, T, heads.Hv))], axis=2)
    return qkv, gates, rng.normal(size=heads.Hv)


def split(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    """Queries, keys (B, T, Hk, DK) and values (B, T, Hv, DV)."""
    q, k, v = qkv.split([heads.Hk * DK, heads.Hk * DK, heads.Hv * DV], -1)
    return q.unflatten(-1, (-1, DK)), k.unflatten(-1, (-1, DK)), v.unflatten(-1, (-1, DV))


def by_definition(qkv, gates, skip, state, heads=HEADS, starts=None):
    """out and the last state, token by token."""
    q, k, v = split(qkv, heads)
    q, k = (x.repeat_interleave(heads.Hv // heads.Hk, 2) for x in (q, k))
    outs = []
    for t in range(qkv.shape[1]):
        state = state * gates[:, t, 0].exp()[..., None, None]
        if starts is not None and starts[0, t] == t:
            state = state * 0
        change = gates[:, t, 1, :, None] * v[:, t]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out = torch.einsum("bhdn,bhd->bhn", state, q[:, t]) + skip[:, None] * v[:, t]
        outs.append(out)
    return torch.stack(outs, 1).flatten(2), state


def assert_as_defined(given, state, d_out, d_state, *, heads=HEADS, starts=None) -> None:
    """Chunks have the results and gradients that autograd has of the definition. state, d_state:
    None beside documents, which begin without one."""
    zero = np.zeros((len(given[0]), heads.Hv, DK, DV))
    first = zero if state is None else state
    leaves = [torch.tensor(x, requires_grad=True) for x in (*given, first)]
    out, last = by_definition(*leaves, heads, starts)
    value = (out * torch.tensor(d_out)).sum()
    if d_state is not None:
        value = value + (last * torch.tensor(d_state)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, leaves)]
    own, d_own = (None if x is None else x.copy() for x in (state, d_state))
    chunked = Chunked(*given, heads, starts, own)
    np.testing.assert_allclose(chunked.forward(), out.detach().numpy(), **EXACT)
    got = chunked.backward(d_out, d_own)
    if state is not None:
        np.testing.assert_allclose(chunked.state, last.detach().numpy(), **EXACT)
        got = (*got, d_own)
    for one, other in zip(got, want, strict=state is not None):
        np.testing.assert_allclose(one, other, **EXACT)


def test_recurrence_and_chunks_equal_transformers(rng):
    """In F32, with 131 steps in different orders; transformers has 256 tokens in a chunk."""
    qkv, gates, skip = (x.astype(np.float32) for x in inputs(rng, 131))
    rate = -np.float32([0.1, 0.5, 1.0, 2.0])
    gates[:, :, 0] = gates[:, :, 1] * rate
    chunked = Chunked(qkv, gates, skip, HEADS, state=np.zeros((B, HEADS.Hv, DK, DV), np.float32))
    chunked.forward()
    out, state = np.empty_like(chunked.out), np.zeros_like(chunked.state)
    ref.ssd_recurrence(out, state, qkv, gates, skip, 131, HEADS.Hk, HEADS.Hv, dk=DK, dv=DV)
    q, k, v = split(torch.tensor(qkv), HEADS)
    want, last = granite.mamba2_chunk_scan(
        v, torch.tensor(gates[:, :, 1]), torch.tensor(rate), k, q, 256, D=torch.tensor(skip),
        return_final_states=True,
    )  # fmt: skip
    for got, got_state in ((out, state), (chunked.out, chunked.state)):
        np.testing.assert_allclose(got, want.flatten(2).numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got_state, last.mT.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "T, key_heads, value_heads",
    [(1, 2, 4), (63, 1, 3), (64, 2, 4), (65, 3, 3), (130, 1, 1), (193, 1, 4)],
)
def test_chunks_and_gradients_equal_the_recurrence_in_f64(rng, T, key_heads, value_heads):
    """A state is carried in, and a gradient comes back from the one behind."""
    heads = Heads(key_heads, value_heads, DK, DV)
    given = inputs(rng, T, heads=heads)
    state, d_state = rng.normal(size=(2, B, value_heads, DK, DV))
    d_out = rng.normal(size=(B, T, value_heads * DV))
    assert_as_defined(given, state, d_out, d_state, heads=heads)
    plain, steps = np.empty_like(d_out), state.copy()
    ref.ssd_recurrence(plain, steps, *given, T, key_heads, value_heads, dk=DK, dv=DV)
    out, last = by_definition(*map(torch.tensor, (*given, state)), heads)
    np.testing.assert_allclose(plain, out.numpy(), **EXACT)
    np.testing.assert_allclose(steps, last.numpy(), **EXACT)


@pytest.mark.parametrize("kind", GATES)
def test_gates_at_their_limits(rng, kind):
    T = 100
    qkv, _, skip = inputs(rng, T)
    gates = gates_of(kind, B, T, HEADS.Hv)
    state, d_state = rng.normal(size=(2, B, HEADS.Hv, DK, DV))
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    assert_as_defined((qkv, gates, skip), state, d_out, d_state)


@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_documents_are_as_if_they_were_alone(rng, begins):
    T = 150
    qkv, gates, skip = inputs(rng, T, 1)
    d_out = rng.normal(size=(1, T, HEADS.Hv * DV))
    starts = starts_of(begins, T)
    packed = Chunked(qkv, gates, skip, HEADS, starts)
    out, (d_qkv, d_gates, _) = packed.forward(), packed.backward(d_out)
    for first, stop in pairwise((*begins, T)):
        part = slice(first, stop)
        alone = Chunked(qkv[:, part], gates[:, part], skip, HEADS)
        want = (alone.forward(), *alone.backward(d_out[:, part])[:2])
        for one, other in zip((out, d_qkv, d_gates), want, strict=True):
            np.testing.assert_allclose(one[:, part], other, **EXACT)
    assert_as_defined((qkv, gates, skip), None, d_out, None, starts=starts)


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_a_text_in_two_parts_is_the_text(rng, cut):
    """States go on from part to part, and gradients of states back."""
    T = 140
    qkv, gates, skip = inputs(rng, T)
    state, d_state = rng.normal(size=(2, B, HEADS.Hv, DK, DV))
    d_out = rng.normal(size=(B, T, HEADS.Hv * DV))
    whole, d_whole = Chunked(qkv, gates, skip, HEADS, state=state.copy()), d_state.copy()
    whole.forward()
    whole.backward(d_out, d_whole)
    parts = [np.s_[:, :cut], np.s_[:, cut:]]
    made = []
    for part in parts:
        made.append(Chunked(qkv[part], gates[part], skip, HEADS, state=state))
        made[-1].forward()  # state is now that of the next part
    np.testing.assert_allclose(state, whole.state, **EXACT)
    for chunked, part in zip(made[::-1], parts[::-1], strict=True):
        chunked.backward(d_out[part], d_state)
    np.testing.assert_allclose(d_state, d_whole, **EXACT)
    for name in ("out", "d_qkv", "d_gates"):
        got = np.hstack([getattr(chunked, name) for chunked in made])
        np.testing.assert_allclose(got, getattr(whole, name), **EXACT)
