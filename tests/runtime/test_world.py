"""Processes of a world exchange values and errors, each process in a thread, without MPI."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmq.base.errors import ConfigError
from llmq.runtime.world import World

MACHINES = ("a", "b", "b")


class Exchange:
    """One process's end of an exchange between threads."""

    def __init__(self, index, values, barrier):
        self.index, self.values, self.barrier = index, values, barrier

    def gather(self, value):
        self.values[self.index] = value
        self.barrier.wait(10)
        found = [*self.values]
        self.barrier.wait(10)
        return found

    def share(self, value):
        return self.gather(value)[0]


def in_all(fn):
    """The results of fn(world) in three processes; of a call that raises the error."""
    values, barrier = [None] * 3, threading.Barrier(3)
    worlds = [World((1, 1, 1), MACHINES, i, Exchange(i, values, barrier)) for i in range(3)]

    def call(world):
        try:
            return fn(world)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(call, worlds))


def fails_in(*indices):
    def fn(world):
        def work():
            if world.index in indices:
                raise ConfigError("no such file")
            return world.index

        return world.each(work)

    return fn


def test_processes_exchange_values():
    assert in_all(lambda world: world.gather(world.index)) == [[0, 1, 2]] * 3
    assert in_all(lambda world: world.share(world.machine)) == ["a"] * 3
    assert in_all(lambda world: world.together(lambda: world.first)) == [[True, False, False]] * 3
    assert in_all(lambda world: world.each(lambda: world.index)) == [0, 1, 2]
    called = []
    assert in_all(lambda world: world.on_first(lambda: called.append(world.index))) == [None] * 3
    assert called == [0]


@pytest.mark.parametrize(
    ("indices", "text"),
    [((1,), "process 1 on machine 'b': no such file"), ((0, 1, 2), "no such file")],
)
def test_an_error_of_one_process_is_raised_in_all(indices, text):
    """The error names its process, unless all processes have the same error."""
    errors = in_all(fails_in(*indices))
    assert [str(error) for error in errors] == [text] * 3
    assert all(error.agreed for error in errors)


def test_an_error_of_the_first_process_is_raised_in_all():
    def fail():
        raise ConfigError("no such file")

    errors = in_all(lambda world: world.on_first(fail))
    assert [(str(error), error.agreed) for error in errors] == [("no such file", True)] * 3


def test_one_process_calls_and_returns():
    world, array = World(), object()
    assert world.gather(1) == world.together(lambda: 1) == [1]
    assert world.share(1) == world.each(lambda: 1) == world.on_first(lambda: 1) == 1
    assert world.gather_arrays([(0, array)]) == [(0, array)]
    assert world.first and not world.several
