"""Weights on the device: the work copy that products read, the master copy that AdamW updates.

Life cycle of a slab: gather(name) -> get(name) -> release(name). With one rank everything is
resident, and the three only check that they are called in this order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.config import ModelConfig
from llmq.dtypes import F32, DType
from llmq.linear import Amount, Fp8, Operand
from llmq.operands import STRIDE, Fp8Options
from llmq.ops import abs_max, convert, fill, quantize, random
from llmq.params import Param, Slab
from llmq.runtime.device import Device
from llmq.runtime.tensor import Tensor


class Weights:
    """All slabs of a model. `master[name]` is the work slab itself where the dtypes are equal.

    In fp8 the products of the blocks read quantized copies of the matrices, in both layouts, made
    once per optimizer step.
    """

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        model_dtype: DType,
        master_dtype: DType,
        fp8: Fp8Options | None = None,
    ):
        self.dev = dev
        self.table = table
        self.work: dict[str, Tensor] = {}
        self.master: dict[str, Tensor] = {}
        for slab in table:
            shape = (slab.size,)
            self.work[slab.name] = dev.alloc(slab.name, shape, model_dtype, "Weights")
            self.master[slab.name] = (
                self.work[slab.name]
                if master_dtype == model_dtype
                else dev.alloc(f"{slab.name}.master", shape, master_dtype, "Master")
            )
        self._views: dict[str, dict[str, Operand]] = {
            s.name: s.views(self.work[s.name]) for s in table
        }
        self._amounts: list[tuple[Fp8, Amount]] = []
        if fp8 is not None:
            self._alloc_quants(fp8.value)
        self._held: set[str] = set()

    def _alloc_quants(self, dtype: DType) -> None:
        """Quantized copies of the blocks' matrices; `get` hands them out in their place."""
        matrices = [
            (views, key, weight)
            for name, views in self._views.items()
            if name.startswith("layers.")
            for key, weight in views.items()
            if len(weight.shape) == 2
        ]
        shape = (len(matrices) * STRIDE,)
        self._abs_maxes = self.dev.alloc("weight_abs_maxes", shape, F32, "Quants")
        scales = self.dev.alloc("weight_scales", shape, F32, "Quants")
        for index, (views, key, weight) in enumerate(matrices):
            rows, columns = weight.shape
            first = index * STRIDE
            scale = scales.rows(first, first + 1)
            quant = Fp8(
                source=weight,
                codes=self.dev.alloc(f"{weight.name}.q", (rows, columns), dtype, "Quants"),
                transposed=self.dev.alloc(f"{weight.name}.q_t", (columns, rows), dtype, "Quants"),
                scale=scale,
            )
            amount = Amount(abs_max=self._abs_maxes.rows(first, first + 1), scale=scale)
            self._amounts.append((quant, amount))
            views[key] = quant

    def quantize(self) -> None:
        """Make the quantized copies from the work weights; nothing to do without fp8."""
        if not self._amounts:
            return
        self.dev.zero(self._abs_maxes)
        for quant, amount in self._amounts:
            abs_max.abs_max(self.dev, amount.abs_max, quant.source)
            quantize.quantize(
                self.dev, quant.codes, quant.transposed, quant.scale, quant.source, amount.abs_max
            )

    def gather(self, name: str) -> None:
        """Start bringing a slab to where `get` can hand it out."""
        self._held.add(name)

    def get(self, name: str) -> dict[str, Operand]:
        """The work weights of a gathered slab, by key."""
        if name not in self._held:
            raise AssertionError(f"weights: get({name!r}) without gather")
        return self._views[name]

    def release(self, name: str) -> None:
        """Say that enqueued work was the last to read this slab's work weights."""
        if name not in self._held:
            raise AssertionError(f"weights: release({name!r}) without gather")
        self._held.remove(name)

    def init(self, config: ModelConfig, seed: int, *, zero_projections: bool = False) -> None:
        """Fresh weights: normal(0, std), projections into the residual stream / sqrt(2L).

        Depends on the seed and the parameter only, never on ranks or dtypes beyond rounding.
        """
        std = config.initializer_range
        stds = {"normal": std, "residual": std / np.sqrt(2.0 * config.num_layers)}
        for slab in self.table:
            master = self.master[slab.name]
            self.dev.zero(master)
            views = slab.views(master)
            for param in slab.params:
                target = views[param.key].rows(0, param.rows)
                if param.init == "one":
                    fill.constant(self.dev, target, 1.0)
                elif param.init in stds and not (zero_projections and param.init == "residual"):
                    param_seed = (param.index << 32) | (seed & 0xFFFFFFFF)
                    random.normal(self.dev, target, float(stds[param.init]), param_seed)
        self.refresh()

    def load(self, read: Callable[[Param], np.ndarray]) -> None:
        """Fill the masters from host arrays of the parameters' shapes, any float dtype."""
        for slab in self.table:
            master = self.master[slab.name]
            self.dev.zero(master)
            views = slab.views(master)
            for param in slab.params:
                array = read(param)
                self.dev.upload(views[param.key], array.astype(master.dtype.numpy, copy=False))
        self.refresh()

    def read(self, param: Param) -> np.ndarray:
        """A host copy of one master parameter, in its shape."""
        slab = next(s for s in self.table if param in s.params)
        return self.dev.download(slab.views(self.master[slab.name])[param.key])

    def refresh(self) -> None:
        """Make work weights and quantized copies from the masters, after these were written."""
        for name, work in self.work.items():
            master = self.master[name]
            if work is not master:
                convert.convert(self.dev, work, master)
        self.quantize()
