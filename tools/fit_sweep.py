#!/usr/bin/env python3
"""Write a file for `llmq bench` that checks what --fit finds: every rival that could be faster.

    PYTHONPATH=. tools/fit_sweep.py --card h100 --model Qwen2.5-1.5B --memory 16GiB > sweep.yaml

All combinations of micro-batch, recomputation, offloading, and chunks of the LM head are planned.
Of those that fit, the file has the best one that --fit finds, and all whose predicted speed is
within --within percent of it: where predictions are within half of that, no other can be faster.
Steps are short (--sequences), because options are what is compared.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError
from llmq.config.option_types import parse_size
from llmq.config.options import TrainConfig
from llmq.config.options_io import make_config
from llmq.config.presets import preset
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.fit import Fit
from llmq.plan.target import target
from llmq.rig.rows import flags_of

BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = (
    *("", "swiglu", "norm swiglu", "norm ffn", "norm ffn qkv", "norm swiglu att"),
    *("norm ffn att", "ffn att", "block"),
)
OFFLOAD = ("", "residual", "opt_m opt_v master", "residual opt_m opt_v master")
WEIGHTS = {"shard_weights": True}
STREAMED = ({}, WEIGHTS, WEIGHTS | dict.fromkeys(
    ("shard_gradients", "offload_gradients", "offload_quants", "persistent_quants"), True
))  # fmt: skip
CHUNKS = (1, 4, 16)
SHARED = {
    "from-scratch": True,
    "model-dtype": "bf16",
    "matmul-dtype": "e4m3",
    "fp8-recipe": "delayed",
    "opt-m-dtype": "bf16",
    "opt-v-dtype": "bf16",
    "seq-len": 1024,
    "gpus": 1,
    "device": "cuda",
}


def grid(base: TrainConfig, sequences: int) -> list[TrainConfig]:
    """Every combination that options allow, each of the same number of sequences."""
    found = []
    for batch, again, away, streamed, chunks in itertools.product(
        BATCHES, RECOMPUTE, OFFLOAD, STREAMED, CHUNKS
    ):
        if sequences % batch:
            continue
        changes: dict[str, Any] = {f"recompute_{name}": True for name in again.split()}
        changes |= {f"offload_{name}": True for name in away.split()}
        changes |= streamed
        changes |= {"batch_size": batch, "grad_accumulation": sequences // batch}
        changes |= {"lmhead_chunks": chunks, "attn_bwd_chunks": min(chunks, batch)}
        try:
            found.append(replace(base, **changes).normalized())
        except ConfigError:
            continue
    return list(dict.fromkeys(found))


def rivals(
    planner: Planner, fit: Fit, configs: list[TrainConfig], within: float
) -> tuple[TrainConfig, list[tuple[TrainConfig, Estimate]]]:
    """What --fit finds, and what fits and is predicted to be almost as fast, or faster."""
    best = fit.search()[0]
    least = best.need.speed * (1 - within / 100)
    found = []
    for config in configs:
        need = planner.estimate(config)
        if need.speed >= least and not fit.limits.excess(need.device, need.host):
            exact = planner.exact(config)
            if not fit.limits.excess(exact.device, exact.host) and config != best.config:
                found.append((config, exact))
    return best.config, sorted(found, key=lambda pair: -pair[1].speed)


def main(
    model: Annotated[str, typer.Option()],
    memory: Annotated[str, typer.Option(help="Of the GPU that it is for.")],
    card: Annotated[str | None, typer.Option()] = None,
    card_file: Annotated[Path | None, typer.Option(help="Report of llmq rig.")] = None,
    host_memory: Annotated[str, typer.Option()] = "100GiB",
    within: Annotated[float, typer.Option(help="Percent of the best predicted speed.")] = 10.0,
    sequences: Annotated[int, typer.Option(help="Of a step.")] = 32,
    most: Annotated[int, typer.Option(help="Rivals in the file, the fastest.")] = 12,
) -> None:
    """Print the file, as YAML of JSON's kind."""
    options = SHARED | {"model": model, "memory-limit": memory}
    options |= {"batch-size": 16, "grad-accumulation": sequences // 16}
    base, chosen = make_config(options), preset(model)
    memories = (parse_size(memory), parse_size(host_memory))
    where = target(base, chosen, *memories, card, None, search=True, card_file=card_file)
    planner = where.planner(chosen)
    fit = Fit(base, planner, where.limits, frozenset({"gpus", "memory_limit"}))
    configs = grid(base, sequences)
    best, found = rivals(planner, fit, configs, within)
    runs = [(best, planner.exact(best)), *found[:most]]
    command = " ".join(["tools/fit_sweep.py", *sys.argv[1:]])
    print(f"# {command}")
    print(f"# {len(configs)} combinations; {len(found)} rivals fit and are predicted to reach")
    print(
        f"# {100 - within:.0f} % of what --fit finds, which comes first; of them {len(runs) - 1}."
    )
    print("runs:")
    for config, need in runs:
        print(f"  # {need.speed:,.0f} tokens/s predicted")
        print(f"  - {json.dumps(flags_of(config))}")


if __name__ == "__main__":
    typer.run(main)
