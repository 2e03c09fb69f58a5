"""Speed of real training steps: a configuration on random tokens, timed in a child process.

This module holds tasks of llmq/bench/child.py. `measure` notes `status` ("ok", "does not fit",
"failed") and either `message`, or `result`, `machine` and `gpus`, the number of GPUs used. It
touches the job's file while the ranks make progress. `plans` notes `machine`, and `runs`. Each run
has `status` ("fits", "does not fit", "failed" if it cannot be planned) and `message`. A planned run
also has the needed bytes `device` and `host`, `step_seconds`, `tokens_per_second`, and `on_gpu`. On
the CPU predicted times only serve to compare runs.
"""

import math
import platform
import statistics
import threading
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmq import __version__
from llmq.base.batch import Batch
from llmq.base.errors import LlmqError, warn
from llmq.base.result import Result
from llmq.bench.child import SETTLE, TIMED, WARM_UP, Job
from llmq.options.adapters import adapters_of
from llmq.options.conditions import Ranks
from llmq.options.options_io import make_config
from llmq.options.presets import model_warnings
from llmq.options.rules import RULES
from llmq.plan.advice import shortages
from llmq.plan.checks import plan_unchecked, planner_of
from llmq.plan.memory import OutOfMemory, memory_limit, needed_bytes
from llmq.plan.sol import flops_per_token
from llmq.run.batches import random_batch
from llmq.run.model_of_run import model_of_run
from llmq.run.monitor import speed_of_light, system_record
from llmq.run.sensors import open_sensors
from llmq.run.trainer import Trainer
from llmq.runtime.gpu_info import gpu_info, library_versions
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.nvml import NvmlGpu
from llmq.runtime.timing import LaunchTime, time_launches

MANY = 10_000  # length in steps of the trainer's schedule, longer than any measurement
PIECE = 0.5  # seconds of steps between two synchronizations


def open_trainer(options: dict[str, Any], steps: int, alive: Path | None = None) -> Trainer:
    """Open a trainer and load its weights. options: options of the run by flag name. steps: length
    of the schedule.

    alive: file that a thread touches whenever the ranks make progress; None: no thread touches a
    file.
    """
    config = make_config(options | {"steps": steps, "cooldown": 0})  # timing needs these values
    model, model_dir = model_of_run(config)
    trainer = Trainer.from_config(config.validate_with(model), model, model_dir)
    on_cpu = trainer.dev.kind == "host"
    given, idle = RULES.idle(make_config(options)), RULES.idle(config, model=model)
    idle += RULES.idle(config, ranks=Ranks(trainer.world_size, on_cpu=on_cpu))
    warn(*(given + idle + model_warnings(model_dir)))
    if alive is not None:
        threading.Thread(target=_show_progress, args=(trainer, alive), daemon=True).start()
    trainer.load_weights()
    return trainer


def random_batches(trainer: Trainer, seed: int = 0) -> list[Batch]:
    """Return random micro-batches of a step."""
    rng = np.random.default_rng(seed)
    count = trainer.micro_batches
    return [random_batch(rng, trainer.config, trainer.model) for _ in range(count)]


def timed_steps(trainer: Trainer, batches: list[Batch], count: int) -> tuple[float, Result]:
    """Run `count` steps; return seconds per step and the last result. Each result is read a step
    late, as in training."""
    trainer.dev.synchronize()
    start, ticket = time.perf_counter(), None
    for _ in range(count):
        previous, ticket = ticket, trainer.enqueue_step(batches)
        if previous is not None:
            trainer.result(previous)
    result = trainer.result(ticket)
    return (time.perf_counter() - start) / count, result


def steps_for(trainer: Trainer, batches: list[Batch], duration: float) -> list[float]:
    """Run steps for `duration` seconds, at least one step. Returns seconds per step for each PIECE
    of half a second."""
    end = time.monotonic() + duration
    seconds = [timed_steps(trainer, batches, 1)[0]]
    while time.monotonic() < end:
        seconds.append(timed_steps(trainer, batches, max(1, round(PIECE / seconds[-1])))[0])
    return seconds


