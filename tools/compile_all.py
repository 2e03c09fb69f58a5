"""Compile every kernel for every architecture, without a GPU, and print the resources of each.

The kernels are the launches of training and sampling: steps of all presets in all formats run on a
plan device that notes its launches. Kernels without any launch are compiled for all types. Exits
with 1 if a kernel spills registers to memory or needs more than a multiprocessor has.
"""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import llmq.ops
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, E4M3, F32, I8, I32, I64, U8, DType
from llmq.base.operand import Bytes, BytesRun, Mxfp4, Nf4, Nf4Run
from llmq.base.tensor import Tensor
from llmq.model.generator import Generator
from llmq.model.losses import LOSSES
from llmq.model.step import Step
from llmq.ops.attention import attention
from llmq.ops.common import CAPABILITY, GENERIC_FP8
from llmq.ops.experts import route
from llmq.ops.product import skinny
from llmq.options.options import TrainConfig
from llmq.options.presets import PRESETS
from llmq.ref.experts.route import sums_size
from llmq.runtime.compile import Resources, compile_kernel
from llmq.runtime.device import DeviceSpec
from llmq.runtime.device import Launch as Launched
from llmq.runtime.kernel import Kernel, KernelSource
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import place, resident, table_of
from llmq.state.weights import Weights

# By capability: multiprocessors of a typical card, and maximum KiB of shared memory of a block.
ARCHITECTURES = {80: (108, 163), 89: (128, 99), 90: (132, 227), 100: (148, 227), 120: (188, 99)}
FP8, INT8 = {"matmul_dtype": "e4m3"}, {"matmul_dtype": "int8"}
TERNARY = {"model_dtype": "fp32", "matmul_dtype": "ternary"}  # int8 products with F32 results
REGISTERS = 65536  # registers of a multiprocessor
RESERVED = 1024  # bytes of shared memory that CUDA takes for each block


class Launch(NamedTuple):
    """One launch of a kernel. threads: threads per block. shared: bytes of dynamic shared
    memory."""

    threads: int
    shared: int


Launches = dict[KernelSource, set[Launch]]


class Work(NamedTuple):
    """A kernel to compile for one architecture, and its launches."""

    capability: int
    source: KernelSource
    launches: set[Launch]


class NotingDevice(PlanDevice):
    """A plan device that notes each kernel and its launches."""

    def __init__(self, spec: DeviceSpec, noted: Launches):
        super().__init__(spec)
        self.noted = noted

    def _launch(self, launch: Launched) -> None:
        if launch.kernel.file.endswith(".cu"):
            source = KernelSource.of(launch.kernel, launch.types, launch.consts)
            block = launch.block
            threads = block if isinstance(block, int) else math.prod(block)
            self.noted.setdefault(source, set()).add(Launch(threads, launch.smem))


def declared_kernels() -> list[Kernel]:
    """Return every kernel of ours that llmq/ops declares."""
    kernels = {}
    for module in pkgutil.walk_packages(llmq.ops.__path__, "llmq.ops."):
        names = vars(importlib.import_module(module.name))
        kernels |= {id(k): k for k in names.values() if isinstance(k, Kernel)}
    return [k for k in kernels.values() if k.file.endswith(".cu")]


ADAPTERS = {"lora_rank": 8, "lora_dropout": 0.1}


def formats() -> Iterator[dict[str, str]]:
    """Yield all choices of formats as fields of TrainConfig; 8-bit moments are chosen only for both
    moments together."""
    both = ("bf16", "fp32")
    moments = (*itertools.product(both, repeat=2), ("e4m3", "e4m3"))
    for master, grad, (m, v) in itertools.product(both, both, moments):
        yield _formats("bf16", master, grad, m, v)
    for m, v in moments:
        yield _formats("fp32", "fp32", "fp32", m, v)


def _formats(model: str, master: str, grad: str, m: str, v: str) -> dict[str, str]:
    return {
        "model_dtype": model,
        "master_dtype": master,
        "grad_accum_dtype": grad,
        "opt_m_dtype": m,
        "opt_v_dtype": v,
    }


def note_training(
    spec: DeviceSpec, model: ModelConfig, fields: dict[str, Any], noted: Launches
) -> None:
    """Note a micro-step that overwrites gradients, one that adds, an update and an evaluation; then
    the same with recomputation and document masks."""
    B, T = 4, min(1024, model.max_positions)
    batch = (np.zeros((B, T), np.int32), np.zeros((B, T), np.int32))
    for more in (False, True):
        shape = {"batch_size": B, "seq_len": T, "z_loss": 1e-4}
        config = TrainConfig(**shape, recompute_block=more, document_mask=more, **fields)
        config = config.normalized()
        placement = place(config.for_step, table_of(config, model))
        step = Step(NotingDevice(spec, noted), model, config.for_step, placement)
        step.train(0, 0.0, 0.0, [batch, batch])
        step.evaluate_batch(batch)


