"""Callbacks of a run receive results: console reports, log writers, sensors, and classes of the
user.

`llmq train` and `llmq.Trainer` both call `Callback`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.base.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """An optimizer step whose result is known.

    step: number in the run, from 0. number: number of the step among this Trainer's steps, from 0.
    result: loss, gradient norm, counted tokens. ms: milliseconds on the device's clock since the
    end of the step before, or since this step's begin if an evaluation or a checkpoint came between
    the steps. lr: the learning rate. epoch: number of the epoch from 0, plus the fraction of the
    epoch that has been read; None if the caller passes batches. ticket: the number that
    `Trainer.enqueue_step` returned.
    """

    step: int
    number: int
    result: Result
    ms: float
    lr: float
    epoch: tuple[int, float] | None
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of a complete validation or task. step: number of optimizer steps before the
    evaluation. metrics: values by name: "loss", "NAME/loss" of a named validation set,
    "TASK/METRIC"."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run. steps_done: steps of the whole run. error: the exception that ended the
    run, such as KeyboardInterrupt; None if the run came to its end."""

    steps_done: int
    error: BaseException | None


class Callback:
    """A callback listens to a run. Override the methods that you need; the methods of this class do
    nothing.

    All methods are called in the thread that drives the run, between two steps, in the order of
    the callbacks. An exception in a method ends the run. In a run of several processes each process
    has callbacks of its own.

    stop: the reason to end the run before its last step, as a line for the log; None to go on. A
    run reads `stop` after each step and evaluation; `Trainer.step` never does. With several
    processes all processes must set the same value.
    """

    stop: str | None = None

    def on_step(self, step: StepDone) -> None:
        """Called after each step, in order, when the step's result is known; on a GPU that is after
        the next step is enqueued."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called after each validation and after each task."""

    def on_checkpoint(self, path: Path) -> None:
        """Called when the checkpoint in the directory `path` is complete."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Called with each record of the JSON log of a run, `time` in seconds since 1970."""

    def on_end(self, end: RunEnd) -> None:
        """Called once at the end of the run, also if an error ended the run."""
