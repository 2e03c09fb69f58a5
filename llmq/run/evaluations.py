"""Evaluations between the steps of a run: validations, tasks and samples. Evaluations use the run's
memory and graphs, on all ranks, and change no bit of the training."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.batch import Batch
from llmq.base.console import printable
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.result import Result
from llmq.checkpoint.best import Measured, Measurement
from llmq.data.loader import DataLoader
from llmq.options.options import TrainConfig
from llmq.run.batches import mean_loss, open_loaders
from llmq.run.metrics import Reporter, duration
from llmq.run.ranks import CutShort, Rank
from llmq.run.sampling import Sampling, prompt_ids, seed_of
from llmq.run.trainer import Trainer
from llmq.text import scoring
from llmq.text.guarded import guarded_tokenizer
from llmq.text.scoring import Asked, Encoder, Score, check_ids, judge, make_batches, pack_batches
from llmq.text.tasks import read_tasks
from llmq.text.tokenizer import Tokenizer, continuation

SAMPLE_TOKENS = 64  # most new tokens of a sample
TEMPERATURE = Sampling().temperature  # the temperature of samples, as in `llmq sample`


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Inputs of a run's evaluations, which are checked before the run writes any file. sets: named
    validations, each with the loaders of this process's ranks. prompts: text and ids of each
    prompt. metrics: names of all metrics, as in --keep-best."""

    sets: dict[str, list[DataLoader]]
    asked: list[Asked]
    prompts: list[tuple[str, list[int]]]
    tokenizer: Tokenizer | None

    metrics: list[str]

    @property
    def loaders(self) -> list[DataLoader]:
        return [loader for loaders in self.sets.values() for loader in loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def read_evaluation_inputs(trainer: Trainer) -> EvaluationInputs:
    """Read the inputs of a run's evaluations. Raises LlmqError for files that cannot be read or do
    not suit the run."""
    config, model = trainer.config, trainer.model
    shape = (config, model, trainer.world)
    sets = {
        name: open_loaders(*shape, held_out=True, pattern=pattern)
        for name, pattern in config.eval_sets.items()
    }
    metrics = ["loss"] * config.validates + [f"{name}/loss" for name in sets]
    if not config.eval_task and not config.sample_prompt:
        return EvaluationInputs(sets, [], [], None, metrics)
    tokenizer = _tokenizer(trainer)
    encoder = Encoder(tokenizer, config.seq_len)
    asked = [encoder.ask(task) for task in read_tasks(config.eval_task)]
    check_ids([request for a in asked for request in a.requests], model.vocab_size)
    warn(*[line for a in asked for line in a.cut_lines(f"--seq-len {config.seq_len}")])
    metrics += [f"{a.task.name}/{metric}" for a in asked for metric in a.task.metrics]
    of_run = {"flag": "--sample-prompt", "seq_len": config.seq_len}
    prompts = [(t, prompt_ids(tokenizer, model, t, **of_run)) for t in config.sample_prompt]
    return EvaluationInputs(sets, asked, prompts, tokenizer, metrics)


def _tokenizer(trainer: Trainer) -> Tokenizer:
    if trainer.tokenizer is None:
        flag = "--eval-task" if trainer.config.eval_task else "--sample-prompt"
        raise ConfigError(
            f"{flag}: neither the model nor the training files have a tokenizer beside them: put "
            f"its files into '{Path(trainer.config.train_patterns[0]).parent / 'tokenizer'}'"
        )
    return guarded_tokenizer(trainer.tokenizer)


def _kind_of_loss(loader: DataLoader, tokens: int, config: TrainConfig) -> str:
    """Return the kind of measurement that a validation makes, see Measurement. tokens: number of
    tokens read."""
    data = loader.data
    parts = f"{data.fingerprint} {data.contents} {data.order} {loader.seed} {config.loss}"
    return f"{tokens:,} tokens in sequences of {loader.seq_len} (data {_digest(parts.encode())})"


def _kind_of_task(asked: Asked, config: TrainConfig) -> str:
    """Return the kind of measurement that a task makes, see Measurement."""
    digest = _digest(*(part for tokens, count in asked.requests for part in (tokens, bytes(count))))
    items, length = f"{len(asked.task.items):,} items", f"sequences of {config.seq_len}"
    return f"{items} in {length} (data {digest})"


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:8]


Evaluate = Callable[[], Measured]
"""Function that runs an evaluation between two steps, and returns the measured values."""


