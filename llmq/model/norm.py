"""The model's normalization, RMSNorm or LayerNorm, behind one set of calls.

weight, bias: (C,) each. Statistics with a mean, and a bias, are LayerNorm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import OutputForms
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import norm, quantize
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


class Normalization:
    """The calls, on one device."""

    def __init__(self, dev: Device, config: ModelConfig):
        self.dev, self.eps, self.offset = dev, config.norm_eps, config.arch.norm_offset

    def forward(
        self, to: OutputForms, stats: Stats, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """to (rows, C) = norm(x)."""
        dev, (rstd, mean) = self.dev, stats
        with _results(dev, to, x.shape) as results:
            args = (to.out, mean, rstd, x, weight, bias, self.eps)
            norm.forward(dev, *args, offset=self.offset, **results)

    def forward_residual(
        self,
        residual_out: Tensor,
        to: OutputForms,
        stats: Stats,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        """residual_out = residual + branch; to = norm(residual_out); all (rows, C)."""
        dev, (rstd, mean) = self.dev, stats
        with _results(dev, to, residual.shape) as results:
            args = (residual_out, to.out, mean, rstd, residual, branch, weight, bias, self.eps)
            norm.forward_residual(dev, *args, offset=self.offset, **results)

    def post(
        self, to: OutputForms, stats: Stats, x: Tensor, residual: Tensor | None, weight: Tensor
    ) -> None:
        """to (rows, C) = residual + norm(x), or norm(x); rounded as with Architecture.post_norm.

        Its backward pass is `backward` without d_residual.
        """
        with _results(self.dev, to, x.shape) as results:
            args = (to.out, stats.rstd, x, residual, weight, self.eps)
            norm.post(self.dev, *args, offset=self.offset, **results)

    def backward(
        self,
        to: OutputForms,
        d_weight: Accumulator | None,
        d_bias: Accumulator | None,
        d_out: Tensor,
        x: Tensor,
        weight: Tensor,
        stats: Stats,
        d_residual: Tensor | None,
    ) -> None:
        """to (rows, C) = the norm's input gradient + d_residual (may be to.out itself).

        d_weight, d_bias: None where they are not wanted.
        """
        dev, d_x, (rstd, mean) = self.dev, to.out, stats
        with _results(dev, to, x.shape) as results:
            args = (d_x, d_weight, d_bias, d_out, x, weight, mean, rstd, d_residual)
            norm.backward(dev, *args, offset=self.offset, **results)


@contextmanager
def _results(dev: Device, to: OutputForms, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The places of a kernel's further results: it writes codes row by row, others are made of
    those."""
    if to.fp8 is None or to.fp8.transposed is None:
        yield {"abs_max": to.abs_max, "fp8": to.fp8}
        return
    codes, transposed = to.fp8.codes, to.fp8.transposed
    made = (
        dev.scratch("norm_codes", shape, transposed.dtype) if codes is None else nullcontext(codes)
    )
    with made as codes:
        yield {"abs_max": to.abs_max, "fp8": to.fp8._replace(codes=codes, transposed=None)}
        quantize.transpose(dev, transposed, codes)
