"""Rewards of samples: a user's function, in processes of its own with a limit of time, or called
here where a program hands the function itself."""

from __future__ import annotations

import importlib.util
import math
import numbers
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import Closing
from llmq.base.worker import Answer, Begin, Bounds, Worker

Function = Callable[[list[str], dict[str, Any]], Sequence[float | Mapping[str, float]]]
Scores = list[dict[str, float]]
REWARD = "reward"
_BOUNDS = Bounds(seconds=1e6, memory=1 << 44, threads=True)  # Rewards has a limit of its own
_START_SECONDS = 120.0  # to import what the function's file needs


class Group(NamedTuple):
    """The samples of a prompt. texts: the completions. record: of the prompt. where: the record's
    place, for messages."""

    texts: list[str]
    record: dict[str, Any]
    where: str


class RewardError(DataError):
    """A reward function has raised, taken too long, or returned no numbers."""


def components(found: Any, count: int) -> Scores | str:
    """The components of each of `count` rewards, "reward" with what they are together: the
    function's own "reward", else their sum. A sentence about what is wrong with them otherwise."""
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__"):
        return f"returned {_short(found)} in place of a list with a reward of each text"
    if len(found) != count:
        return f"returned {len(found)} rewards of {count} texts"
    scores = []
    for one in found:
        parts = dict(one) if isinstance(one, Mapping) else {REWARD: one}
        for name, value in parts.items():
            value = value.item() if isinstance(value, np.generic) else value
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                return f"returned {_short(value)} as '{name}', which is no finite number"
        parts = {str(name): float(value) for name, value in parts.items()}
        scores.append({REWARD: sum(parts.values()), **parts})
    if len({frozenset(one) for one in scores}) > 1:
        return f"returned rewards of different components: {_short([sorted(o) for o in scores])}"
    return scores


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _called(function: Function, texts: list[str], record: dict[str, Any]) -> Scores | str:
    """The components of the rewards, or what is wrong."""
    try:
        return components(function(texts, record), len(texts))
    except Exception as error:
        places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        at = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
        return f"raised {type(error).__name__}: {error}{at}"


def _loaded(path: Path, name: str) -> Answer:
    """In a worker: the function of a file, to be called for each task."""
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    function: Any = None
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        problem = None if callable(function) else f"'{path}' has no function '{name}'"
    except Exception as error:
        problem = f"'{path}' cannot be imported: {type(error).__name__}: {error}"

    def answer(task: tuple[list[str], dict[str, Any]] | None, begin: Begin) -> Any:
        begin(0, 0)
        return problem if task is None else _called(function, *task)

    return answer


class Rewards(Closing):
    """The rewards of groups of samples, each by one call of the function with the group's texts and
    its record: a sequence of numbers, or of components by name."""

    def __init__(self, function: str | Function, *, seconds: float = 60.0, workers: int = 1):
        """function: FILE.py:NAME, which is called in as many processes as `workers` says, each call
        for at most so many seconds; or the function itself, which is called here without a limit.
        ConfigError for a function that cannot be loaded."""
        self.seconds, self._function, self._workers = seconds, function, []
        if not isinstance(function, str):
            return
        file, _, name = function.rpartition(":")
        if not file or not name.isidentifier():
            raise ConfigError(f"--reward: expected FILE.py:FUNCTION, got {function!r}")
        if not Path(file).is_file():
            raise ConfigError(f"--reward: there is no file '{file}'")
        self._make = partial(_loaded, Path(file), name)
        self._workers = [Worker(self._make, _BOUNDS) for _ in range(workers)]
        for worker in self._workers:
            self._wait_for(worker)

    def __call__(self, groups: Sequence[Group]) -> list[Scores | str]:
        """The components of the rewards of each group's texts, or what is wrong with them."""
        if not self._workers:
            return [_called(self._function, group.texts, group.record) for group in groups]
        found: list[Scores | str] = [""] * len(groups)
        waiting, busy = list(enumerate(groups)), {}
        while waiting or busy:
            for place, worker in enumerate(self._workers):
                if waiting and place not in busy:
                    number, group = waiting.pop(0)
                    worker.send((group.texts, group.record), [""])
                    busy[place] = (number, time.monotonic() + self.seconds)
            until = min(end for _, end in busy.values())
            connections = [self._workers[place].connection for place in busy]
            ready = wait(connections, max(until - time.monotonic(), 0))
            for place, (number, end) in list(busy.items()):
                worker = self._workers[place]
                if worker.connection in ready:
                    found[number] = self._result(worker, 0)
                elif time.monotonic() >= end:
                    found[number] = f"took more than {self.seconds:g} s"
                else:
                    continue
                if isinstance(found[number], str):  # its process may have ended, or still computes
                    worker.close()
                    self._workers[place] = Worker(self._make, _BOUNDS)
                    self._wait_for(self._workers[place])  # a call's time begins behind this
                del busy[place]
        return found

    def _wait_for(self, worker: Worker) -> None:
        """See that a new process has the function. ConfigError if it has not."""
        worker.send(None, [""])
        problem = self._result(worker, _START_SECONDS)
        if problem is not None:
            self.close()
            raise ConfigError(f"--reward: {problem}")

    def _result(self, worker: Worker, seconds: float) -> Any:
        if not worker.connection.poll(seconds):
            return f"took more than {seconds:g} s"
        try:
            return worker.result()
        except DataError:
            return "has ended its process"

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
