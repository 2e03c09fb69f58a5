"""`llmq train`: the loop around Trainer, with reports, evaluations, checkpoints and signals."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import Limits
from llmq.base.errors import DataError, ModelError, warn
from llmq.base.files import check_writable
from llmq.base.run_id import RunId
from llmq.base.signals import Interrupted, OutOfTime
from llmq.checkpoint.folder import check_shared
from llmq.checkpoint.store import Best
from llmq.model.losses import loss_class
from llmq.model.results import Result
from llmq.options.conditions import Length, Ranks
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.disk import checkpoint_bytes
from llmq.report.json_log import JsonLog
from llmq.report.live import view_of_run
from llmq.report.views import PlainView
from llmq.run.agreement import check_token_files
from llmq.run.announce import (
    announce_data,
    announce_machine,
    announce_memory,
    announce_options,
    announce_start,
    check_data,
    load_state,
)
from llmq.run.checkpoints import Checkpoints
from llmq.run.diagnose import abs_maxes, not_moved
from llmq.run.evaluations import EvaluationInputs, Evaluations, read_evaluation_inputs
from llmq.run.events import Member, StepDone, state_of
from llmq.run.guard import Guard
from llmq.run.judging import Judging
from llmq.run.metrics import Reporter
from llmq.run.model_of_run import agreed_tokenizer
from llmq.run.monitor import IdleExperts, Scaling, StepReports, speed_of_light, time_alone
from llmq.run.requests import Ending, Requests
from llmq.run.resume import Stage, fork_lines, left_stages
from llmq.run.run_paths import (
    checkpoint_to_continue,
    clear_places,
    locked_places,
    move_aside,
    run_id,
    things_in_the_way,
    undone_checkpoints,
)
from llmq.run.sensors import Sensing
from llmq.run.trainer import Trainer
from llmq.run.watcher import Watcher, check_libraries, start_watchers
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.processes import processes


def run_training(
    config: TrainConfig,
    model: ModelConfig,
    model_dir: Path | None,
    argv: list[str],
    final_seconds: float = math.inf,
) -> None:
    """Train as the options say. Raises Interrupted after saving when a signal ended the run.

    final_seconds: of the last validation, which may end before it has seen all. LlmqError before
    the first step: paths that cannot be written or belong to another run, a checkpoint that is not
    there, data that does not fit, too little memory.
    """
    processes().on_first(lambda: check_libraries(config))
    processes().on_first(lambda: check_writable("--out-dir", config.out_dir))
    processes().each(lambda: check_writable("--checkpoint-dir", config.checkpoint_dir))
    with ExitStack() as stack:
        check_shared(config.checkpoint_dir)
        processes().on_first(lambda: stack.enter_context(locked_places(config)))
        checkpoint = processes().each(lambda: checkpoint_to_continue(config))
        run = processes().on_first(lambda: run_id(config, checkpoint))
        start = time.monotonic()
        stage, *others = processes().each(lambda: left_stages(config, model, checkpoint))
        _run_locked(stage, model, model_dir, argv, run, checkpoint, final_seconds, start)
        for stage in (other.after(other.first) for other in others):
            checkpoint = processes().each(partial(checkpoint_to_continue, stage.config))
            _run_locked(stage, model, model_dir, argv, run, checkpoint, final_seconds, start)


def _run_locked(
    stage: Stage,
    model: ModelConfig,
    model_dir: Path | None,
    argv: list[str],
    identity: RunId,
    checkpoint: Path | None,
    final_seconds: float,
    start: float,
) -> None:
    """A stage of run_training, while no other run writes to the same places. start: of the run."""
    config = stage.config
    where = (config, identity, model_dir, checkpoint)
    strangers = processes().on_first(lambda: things_in_the_way(*where))
    host_memory_before = available_host_memory()
    tokenizer = processes().each(lambda: agreed_tokenizer(config, model_dir, checkpoint))
    with ExitStack() as run_end:
        trainer = run_end.enter_context(Trainer.from_config(config, model, model_dir, tokenizer))
        trainer.run = identity
        processes().each(lambda: check_data(trainer))
        material = run_end.enter_context(
            closing(processes().each(lambda: read_evaluation_inputs(trainer)))
        )
        check_token_files([*trainer.train_loaders, *trainer.eval_loaders, *material.loaders])
        kept = (config.keep_best, config.checkpoint_dir)
        best = processes().each(lambda: Best(*kept, material.metrics))
        on_cpu, machines = trainer.dev.kind == "host", trainer.machine.world.num_machines
        warn(RULES.idle(config, ranks=Ranks(trainer.world_size, machines, on_cpu)))
        length = Length(trainer.world_size, trainer.total_steps, trainer.steps_per_epoch)
        warn(RULES.idle(config, length=length))
        moved = processes().on_first(lambda: clear_places(config, checkpoint, strangers))
        path = config.log_file if processes().first else Path(os.devnull)
        log = processes().each(lambda: JsonLog(path, append=config.continue_from is not None))
        reporter = Reporter(log, PlainView(), trainer.total_steps)
        run = _Run(trainer, reporter, material, best, final_seconds, start, stage.stop)
        try:
            run.announce(argv, checkpoint, moved + fork_lines(identity, checkpoint))
            run.measure_scaling()
            run.load(checkpoint)
            announce_data(trainer, reporter, material.sets)
            announce_memory(trainer, reporter, run.sensing.sensors.sources, host_memory_before)
            announce_start(trainer, reporter, time.monotonic() - start)
            steps = (trainer.steps_done, trainer.total_steps)
            reporter.view = view_of_run(*steps, run.sensing.panel, path)
            try:
                with run.ending.noted():
                    run.loop()
                    if stage.stop is None:
                        run.finish()
            except DataError:  # found in the middle of the data: what was learned is kept
                if trainer.steps_done > run.first:
                    run.save()
                    run.checkpoints.finish()
                raise
        except Exception as error:
            run.sensing.explain(error)
            raise
        finally:
            run.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was enqueued and whose result has not been read."""

    step: int
    ticket: int
    lr: float
    limits: Limits
    epoch: tuple[int, float]  # of the data, and the part of it that has been read then


