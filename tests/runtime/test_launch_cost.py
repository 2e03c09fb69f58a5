"""Launches say what they cost, and predictions know them by nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I8
from llmq.options.cards import CARDS, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.plan import Plan, make_plan
from llmq.runtime.cost import Cost, Kind, product_cost
from llmq.runtime.device import FUSED, Launch
from llmq.runtime.kernel import Kernel
from llmq.runtime.plan_device import PlanDevice
from tools.compile_all import declared_kernels

H100 = CARDS["NVIDIA H100 80GB HBM3"]
RTX_5090 = CARDS["NVIDIA GeForce RTX 5090"]

DELAYED = {"matmul-dtype": "e4m3", "fp8-recipe": "delayed", "head-dtype": "e4m3"}
LORA = {"lora-rank": 8, "grad-accumulation": 1}
# Together they launch every product that there is, and attention of both origins.
RUNS = {
    "bf16": (H100, {"attention": "native"}),
    "fp32": (H100, {"model-dtype": "fp32", "attention": "native"}),
    "fp8": (H100, DELAYED | {"recompute-block": True}),
    "codes": (H100, DELAYED | {"mlp-dtype": "e4m3", "gradient-dtype": "e5m2"}),
    "heads in parts": (H100, {"batch-size": 1, "attn-bwd-chunks": 4, "grad-accumulation": 4}),
    "adapters": (H100, LORA | {"base-dtype": "nf4"}),
    "adapters, fp8": (H100, LORA | {"base-dtype": "e4m3", "fp8-recipe": "delayed"}),
    "int8": (RTX_5090, {"matmul-dtype": "int8"}),
    "block scales": (RTX_5090, DELAYED),
    "experts": (H100, {"model": "Qwen3-30B-A3B"}),
    "few rows": (H100, {"batch-size": 1, "seq-len": 16}),
}


def plan_of(run: str) -> Plan:
    """The plan of two layers."""
    card, options = RUNS[run]
    options = {"device": "cuda", "model": "Qwen2.5-7B", "seq-len": 4096, "gpus": 1} | options
    config = make_config({"batch-size": 2, "grad-accumulation": 1} | options)
    backend = "native" if config.attention == "native" else "cudnn"
    model = replace(preset(config.model), num_layers=2)
    return make_plan(config, model, spec_of(card), backend, config.gpus)


@cache
def launches_of(run: str) -> tuple[Launch, ...]:
    """All launches of a plan, and of its tries."""
    with pytest.MonkeyPatch.context() as patch:
        launches, launch = [], PlanDevice._launch

        def noted(dev: PlanDevice, what: Launch) -> None:
            launches.append(what)
            launch(dev, what)

        patch.setattr(PlanDevice, "_launch", noted)
        if run == "experts":  # whose products on Hopper nothing else takes
            patch.setenv("LLMQ_FUSED", "all")
        plan_of(run)
    return tuple(launches)


def multiplies(kernel: Kernel) -> bool:
    """Whether it reads all of two matrices a and b, which have K in common."""
    whole = {arg.name for arg in kernel.declared if not arg.sparse}
    return {"a", "b", "M", "K"} <= whole


@pytest.mark.parametrize("run", RUNS)
def test_every_product_and_attention_says_what_it_costs(run):
    """A product without a cost would be predicted as if memory limited it."""
    products = [launch for launch in launches_of(run) if multiplies(launch.kernel)]
    assert products
    for kernel, *_, cost in products:
        assert (cost.part, cost.kind and cost.kind.is_product) == ("product", True), kernel
        assert cost.rate and cost.label and cost.flops >= 2 * cost.kind.sizes[2], kernel
    for kernel, *_, cost in launches_of(run):
        if kernel.op.startswith("attention"):
            assert cost.part == "attention", kernel
            assert bool(cost.flops) == bool(cost.rate) == (cost.kind is not None), kernel


def test_runs_launch_every_product():
    """Runs of this file launch each kernel that multiplies matrices."""
    launched = {launch.kernel.entry for run in RUNS for launch in launches_of(run)}
    assert {"matmul", "matmul_fp8", "matmul_mxfp8", *FUSED} <= launched
    assert launched >= {kernel.entry for kernel in declared_kernels() if multiplies(kernel)}


SIZES = (512, 256, 128)
KINDS = {
    "matmul/f32/0/1/0/f32": product_cost(SIZES, F32, F32, trans_b=True),
    "matmul/bf16/1/0/1/f32": product_cost(SIZES, BF16, F32, trans_a=True, accumulate=True),
    "matmul/bf16/0/0/0/bf16/addend": product_cost(SIZES, BF16, BF16, addend=True),
    "matmul_fp8/1/e5m2/0/bf16": product_cost(SIZES, E5M2, BF16, fast=True),
    "matmul_fp8/0/e4m3/1/f32": product_cost(SIZES, E4M3, F32, accumulate=True),
    "matmul_int8/i8/f32": product_cost(SIZES, I8, F32, accumulate=True),
    "matmul/bf16/0/1/0/bf16/adapted/addend": product_cost(
        SIZES, BF16, BF16, trans_b=True, addend=True, epilogue="adapted", rank=8
    ),
    "matmul_fp8/1/e4m3/0/bf16/gradient": product_cost(
        SIZES, E4M3, BF16, fast=True, accumulate=True, epilogue="gradient"
    ),
    "matmul_fp8/1/e4m3/0/e4m3/swiglu/e4m3,-": product_cost(
        SIZES, E4M3, E4M3, fast=True, epilogue="swiglu", besides="e4m3,-"
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_products_are_those_of_kept_card_files(name):
    cost = KINDS[name]
    assert cost.kind == Kind(name, SIZES)
    assert cost.flops == 2 * 512 * 256 * (128 + 8 * name.endswith("adapted/addend"))
    # The bytes that the library's product moves are known where more is done that takes time of its
    # own.
    matrices = {"swiglu": 512 * 128 + 256 * 128 + 512 * 256}
    matrices |= {"adapted": 2 * matrices["swiglu"]}
    assert cost.matrices == next((n for word, n in matrices.items() if word in name), None)


def test_what_memory_limits_is_told_apart_by_its_tensors_formats():
    kernel = Kernel(
        "x.cu", "x", "out f32[*out] out, T[*x] x, bf16[*bias]? bias, i32 n", types="T=e4m3"
    )
    dev = PlanDevice(spec_of(H100))
    out, x = dev.alloc("out", (4,), F32, "Weights"), dev.alloc("x", (4,), E4M3, "Weights")
    dev.graph(("x",), lambda: dev.launch(kernel, 1, 1, (out, x, None, 4), cost=Cost(flops=8)))
    ((_, (work,)),) = dev.graphs
    assert (work.kind, work.cost) == (Kind("x/f32,e4m3,-", (20,)), Cost(flops=8))
