"""Whole steps with products that have more in them, as Hopper computes large ones: on the CPU."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from llmq.ops import matmul_adapted, matmul_swiglu, matmul_swiglu_backward
from llmq.runtime.launch_kind import FUSED
from tests.covering import pairwise
from tests.models import exported, random_batch, trainer_for

T, LAYERS = 24, 2
FP8 = {"matmul_dtype": "e4m3", "fp8_fast_accumulation": "activations"}
DELAYED = FP8 | {"fp8_recipe": "delayed"}
LORA = {"lora_rank": 4, "learning_rate": 1e-2}
FORMATS = {
    "bf16": {},
    "jit": FP8,
    "delayed": DELAYED,
    "e5m2": DELAYED | {"gradient_dtype": "e5m2"},
    "codes": DELAYED | {"mlp_dtype": "e4m3"},
    "adapters": LORA | {"base_dtype": "nf4"},
    "adapters, delayed": LORA | DELAYED | {"base_dtype": "e4m3"},
}


@pytest.fixture
def fuse(monkeypatch):
    """Have these operations on the CPU, at any size."""

    def fuse(*operations):
        for operation in operations:
            for name, value in {"CAPABILITY": 0, "MIN_ROWS": 1, "MIN_COLUMNS": 1}.items():
                monkeypatch.setattr(operation, name, value)
        monkeypatch.setattr(matmul_swiglu_backward, "COLUMNS", 16)  # the models have 160

    return fuse


def run(name: str, **options):
    """Results and weights after two steps, and what the second has launched of FUSED."""
    rng, entries = np.random.default_rng(0), Counter()
    with trainer_for(exported(name), model_dtype="bf16", **options) as trainer:
        launch = trainer.dev.launch

        def counted(kernel, *args, **kwargs):
            entries[kernel.entry] += kernel.entry in FUSED
            launch(kernel, *args, **kwargs)

        results = [trainer.step([random_batch(rng, T=T)])]
        with trainer.dev.instead(launch=counted):
            results.append(trainer.step([random_batch(rng, T=T)]))
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights(), {name: n for name, n in entries.items() if n}


@cache
def beside(name: str, format: str):
    """Without the activation in products."""
    return run(name, **FORMATS[format])


@pytest.mark.parametrize(
    ("name", "format", "recompute"),
    pairwise(name=("qwen3", "gemma3"), format=FORMATS, recompute=("", "swiglu", "ffn", "block")),
)
def test_activation_within_products(name, format, recompute, fuse):
    """The same bits as beside them."""
    options, adapters = FORMATS[format], "adapters" in format
    fuse(*[matmul_adapted] * adapters)  # which rounds otherwise than two products
    want = beside(name, format)
    fuse(matmul_adapted, matmul_swiglu, matmul_swiglu_backward)
    found = run(name, **options, **({f"recompute_{recompute}": True} if recompute else {}))
    assert found[0] == want[0]
    for weight, values in want[1].items():
        np.testing.assert_array_equal(found[1][weight], values, err_msg=weight)
    # Codes of the activation are made again by a kernel of their own, behind the product.
    apart = recompute and format in ("jit", "delayed", "e5m2")
    # Adapters: of three matrices in each direction; and products that are computed again.
    adapted = 6 * adapters + {"ffn": 1, "block": 1 + 2 * adapters}.get(recompute, 0)
    want = {"matmul_swiglu": 1, "matmul_swiglu_backward": 1, "matmul_adapted": adapted}
    if apart:
        want |= {"matmul_swiglu_backward": 0, "matmul_adapted": adapted + 1}
    if format == "codes":  # which matmul_adapted does not make; in backward the library does
        want = {"matmul_swiglu": 1 + adapted}
    assert found[2] == {entry: LAYERS * n for entry, n in want.items() if n}
