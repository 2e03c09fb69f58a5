"""Console lines of a run about its card and its steps: system, speed of light, results of each
step, and experts without tokens."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.callback import Callback, RunEnd, StepDone
from llmq.base.dtypes import BF16, MIB
from llmq.base.stopwatch import START
from llmq.ops.pointwise import elementwise
from llmq.ops.product import matmul
from llmq.options.adapters import adapters_of
from llmq.options.options import TrainConfig
from llmq.plan.sol import FlopsPerToken, flops_per_token, nanoseconds_per_token, peaks
from llmq.run.metrics import Reporter
from llmq.run.ranks import Rank
from llmq.run.trainer import Trainer
from llmq.runtime.arena import align_up
from llmq.runtime.device import Device
from llmq.runtime.gpu_info import GpuInfo
from llmq.runtime.nvml import NvmlGpu

# ------------------------------------------------------------------------------------------------
# [System] and [Speed of Light]


def system_record(index: int, info: GpuInfo, source: NvmlGpu | None) -> dict[str, Any]:
    """Return the fields of the `gpu-model` record. Without NVML driver and uuid are "", and
    reserved is 0."""
    fields = {"id": index, "driver": "", "uuid": "", "reserved": 0, **asdict(info)}
    return fields | ({} if source is None else source.identity())


def system_lines(record: dict[str, Any]) -> list[str]:
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


# Names on data sheets of the formats in `peaks`, in the order of `peaks`.
_NAMES = {"fp32": "TF32", "bf16": "BF16", "e4m3": "FP8", "int8": "INT8"}


@dataclass(frozen=True, slots=True)
class SpeedOfLight:
    """The most tokens per second that a card's data sheet allows. flops: FLOPs per token. peaks:
    TFLOP/s by format. formats: number formats of products in blocks, of the LM head, and of
    attention. nanoseconds: least time per token of all GPUs together."""

    flops: FlopsPerToken
    peaks: dict[str, float]
    formats: tuple[str, str, str]
    nanoseconds: int

    @property
    def tokens_per_second(self) -> int:
        """Return the most tokens per second, rounded down as in llm.q."""
        return 1_000_000_000 // self.nanoseconds

    def percent(self, tokens: int, milliseconds: float) -> float:
        """Return the speed of a step with `tokens` tokens, in percent of the speed of light."""
        return 100.0 * self.nanoseconds * tokens / (milliseconds * 1e6)

    def record(self) -> dict[str, Any]:
        """Return the fields of the `sol` record: FLOPs per token, tokens per second, TFLOP/s."""
        rates = {f"{_NAMES[name].lower()}_peak": peak for name, peak in self.peaks.items()}
        rates["fp16_peak"] = self.peaks["bf16"]  # equal on every card in the table
        return asdict(self.flops) | {"tps": self.tokens_per_second} | rates

    def lines(self, measured: float | None) -> list[str]:
        """Return the lines of [Speed of Light]. measured: BF16 TFLOP/s of this card, None if
        unknown."""
        blocks, _, attention = self.formats
        rows = [
            f"  Peak {_NAMES[used]:>4}: {self.peaks[used]:8.1f} TFLOP/s"
            for used in dict.fromkeys((attention, blocks))
        ]
        if measured is not None:
            percent = 100 * measured / self.peaks["bf16"]
            rows.append(f"  Benchmark:  {percent:6.1f}%         of spec sheet")
        counts = (self.flops.blocks, self.flops.lm_head, self.flops.attention)
        for name, flops, used in zip(_PARTS, counts, self.formats, strict=True):
            unit, size = ("G", 1e9) if flops > 2e9 else ("M", 1e6)
            rows.append(f"  {name:<10} {flops / size:8.1f} {unit}FLOP   in {_NAMES[used]}")
        return [*rows, f"  SOL:       {self.tokens_per_second:8d} tok/s"]


_PARTS = ("Blocks:", "LM-Head:", "Attention:")


def speed_of_light(
    config: TrainConfig, model: ModelConfig, device_name: str, world_size: int = 1
) -> SpeedOfLight | None:
    """Return the speed of light of a run.

    Returns None for a card with unknown peak, or if a token takes less than 1 ns.
    """
    found = peaks(device_name)
    if found is None:
        return None
    flops = flops_per_token(
        model, config.seq_len, adapters_of(config), config.mtp_part(config.batch_size)
    )
    formats = (config.product_dtype, config.head_dtype, config.model_dtype)
    of_card = dict(zip(_NAMES, found, strict=True))
    used = [of_card[name] for name in formats]
    if min(used) == 0:  # the card has no fp8
        return None
    nanoseconds = nanoseconds_per_token(flops, *used, world_size)
    return SpeedOfLight(flops, of_card, formats, nanoseconds) if nanoseconds else None


PRODUCT_SIZES = (8192, 4096, 2048)
PRODUCT_SECONDS = 0.1


def measured_peak(
    dev: Device, sizes: Sequence[int] = PRODUCT_SIZES, seconds: float = PRODUCT_SECONDS
) -> float | None:
    """Return the TFLOP/s of a large BF16 product of random numbers; None on the CPU, or without
    memory. sizes: candidates for M = N = K; the first size that fits counts. The call takes about
    three times `seconds`, uses the device's stack below the high-water mark of a step, and
    synchronizes."""
    if dev.kind != "cuda":
        return None
    library = align_up(dev.spec.library_workspace)
    for n in sizes:
        if 3 * align_up(2 * n * n) + library < dev.stack.capacity - dev.stack.used:
            break
    else:
        return None
    with (
        dev.scratch("peak_a", (n, n), BF16) as a,
        dev.scratch("peak_b", (n, n), BF16) as b,
        dev.scratch("peak_out", (n, n), BF16) as out,
    ):
        for seed, operand in enumerate((a, b)):  # a product of zeros would be faster
            elementwise.normal(dev, operand, 1.0, seed)

        def products(count: int) -> float:
            dev.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                matmul.matmul(dev, out, a, b, trans_b=True)
            dev.synchronize()
            return (time.perf_counter() - start) / count

        products(1)  # the first product loads and tunes the kernel
        count = max(1, int(seconds / products(3)))
        return 2 * n**3 / products(count) / 1e12


# ------------------------------------------------------------------------------------------------
# [T]


class StepReports(Callback):
    """Reports each step on the console, in the live view and in the log, and closes view and
    log."""

    def __init__(self, trainer: Trainer, reporter: Reporter, sol: SpeedOfLight | None):
        self._trainer, self._reporter, self._sol = trainer, reporter, sol

    def on_step(self, step: StepDone) -> None:
        computed, tokens = self._trainer.tokens_of(step.ticket)
        sol = self._sol and self._sol.percent(computed, step.ms)
        self._reporter.train_step(step, tokens, sol)
        if step.number == 0:  # the first step has tuned all products
            chosen = self._trainer.ranks.run_first(
                "choices", lambda rank: (rank.dev.fast_products(), rank.dev.choices())
            )
            self._reporter.choices(step.step, *chosen)
            self._reporter.seconds("first step", START.take(last=True), step.step)

    def on_end(self, end: RunEnd) -> None:
        self._reporter.close()


class Probe(Callback):
    """Measures single steps; the loop waits for the results of measured steps."""

    def measures(self, step: int) -> bool:
        """Return True if this step is measured."""
        return True

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Return a context within which a measured step is enqueued."""
        yield


