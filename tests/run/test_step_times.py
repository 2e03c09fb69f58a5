"""How long steps took: by the device's clock at their ends, whenever the host reads it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

import llmq
from llmq.base.dtypes import F32, F64, I64
from llmq.run.ranks import Ranks
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.runs import make_workplace, options, records, train

STEP, GAP, PAUSE = 645, 2, 5000  # milliseconds: of a step, between two, with something between


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def clock_of_a_gpu(monkeypatch, paused):
    """Steps take STEP, begin GAP after the last one, PAUSE after it where something came between.

    paused: these steps. The host reads them at other times.
    """
    real, steps, now = Ranks.result, itertools.count(), 10**18

    def result(self, ticket):
        nonlocal now
        found, step = real(self, ticket), next(steps)
        begin = now + 10**6 * (PAUSE if step in paused else GAP)
        now = begin + 10**6 * STEP
        return replace(found, begin=begin, end=now)

    monkeypatch.setattr(Ranks, "result", result)


def test_steps_beside_evaluations_and_checkpoints_take_as_long_as_others(monkeypatch):
    """Seen on an H100: 322 ms for the step before an evaluation, 971 for the one after it."""
    clock_of_a_gpu(monkeypatch, paused=(0, 2, 3, 4))
    assert train(steps=6, eval_every_n_steps=2, ckpt_interval=3) == 0
    durations = [record["duration_ms"] for record in records("step")]
    assert durations == [STEP, STEP + GAP, STEP, STEP, STEP, STEP]
    assert all(record["duration_ms"] < 1000 for record in records("eval")), "by the wall"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_result_says_when_the_device_was_there(gpus):
    given = options(gpus=gpus, grad_accumulation=1, steps=3)
    with llmq.Trainer(**{n.replace("-", "_"): v for n, v in given.items()}) as trainer:
        before, times = time.perf_counter_ns(), []
        for _ in range(3):
            ticket = trainer.enqueue_step()
            first = trainer.result(ticket)
            done = time.perf_counter_ns()
            time.sleep(0.02)  # what the host does then does not matter
            assert trainer.result(ticket) == first
            times += [first.begin, first.end]
            assert first.end <= done
        assert before < times[0]
        assert times == sorted(set(times))


def test_the_same_bytes_as_another_dtype():
    words = PlanDevice(HOST_SPEC).alloc("words", (4,), F64, "Stats")
    assert words.rows(2, 3).view_as(I64).ptr == words.ptr + 16
    with pytest.raises(ValueError, match="view_as: words F64"):
        words.view_as(F32)
