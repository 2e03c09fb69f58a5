"""Made-up measurements of a rig, as the parts of `llmq rig` give them: two H100 on which all is
well. And the job that a part of it gets."""

from __future__ import annotations

import copy
import time
from typing import Any

from llmq.bench.child import Job
from llmq.options.card_file import CardFile, this_host

H100 = "NVIDIA H100 80GB HBM3"
SPEC = {"device": H100, "capability": 90, "num_sms": 132, "memory": 84_929_347_584}
GPU = {
    "name": H100,
    "pcie_generation": 5,
    "pcie_generation_most": 5,
    "pcie_width": 16,
    "pcie_width_most": 16,
    "pcie_width_slot": 16,
    "persistence": True,
    "power_limit": 700.0,
    "power_default": 700.0,
    "ecc_errors": 0,
    "rows_failed": False,
    "others": 0,
}
HOST = {
    "cpu": "a processor",
    "cores": 32,
    "cores_allowed": 32,
    "memory": 256 << 30,
    "iommu": False,
    "iommu_options": [],
    "system": "Linux 6",
    "virtual": False,
}
SETTLED = {"tflops": 690.0, "gb_per_s": 3000.0, "power": 698.0, "temperature": 64, "clock": 1500}
LAUNCHES = {
    "matmul/bf16/0/0/1/bf16": [[[32768, 1024, 1024], 1e-4], [[32768, 4096, 4096], 1.5e-3]],
    "copy/": [[[1 << 20, ], 4e-6], [[1 << 30, ], 4e-4]],
    "attention_forward/library/bf16": [[[30064771072, 1024, 64, 1024], 1e-4]],
}  # fmt: skip


def card_file(**changes: Any) -> CardFile:
    """A card file of this machine, as if it had these GPUs."""
    exchange = {"all_gather": [[[1 << 20], 2e-5], [[1 << 28], 2e-3]]}
    given = {
        **SPEC,
        "gpus": 2,
        "host": this_host(),
        "date": "2026-11-22 12:00 UTC",
        "version": "0.1.0",
        "driver": "580",
        "launches": LAUNCHES,
        "bus": {"1": [50.0, 40.0, 30.0], "2": [25.0, 20.0, 15.0]},
        "exchange": {"2": {"nccl": exchange, "nccl-off": {"all_gather": [[[1 << 28], 2e-2]]}}},
        "beside": {"2": {"nccl": 1.1, "nccl-off": 1.2}},
        "beside_bus": True,
        "slowest": 0.9,
    }
    return CardFile(**given | changes)


def results() -> dict[str, Any]:
    """Results of a made-up rig by part, newly made by each call."""
    alone = {"in": [55.0], "out": [55.0], "both": [48.0]}
    pairs = [
        {"source": s, "reader": 1 - s, "kind": "peer", "gb_per_s": 390.0, "reason": None}
        for s in range(2)
    ]
    operations = {"all_gather": [[1 << 19, 1e-5, 1.2e-5], [111 << 20, 4e-4, 5e-4]]}
    operations["load"] = [[55_000_000, 1e-3, 2e-3]]
    series = {"seconds": [1.0, 2.0], "clock": [1500, 1490], "power": [700.0, 699.0]}
    series |= {"tflops": [691.0, 690.0], "temperature": [60, 64]}
    return copy.deepcopy(
        {
            "facts": {
                "host": HOST,
                "gpus": [{"index": n, **GPU} for n in range(2)],
                "problem": None,
                "spec": SPEC,
                "driver": "580",
                "versions": {"llmq": "0.1.0"},
            },
            "bus": {
                "alone": [alone, alone],
                "at_once": {
                    "1": {"in": [55.0], "out": [55.0], "both": [48.0]},
                    "2": {"in": [54.0, 53.0], "out": [54.0, 54.0], "both": [40.0, 41.0]},
                },
                "pairs": pairs,
            },
            "exchanges": {
                "operations": operations, "slowdown": 1.05, "intact": True, "beside_bus": True,
            },
            "load": {
                "gpus": [{"gpu": n, "series": series, "settled": SETTLED} for n in range(2)],
                "alone": 700.0,
                "slowest": 0.98,
            },
            "steps": {
                "steps": [
                    {
                        "options": {"model": "Qwen2.5-1.5B", "batch-size": 32, "seq-len": 1024},
                        "tokens_per_second": 100_000.0,
                        "idle": 0.01,
                        "seconds": 9.0,
                        "launches": LAUNCHES | {"swiglu_forward/bf16,bf16,-": [[[1 << 28], 1e-4]]},
                    }
                ],
                "refused": {},
            },
        }
    )  # fmt: skip


def report(parts: dict[str, Any]) -> dict[str, Any]:
    """The report that the findings read, of such parts."""
    measured = {name: parts[name] for name in ("bus", "load")}
    measured |= {
        "exchanges": {"nccl": parts["exchanges"]},
        "steps": parts["steps"]["steps"],
    }
    return {"parts": {}, **parts["facts"], "measured": measured}


def job(seconds: float = 1.0) -> tuple[Job, list[Any]]:
    """With so much time, and what is noted in it, as it is at that time."""
    notes: list[Any] = []
    return Job(time.monotonic() + seconds, lambda note: notes.append(copy.deepcopy(note))), notes
