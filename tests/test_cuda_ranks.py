"""Two GPUs: the numbers of one, exact plans, resuming, and how a rank that fails ends the other."""

from __future__ import annotations

import time

import numpy as np
import pytest

from llmq.errors import LlmqError
from llmq.runtime.gpu_info import gpu_count
from llmq.step import Step
from tests.conftest import gpu_problem
from tests.models import hf_model, random_batch, trainer_for

PROBLEM = gpu_problem() or (None if gpu_count() > 1 else "there is one GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

T = 64  # the longest sequence of the test models
COPIES = {"memcpy_all_gather": True, "all_to_all_reduce": True, "memcpy_send_recv": True}
OPTION_SETS = {
    "zero1": {},
    "zero3": {"zero_level": 3},
    "zero3_copies": {"zero_level": 3, **COPIES},
    "zero3_staged": {"zero_level": 3, **COPIES, "p2p": "off"},
    "zero2_offload": {"zero_level": 2, "offload_opt_m": True, "offload_master": True},
}


@pytest.fixture
def path(tmp_path):
    hf_model("qwen3").save_pretrained(tmp_path)
    return tmp_path


def trainer(path, world, **options):
    defaults = {"device": "cuda", "seq_len": T, "gpus": world, "grad_accumulation": 4 // world}
    return trainer_for(path, **defaults | options)


def batches(seed):
    rng = np.random.default_rng(seed)
    return [random_batch(rng, T=T) for _ in range(4)]


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_two_gpus_compute_what_one_does(path, options):
    results = []
    for world in (1, 2):
        with trainer(path, world, **options if world > 1 else {}) as t:
            results.append([t.step(batches(seed)) for seed in range(5)])
            assert t.usage == t.plan.usage
    for one, two in zip(*results, strict=True):
        assert one.tokens == two.tokens
        # TF32 products are the same, F32 sums are in another order.
        np.testing.assert_allclose(two.loss, one.loss, rtol=1e-5)
        np.testing.assert_allclose(two.norm, one.norm, rtol=1e-4)


def test_a_continued_run_is_the_same_to_the_bit(path, tmp_path):
    options = {"model_dtype": "bf16", "zero_level": 3, **COPIES}
    with trainer(path, 2, **options) as t:
        t.step(batches(0))
        saved = t.save(tmp_path / "ckpt")
        after = [t.step(batches(seed)) for seed in range(3)]
    with trainer(path, 2, **options) as t:
        t.load(saved)
        assert [t.step(batches(seed)) for seed in range(3)] == after


@pytest.mark.parametrize("options", [{}, {"zero_level": 3, **COPIES}], ids=["nccl", "copies"])
@pytest.mark.parametrize("step", [0, 1, 4])  # eager, while captured, replayed
def test_a_rank_that_fails_ends_the_other(path, options, step, monkeypatch):
    """The other GPU waits for it in a stream, and is let go."""
    real = Step.update

    def update(self):
        if self.dev.rank == 1 and self.dev.kind == "cuda" and self.updates == step:
            raise LlmqError("no more")
        self.updates = self.updates + 1
        return real(self)

    error = pytest.raises(LlmqError, match=r"^rank 1: no more$")
    with error, trainer(path, 2, **options) as t:
        monkeypatch.setattr(Step, "updates", 0, raising=False)
        monkeypatch.setattr(Step, "update", update)
        start = time.monotonic()
        for seed in range(6):
            t.step(batches(seed))
    assert time.monotonic() - start < 20  # the first step compiles; the end takes up to 5 s
    monkeypatch.undo()
    with trainer(path, 2, **options) as t:  # the GPUs are as they were
        t.step(batches(0))
