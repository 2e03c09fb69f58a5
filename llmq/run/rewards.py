"""Rewards of samples: a user's function, or a class of environments that answer them, in processes
of its own with a limit of time, or called here where a program hands the function itself."""

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
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import Closing
from llmq.base.worker import Answer, Begin, Bounds, Worker

T = TypeVar("T")
Function = Callable[[list[str], dict[str, Any]], Sequence[float | Mapping[str, float]]]
Scores = list[dict[str, float]]
REWARD = "reward"
_BOUNDS = Bounds(seconds=1e6, memory=1 << 44, threads=True)  # Rewards has a limit of its own
_ENDED = "has ended its process"
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


def _tried(fn: Callable[..., T], *args: Any) -> T | str:
    """The result of a user's function, or what is wrong."""
    try:
        return fn(*args)
    except Exception as error:
        places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        at = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
        return f"raised {type(error).__name__}: {error}{at}"


class Turn(NamedTuple):
    """The answer of an environment to a text. messages: the next ones of the conversation, [] for
    none; a text is a message of its user, or of the tool that was called. scores: the components of
    the reward. done: whether the conversation ends."""

    messages: str | list[dict[str, Any]]
    scores: dict[str, float]
    done: bool


def _turn(found: Any) -> Turn | str:
    """Check the result of an environment's `step`; a sentence about a wrong one."""
    if not isinstance(found, tuple) or len(found) != 3:
        return f"returned {_short(found)} in place of (text or messages, reward, done)"
    said, reward, done = found
    scores = components([reward], 1)
    if isinstance(scores, str):
        return scores
    said = [said] if isinstance(said, Mapping) else "" if said is None else said
    if not isinstance(said, str | list) or not all(isinstance(m, str | Mapping) for m in said):
        return f"returned {_short(said)} in place of a text or messages"
    return Turn(said, scores[0], bool(done))


class _Calls:
    """Calls of a user's function, or of objects of a user's class, by the keys of episodes."""

    def __init__(self, function: Any):
        self._function = function
        self.has_turns = isinstance(function, type) and callable(getattr(function, "step", None))
        self.tools: Sequence[Any] | None = getattr(function, "tools", None)
        self._running: dict[int, Any] = {}

    def rewards(self, texts: list[str], record: dict[str, Any]) -> Scores | str:
        """The components of the rewards of a prompt's texts."""
        return _tried(lambda: components(self._function(texts, record), len(texts)))

    def begin(self, keys: Sequence[int], record: dict[str, Any]) -> str | None:
        """Begin episodes of a prompt."""

        def begin() -> None:
            for key in keys:
                self._running[key] = self._function()
                self._running[key].reset(record)

        return _tried(begin)

    def step(self, said: Sequence[tuple[int, str, list[Any]]]) -> list[Turn] | str:
        """The turns of a prompt's episodes behind these texts, with calls of tools if there are
        tools."""
        found = []
        for key, text, calls in said:
            if key not in self._running:
                return "has lost its environments with their process"
            more = () if self.tools is None else (calls,)
            turn = _tried(self._running[key].step, text, *more)
            turn = turn if isinstance(turn, str) else _turn(turn)
            if isinstance(turn, str):
                return turn
            found.append(turn)
            if turn.done:
                del self._running[key]
        return found


def _loaded(path: Path, name: str) -> Answer:
    """In a worker: calls of what a file names."""
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
    calls = _Calls(function)

    def answer(task: tuple[str, tuple[Any, ...]] | None, begin: Begin) -> Any:
        begin(0, 0)
        if task is None:
            return problem or (calls.has_turns, calls.tools)
        return getattr(calls, task[0])(*task[1])

    return answer


class Rewards(Closing):
    """The rewards of groups of samples, each by one call of the function with the group's texts and
    its record: a sequence of numbers, or of components by name. Or the answers of environments,
    objects of a class with `reset(record)` and `step(text)`.

    has_turns: whether there are environments. tools: of the class, schemas for the prompts; None:
    it has none."""

    def __init__(self, function: str | Function | type, *, seconds: float = 60.0, workers: int = 1):
        """function: FILE.py:NAME, which is called in as many processes as `workers` says, each call
        for at most so many seconds; or the function or class itself, which is called here without a
        limit. ConfigError for a function that cannot be loaded."""
        self.seconds, self._workers = seconds, []
        if not isinstance(function, str):
            self._here = _Calls(function)
            self.has_turns, self.tools = self._here.has_turns, self._here.tools
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
        return self._each("rewards", [(group.texts, group.record) for group in groups])

    def begin(self, records: Sequence[dict[str, Any]], count: int) -> list[str | None]:
        """Begin `count` episodes of each prompt, whose keys count from 0."""
        keys = [range(i * count, (i + 1) * count) for i in range(len(records))]
        return self._each("begin", list(zip(keys, records, strict=True)), fixed=range(len(records)))

    def step(
        self, said: Mapping[int, Sequence[tuple[int, str, list[Any]]]]
    ) -> dict[int, list[Turn] | str]:
        """The turns behind these texts, by the number of the prompt. said: keys of episodes, texts
        and calls of tools."""
        found = self._each("step", [(texts,) for texts in said.values()], fixed=[*said])
        return dict(zip(said, found, strict=True))

    def _each(
        self, name: str, tasks: Sequence[tuple[Any, ...]], fixed: Sequence[int] | None = None
    ) -> list[Any]:
        """The results of a method of `_Calls` for each of these arguments. fixed: numbers that
        decide the process of each; None: any process does."""
        if not self._workers:
            return [getattr(self._here, name)(*arguments) for arguments in tasks]
        found: list[Any] = [""] * len(tasks)
        waiting, busy, several = [*range(len(tasks))], {}, len(self._workers)
        while waiting or busy:
            for place in (p for p in range(several) if p not in busy):
                own = [n for n in waiting if fixed is None or fixed[n] % several == place]
                if own:
                    waiting.remove(own[0])
                    self._workers[place].send((name, tasks[own[0]]), [""])
                    busy[place] = (own[0], time.monotonic() + self.seconds)
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
                if worker.connection not in ready or found[number] == _ENDED:
                    worker.close()
                    self._workers[place] = Worker(self._make, _BOUNDS)
                    self._wait_for(self._workers[place])  # a call's time begins behind this
                del busy[place]
        return found

    def _wait_for(self, worker: Worker) -> None:
        """See that a new process has the function. ConfigError if it has not."""
        worker.send(None, [""])
        found = self._result(worker, _START_SECONDS)
        if isinstance(found, str):
            self.close()
            raise ConfigError(f"--reward: {found}")
        self.has_turns, self.tools = found

    def _result(self, worker: Worker, seconds: float) -> Any:
        if not worker.connection.poll(seconds):
            return f"took more than {seconds:g} s"
        try:
            return worker.result()
        except DataError:
            return _ENDED

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