def note_sampling(spec: DeviceSpec, model: ModelConfig, dtype: DType, noted: Launches) -> None:
    """Note the kernels that continue a text."""
    dev = NotingDevice(spec, noted)
    table = weight_table(model)
    weights, sizes = Weights(dev, table, resident(table, dtype)), {"slots": 4, "positions": 64}
    for kv_dtype in (dtype, E4M3) if dtype is BF16 else (dtype,):
        Generator(dev, model, weights, blocks=17, kv_dtype=kv_dtype, **sizes).rehearse()


def note_heads(spec: DeviceSpec, model: ModelConfig, noted: Launches) -> None:
    """Note the kernels after the library's backward of attention, divided by query heads."""
    dev, heads, size = NotingDevice(spec, noted), model.num_heads, model.head_dim
    packed = (1, 16, heads + 2 * model.num_kv_heads, size)
    d_qkv = dev.alloc("d_qkv", packed, BF16, "Activations")
    d_kv = dev.alloc("d_kv", (2, heads, 16, size), BF16, "Activations")
    attention.sum_heads(dev, d_qkv, d_kv)


def note_codes(spec: DeviceSpec, noted: Launches) -> None:
    """Note the products of few rows with matrices of codes."""
    dev = NotingDevice(spec, noted)

    def of(dtype: DType, *shape: int) -> Tensor:
        return dev.alloc("t", shape, dtype, "Activations")

    run = Nf4Run(0, 16, of(U8, 512), of(U8, 16), of(F32, 1), of(F32, 1))
    matrix = Nf4(shape=(16, 64), runs=(run,), levels=of(F32, 256))
    of_experts = Mxfp4(shape=(1, 16, 64), codes=of(U8, 512), exponents=of(U8, 32))
    of_bytes = [
        Bytes(shape=(16, 64), runs=(BytesRun(0, 16, of(dtype, 1024), of(F32, 1), 16, 16),))
        for dtype in (E4M3, I8)
    ]
    for rows in (1, 16, 32, skinny.MOST_CODED_ROWS):
        for codes in (matrix, of_experts, *of_bytes):
            skinny.coded(dev, of(BF16, rows, 16), of(BF16, rows, 64), codes)


def note_losses(spec: DeviceSpec, model: ModelConfig, noted: Launches) -> None:
    """Note the kernels of losses that read more than tokens."""
    batch = (np.zeros((4, 64), np.int32), np.zeros((4, 64), np.int32))
    for loss in LOSSES.keys() - {"ce"}:
        for dtype in ("bf16", "fp32"):
            shape = {"batch_size": 4, "seq_len": 64, "packing": "best-fit", "model_dtype": dtype}
            config = TrainConfig(**shape, loss=loss).normalized()
            placement = place(config.for_step, table_of(config, model))
            step = Step(NotingDevice(spec, noted), model, config.for_step, placement)
            step.train(0, 0.0, 0.0, [batch])
            step.evaluate_batch(batch)


def note_routers(spec: DeviceSpec, noted: Launches) -> None:
    """Note routers of the most experts, which need the most registers."""
    dev, S, E, top_k = NotingDevice(spec, noted), 64, route.MAX_EXPERTS, 10

    def of(dtype: DType, *shape: int) -> Tensor:
        return dev.alloc("t", shape, dtype, "Activations")

    chosen, shares, logits = of(I32, S, top_k), of(F32, S, top_k), of(F32, S, E)
    sums, factors = of(I64, sums_size(E)), of(F32, E + 1)
    for kind, renormalize in itertools.product(route.KINDS, (False, True)):
        how = {"kind": kind, "renormalize": renormalize}
        for groups in ((1, 1), (8, 4)):
            route.route(dev, chosen, shares, logits, groups=groups, sums=sums, **how)
        route.route_backward(dev, logits, shares, logits, chosen, factors=factors, **how)


