"""Lanes: what moves between memories beside the computation, and the order that this needs.

A lane is a number of slots, through which content passes:

    arrive   one stream fills a slot, once what was in it is gone
    use      the current stream goes on once the slot is full
    leave    another stream takes the content away, once the current stream has got here

Streams: "copy" brings from host memory and "store" takes there, "stage" writes what peers read,
"comm" and "exchange" are those of collectives, "main" computes. A lane owns events and no memory.

Time. A CUDA graph captures what a function launches, once; replays launch it again and call no
Python. So what a lane remembers, and those who hold it (who has a slot, whether somebody must wait
for it), is of capture time: it is about the launches that are being enqueued, changes while a
function is captured or runs without a graph, and does not change in a replay. Two rules follow:

    Each capture starts with empty lanes, whatever ran before it: those who hold one call `forget`,
    or empty it themselves by the end. Otherwise a graph would depend on what happened to be
    captured before it, and might wait for an event that is not its own.
    An empty slot is not waited for. So before a lane is empty the current stream waits for all that
    was in it (`use`, `free`, `join`), and what is to arrive first follows it (`follow`).

State that differs from replay to replay must be in the graph's key or in device memory, never in
here.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from llmq.base.dtypes import DType
from llmq.runtime.device import Device, Event


@dataclass(slots=True, eq=False)
class _Slot:
    """The state of one slot: its events, which live as long as the device, and what is of capture
    time. gone: the events after which each piece of its content may be overwritten. content: who
    has it."""

    arrived: Event
    used: Event
    left: list[Event] = field(default_factory=list)
    gone: list[Event] = field(default_factory=list)
    content: Hashable = None
    in_use: bool = False


class Lane:
    """Slots between the stream on which content arrives and the one on which it leaves. All methods
    only enqueue. A piece is a function that enqueues a copy, or another part of the work that fills
    or empties a slot."""

    def __init__(
        self,
        dev: Device,
        slots: Iterable[Hashable] = (),
        *,
        arrive: str = "copy",
        leave: str = "store",
    ):
        """slots: keys of those that `take` gives, in this order."""
        self.dev = dev
        self._arrive, self._leave = arrive, leave
        self._slots: dict[Hashable, _Slot] = {}
        self._takable = list(slots)
        self._asked = dev.event()
        for key in self._takable:
            self.add(key)
        self.forget()

    def add(self, key: Hashable) -> None:
        """A slot beside those that `take` gives, for what always uses the same one."""
        self._slots[key] = _Slot(self.dev.event(), self.dev.event())

    def forget(self) -> None:
        """Take all slots as empty, as a capture must find them."""
        for slot in self._slots.values():
            slot.gone, slot.content, slot.in_use = [], None, False
        self._turn = 0
        self._last: Event | None = None

    # -- who has a slot --------------------------------------------------------------------------

    def take(self, content: Hashable) -> Hashable:
        """The next slot that is not in use is for this content now."""
        count = len(self._takable)
        for turn in range(self._turn, self._turn + count):
            slot = self._slots[key := self._takable[turn % count]]
            if not slot.in_use:
                self._turn, slot.content, slot.in_use = turn + 1, content, True
                return key
        contents = [self._slots[key].content for key in self._takable]
        raise AssertionError(f"lane: no slot for {content!r}, {contents} are in use")

    def keep(self, content: Hashable) -> bool:
        """Use what is still in a slot, or on its way there, again; False if it is in none."""
        for slot in self._slots.values():
            if slot.content == content:
                slot.in_use = True
                return True
        return False

    def slot_of(self, content: Hashable) -> Hashable:
        for key, slot in self._slots.items():
            if slot.content == content:
                return key
        raise AssertionError(f"lane: {content!r} is in no slot")

    # -- order -----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Let content that arrives from now on come after all that the current stream has so
        far."""
        self.dev.record(self._asked)
        with self.dev.on(self._arrive):
            self.dev.wait(self._asked)

    def arrive(self, key: Hashable, *pieces: Callable[[], None]) -> None:
        """Fill a slot; each piece, once the same piece of what was there before is gone."""
        slot = self._slots[key]
        gone = slot.gone if len(slot.gone) == len(pieces) else slot.gone[-1:]
        with self.dev.on(self._arrive):
            for event, piece in zip_longest(gone, pieces):
                if event is not None:
                    self.dev.wait(event)
                piece()
            self.dev.record(slot.arrived)
        slot.gone = []

    def use(self, key: Hashable) -> None:
        self.dev.wait(self._slots[key].arrived)

    def free(self, key: Hashable) -> None:
        """Let the current stream wait until what was in the slot is gone."""
        for event in self._slots[key].gone[-1:]:
            self.dev.wait(event)

    def used(self, key: Hashable) -> Event:
        """After it, what used the slot last is done with it; recorded by `release` and `leave`."""
        return self._slots[key].used

    def release(self, key: Hashable) -> None:
        """Say that the current stream was the last to use the slot, whose content may go."""
        slot = self._slots[key]
        self.dev.record(slot.used)
        slot.gone, slot.in_use = [slot.used], False

    def leave(self, key: Hashable, *pieces: Callable[[], None]) -> None:
        """Take away what the current stream has made or changed in the slot, at least one piece."""
        self.release(key)
        slot = self._slots[key]
        while len(slot.left) < len(pieces):  # at first, when nothing is captured
            slot.left.append(self.dev.event())
        slot.gone = slot.left[: len(pieces)]
        with self.dev.on(self._leave):
            self.dev.wait(slot.used)
            for piece, event in zip(pieces, slot.gone, strict=True):
                piece()
                self.dev.record(event)
        self._last = slot.gone[-1]

    def join(self) -> None:
        """Let the current stream wait until all that has left is gone, the last of it last."""
        if self._last is not None:
            self.dev.wait(self._last)


class Ring:
    """Pinned buffers that are used in turn, each with the event of its last use."""

    def __init__(self, dev: Device, name: str, slots: int, words: int, dtype: DType):
        self.slots = [
            dev.alloc(f"{name}.{i}", (words,), dtype, "Activations", "pinned") for i in range(slots)
        ]
        self.events: list[Event] = [dev.event() for _ in range(slots)]
        self.used = 0

    def advance(self) -> int:
        """Index of the next slot; recording its event is the caller's part."""
        index = self.used % len(self.slots)
        self.used += 1
        return index
