"""The gated delta rule in F64: its reference's kernels in order, and inputs at their limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.ops.delta.delta_rule import Heads
from llmq.ref.delta import delta_rule as ref
from llmq.ref.delta.delta_rule import CHUNK

# By kind, values of decays and of betas that tokens have in turn.
GATES = {
    "keeps_all": ((0.0, -0.0), (0.5, 0.25)),
    "forgets_all": ((-50.0, -745.0, -1e4), (0.3, 0.7)),
    "now_and_then": ((-0.1, -0.2, -1e3, -0.3, -0.1), (0.9, 0.1, 0.4)),
    "beyond_all_digits": ((-1e30, -0.3, -np.inf, -0.2, -0.5, -0.4, -0.1), (0.9, 0.1)),
    "writes_nothing": ((-0.1, -0.2), (0.0,)),
    "writes_now_and_then": ((-0.1, 0.0), (0.0, 1.0, 0.0, 0.0, 1e-30)),
    "overwrites": ((0.0,), (1.0,)),
}

# First tokens of documents: within tiles of 16, at borders of tiles and chunks, one beside.
BEGINS = {
    "within_tiles": (0, 1, 2, 60, 69, 140, 149),
    "at_borders": (0, 16, 32, 48, 64, 128),
    "beside_borders": (0, 15, 17, 31, 33, 63, 65, 127, 129),
    "one_token_each": tuple(range(150)),
    "over_chunks": (0, 10),
}


def gates_of(kind: str, B: int, T: int, value_heads: int) -> np.ndarray:
    """F64 (B, T, 2, Hv) of a kind of GATES."""
    by_token = [np.resize(np.array(values), (value_heads, T)).T for values in GATES[kind]]
    return np.broadcast_to(np.stack(by_token, 1), (B, T, 2, value_heads)).copy()


def starts_of(begins: tuple[int, ...], T: int) -> np.ndarray:
    """I32 (1, T): the first position of each token's document, which begin at these tokens."""
    return np.array([[max(b for b in begins if b <= t) for t in range(T)]], np.int32)


class Chunked:
    """The reference's kernels in order. state: carried in, and out after `forward`."""

    def __init__(self, qkv, gates, heads: Heads, starts=None, state=None):
        batch, T, _ = qkv.shape
        Hk, Hv, DK, DV = heads
        chunks = -(-T // CHUNK)
        self.args, self.starts, self.state = (qkv, gates), starts, state
        self.sizes, self.carried = (T, Hk, Hv), int(state is not None)
        self.dims = {"dk": DK, "dv": DV}

        def new(*shape):
            return np.full((batch, *shape), np.nan, qkv.dtype)

        self.inverse, self.scores = (new(Hv, chunks, 64, 64) for _ in range(2))
        self.states, self.d_states = (new(Hv, chunks, DV, DK) for _ in range(2))
        self.u, self.changes, self.d_changes = (new(Hv, chunks, 64, DV) for _ in range(3))
        self.w, self.factors = new(Hv, chunks, 64, DK), new(Hv, chunks, 6, 64)
        self.out, self.d_qkv, self.d_gates = new(T, Hv * DV), *map(np.empty_like, self.args)

    def forward(self) -> np.ndarray:
        """out."""
        made = (self.u, self.w, self.inverse, self.scores, self.factors)
        where = (*self.args, self.starts, *self.sizes, self.carried)
        ref.delta_rule_prepare(*made, *where, **self.dims)
        last = None if self.state is None else self.state.copy()
        known, others = (self.args[0], self.u, self.w), (self.factors, *self.sizes)
        ref.delta_rule_scan(self.out, last, *known, self.scores, *others, **self.dims)
        found = (self.states, self.changes, self.state)
        ref.delta_rule_states(*found, *known, *others, **self.dims)
        if last is not None:
            np.testing.assert_array_equal(last, self.state)
        return self.out

    def backward(self, d_out, d_state=None) -> tuple[np.ndarray, np.ndarray]:
        """d_qkv and d_gates, after `forward`; d_state: of the state behind, then of that in
        front."""
        qkv, gates = self.args
        known = (d_out, qkv, self.w, self.scores, self.factors, *self.sizes)
        ref.delta_rule_scan_backward(self.d_changes, self.d_states, d_state, *known, **self.dims)
        found = (self.changes, self.d_changes, self.states, self.d_states)
        ref.delta_rule_gradients(
            self.d_qkv, self.d_gates, d_out, *found, self.inverse, self.factors, qkv, gates,
            self.starts, *self.sizes, self.carried, **self.dims,
        )  # fmt: skip
        return self.d_qkv, self.d_gates


def assert_documents_apart(run: Callable[[dict], dict], arrays: dict) -> None:
    """Tokens [20, 67), which are a document, have the same bits in a second run, and beside other
    values of all other tokens. run: results by name, of arrays by name."""
    results = []
    for factor in (1, 1, 4):
        changed = {name: arrays[name].copy() for name in ("qkv", "gates", "d_out")}
        for array in changed.values():
            array[:, :20] *= factor
            array[:, 67:] *= factor
        results.append(run(arrays | changed))
    for name in ("out", "d_qkv", "d_gates"):
        first, again, other = (result[name] for result in results)
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(first[:, 20:67], other[:, 20:67])
        assert (first[:, :20] != other[:, :20]).any()
