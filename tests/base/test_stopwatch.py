"""The stopwatch of a run's start: inner parts count alone, and only the main thread is measured."""

import threading
import time

from llmq.base.stopwatch import OTHER, Stopwatch


def test_seconds_belong_to_the_innermost_part(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def spend(seconds):
        now[0] += seconds

    @watch.part("inner")
    def inner():
        spend(4)

    spend(1)
    with watch.part("outer"):
        spend(2)
        inner()
        inner()
        elsewhere = threading.Thread(target=inner)
        elsewhere.start()
        elsewhere.join()
    assert list(watch.take().items()) == [("inner", 8.0), ("outer", 6.0), (OTHER, 1.0)]
    spend(3)
    assert watch.take(last=True) == {OTHER: 3.0}
    inner()
    assert watch.take() == {}
