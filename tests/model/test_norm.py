"""The model's normalization: where its results go, and who adds to the residual stream."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.operand import Fp8Out, OutBuffers
from llmq.base.tensor import Accumulator
from llmq.model.norms import Normalization, Stats
from llmq.options.presets import preset
from tests.exact import coarse, nan
from tests.fp8_out import LAYOUTS, check_codes, outputs
from tests.harness import run, step_scalars

ROWS, C = SHAPE = (48, 64)
SCALE = np.float32(1 / 64)


@pytest.mark.parametrize("model", ["Qwen2.5-0.5B", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_in_every_layout(dev, rng, model, layout):
    """The codes of all three calls are the same as those of what they write besides."""
    config, rms = preset(model), preset(model).norm == "rmsnorm"

    def target(out, **fp8):
        return OutBuffers("x", out, None, Fp8Out(**fp8))

    def forward(dev, x, weight, bias, rstd, mean, **to):
        stats = Stats(rstd, None if rms else mean)
        Normalization(dev, config).forward(target(**to), stats, x, weight, bias)

    def residual(dev, x, weight, bias, rstd, mean, sum_out, **to):
        norm, stats = Normalization(dev, config), Stats(rstd, None if rms else mean)
        norm.forward(target(**to), stats, sum_out, weight, bias, x, x)

    def backward(dev, x, weight, bias, rstd, mean, scalars, sum_out, **to):
        norm, stats = Normalization(dev, config), Stats(rstd, None if rms else mean)
        d_weight, d_bias = (
            Accumulator(dev.alloc(key, (C,), F32, "Gradients"), False, scalars, 1)
            for key in ("ln", "ln_bias")
        )
        d_bias = None if rms else d_bias
        norm.backward(target(**to), d_weight, d_bias, sum_out, x, weight, stats, None)

    given = {
        "x": coarse(rng, SHAPE, BF16),
        "weight": coarse(rng, C, BF16),
        "bias": None if rms else coarse(rng, C, BF16),
        "rstd": np.ones(ROWS, np.float32),
        "mean": np.zeros(ROWS, np.float32),
        "out": nan(SHAPE, BF16),
        **outputs(SHAPE, E4M3, layout, SCALE),
    }
    other = {"sum_out": coarse(rng, SHAPE, BF16)}
    calls = [(forward, {}), (residual, other), (backward, other | {"scalars": step_scalars()})]
    for call, more in calls:
        got = run(dev, call, given | more)
        assert check_codes(got, got["out"], E4M3, layout) < got["out"].size
