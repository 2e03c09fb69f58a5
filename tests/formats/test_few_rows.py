"""Products of few rows with frozen matrices that are kept as codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, I32
from llmq.base.operand import Bytes, Nf4
from llmq.model.generator import Generator
from llmq.ops.product.product import product
from llmq.options.cards import find_card, spec_of
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.runtime.plan_device import PlanDevice
from llmq.state.placement import place, table_of
from llmq.state.weights import Weights
from tests.emulator import device as emulator
from tests.harness import SIZES

LAYERS, RUNS = 2, {"qkv": 2, "o": 1, "up": 1, "down": 1}


def weights_of(dev, name="tiny-llama", **options):
    """The model, its options for a step, and its weights."""
    given = {"model_dtype": "bf16", "base_dtype": "nf4", "lora_rank": 4, "seq_len": 128}
    model = replace(preset(name), num_layers=LAYERS)
    config = TrainConfig(batch_size=1, **given | options).normalized()
    table = table_of(config, model)
    return model, config.for_step, Weights(dev, table, place(config.for_step, table))


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
@pytest.mark.parametrize("base", ["nf4", "e4m3", "int8", "e4m3-blocks"])
def test_they_read_codes_as_they_are_kept(base):
    dev = emulator.EmulatorDevice(SIZES)
    model, _, weights = weights_of(dev, base_dtype=base, matmul_dtype="bf16")
    weights.init(model, seed=1)
    found = []
    for few_rows in (True, False):
        weights.start_micro_step(stale=False, few_rows=few_rows)
        weights.gather("layers.1")
        matrices = weights.get("layers.1")
        for key, runs in RUNS.items():
            w = matrices[key]
            if few_rows:
                assert isinstance(w, Nf4 if base == "nf4" else Bytes)
                assert len(w.runs) == (1 if base in ("e4m3", "int8") else runs)
            N, K = w.shape
            x, out = (dev.alloc(n, (3, size), BF16, "Weights") for n, size in (("x", K), ("y", N)))
            dev.upload(x, np.resize(np.sin(np.arange(5 * K)), (3, K)).astype(BF16.numpy))
            product(dev, out, x, w, trans_b=True)
            found.append(dev.download(out).astype(np.float32))
        weights.release("layers.1")
    for one, other in zip(found[:4], found[4:], strict=True):
        assert np.abs(one).max() > 0.05
        # The same products, summed in another order, and rounded to BF16; bytes are not rounded.
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-6 if base == "nf4" else 2e-3)


@pytest.mark.parametrize(
    ("name", "base", "decodes"),
    [
        ("tiny-llama", "nf4", "nf4_decode"),
        ("tiny-qwen3-moe", "nf4", "nf4_decode"),
        ("tiny-qwen3-moe", "int8", "quantize_int8_decode"),
    ],
)
def test_passes_of_few_tokens_decode_no_matrix(name, base, decodes):
    """Those of experts neither, of which each run has all."""
    dev = PlanDevice(spec_of(find_card("h100")))
    model, options, weights = weights_of(dev, name, base_dtype=base, matmul_dtype="bf16")
    scalars = dev.alloc("scalars", (16,), I32, "Weights")
    sizes = {"slots": 2, "positions": 128, "blocks": 9}
    generator = Generator(dev, model, weights, options=options, scalars=scalars, **sizes)
    dev.launches.clear()
    for each in generator._decodes.values():
        generator._decoding(each)(stale=False)
    runs = LAYERS * (sum(RUNS.values()) if base == "nf4" else len(RUNS))
    assert dev.launches["skinny_nf4" if base == "nf4" else "skinny_bytes"] == 2 * runs
    assert decodes not in dev.launches
    next(p for p in generator._prefills if p.tokens == 128).forward(stale=False)
    assert dev.launches[decodes] == runs


def test_passes_of_few_tokens_read_experts_of_mxfp4():
    """Each pass has two matrices of experts a layer; others are kept in BF16."""
    dev = PlanDevice(spec_of(find_card("h100")))
    model, options, weights = weights_of(dev, "tiny-gpt-oss", base_dtype="mxfp4")
    scalars = dev.alloc("scalars", (16,), I32, "Weights")
    sizes = {"slots": 1, "positions": 64, "blocks": 9}
    generator = Generator(dev, model, weights, options=options, scalars=scalars, **sizes)
    dev.launches.clear()
    generator._decoding(generator._decodes[1])(stale=False)
    assert dev.launches["skinny_mxfp4"] == 2 * LAYERS
    assert "mxfp4_decode" not in dev.launches
