"""An update rule that llmq does not have: SGD with momentum, of matrices scaled to one norm.

A matrix moves by its momentum over the root mean square of all of it, so that a rank that had a
part of the matrix only would move it by something else. A parameter that is no whole matrix moves
by its momentum. NEEDS says what such a rule needs beside this file.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.base.errors import ConfigError
from llmq.base.tensor import Tensor
from llmq.ref.common import step_scalars
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel
from llmq.state import rules
from llmq.state.params import Slab
from llmq.state.rules.rule import OptimizerState, ShardSlice, UpdateRule

NEEDS = (
    "llmq/state/rules/__init__.py",
    "llmq/ref/update/momentum.py",
    "llmq/cu/update/momentum.cu",
)
"""The table of rules, and the kernel with its reference: the launcher is in the rule's file."""

MOMENTUM, SCALED, MOVED = (
    Kernel("update/momentum.cu", name, args=args)
    for name, args in (
        ("momentum", "out f32[n] change, G[n] grad, inout M[n] state, i32[16] scalars, f32 decay"),
        ("scaled", "out f32[*n] out, f32[*n] matrix"),
        ("moved", "inout P[n] param, out bf16[n]? work, f32[n] change, i32[16] scalars"),
    )
)


def momentum(change, grad, state, scalars, decay) -> None:
    """state = decay * state + grad; change = state."""
    s = step_scalars(scalars)
    change[...] = 0
    if not s["skip_update"]:
        made = state.astype(np.float32) * np.float32(decay)
        change[...] = made + grad.astype(np.float32) * s["grad_scale"]
        state[...] = change


def scaled(out, matrix) -> None:
    """The matrix over its root mean square."""
    out[...] = matrix / (np.sqrt(np.mean(np.square(matrix))) + np.float32(1e-6))


def moved(param, work, change, scalars) -> None:
    """The parameter minus the learning rate times the change."""
    s = step_scalars(scalars)
    if not s["skip_update"]:
        param[...] = param.astype(np.float32) - s["lr"] * change
        if work is not None:
            work[...] = param


class Momentum(UpdateRule):
    """One moment, and whole matrices."""

    moments = (
        OptimizerState(
            name="momentum", group="momentum", category="Momentum", dtype="opt_m_dtype",
            offload="offload_opt_m",
        ),
    )  # fmt: skip
    of_change = F32

    def __init__(self, options):
        super().__init__(options)
        if options.opt_m_dtype == "e4m3":
            raise ConfigError("--opt-m-dtype e4m3: momentum has no scales")

    @classmethod
    def by_matrix(cls, slab: Slab) -> bool:
        """All matrices of blocks and of adapters."""
        return all(param.kind == "matrix" for param in slab.params)

    def prepare(self, scalars: np.void, step: int) -> None:
        """Momentum prepares nothing before a step."""

    def update(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """Two launches over what has no matrices, or only such as change by element."""
        with dev.scratch("change", part.master.shape, F32) as change:
            self.propose(dev, part._replace(change=change), scalars)
            self.apply(dev, part._replace(change=change), scalars)

    def propose(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """The momentum."""
        tensors = (part.change, part.grad, part.moments["momentum"], scalars)
        dev.launch(MOMENTUM, 1, 128, (*tensors, self.options.beta_1))

    def transform(self, dev: Device, matrices, scalars: Tensor, kind: str) -> None:
        """Scaled to one size."""
        for one in (matrix for each in matrices for matrix in each.apart()):
            dev.launch(SCALED, 1, 128, (one.change, one.proposed))

    def apply(self, dev: Device, part: ShardSlice, scalars: Tensor) -> None:
        """A step of this length."""
        dev.launch(MOVED, 1, 128, (part.master, part.work, part.change, scalars))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the rule of all runs, as a line of the table would."""
    reference = ModuleType("llmq.ref.update.momentum")
    reference.momentum, reference.scaled, reference.moved = momentum, scaled, moved
    monkeypatch.setitem(sys.modules, reference.__name__, reference)
    monkeypatch.setitem(rules.RULES, "adamw", Momentum)
