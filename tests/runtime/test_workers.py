"""Rank threads: results, failures, signals."""

import signal
import threading
import time

import pytest

from llmq.errors import ConfigError
from llmq.runtime.workers import Stopped, run_ranks


def test_each_rank_runs_in_its_own_thread():
    results = run_ranks(3, lambda rank, workers: (rank, threading.current_thread().name))
    assert results == [(r, f"rank {r}") for r in range(3)]


def test_one_rank_runs_in_the_calling_thread():
    assert run_ranks(1, lambda rank, workers: threading.current_thread()) == [
        threading.current_thread()
    ]


def test_barrier():
    arrived = []

    def fn(rank, workers):
        arrived.append(rank)
        workers.barrier()
        return len(arrived)

    assert run_ranks(4, fn) == [4] * 4


def test_a_failure_stops_the_others_and_names_the_rank():
    ended = []

    def fn(rank, workers):
        if rank == 1:
            raise ValueError("broken")
        try:
            if rank == 0:
                workers.barrier()
            while True:
                workers.check()
                time.sleep(0.001)
        except Stopped:
            ended.append(rank)
            raise

    with pytest.raises(ValueError, match="broken") as caught:
        run_ranks(3, fn)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert sorted(ended) == [0, 2]


def test_a_users_error_keeps_its_type_and_names_the_rank():
    def fn(rank, workers):
        if rank == 1:
            raise ConfigError("no such file")
        workers.barrier()

    with pytest.raises(ConfigError, match=r"^rank 1: no such file$"):
        run_ranks(2, fn)


def test_a_signal_stops_the_ranks():
    started = threading.Barrier(2)

    def fn(rank, workers):
        started.wait()
        time.sleep(0.05)  # the calling thread waits for the ranks by now
        if rank == 0:
            signal.raise_signal(signal.SIGINT)
        while True:
            workers.check()
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, fn)
