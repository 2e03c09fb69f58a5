"""The loop of a run: steps, one after the other, and what it tells the members of each."""

import signal
from contextlib import ExitStack
from functools import partial

from llmq.base.dtypes import Limits
from llmq.base.errors import DataError
from llmq.base.signals import Interrupted, OutOfTime
from llmq.run.events import Events, StepDone
from llmq.run.judging import Judging
from llmq.run.metrics import Reporter
from llmq.run.requests import Requests
from llmq.run.trainer import Trainer


class Loop:
    """Steps until the end or a signal, one step ahead of the reports on a GPU.

    last_end: of the step before, as Result.end; None where something else came between. is_last:
    True if the run ends with this loop, False if another stage follows.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        events: Events,
        judging: Judging,
        requests: Requests,
        stop: int | None,
    ):
        """judging: says at which rate and within which limits steps are made, and goes back. stop:
        the step before which it ends, where a stage follows; None: the run's last."""
        self.trainer, self.reporter, self.members = trainer, reporter, events.members
        self.events, self.judging, self.requests, self.stop = events, judging, requests, stop
        # The ticket of a step whose result has not been read, and what is known of the step.
        self.pending: tuple[int, partial[StepDone]] | None = None
        self.last_end: int | None = None
        self.is_last = stop is None
        events.pause = self.pause

    def run(self) -> None:
        """Train, and end the run with its last evaluations and its model.

        Interrupted or OutOfTime where it ends before, once it is saved.
        """
        trainer = self.trainer
        self.events.first = trainer.steps_done
        for member in self.members:
            member.before_steps(trainer.steps_done)
        last = trainer.total_steps if self.stop is None else self.stop
        while (trainer.steps_done < last and not self.judging.stop) or self._goes_back():
            if self.judging.guard.is_due(trainer.steps_done):
                self._roll_back()
            new_epoch = trainer.advance_epoch_if_needed()
            for member in self.members:
                member.before_step(trainer.steps_done, new_epoch=new_epoch)
            if not (self.requests.ends or self.judging.stop):
                self.step()
            self._leave_if_asked()
        self.is_last = self.stop is None or self.judging.stop is not None
        if self.judging.stop and trainer.steps_done > self.events.first:
            self.reporter.message(f"Stopped early: {self.judging.stop}", trainer.steps_done)
        for member in self.members:
            member.after_steps(trainer.steps_done, last=self.is_last)
        self.requests.agree()
        self._leave_if_asked()
        if self.is_last:
            self._end()

    def _goes_back(self) -> bool:
        """After the last step: whether the last ones are to be undone."""
        self.collect()
        if self.judging.guard.trouble is None:
            return False
        self._roll_back()
        return True

    def _roll_back(self) -> None:
        self.pause()
        self.judging.roll_back()

    def step(self) -> None:
        trainer, step = self.trainer, self.trainer.steps_done
        lr, (limits, sent) = self.judging.learning_rate(step), self.judging.limits(step)
        watches = [member.watch(step) for member in self.members]
        watched = [within for within in watches if within is not None]
        if watched:
            self.collect()
        with ExitStack() as stack:
            for within in watched:
                stack.enter_context(within)
            ticket = self._enqueue(lr, sent)
        self.collect()
        known = {"lr": lr, "limits": limits, "epoch": trainer.epoch, "ticket": ticket}
        number = step - self.events.first
        self.pending = ticket, partial(StepDone, step=step, number=number, **known)
        if watched or trainer.dev.kind == "host":  # where the work is done, nothing runs ahead
            self.collect()

    def _enqueue(self, lr: float, limits: Limits) -> int:
        """Enqueue a step. DataError leaves the data where they were, so that they can be saved."""
        loaders = self.trainer.train_loaders
        before = loaders[0].state()
        try:
            return self.trainer.enqueue_step(lr=lr, limits=limits)
        except DataError:
            for loader in loaders:
                loader.set_state(before)
            raise

    def collect(self) -> None:
        """Tell of the pending step, if there is one; waits until it is done."""
        if self.pending is None:
            return
        (ticket, known), self.pending = self.pending, None
        result = self.trainer.result(ticket)
        ms = (result.end - (self.last_end or result.begin)) / 1e6
        self.last_end = result.end
        done = known(result=result, ms=ms)
        for member in self.members:
            member.after_step(done)

    def pause(self) -> None:
        """Before what comes between two steps, and is no part of their times."""
        self.collect()
        self.last_end = None

    def _end(self) -> None:
        """The last evaluations, and the export, which one signal does not stop."""
        step = self.trainer.steps_done
        for member in self.members:
            member.before_end(step)
        self.requests.agree()
        self._leave_if_asked()
        for member in self.members:
            member.at_end(step)

    def _leave_if_asked(self) -> None:
        """By a signal or --max-hours."""
        if not self.requests.ends:
            return
        step, why = self.trainer.steps_done, "--max-hours"
        for member in self.members:
            member.interrupted(step)
        if self.requests.signum is not None:
            why = signal.Signals(self.requests.signum).name
        self.reporter.message(f"Stopped by {why} after {step} steps; go on with --continue", step)
        raise OutOfTime if self.requests.signum is None else Interrupted(self.requests.signum)
