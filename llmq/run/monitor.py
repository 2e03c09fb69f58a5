"""The lines of a run about its card and its steps: names, speed of light, and what each reached."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, MIB
from llmq.ops import matmul, random
from llmq.options.adapters import adapters_of
from llmq.options.options import TrainConfig
from llmq.plan.sol import FlopsPerToken, flops_per_token, nanoseconds_per_token, peaks
from llmq.run.events import Member, StepDone
from llmq.run.metrics import Reporter
from llmq.run.trainer import Trainer
from llmq.runtime.arena import align_up
from llmq.runtime.device import Device
from llmq.runtime.gpu_info import GpuInfo
from llmq.runtime.nvml import NvmlGpu

# ------------------------------------------------------------------------------------------------
# [System] and [Speed of Light]


def system_record(index: int, info: GpuInfo, source: NvmlGpu | None) -> dict[str, Any]:
    """Fields of the `gpu-model` record; without NVML driver and uuid are "", reserved is 0."""
    fields = {"id": index, "driver": "", "uuid": "", "reserved": 0, **asdict(info)}
    return fields | ({} if source is None else source.identity())


def system_lines(record: dict[str, Any]) -> list[str]:
    """The lines of [System r]."""
    driver, runtime = (
        f"{record[name] // 1000}.{record[name] % 1000 // 10}"
        for name in ("cuda_driver", "cuda_runtime")
    )
    total = record["memory"] // MIB
    return [
        f"  Device {record['id']}: {record['name']}",
        f"  CUDA version: driver {driver}, runtime {runtime}",
        f"  Memory: {total - record['free'] // MIB} MiB / {total} MiB",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOfLight:
    """The most tokens per second that a card's data sheet allows.

    peaks: TF32, BF16, FP8 and INT8, in TFLOP/s. dtype: of weights and activations, "fp32" or
    "bf16". matmul_dtype, head_dtype: of the products of the blocks and of the LM head, the same,
    "e4m3" or "int8".
    nanoseconds: per token, over all GPUs.
    """

    flops: FlopsPerToken
    peaks: tuple[float, float, float, float]
    dtype: str
    matmul_dtype: str
    head_dtype: str
    nanoseconds: int

    @property
    def tokens_per_second(self) -> int:
        """llm.q's rounding."""
        return 1_000_000_000 // self.nanoseconds

    def percent(self, tokens: int, milliseconds: float) -> float:
        """How close a step of so many tokens came, in percent."""
        return 100.0 * self.nanoseconds * tokens / (milliseconds * 1e6)

    def record(self) -> dict[str, Any]:
        """Fields of the `sol` record: FLOPs per token, tokens per second, TFLOP/s."""
        tf32, bf16, fp8, int8 = self.peaks
        return asdict(self.flops) | {
            "tps": self.tokens_per_second,
            "tf32_peak": tf32,
            "bf16_peak": bf16,
            "fp16_peak": bf16,  # the same on every card of the table
            "fp8_peak": fp8,
            "int8_peak": int8,
        }

    def lines(self, measured: float | None) -> list[str]:
        """The lines of [Speed of Light]. measured: BF16 TFLOP/s of this card, None if unknown."""
        label, blocks = _PEAKS[self.dtype][1], _PEAKS[self.matmul_dtype][1]
        rows = [
            f"  Peak {_PEAKS[dtype][1]:>4}: {_peak(self.peaks, dtype):8.1f} TFLOP/s"
            for dtype in dict.fromkeys((self.dtype, self.matmul_dtype))
        ]
        if measured is not None:
            percent = 100 * measured / self.peaks[1]
            rows.append(f"  Benchmark:  {percent:6.1f}%         of spec sheet")
        for name, flops, used in (
            ("Blocks:", self.flops.blocks, blocks),
            ("LM-Head:", self.flops.lm_head, _PEAKS[self.head_dtype][1]),
            ("Attention:", self.flops.attention, label),
        ):
            unit, size = ("G", 1e9) if flops > 2e9 else ("M", 1e6)
            rows.append(f"  {name:<10} {flops / size:8.1f} {unit}FLOP   in {used}")
        return [*rows, f"  SOL:       {self.tokens_per_second:8d} tok/s"]


