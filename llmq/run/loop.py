"""The loop of a run: makes optimizer steps, and evaluates and saves between two steps."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmq.base.callback import StepDone
from llmq.base.dtypes import Limits
from llmq.base.errors import DataError, LlmqError
from llmq.base.signals import Interrupted, OutOfTime
from llmq.checkpoint.best import Measured
from llmq.run.evaluations import Evaluations
from llmq.run.health import HealthMonitor
from llmq.run.lifecycle import Lifecycle
from llmq.run.metrics import Reporter
from llmq.run.monitor import Probe
from llmq.run.requests import Requests
from llmq.run.trainer import Trainer


class Loop:
    """Makes steps until the end of the run or a signal.

    The trainer's callbacks get the results. Between two steps the loop evaluates, then obeys
    requests for a checkpoint or for the end, then saves checkpoints. is_last: True if the run ends
    with this loop, False if another stage follows. first: the loop's first step. pending: ticket of
    the step whose result has not been read. ahead: True if a GPU computes a step while the previous
    step's result is read.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        evaluations: Evaluations,
        health: HealthMonitor,
        lifecycle: Lifecycle,
        requests: Requests,
        stop: int | None,
    ):
        """stop: the first step of the next stage, before which the loop ends; None: there is no
        next stage."""
        self.trainer, self.reporter, self.evaluations = trainer, reporter, evaluations
        self.health, self.lifecycle, self.requests = health, lifecycle, requests
        self.stop, self.is_last = stop, stop is None
        self.first = trainer.steps_done
        self.pending: int | None = None
        self.ahead = True
        self._done: list[StepDone] = []  # steps that `steps` has not yielded

    @property
    def stopped(self) -> str | None:
        """Return why a callback ends the run early; None: no callback does."""
        why = next((c.stop for c in self.trainer.callbacks if c.stop), None)
        return why and f"{why}, which ends the run after {self.trainer.steps_done} steps"

    def run(self) -> None:
        """Make all steps of the run. A signal is only noted when received, and obeyed between two
        steps."""
        with self.requests.noted():
            for _ in self.steps():
                pass

    def steps(self) -> Iterator[StepDone]:
        """Yield each step when its result is known. After the last step, evaluate once more and
        export the model.

        Raises Interrupted or OutOfTime if the run ends early, after saving a checkpoint.
        """
        trainer = self.trainer
        self.first = trainer.steps_done
        self.reporter.epoch = trainer.epoch
        self.lifecycle.move_undone_aside()
        last = trainer.total_steps if self.stop is None else self.stop
        while (trainer.steps_done < last and not self.stopped) or self._goes_back():
            if self.health.guard.is_due(trainer.steps_done):
                self._roll_back()
            self._between_steps()
            if not (self.requests.ends or self.stopped):
                self.step()
            self._leave_if_asked()
            yield from self._taken()
        yield from self._taken()
        self.is_last = self.stop is None or self.stopped is not None
        if self.stopped and trainer.steps_done > self.first:
            self.reporter.message(f"Stopped early: {self.stopped}", trainer.steps_done)
        if not self.is_last:
            self.save_last()
        elif self._saves_last:  # before the last evaluation, which takes long
            self._save()
        self.requests.agree()
        self._leave_if_asked()
        if self.is_last:
            self._end()

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        trainer, step = self.trainer, self.trainer.steps_done
        lr, limits = self.health.learning_rate(step), self.health.limits(step)
        probes = [c for c in trainer.callbacks if isinstance(c, Probe) and c.measures(step)]
        if probes:
            self.collect()
        with ExitStack() as stack:
            for probe in probes:
                stack.enter_context(probe.measuring())
            ticket = self._enqueue(lr, limits)
        self.collect()
        self.pending = ticket
        if probes or not self.ahead or trainer.dev.kind == "host":  # the CPU's step is done
            self.collect()

    def _enqueue(self, lr: float, limits: Limits) -> int:
        """Enqueue a step. Before a DataError is raised, the loaders return to the step's position,
        so that a checkpoint can be saved."""
        loaders = self.trainer.train_loaders
        before = loaders[0].state()
        try:
            return self.trainer.enqueue_step(lr=lr, limits=limits)
        except DataError:
            for loader in loaders:
                loader.set_state(before)
            raise

    def collect(self) -> None:
        """Wait for the pending step, whose result the trainer passes to its callbacks."""
        ticket, self.pending = self.pending, None
        if ticket is not None:
            self.trainer.result(ticket)
            self._done.append(self.trainer.last_step)

    def _taken(self) -> list[StepDone]:
        done, self._done = self._done, []
        return done

    def pause(self) -> None:
        """Collect the pending step before work that must not count as step time."""
        self.collect()
        self.trainer.last_end = None

    # -- between steps ---------------------------------------------------------------------------

    def _between_steps(self) -> None:
        new_epoch = self.trainer.advance_epoch_if_needed()
        for evaluate in self.evaluations.due(new_epoch=new_epoch):
            self._evaluate(evaluate)
        step, asked = self.trainer.steps_done, self.requests.agree(asks=True)
        self.lifecycle.poll()
        self.requests.write_took(self.lifecycle.write_seconds)
        due = self.lifecycle.due(step)
        if asked is not None:
            self.reporter.message(f"A checkpoint, as {asked} asks for", step)
            self._save(asked=True)
        elif step > self.first and due:
            self._save()

    def _evaluate(self, evaluate: Callable[[], Measured]) -> None:
        """Evaluate; save a checkpoint if the metric of --keep-best is the best so far."""
        self.pause()
        if self.lifecycle.measured(evaluate()):
            self._save()

    def _save(self, *, required: bool = False, asked: bool = False) -> None:
        self.pause()
        self.trainer.history = self._state()
        start = time.monotonic()
        self.lifecycle.save(required=required, asked=asked)
        self.requests.save_took(time.monotonic() - start)

    def save_last(self, *, required: bool = True) -> None:
        """Save a checkpoint from which another process or stage goes on, and wait until it is
        complete."""
        self._save(required=required)
        self.lifecycle.finish()

    @property
    def _saves_last(self) -> bool:
        """Return True if a complete run writes a last checkpoint."""
        wanted, lifecycle = self.trainer.config.save_training_state, self.lifecycle
        has_one = lifecycle.saved_at is not None or lifecycle.writing is not None
        return has_one if wanted is None else wanted

    def _leave_if_asked(self) -> None:
        """If a signal or --max-hours ends the run, save a checkpoint and raise OutOfTime or
        Interrupted."""
        if not self.requests.ends:
            return
        self._save(required=True)
        step, why = self.trainer.steps_done, "--max-hours"
        if self.requests.signum is not None:
            why = signal.Signals(self.requests.signum).name
        self.reporter.message(f"Stopped by {why} after {step} steps; go on with --continue", step)
        raise OutOfTime if self.requests.signum is None else Interrupted(self.requests.signum)

    def _end(self) -> None:
        """Run the last evaluations, then export the model. A single signal does not stop the
        export."""
        for evaluate in self.evaluations.due_at_end():
            self._evaluate(evaluate)
        self.lifecycle.finish()  # before the export, which may fail
        self.requests.agree()
        self._leave_if_asked()
        step = self.trainer.steps_done
        self.reporter.message(self.evaluations.summary(), step)
        self.reporter.warn_of_steps_without_targets(step)
        self.health.warn_at_end(step)
        self.lifecycle.export(self.evaluations.not_finite or self.health.guard.not_finite)
        if self._saves_last:  # again, if the save before the evaluations failed
            self._save(required=True)

    # -- state and rollback ----------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the run's state that neither the trainer nor the weights hold, as JSON values, for
        a checkpoint."""
        state = self.evaluations.state() | self.reporter.history
        return state | {"guard": self.health.guard.state} | self.lifecycle.state()

    def _restore(self, history: Mapping[str, Any]) -> None:
        """Restore a result of `_state` without the guard's state; {} is the state before the first
        step."""
        self.evaluations.load(history)
        self.reporter.history = history
        self.lifecycle.load(history)

    def resume(self, checkpoint: Path) -> None:
        """Go on with the history of the run that wrote this checkpoint. The trainer has loaded the
        checkpoint. Raises LlmqError for a malformed history."""
        history = self.trainer.history
        try:
            self.health.guard.load(history.get("guard", {}))
            self._restore(history)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LlmqError(
                f"'{checkpoint}' is none of llmq's: its history is not as llmq writes it "
                f"({error}); use another checkpoint"
            ) from error
        self.reporter.total_steps = self.trainer.total_steps
        self.lifecycle.resume()
        # A rollback returns to this checkpoint if the run has written no good checkpoint.
        foreign = checkpoint.parent.resolve() != self.trainer.config.checkpoint_dir.resolve()
        if foreign or "guard" not in history:
            self.health.guard.origin = str(checkpoint.absolute())

    def _goes_back(self) -> bool:
        """Roll back if the guard found too many bad steps in a row; return True after a
        rollback."""
        self.collect()
        if self.health.guard.trouble is None:
            return False
        self._roll_back()
        return True

    def _roll_back(self) -> None:
        """Load a good checkpoint, but go on with the next data. The guard keeps its own state,
        which is newer than the state in the checkpoint."""
        self.pause()
        self.health.roll_back()
        self._restore(self.trainer.history)
        self.reporter.total_steps = self.trainer.total_steps
        self.lifecycle.resume()
