"""The faster one of several ways: timed once, kept in a file, the same for all ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.runtime import tuning
from llmq.runtime.tuning import Choices, Unsupported
from tests.harness import host_device
from tests.runtime.fake_cublaslt import STREAM, FakeCuda


class Machine:
    """A GPU whose work takes as long as it says."""

    def __init__(self, path=None, name="GPU"):
        self.clock, self.ran = 0.0, []
        self.cuda = FakeCuda(self)
        self.choices = Choices(name, cuda=self.cuda, cache_path=path)

    def work(self, name, cost):
        if cost is None:
            raise Unsupported(f"{name} is not supported")
        self.ran.append(name)
        self.clock += cost

    def run(self, work="a product", kept=(), **costs):
        """The way that is taken at last."""
        ways = {name: partial(self.work, name, cost) for name, cost in costs.items()}
        self.choices.run(STREAM, work, ways, kept)
        return self.ran[-1]


@pytest.fixture
def process():
    """A new process, as far as files go."""

    def new(path, **more):
        tuning._files.clear()
        return Machine(path, **more)

    return new


def test_the_fastest_is_taken_and_the_first_of_equals(process):
    machine = process(None)
    assert machine.run("one", slow=2.0, fast=1.0) == "fast"
    assert machine.run("other", first=1.0, second=1.0) == "first"
    assert machine.choices.chosen == {"one": "fast", "other": "first"}
    machine.ran.clear()
    assert machine.run("one", slow=1.0, fast=2.0) == "fast"
    assert machine.ran == ["fast"]  # nothing is timed again


def test_every_later_run_takes_the_same(process, tmp_path):
    path = tmp_path / "m.json"
    assert process(path).run(a=2.0, b=1.0) == "b"
    again = process(path)
    assert again.run(a=1.0, b=2.0) == "b"
    assert again.ran == ["b"]
    assert process(path, name="other GPU").run(a=1.0, b=2.0) == "a"
    assert process(path).run("other work", a=1.0, b=2.0) == "a"
    assert process(path).run(a=1.0, c=2.0) == "a"  # among others there is another choice
    assert process(path).run(a=1.0, b=2.0) == "b"


def test_ranks_agree(process, tmp_path):
    first = process(tmp_path / "m.json")
    second = Machine(tmp_path / "m.json")
    assert first.run(a=2.0, b=1.0) == second.run(a=1.0, b=2.0) == "b"


def test_two_ranks_that_time_at_once_take_what_is_published_first(process, tmp_path):
    machine = process(tmp_path / "m.json")
    other = Machine(tmp_path / "m.json")

    def meanwhile():
        if not other.ran:
            other.run(a=1.0, b=2.0)
        machine.work("a", 2.0)

    ways = {"a": meanwhile, "b": partial(machine.work, "b", 1.0)}
    machine.choices.run(STREAM, "a product", ways, ())
    assert machine.ran[-1] == other.ran[-1] == "a"


def test_a_way_that_is_not_supported_is_left_out(process, capsys):
    assert process(None).run(a=1.0, b=None) == "a"
    assert process(None).run(a=None, b=1.0) == "b"
    with pytest.raises(Unsupported, match="a is not supported"):
        process(None).run(a=None, b=None)
    assert capsys.readouterr().err == ""


def test_what_is_added_to_is_added_to_once(process):
    machine, dev = process(None), host_device()
    total = dev.alloc("total", (3,), F32, "Activations")
    total.numpy()[...] = np.arange(3)

    def add(name, cost):
        machine.work(name, cost)
        total.numpy()[...] += 10

    ways = {"a": partial(add, "a", 2.0), "b": partial(add, "b", 1.0)}
    machine.choices.run(STREAM, "a sum", ways, (total,))
    np.testing.assert_array_equal(total.numpy(), [10, 11, 12])
    assert machine.ran[-1] == "b"


def test_nothing_is_timed_in_a_capture(process):
    machine = process(None)
    machine.cuda.capturing = True
    with pytest.raises(RuntimeError, match="a product was not seen before this graph capture"):
        machine.run(a=1.0, b=2.0)
    machine.cuda.capturing = False
    machine.run(a=2.0, b=1.0)
    machine.cuda.capturing = True
    assert machine.run(a=2.0, b=1.0) == "b"


def test_an_entry_that_names_no_way_is_replaced(process, tmp_path):
    path = tmp_path / "m.json"
    process(path).run(a=2.0, b=1.0)
    kept = tuning.algorithm_file(path)
    (key,) = kept._known
    kept.publish(key, b"elsewhere", instead_of=b"b")
    assert process(path).run(a=1.0, b=2.0) == "a"
    assert process(path).run(a=2.0, b=1.0) == "a"
