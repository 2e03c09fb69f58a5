"""Steps of models with a quarter of the layers and of the vocabulary: the time of each kind of
kernel launch.

At the power limit a GPU's clock depends on the mix of work, averaged over more than a block. A
quarter of the layers with a quarter of the vocabulary keeps the mix of the whole model. A few
layers with the whole LM head would run at another clock.
"""

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from llmq.base.batch import Batch
from llmq.base.errors import LlmqError
from llmq.bench.child import SETTLE, WARM_UP, Job
from llmq.bench.measure import (
    MANY,
    idle_share,
    launch_times,
    open_trainer,
    random_batches,
    steps_for,
    timed_steps,
)
from llmq.options.presets import preset
from llmq.plan.memory import OutOfMemory
from llmq.rig.findings import NO_ROOM
from llmq.run.trainer import Trainer
from llmq.runtime.timing import LaunchTime

BEHIND = 0.1  # largest share of a step by which its launches may outlast the step, see in_time

Table = dict[str, list[list[Any]]]
"""Points [sizes, seconds] by kind of launch, one point for each tuple of sizes."""


def table_of(times: Iterable[LaunchTime]) -> Table:
    """Return medians of the main stream's launches that take any time."""
    found: defaultdict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for launch in times:
        if launch.main and launch.kind is not None and launch.ms > 0 and min(launch.kind.sizes) > 0:
            found[launch.kind].append(launch.ms / 1e3)
    return _medians(found)


def as_in_steps(rounds: list[list[LaunchTime]], seconds: float) -> Table:
    """Return medians of timed launches, scaled to an untimed step of `seconds`. Timing marks change
    the GPU's clock, and the launches' times leave out the gaps between launches. A common factor
    corrects all times, so that the launches of a step add up to `seconds`."""
    table = table_of(time for times in rounds for time in times)
    medians = {(name, tuple(s)): t for name, points in table.items() for s, t in points}
    total = sum(medians.get(time.kind, time.ms / 1e3) for time in rounds[0] if time.main)
    factor = seconds / total if total else 1.0
    return {name: [[s, factor * t] for s, t in points] for name, points in table.items()}


def in_time(idle: float) -> bool:
    """Return True if the times of a step's launches are usable one by one. idle: share of the step
    in which no launch ran; negative if the launches took longer than the step. A changed clock
    explains at most BEHIND. A larger difference means that the GPU waited for the host between a
    launch and its marks. The wait differs between launches, and no common factor corrects it."""
    return idle > -BEHIND


def merged(tables: Iterable[Table]) -> Table:
    """Merge tables of several measurements; points of equal sizes become a point with their
    median."""
    found: defaultdict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for table in tables:
        for name, points in table.items():
            for sizes, seconds in points:
                found[name, tuple(sizes)].append(seconds)
    return _medians(found)


def _medians(found: Mapping[tuple[str, tuple[int, ...]], list[float]]) -> Table:
    table: Table = {}
    for (name, sizes), seconds in sorted(found.items()):
        table.setdefault(name, []).append([list(sizes), statistics.median(seconds)])
    return table