class Evaluations:
    """Runs the evaluations of a run. done_at: step of the last tasks and of the last samples, by
    which a continued run neither skips nor repeats tasks and samples."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        material: EvaluationInputs,
        stopped: Callable[[], bool],
    ):
        """stopped: function called before each batch; True ends the evaluation."""
        self.trainer, self.reporter, self.material = trainer, reporter, material
        self.config: TrainConfig = trainer.config
        self.stopped = stopped
        self._measured: Measured = {}
        self._losses: dict[str, float] = {}  # last loss of each validation, by name
        self.not_finite: str | None = None  # words about a last loss that was not finite
        self.done_at: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        return {"done_at": self.done_at}

    def load(self, state: Mapping[str, Any]) -> None:
        self.done_at = {name: index(step) for name, step in state.get("done_at", {}).items()}

    # -- when ------------------------------------------------------------------------------------

    def due(self, *, new_epoch: bool) -> list[Evaluate]:
        """Return the evaluations that are due before the next step, in order. A checkpoint stores
        whether its step was evaluated, and so a continued run neither skips nor repeats an
        evaluation."""
        step, every = self.trainer.steps_done, self.config.eval_every_n_steps
        due = new_epoch or (every > 0 and step % every == 0)
        due = self.config.eval_at_start if step == 0 else due
        validates = due and self.validates and step != self.trainer.validated_at
        calls = [partial(self.validate, self.config.eval_num_steps)] if validates else []
        return [partial(self._run, call) for call in [*calls, *self._due_tasks()]]

    def due_at_end(self) -> list[Evaluate]:
        """Return the evaluations at the end of the run. The last validation reads all sequences. If
        a validation at this step, as at an early stop, has read all sequences, no validation
        follows.

        If --keep-best names a loss, a periodic validation comes first, so that the last model can
        become the best.
        """
        step, calls = self.trainer.steps_done, []
        measured_before = self.trainer.validated_at not in (None, step)
        if (self.config.keep_best or "").endswith("loss") and self._takes_part and measured_before:
            calls.append(partial(self.validate, self.config.eval_num_steps))
        if self._takes_part or not self._losses or self.trainer.validated_at != step:
            calls.append(partial(self.validate, None))
        return [partial(self._run, call) for call in [*calls, *self._due_tasks(at_end=True)]]

    @property
    def _takes_part(self) -> bool:
        """Return True if periodic validations read only a part of the sequences."""
        own = self.trainer.eval_loaders if self.config.validates else []
        loaders = [*own, *self.material.loaders]
        longest = max((one.batches_per_epoch for one in loaders), default=0)
        return longest > self.config.eval_num_steps

    def _run(self, call: Callable[[], None]) -> Measured:
        call()
        measured, self._measured = self._measured, {}
        return measured

    # -- validations -----------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        """Return True if there are validation files, with or without a name."""
        return self.config.validates or bool(self.material.sets)

    def summary(self) -> str:
        """Return the line at the end of a run, with the last validation's losses."""
        if self.config.validates:
            return f"Done. validation loss {self._losses['']:10f}"
        if self.material.sets:
            losses = (f"{name} {self._losses[name]:.6f}" for name in self.material.sets)
            return f"Done. validation losses: {', '.join(losses)}"
        return "Done. No validation"

    def validate(self, max_batches: int | None) -> None:
        """Run and report all validations. A signal ends the validations without a result.
        max_batches: most batches of each rank; None: all."""
        trainer = self.trainer
        before = trainer.validated_at
        self.not_finite = None
        own = (trainer.eval_loader, trainer.validate) if self.config.validates else None
        if own is not None and self._timed("", *own, max_batches) is None:
            return
        for name, loaders in self.material.sets.items():
            call = partial(mean_loss, trainer.ranks, loaders)
            if self._timed(name, loaders[0], call, max_batches) is None:  # all must be repeated
                trainer.validated_at = before
                return
        trainer.validated_at = trainer.steps_done if self.validates else before

    def _timed(
        self,
        name: str,
        loader: DataLoader,
        call: Callable[..., Result | None],
        max_batches: int | None,
    ) -> Result | None:
        """Run and report one validation. call: function of (max_batches, stopped) that returns the
        validation's result."""
        trainer, step = self.trainer, self.trainer.steps_done
        whole = loader.batches_per_epoch
        batches = whole if max_batches is None else min(max_batches, whole)
        start = time.perf_counter()
        ranks, asked = trainer.world.count, itertools.count()
        view = self.reporter.view

        def stopped() -> bool:  # called before each batch of each rank, and after the last
            view.progress(validated=min(next(asked) / (batches * ranks), 1.0))
            return self.stopped()

        result = call(max_batches, stopped)
        view.progress(validated=None)
        if result is None:
            return None
        ms = (time.perf_counter() - start) * 1000
        tokens = loader.tokens(batches)
        self.reporter.evaluation(step, result, ms, tokens, name)
        self._losses[name] = result.loss
        metric, final = f"{name}/loss" if name else "loss", max_batches is None
        found = Measurement(result.loss, _kind_of_loss(loader, tokens, self.config), final)
        self._measured[metric] = found
        if name:  # `Trainer.validate` has told of an unnamed set
            self.trainer.tell_evaluation({metric: result.loss})
        if result.tokens > 0 and not math.isfinite(result.loss):
            self.not_finite = f"the validation loss is {result.loss}"
        if result.tokens == 0:
            files = self.config.eval_sets.get(name, self.config.eval_pattern)
            if not name and self.config.splits:
                files = " ".join(self.config.train_file)
            self.reporter.message(
                f"WARNING: the validation loss is nan: all targets that were read of '{files}' are "
                "masked",
                step,
            )
        return result

    # -- tasks and samples -----------------------------------------------------------------------

    def _due_tasks(self, *, at_end: bool = False) -> list[Callable[[], None]]:
        """Return those of the methods `tasks` and `samples` that are due."""
        step, every, calls = self.trainer.steps_done, self.config.task_every, []
        is_due = at_end or (step > 0 and every > 0 and step % every == 0)
        for name, given, call in (
            ("tasks", self.material.asked, self.tasks),
            ("samples", self.material.prompts, self.samples),
        ):
            now = is_due or (step == 0 and self.config.eval_at_start)
            if given and now and self.done_at.get(name) != step:
                calls.append(call)
        return calls

    def tasks(self) -> None:
        """Run and report all tasks; a signal skips the tasks that remain."""
        step = self.trainer.steps_done
        for asked in self.material.asked:
            start = time.perf_counter()
            likelihoods = self._likelihoods(asked)
            if likelihoods is None:
                return
            scores, kind = judge(asked, likelihoods), _kind_of_task(asked, self.config)
            self._report_task(scores, kind, time.perf_counter() - start)
        self.done_at["tasks"] = step

    def _report_task(self, scores: list[Score], kind: str, seconds: float) -> None:
        """Report all metrics of one task, in an [E] line and in log records. kind: see Measurement.
        seconds: duration of the task."""
        step, shown = self.trainer.steps_done, []
        for s in scores:
            error = "" if s.stderr is None else f" ± {s.stderr:.4f}"
            shown.append(f"{s.metric} {s.value:.4f}{error}")
            self.reporter.log.write(
                "task",
                step,
                name=s.task,
                metric=s.metric,
                value=s.value,
                stderr=s.stderr,
                count=s.count,
                seconds=round(seconds, 3),
            )
            self.reporter.score(f"{s.task}/{s.metric}", s.value)
            self._measured[f"{s.task}/{s.metric}"] = Measurement(s.value, kind)
        line = " | ".join([f"time: {duration(1000 * seconds)}", scores[0].task, *shown])
        self.reporter.line("E", step, line, bold=True)
        self.trainer.tell_evaluation({f"{s.task}/{s.metric}": s.value for s in scores})

    def _likelihoods(self, asked: Asked) -> np.ndarray | None:
        """Return log-likelihoods of a task's requests, in nats; None after a signal."""
        shape = self.config.batch_size, self.config.seq_len
        packs = self.config.document_mask
        if packs:  # attention separates documents of a sequence
            batches = pack_batches(asked.requests, shape)
        else:
            batches = make_batches(asked.requests, lambda longest, left: shape)
        passes = [(batch, number) for batch in batches for number in range(batch.count)]

        def make(batch: scoring.Batch, number: int) -> Batch:
            starts = batch.starts() if packs else None
            return Batch(batch.inputs(), batch.targets(number), starts)

        def work(rank: Rank, index: int, batch: Batch) -> dict[int, float]:
            losses = rank.step.score(batch)
            own, number = passes[index]
            return own.likelihoods(number, losses) if index >= 0 else {}

        made = [partial(make, *of_pass) for of_pass in passes]
        with self.trainer.averaged():
            found = self.trainer.ranks.share("task", made, work, self.stopped)
        if found is None:
            return None
        of_all = {request: value for each in found for request, value in each.items()}
        return np.array([of_all[request] for request in range(len(asked.requests))])

    def samples(self) -> None:
        """Generate and report a continuation of each prompt, as [S] lines. A signal prevents the
        report."""
        trainer, tokenizer = self.trainer, self.material.tokenizer
        step = trainer.steps_done
        try:
            made = trainer.generate(
                [ids for _, ids in self.material.prompts],
                max_new_tokens=SAMPLE_TOKENS,
                temperature=TEMPERATURE,
                seed=seed_of(self.config.seed, step),
                stop=[tokenizer.eos_id],
                stopped=self.stopped,
            )
        except CutShort:
            return
        except LlmqError as error:  # NaN predictions are reported, and the run goes on
            self.reporter.message(f"WARNING: no samples: {error}", step)
            return
        for (prompt, ids), (new,) in zip(self.material.prompts, made, strict=True):
            text = continuation(tokenizer, ids if prompt else [], new.shown)
            shown = printable(prompt + text).replace("\n", "\n    ")
            self.reporter.line("S", step, shown)
            self.reporter.log.write("sample", step, prompt=prompt, text=text)
        self.done_at["samples"] = step
