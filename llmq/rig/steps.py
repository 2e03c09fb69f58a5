"""Real steps of models of a third of their layers: how long each kind of launch takes in them."""

from __future__ import annotations

import statistics
import time
from typing import Any

from llmq.base.batch import Batch
from llmq.base.dtypes import U8
from llmq.base.errors import LlmqError
from llmq.bench.measure import idle_share, launch_times, open_trainer, random_batches, timed_steps
from llmq.plan.memory import OutOfMemory
from llmq.rig.child import Job
from llmq.rig.launches import table_of
from llmq.runtime.timing import LaunchTime
from llmq.train.trainer import Trainer

WARM_UP = 3  # steps: launched one by one, captured, replayed
SETTLE = 3.0  # seconds of steps before launches are timed
ROUNDS = 3  # steps whose launches are timed
BATCHES = (32, 16, 8, 4, 2, 1)  # sequences, of which as many as fit are taken
# Layers of a model: a third of it, so that its head takes no larger part of the time, and of what
# makes clocks fall, than about twice what it takes in the whole; where 8 sequences of that do not
# fit, the fewest of which each kind of launch is there.
LAYERS = {"Qwen2.5-0.5B": 8, "Qwen2.5-1.5B": 9, "Qwen2.5-3B": 12, "Qwen2.5-7B": 9}
LEAST_BATCH, FEWEST_LAYERS = 8, 3
AHEAD = 0.1  # seconds of fills before these, at FILL_RATE; slower cards take longer
FILLED, FILL_RATE = 256 << 20, 4e12  # bytes at a time, at most, and per second
MANY = 10_000  # steps that a trainer is opened for: more than there is time for
SHARED = {
    "from-scratch": True,
    "model-dtype": "bf16",
    "opt-m-dtype": "bf16",
    "opt-v-dtype": "bf16",
    "seq-len": 1024,
    "grad-accumulation": 2,
    "gpus": 1,
    "watchdog": 0,
}
FP8 = {"matmul-dtype": "e4m3", "fp8-recipe": "delayed"}
FAST = {"fp8-fast-accumulation": "all"}
EXACT = {"fp8-fast-accumulation": "none"}


def runs(fp8: bool) -> list[dict[str, Any]]:
    """The options of every run, the most telling first: sizes, formats, and small micro-batches."""
    small, mid, large = ({"model": f"Qwen2.5-{size}"} for size in ("0.5B", "1.5B", "7B"))
    plain = [mid, small, large]
    few = [mid | {"batch-size": 8}, small | {"batch-size": 4}, large | {"batch-size": 2}]
    bf16 = [SHARED | options for options in (*plain, *few)]
    int8 = SHARED | mid | {"matmul-dtype": "int8"}
    if not fp8:
        return [*bf16[:3], int8, *bf16[3:]]
    codes = [SHARED | FP8 | options for options in (*plain, *few)]
    others = [
        SHARED | FP8 | FAST | small | {"head-dtype": "e4m3"},
        SHARED | FP8 | EXACT | mid,
        SHARED | FP8 | FAST | large | {"head-dtype": "e4m3", "lmhead-chunks": 4},
        SHARED | FP8 | EXACT | small | {"fp8-recipe": "jit"},
        SHARED | FP8 | {"model": "Qwen2.5-3B"},
        int8,
    ]
    pairs = [run for pair in zip(codes, bf16, strict=True) for run in pair]
    return [*pairs[:6], *others, *pairs[6:]]


def measure(job: Job, *, options: dict[str, Any], settle: float = SETTLE, **_: Any) -> None:
    """The part: `launches`, and `tokens_per_second`, `idle` and `options` of the run they are of.

    The micro-batch is the largest of BATCHES that fits, unless the options have one.
    """
    given = options
    batches = [options["batch-size"]] if "batch-size" in options else BATCHES
    large = [batch for batch in batches if batch >= min(LEAST_BATCH, batches[0])]
    layers = LAYERS[options["model"]]
    sizes = [(layers, batch) for batch in large] + [(FEWEST_LAYERS, batch) for batch in batches]
    for layers, batch in sizes:
        options = given | {"num-layers": layers, "batch-size": batch}
        try:
            trainer = open_trainer(options, MANY)
            break
        except OutOfMemory:
            continue
    else:
        raise LlmqError("not even a micro-batch of one sequence fits")
    with trainer:
        batches = random_batches(trainer)
        for _ in range(WARM_UP):
            trainer.step(batches)
        end = time.monotonic() + min(settle, max(job.left - settle, 0.0))
        seconds = [timed_steps(trainer, batches, 1)[0]]
        while time.monotonic() < end:
            seconds.append(timed_steps(trainer, batches, max(1, round(0.5 / seconds[-1])))[0])
        step = statistics.median(seconds[len(seconds) // 2 :])
        rounds = [_launches(trainer, batches) for _ in range(ROUNDS)]
        job.note(
            {
                "options": options,
                "tokens_per_second": trainer.plan.tokens / step,
                "idle": statistics.median(idle_share(times, step) for times in rounds),
                "launches": table_of(time for times in rounds for time in times),
            }
        )


def _launches(trainer: Trainer, batches: list[Batch]) -> list[LaunchTime]:
    """Of a step, each timed by itself, with work before it that keeps the host ahead of the GPU."""
    dev = trainer.dev
    free = dev.stack.capacity - dev.stack.used if dev.kind == "cuda" else 0
    if size := min(free // 2, FILLED) // 256 * 256:
        with dev.scratch("ahead", (size,), U8) as memory:
            for _ in range(round(AHEAD * FILL_RATE / size)):
                dev.zero(memory)
    return launch_times(trainer, batches)
