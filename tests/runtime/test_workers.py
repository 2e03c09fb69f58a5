"""Rank threads: commands, failures, signals, hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmq.base.errors import ConfigError, LlmqError
from llmq.runtime import workers as module
from llmq.runtime.workers import QUEUE, RankPool, Stopped
from tests.ranks import run_ranks


@pytest.fixture
def pool():
    """Makes pools that are closed after the test."""
    made = []

    def make(world_size=3, **options):
        made.append(RankPool(world_size, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


# -- commands --


def test_every_rank_keeps_its_thread(pool):
    ranks = pool()
    first, second = (ranks.run("x", lambda r: (r, threading.get_ident())) for _ in range(2))
    assert first == second
    assert [rank for rank, _ in first] == [0, 1, 2]
    assert len({thread for _, thread in first} | {threading.get_ident()}) == 4


def test_one_rank_is_the_calling_thread(pool):
    ranks = pool(1, watchdog=0.01)
    count = threading.active_count()
    assert ranks.run("x", lambda rank: threading.get_ident()) == [threading.get_ident()]
    command = ranks.post("x", lambda rank: "done at once")
    assert command.results == {0: "done at once"}
    error = ValueError("mine")
    with pytest.raises(ValueError) as caught:
        ranks.run("x", lambda rank: (_ for _ in ()).throw(error))
    assert caught.value is error
    assert not hasattr(error, "__notes__"), "there is only one rank"
    assert ranks.run("x", lambda rank: 7) == [7], "it is not the pool's failure"
    assert threading.active_count() == count


def test_commands_keep_their_order_and_wait_for_no_other_rank(pool):
    ranks, done, go = pool(), [[], [], []], threading.Event()

    def command(number):
        def fn(rank):
            if rank == 1:
                go.wait(5)
            done[rank].append(number)

        return fn

    posted = [ranks.post("x", command(number)) for number in range(QUEUE)]
    assert ranks.run("x", lambda rank: list(done[rank]), {0: 0, 2: 2}) == [list(range(QUEUE))] * 2
    assert done[1] == [], "rank 1 has not begun"
    go.set()
    ranks.wait(posted[-1])
    assert done == [list(range(QUEUE))] * 3


def test_a_rank_can_be_only_so_far_behind(pool):
    ranks, go = pool(2), threading.Event()
    for _ in range(QUEUE):
        ranks.post("x", lambda rank: rank == 0 or go.wait(5))
    threading.Timer(0.1, go.set).start()
    ranks.post("one more", lambda rank: None)
    assert go.is_set(), "it waited for the rank that is behind"


def test_barrier():
    arrived = []

    def fn(rank, workers):
        arrived.append(rank)
        workers.barrier()
        return len(arrived)

    assert run_ranks(4, fn) == [4] * 4


# -- failures --


def test_a_failure_stops_the_others_and_names_the_rank():
    ended, started = [], threading.Barrier(3)

    def fn(rank, workers):
        started.wait()
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


def test_a_posted_failure_is_raised_by_what_comes_next(pool):
    ranks, ran = pool(2), []

    def fail(rank):
        if rank == 1:
            raise LlmqError("no memory")

    ranks.post("x", fail)
    with pytest.raises(LlmqError, match=r"^rank 1: no memory$"):
        for _ in range(100):  # it needs a moment
            ranks.run("y", lambda rank: time.sleep(0.01))
    with pytest.raises(LlmqError, match=r"^rank 1: no memory$"):
        ranks.post("z", ran.append)
    ranks.close()
    assert ran == []


def test_ranks_that_were_stopped_without_an_error(pool):
    ranks = pool(2)
    ranks.workers.stop()
    with pytest.raises(Stopped, match="the ranks were stopped"):
        ranks.run("x", lambda rank: ranks.workers.barrier())


def test_a_rank_that_cannot_be_stopped_is_left_alone(pool):
    ranks, release, cleaned, left = pool(2, patience=0.3), threading.Event(), [], []
    started = threading.Barrier(2)

    def fn(rank):
        started.wait()
        if rank == 1:
            raise ValueError("broken")
        left.append(release.wait(10))

    with pytest.raises(ValueError, match="broken"):
        ranks.run("x", fn)
    ranks.close(cleaned.append)
    assert left == [], "nobody waits for a rank without end"
    assert cleaned == [], "what a rank still uses is not freed"
    release.set()


def test_errors_of_cleaning_up_do_not_hide_the_failure_of_a_single_rank(pool):
    def broken(rank):
        raise RuntimeError("the GPU says it again")

    ranks = pool(1)
    with pytest.raises(ValueError, match="first"):
        ranks.run("x", lambda rank: (_ for _ in ()).throw(ValueError("first")))
    ranks.close(broken)
    assert ranks.closed
    with pytest.raises(RuntimeError, match="again"):
        pool(1).close(broken)


def test_cleaning_up(pool):
    cleaned = []

    def cleanup(rank):
        cleaned.append((rank, threading.current_thread().name))
        raise OSError("swallowed after a failure")

    ranks = pool(2)
    with pytest.raises(OSError):
        ranks.close(cleanup)
    assert all(name == f"rank {rank}" for rank, name in cleaned)
    cleaned.clear()
    ranks = pool(2)
    with pytest.raises(ValueError, match="broken"):
        ranks.run("x", lambda rank: (_ for _ in ()).throw(ValueError("broken")))
    ranks.close(cleanup)
    assert sorted(rank for rank, _ in cleaned) == [0, 1]
    one = pool(1)
    one.close(lambda rank: cleaned.append((rank, threading.current_thread().name)))
    assert cleaned[-1] == (0, threading.current_thread().name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_closed_runs_nothing(pool, world_size):
    ranks, cleaned = pool(world_size), []
    ranks.close(cleaned.append)
    ranks.close(cleaned.append)
    assert sorted(cleaned) == list(range(world_size))
    with pytest.raises(RuntimeError, match="step 3: the ranks are closed"):
        ranks.run("step 3", lambda rank: rank)


# -- signals --


def test_a_signal_stops_the_ranks():
    started = threading.Barrier(2)

    def fn(rank, workers):
        started.wait()
        time.sleep(0.05)  # the calling thread waits for the ranks by now
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            workers.check()
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, fn)


def test_a_signal_while_a_command_is_given_stops_those_that_have_it(pool):
    """Ranks with the command would wait for the others, and closing would wait for these ranks."""
    ranks, cleaned = pool(2, watchdog=1), []

    class Interrupted:
        """A queue at which Ctrl-C arrives."""

        def __init__(self, real):
            self.get, self.put = real.get, self.interrupt
            self.real = real

        def interrupt(self, command):
            self.put = self.real.put
            raise KeyboardInterrupt

    ranks._queues[1] = Interrupted(ranks._queues[1])
    with pytest.raises(KeyboardInterrupt):
        ranks.run("x", lambda rank: ranks.workers.barrier())
    ranks.close(cleaned.append)
    assert sorted(cleaned) == [0, 1]


def test_the_first_of_several_failures_is_raised(pool):
    """Errors that the others meet when they are stopped are not why they were."""
    ranks, started = pool(2), threading.Barrier(2)

    def fn(rank):
        started.wait()
        if rank == 1:
            raise ValueError("first")
        ranks.workers.stopped.wait(5)
        raise OSError("the directory is gone")

    with pytest.raises(ValueError, match="first"):
        ranks.run("x", fn)
    with pytest.raises(ValueError, match="first"):
        ranks.run("y", fn)


def test_a_signal_that_is_only_noted_disturbs_nothing(pool):
    ranks, noted = pool(2), []
    before = signal.signal(signal.SIGINT, lambda signum, frame: noted.append(signum))
    try:
        ranks.run("x", lambda rank: rank or os.kill(os.getpid(), signal.SIGINT))
        assert ranks.run("y", lambda rank: rank) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT]


# -- hangs --


def test_watchdog_says_what_the_ranks_do_and_ends_them(pool, capsys):
    ranks = pool(2, watchdog=0.2, describe=lambda r: f"micro-step {r}")

    def fn(rank):
        if rank == 0:
            ranks.workers.stopped.wait(10)

    with pytest.raises(LlmqError, match=r"no rank has made progress for 0 seconds; .*--watchdog"):
        ranks.run("step 7", fn)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("rank 0: step 7 for 0 s, at workers.py:")
    assert first.endswith(", micro-step 0")
    assert second == "rank 1: idle, micro-step 1"


def test_watchdog_leaves_progress_and_idleness_alone(pool, capsys):
    ranks = pool(2, watchdog=0.3)

    def long(rank):
        for _ in range(10):
            time.sleep(0.06)
            ranks.beat()

    ranks.run("long", long)
    time.sleep(0.5)
    for _ in range(5):
        ranks.run("short", lambda rank: time.sleep(0.12))
    assert capsys.readouterr().err == ""


HANGING = """
import atexit, threading
atexit.register(lambda: print("libraries wait here"))
from llmq.runtime import workers
pool, started = workers.RankPool(2, patience=0.2), threading.Barrier(2)
def fn(rank):
    started.wait()
    return threading.Event().wait() if rank else 1 / 0
try:
    pool.run("x", fn)
except ZeroDivisionError:
    print("raised")
pool.close()
"""


def test_a_hanging_rank_does_not_keep_the_process_from_ending():
    """The work of libraries at exit, such as waiting for the GPU, is left out."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(module.PACKAGE).parent)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (71, "raised\n", "")
