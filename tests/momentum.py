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

from llmq.base.errors import ConfigError
from llmq.base.tensor import Tensor
from llmq.ref.common import step_scalars
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel
from llmq.state import rules
from llmq.state.rules.rule import Moment, Part, UpdateRule

NEEDS = ("llmq/state/rules/__init__.py", "llmq/ref/momentum.py", "llmq/cu/momentum.cu")
"""The table of rules, and the kernel with its reference: the launcher is in the rule's file."""

MOMENTUM = Kernel(
    "momentum.cu",
    "momentum",
    args="inout P* param, bf16*? work, const G* grad, inout M* momentum, const i32* scalars, "
    "f32 decay, i32 whole, i64 n",
)


def momentum(
    param: np.ndarray,
    work: np.ndarray | None,
    grad: np.ndarray,
    momentum: np.ndarray,
    scalars: np.ndarray,
    decay: float,
    whole: int,
    n: int,
) -> None:
    """The reference of the kernel. whole: the tensors are one matrix."""
    s = step_scalars(scalars)
    if s["skip_update"]:
        return
    real = np.float32
    made = momentum.astype(real) * real(decay) + grad.astype(real) * real(s["grad_scale"])
    size = np.sqrt(np.mean(np.square(made))) + real(1e-6) if whole else real(1)
    momentum[...] = made
    param[...] = param.astype(real) - real(s["lr"]) * made / size
    if work is not None:
        work[...] = param


class Momentum(UpdateRule):
    """One moment, and whole matrices."""

    moments = (
        Moment(
            name="momentum", group="momentum", category="Momentum", dtype="opt_m_dtype",
            offload="offload_opt_m",
        ),
    )  # fmt: skip
    unit = "matrix"

    def __init__(self, options):
        super().__init__(options)
        if options.opt_m_dtype == "e4m3":
            raise ConfigError("--opt-m-dtype e4m3: momentum has no scales")

    def prepare(self, scalars: np.void, step: int) -> None:
        """It reads nothing of its own."""

    def update(self, dev: Device, part: Part, scalars: Tensor) -> None:
        """A launch for each matrix, or one for what has none."""
        n = part.master.size
        pieces = [(first, first + rows * columns) for first, rows, columns in part.matrices]
        if not part.slab.whole_matrices:
            pieces = [(0, n)]
        for start, stop in pieces:
            tensors = (part.master, part.work, part.grad, part.moments["momentum"])
            here = [tensor and tensor.rows(start, stop) for tensor in tensors]
            args = (*here, scalars, self.options.beta_1, len(part.matrices) > 0, stop - start)
            dev.launch(MOMENTUM, 1, 128, args)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the rule of all runs, as a line of the table would."""
    reference = ModuleType("llmq.ref.momentum")
    reference.momentum = momentum
    monkeypatch.setitem(sys.modules, reference.__name__, reference)
    monkeypatch.setitem(rules.RULES, "adamw", Momentum)
