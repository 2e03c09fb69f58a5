"""Reference of the clock."""

import time

import numpy as np

from llmq.ref.pointwise.clock import clock_start, clock_stop


def test_milliseconds_add_up():
    at, total = np.zeros(1, np.int64), np.full(1, 1e6)
    for _ in range(2):
        before = time.perf_counter_ns()
        clock_start(at)
        time.sleep(0.002)
        clock_stop(total, at)
        assert before <= at[0] <= time.perf_counter_ns() - 2_000_000
    # Sleeping may take long on a busy machine, but not minutes.
    assert 1e6 + 4 <= total[0] < 1e6 + 60_000
