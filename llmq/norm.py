"""The model's normalization, RMSNorm or LayerNorm, behind one set of calls.

`key` names the weights: w[key], and for LayerNorm w[key + "_bias"].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from llmq.config import ModelConfig
from llmq.dtypes import F32
from llmq.ops import layernorm, rmsnorm
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor


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
    out: Tensor,
    stats: Stats,
    x: Tensor,
) -> None:
    """out (rows, C) = norm(x)."""
    if stats.mean is None:
        rmsnorm.forward(dev, out, stats.rstd, x, w[key], config.norm_eps)
    else:
        args = (x, w[key], w[f"{key}_bias"], config.norm_eps)
        layernorm.forward(dev, out, stats.mean, stats.rstd, *args)


def forward_residual(
    dev: Device,
    config: ModelConfig,
    w: Mapping[str, Tensor],
    key: str,
    residual_out: Tensor,
    out: Tensor,
    stats: Stats,
    residual: Tensor,
    branch: Tensor,
) -> None:
    """residual_out = residual + branch; out = norm(residual_out); all (rows, C)."""
    if stats.mean is None:
        args = (residual, branch, w[key], config.norm_eps)
        rmsnorm.forward_residual(dev, residual_out, out, stats.rstd, *args)
    else:
        args = (residual, branch, w[key], w[f"{key}_bias"], config.norm_eps)
        layernorm.forward_residual(dev, residual_out, out, stats.mean, stats.rstd, *args)


def backward(
    dev: Device,
    w: Mapping[str, Tensor],
    g: Mapping[str, Accumulator],
    key: str,
    d_x: Tensor,
    d_out: Tensor,
    x: Tensor,
    stats: Stats,
    d_residual: Tensor | None,
) -> None:
    """d_x (rows, C) = the norm's input gradient + d_residual (may be d_x itself)."""
    if stats.mean is None:
        rmsnorm.backward(dev, d_x, g[key], d_out, x, w[key], stats.rstd, d_residual)
    else:
        grads = (g[key], g[f"{key}_bias"])
        args = (d_out, x, w[key], stats.mean, stats.rstd, d_residual)
        layernorm.backward(dev, d_x, *grads, *args)