class Run(NamedTuple):
    """A training step of a preset with fields of TrainConfig. With `sampled`, sampling in this type
    instead."""

    preset: str
    fields: tuple[tuple[str, Any], ...] = ()
    sampled: DType | None = None

    def note(self, spec: DeviceSpec, noted: Launches) -> None:
        """Add the launches of this run on a GPU as in `spec` to `noted`."""
        preset = PRESETS[self.preset]
        model = preset.with_layers(preset.layer_kinds)
        note_heads(spec, model, noted)
        note_codes(spec, noted)
        note_routers(spec, noted)
        if all(source.file != "loss/distill.cu" for source in noted):  # losses once for each card
            note_losses(spec, model, noted)
        if self.sampled is not None:
            note_sampling(spec, model, self.sampled, noted)
        else:
            note_training(spec, model, dict(self.fields), noted)


def all_runs(capability: int) -> list[Run]:
    """Return runs of all presets, and of all formats of the smallest, for cards of this
    capability."""
    first, *_ = PRESETS
    runs = [Run(name, sampled=dtype) for name in PRESETS for dtype in (BF16, F32)]
    of_all = [{"model_dtype": name} for name in ("bf16", "fp32")]
    for gradient in ("e4m3", "e5m2"):
        fields = FP8 | {"gradient_dtype": gradient}
        of_all += [fields, fields | {"fp8_recipe": "delayed", "head_dtype": "e4m3"}]
    for base, recipe in (("e4m3", "jit"), ("nf4", "delayed")):
        of_all.append(FP8 | {"fp8_recipe": recipe, "base_dtype": base} | ADAPTERS)
    of_codes = (CAPABILITY, *GENERIC_FP8)  # capabilities with e4m3 products of experts
    runs += [
        Run(name, tuple(fields.items()))
        for fields in of_all
        for name, model in PRESETS.items()
        if "matmul_dtype" not in fields or model.experts is None or capability in of_codes
    ]
    dense = {name: model for name, model in PRESETS.items() if model.experts is None}
    of_activation = {model.activation: name for name, model in dense.items() if model.gated}
    for name in of_activation.values():
        for gradient in ("e4m3", "e5m2"):
            fields = FP8 | {"gradient_dtype": gradient, "fp8_recipe": "delayed"}
            runs.append(Run(name, tuple((fields | {"mlp_dtype": "e4m3"}).items())))
    # These presets cover all layouts and tiles of int8 products.
    runs += [Run(name, tuple(INT8.items())) for name in ("tiny", "Qwen2.5-1.5B", "Qwen2.5-72B")]
    runs += [Run(name, tuple(TERNARY.items())) for name in ("tiny", "Qwen2.5-72B")]
    of_one = [INT8 | ADAPTERS, INT8 | {"grad_accum_dtype": "fp32"}, *formats()]
    for name in ("bf16", "fp32"):
        for base in (None, "e4m3", "e4m3-blocks", "int8", "nf4", "nvfp4"):
            fields = {"model_dtype": name, "matmul_dtype": name, "base_dtype": base}
            of_one.append(fields | ADAPTERS)
    runs += [Run(first, tuple(fields.items())) for fields in of_one]
    ahead = ADAPTERS | {"model_dtype": "bf16", "train": ("mtp",)}
    runs.append(Run("tiny-qwen3.5", tuple(ahead.items())))
    if capability in GENERIC_FP8:
        fields = FP8 | {"fp8_recipe": "delayed", "head_dtype": "e4m3", "fp8_accumulate": "fp16"}
        runs += [Run(name, tuple(fields.items())) for name in (first, *of_activation.values())]
    if capability == CAPABILITY:  # without dropout adapters are fused in both directions
        adapted = {"lora_rank": 8, "lora_dropout": 0.0}
        formats_of = [{"model_dtype": "bf16", "matmul_dtype": "bf16"}]
        for gradient in ("e4m3", "e5m2"):
            fields = FP8 | {"gradient_dtype": gradient, "base_dtype": "e4m3"}
            formats_of += [fields, fields | {"fp8_recipe": "delayed"}]
        formats_of = [adapted | fields for fields in formats_of]
        formats_of.append(FP8 | {"fp8_recipe": "delayed", "mlp_dtype": "e4m3"})
        runs += [Run("Qwen2.5-7B", tuple(fields.items())) for fields in formats_of]
        bf16 = {"model_dtype": "bf16", "matmul_dtype": "bf16"}
        of_experts = adapted | {"lora_targets": "experts"}
        for fields in (bf16, bf16 | of_experts, FP8 | {"base_dtype": "e4m3"} | of_experts):
            runs.append(Run("Qwen3-30B-A3B", tuple(fields.items())))
    return runs


