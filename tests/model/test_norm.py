"""The model's normalization: where its results go, and who adds to the residual stream."""

from collections import Counter

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.operand import Fp8Out, OutBuffers
from llmq.base.tensor import Accumulator
from llmq.model.norms import Normalization, Stats
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.placement import place, table_of
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


class NotingDevice(PlanDevice):
    """Counts norms by entry, and products with an addend."""

    def __init__(self):
        super().__init__(HOST_SPEC)
        self.counts = Counter()

    def launch(self, kernel, grid, block, args, **kwargs):
        super().launch(kernel, grid, block, args, **kwargs)
        value = dict(zip((arg.name for arg in kernel.declared), args, strict=True))
        entry = "addend" if value.get("addend") is not None else kernel.entry
        self.counts[entry] += entry == "addend" or entry.startswith("norm_")


FP8 = {"matmul_dtype": "e4m3", "fp8_recipe": "jit"}


@pytest.mark.parametrize(
    "model, options, of_products, with_norms, behind",
    [
        # Each layer has two; with recomputation the attention's once more.
        ("tiny", {}, 2, 0, 0),
        ("tiny", FP8 | {"offload_residual": True}, 2, 0, 0),
        ("tiny", {"recompute_block": True}, 3, 0, 0),
        ("tiny-gpt2", {}, 2, 0, 0),
        # One layer's second sum is that of the next one's norm, or of the head's.
        ("tiny", {"lora_rank": 4}, 0, 2, 0),
        ("tiny", {"matmul_dtype": "int8"}, 0, 2, 0),
        ("tiny", {"lora_rank": 4, "recompute_block": True}, 0, 3, 0),
        ("tiny-olmo2", {}, 0, 0, 2),
        ("tiny-gemma3", FP8, 0, 0, 2),
    ],
    ids=str,
)
def test_who_adds_to_the_residual_stream(model, options, of_products, with_norms, behind):
    """The last product of a half, where nothing follows that needs what it puts out."""
    model, shape = preset(model), (1, 64)
    config = TrainConfig(batch_size=1, seq_len=64, grad_accumulation=1, **options).normalized()
    dev = NotingDevice()
    step = Step(dev, model, config.for_step, place(config.for_step, table_of(config, model)))
    step.train(0, 0.0, 0.0, [(np.zeros(shape, np.int32),) * 2])
    L, counts = model.num_layers, dev.counts
    found = (counts["addend"], counts["norm_forward_residual"], counts["norm_post"])
    final = 1 if behind else 0  # OLMo-2's and Gemma-3's final norm is of this kind
    assert found == (of_products * L, with_norms * L, behind * L + final)
    branch = [t for _, t in dev.arenas["device"].tensors if t.name == "branch"]
    assert len(branch) == (0 if of_products else 1)