def settle(
    trainer: Trainer,
    batches: list[Batch],
    steps: int,
    *,
    duration: float = SETTLE,
    repeat: float = TIMED,
) -> int:
    """Run steps for `duration` seconds, so that a GPU's clock settles at its power limit. Returns
    the number of steps that last `repeat` seconds, at least `steps`. Short repeats would mislead,
    because the first steps after a wait run at a higher clock."""
    return max(steps, math.ceil(repeat / steps_for(trainer, batches, duration)[-1]))


def launch_times(
    trainer: Trainer, batches: list[Batch], *, in_turn: bool = False
) -> list[LaunchTime]:
    """Time each launch of a step by itself. in_turn: see time_launches."""
    trainer.enqueue_step(batches)  # keeps the host ahead of the device
    return time_launches(trainer.dev, lambda: trainer.step(batches), in_turn=in_turn)


def idle_share(launches: list[LaunchTime], step_seconds: float) -> float:
    """Return the fraction of a step in which no launch of the main stream runs."""
    return 1 - sum(launch.ms for launch in launches if launch.main) / 1e3 / step_seconds


def measure(job: Job, *, options: dict[str, Any], steps: int, repeats: int, started: float) -> None:
    """Time a run, as the task of a child process. started: time.time() when the parent asked for
    it."""
    try:
        job.note({"status": "ok"} | _measured(job.alive, options, steps, repeats, started))
    except OutOfMemory as error:
        job.note({"status": "does not fit", "message": error.headline})
    except LlmqError as error:
        job.note({"status": "failed", "message": str(error)})


def _measured(
    alive: Path | None, options: dict[str, Any], steps: int, repeats: int, started: float
) -> dict[str, Any]:
    """Return `result`, `machine` and `gpus` of a run; llmq/bench/report.py explains the numbers."""
    with open_trainer(options, MANY, alive) as trainer:
        config, dev, tokens = trainer.config, trainer.dev, trainer.plan.tokens
        batches = random_batches(trainer)
        trainer.step(batches)
        first_step = time.time() - started
        on_gpu = dev.kind == "cuda"
        for _ in range(WARM_UP - 1 - on_gpu):  # `settle` makes the last step on a GPU
            trainer.step(batches)
        while trainer.shares.measures:
            trainer.step(batches)
        sensors = open_sensors(trainer.ranks.devices)
        if on_gpu:
            steps = settle(trainer, batches, steps)
        sources, energy = sensors.sources, _joules(sensors.sources)
        timed = [timed_steps(trainer, batches, steps) for _ in range(repeats)]
        used = None if energy is None else _joules(sources) - energy
        gpu = None if sources[0] is None else sensors.take()[0]
        seconds = [pair[0] for pair in timed]
        step, loss = statistics.median(seconds), timed[-1][1].loss
        if not np.isfinite(loss):
            raise LlmqError(f"the loss became {loss}, so its speed means nothing")
        light = speed_of_light(config, trainer.model, dev.spec.name, trainer.world_size)
        counted = flops_per_token(
            trainer.model, config.seq_len, adapters_of(config), config.mtp_part(config.batch_size)
        )
        flops = sum(asdict(counted).values())
        result = {
            "tokens_per_second": tokens / step,
            "spread": (max(seconds) - min(seconds)) / step,
            "predicted": predicted_speed(trainer) if on_gpu else None,
            "step_seconds": seconds,
            "sol_percent": None if light is None else light.percent(tokens, step * 1e3),
            "tflops": flops * tokens / step / 1e12,
            "memory": _memory(trainer),
            "joules_per_token": None if used is None else used / (tokens * steps * repeats),
            "first_step_seconds": first_step,
            "loss": loss,
            "gpu": gpu,
        }
        machine = _machine(trainer, sources[0])
        sensors.close()
    return {"result": result, "machine": machine, "gpus": trainer.world_size}


