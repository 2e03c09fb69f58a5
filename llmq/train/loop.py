"""`llmq train`: the loop around Trainer, with reports, evaluations, checkpoints and signals."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from llmq.base.errors import ConfigError, DataError, warn
from llmq.base.files import check_writable, locked
from llmq.base.signals import Interrupted, ending_signals
from llmq.checkpoint.store import checkpoints_by_name, clean_old, find_checkpoint
from llmq.config.model import ModelConfig
from llmq.config.option_types import NEWEST
from llmq.config.options import TrainConfig
from llmq.model.step import Result
from llmq.plan.idle_options import run_warnings
from llmq.runtime.host_memory import available_host_memory
from llmq.train.announce import (
    announce_data,
    announce_machine,
    announce_memory,
    announce_options,
    announce_start,
)
from llmq.train.diagnose import UpdateCheck, abs_maxes
from llmq.train.json_log import JsonLog
from llmq.train.live import LiveView
from llmq.train.metrics import PlainView, Reporter, View
from llmq.train.monitor import monitor_line, open_monitor, speed_of_light
from llmq.train.scaling import Scaling, time_alone
from llmq.train.tokenizers import agreed_tokenizer
from llmq.train.trainer import Trainer

WARM_UP = 3  # first steps, which launch and capture: --measure-scaling does not count them


def run_training(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, argv: list[str]
) -> None:
    """Train as the options say. Raises Interrupted after saving when a signal ended the run.

    What cannot work is found before the first step: LlmqError for paths that cannot be written, a
    checkpoint that is not there, data that does not fit, too little memory.
    """
    check_writable("--out-dir", config.out_dir)
    check_writable("--checkpoint-dir", config.checkpoint_dir)
    with _locked(config):
        _run_locked(config, model, model_dir, argv)


def _run_locked(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, argv: list[str]
) -> None:
    """run_training, while no other run writes to the same places."""
    start = time.perf_counter()
    checkpoint = _checkpoint_to_continue(config)
    host_memory_before = available_host_memory()
    tokenizer = agreed_tokenizer(config, model_dir, checkpoint)
    with Trainer.from_config(config, model, model_dir, tokenizer) as trainer:
        _check_data(trainer)
        length = (trainer.total_steps, trainer.steps_per_epoch)
        on_cpu = trainer.dev.kind == "host"
        warn(run_warnings(config, trainer.world_size, *length, on_cpu=on_cpu))
        log = JsonLog(config.log_file, append=config.continue_from is not None)
        reporter = Reporter(log, PlainView(), trainer.total_steps)
        run = _Run(trainer, reporter)
        try:
            run.announce(argv)
            run.measure_scaling()
            run.load(checkpoint)
            announce_data(trainer, reporter)
            announce_memory(trainer, reporter, run.monitors, host_memory_before)
            announce_start(trainer, reporter, time.perf_counter() - start)
            reporter.view = _view(trainer)
            try:
                with run.signals():
                    run.loop()
                    run.finish()
            except DataError:  # found in the middle of the data: what was learned is kept
                if trainer.steps_done > run.first:
                    run.save()
                raise
        finally:
            run.close()


@contextmanager
def _locked(config: TrainConfig) -> Iterator[None]:
    """Keep other runs from writing to the same checkpoints, model and log during the block."""
    # Its folder may be a mount point that several machines share, so its lock lies inside.
    locks = [(config.checkpoint_dir / ".lock", "--checkpoint-dir", config.checkpoint_dir)]
    for flag, path in (("--out-dir", config.out_dir), ("--log-file", config.log_file)):
        if path.is_file() or path.is_dir() or not path.exists():  # no device such as /dev/null
            whole = path.resolve()
            locks.append((whole.with_name(whole.name + ".lock"), flag, path))
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(locked(*lock))
        yield


def _checkpoint_to_continue(config: TrainConfig) -> Path | None:
    """What --continue names; without one, or with none there to be the newest, None."""
    if config.continue_from is None:
        others = [path.name for path in checkpoints_by_name(config.checkpoint_dir).values()]
        if others:
            count = f"{len(others)} checkpoints, the last one is " if len(others) > 1 else ""
            warn(
                [
                    f"--checkpoint-dir: '{config.checkpoint_dir}' holds {count}{others[-1]} of an "
                    "earlier run: --continue takes that of the most steps, whichever run it is of"
                ]
            )
        return None
    found = find_checkpoint(config.checkpoint_dir, config.continue_from)
    if found is None:
        problem = f"no complete checkpoint in '{config.checkpoint_dir}'"
        if config.continue_from != NEWEST:
            raise ConfigError(f"--continue {config.continue_from}: {problem} or at that path")
        warn([f"--continue: {problem}, starting from the beginning"])
    return found


def _check_data(trainer: Trainer) -> None:
    """Open the token files, which checks them, and see that there is enough for the run."""
    loader, _ = trainer.train_loader, trainer.eval_loader
    if trainer.steps_per_epoch == 0:
        raise DataError(
            f"--grad-accumulation: a step takes {trainer.config.grad_accumulation} batches, but "
            f"the training data has {loader.batches_per_epoch}: use more data or smaller batches"
        )
    _ = trainer.total_steps  # compared with --cooldown
    if loader.unused_files:
        ranks = trainer.world_size
        each = f"{ranks} sequences, one for each GPU" if ranks > 1 else "one sequence"
        unused = f"{loader.unused_files} of {len(loader.files)} files are never used"
        warn([f"--train-file: {unused}: they have less than {each}"])


def _view(trainer: Trainer) -> View:
    console = Console()
    left = trainer.total_steps - trainer.steps_done
    if left > 0 and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, trainer.steps_done, trainer.total_steps)
    return PlainView()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was enqueued and whose result has not been read. start: perf_counter."""

    step: int
    ticket: int
    lr: float
    start: float


