"""References of the gated delta rule against transformers' torch, and against each other."""

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from llmq.ref.delta import delta_rule as ref

B, HK, HV, DK, DV = 2, 2, 4, 16, 24
SIZES = {"dk": DK, "dv": DV}


def inputs(rng, T: int, batch: int = B) -> tuple[np.ndarray, np.ndarray]:
    """qkv and gates in F64."""
    decay = -rng.exponential(size=(batch, T, HV)) * 0.3
    qkv = rng.normal(size=(batch, T, 2 * HK * DK + HV * DV))
    return qkv, np.stack([decay, rng.uniform(size=(batch, T, HV))], axis=2)


def of_torch(rule, qkv: torch.Tensor, gates: torch.Tensor, state: torch.Tensor | None = None):
    q, k, v = qkv.split([HK * DK, HK * DK, HV * DV], -1)
    q, k, v = (x.unflatten(-1, (-1, d)) for x, d in ((q, DK), (k, DK), (v, DV)))
    how = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return rule(q, k, v, g=gates[:, :, 0], beta=gates[:, :, 1], **how)


class Chunked:
    """The kernels in order. state: carried in, and out after `forward`."""

    def __init__(self, qkv, gates, starts=None, state=None):
        batch, T, _ = qkv.shape
        chunks = -(-T // ref.CHUNK)
        self.args, self.starts, self.state = (qkv, gates), starts, state
        self.sizes, self.carried = (T, HK, HV), int(state is not None)

        def new(*shape):
            return np.full(shape, np.nan, qkv.dtype)

        self.inverse, self.scores = (new(batch, HV, chunks, 64, 64) for _ in range(2))
        self.states, self.d_states = (new(batch, HV, chunks, DV, DK) for _ in range(2))
        self.u, self.changes, self.d_changes = (new(batch, HV, chunks, 64, DV) for _ in range(3))
        self.w, self.factors = new(batch, HV, chunks, 64, DK), new(batch, HV, chunks, 6, 64)
        self.out, self.d_qkv, self.d_gates = new(batch, T, HV * DV), *map(np.empty_like, self.args)

    def forward(self):
        made = (self.u, self.w, self.inverse, self.scores, self.factors)
        where = (*self.args, self.starts, *self.sizes, self.carried)
        ref.delta_rule_prepare(*made, *where, **SIZES)
        last = None if self.state is None else self.state.copy()
        known = (self.args[0], self.u, self.w)
        how = (self.factors, *self.sizes)
        ref.delta_rule_scan(self.out, last, *known, self.scores, *how, **SIZES)
        ref.delta_rule_states(self.states, self.changes, self.state, *known, *how, **SIZES)
        if last is not None:
            np.testing.assert_array_equal(last, self.state)
        return self.out

    def backward(self, d_out, d_state=None):
        qkv, gates = self.args
        known = (d_out, qkv, self.w, self.scores, self.factors, *self.sizes)
        ref.delta_rule_scan_backward(self.d_changes, self.d_states, d_state, *known, **SIZES)
        found = (self.changes, self.d_changes, self.states, self.d_states)
        ref.delta_rule_gradients(
            self.d_qkv, self.d_gates, d_out, *found, self.inverse, self.factors, qkv, gates,
            self.starts, *self.sizes, self.carried, **SIZES,
        )  # fmt: skip
        return self.d_qkv, self.d_gates


def test_recurrence_and_chunks_equal_transformers(rng):
    qkv, gates = (x.astype(np.float32) for x in inputs(rng, 131))
    tensors = [torch.tensor(x) for x in (qkv, gates)]
    rules = (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule)
    chunked = Chunked(qkv, gates, state=np.zeros((B, HV, DK, DV), np.float32))
    chunked.forward()
    out, state = np.empty_like(chunked.out), np.zeros_like(chunked.state)
    ref.delta_rule_recurrence(out, state, qkv, gates, 131, HK, HV, **SIZES)
    for rule in rules:
        want, want_state = of_torch(rule, *tensors)
        want = want.flatten(2).numpy()
        for got, got_state in ((out, state), (chunked.out, chunked.state)):
            # F32 on all sides, 131 steps in different orders.
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got_state, want_state.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, 64, 130])
def test_chunks_and_gradients_equal_the_recurrence_in_f64(rng, T):
    """A state is carried in, and a gradient comes back from the one behind."""
    qkv, gates = inputs(rng, T)
    state, d_state = rng.normal(size=(2, B, HV, DK, DV))
    d_out = rng.normal(size=(B, T, HV * DV))
    leaves = [torch.tensor(x, requires_grad=True) for x in (qkv, gates, state)]

    def recurrence(qkv, gates, state):
        """It computes what transformers' does, which does so in F32."""
        q, k, v = qkv.split([HK * DK, HK * DK, HV * DV], -1)
        q, k = (x.unflatten(-1, (HK, DK)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + ref.EPS).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HV // HK, 2) for x in (q, k))
        v, outs = v.unflatten(-1, (HV, DV)), []
        for t in range(T):
            state = state * gates[:, t, 0].exp()[..., None, None]
            rest = v[:, t] - torch.einsum("bhdn,bhd->bhn", state, k[:, t])
            change = gates[:, t, 1, :, None] * rest
            state = state + k[:, t, :, :, None] * change[:, :, None]
            outs.append(torch.einsum("bhdn,bhd->bhn", state, q[:, t]) * DK**-0.5)
        return torch.stack(outs, 1).flatten(2), state

    out, last = recurrence(*leaves)
    value = (out * torch.tensor(d_out)).sum() + (last * torch.tensor(d_state)).sum()
    want = [g.numpy() for g in torch.autograd.grad(value, leaves)]
    chunked = Chunked(qkv, gates, state=state.copy())
    chunked.forward()
    # F64 on both sides: sums in another order.
    tolerance = {"rtol": 1e-9, "atol": 1e-10}
    np.testing.assert_allclose(chunked.out, out.detach().numpy(), **tolerance)
    np.testing.assert_allclose(chunked.state, last.detach().numpy(), **tolerance)
    got = [*chunked.backward(d_out, d_state), d_state]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)
    plain, steps = np.empty_like(chunked.out), state.copy()
    ref.delta_rule_recurrence(plain, steps, qkv, gates, T, HK, HV, **SIZES)
    np.testing.assert_allclose(plain, out.detach().numpy(), **tolerance)


