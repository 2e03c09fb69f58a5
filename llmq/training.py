"""`llmq train`: the loop around Trainer, with reports, evaluations, checkpoints and signals."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from llmq.checkpoint_store import clean_old, find_checkpoint
from llmq.config import ModelConfig
from llmq.errors import LlmqError
from llmq.live import LiveView
from llmq.loader import DataLoader
from llmq.machine import MIB
from llmq.metrics import JsonLog, PlainView, Reporter, View, count_tokens
from llmq.options import TrainConfig
from llmq.options_io import option_rows
from llmq.plan import allocator_state
from llmq.trainer import Trainer

MAX_SKIPPED = 10  # updates in a row without a finite gradient, after which a run is hopeless


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; its state is saved."""


def run_training(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, argv: list[str]
) -> None:
    """Train as the options say. Raises Interrupted after saving when a signal ended the run."""
    setup_start = time.perf_counter()
    trainer = Trainer.from_config(config, model, model_dir)
    with trainer:
        loaders = (trainer.train_loader, trainer.eval_loader)  # errors in files come up here
        if trainer.total_steps == 0:
            count, batches = config.grad_accumulation, loaders[0].batches_per_epoch
            raise LlmqError(
                f"nothing to train: a step takes {count} batches (--grad-accumulation), the data "
                f"has {batches}: use more data, or smaller batches"
            )
        reporter = Reporter(JsonLog(config.log_file), PlainView(), trainer.total_steps)
        run = _Run(trainer, reporter)
        try:
            run.announce(argv)
            run.load()
            reporter.view = _view(trainer)
            reporter.message(f"Setup took {time.perf_counter() - setup_start:.0f} seconds")
            run.loop()
            run.finish()
        finally:
            reporter.close()