class _Run:
    """The loop's state: what is pending, when the last step ended, whether to stop."""

    def __init__(self, trainer: Trainer, reporter: Reporter):
        self.trainer, self.reporter, self.config = trainer, reporter, trainer.config
        self.monitors = [
            open_monitor(dev) if self.config.log_gpu_util else None for dev in trainer.ranks.devices
        ]
        self.speed_of_light = speed_of_light(
            self.config, trainer.model, trainer.dev.spec.name, trainer.world_size
        )
        self.scaling: Scaling | None = None
        self.pending: _Pending | None = None
        self.first = 0  # step that the loop began with
        self.last_end = 0.0
        self.update_check = UpdateCheck(trainer.ranks, reporter)
        self.signum: int | None = None
        self.saved_at: int | None = None  # step of the newest checkpoint that holds this state

    def close(self) -> None:
        """Stop the monitors and close the reports."""
        for monitor in self.monitors:
            if monitor is not None:
                monitor.close()
        self.reporter.close()

    # -- before the first step -------------------------------------------------------------------

    def announce(self, argv: list[str]) -> None:
        """What runs, and on what."""
        announce_options(self.trainer, self.reporter, argv)
        announce_machine(self.trainer, self.reporter, self.monitors, self.speed_of_light)

    def measure_scaling(self) -> None:
        """--measure-scaling: time one rank alone, before the weights are loaded."""
        if self.config.measure_scaling and self.trainer.world_size > 1:
            with self.reporter.section("Timing one GPU without the others"):
                ms = time_alone(self.trainer)
            self.scaling = Scaling(self.trainer.world_size, ms)

    def load(self, checkpoint: Path | None) -> None:
        """Weights: from the checkpoint, else from scratch or the model's directory."""
        trainer, reporter = self.trainer, self.reporter
        if checkpoint is not None:
            name = checkpoint.name.removeprefix("step_").removesuffix(".old")
            name = name.lstrip("0") or "0"  # of a step; it may also have been renamed
            with reporter.section(f"Loading checkpoint {name} from `{checkpoint.parent}`"):
                trainer.load(checkpoint, new_data=self.config.new_data)
            reporter.total_steps = trainer.total_steps
            self.saved_at = trainer.steps_done
            if trainer.history:
                reporter.history = trainer.history
        elif self.config.from_scratch:
            with reporter.section("Initializing model from scratch"):
                trainer.load_weights()
        else:
            with reporter.section(f"Loading model from `{trainer.model_dir}`"):
                trainer.load_weights()

    # -- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Steps until the end or a signal, one step ahead of the reports on a GPU."""
        trainer = self.trainer
        self.first = trainer.steps_done
        while trainer.steps_done < trainer.total_steps:
            self._between_steps()
            if self.signum is None:
                self._step()
            if self.signum is not None:
                self._leave()
        self.collect()
        if self.scaling is not None:
            self._report_scaling()
        if self.config.save_training_state:  # before the long evaluation at the end
            self.save()
        if self.signum is not None:
            self._leave()

    def _report_scaling(self) -> None:
        """At the end of a run that is shorter than what is compared."""
        if self.scaling.missing:
            self.reporter.scaling(self.trainer.steps_done, *self.scaling.report())
        elif self.scaling.empty:
            warn([f"--measure-scaling has no effect on fewer than {WARM_UP + 1} steps"])

    def _between_steps(self) -> None:
        """Next epoch, evaluation, checkpoint, if it is time for them.

        A checkpoint knows whether its step was evaluated, so that a continued run makes up for it.
        """
        trainer, config, step = self.trainer, self.config, self.trainer.steps_done
        every, interval = config.eval_every_n_steps, config.ckpt_interval
        evaluate = trainer.advance_epoch_if_needed() or (every > 0 and step % every == 0)
        if evaluate and step not in (0, trainer.validated_at):
            self.evaluate(config.eval_num_steps)
        if step > self.first and interval > 0 and step % interval == 0:
            self.save()

    def _step(self) -> None:
        trainer, start = self.trainer, time.perf_counter()
        step = trainer.steps_done
        lr = trainer.learning_rate(step)
        if self.config.debug_time_breakdown:
            self.collect()
            with trainer.ranks.time_parts() as timings:
                ticket = self._enqueue()
            self.pending = _Pending(step, ticket, lr, start)
            result = self.collect()
            self.reporter.time_breakdown(step, timings, result.communication)
        else:
            ticket = self._enqueue()
            self.collect()
            self.pending = _Pending(step, ticket, lr, start)
        every = self.config.debug_log_abs_max
        look = every > 0 and step % every == 0 and self.config.matmul_dtype == "e4m3"
        if look or trainer.dev.kind == "host":  # where the work is done, nothing runs ahead
            self.collect()
        if look:
            self.reporter.abs_maxes(step, abs_maxes(trainer.ranks))

    def _enqueue(self) -> int:
        """Enqueue a step. DataError leaves the data where they were, so that they can be saved."""
        loaders = self.trainer.train_loaders
        before = loaders[0].state()
        try:
            return self.trainer.enqueue_step()
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
        end = time.perf_counter()
        ms = (end - max(p.start, self.last_end)) * 1000
        self.last_end = end
        tokens = self.trainer.plan.tokens
        sol = self.speed_of_light and self.speed_of_light.percent(tokens, ms)
        self.reporter.train_step(p.step, result, p.lr, ms, tokens, sol)
        if p.step == self.first:  # all products have been tuned
            chosen = self.trainer.ranks.run_first("products", lambda rank: rank.dev.fast_products())
            self.reporter.fast_products(p.step, chosen)
        for rank, monitor in enumerate(self.monitors):
            if monitor is not None and p.step % self.config.log_gpu_util == 0:
                sample = monitor.sample()
                self.reporter.gpu(p.step, rank, sample, monitor_line(sample))
        if self.scaling is not None and p.step >= self.first + WARM_UP and self.scaling.add(ms):
            self.reporter.scaling(p.step, *self.scaling.report())
        self.update_check.check(p.step, p.ticket, result)
        return result

    def evaluate(self, max_batches: int | None) -> float:
        """Report the validation loss and return it; a signal ends it without a result (NaN)."""
        self.collect()
        trainer, config = self.trainer, self.config
        start = time.perf_counter()
        result = trainer.validate(max_batches, lambda: self.signum is not None)
        if result is None:
            return math.nan
        ms = (time.perf_counter() - start) * 1000
        loader = trainer.eval_loader
        batches = loader.batches_per_epoch if max_batches is None else max_batches
        tokens = loader.sequences(batches) * config.seq_len
        self.reporter.evaluation(trainer.steps_done, result, ms, tokens)
        if result.tokens == 0:
            self.reporter.message(
                f"WARNING: the validation loss is nan: all targets that were read of "
                f"'{config.eval_file}' are masked",
                trainer.steps_done,
            )
        return result.loss

    def save(self) -> None:
        """Write a checkpoint, if the newest is not of this step, and delete what is too old."""
        self.collect()
        config, step = self.config, self.trainer.steps_done
        if self.saved_at == step:
            return
        self.trainer.history = self.reporter.history
        with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
            self.trainer.save()
        self.saved_at = step
        if config.ckpt_keep_n > 0:
            removed = clean_old(config.checkpoint_dir, config.ckpt_keep_n, config.ckpt_major, step)
            if removed:
                self.reporter.message(f"Cleaned {len(removed)} checkpoints", step)

    def finish(self) -> None:
        """The last evaluation, on all sequences, and the export, which one signal does not stop."""
        step = self.trainer.steps_done
        loss = self.evaluate(None)
        if self.signum is not None:
            self._leave()
        self.reporter.message(f"Done. validation loss {loss:10f}", step)
        with self.reporter.section(f"Saving model to `{self.config.out_dir}`", step):
            self.trainer.export()

    # -- signals ---------------------------------------------------------------------------------

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn the first ending signal into `self.signum`; a second one acts as usual.

        But not SIGHUP: when a terminal goes, its shell and the system send one each.
        """

        def note(signum: int, frame: object) -> None:
            self.signum = signum
            restore()
            if signal.SIGHUP in before:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        def restore() -> None:
            for signum, handler in before.items():
                signal.signal(signum, handler)

        before = {}
        for signum in ending_signals():
            before[signum] = signal.signal(signum, note)
        try:
            yield
        finally:
            restore()

    def _leave(self) -> None:
        self.save()
        step, name = self.trainer.steps_done, signal.Signals(self.signum).name
        self.reporter.message(f"Stopped by {name} after {step} steps; go on with --continue", step)
        raise Interrupted(self.signum)
