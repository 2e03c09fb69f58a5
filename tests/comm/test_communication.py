"""How long ranks wait for each other is measured in every step, and changes nothing else."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

import llmq
from llmq.model.rings import Results
from llmq.model.step import Step
from llmq.runtime.host_device import HostDevice
from llmq.state.weights import Weights
from tests.runs import VOCAB, B, T, make_workplace, options, records, train
from tests.sharded import FP32, assert_same_run, run

DELAY = 0.5  # seconds of rank 1
# Milliseconds of the mean of two ranks, of which one waits: half of it is noise on a busy machine.
LEAST = 1000 * DELAY / 2 / 2


def late(method):
    """The method, before which rank 1 sleeps."""

    def delayed(self, *args, **kwargs):
        if self.dev.mesh.rank == 1:
            time.sleep(DELAY)
        return method(self, *args, **kwargs)

    return delayed


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


@pytest.fixture
def trainer(workplace):
    """Two ranks with one micro-step each."""
    fp8 = {"model-dtype": "bf16", "matmul-dtype": "e4m3", "grad-accumulation": 1}
    given = {n.replace("-", "_"): v for n, v in options(gpus=2, **fp8).items() if v is not None}
    with llmq.Trainer(**given) as made:
        yield made


def seldom(measure):
    """Whether it is little once in three times: a busy machine makes ranks wait too, but not always
    that long."""
    return any(measure() < LEAST for _ in range(3))


BATCHES = [tuple(np.full((2, B, T), rank % VOCAB, np.int32)) for rank in range(2)]


def timed_step(trainer):
    """The communication of a step, which is no more than the step itself."""
    start = time.perf_counter()
    result = trainer.step(BATCHES)
    assert 0 <= result.communication <= 1000 * (time.perf_counter() - start)
    return result.communication


def test_waiting_for_a_rank_is_communication(trainer, monkeypatch):
    timed_step(trainer)

    def of_the_step_after():
        with monkeypatch.context() as patch:
            patch.setattr(Step, "micro_step", late(Step.micro_step))
            assert timed_step(trainer) >= LEAST
        return timed_step(trainer)

    assert seldom(of_the_step_after)


def test_the_rank_that_is_late_waits_less_than_the_others(trainer, monkeypatch):
    assert len(trainer.step(BATCHES).waits) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Step, "micro_step", late(Step.micro_step))
        result = trainer.step(BATCHES)
    punctual, last = result.waits
    assert punctual - last >= LEAST
    assert result.communication == pytest.approx((punctual + last) / 2)  # of a sum of two


def test_what_follows_the_sums_counts_in_the_next_step(trainer, monkeypatch):
    """Scales of fp8 weights are exchanged after the sums."""

    def of_the_step_before():
        with monkeypatch.context() as patch:
            patch.setattr(Weights, "start_update", late(Weights.start_update))
            found = timed_step(trainer)
        assert trainer.step(BATCHES).communication >= LEAST
        return found

    assert seldom(of_the_step_before)


def test_evaluations_and_what_comes_before_them_count_in_no_step(trainer, monkeypatch):
    timed_step(trainer)

    def of_the_step_after():
        with monkeypatch.context() as patch:
            patch.setattr(Weights, "start_update", late(Weights.start_update))
            trainer.step(BATCHES)
            patch.setattr(Step, "evaluate_batch", late(Step.evaluate_batch))
            assert trainer.validate(1).communication == 0
        return timed_step(trainer)

    assert seldom(of_the_step_after)


def test_the_log_has_it(workplace, monkeypatch):
    monkeypatch.setattr(Step, "micro_step", late(Step.micro_step))
    assert train(gpus=2, steps=1, grad_accumulation=1) == 0
    (step,) = records("step")
    assert LEAST <= step["communication"] <= step["duration_ms"] + 1


def test_one_rank_has_none(workplace):
    assert train(gpus=1, steps=1) == 0
    (step,) = records("step")
    assert "communication" not in step


@pytest.mark.parametrize("world", [1, 2])
def test_only_several_ranks_launch_the_clock(world, monkeypatch):
    launches, launch = Counter(), HostDevice.launch

    def counted(self, kernel, *args, **kwargs):
        launches[self.mesh.rank, kernel.entry] += 1
        launch(self, kernel, *args, **kwargs)

    monkeypatch.setattr(HostDevice, "launch", counted)
    run(world, 1, shard_weights=True)
    starts, stops = ([launches[r, f"clock_{n}"] for r in range(2)] for n in ("start", "stop"))
    steps = [launches[r, "global_norm_finish"] for r in range(2)]
    assert starts == [n + 2 * count for n, count in zip(stops, steps, strict=True)], "begin, end"
    assert all(n == 0 for n in stops) if world == 1 else min(stops) > 0


@pytest.mark.parametrize("dtype", [FP32, {}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_else_is_the_same_without_it(dtype, sharded, monkeypatch):
    changes = dtype | {"shard_weights": sharded, "shard_gradients": sharded}
    measured = run(2, 2, **changes)
    monkeypatch.setattr(Results, "_open_clock", lambda results: None)
    assert_same_run(measured, run(2, 2, **changes))
    assert measured.results[0].communication > 0
