"""The cases of tools/gemm_gate.py --swiglu and --gradients, on the CPU device."""

import importlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.runtime.device import MemorySizes
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import PlanDevice

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize("module", ["fused_products", "gradient_products"])
def test_a_kernel_has_the_results_of_the_two(monkeypatch, rng, module):
    """At small sizes; and there is memory for all tensors."""
    monkeypatch.syspath_prepend(TOOLS)
    cases = importlib.import_module(module).CASES

    class Bench:
        """The part of gemm_gate's Bench that a case wants."""

        def __init__(self, dev):
            self.dev = dev

        def empty(self, name, dtype, *shape):
            tensor = self.dev.alloc(name, shape, dtype, "Activations")
            self.dev.zero(tensor)
            return tensor

        def result(self, name, M, N):
            return self.empty(name, BF16, M, N)

        def operand(self, name, dtype, rows, columns, spread, size=1.0):
            tensor = self.empty(name, dtype, rows, columns)
            values = rng.integers(-3, 4, (rows, columns)).astype(dtype.numpy)
            self.dev.upload(tensor, values)
            return tensor

        def scale(self, value=1.0):
            scale = self.empty("scale", F32, 1)
            self.dev.upload(scale, np.full(1, 0.25, np.float32))
            return scale

        def deviation(self, *names):
            return 1.0

    machine = choose_machine("cpu", 1)
    for make, case, results in cases.values():
        sizes = {"M": 32, "F": 64, "N": 64, "K": 64, "R": min(getattr(case, "R", 0), 16)}
        small = case._replace(**{name: sizes[name] for name in case._fields if name in sizes})
        plan = PlanDevice(machine.spec)
        make(Bench(plan), small)
        assert sum(plan.bytes.values()) <= small.nbytes(results) + 4096  # and what aligns
        sizes = MemorySizes(device=1 << 20, stack=1 << 20, pinned=0)
        with closing(machine.open(sizes)) as dev:
            ways = make(Bench(dev), small)
            ways.two(), ways.one()
            for two, one in zip(*ways.results, strict=True):
                want, got = (dev.download(x).view(np.uint8) for x in (two, one))
                np.testing.assert_array_equal(got, want, two.name)
                assert want.any() or two.name == "saturated"
