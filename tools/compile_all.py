"""Compile every kernel for every architecture, without a GPU; print what each needs.

What is compiled is what training and sampling launch: steps of all presets in all formats run on a
plan device that notes its launches. Kernels that none of them uses are compiled for all types.
Exits 1 if a kernel spills registers to memory or asks for more than a multiprocessor has.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import llmq.ops
from llmq.base.dtypes import BF16, DTYPES, F32, DType
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.config.presets import PRESETS
from llmq.model.decode import Decoder
from llmq.model.step import Step
from llmq.runtime.compile import Resources, compile_kernels
from llmq.runtime.device import DeviceSpec
from llmq.runtime.kernel import Kernel, Source
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import place, resident, table_of
from llmq.state.weights import Weights

# Multiprocessors of a typical card, and KiB of shared memory that one block may have.
ARCHITECTURES = {80: (108, 163), 89: (128, 99), 90: (132, 227), 100: (148, 227), 120: (188, 99)}
FP8, INT8 = {"matmul_dtype": "e4m3"}, {"matmul_dtype": "int8"}
REGISTERS = 65536  # of a multiprocessor, on all of them


class Launch(NamedTuple):
    """How an entry point of a source is launched: threads of a block, bytes of shared memory."""

    entry: str
    threads: int
    shared: int


Launches = dict[Source, set[Launch]]


class Work(NamedTuple):
    """A source, compiled for one architecture, and how its entry points are launched."""

    capability: int
    source: Source
    launches: set[Launch]


class NotingDevice(PlanDevice):
    """A plan device that notes which kernels are launched and how."""

    def __init__(self, spec: DeviceSpec, noted: Launches):
        super().__init__(spec)
        self.noted = noted

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple,
        *,
        consts: dict[str, int] | None = None,
        smem: int = 0,
        flops: int = 0,
    ) -> None:
        super().launch(kernel, grid, block, args, consts=consts, smem=smem, flops=flops)
        if kernel.file.endswith(".cu"):
            source = Source.of(kernel, kernel.bind(args), consts)
            threads = int(np.prod(block))
            self.noted.setdefault(source, set()).add(Launch(kernel.entry, threads, smem))


def declared_kernels() -> list[Kernel]:
    """Every kernel of ours that llmq/ops declares."""
    kernels = {}
    for module in pkgutil.iter_modules(llmq.ops.__path__):
        names = vars(importlib.import_module(f"llmq.ops.{module.name}"))
        kernels |= {id(k): k for k in names.values() if isinstance(k, Kernel)}
    return [k for k in kernels.values() if k.file.endswith(".cu")]


ADAPTERS = {"lora_rank": 8, "lora_dropout": 0.1}


def formats() -> Iterator[dict[str, str]]:
    """Choices of formats as fields of TrainConfig: all, 8-bit moments only both together."""
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
    """One micro-step that overwrites gradients, one that adds, an update and an evaluation.

    Once more with recomputation, and documents that are masked.
    """
    B, T = 4, min(1024, model.max_positions)
    batch = (np.zeros((B, T), np.int32), np.zeros((B, T), np.int32))
    for more in (False, True):
        shape = {"batch_size": B, "seq_len": T, "z_loss": 1e-4}
        config = TrainConfig(**shape, recompute_block=more, document_mask=more, **fields)
        config = config.normalized()
        placement = place(config, table_of(config, model))
        step = Step(NotingDevice(spec, noted), model, config, placement)
        step.train(0, 0.0, 0.0, [batch])
        step.train(1, 0.0, 0.0, [batch, batch])
        step.evaluate_batch(batch)


def note_sampling(spec: DeviceSpec, model: ModelConfig, dtype: DType, noted: Launches) -> None:
    """A prompt and one more token."""
    dev = NotingDevice(spec, noted)
    table = weight_table(model)
    decoder = Decoder(dev, model, Weights(dev, table, resident(table, dtype)), 64)
    decoder.forward(np.zeros(32, np.int32), 0)
    decoder.forward(np.zeros(1, np.int32), 32)


@functools.cache
def all_launches(capability: int) -> Launches:
    """Every kernel launch there is, by what is compiled, on a card of this capability."""
    num_sms, _ = ARCHITECTURES[capability]
    spec = DeviceSpec(
        name="", capability=capability, num_sms=num_sms, memory=0, library_workspace=1 << 20
    )
    noted: Launches = {}
    presets = [model.with_layers(model.layer_kinds) for model in PRESETS.values()]
    for model in presets:
        for dtype in (BF16, F32):
            note_sampling(spec, model, dtype, noted)
        for name in ("bf16", "fp32"):
            note_training(spec, model, {"model_dtype": name}, noted)
        for gradient in ("e4m3", "e5m2"):
            fields = FP8 | {"gradient_dtype": gradient}
            note_training(spec, model, fields, noted)
            delayed = {"fp8_recipe": "delayed", "head_dtype": "e4m3"}
            note_training(spec, model, fields | delayed, noted)
    for model in {model.activation: model for model in presets if model.gated}.values():
        for gradient in ("e4m3", "e5m2"):
            fields = FP8 | {"gradient_dtype": gradient, "fp8_recipe": "delayed"}
            note_training(spec, model, fields | {"mlp_dtype": "e4m3"}, noted)
    for name in ("tiny", "Qwen2.5-1.5B", "Qwen2.5-72B"):  # which have all its layouts and tiles
        note_training(spec, PRESETS[name].with_layers(PRESETS[name].layer_kinds), INT8, noted)
    for fields in (ADAPTERS, {"grad_accum_dtype": "fp32"}):
        note_training(spec, presets[0], INT8 | fields, noted)
    for fields in formats():
        note_training(spec, presets[0], fields, noted)
    for name in ("bf16", "fp32"):
        for base in (None, "e4m3", "int8", "nf4"):
            fields = {"model_dtype": name, "matmul_dtype": name, "base_dtype": base} | ADAPTERS
            note_training(spec, presets[0], fields, noted)
    for base, recipe in (("e4m3", "jit"), ("nf4", "delayed")):
        fields = FP8 | {"fp8_recipe": recipe, "base_dtype": base} | ADAPTERS
        for model in presets:
            note_training(spec, model, fields, noted)
    used = {(source.file, launch.entry) for source in noted for launch in noted[source]}
    for kernel in declared_kernels():
        if (kernel.file, kernel.entry) not in used:
            variables = sorted({a.type for a in kernel.declared if a.is_type_variable})
            for types in itertools.product(("bf16", "f32"), repeat=len(variables)):
                key = Source(kernel.file, tuple(zip(variables, types, strict=True)), ())
                noted.setdefault(key, set()).add(Launch(kernel.entry, 1, 0))
    return noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An entry point as compiled for one architecture, and its launches' largest demands."""

    capability: int
    source: Source
    launch: Launch
    resources: Resources

    @property
    def problem(self) -> str | None:
        """Why it may not be so; None if all is well."""
        r, limit = self.resources, ARCHITECTURES[self.capability][1] << 10
        if r.spilled:
            return f"spills {r.spilled} bytes"
        # Registers are handed out to warps in units of 256.
        registers = -(-r.registers // 8) * 8 * (-(-self.launch.threads // 32) * 32)
        if registers > REGISTERS:
            return (
                f"{self.launch.threads} threads need {registers} registers, there are {REGISTERS}"
            )
        if r.shared + self.launch.shared > limit:
            return f"needs {r.shared + self.launch.shared} bytes of shared memory of {limit}"
        return None

    def __str__(self) -> str:
        r = self.resources
        return (
            f"sm_{self.capability:<4} {self.launch.entry:28} {r.registers:4} registers "
            f"{self.launch.threads:5} threads {r.shared + self.launch.shared:7} B shared "
            f"{r.stack:5} B stack  {self.source} {self.problem or ''}"
        )


def compiled(capability: int, source: Source, launches: set[Launch]) -> list[Report]:
    """Compile one source, or find it in the cache."""
    types = {variable: DTYPES[name] for variable, name in source.types}
    cubin = compile_kernels(source.file, types, dict(source.consts), capability)
    return [
        Report(
            capability=capability,
            source=source,
            launch=launch,
            resources=cubin.resources[launch.entry],
        )
        for launch in sorted(launches)
    ]


def work_of(capabilities: Iterable[int]) -> list[Work]:
    """What is compiled for these architectures."""
    return [
        Work(capability, source, launches)
        for capability in capabilities
        for source, launches in sorted(all_launches(capability).items())
    ]


def reports(work: list[Work]) -> Iterator[Report]:
    """Every entry point of these sources."""
    with ThreadPoolExecutor() as pool:
        for part in pool.map(lambda item: compiled(*item), work):
            yield from part


def main(
    arch: Annotated[list[int] | None, typer.Option(help="80, 89, 90, 100 or 120.")] = None,
    op: Annotated[str | None, typer.Option(help="Print only this operation's kernels.")] = None,
) -> None:
    """Compile every kernel."""
    problems = 0
    for report in reports(work_of(arch or ARCHITECTURES)):
        problems += report.problem is not None
        if report.problem or op is None or report.source.file == f"{op}.cu":
            print(report)
    sys.exit(problems > 0)


if __name__ == "__main__":
    typer.run(main)
