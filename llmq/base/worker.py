"""A worker is a process that runs foreign code such as chat templates and tokenizers.

Each item has limits of processor time and memory, and a failing item ends no other process.
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
    """The limits of one item, such as a document. seconds: seconds of processor time; each 100 kB
    of the item add one second. memory: bytes that may be used beyond the memory of the idle
    process. memory_per_byte: further bytes of memory allowed per byte of the item. flag: the option
    that raises `seconds`; "" if there is no such option. threads: True to let the tokenizers
    library use several threads."""

    seconds: float = 10.0
    memory: int = 3 << 30
    memory_per_byte: int = 0
    flag: str = ""
    threads: bool = False


class BoundsError(DataError):
    """A foreign tokenizer or template has exceeded its bounds or ended its process."""


def forks() -> bool:
    """True if a worker is forked, which is fast because all loaded modules are shared; False if
    this process has other threads, which may hold locks."""
    return threading.active_count() == 1 and sys.platform == "linux"


class Worker:
    """A process that computes `answer(task, begin)` for each task sent. `answer` calls begin(n,
    size) before it reads item n of a task; the item has `size` bytes."""

    def __init__(self, make: Callable[[], Answer], bounds: Bounds) -> None:
        """make: function that the worker's process calls to get `answer`; it must be picklable if
        this process has several threads."""
        context = multiprocessing.get_context("fork" if forks() else "spawn")
        self.bounds = bounds
        self.connection, child_end = context.Pipe()
        self._item = context.RawValue("q", -1)
        self._process = context.Process(
            target=_serve, args=(make, bounds, child_end, self._item), daemon=True
        )
        with warnings.catch_warnings():
            # the threads that make fork warn belong to BLAS and hold no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            with _without_script():
                self._process.start()
        child_end.close()
        # Workers ignore the signal by which Python ends leftover processes, so this finalizer runs
        # before Python's.
        self._at_end = Finalize(self, _end, (self._process, self.connection), exitpriority=1)

    def send(self, task: Any, places: Sequence[str]) -> None:
        """Send a task to the process. places: the place of each of the task's items, for
        messages."""
        self._places, self._item.value = places, -1
        with contextlib.suppress(OSError):  # `result` reports that the process has ended
            self.connection.send(task)

    def result(self) -> Any:
        """Return the worker's answer to the task. Raises DataError, with the item's place, if an
        item failed."""
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
        """End the process, even while a task is running."""
        self._at_end()


def _end(process: BaseProcess, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Keep a spawned process from running the user's main script, which no worker needs."""
    main = vars(sys.modules["__main__"])
    saved = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main |= {"__spec__": None, "__file__": None}
    try:
        yield
    finally:
        del main["__file__"]
        main |= saved


Begin = Callable[[int, int], None]
Answer = Callable[[Any, Begin], Any]


def in_worker(fn: Callable[[], T], what: str, bounds: Bounds) -> T:
    """Return the result of fn() called in a new process. Raises DataError, which begins with
    `what`, if fn fails."""
    worker = Worker(partial(_once, fn), bounds)
    try:
        worker.send(None, [what])
        return worker.result()
    finally:
        worker.close()


def _once(fn: Callable[[], T]) -> Answer:
    return lambda task, begin: fn()


def _why(status: int | None, bounds: Bounds) -> str:
    """Return the reason why a process has ended with this status."""
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
# Functions of the worker's process


def _serve(make: Callable[[], Answer], bounds: Bounds, connection: Connection, item: Any) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the parent handles these signals
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = str(bounds.threads).lower()
    os.environ.setdefault("RAYON_NUM_THREADS", "8")  # each thread reserves memory
    with open(os.devnull, "wb") as null:  # failing libraries write long reports to standard error
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
            task = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(answer, task, begin))


def _fail(error: Exception, task: Any, begin: Begin) -> None:
    raise error


def _outcome(answer: Answer, task: Any, begin: Begin) -> tuple[Any, Exception | str | None]:
    """Return (answer, None), or (None, error): an LlmqError, or text that says why the item
    fails."""
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
    except Exception:  # an unexpected exception is a bug, which the parent shows
        return None, RuntimeError(traceback.format_exc())


def _limit_memory(more: int) -> None:
    """Limit the process's memory to its present use plus `more` bytes, if the system reports the
    use."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_lower(most, hard), hard))


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _end_with_parent() -> None:
    """End this process when its parent is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
