"""Adapters that begin as a part of the model (PiSSA): its matrices are split, and come together.

    W = s * B0 @ A0 + R      s: the scaling; s * B0 @ A0 has the principal singular values of W

Trained are A and B, which begin as A0 and B0, beside R, which stays in the format of the base. To
the model W itself the difference s * (B @ A - B0 @ A0) is added by adapters of twice the rank:

    A below A0               s * [B, -B0] @ [A; A0]
    B beside -B0

A0 and B0 are rounded to the format of the model's weights, so that what products read is what R
lacks. They are computed once, by one process, and kept: in host memory, and in checkpoints. Source
of the method: Meng et al., 2024 (arXiv 2404.02948).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.options.adapters import Adapted, Adapters, all_adapted
from llmq.state.params import Param, weight_table

EXACT = 256  # rows or columns up to which all singular values are computed
OVERSAMPLING = 8  # dimensions of the subspace that are not kept
ITERATIONS = 16  # of the subspace, as PEFT recommends them: then little is missing
PIECE = 1 << 22  # elements of a matrix that are in F64 at a time

Read = Callable[[Param], np.ndarray]
"""A parameter in its shape, F32 or BF16."""


def principal(w: np.ndarray, rank: int, scale: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A0 (rank, columns) and B0 (rows, rank) of a matrix w (rows, columns), F32: scale * B0 @ A0 is
    w with its largest `rank` singular values alone, of which both have equal parts. For large
    matrices approximate, by subspace iteration from random numbers of this seed."""
    if min(w.shape) <= max(EXACT, 2 * (rank + OVERSAMPLING)):
        u, values, vt = np.linalg.svd(w, full_matrices=False)
    else:
        u, values, vt = _leading(w, rank + OVERSAMPLING, seed)
    root = np.sqrt(values[:rank] / np.float32(scale))
    return root[:, None] * vt[:rank], u[:, :rank] * root


