"""The measurements of an optimizer step or of an evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurements of an optimizer step or of an evaluation.

    loss: the mean over the counted target tokens; NaN if no token counts. tokens: number of counted
    target tokens, or the loss's own count of that name. norm: the gradient norm before clipping; 0
    for an evaluation. numbers: further values of the loss (`Loss.numbers`); validated: names of the
    values that an evaluation reports; shown: names of the values on the console. saturated: number
    of elements beyond the range of their delayed fp8 scales. communication: milliseconds in which a
    rank only waited for other ranks, as the mean over ranks; None with one rank, 0 for an
    evaluation. waits: the same milliseconds for each rank, () with one rank. begin, end: begin of
    the step and end of its update, in nanoseconds of the clock of rank 0's device.
    """

    loss: float
    tokens: int
    norm: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    validated: tuple[str, ...] = field(default=(), compare=False)
    shown: tuple[str, ...] = field(default=(), compare=False)
    saturated: int = 0
    # times differ between equal runs
    communication: float | None = field(default=None, compare=False)
    waits: tuple[float, ...] = field(default=(), compare=False)
    begin: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)

    @property
    def told(self) -> dict[str, float]:
        """Return the values for the console; missing values, such as the reward of desirable
        answers in a validation without such answers, are left out."""
        found = {name: self.numbers[name] for name in self.shown}
        return {name: value for name, value in found.items() if not math.isnan(value)}
