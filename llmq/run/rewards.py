"""Rewards of samples, from a user's function or from a user's class of environments that answer
samples. Code of a file runs in worker processes with a time limit. A function that a program passes
as an object runs in this process."""

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
_BOUNDS = Bounds(seconds=1e6, memory=1 << 44, threads=True)  # `Rewards` itself limits the time
_ENDED = "has ended its process"
_START_SECONDS = 120.0  # longest time in seconds to import the function's file


class Group(NamedTuple):
    """The samples of a prompt. texts: the completions. record: the prompt's record. where: name of
    the record for messages."""

    texts: list[str]
    record: dict[str, Any]
    where: str


class RewardError(DataError):
    """Raised if a reward function has raised, taken too long, or returned no numbers."""


def components(found: Any, count: int) -> Scores | str:
    """Return the components of each reward, from a function's result `found` for `count` texts. The
    component "reward" is the whole reward: the function's own "reward", or else the sum of
    components. For a malformed result, return words that name the error."""
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
    """Return the result of a user's function, or words about the exception that it raised."""
    try:
        return fn(*args)
    except Exception as error:
        places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        at = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
        return f"raised {type(error).__name__}: {error}{at}"


class Turn(NamedTuple):
    """The answer of an environment to a text. messages: next messages of the conversation, or a
    text, which is a message of the user or of the called tool. scores: components of the reward.
    done: True if the conversation ends."""

    messages: str | list[dict[str, Any]]
    scores: dict[str, float]
    done: bool


def _turn(found: Any) -> Turn | str:
    """Convert the result of an environment's `step`. Returns words that name the error if the
    result is malformed."""
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
    """Calls a user's function, or the environments of a user's class; each episode has a key."""

    def __init__(self, function: Any):
        self._function = function
        self.has_turns = isinstance(function, type) and callable(getattr(function, "step", None))
        self.tools: Sequence[Any] | None = getattr(function, "tools", None)
        self._running: dict[int, Any] = {}

    def rewards(self, texts: list[str], record: dict[str, Any]) -> Scores | str:
        """Return the components of the rewards of a prompt's texts."""
        return _tried(lambda: components(self._function(texts, record), len(texts)))

    def begin(self, keys: Sequence[int], record: dict[str, Any]) -> str | None:
        """Make and reset an environment for each of a prompt's episodes. Returns the error, or
        None."""

        def begin() -> None:
            for key in keys:
                self._running[key] = self._function()
                self._running[key].reset(record)

        return _tried(begin)

    def step(self, said: Sequence[tuple[int, str, list[Any]]]) -> list[Turn] | str:
        """Return the environments' answers in a prompt's episodes. said: (key of the episode, text
        of the model, tool calls) for each episode; only environments with tools receive tool
        calls."""
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
    """Import `name` from the file, in a worker process. Returns the function that answers the
    worker's tasks."""
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
    """Computes rewards of groups of samples. One call of the function, with a group's texts and
    record, returns a sequence of numbers, or of components by name. A class with `reset(record)`
    and `step(text)` gives environments instead, which answer each text.

    has_turns: True for environments. tools: schemas of the class's tools for prompts, or None.
    """

    def __init__(self, function: str | Function | type, *, seconds: float = 60.0, workers: int = 1):
        """function: FILE.py:NAME, which runs in `workers` processes, each call for at most
        `seconds`; or the function or class itself, which runs in this process without a limit.
        Raises ConfigError for a function that cannot be loaded."""
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
        """Return the components of the rewards of each group's texts, or the group's error in
        words."""
        return self._each("rewards", [(group.texts, group.record) for group in groups])

    def begin(self, records: Sequence[dict[str, Any]], count: int) -> list[str | None]:
        """Begin `count` episodes of each prompt; keys of episodes count from 0 over all prompts.
        Returns the error of each prompt, or None."""
        keys = [range(i * count, (i + 1) * count) for i in range(len(records))]
        return self._each("begin", list(zip(keys, records, strict=True)), fixed=range(len(records)))

    def step(
        self, said: Mapping[int, Sequence[tuple[int, str, list[Any]]]]
    ) -> dict[int, list[Turn] | str]:
        """Return the environments' answers to texts, or an error, by number of the prompt. said: by
        number of the prompt, (key of the episode, text, tool calls) for each episode."""
        found = self._each("step", [(texts,) for texts in said.values()], fixed=[*said])
        return dict(zip(said, found, strict=True))

    def _each(
        self, name: str, tasks: Sequence[tuple[Any, ...]], fixed: Sequence[int] | None = None
    ) -> list[Any]:
        """Call the method `name` of `_Calls` with each tuple of arguments in `tasks`; return the
        results. fixed: a number for each task; tasks with equal numbers run in the same process.
        None: any process."""
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
                    self._wait_for(self._workers[place])  # the import counts as no call's time
                del busy[place]
        return found

    def _wait_for(self, worker: Worker) -> None:
        """Wait until a new process has loaded the function. Raises ConfigError if loading fails."""
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
        """End the worker processes."""
        for worker in self._workers:
            worker.close()