def _leading(w: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, ...]:
    """About so many singular vectors and values, the largest first."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(w @ rng.standard_normal((w.shape[1], count), np.float32))[0]
    for _ in range(ITERATIONS):
        basis = np.linalg.qr(w @ np.linalg.qr(w.T @ basis)[0])[0]
    u, values, vt = np.linalg.svd(basis.T @ w, full_matrices=False)
    return basis @ u, values, vt


class _Matrix(NamedTuple):
    """A matrix of the model that is split. a, b: the parameters of its adapters."""

    adapted: Adapted
    weight: Param
    a: Param
    b: Param


def _matrices(model: ModelConfig, adapters: Adapters) -> list[_Matrix]:
    """Those that have adapters, in the order of the model."""
    adapted = {(block, m.key): m for block, m in all_adapted(model, adapters)}
    table = weight_table(model, 1, adapters)
    params = {(param.block, param.key): param for slab in table for param in slab.params}
    return [
        _Matrix(adapted[block, key], weight, params[block, f"{key}_a"], params[block, f"{key}_b"])
        for (block, key), weight in params.items()
        if (block, f"{key}_a") in params
    ]


class Split:
    """A model as adapters of its matrices, and what these leave. matrices: those that are split.
    initial_adapters: A0 and B0 of all, by the names of the adapters' parameters, in their
    shapes."""

    def __init__(
        self,
        model: ModelConfig,
        adapters: Adapters,
        initial_adapters: Mapping[str, np.ndarray] | None = None,
    ):
        self._rank, self._scale = adapters.rank, adapters.of("")[1]
        self._of = {each.weight.name: each for each in _matrices(model, adapters)}
        self.matrices = [each.weight for each in self._of.values()]
        self.initial_adapters = dict(initial_adapters or {})

    def begin(self, weight: Param, values: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
        """A0 and B0 of one of the matrices, by name, rounded to a format.

        values: of the matrix, in its shape.
        """
        matrix, values = self._of[weight.name], weight.by_row(values.astype(np.float32))
        a, b = np.zeros(matrix.a.shape, dtype), np.zeros(matrix.b.shape, dtype)
        done = 0
        for number, (start, stop) in enumerate(matrix.adapted.spans):
            found = principal(values[start:stop], self._rank, self._scale, weight.index)
            a[number * self._rank : (number + 1) * self._rank] = found[0]
            b[done : done + stop - start] = found[1]
            done += stop - start
        return {matrix.a.name: a, matrix.b.name: b}

    def rest(self, param: Param, values: np.ndarray) -> np.ndarray:
        """The rest of a parameter of the model, in its shape: F32 if it is split, else as it is.

        values: of the parameter.
        """
        return self.rest_of(param, 0, values.reshape(-1)).reshape(values.shape)

    def rest_of(self, param: Param, first: int, values: np.ndarray) -> np.ndarray:
        """As `rest`, of the elements from `first` on, flat.

        Products are summed in F64, so that it does not matter which elements come together.
        """
        matrix = self._of.get(param.name)
        if matrix is None:
            return values
        out, columns = values.astype(np.float32), param.columns
        step, last = max(PIECE // columns, 1), first + values.size
        for row in range(first // columns, -(-last // columns), step):
            end = min(row + step, param.rows)
            low, high = max(first, row * columns), min(last, end * columns)
            taken = self._taken(matrix, row, end).reshape(-1)
            out[low - first : high - first] -= taken[low - row * columns : high - row * columns]
        return out

    def _taken(self, matrix: _Matrix, first: int, last: int) -> np.ndarray:
        """F64 (last - first, columns): what the adapters have of these rows."""
        a, b = (self.initial_adapters[param.name] for param in (matrix.a, matrix.b))
        taken, done = np.zeros((last - first, a.shape[1])), 0
        for number, (start, stop) in enumerate(matrix.adapted.spans):
            low, high = max(start, first), min(stop, last)
            if low < high:
                of_b = b[done + low - start : done + high - start].astype(np.float64)
                of_a = a[number * self._rank : (number + 1) * self._rank].astype(np.float64)
                taken[low - first : high - first] = self._scale * of_b @ of_a
            done += stop - start
        return taken


# ------------------------------------------------------------------------------------------------
# Adapters of the model itself


def doubled(
    model: ModelConfig, adapters: Adapters, read: Read, initial_adapters: Read
) -> tuple[Adapters, Read]:
    """Adapters of twice the rank, whose sum with the model is that of these with the rest of it.

    read, initial_adapters: of the adapters' parameters what they are now, and what they began as.
    """
    twice = replace(
        adapters, rank=2 * adapters.rank, alpha=adapters.alpha * (2**0.5 if adapters.rs else 2)
    )
    own = {each.a.name: each for each in _matrices(model, adapters)}
    params = {p.name: p for slab in weight_table(model, 1, adapters) for p in slab.params}

    def read_twice(param: Param) -> np.ndarray:
        now = read(params[param.name])
        if not param.of_adapter:
            return now
        before = initial_adapters(params[param.name]).astype(now.dtype)
        if param.name not in own:
            return np.concatenate([now, -before], axis=1)
        return _interleaved(param, adapters.rank, len(own[param.name].adapted.spans), now, before)

    return twice, read_twice


def _interleaved(
    param: Param, rank: int, count: int, now: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """Interleave, for each of the `count` adapters, A and A0 below it."""
    out = np.zeros(param.shape, now.dtype)
    for number in range(count):
        own, at = slice(number * rank, (number + 1) * rank), 2 * number * rank
        out[at : at + rank], out[at + rank : at + 2 * rank] = now[own], before[own]
    return out


def halved(
    model: ModelConfig, adapters: Adapters, read: Read
) -> tuple[Adapters, Read, dict[str, np.ndarray]]:
    """The adapters that `doubled` made these from, their reader, and what they began as, by
    name."""
    half = replace(
        adapters, rank=adapters.rank // 2, alpha=adapters.alpha / (2**0.5 if adapters.rs else 2)
    )
    params = {p.name: p for slab in weight_table(model, 1, adapters) for p in slab.params}
    rank, own = half.rank, {each.a.name: each for each in _matrices(model, half)}

    def part(name: str, which: int) -> np.ndarray:
        values = read(params[name])
        if name not in own:  # B, or -B0
            columns = values[:, which * rank : (which + 1) * rank]
            return -columns if which else columns
        out = np.zeros(own[name].a.shape, values.dtype)
        for number in range(len(own[name].adapted.spans)):
            at = (2 * number + which) * rank
            out[number * rank : (number + 1) * rank] = values[at : at + rank]
        return out

    def read_now(param: Param) -> np.ndarray:
        return part(param.name, 0) if param.of_adapter else read(params[param.name])

    of_adapters = [name for name, param in params.items() if param.of_adapter]
    return half, read_now, {name: part(name, 1) for name in of_adapters}