def _view(trainer: Trainer) -> View:
    console = Console()
    if console.is_terminal:
        return LiveView(console, trainer.steps_done, trainer.total_steps)
    return PlainView()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was enqueued and whose result has not been read."""

    step: int
    ticket: int
    lr: float
    start: float


class _Run:
    """The loop's state: what is pending, when the last step ended, whether to stop."""

    def __init__(self, trainer: Trainer, reporter: Reporter):
        self.trainer, self.reporter, self.config = trainer, reporter, trainer.config
        self.pending: _Pending | None = None
        self.last_end = 0.0
        self.skipped = 0
        self.signum: int | None = None

    # -- before the first step ---------------------------------------------------------------------

    def announce(self, argv: list[str]) -> None:
        """[Options], [System], [Dataset], [Allocator State], and their records."""
        trainer, reporter, log = self.trainer, self.reporter, self.reporter.log
        log.write("cmd", 0, cmd=argv)
        rows = option_rows(self.config, trainer.model)
        width = max(len(name) for name, _ in rows)
        reporter.block("Options", [f"  {name:<{width}}: {_shown(value)}" for name, value in rows])
        for name, value in rows:
            log.write("option", 0, name=name, value=value)
        spec = trainer.machine.spec
        lines = [f"  Device 0: {spec.name}"]
        reporter.block("System 0", lines)
        if trainer.machine.note:
            reporter.message(trainer.machine.note)
        loaders = {"train": trainer.train_loader, "eval": trainer.eval_loader}
        lines = [line for split, loader in loaders.items() for line in _dataset(split, loader)]
        reporter.block("Dataset", lines)
        for split, loader in loaders.items():
            state = loader.state()
            log.write(
                "dataset",
                0,
                split=split,
                files=[str(file.path) for file in loader.files],
                tokens=loader.total_tokens,
                file_index=state["file_index"],
                chunk_index=state["chunk_index"],
                seed=loader.seed,
            )
        for line in allocator_state(trainer.plan.usage).splitlines():
            reporter.view.line(line)
        reporter.view.line("")
        log.write("allocator", 0, stats=_allocator_stats(trainer))
        if self.config.debug_log_allocations >= 0:
            reporter.block("Allocations", _allocations(trainer, self.config.debug_log_allocations))

    def load(self) -> None:
        """Weights: from a checkpoint with --continue, else from scratch or the model."""
        trainer, reporter, config = self.trainer, self.reporter, self.config
        found = None
        if config.continue_from is not None:
            found = find_checkpoint(config.checkpoint_dir, config.continue_from)
            if found is None:
                print(
                    f"warning: --continue: no checkpoint in '{config.checkpoint_dir}', "
                    "starting from the beginning",
                    file=sys.stderr,
                )
        if found is not None:
            name = f"Loading checkpoint {int(found.name[5:])} from `{found.parent}`"
            with reporter.section(name):
                trainer.load(found, new_data=config.new_data)
        elif config.from_scratch:
            with reporter.section("Initializing model from scratch"):
                trainer.load_weights()
        else:
            with reporter.section(f"Loading model from `{trainer.model_dir}`"):
                trainer.load_weights()
        steps = trainer.total_steps
        epochs = steps / max(trainer.steps_per_epoch, 1)
        reporter.message(f"Starting training for {steps} steps ({epochs:.2f} epochs in total)")

    # -- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Steps until the end or a signal, one step ahead of the reports."""
        trainer, config = self.trainer, self.config
        first = trainer.steps_done
        with self._signals():
            while trainer.steps_done < trainer.total_steps:
                step = trainer.steps_done
                evaluate = trainer.advance_epoch_if_needed()
                every = config.eval_every_n_steps
                evaluate = evaluate or (step > 0 and every > 0 and step % every == 0)
                interval = config.ckpt_interval
                if interval > 0 and step % interval == 0 and step > first:
                    self.save()
                if evaluate and step > first:
                    self.evaluate(config.eval_num_steps)
                start = time.perf_counter()
                lr = trainer.learning_rate(step)
                ticket = trainer.enqueue_step()
                self.collect()
                self.pending = _Pending(step, ticket, lr, start)
                if trainer.dev.kind == "host":  # the work is done, nothing runs ahead
                    self.collect()
                if self.signum is not None:
                    self._leave()
            self.collect()

    def collect(self) -> None:
        """Report the pending step, if there is one; waits until it is done."""
        if self.pending is None:
            return
        p, self.pending = self.pending, None
        result = self.trainer.result(p.ticket)
        end = time.perf_counter()
        ms = (end - max(p.start, self.last_end)) * 1000
        self.last_end = end
        config = self.config
        tokens = config.batch_size * config.seq_len * config.grad_accumulation
        self.reporter.train_step(p.step, result, p.lr, ms, tokens, None)
        if math.isfinite(result.norm) and result.tokens:
            self.skipped = 0
            return
        self.skipped += 1
        reason = "no target tokens" if not result.tokens else f"gradient norm {result.norm}"
        self.reporter.message(f"WARNING: step {p.step} changed no weights: {reason}", p.step)
        if self.skipped >= MAX_SKIPPED:
            raise LlmqError(
                f"training diverged: {MAX_SKIPPED} steps in a row without a finite gradient, the "
                f"last one is {p.step}: continue from an earlier checkpoint with a lower "
                "--learning-rate"
            )

    def evaluate(self, max_batches: int | None) -> float:
        """Report the validation loss and return it."""
        self.collect()
        trainer, config = self.trainer, self.config
        start = time.perf_counter()
        result = trainer.validate(max_batches)
        ms = (time.perf_counter() - start) * 1000
        batches = trainer.eval_loader.batches_per_epoch
        batches = batches if max_batches is None else min(batches, max_batches)
        tokens = batches * config.batch_size * config.seq_len
        self.reporter.evaluation(trainer.steps_done, result, ms, tokens)
        return result.loss

    def save(self) -> None:
        """Write a checkpoint and delete those that --ckpt-keep-n does not keep."""
        self.collect()
        config, step = self.config, self.trainer.steps_done
        with self.reporter.section(f"saving checkpoint to `{config.checkpoint_dir}`", step):
            self.trainer.save()
        if config.ckpt_keep_n > 0:
            removed = clean_old(config.checkpoint_dir, config.ckpt_keep_n, config.ckpt_major)
            if removed:
                self.reporter.message(f"Cleaned {len(removed)} checkpoints", step)

    def finish(self) -> None:
        """The last evaluation, on all data; the export; the last checkpoint."""
        config, step = self.config, self.trainer.steps_done
        loss = self.evaluate(None)
        self.reporter.message(f"Done. validation loss {loss:10f}", step)
        with self.reporter.section(f"Saving model to `{config.out_dir}`", step):
            self.trainer.export()
        if config.save_training_state:
            self.save()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn the first Ctrl-C or SIGTERM into `self.signum`; the second one acts as usual."""

        def note(signum: int, frame: object) -> None:
            self.signum = signum
            signal.signal(signum, before[signum])

        before = {}
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, note)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _leave(self) -> None:
        self.save()
        name = signal.Signals(self.signum).name
        step = self.trainer.steps_done
        self.reporter.message(f"Stopped by {name} after step {step - 1}; go on with --continue", step)
        raise Interrupted(name)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dataset(split: str, loader: DataLoader) -> list[str]:
    lines = [f" {split}: {count_tokens(loader.total_tokens)} tokens"]
    lines += [f"   {file.path} : {file.num_tokens:10d}" for file in loader.files[:10]]
    hidden = len(loader.files) - 10
    return [*lines, f"   … and {hidden} more files"] if hidden > 0 else lines


def _allocator_stats(trainer: Trainer) -> list[dict]:
    categories = trainer.plan.usage.categories
    names = dict.fromkeys(name for place in categories.values() for name in place)
    return [
        {
            "name": name,
            "device": categories["device"].get(name, 0),
            "managed": 0,
            "pinned": categories["pinned"].get(name, 0),
            "pageable": 0,
        }
        for name in names
    ]


def _allocations(trainer: Trainer, least_mib: int) -> list[str]:
    """Every allocation of at least so many MiB."""
    lines = []
    for place, label in (("device", "GPU"), ("pinned", "HOST")):
        for category, tensor in trainer.dev.arenas[place].tensors:
            if tensor.nbytes >= least_mib * MIB:
                lines.append(f"{label:4} {category:>15} - {tensor.name:>15}: {tensor.nbytes // MIB:4d} MiB")
    return lines