class TimeBreakdown(Probe):
    """Reports the time of each part of a step, for --debug-time-breakdown."""

    def __init__(self, trainer: Trainer, reporter: Reporter):
        self._trainer, self._reporter = trainer, reporter
        self._timings: list[list[tuple[str, float]]] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self._trainer.ranks.time_parts() as self._timings:
            yield

    def on_step(self, step: StepDone) -> None:
        of_all = [ranges for own in self._trainer.world.gather(self._timings) for ranges in own]
        self._reporter.time_breakdown(step.step, of_all, step.result.communication)


STEPS = 1000
"""Number of steps in a row without a token after which an expert counts as idle."""
SHOWN = 8
"""Most experts that a warning names."""


class IdleExperts(Callback):
    """Warns of experts without tokens. Such experts are not trained, and without a load-balancing
    loss routers rarely choose them again. The counts of tokens are read every `every` steps."""

    def __init__(self, trainer: Trainer, reporter: Reporter, every: int = STEPS):
        self._trainer, self._reporter, self._every = trainer, reporter, every
        self._before: np.ndarray | None = None

    def on_step(self, step: StepDone) -> None:
        """Compare the counts of tokens every `every` steps, which waits for the devices."""
        if self._trainer.model.experts is None or (step.number + 1) % self._every:
            return
        counts = self._counts()
        idle = np.argwhere(counts == (0 if self._before is None else self._before))
        self._before = counts
        if len(idle):
            model = self._trainer.model
            layers = [i for i in range(model.num_layers) if model.has_experts(i)]
            names = [f"{expert} of layer {layers[layer]}" for layer, expert in idle[:SHOWN]]
            more = f" and {len(idle) - SHOWN} more" * (len(idle) > SHOWN)
            self._reporter.message(
                f"WARNING: no token has met {len(idle)} of {counts.size} experts in the last "
                f"{self._every} steps: {', '.join(names)}{more}; see --router-aux-loss",
                step.step,
            )

    def _counts(self) -> np.ndarray:
        """Return the tokens per expert of all ranks since the run began, int64 (layers with
        experts, experts)."""
        experts = self._trainer.model.experts.count

        def counts(rank: Rank) -> np.ndarray:
            return rank.dev.download(rank.step.model.balance.totals)[:, :experts]

        return np.sum(self._trainer.ranks.everywhere("counts of experts", counts), axis=0)
