"""Lanes order transfers between memories that run beside the computation.

A lane has slots of memory, through which content (such as a layer's weights) passes:

    arrive   one stream fills a slot, once its former content is gone
    use      the current stream waits until the slot is full
    leave    another stream takes the content away, after the current stream's work so far

Each stream has a purpose: "copy" copies from host memory and "store" to host memory, "stage" writes
data that peers read, "comm" and "exchange" run collectives, "main" computes. A lane owns events and
no memory.

The following concerns time. A CUDA graph captures the launches of a function once; replays repeat
the launches and call no Python. The state of a lane and of its owners (which content is in a slot,
whether a stream must wait for a slot) is therefore state of capture time. This state describes
launches while they are enqueued. The state changes while a function is captured or runs without a
graph, and does not change in a replay. Two rules follow from this:

    Each capture starts with empty lanes, whatever ran before: owners call `forget`, or empty their
    lane at the end of each function. A graph that started with a filled lane would depend on
    earlier captures, and might wait for an event that the graph does not record.
    No stream may wait for an empty slot. Before a lane becomes empty, the current stream therefore
    waits for all content (`use`, `free`, `join`); and the first content arrives after the current
    stream's work so far (`follow`).

State that differs between replays belongs in the graph's key or in device memory, not in a lane.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from llmq.base.dtypes import DType
from llmq.runtime.device import Device, Event


@dataclass(slots=True, eq=False)
class _Slot:
    """The state of one slot. arrived, used, left: events that live as long as the device. The other
    fields are state of capture time, as the module defines it. gone: for each piece of the content,
    the event after which the piece may be overwritten. content: key of the content in the slot;
    None if the slot is empty. in_use: True if `take` may not assign the slot."""

    arrived: Event
    used: Event
    left: list[Event] = field(default_factory=list)
    gone: list[Event] = field(default_factory=list)
    content: Hashable = None
    in_use: bool = False


class Lane:
    """Slots of memory between the stream that fills a slot and the stream that empties it. All
    methods only enqueue work. A piece is a function that enqueues a copy or other work that fills
    or empties a part of a slot."""

    def __init__(
        self,
        dev: Device,
        slots: Iterable[Hashable] = (),
        *,
        arrive: str = "copy",
        leave: str = "store",
    ):
        """slots: keys of the slots that `take` assigns, in this order."""
        self.dev = dev
        self._arrive, self._leave = arrive, leave
        self._slots: dict[Hashable, _Slot] = {}
        self._takable = list(slots)
        self._asked = dev.event()
        for key in self._takable:
            self.add(key)
        self.forget()

    def add(self, key: Hashable) -> None:
        """Add a slot that `take` does not assign, for content that always uses the same slot."""
        self._slots[key] = _Slot(self.dev.event(), self.dev.event())

    def forget(self) -> None:
        """Mark all slots as empty, which each capture needs at its start."""
        for slot in self._slots.values():
            slot.gone, slot.content, slot.in_use = [], None, False
        self._turn = 0
        self._last: Event | None = None

    # -- assignment of slots ----------------------------------------------------------------------

    def take(self, content: Hashable) -> Hashable:
        """Assign the next free slot to this content; return the slot's key."""
        count = len(self._takable)
        for turn in range(self._turn, self._turn + count):
            slot = self._slots[key := self._takable[turn % count]]
            if not slot.in_use:
                self._turn, slot.content, slot.in_use = turn + 1, content, True
                return key
        contents = [self._slots[key].content for key in self._takable]
        raise AssertionError(f"lane: no slot for {content!r}, {contents} are in use")

    @property
    def full(self) -> bool:
        """True if `take` has no free slot to assign."""
        return all(self._slots[key].in_use for key in self._takable)

    def keep(self, content: Hashable) -> bool:
        """Reuse content that is still in a slot or arriving; False if no slot has the content."""
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
        """Make content that arrives from now on wait for the current stream's work so far."""
        self.dev.record(self._asked)
        with self.dev.on(self._arrive):
            self.dev.wait(self._asked)

    def arrive(self, key: Hashable, *pieces: Callable[[], None]) -> None:
        """Enqueue pieces that fill a slot; each piece waits until the same piece of the former
        content is gone."""
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
        """Make the current stream wait until the slot's former content is gone."""
        for event in self._slots[key].gone[-1:]:
            self.dev.wait(event)

    def used(self, key: Hashable) -> Event:
        """Return the event after the last use of the slot; `release` and `leave` record this
        event."""
        return self._slots[key].used

    def release(self, key: Hashable) -> None:
        """Declare the current stream's work so far the last use of the slot's content, which may
        then be overwritten."""
        slot = self._slots[key]
        self.dev.record(slot.used)
        slot.gone, slot.in_use = [slot.used], False

    def leave(self, key: Hashable, *pieces: Callable[[], None]) -> None:
        """Enqueue pieces (at least one) that copy away the slot's content, which the current stream
        has made."""
        self.release(key)
        slot = self._slots[key]
        while len(slot.left) < len(pieces):  # runs only at the first call, outside captures
            slot.left.append(self.dev.event())
        slot.gone = slot.left[: len(pieces)]
        with self.dev.on(self._leave):
            self.dev.wait(slot.used)
            for piece, event in zip(pieces, slot.gone, strict=True):
                piece()
                self.dev.record(event)
        self._last = slot.gone[-1]

    def join(self) -> None:
        """Make the current stream wait until all content that leaves is gone."""
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
        """Return the index of the next slot; the caller records the slot's event."""
        index = self.used % len(self.slots)
        self.used += 1
        return index
