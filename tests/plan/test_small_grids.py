"""Predicted times of attention's backward in parts of its heads, against measured ones."""

from __future__ import annotations

from functools import partial

import pytest

from llmq.base.dtypes import BF16, F32, GIB
from llmq.ops.attention import attention
from llmq.options.cards import CARDS, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.cost import Rates
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits
from llmq.plan.shrink import REARRANGING, Shrinker, having
from llmq.runtime.plan_device import PlanDevice

H100 = CARDS["NVIDIA H100 80GB HBM3"]
# T, Hq, Hkv, Hd, and milliseconds by number of parts: calls of cuDNN 9.19 on an H100, one sequence,
# timed before the operation divided heads. `tools/bench_ops.py attention --case qwen15b_32k` times
# the operation at the first of these sizes.
MEASURED = [
    ((32768, 12, 2, 128), {1: 17.11, 2: 17.86, 4: 18.26, 6: 19.77, 12: 21.31}),
    ((16384, 12, 2, 128), {1: 4.40, 2: 4.70, 4: 5.98, 6: 5.48, 12: 10.22}),
    ((16384, 28, 4, 128), {1: 9.86, 4: 11.56, 8: 12.78, 16: 14.45, 28: 24.11}),
    ((32768, 14, 2, 64), {1: 15.10, 2: 15.58, 8: 18.44, 14: 20.62}),
]


def seconds(parts, T, Hq, Hkv, Hd):
    """The seconds of all launches."""
    dev = PlanDevice(spec_of(H100))
    qkv = dev.alloc("qkv", (1, T, Hq + 2 * Hkv, Hd), BF16, "Activations")
    out = dev.alloc("out", (1, T, Hq, Hd), BF16, "Activations")
    lse = dev.alloc("lse", (1, Hq, T), F32, "Activations")
    tensors = (qkv, out, out, lse, qkv, Hq, Hkv, parts)
    dev.graph(("backward",), partial(attention.backward, dev, *tensors, backend="cudnn"))
    return sum(Rates(H100).compute(work) for work in dev.graphs[-1][1])


@pytest.mark.parametrize(("sizes", "measured"), MEASURED, ids=lambda x: str(x)[:20])
def test_parts_take_as_long_as_measured(sizes, measured):
    whole = seconds(1, *sizes)
    assert 1e3 * whole == pytest.approx(measured[1], rel=0.06)  # as the model of attention is
    for parts, ms in measured.items():
        assert seconds(parts, *sizes) / whole == pytest.approx(ms / measured[1], rel=0.1)


@pytest.mark.parametrize(("gib", "parts"), [(40.5, 1), (20, 4), (9, 6)])
def test_long_sequences_are_divided_as_memory_asks(gib, parts):
    """Long sequences are divided no further than memory asks."""
    model = preset("Qwen2.5-1.5B")
    given = {"from-scratch": True, "device": "cuda", "model": "Qwen2.5-1.5B", "batch-size": 1}
    given |= {"seq-len": 32768, "opt-m-dtype": "bf16", "opt-v-dtype": "bf16"}
    config = make_config(given | {"recompute-block": True, "lmhead-chunks": 16})
    shrinker = Shrinker(Planner(model, spec_of(H100), "cudnn", H100), Limits(device=int(gib * GIB)))
    found = having(config, shrinker.shrink(config, REARRANGING))
    assert shrinker.fits(found) and found.attn_bwd_chunks == parts
