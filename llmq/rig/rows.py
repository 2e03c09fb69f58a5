"""The rows of llm.q's table: the fastest options of each on this rig, trained for half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.bench.child import run_child
from llmq.options.command_line import command_line
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.fit import Candidate, Fit
from llmq.plan.memory import OutOfMemory
from llmq.plan.target import target
from llmq.runtime.host_memory import available_host_memory

MODELS = ("1.5B", "0.5B", "7B", "3B", "14B")  # of Qwen2.5, the most telling first
SEQUENCES = 512  # of a step of all GPUs, as in llm.q's table, at T = 1024
SECONDS = 30.0
STEP = 1.5  # seconds of a timed step, about: fewer micro-steps than a real one has
REPEATS = 3
START = 25.0  # seconds until the first step, and for what is timed beside the steps
SHORTEST = START + REPEATS * STEP  # seconds that a row takes at least
WHOLE = START + SECONDS  # and one that is not cut short, about


def rows(fp8: bool, gpus: int) -> Iterator[dict[str, Any]]:
    """The options of every row, by flag; its products are in fp8 first, where there is fp8."""
    for dtype in ("e4m3", "bf16") if fp8 else ("bf16",):
        for model in MODELS:
            options = {
                "model": f"Qwen2.5-{model}",
                "from-scratch": True,
                "model-dtype": "bf16",
                "matmul-dtype": dtype,
                "opt-m-dtype": "bf16",
                "opt-v-dtype": "bf16",
                "seq-len": 1024,
                "batch-size": 16,
                "grad-accumulation": max(SEQUENCES // gpus // 16, 1),
                "gpus": gpus,
            }
            yield options | ({"fp8-recipe": "delayed"} if dtype == "e4m3" else {})


def fastest(options: dict[str, Any], card_file: Path) -> Candidate | None:
    """The options that --fit finds for a row on this rig; None where nothing fits."""
    config = make_config(options)
    model = preset(config.model)
    config = config.validate_with(model)
    host = available_host_memory()
    where = target(config, model, None, host, None, None, search=True, card_file=card_file)
    try:
        return Fit(config, where.planner(model), where.limits, frozenset({"gpus"})).search()[0]
    except OutOfMemory:
        return None


def shortened(found: Candidate) -> tuple[TrainConfig, float]:
    """With fewer micro-steps, so that a step takes about STEP; and what that one should take."""
    config, seconds = found.config, found.need.time.total
    count = min(max(round(STEP * config.grad_accumulation / seconds), 1), config.grad_accumulation)
    share = count / config.grad_accumulation
    return replace(config, grad_accumulation=count), share * seconds


def flags_of(config: TrainConfig) -> dict[str, Any]:
    """Its options by flag, as configuration files have them."""
    found: dict[str, Any] = {}
    for word in command_line(config)[2:]:
        name, equals, value = word.removeprefix("--").partition("=")
        found[name.removeprefix("no-")] = value if equals else not name.startswith("no-")
    return found


def trained(found: Candidate, card_file: Path, limit: float) -> dict[str, Any]:
    """A row's record: `options`, tokens per second `predicted` and, with `status` ok, `measured`.

    limit: seconds after which the run is ended.
    """
    config, step = shortened(found)
    steps = max(1, round(min(SECONDS, limit - START) / REPEATS / step))
    options = flags_of(config)
    record = {"options": options, "predicted": speed_of(config, card_file)}
    outcome = run_child(options, steps, REPEATS, limit)
    if outcome["status"] == "hung":  # its message names options that a rig does not have
        return record | {"status": "failed", "message": "it took too long"}
    if outcome["status"] != "ok":
        return record | {"status": outcome["status"], "message": outcome["message"]}
    result = outcome["result"]
    memory = result["memory"]
    return record | {
        "status": "ok",
        "measured": result["tokens_per_second"],
        "spread": result["spread"],
        "joules_per_token": result["joules_per_token"],
        "memory": memory["used"] or memory["planned"],
    }


def speed_of(config: TrainConfig, card_file: Path) -> float:
    """Tokens per second that the plan predicts for exactly this."""
    model = preset(config.model)
    where = target(config, model, None, None, None, None, search=False, card_file=card_file)
    return where.planner(model).exact(config).speed