AHEAD = 0.4  # seconds of untimed steps before each timed step, at the same power
ROUNDS = 3  # number of timed steps
RECENT = 3  # last runs, the longest of which bounds the next; the first run also loads libraries
BATCHES = (32, 16, 8, 4, 2, 1)  # batch sizes, of which the largest that fits is used
QUARTER = 4
MULTIPLE = 128  # vocabulary sizes are multiples of this number, like Qwen2.5's vocabulary size
BESIDE = "beside"  # key in a run's options: True for the kernels that a run on several GPUs uses
FIRST = 5  # number of runs measured with BESIDE on a machine of several GPUs
SHARED = {"from-scratch": True, "seq-len": 1024, "grad-accumulation": 2, "gpus": 1, "watchdog": 0}
WHOLE = {"model-dtype": "bf16", "opt-m-dtype": "bf16", "opt-v-dtype": "bf16"}
FP8 = {"matmul-dtype": "e4m3", "fp8-recipe": "delayed"}
FAST = {"fp8-fast-accumulation": "all", "head-dtype": "e4m3"}
USUAL = SHARED | FP8  # options that titles leave out
JIT = {"fp8-recipe": "jit"}
EXACT = JIT | {"fp8-fast-accumulation": "none"}
AGAIN = {"recompute-norm": True, "recompute-ffn": True}
# Half of the layers recompute, as in `--fit` for 7B, because recomputation changes the outputs of
# products.
HALF = {"recompute-swiglu": True, "recompute-layers": "0-3"}
MOMENTS = {"opt-m-dtype": "e4m3", "opt-v-dtype": "e4m3"}
LORA = {"lora-rank": 16, "batch-size": 4}
CODES = {"base-dtype": "e4m3", "fp8-recipe": "delayed", "head-dtype": "e4m3"}
INT8 = {"matmul-dtype": "int8"}
# Attention takes half or two thirds of a step of such length, at other clocks than products.
LONG = {"seq-len": 16384, "recompute-swiglu": True, "batch-size": 2}
LONGEST = {"seq-len": 32768, "recompute-swiglu": True, "batch-size": 1}
NF4 = {"base-dtype": "nf4", "recompute-block": True, "lmhead-chunks": 8, "batch-size": 1}


