"""Two processes with a GPU each: the bits of one process with two, and the end when one fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmq.runtime.gpu_info import gpu_count
from tests.conftest import gpu_problem
from tests.mpi import case, run, start
from tests.runs import make_workplace, records, train, write_tokens
from tests.test_processes import places, same_bits

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
