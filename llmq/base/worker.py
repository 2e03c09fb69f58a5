"""A process for code of others, such as chat templates and tokenizers: it may use only so much
processor time and memory for each item, and whatever it does ends no other process.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from llmq.base.errors import DataError, LlmqError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an item. seconds: processor time, with one second more per 100 kB of the item.
    memory: bytes beyond the memory of the idle process. memory_per_byte: bytes more per byte of
    the item. flag: the option that raises `seconds`, "" for none. threads: True lets the tokenizers
    library use several threads."""

    seconds: float = 10.0
    memory: int = 3 << 30
    memory_per_byte: int = 0
    flag: str = ""
    threads: bool = False


class BoundsError(DataError):
    """A foreign tokenizer or template exceeds its bounds, or has ended its process."""


def forks() -> bool:
    """Whether a worker is a fork, which has at once all that is loaded here: not where there are
    other threads, which may hold locks."""
    return threading.active_count() == 1 and sys.platform == "linux"


class Worker:
    """A process that answers one task after the other: `answer(task, begin)`. It calls begin(n,
    size) before it looks at item n of a task, of so many bytes."""

    def __init__(self, make: Callable[[], Answer], bounds: Bounds) -> None:
        """make: called in the process; picklable where this one has several threads."""
        context = multiprocessing.get_context("fork" if forks() else "spawn")
        self.bounds = bounds
        self.connection, there = context.Pipe()
        self._item = context.RawValue("q", -1)
        args = (make, bounds, there, self._item)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # BLAS's threads hold no lock
            with _without_script():
                self._process.start()
        there.close()
        # Workers ignore the signal by which Python ends leftover processes: this comes before.
        self._at_end = Finalize(self, _end, (self._process, self.connection), exitpriority=1)

    def send(self, task: Any, places: Sequence[str]) -> None:
        """Give it a task. places: of its items, for messages."""
        self._places, self._item.value = places, -1
        with contextlib.suppress(OSError):  # it has ended, which `result` tells
            self.connection.send(task)

    def result(self) -> Any:
        """The worker's answer to the task. DataError, with the item's place, if it cannot."""
        try:
            value, error = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise self._named(_why(self._process.exitcode, self.bounds)) from None
        if isinstance(error, str):
            raise self._named(error)
        if error is not None:
            raise error
        return value

    def _named(self, problem: str) -> BoundsError:
        item = self._item.value
        place = self._places[item] if item >= 0 else ", ".join(self._places[:1])
        return BoundsError(f"{place}: {problem}" if place else problem)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._at_end()


def _end(process: BaseProcess, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Keep a spawned process from running the user's script: workers need nothing of the script."""
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main |= {"__spec__": None, "__file__": None}
    try:
        yield
    finally:
        del main["__file__"]
        main |= kept


Begin = Callable[[int, int], None]
Answer = Callable[[Any, Begin], Any]


def in_worker(fn: Callable[[], T], what: str, bounds: Bounds) -> T:
    """The result of fn() in a process of its own. DataError, with `what`, if it cannot."""
    worker = Worker(partial(_once, fn), bounds)
    try:
        worker.send(None, [what])
        return worker.result()
    finally:
        worker.close()


def _once(fn: Callable[[], T]) -> Answer:
    return lambda task, begin: fn()


def _why(status: int | None, bounds: Bounds) -> str:
    """Why a process has ended with this status."""
    if status == -signal.SIGXCPU:
        return (
            f"it took more than {bounds.seconds:g} s of processor time: leave the record out, use "
            "another tokenizer or template" + (bounds.flag and f", or raise {bounds.flag}")
        )
    if status == -signal.SIGKILL:
        return (
            "a worker process was killed, perhaps for lack of memory: run it again with fewer "
            "--workers to go on where it was"
        )
    return (
        f"the tokenizer or template has ended its process (status {status}), or wanted more than "
        f"{bounds.memory >> 20} MiB of memory: leave the record out, or use another one"
    )


# ------------------------------------------------------------------------------------------------
# In the process


def _serve(make: Callable[[], Answer], bounds: Bounds, there: Connection, item: Any) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # they are the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = str(bounds.threads).lower()
    os.environ.setdefault("RAYON_NUM_THREADS", "8")  # each reserves memory
    with open(os.devnull, "wb") as null:  # libraries that give up say so at length
        os.dup2(null.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(bounds.memory)

    def begin(number: int, size: int) -> None:
        item.value = number
        seconds = time.process_time() + bounds.seconds + size / 1e5
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (_lower(math.ceil(seconds), hard), hard))
        if bounds.memory_per_byte:
            _limit_memory(bounds.memory + bounds.memory_per_byte * size)

    begin(-1, 0)
    try:
        answer = make()
    except Exception as error:
        answer = partial(_fail, error)
    while True:
        try:
            task = there.recv()
        except EOFError:
            return
        there.send(_outcome(answer, task, begin))


def _fail(error: Exception, task: Any, begin: Begin) -> None:
    raise error


def _outcome(answer: Answer, task: Any, begin: Begin) -> tuple[Any, Exception | str | None]:
    """The answer, or an error: of ours, or what is wrong with the item."""
    try:
        return answer(task, begin), None
    except LlmqError as error:
        return None, type(error)(error.headline, error.details)
    except MemoryError:
        return None, (
            "it wants more memory than it may have: leave the record out, or use another tokenizer "
            "or template"
        )
    except (OSError, RecursionError, OverflowError) as error:
        return None, error
    except Exception:  # a bug, which the parent shows
        return None, RuntimeError(traceback.format_exc())


def _limit_memory(more: int) -> None:
    """Set the limit, if the system tells how much this process has."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_lower(most, hard), hard))


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _end_with_parent() -> None:
    """A parent that is killed cannot say so."""
    multiprocessing.parent_process().join()
    os._exit(1)
