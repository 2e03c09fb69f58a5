"""Whole steps as Hopper computes large ones, with more in their products: on the CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from llmq.base.dtypes import BF16
from llmq.base.errors import ConfigError
from llmq.ops.attention import attention_backward
from llmq.ops.product import matmul_fused
from llmq.ops.product.routes import ROUTES, Sizes, taken
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.plan.plan import make_plan
from llmq.runtime.device import FUSED
from llmq.runtime.mesh import Mesh
from llmq.runtime.plan_device import PlanDevice
from tests.covering import pairwise
from tests.harness import GPU_SPEC, devices_without
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
    "adapters": LORA | {"base_dtype": "nf4"},
    "adapters, delayed": LORA | DELAYED | {"base_dtype": "e4m3"},
}


@pytest.fixture
def fuse(monkeypatch):
    """Have these operations on the CPU, at any size, beside those of earlier calls."""
    told = []

    def fuse(*operations):
        if attention_backward in operations:  # which is no product
            monkeypatch.setattr(attention_backward, "CAPABILITY", 0)
        told.extend(name for name in operations if name in FUSED)
        monkeypatch.setenv("LLMQ_FUSED", ",".join(told) or "none")
        monkeypatch.setattr(matmul_fused, "GRADIENT_COLUMNS", 16)  # the models have 160

    return fuse


def batch_of(
    rng: np.random.Generator, T: int, *, document_mask: bool = False, **_: object
) -> tuple:
    """Random; with documents that are masked also where they start."""
    batch = random_batch(rng, T=T)
    if not document_mask:
        return batch
    first = np.where(rng.random((2, T)) < 0.1, np.arange(T), 0)
    return *batch, np.maximum.accumulate(first, axis=1).astype(np.int32)


def run(name: str, T: int = T, grad_accumulation: int = 1, head_dim: int | None = None, **options):
    """Results and weights after two steps, and what the second has launched, by entry."""
    rng, entries = np.random.default_rng(0), Counter()
    options |= {"model_dtype": "bf16", "grad_accumulation": grad_accumulation}
    path = exported(name) if head_dim is None else exported(name, head_dim=head_dim)
    with trainer_for(path, **options) as trainer:
        launch = trainer.dev.launch

        def counted(kernel, *args, **kwargs):
            entries[kernel.entry] += 1
            launch(kernel, *args, **kwargs)

        first, second = (
            [batch_of(rng, T, **options) for _ in range(trainer.micro_batches)] for _ in range(2)
        )
        results = [trainer.step(first)]
        with trainer.dev.instead(launch=counted):
            results.append(trainer.step(second))
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights(), entries


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
    fuse(*["matmul_adapted"] * adapters)  # which rounds otherwise than two products
    want = beside(name, format)
    fuse("matmul_adapted", "matmul_swiglu", "matmul_swiglu_backward")
    found = run(name, **options, **({f"recompute_{recompute}": True} if recompute else {}))
    assert found[0] == want[0]
    for weight, values in want[1].items():
        np.testing.assert_array_equal(found[1][weight], values, err_msg=weight)
    # Adapters: of three matrices in each direction; and products that are computed again.
    adapted = 6 * adapters + {"ffn": 1, "block": 1 + 2 * adapters}.get(recompute, 0)
    want = {"matmul_swiglu": 1, "matmul_swiglu_backward": 1, "matmul_adapted": adapted}
    want = {entry: LAYERS * n for entry, n in want.items() if n}
    if adapters:
        want["matmul_adapted"] -= 1  # nothing is trained in front of the first block's adapters
    assert {entry: found[2][entry] for entry in FUSED if found[2][entry]} == want


def test_products_of_experts(fuse):
    """The same bits as those of the kernels for all GPUs. Half of the products sum over 48 columns,
    of which theirs wants multiples of 64."""
    want = run("qwen3_moe")
    fuse("matmul_grouped", "matmul_grouped_gradient")
    found = run("qwen3_moe")
    assert found[0] == want[0]
    for weight, values in want[1].items():
        np.testing.assert_array_equal(found[1][weight], values, err_msg=weight)
    others = {"grouped_product": 8, "grouped_gradient": 4}
    ours = {"matmul_grouped": 4, "matmul_grouped_gradient": 4, "grouped_product": 4}
    for launched, counts in ((want[2], others), (found[2], ours)):
        assert {name: n for name, n in launched.items() if "grouped" in name} == counts


OWN_BACKWARD = {  # and in how many launches: of layers times parts
    "parts, again": ("llama_biases", {"attn_bwd_chunks": 4, "recompute_att": True}, LAYERS * 2),
    "a window in one layer": ("qwen2_untied", {}, 1),
    "documents": ("llama_biases", {"document_mask": True}, 0),
}


@pytest.mark.parametrize("model, options, times", OWN_BACKWARD.values(), ids=OWN_BACKWARD)
def test_attention_backward_of_hopper(model, options, times, fuse):
    """Needs what was planned. Parts are of sequences alone."""
    of = {"T": 64, "seq_len": 64, "head_dim": 64} | options
    want = run(model, **of)
    fuse(attention_backward)
    found = run(model, **of)
    assert found[2]["attention_gradient"] == found[2]["attention_statistics"] == times
    others = want[2]["attention_backward_tiles"] - times
    assert found[2]["attention_backward_tiles"] == found[2]["attention_delta"] == others
    for got, expected in zip(found[0], want[0], strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=1e-3)  # BF16 keeps 8 bits
        assert got.norm == pytest.approx(expected.norm, rel=1e-2)


GRADIENTS = {
    "delayed": DELAYED | {"head_dtype": "e4m3", "lmhead_chunks": 3},
    "fast": FP8 | {"fp8_fast_accumulation": "all", "gradient_dtype": "e5m2"},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_within_products(options, fuse):
    """The same bits as with sums behind the products."""
    want = run("qwen3", grad_accumulation=2, **options)
    fuse("matmul_gradient")
    found = run("qwen3", grad_accumulation=2, **options)
    assert found[0] == want[0]
    for weight, values in want[1].items():
        np.testing.assert_array_equal(found[1][weight], values, err_msg=weight)
    head = options.get("lmhead_chunks", 0)  # in fp8
    assert found[2]["matmul_gradient"] == 2 * (4 * LAYERS + head)
    assert want[2]["reduce_sum"] > found[2]["reduce_sum"]
    options = options | {"shard_gradients": True, "offload_gradients": True}
    streamed = run("qwen3", grad_accumulation=2, **options)
    assert streamed[0] == want[0] and streamed[2]["matmul_gradient"]


@pytest.mark.parametrize("options", [{}, FP8 | {"grad_accum_dtype": "fp32"}], ids=["bf16", "f32"])
def test_gradients_that_the_library_computes(options, fuse):
    fuse("matmul_gradient")
    assert not run("qwen3", grad_accumulation=2, **options)[2]["matmul_gradient"]


def test_all_of_them_at_once(fuse, monkeypatch):
    """LLMQ_FUSED=all is every product that these steps can have, none and no value are no one."""
    sizes = {"seq_len": 32, "T": 32}  # in multiples of 16
    options = DELAYED | sizes | {"head_dtype": "e4m3", "grad_accumulation": 2}
    fuse()
    want = run("llama_biases", head_dim=64, **options)
    monkeypatch.delenv("LLMQ_FUSED")
    by_rule = run("llama_biases", head_dim=64, **options)
    assert by_rule[0] == want[0] and not set(FUSED) & by_rule[2].keys() & want[2].keys()
    monkeypatch.setenv("LLMQ_FUSED", "all")
    found = run("llama_biases", head_dim=64, **options)
    # Biases of the MLP come before the activation, and no adapters are there.
    assert set(FUSED) & found[2].keys() == {"matmul_gradient", "matmul_swiglu_backward"}
    adapted = run("qwen3", **FORMATS["adapters"])
    assert set(FUSED) & adapted[2].keys() == {
        "matmul_adapted", "matmul_swiglu", "matmul_swiglu_backward",
    }  # fmt: skip


def test_a_device_of_another_capability_is_not_told_to_fuse(monkeypatch):
    small, odd = Sizes(16, 16, 16, BF16, BF16), Sizes(16, 12, 16, BF16, BF16)
    monkeypatch.setenv("LLMQ_FUSED", "all")
    for dev in devices_without():
        assert taken(dev, "glu", small) is None
    hopper = PlanDevice(GPU_SPEC)
    assert taken(hopper, "glu", small) is ROUTES["glu"]
    assert taken(PlanDevice(GPU_SPEC, mesh=Mesh.of(2, 0)), "glu", small) is ROUTES["glu"]
    assert taken(hopper, "glu", odd) is None
    monkeypatch.setenv("LLMQ_FUSED", "none")
    large = Sizes(4096, 151936, 896, BF16, BF16)
    assert taken(PlanDevice(GPU_SPEC), "glu", large) is None
    monkeypatch.setenv("LLMQ_FUSED", "matmul_swiglu,matmul_rop")
    with pytest.raises(ConfigError, match="LLMQ_FUSED: 'matmul_rop' is no product of our own"):
        PlanDevice(GPU_SPEC)


def test_routes_are_of_all_kernels_that_a_device_can_be_told_to_take():
    assert sorted(route.kernel for route in ROUTES.values()) == sorted(FUSED)


@pytest.mark.parametrize("more", [{}, {"zero_level": 3}], ids=["whole", "divided"])
def test_ranks_have_the_products_of_one(more, fuse):
    """And the bits of the library's, as one rank has."""
    options = DELAYED | {"gpus": 2, "grad_accumulation": 2} | more
    want = run("qwen3", **options)
    fuse("matmul_swiglu", "matmul_swiglu_backward")
    found = run("qwen3", **options)
    assert found[0] == want[0] and found[2]["matmul_swiglu"] > 0
    for weight, values in want[1].items():
        np.testing.assert_array_equal(found[1][weight], values, err_msg=weight)


def test_a_plan_of_several_gpus_has_the_products_of_one():
    options = {"batch_size": 32, "lmhead_chunks": 4, "grad_accumulation": 2, **DELAYED}
    spec, found = replace(GPU_SPEC, num_sms=132, memory=80 << 30), []
    for gpus in (1, 2):
        launched, launch = Counter(), PlanDevice.launch

        def counted(self, kernel, *args, launched=launched, launch=launch, **kwargs):
            launched[kernel.entry] += kernel.entry in FUSED
            launch(self, kernel, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PlanDevice, "launch", counted)
            config = TrainConfig(gpus=gpus, **options).normalized()
            make_plan(config, preset("Qwen2.5-0.5B"), spec, world_size=gpus)
        found.append(set(+launched))
    assert found[0] == found[1] >= {"matmul_swiglu", "matmul_swiglu_backward"}
