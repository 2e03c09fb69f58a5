"""Events of a run, which the loop tells its members: evaluations, reports, sensors, guard,
checkpoints."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llmq.base.dtypes import Limits
from llmq.checkpoint.best import Measured
from llmq.model.rings import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step whose result is known. number: among the steps of this loop, from 0. ms: since the end
    of the step before, or of its own where something else came between. limits: by which it is
    judged. epoch: of the data, and the part of it that has been read."""

    step: int
    number: int
    ticket: int
    result: Result
    ms: float
    lr: float
    limits: Limits
    epoch: tuple[int, float]


class Member:
    """A part of a run that goes by its events. All processes tell all members, in their order.

    step: so many are done. Where a member does something that is no part of a step's time, it
    calls `Events.pause` before.
    """

    def before_steps(self, step: int) -> None:
        """The loop begins."""

    def before_step(self, step: int, *, new_epoch: bool) -> None:
        """The time between two steps, for what runs beside training. new_epoch: of the data."""

    def watch(self, step: int) -> AbstractContextManager | None:
        """A context within which this step is enqueued, and whose result is waited for then;
        None: the loop may run ahead of it."""
        return None

    def after_step(self, done: StepDone) -> None:
        """Take the result of a step, in order. LlmqError where the run is hopeless."""

    def measured(self, step: int, measured: Measured) -> None:
        """An evaluation has found these values of what the run has learned up to now."""

    def after_steps(self, step: int, *, last: bool) -> None:
        """The loop has come to its end; last: of the run, else a stage of other lengths follows."""

    def before_end(self, step: int) -> None:
        """The time for what is measured once all steps are done."""

    def at_end(self, step: int) -> None:
        """Nothing follows in this run: say and write what remains."""

    def interrupted(self, step: int) -> None:
        """The run ends here and goes on in another process: keep what that one needs."""

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps of the member, in JSON's types."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` of all members gave; {}: of the beginning.

        LookupError, TypeError, ValueError or AttributeError where it is something else.
        """


class Events:
    """The members of a run, and what these may ask of its loop.

    members: in the order in which they are told. first: the step that the loop began with.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.first = 0
        self.pause: Callable[[], None] = lambda: None
        """Reports what is pending; what comes then is no part of a step's time. The loop's."""

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps of a run beside its weights."""
        return {name: value for member in self.members for name, value in member.state().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; raises as Member.load."""
        for member in self.members:
            member.load(state)
