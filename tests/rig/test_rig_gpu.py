"""The measurements of `llmq rig` on GPUs can be made, and are of the size they have to be."""

from __future__ import annotations

import pytest

from llmq.rig import bus, exchanges, facts, load, rig, steps
from llmq.runtime.gpu_info import gpu_count
from tests.conftest import gpu_problem
from tests.rigs import job

PROBLEM = gpu_problem()
ONE = PROBLEM or (None if gpu_count() > 1 else "there is one GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]


def several(test):
    """Marks for what needs two GPUs."""
    return pytest.mark.multigpu(pytest.mark.skipif(ONE is not None, reason=str(ONE))(test))


def test_buses_of_a_gpu(monkeypatch):
    monkeypatch.setattr(bus, "SECONDS", 0.05)
    work, notes = job(10)
    bus.measure(work, gpus=1)
    (alone,) = notes[-1]["alone"]
    assert all(1 < rate < 1000 for rates in alone.values() for rate in rates)
    assert notes[-1]["at_once"] == {"1": {way: alone[way] for way in bus.WAYS}}


@several
def test_buses_of_several_gpus():
    work, notes = job(20)
    bus.measure(work, gpus=2)
    assert {(p["source"], p["reader"]) for p in notes[-1]["pairs"]} == {(0, 1), (1, 0)}
    assert len(notes[-1]["at_once"]["2"]["both"]) == 2


def test_facts_of_a_gpu():
    work, notes = job(10)
    facts.measure(work)
    assert notes[-1]["gpus"][0]["pcie_width"] >= 1 and notes[-1]["driver"]


@several
@pytest.mark.parametrize("backend", exchanges.BACKENDS)
def test_exchanges_between_gpus(backend):
    """Exchanges in a new process, as NCCL reads its settings once."""
    found = rig.run_part("exchanges", 60.0, {"backend": backend, "gpus": 2})
    assert found["error"] is None and found["result"]["intact"]
    assert 1 <= found["result"]["slowdown"] <= 2
    assert ("load" in found["result"]["operations"]) == (backend in ("nccl-off", "staged"))


def test_load_of_a_gpu():
    work, notes = job(2.0)
    load.measure(work, gpus=1, every=0.2)
    settled = notes[-1]["gpus"][0]["settled"]
    assert settled["tflops"] > 1 and settled["gb_per_s"] > 10 and notes[-1]["slowest"] is None


@several
def test_load_of_several_gpus():
    work, notes = job(4.0)
    load.measure(work, gpus=2)
    assert 0.3 < notes[-1]["slowest"] <= 1 and not notes[-1]["errors"]


def test_steps_of_a_quarter_of_a_model():
    work, notes = job(30)
    beside = steps.quarter("Qwen2.5-0.5B", **steps.LORA | steps.NF4)  # decodes on another stream
    whole = steps.quarter("Qwen2.5-0.5B", **steps.WHOLE | {"batch-size": 4})
    steps.measure(work, runs=[whole, beside], settle=0.5)
    found, decoded = notes[-1]["steps"]
    assert any(name.startswith("nf4_decode/") for name in decoded["launches"])
    products = [name for name in found["launches"] if name.startswith("matmul/bf16")]
    assert len(products) >= 3 and found["tokens_per_second"] > 0
    # How they add up is not looked at: other tests use the GPU meanwhile.
    assert -1 < found["idle"] < 1