def test_documents_are_as_if_they_were_alone(rng):
    T, begins = 150, (0, 1, 2, 60, 64, 65, 140, 149)
    qkv, gates = inputs(rng, T, 1)
    d_out = rng.normal(size=(1, T, HV * DV))
    starts = np.array([[max(b for b in begins if b <= t) for t in range(T)]], np.int32)
    packed = Chunked(qkv, gates, starts)
    got = (packed.forward(), *packed.backward(d_out))
    for first, stop in zip(begins, (*begins[1:], T), strict=True):
        part = slice(first, stop)
        alone = Chunked(qkv[:, part], gates[:, part])
        want = (alone.forward(), *alone.backward(d_out[:, part]))
        for one, other in zip(got, want, strict=True):
            # F64: the chunks of a document lie elsewhere.
            np.testing.assert_allclose(one[:, part], other, rtol=1e-9, atol=1e-10)


def test_no_bit_depends_on_other_documents(rng):
    T = 100
    qkv, gates = (x.astype(np.float32) for x in inputs(rng, T, 1))
    d_out = rng.normal(size=(1, T, HV * DV)).astype(np.float32)
    starts = np.where(np.arange(T) < 30, 0, np.where(np.arange(T) < 75, 30, 75))[None]
    results = []
    for factor in (1, 3):
        others = np.ones(T, np.float32)
        others[:30], others[75:] = factor, factor
        qkv_, gates_, d_ = (
            x * others.reshape(1, T, *[1] * (x.ndim - 2)) for x in (qkv, gates, d_out)
        )
        chunked = Chunked(qkv_, gates_, starts.astype(np.int32))
        results.append((chunked.forward(), *chunked.backward(d_)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one[:, 30:75], other[:, 30:75])
        assert (one[:, :30] != other[:, :30]).any()