def predicted_speed(trainer: Trainer) -> float:
    """Return the tokens per second that `llmq plan` predicts for this card."""
    planner = planner_of(trainer.model, trainer.machine, trainer.config.attention)
    return trainer.plan.tokens / planner.time(trainer.config, trainer.plan).total


def _joules(gpus: list[NvmlGpu | None]) -> float | None:
    """Return the energy in J that all GPUs have used so far; None if a GPU does not report
    energy."""
    readings = [None if gpu is None else gpu.joules() for gpu in gpus]
    return None if None in readings else sum(readings)


def _memory(trainer: Trainer) -> dict[str, Any]:
    """Return bytes planned and bytes in use on the whole GPU (None on the CPU), and whether the
    arenas equal the plan. The stack may be smaller than planned, because an evaluation, which is
    not run here, may need the most stack."""
    planned, found = trainer.plan.usage.sizes, trainer.usage.sizes
    memory = {
        "planned": needed_bytes(trainer.plan, trainer.dev.spec),
        "as_planned": found["stack"] <= planned["stack"]
        and found | {"stack": planned["stack"]} == planned,
        "used": None,
    }
    if trainer.dev.kind == "cuda":
        info = gpu_info(trainer.dev.index)
        memory["used"] = info.memory - info.free
    return memory


def _machine(trainer: Trainer, source: NvmlGpu | None) -> dict[str, Any]:
    """Return the device, GPU record and versions of this run's machine."""
    dev = trainer.dev
    gpu = None if dev.kind != "cuda" else system_record(dev.index, gpu_info(dev.index), source)
    return {"device": dev.spec.name, "gpu": gpu, "versions": versions_of(dev.kind)}


def versions_of(kind: str) -> dict[str, str]:
    """Return the versions of the libraries on which a run on this kind of device depends."""
    versions = {"llmq": __version__, "Python": platform.python_version(), "NumPy": np.__version__}
    return versions | (library_versions() if kind == "cuda" else {})


def _show_progress(trainer: Trainer, alive: Path) -> None:
    """Touch the file while the ranks make progress, until the ranks are closed. A thread runs this
    function, because a hanging interpreter stops the thread, too."""
    shown = None
    while not trainer.ranks.pool.closed:
        if trainer.ranks.pool.progress != shown:
            shown = trainer.ranks.pool.progress
            alive.touch()
        time.sleep(1)


# ------------------------------------------------------------------------------------------------
# Plans of runs


_machine_here = cache(choose_machine)  # free memory is read once for all runs


def planned(options: dict[str, Any]) -> tuple[dict[str, Any], Machine]:
    """Return the record of a run's plan, and the run's machine. Raises LlmqError for a run that
    cannot be planned."""
    config = make_config(options | {"steps": 1, "cooldown": 0})
    model, _ = model_of_run(config, weights=False)
    machine = _machine_here(config.device, config.gpus)
    planner, run = plan_unchecked(config.validate_with(model), model, machine)
    problems = shortages(run.plan, planner.spec, memory_limit(config, machine))
    seconds = planner.time(run.config, run.plan).total
    found = {
        "status": "does not fit" if problems else "fits",
        "message": "; ".join(problems) or None,
        "device": needed_bytes(run.plan, planner.spec),
        "host": run.plan.host_bytes,
        "step_seconds": seconds,
        "tokens_per_second": run.plan.tokens / seconds,
        "on_gpu": machine.kind == "cuda",
    }
    return found, machine


def plans(job: Job, *, runs: list[dict[str, Any]]) -> None:
    """Plan all runs, as the task of a child process. The noted machine is that of the last run that
    can be planned."""
    records: list[dict[str, Any]] = []
    machine_record = None
    for options in runs:
        try:
            found, machine = planned(options)
            versions = versions_of(machine.kind)
            machine_record = {"device": machine.spec.name, "gpu": None, "versions": versions}
        except LlmqError as error:
            found = {"status": "failed", "message": error.headline}
        records.append(found)
        job.alive.touch()
    job.note({"runs": records, "machine": machine_record})
