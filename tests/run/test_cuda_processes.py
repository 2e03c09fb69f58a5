"""Processes with a GPU each: the bits of one process with two, machines, and the end of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmq.runtime.gpu_info import gpu_count
from tests.conftest import gpu_problem
from tests.mpi import case, run, start
from tests.run.test_processes import places, same_bits
from tests.run.test_training import digests
from tests.runs import make_workplace, records, train, write_tokens

pytest.importorskip("mpi4py")
PROBLEM = gpu_problem() or (None if gpu_count() > 1 else "there is one GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

OPTIONS = {"device": "cuda", "model": "tiny", "model_dtype": "bf16", "steps": 4}
OPTIONS |= {"save_training_state": True, "eval_every_n_steps": 2, "log_gpu_util": 1}
WAYS = [
    {"zero_level": 1},
    {"zero_level": 3, "matmul_dtype": "e4m3"},
    {"zero_level": 2, "all_to_all_reduce": True, "use_cuda_graphs": False},
]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/train-3.bin"), 30, seed=5)


def test_two_processes_make_the_bits_of_two_threads():
    cases = [case(gpus=1, **OPTIONS, **way, **places(f"two-{i}")) for i, way in enumerate(WAYS)]
    copies = case(gpus=1, **OPTIONS, **places("copies"), memcpy_all_gather=True)
    _, out, err = run(2, *cases, copies)
    assert out.count("status of process 0: 0") == out.count("status of process 1: 0") == len(WAYS)
    assert re.findall("error: --memcpy-all-gather: copies reach the GPUs of one process", err)
    for i, way in enumerate(WAYS):
        assert train(gpus=2, **OPTIONS, **way, **places(f"one-{i}")) == 0
        same_bits(f"one-{i}", f"two-{i}", 4)
        ranks = [record["id"] for record in records("gpu-model", f"two-{i}.json")]
        assert ranks == [0, 1], "of both processes"
        buses = {record["bus_id"] for record in records("gpu-model", f"two-{i}.json")}
        assert len(buses) == 2, "each process has a GPU of its own"


def machine(name: str, gpus: str, **more: str) -> dict[str, str]:
    """The environment of a process that takes itself to be on a machine with these GPUs."""
    return {"LLMQ_MACHINE": name, "CUDA_VISIBLE_DEVICES": gpus} | more


SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
REPLICAS = [
    {"zero_level": 1},
    {"zero_level": 3, "matmul_dtype": "e4m3"},
    {"zero_level": 2, "offload_gradients": True, "grad_accum_dtype": "fp32"},
    {"zero_level": 1, "use_cuda_graphs": False},
]


def test_two_machines_of_one_gpu_make_the_weights_of_two_threads():
    """A sum of two has one order; without clipping the norm's rounding does not matter."""
    given = OPTIONS | {"grad_clip": 0.0, "grad_accumulation": 1}
    cases = [case(gpus=1, **given | way, **places(f"two-{i}")) for i, way in enumerate(REPLICAS)]
    pair = [machine("a", "0", **SOCKETS), machine("b", "1", **SOCKETS)]
    _, out, err = run(2, *cases, places=pair)
    assert out.count("status of process 0: 0") == len(REPLICAS), err
    for i, way in enumerate(REPLICAS):
        assert train(gpus=2, **given | way, **places(f"one-{i}")) == 0
        weights = [digests(f"{name}-{i}", ["model.safetensors"]) for name in ("one", "two")]
        assert weights[0] == weights[1], way
        found, want = (
            [record["loss"] for record in records("step", f"{name}-{i}.json")]
            for name in ("two", "one")
        )
        assert found == want


@pytest.mark.skipif(PROBLEM is None and gpu_count() < 4, reason="there are less than four GPUs")
def test_machines_of_two_gpus_by_copies_and_by_nccl():
    """With --all-to-all-reduce all sums have one order, however the parts travel."""
    given = OPTIONS | {"zero_level": 2, "all_to_all_reduce": True, "grad_accumulation": 2}
    copies = {"memcpy_all_gather": True, "memcpy_send_recv": True}
    pair = [machine("a", "0,1"), machine("b", "2,3")]
    _, out, err = run(2, case(gpus=2, **given | copies, **places("copies")), places=pair)
    assert out.count("status of process 0: 0") == 1, err
    four = [machine(name, gpus) for name, gpus in zip("abab", ("0,1", "2,3") * 2, strict=True)]
    _, out, err = run(4, case(gpus=1, **given, **places("nccl")), places=four)
    assert out.count("status of process 0: 0") == 1, err
    same_bits("copies", "nccl", 4)


@pytest.mark.parametrize("what", ["kill", "stop", "raise"])
def test_what_ends_one_process_ends_all(what):
    fault = {"process": 1, "step": 3, "what": what}
    process = start(2, case(fault, gpus=1, **OPTIONS | {"steps": 10**6, "watchdog": 5}))
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    if what == "stop":
        assert re.search("error: process 1 on machine '.*' has not answered .* rank 1: ", err)
    if what == "raise":
        assert re.search("error: as the test wants it .raised by rank 1 on machine '", err)
