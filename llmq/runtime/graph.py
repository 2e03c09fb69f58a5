"""CUDA graphs: the second run of a function is captured, and every later run replays the graph."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from llmq.base.stopwatch import START
from llmq.runtime.device import Event

WAIT_EXTERNAL = 1  # cudaEventWaitExternal: the event is recorded outside the graph
# Kernels run after their launch returns, so a later call may report the error of a failed kernel.
LATE = "this may be of something enqueued earlier, LLMQ_SYNC=1 in the environment says of what"


@contextlib.contextmanager
def noticing(api: Any, what: str) -> Iterator[None]:
    """Reraise a CUDA error of the block as RuntimeError, with the name of the call that noticed the
    error (`what`) and a way to find the cause."""
    try:
        yield
    except api.CUDARuntimeError as error:
        raise RuntimeError(f"{what}: {error}; {LATE}") from error


class CudaEvent(Event):
    """A CUDA event. capture: the graph capture in which the event was last recorded; None if the
    last record was outside a graph."""

    def __init__(self, api: Any, handle: int, waiting: Callable[[], AbstractContextManager]):
        """waiting: function that returns a context manager, within which the host waits."""
        self._api = api
        self._waiting = waiting
        self.handle = handle
        self.capture: Capture | None = None

    def synchronize(self) -> None:
        with self._waiting():
            self._api.eventSynchronize(self.handle)


@dataclass(eq=False, slots=True)
class Capture:
    """The graph of one captured function. executable: handle of the instantiated graph; 0 before.
    stack_used: bytes of the stack in use when the function starts; replays need the same number.
    streams: names of the side streams (all but "main") that the function uses. events: events that
    the function records."""

    stack_used: int
    executable: int = 0
    streams: list[str] = field(default_factory=list)
    events: set[CudaEvent] = field(default_factory=set)


class Graphs:
    """The graphs of one device by key, used by one thread. Work outside the graph is ordered as if
    a replay called the function: the graph waits for its side streams, the side streams wait for
    the graph, and each event recorded in the function passes when the whole graph is done."""

    def __init__(self, api: Any, streams: dict[str, int], new_event: Callable[[], int]):
        """api: CuPy's CUDA runtime module. streams: stream handles by name, including "main"."""
        self._api = api
        self._streams = streams
        self._main = streams["main"]
        self._ran: set[tuple] = set()
        self._captured: dict[tuple, Capture] = {}
        self._start = new_event()
        self._side = new_event()
        self.capturing: Capture | None = None

    def prepare(self, key: tuple, fn: Callable[[], Any], stack_used: int) -> None:
        """Capture the launches of fn without running. All kernels must have been loaded and tuned
        before."""
        self._ran.add(key)
        if key not in self._captured:
            captured = self._captured[key] = self._capture(key, fn, stack_used)
            self._api.graphUpload(captured.executable, self._main)

    def run(self, key: tuple, fn: Callable[[], Any], stack_used: int) -> None:
        """Run the launches of fn: directly in the first run, and from a graph in later runs. The
        first run loads, tunes and allocates everything, because a capture forbids these. Raises
        RuntimeError if a replay would use other addresses."""
        if key not in self._ran:
            self._ran.add(key)
            fn()
            return
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(key, fn, stack_used)
        if captured.stack_used != stack_used:
            raise RuntimeError(
                f"graph {key}: captured with {captured.stack_used} bytes on the stack, replayed "
                f"with {stack_used}; what differs belongs in the key"
            )
        with noticing(self._api, f"graph {key}"):
            self._launch(captured)

    def use_stream(self, name: str) -> None:
        """Add a stream to the current capture; the stream's work follows the graph's start."""
        if name != "main" and name not in self.capturing.streams:
            self.capturing.streams.append(name)
            self._api.streamWaitEvent(self._streams[name], self._start)

    def record(self, event: CudaEvent, stream: int) -> None:
        """Record the event at the stream's current end."""
        self._api.eventRecord(event.handle, stream)
        event.capture = self.capturing
        if self.capturing is not None:
            self.capturing.events.add(event)

    def wait(self, event: CudaEvent, stream: int) -> None:
        """Make the stream wait for the event's last record."""
        outside = self.capturing is not None and event.capture is not self.capturing
        self._api.streamWaitEvent(stream, event.handle, WAIT_EXTERNAL if outside else 0)

    @START.part("capturing graphs")
    def _capture(self, key: tuple, fn: Callable[[], Any], stack_used: int) -> Capture:
        api = self._api
        capture = self.capturing = Capture(stack_used)
        api.streamBeginCapture(self._main, api.streamCaptureModeThreadLocal)
        try:
            api.eventRecord(self._start, self._main)
            fn()
            for name in capture.streams:
                self._order(self._streams[name], self._main)
        except BaseException as error:
            self._abandon()
            if any(isinstance(e, api.CUDARuntimeError) for e in (error, error.__cause__)):
                raise RuntimeError(
                    f"graph {key}: capture failed ({error}); --no-use-cuda-graphs runs without"
                ) from error
            raise
        finally:
            self.capturing = None
            for event in capture.events:
                event.capture = None
        with noticing(api, f"graph {key}"):
            graph = api.streamEndCapture(self._main)
            capture.executable = api.graphInstantiate(graph)
            api.graphDestroy(graph)
        return capture

    def _abandon(self) -> None:
        """End a failed capture, so that the stream can be used again."""
        # The error that broke the capture is reported; errors here are only its consequences.
        with contextlib.suppress(self._api.CUDARuntimeError):
            self._api.graphDestroy(self._api.streamEndCapture(self._main))

    def _launch(self, captured: Capture) -> None:
        for name in captured.streams:
            self._order(self._streams[name], self._main)
        self._api.graphLaunch(captured.executable, self._main)
        for name in captured.streams:
            self._order(self._main, self._streams[name])
        for event in captured.events:
            self._api.eventRecord(event.handle, self._main)

    def _order(self, first: int, then: int) -> None:
        self._api.eventRecord(self._side, first)
        self._api.streamWaitEvent(then, self._side)

    def close(self) -> None:
        """Destroy all graphs; a function that has run before is captured again at its next run."""
        for captured in self._captured.values():
            self._api.graphExecDestroy(captured.executable)
        self._captured.clear()