def quarter(model: str, **options: Any) -> dict[str, Any]:
    """Return the options of a run with a quarter of the model's layers and vocabulary."""
    whole = preset(model)
    layers = max(whole.num_layers // QUARTER, 1)
    vocab_size = whole.vocab_size * layers / whole.num_layers
    sizes = {"num-layers": layers, "vocab-size": MULTIPLE * math.ceil(vocab_size / MULTIPLE)}
    return SHARED | {"model": model} | sizes | options


def runs(fp8: bool, gpus: int = 1) -> list[dict[str, Any]]:
    """Return the options of every run, the most informative run first: sizes, formats, small
    micro-batches. batch-size is an upper limit. gpus: number of the machine's GPUs. Several GPUs
    use other kernels for products than a single GPU. The first runs are therefore measured with the
    kernels of one GPU and of several GPUs."""
    alone = _runs(fp8)
    beside = [options | {BESIDE: True} for options in alone[:FIRST]] if gpus > 1 else []
    return beside + alone


def _runs(fp8: bool) -> list[dict[str, Any]]:
    small, mid, larger, large = (f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B"))
    many = HALF | {"batch-size": 16}
    found = [
        quarter(mid, **WHOLE | FP8),
        quarter(large, **WHOLE | FP8 | many),
        quarter(small, **WHOLE | FP8),
        quarter(mid, **WHOLE),
        quarter(small, **WHOLE),
        quarter(large, **LORA),
        quarter(large, **LORA | CODES | HALF),
        quarter(large, **LORA | {"base-dtype": "e4m3"} | JIT | HALF),
        quarter(large, **WHOLE | FP8 | many | {"mlp-dtype": "e4m3"}),
        quarter(mid, **WHOLE | FP8 | JIT),
        quarter(large, **LORA | NF4),
        quarter(mid, **WHOLE | INT8),
        quarter(large, **LORA | INT8),
        quarter(mid, **WHOLE | FP8 | LONG),
        quarter(mid, **WHOLE | FP8 | LONGEST),
        quarter(large, **WHOLE | FP8 | FAST | AGAIN | {"batch-size": 16}),
        quarter(small, **WHOLE | FP8 | FAST | MOMENTS),
        quarter(larger, **WHOLE | FP8 | {"batch-size": 16}),
        quarter(large, **WHOLE | many),
        quarter(mid, **WHOLE | FP8 | {"batch-size": 8}),
        quarter(small, **WHOLE | FP8 | {"batch-size": 4}),
        quarter(large, **WHOLE | FP8 | {"batch-size": 2}),
        quarter(mid, **WHOLE | FP8 | EXACT),
        quarter(mid, **WHOLE | {"batch-size": 8}),
        quarter(small, **WHOLE | {"batch-size": 4}),
        quarter(large, **WHOLE | {"batch-size": 2}),
        quarter(mid, **WHOLE | LONG),
        quarter(mid, **WHOLE | LONGEST),
    ]
    return [options for options in found if fp8 or "e4m3" not in options.values()]


def title_of(options: dict[str, Any]) -> str:
    """Return a short title of a run, for progress and the report."""
    flags = [str(options["model"]).rpartition("-")[2], options.get("matmul-dtype", "bf16")]
    flags += ["beside others"] if options.get(BESIDE) else []
    flags += [
        f"{name} {options[name]}"
        for name in (
            *("fp8-fast-accumulation", "head-dtype", "mlp-dtype", "fp8-recipe"),
            *("lora-rank", "base-dtype", "batch-size", "seq-len"),
        )
        if options.get(name, USUAL.get(name)) != USUAL.get(name)
    ]
    return ", ".join(flags)


def measure(job: Job, *, runs: list[dict[str, Any]], settle: float = SETTLE, **_: Any) -> None:
    """Measure launches of steps, the part `steps` of `llmq rig`. The result has `steps`, a record
    for each run that time allowed, and `refused`, which says by index why a run does not fit. A
    record has `launches`, `seconds` of the measurement, and `tokens_per_second`, `idle`, `options`
    and BESIDE of the run."""
    found: dict[str, Any] = {"steps": [], "refused": {}}
    took: list[float] = []
    for index, options in enumerate(runs):
        if took and job.left < max(took[-RECENT:]):
            break
        start = time.monotonic()
        print(f"  {title_of(options)}", flush=True)
        try:
            with library_products() if options.get(BESIDE) else nullcontext():
                record = _measured(job, options, settle)
            record["seconds"] = time.monotonic() - start
            found["steps"].append(record)
        except LlmqError as error:
            found["refused"][str(index)] = " ".join(str(error).split())
        took.append(time.monotonic() - start)
        job.note(found)


@contextmanager
def library_products() -> Iterator[None]:
    """Let devices that are made within the context use no fused products, as on a GPU that
    exchanges data with other GPUs (`Device.fused`)."""
    before = os.environ.get("LLMQ_FUSED")
    os.environ["LLMQ_FUSED"] = "none"
    try:
        yield
    finally:
        del os.environ["LLMQ_FUSED"]
        if before is not None:
            os.environ["LLMQ_FUSED"] = before


def _measured(job: Job, given: dict[str, Any], settle: float) -> dict[str, Any]:
    """Measure the largest micro-batch of BATCHES that fits and does not exceed the options' batch
    size. Raises LlmqError if no micro-batch fits."""
    most = given.get("batch-size", BATCHES[0])
    options = {name: value for name, value in given.items() if name != BESIDE}
    for batch in (batch for batch in BATCHES if batch <= most):
        options |= {"batch-size": batch}
        try:
            trainer = open_trainer(options, MANY)
            break
        except OutOfMemory:
            continue
    else:
        raise LlmqError(NO_ROOM)
    with trainer:
        batches = random_batches(trainer)
        for _ in range(WARM_UP):
            trainer.step(batches)
        seconds = steps_for(trainer, batches, min(settle, max(job.left - settle, 0.0)))
        step = statistics.median(seconds[len(seconds) // 2 :])
        count = math.ceil(min(AHEAD, settle) / step)
        rounds = [_launches(trainer, batches, count) for _ in range(ROUNDS)]
        return {
            "options": options,
            BESIDE: given.get(BESIDE, False),
            "tokens_per_second": trainer.plan.tokens / step,
            "idle": statistics.median(idle_share(times, step) for times in rounds),
            "launches": as_in_steps(rounds, step),
        }


def _launches(trainer: Trainer, batches: list[Batch], count: int) -> list[LaunchTime]:
    """Time each launch of a step by itself, after count - 1 untimed steps. The last untimed step
    still runs when timing starts, so that the host stays ahead of the GPU, at the clock of normal
    steps. Launches of other streams take turns, so that no launch's time includes a wait for
    another launch."""
    if count > 1:
        timed_steps(trainer, batches, count - 1)
    return launch_times(trainer, batches, in_turn=True)
