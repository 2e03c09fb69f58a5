"""`--share auto` on two GPUs, one of which another program uses, too."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import llmq
from llmq.bench.measure import random_batches
from llmq.run.shares import MEASURED, WARM_UP
from llmq.runtime.gpu_info import gpu_count
from tests.conftest import gpu_problem

PROBLEM = gpu_problem() or (None if gpu_count() > 1 else "there is one GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

# Kernels of some milliseconds on all multiprocessors of GPU 1, one after the other.
OTHER = """
import cupy
spin = cupy.RawKernel('''extern "C" __global__ void spin() {
    for (long long start = clock64(); clock64() - start < 8000000;) {}
}''', "spin")
with cupy.cuda.Device(1):
    print("goes on", flush=True)
    while True:
        spin((2048,), (256,), ())
        cupy.cuda.runtime.deviceSynchronize()
"""
RUN = {"model": "Qwen2.5-0.5B", "from_scratch": True, "device": "cuda", "gpus": 2, "steps": 40}
RUN |= {"seq_len": 1024, "batch_size": 8, "grad_accumulation": 6, "lmhead_chunks": 4}


def milliseconds(share: str) -> tuple[float, list[int]]:
    """Return the time of the last of three steps behind the choice of shares, and the shares."""
    with llmq.Trainer(**RUN, share=share, vocab_size=32768) as trainer:
        batches = random_batches(trainer)
        for _ in range(WARM_UP + MEASURED + 3):
            start = time.perf_counter()
            trainer.step(batches)
        return 1e3 * (time.perf_counter() - start), trainer.shares.of(6)


def test_a_gpu_that_others_use_gets_less():
    """Its share falls, and the step takes less time than with equal shares."""
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "goes on\n"
        equal, _ = milliseconds("equal")
        shared, shares = milliseconds("auto")
    finally:
        other.kill()
        other.wait()
    assert sum(shares) == 12
    assert shares[0] >= shares[1] + 2
    assert shared < 0.9 * equal


def test_equal_gpus_keep_equal_shares():
    # Three tries: other tests may use one of the GPUs meanwhile, which then gets less.
    assert any(milliseconds("auto")[1] == [6, 6] for _ in range(3))