# By format: which of the peaks, and its name.
_PEAKS = {"fp32": (0, "TF32"), "bf16": (1, "BF16"), "e4m3": (2, "FP8"), "int8": (3, "INT8")}


def _peak(values: tuple[float, float, float, float], dtype: str) -> float:
    return values[_PEAKS[dtype][0]]


def speed_of_light(
    config: TrainConfig, model: ModelConfig, device_name: str, world_size: int = 1
) -> SpeedOfLight | None:
    """The speed of light of a run.

    None for a card whose peak is not known, and for a model of less than a nanosecond a token.
    """
    found = peaks(device_name)
    if found is None:
        return None
    dtype = config.model_dtype
    flops = flops_per_token(model, config.seq_len, adapters_of(config))
    used = [_peak(found, part) for part in (config.matmul_dtype, config.head_dtype, dtype)]
    if min(used) == 0:  # the card has no fp8
        return None
    nanoseconds = nanoseconds_per_token(flops, *used, world_size)
    if nanoseconds == 0:
        return None
    return SpeedOfLight(
        flops=flops,
        peaks=found,
        dtype=dtype,
        matmul_dtype=config.matmul_dtype,
        head_dtype=config.head_dtype,
        nanoseconds=nanoseconds,
    )


PRODUCT_SIZES = (8192, 4096, 2048)  # of the timed product: the largest that there is memory for
PRODUCT_SECONDS = 0.1


def measured_peak(dev: Device) -> float | None:
    """TFLOP/s of a large BF16 product of random numbers, in at most 0.3 s; None if it cannot be.

    Allocates nothing: it uses the device's stack, and stays below the high-water mark of a step,
    or what the stack reports would be this product. Not for steady state: it synchronizes.
    """
    if dev.kind != "cuda":
        return None
    library = align_up(dev.spec.library_workspace)
    for n in PRODUCT_SIZES:
        if 3 * align_up(2 * n * n) + library < dev.stack.capacity - dev.stack.used:
            break
    else:
        return None
    with (
        dev.scratch("peak_a", (n, n), BF16) as a,
        dev.scratch("peak_b", (n, n), BF16) as b,
        dev.scratch("peak_out", (n, n), BF16) as out,
    ):
        for seed, operand in enumerate((a, b)):  # zeros would be faster than any real numbers
            random.normal(dev, operand, 1.0, seed)

        def products(count: int) -> float:
            dev.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                matmul.matmul(dev, out, a, b, trans_b=True)
            dev.synchronize()
            return (time.perf_counter() - start) / count

        products(1)  # loads and tunes
        count = max(1, int(PRODUCT_SECONDS / products(3)))
        return 2 * n**3 / products(count) / 1e12


# ------------------------------------------------------------------------------------------------
# [T]


class StepReports(Member):
    """Reports each step."""

    def __init__(self, trainer: Trainer, reporter: Reporter, sol: SpeedOfLight | None):
        self._trainer, self._reporter, self._sol = trainer, reporter, sol

    def after_step(self, done: StepDone) -> None:
        computed, tokens = self._trainer.tokens_of(done.ticket)
        sol = self._sol and self._sol.percent(computed, done.ms)
        given = (done.step, done.result, done.lr, done.ms, tokens, sol, done.epoch)
        self._reporter.train_step(*given)
        if done.number == 0:  # all products have been tuned
            chosen = self._trainer.ranks.run_first(
                "choices", lambda rank: (rank.dev.fast_products(), rank.dev.choices())
            )
            self._reporter.choices(done.step, *chosen)

    def state(self) -> dict[str, Any]:
        return self._reporter.history

    def load(self, state: Mapping[str, Any]) -> None:
        total, count = state.get("losses_since_evaluation", (0.0, 0))
        total = None if total is None else float(total)
        self._reporter.history = {**state, "losses_since_evaluation": [total, index(count)]}
