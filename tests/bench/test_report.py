"""The table of `llmq bench`, its head, and runs without a speed."""

from __future__ import annotations

import os

import pytest

from llmq.base.errors import LlmqError
from llmq.bench.report import describe, markdown
from tests.sweeps import Sweeps

H100 = "NVIDIA H100 80GB HBM3"
MACHINE = {
    "device": H100,
    "gpu": {"driver": "580.159.04"},
    "versions": {"llmq": "0.1", "CuPy": "14"},
}
RESULT = {
    "tokens_per_second": 153123.4,
    "spread": 0.0042,
    "predicted": 150000.0,
    "step_seconds": [3.4, 3.42, 3.43],
    "sol_percent": 47.88,
    "tflops": 473.6,
    "memory": {"planned": 40 << 30, "used": 41 << 30, "as_planned": True},
    "joules_per_token": 0.004321,
    "first_step_seconds": 9.87,
    "loss": 11.9,
    "gpu": None,
}
INVOCATION = {"date": "d", "command": "llmq bench", "steps": 5, "repeats": 3, "machine": MACHINE}


def table(runs, **more):
    """The lines of a report of (options, outcome)."""
    made = [describe(o) | {"options": o, "invocation": 0} | outcome for o, outcome in runs]
    report = {"machine": MACHINE, "invocations": [INVOCATION], "runs": made} | more
    return markdown(report).splitlines()


def measured(**changes):
    return {"status": "ok", "result": RESULT | changes}


def test_the_table():
    shared = {"model": "Qwen2.5-0.5B", "opt-m-dtype": "bf16", "batch-size": 32}
    less = RESULT["memory"] | {"as_planned": False}
    lines = table(
        [
            (shared, measured()),
            (shared | {"recompute-block": True}, measured(joules_per_token=None, memory=less)),
            (shared | {"model": "gpt2"}, {"status": "does not fit", "message": "out of memory"}),
        ]
    )
    assert lines[0] == f"# {H100}, driver 580.159.04"
    assert lines[2:4] == ["`llmq bench`, d, 3 x 5 steps or more", "llmq 0.1; CuPy 14"]
    assert "All runs: --opt-m-dtype=bf16" in lines
    assert "- gpt2 bf16 32 x 4: does not fit: out of memory" in lines
    head, _, first, second = (line for line in lines if line.startswith("|"))
    assert head == (
        "| model | dtype | batch | flags | tok/s | tok/J | ± | predicted | SOL | TFLOP/s "
        "| memory, GiB | start, s |"
    )
    assert first == (
        "| Qwen2.5-0.5B | bf16 | 32 x 4 |  | 153,123 | 231.4 | 0.4% | 150.0k (1.02x) | 47.9% "
        "| 474 | 41.00 (1.025x) | 9.9 |"
    )
    assert " | --recompute-block | " in second and "| 153,123 |  | 0.4% |" in second
    assert "| 41.00 (1.025x)* |" in second


def test_columns_in_which_nothing_stands_are_left_out():
    lines = table([({"model": "tiny"}, measured(predicted=None, sol_percent=None))])
    (head, *_) = (line for line in lines if line.startswith("|"))
    assert "flags" not in head and "predicted" not in head and "SOL" not in head


def test_a_report_without_any_result():
    run = ({"model": "tiny"}, {"status": "failed", "message": "why"})
    lines = table([run], machine=None, invocations=[INVOCATION | {"machine": None}])
    assert lines[:3] == ["`llmq bench`, d, 3 x 5 steps", "", "- tiny bf16 4 x 4: failed: why"]


def test_the_folder_of_the_report_is_made_before_measuring(tmp_path, monkeypatch):
    sweeps = Sweeps(tmp_path, monkeypatch)
    sweeps.out = tmp_path / "new" / "er" / "out"
    sweeps.make()
    assert sweeps.out.with_name("out.md").exists()
    sweeps.made.clear()
    (tmp_path / "file").touch()
    sweeps.out = tmp_path / "file" / "out"
    with pytest.raises(LlmqError, match="cannot write"):
        sweeps.make()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    sweeps.out = tmp_path / "other"
    with pytest.raises(LlmqError, match="--out: cannot write into"):
        sweeps.make()
    assert sweeps.made == []
