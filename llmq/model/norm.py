"""The model's normalization, RMSNorm or LayerNorm, behind one set of calls.

`key` names the weights: w[key], and for LayerNorm w[key + "_bias"].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from llmq.base.dtypes import F32
from llmq.base.operand import Target
from llmq.base.tensor import Accumulator, Tensor
from llmq.config.model import ModelConfig
from llmq.ops import layernorm, quantize, rmsnorm
from llmq.runtime.device import Device


class Stats(NamedTuple):
    """Per-row statistics that the backward pass needs, F32 (rows,). mean is LayerNorm's."""

    rstd: Tensor
    mean: Tensor | None


def alloc_stats(dev: Device, config: ModelConfig, name: str, rows: int) -> Stats:
    """Statistics of one normalization, kept from forward to backward."""
    rstd = dev.alloc(f"{name}_rstd", (rows,), F32, "Activations")
    if config.norm == "rmsnorm":
        return Stats(rstd, None)
    return Stats(rstd, dev.alloc(f"{name}_mean", (rows,), F32, "Activations"))


def forward(
    dev: Device,
    config: ModelConfig,
    w: Mapping[str, Tensor],
    key: str,
    to: Target,
    stats: Stats,
    x: Tensor,
) -> None:
    """to (rows, C) = norm(x)."""
    with _results(dev, to, x.shape) as results:
        if stats.mean is None:
            args = (x, w[key], config.norm_eps)
            rmsnorm.forward(dev, to.out, stats.rstd, *args, **results)
        else:
            args = (x, w[key], w[f"{key}_bias"], config.norm_eps)
            layernorm.forward(dev, to.out, stats.mean, stats.rstd, *args, **results)


def forward_residual(
    dev: Device,
    config: ModelConfig,
    w: Mapping[str, Tensor],
    key: str,
    residual_out: Tensor,
    to: Target,
    stats: Stats,
    residual: Tensor,
    branch: Tensor,
) -> None:
    """residual_out = residual + branch; to = norm(residual_out); all (rows, C)."""
    with _results(dev, to, residual.shape) as results:
        if stats.mean is None:
            args = (residual_out, to.out, stats.rstd, residual, branch, w[key], config.norm_eps)
            rmsnorm.forward_residual(dev, *args, **results)
        else:
            args = (residual_out, to.out, stats.mean, stats.rstd, residual, branch)
            args += (w[key], w[f"{key}_bias"], config.norm_eps)
            layernorm.forward_residual(dev, *args, **results)


def backward(
    dev: Device,
    w: Mapping[str, Tensor],
    g: Mapping[str, Accumulator],
    key: str,
    to: Target,
    d_out: Tensor,
    x: Tensor,
    stats: Stats,
    d_residual: Tensor | None,
) -> None:
    """to (rows, C) = the norm's input gradient + d_residual (may be to.out itself)."""
    with _results(dev, to, x.shape) as results:
        if stats.mean is None:
            args = (to.out, g[key], d_out, x, w[key], stats.rstd, d_residual)
            rmsnorm.backward(dev, *args, **results)
        else:
            args = (to.out, g[key], g[f"{key}_bias"], d_out, x, w[key])
            args += (stats.mean, stats.rstd, d_residual)
            layernorm.backward(dev, *args, **results)


@contextmanager
def _results(dev: Device, to: Target, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Where a kernel's further results go: it writes codes row by row, others are made of those."""
    if to.fp8 is None or to.fp8.transposed is None:
        yield {"abs_max": to.abs_max, "fp8": to.fp8}
        return
    codes, transposed = to.fp8[:2]
    made = (
        dev.scratch("norm_codes", shape, transposed.dtype) if codes is None else nullcontext(codes)
    )
    with made as codes:
        yield {"abs_max": to.abs_max, "fp8": to.fp8._replace(codes=codes, transposed=None)}
        quantize.transpose(dev, transposed, codes)