class _Run:
    """The loop's state: what is pending, when the last step ended, whether to stop.

    last_end: of the step before, as Result.end; None where something else came between.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        material: EvaluationInputs,
        best: Best,
        final_seconds: float,
        start: float,
        stop: int | None,
    ):
        """stop: the step before which it ends, and is saved; None: the run's last."""
        self.trainer, self.reporter, self.config = trainer, reporter, trainer.config
        self.stop = stop
        size = checkpoint_bytes(self.config, trainer.model, trainer.plan.placement)
        self.ending = Ending(Requests(self.config, size, start))
        self.evaluations = Evaluations(trainer, reporter, material, self.ending.seen_here)
        guessing = loss_class(self.config).guessing(self.config, trainer.model.outputs)
        self.guard = Guard(self.config, guessing)
        self.members: list[Member] = []
        history, wrote = partial(state_of, self.members), self.ending.requests.write_took
        self.checkpoints = Checkpoints(trainer, reporter, best, self.guard, history, wrote)
        self.judging = Judging(trainer, reporter, self.guard, self.checkpoints, self.members)
        self.final_seconds = final_seconds
        world, every = trainer.machine.world, self.config.log_gpu_util
        self.sensing = Sensing(trainer.ranks.devices, world, reporter, every)
        self.speed_of_light = speed_of_light(
            self.config, trainer.model, trainer.dev.spec.name, trainer.world_size
        )
        steps = StepReports(trainer, reporter, self.speed_of_light)
        self.members += [steps, self.evaluations, self.sensing, self.ending.requests, self.judging]
        self.members.append(IdleExperts(trainer, reporter))
        self.pending: _Pending | None = None
        self.first = 0  # step that the loop began with
        self.last_end: int | None = None
        self.watchers: list[Watcher] = []

    def close(self) -> None:
        """End what is being written, stop the sensors and close the reports."""
        self.checkpoints.close(give_up=isinstance(sys.exception(), KeyboardInterrupt))
        self.sensing.close()
        self.reporter.close()
        for watcher in self.watchers:
            watcher.close()

    # -- before the first step -------------------------------------------------------------------

    def announce(self, argv: list[str], checkpoint: Path | None, notes: list[str]) -> None:
        """Announce what runs, and on what. notes: lines about its places."""
        announce_options(self.trainer, self.reporter, argv, checkpoint)
        for line in notes:
            self.reporter.message(line)
        self.watchers = start_watchers(self.config, self.reporter) if processes().first else []
        self.members[3:3] = self.watchers
        gpus = self.sensing.sensors.sources
        announce_machine(self.trainer, self.reporter, gpus, self.speed_of_light)

    def measure_scaling(self) -> None:
        """--measure-scaling: time one rank alone, before the weights are loaded."""
        if self.config.measure_scaling and self.trainer.world_size > 1:
            with self.reporter.section("Timing one GPU without the others"):
                ms = time_alone(self.trainer)
            self.members.insert(3, Scaling(self.trainer.world_size, ms, self.reporter))

    def load(self, checkpoint: Path | None) -> None:
        """Weights: from the checkpoint, else from scratch or the model's directory."""
        load_state(self.trainer, self.reporter, checkpoint)
        if checkpoint is not None:
            self.judging.begin(checkpoint)

    # -- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Steps until the end or a signal, one step ahead of the reports on a GPU."""
        trainer = self.trainer
        self.first = trainer.steps_done
        self.reporter.epoch = trainer.epoch
        if self.first < trainer.total_steps:
            where = (self.config, trainer.run, self.first)
            for line in processes().on_first(lambda: move_aside(undone_checkpoints(*where))):
                self.reporter.message(line, self.first)
        last = trainer.total_steps if self.stop is None else self.stop
        while trainer.steps_done < last or self._goes_back():
            if self.guard.is_due(trainer.steps_done):
                self._roll_back()
            self._between_steps()
            if not self.ending.ends:
                self._step()
            if self.ending.ends:
                self._leave()
        for member in self.members:
            member.after_steps(trainer.steps_done)
        if self.stop is not None:
            self.save(required=True)
            self.checkpoints.finish()
        elif self.config.save_training_state:  # before the long evaluation at the end
            self.save()
        self.ending.agree()
        if self.ending.ends:
            self._leave()

    def _goes_back(self) -> bool:
        """After the last step: whether the last ones are to be undone."""
        self.collect()
        if self.guard.trouble is None:
            return False
        self._roll_back()
        return True

    def _roll_back(self) -> None:
        self._pause()
        self.checkpoints.finish()
        self.judging.roll_back()

    def _between_steps(self) -> None:
        """Next epoch, evaluations, checkpoint, if it is time for them.

        A checkpoint knows whether its step was evaluated, so that a continued run makes up for it.
        """
        trainer, config, step = self.trainer, self.config, self.trainer.steps_done
        every, interval = config.eval_every_n_steps, config.ckpt_interval
        evaluate = trainer.advance_epoch_if_needed() or (every > 0 and step % every == 0)
        if evaluate and self.evaluations.validates and step not in (0, trainer.validated_at):
            self.evaluate(config.eval_num_steps)
        self._judge()
        self.checkpoints.poll()
        due = interval > 0 and step % interval == 0
        due |= self.checkpoints.late and self.guard.in_row == 0
        asked = self.ending.agree(asks=True)
        if asked is not None:
            self.reporter.message(f"A checkpoint, as {asked} asks for", step)
        if asked is not None or (step > self.first and due):
            self.save(asked=asked is not None)

    def _step(self) -> None:
        trainer, step = self.trainer, self.trainer.steps_done
        lr = self.judging.learning_rate(step)
        limits, sent = self.judging.limits(step)
        if self.config.debug_time_breakdown:
            self.collect()
            with trainer.ranks.time_parts() as timings:
                ticket = self._enqueue(lr, sent)
            self.pending = _Pending(step, ticket, lr, limits, trainer.epoch)
            result = self.collect()
            of_all = [ranges for own in processes().gather(timings) for ranges in own]
            self.reporter.time_breakdown(step, of_all, result.communication)
        else:
            ticket = self._enqueue(lr, sent)
            self.collect()
            self.pending = _Pending(step, ticket, lr, limits, trainer.epoch)
        every = self.config.debug_log_abs_max
        look = every > 0 and step % every == 0 and self.config.is_fp8
        if look or trainer.dev.kind == "host":  # where the work is done, nothing runs ahead
            self.collect()
        if look:
            self.reporter.abs_maxes(step, abs_maxes(trainer.ranks))

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

    def collect(self) -> Result | None:
        """Report the pending step, if there is one, and return it; waits until it is done."""
        if self.pending is None:
            return None
        p, self.pending = self.pending, None
        result = self.trainer.result(p.ticket)
        ms = (result.end - (self.last_end or result.begin)) / 1e6
        self.last_end = result.end
        done = StepDone(
            step=p.step,
            number=p.step - self.first,
            ticket=p.ticket,
            result=result,
            ms=ms,
            lr=p.lr,
            limits=p.limits,
            epoch=p.epoch,
        )
        for member in self.members:
            member.after_step(done)
        return result

    def _pause(self) -> None:
        """Before what comes between two steps, and is no part of their times."""
        self.collect()
        self.last_end = None

    def evaluate(self, max_batches: int | None, seconds: float = math.inf) -> None:
        """Evaluate as Evaluations.validate does."""
        self._pause()
        self.evaluations.validate(max_batches, seconds)
        self.checkpoints.keep_best(self.evaluations.take_measured())

    def _judge(self, *, at_end: bool = False) -> None:
        """Tasks and samples, if it is time for them."""
        for call in self.evaluations.due(at_end=at_end):
            self._pause()
            call()
            self.checkpoints.keep_best(self.evaluations.take_measured())

    def save(self, *, required: bool = False, asked: bool = False) -> None:
        """Save as Checkpoints.save does."""
        self._pause()
        start = time.monotonic()
        self.checkpoints.save(required=required, asked=asked)
        self.ending.requests.save_took(time.monotonic() - start)

    def finish(self) -> None:
        """The last evaluation, on all sequences, and the export, which one signal does not stop."""
        step = self.trainer.steps_done
        self.evaluate(None, self.final_seconds)
        self._judge(at_end=True)
        self.ending.agree()
        if self.ending.ends:
            self._leave()
        self.checkpoints.finish()  # whatever becomes of the export
        self.reporter.message(self.evaluations.summary(), step)
        if empty := self.reporter.without_targets:
            text = f"{empty} of {step} steps had no target to train on, and changed nothing"
            self.reporter.message(f"WARNING: {text}: look at the loss masks of the data", step)
        for line in not_moved(self.trainer.ranks) if step else ():
            self.reporter.message(f"WARNING: {line}", step)
        if self.guard.in_row:
            last = f"WARNING: the last {self.guard.in_row} steps were bad, up to step {step - 1}"
            self.reporter.message(f"{last}: the model is hardly what it should be", step)
        try:
            self.judging.check_model(self.evaluations.not_finite)
            with self.reporter.section(f"Saving model to `{self.config.out_dir}`", step):
                self.trainer.export()
        except ModelError as error:
            self.checkpoints.condemn(step, str(error))
            raise
        if self.config.save_training_state:  # if there was no room before
            self.save(required=True)

    # -- signals ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        self.save(required=True)
        step, why = self.trainer.steps_done, "--max-hours"
        if self.ending.signum is not None:
            why = signal.Signals(self.ending.signum).name
        self.reporter.message(f"Stopped by {why} after {step} steps; go on with --continue", step)
        raise OutOfTime if self.ending.signum is None else Interrupted(self.ending.signum)
