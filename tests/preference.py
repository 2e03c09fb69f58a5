"""A loss that llmq does not have: of two neighbouring sequences the first is to be preferred (DPO).

The weight of a row depends on the losses of both sequences, and is negative in the second one. It
reads what another model thinks of each token, and has statistics of its own. NEEDS says what such a
loss needs beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

import numpy as np
import pytest

from llmq.base.dtypes import F32, STATS
from llmq.base.step_inputs import ARRAYS, Input
from llmq.base.tensor import Tensor
from llmq.model import losses
from llmq.model.losses.loss import Loss, Rows
from llmq.runtime.kernel import Kernel

NEEDS = (
    "llmq/options/loss_params.py",
    "llmq/ref/loss/preference.py",
    "llmq/cu/loss/preference.cu",
)
"""The table of parameters, and the kernels with their references; launchers are in this file."""
BETA = 0.5
SUMS = ("tokens", "margin", "preferred")

_OF_ROWS = "i32[B,T] targets, f32[B,T] losses, f32[B,T] reference, i32 B, i32 T, f32 beta"
WEIGHTS = Kernel(
    "loss/preference.cu", "preference_weights", args=f"out f32[B,T] weights, {_OF_ROWS}"
)
ADD = Kernel("loss/preference.cu", "preference_stats", args=f"inout f64[*stats] stats, {_OF_ROWS}")


def margins(
    targets: np.ndarray, losses: np.ndarray, reference: np.ndarray, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """The margin of each pair: by how much the first is more likely than before; and whether it
    counts.

    targets: (B,T). losses: of this model. reference: log-probabilities by another one.
    """
    counted = targets >= 0
    gained = ((losses + reference) * -counted.astype(np.float32)).sum(axis=1).reshape(-1, 2)
    there = counted.any(axis=1).reshape(-1, 2).all(axis=1)
    return beta * (gained[:, 0] - gained[:, 1]), there


def preference_weights(
    weights: np.ndarray,
    targets: np.ndarray,
    losses: np.ndarray,
    reference: np.ndarray,
    B: int,
    T: int,
    beta: float,
) -> None:
    """The reference of the kernel: d -log(sigmoid(margin)) / d loss."""
    margin, there = margins(targets, losses, reference, beta)
    slope = np.float32(beta) / (1 + np.exp(margin)) * there
    weights[...] = np.stack([slope, -slope], axis=1).reshape(-1, 1)


def preference_stats(
    stats: np.ndarray,
    targets: np.ndarray,
    losses: np.ndarray,
    reference: np.ndarray,
    B: int,
    T: int,
    beta: float,
) -> None:
    """The reference of the kernel."""
    margin, there = margins(targets, losses, reference, beta)
    margin = margin[there].astype(np.float64)
    named = dict.fromkeys((*STATS, *SUMS), 0.0)
    named |= {"loss": np.logaddexp(0, -margin).sum(), "count": there.sum()}
    named |= {"tokens": (targets >= 0).sum(), "margin": margin.sum()}
    stats += list((named | {"preferred": (margin > 0).sum()}).values())


class Preference(Loss):
    """Pairs are sequences 0 and 1, 2 and 3, and so on, of a micro-batch."""

    sums = SUMS
    ahead = True
    largest = BETA
    validated = ("preferred",)

    @classmethod
    def inputs(cls, options) -> tuple[Input, ...]:
        """A float of each token, which `.npy` files beside token files have."""
        return (Input("reference", sidecar=ARRAYS),)

    def __init__(self, ctx):
        super().__init__(ctx)
        shape = ctx.batch.batch_size, ctx.batch.local_seq_len
        self._weights = ctx.dev.alloc("weights", shape, F32, "Activations")

    def weights(self, rows: Rows) -> Tensor:
        """One launch."""
        self._launch(WEIGHTS, self._weights, rows)
        return self._weights

    def add(self, stats: Tensor, rows: Rows) -> None:
        """One launch."""
        self._launch(ADD, stats, rows)

    def _launch(self, kernel: Kernel, out: Tensor, rows: Rows) -> None:
        of_rows = (rows.targets, rows.losses, self.named["reference"], *rows.targets.shape, BETA)
        self.dev.launch(kernel, 1, 1024, (out, *of_rows))

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over pairs."""
        pairs = sums["count"] or float("nan")
        return {name: sums[name] / pairs for name in ("margin", "preferred")}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the loss of all runs, as a line of the table would."""
    reference = ModuleType("llmq.ref.loss.preference")
    reference.preference_weights, reference.preference_stats = preference_weights, preference_stats
    monkeypatch.setitem(sys.modules, reference.__name__, reference)
    monkeypatch.setitem(losses.LOSSES, "ce", Preference)