def entries(found: dict[int, Launches]) -> set[tuple[str, str]]:
    """File and entry point of each kernel that is launched on any architecture."""
    return {(source.file, source.entry) for noted in found.values() for source in noted}


def launches_of(runs: Iterable[tuple[int, Run]]) -> dict[int, Launches]:
    """Return the launches of these runs by capability and compiled kernel. Kernels without a launch
    are added for all types."""
    found: dict[int, Launches] = {}
    for capability, run in runs:
        num_sms, _ = ARCHITECTURES[capability]
        spec = DeviceSpec(
            name="", capability=capability, num_sms=num_sms, memory=0, library_workspace=1 << 20
        )
        run.note(spec, found.setdefault(capability, {}))
    used = entries(found)
    for kernel in declared_kernels():
        if (kernel.file, kernel.entry) in used:
            continue
        variables = sorted({a.type for a in kernel.declared if a.is_type_variable})
        for types in itertools.product(("bf16", "f32"), repeat=len(variables)):
            bound = tuple(zip(variables, types, strict=True))
            key = KernelSource(kernel.file, kernel.entry, bound, ())
            for capability, noted in found.items():
                if kernel.capability in (None, capability):
                    noted.setdefault(key, set()).add(Launch(1, 0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A kernel as compiled for one architecture, and one of its launches."""

    capability: int
    source: KernelSource
    launch: Launch
    resources: Resources

    @property
    def blocks(self) -> int:
        """Number of blocks that must share a multiprocessor, so that one block hides another's
        epilogue or waits."""
        file, entry, types, consts = self.source
        grouped = file == "experts/grouped.cu" and self.launch.threads == 128  # fp8 codes: 256
        tiles = entry in ("attention_forward", "attention_backward_tiles")
        attention = tiles and ("T", "bf16") in types and dict(consts)["HEAD_DIM"] <= 128
        return 2 if grouped or attention else 1

    @property
    def problem(self) -> str | None:
        """The problem with the kernel's resources; None if there is none."""
        r, limit = self.resources, ARCHITECTURES[self.capability][1] << 10
        if r.spilled:
            return f"spills {r.spilled} bytes"
        if r.serialized:
            return "waits for each product of a warpgroup at once"
        # Warps get registers in units of 256.
        threads = self.blocks * -(-self.launch.threads // 32) * 32
        registers = -(-r.registers // 8) * 8 * threads
        if registers > REGISTERS:
            return f"{threads} threads need {registers} registers, there are {REGISTERS}"
        # Each block takes RESERVED bytes more; the limit is that of a single block.
        shared = self.blocks * (r.shared + self.launch.shared + RESERVED) - RESERVED
        if shared > limit:
            return f"needs {shared} bytes of shared memory of {limit}"
        return None

    def __str__(self) -> str:
        r = self.resources
        return (
            f"sm_{self.capability:<4} {r.registers:4} registers "
            f"{self.launch.threads:5} threads {r.shared + self.launch.shared:7} B shared "
            f"{r.stack:5} B stack  {self.source} {self.problem or ''}"
        )


def compiled(capability: int, source: KernelSource, launches: set[Launch]) -> list[Report]:
    """Compile one kernel, or find it in the cache."""
    cubin = compile_kernel(source, capability)
    return [
        Report(
            capability=capability,
            source=source,
            launch=launch,
            resources=cubin.resources,
        )
        for launch in sorted(launches)
    ]


def work_of(launches: dict[int, Launches]) -> list[Work]:
    """Return the compilations for these launches."""
    return [
        Work(capability, source, noted[source])
        for capability, noted in launches.items()
        for source in sorted(noted)
    ]


def reports(work: list[Work]) -> Iterator[Report]:
    """Yield a report for each launch of these kernels."""
    with ThreadPoolExecutor() as pool:
        for part in pool.map(lambda item: compiled(*item), work):
            yield from part


def main(
    arch: Annotated[list[int] | None, typer.Option(help="80, 89, 90, 100 or 120.")] = None,
    op: Annotated[str | None, typer.Option(help="Print only this operation's kernels.")] = None,
) -> None:
    """Compile every kernel."""
    problems = 0
    runs = (
        (capability, run) for capability in arch or ARCHITECTURES for run in all_runs(capability)
    )
    for report in reports(work_of(launches_of(runs))):
        problems += report.problem is not None
        if report.problem or op is None or report.source.file.endswith(f"/{op}.cu"):
            print(report)
    sys.exit(problems > 0)


if __name__ == "__main__":
    typer.run(main)
