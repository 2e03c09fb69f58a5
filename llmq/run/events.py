"""Events of a run, which the loop tells its members: guard, checkpoints, reports, sensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmq.base.dtypes import Limits
from llmq.model.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step whose result is known.

    number: among the steps of this loop, from 0. ms: since the end of the step before, or of its
    own where something else came between. limits: by which it is judged. epoch: of the data, and
    the part of it that has been read then.
    """

    step: int
    number: int
    ticket: int
    result: Result
    ms: float
    lr: float
    limits: Limits
    epoch: tuple[int, float]


class Member:
    """A part of a run that goes by its events. All processes tell all members, in their order."""

    def after_step(self, done: StepDone) -> None:
        """Take the result of a step, in order. LlmqError where the run is hopeless."""

    def after_steps(self, step: int) -> None:
        """The loop has come to its end, after so many steps of the run."""

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps of the member, in JSON's types."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` of all members gave; {}: of the beginning.

        LookupError, TypeError, ValueError or AttributeError where it is something else.
        """


def state_of(members: Iterable[Member]) -> dict[str, Any]:
    """The values that a checkpoint keeps of a run beside its weights."""
    return {name: value for member in members for name, value in member.state().items()}
