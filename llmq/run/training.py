"""`llmq train`: the parts of a run around a Trainer, and the lines before its first step."""

import math
import os
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import DataError, warn
from llmq.base.files import check_writable
from llmq.base.run_id import RunId
from llmq.checkpoint.folder import check_shared
from llmq.checkpoint.store import Best
from llmq.model.losses import loss_class
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
from llmq.run.diagnose import AbsMaxes
from llmq.run.evaluations import EvaluationInputs, Evaluations, read_evaluation_inputs
from llmq.run.events import Events
from llmq.run.guard import Guard
from llmq.run.judging import FinalModel, Judging
from llmq.run.loop import Loop
from llmq.run.metrics import Reporter
from llmq.run.model_of_run import agreed_tokenizer
from llmq.run.monitor import (
    IdleExperts,
    Scaling,
    StepReports,
    TimeBreakdown,
    speed_of_light,
    time_alone,
)
from llmq.run.requests import Ending, Requests
from llmq.run.resume import Stage, fork_lines, left_stages
from llmq.run.run_paths import (
    checkpoint_to_continue,
    clear_places,
    locked_places,
    run_id,
    things_in_the_way,
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
            run.begin(argv, checkpoint, moved + fork_lines(identity, checkpoint))
            announce_data(trainer, reporter, material.sets)
            announce_memory(trainer, reporter, run.sensing.sensors.sources, host_memory_before)
            announce_start(trainer, reporter, time.monotonic() - start)
            steps = (trainer.steps_done, trainer.total_steps)
            reporter.view = view_of_run(*steps, run.sensing.panel, path)
            try:
                with run.ending.noted():
                    run.loop.run()
            except DataError:  # found in the middle of the data: what was learned is kept
                if trainer.steps_done > run.events.first:
                    run.checkpoints.save_last(required=False)
                raise
        except Exception as error:
            run.sensing.explain(error)
            raise
        finally:
            run.close()


class _Run:
    """The parts of a run, and its loop, which tells them of each step."""

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
        own, events = (trainer, reporter), Events()
        size = checkpoint_bytes(self.config, trainer.model, trainer.plan.placement)
        self.events, self.ending = events, Ending(Requests(self.config, size, start))
        asked = (self.ending.seen_here, final_seconds)
        self.evaluations = Evaluations(*own, material, events, *asked)
        guard = Guard(
            self.config, loss_class(self.config).guessing(self.config, trainer.model.outputs)
        )
        self.checkpoints = Checkpoints(*own, best, guard, events, self.ending)
        self.judging = Judging(*own, guard, self.checkpoints, events)
        world, every = trainer.machine.world, self.config.log_gpu_util
        self.sensing = Sensing(trainer.ranks.devices, world, reporter, every)
        self.loop = Loop(*own, events, self.judging, self.ending, stop)
        self.watchers: list[Watcher] = []

    def close(self) -> None:
        """End what is being written, stop the sensors and close the reports."""
        self.checkpoints.close(give_up=isinstance(sys.exception(), KeyboardInterrupt))
        self.sensing.close()
        self.reporter.close()
        for watcher in self.watchers:
            watcher.close()

    def begin(self, argv: list[str], checkpoint: Path | None, notes: list[str]) -> None:
        """Announce what runs, and on what; load the weights: from the checkpoint, else from scratch
        or the model's directory. notes: lines about its places."""
        config, trainer, reporter = self.config, self.trainer, self.reporter
        announce_options(trainer, reporter, argv, checkpoint)
        for line in notes:
            reporter.message(line)
        self.watchers = start_watchers(config, reporter) if processes().first else []
        of_card = (trainer.dev.spec.name, trainer.world_size)
        sol = speed_of_light(config, trainer.model, *of_card)
        announce_machine(trainer, reporter, self.sensing.sensors.sources, sol)
        scaling = []
        if config.measure_scaling and trainer.world_size > 1:  # before there are weights
            with reporter.section("Timing one GPU without the others"):
                scaling.append(Scaling(trainer.world_size, time_alone(trainer), reporter))
        self.events.members += [
            self.evaluations,
            StepReports(trainer, reporter, sol),
            self.sensing,
            *scaling,
            *self.watchers,
            self.ending.requests,
            self.ending,
            self.judging,
            IdleExperts(trainer, reporter),
        ]
        if config.debug_time_breakdown:
            self.events.members.append(TimeBreakdown(trainer, reporter))
        if config.debug_log_abs_max > 0 and config.is_fp8:
            every = config.debug_log_abs_max
            self.events.members.append(AbsMaxes(trainer.ranks, reporter, every))
        final = FinalModel(self.judging, self.evaluations)
        self.events.members += [final, self.checkpoints]
        load_state(trainer, reporter, checkpoint)
        if checkpoint is not None:
            self.judging.begin(checkpoint)
