"""The kernels of Mamba-2's state space in order, as references."""

from __future__ import annotations

import numpy as np

from llmq.ops.delta.ssd import CHUNK, Heads
from llmq.ref.delta import ssd as ref


class Chunked:
    """state: carried in, and out after `forward`."""

    def __init__(self, qkv, gates, skip, heads: Heads, starts=None, state=None):
        batch, T, _ = qkv.shape
        Hk, Hv, DK, DV = heads
        chunks = -(-T // CHUNK)
        self.args, self.starts, self.state = (qkv, gates, skip), starts, state
        self.sizes, self.carried = (T, Hk, Hv), int(state is not None)
        self.dims = {"dk": DK, "dv": DV}

        def new(*shape):
            return np.full((batch, *shape), np.nan, qkv.dtype)

        self.scores, self.factors = new(Hv, chunks, 64, 64), new(Hv, chunks, 2, 64)
        self.states, self.d_states = (new(Hv, chunks, DV, DK) for _ in range(2))
        self.out, self.d_qkv, self.d_gates = new(T, Hv * DV), *map(np.empty_like, self.args[:2])
        self.partial = new(chunks, Hv)

    def forward(self) -> np.ndarray:
        """out."""
        qkv, made = self.args[0], (self.scores, self.factors)
        where = (*self.args, self.starts, *self.sizes, self.carried)
        ref.ssd_prepare(*made, *where, **self.dims)
        last = None if self.state is None else self.state.copy()
        ref.ssd_scan(self.out, last, qkv, *made, *self.sizes, **self.dims)
        ref.ssd_states(self.states, self.state, qkv, self.factors, *self.sizes, **self.dims)
        if last is not None:
            np.testing.assert_array_equal(last, self.state)
        return self.out

    def backward(self, d_out, d_state=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """d_qkv, d_gates and d_skip, after `forward`; d_state: of the state behind, then of that in
        front."""
        qkv, gates, _ = self.args
        known = (d_out, qkv, self.scores, self.factors, *self.sizes)
        ref.ssd_scan_backward(self.d_qkv, self.d_states, d_state, *known, **self.dims)
        (B, T, columns), (_, Hk, Hv), keys = (
            qkv.shape,
            self.sizes,
            2 * self.sizes[1] * self.dims["dk"],
        )
        d_keys = np.full((-(-Hv // Hk // ref.HEADS), B, T, keys), np.nan, qkv.dtype)
        ref.ssd_gradients(
            d_keys, self.d_gates, self.partial, d_out, self.states, self.d_states, qkv, gates,
            self.starts, *self.sizes, self.carried, **self.dims,
        )  # fmt: skip
        ref.ssd_sum(self.d_qkv, d_keys, B * T, len(d_keys), keys, columns, **self.dims)
        return self.d_qkv, self.d_gates, self.partial.sum((0, 1))
