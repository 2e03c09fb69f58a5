"""The trainer: a model, its optimizer and its data, driven step by step by the loop of a run or by
a script (llmq/run/script.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.callback import Callback, Evaluation, RunEnd, StepDone
from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.errors import ConfigError, DataError, LlmqError, warn
from llmq.base.files import Closing
from llmq.base.result import Result
from llmq.base.run_id import RunId
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.checkpoint import CheckpointReader, check_fixed, check_formats
from llmq.checkpoint.finite import finite
from llmq.checkpoint.manifest import Manifest
from llmq.checkpoint.states import checkpoint_at
from llmq.checkpoint.store import check_model
from llmq.data.identity import TokenizerId
from llmq.data.loader import DataLoader
from llmq.data.scores import ScoreFile, scores_path
from llmq.data.tokens import open_token_files
from llmq.model.generator import Completion
from llmq.model.rings import RESULTS
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.options_io import config_of, layers_of
from llmq.options.rules import RULES
from llmq.plan.checks import plan_run
from llmq.plan.plan import Usage
from llmq.run.agreement import check_start
from llmq.run.batches import checked_batches, mean_loss, move_loaders, open_loaders
from llmq.run.initial_weights import InitialWeights, with_adapter
from llmq.run.model_of_run import (
    agreed_tokenizer,
    at_commit,
    check_same,
    exported_otherwise,
    model_of_run,
    packing_of_data,
    tokenizer_source,
    with_tokens_of,
)
from llmq.run.ranks import Ranks
from llmq.run.resume import changed_options
from llmq.run.sampling import ids_of, known_tokenizer, requests_of
from llmq.run.score import score_files
from llmq.run.shares import Shares
from llmq.runtime.device import Device
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.mesh import DATA
from llmq.runtime.world import World, refuse_several
from llmq.state.params import Param
from llmq.text.tokenizer import ByteTokenizer


class Trainer(Closing):
    """One training run.

        with Trainer(model="tiny", from_scratch=True, train_file="data/train*.bin") as trainer:
            for _ in range(100):
                print(trainer.step().loss)
            trainer.export("output/model")

    Keyword arguments are the options of `llmq train`, with underscores. Unsuitable options or files
    and too little memory raise LlmqError before any allocation. Each GPU (gpus=...) has a thread,
    driven by the calling thread; an error stops all threads.

    config, model: TrainConfig and ModelConfig. plan: memory, counted before allocation. machine:
    devices. world: processes and ranks. world_size: number of ranks. steps_done: number of steps
    since the beginning of the run. validated_at: steps_done at the last validation. history: the
    part of the run's reports that checkpoints store. run: id of the run; after `load` the
    checkpoint's id, or a new id for a fork. tokenizer_id: tokenizer of the data, None if unknown.
    callbacks: listeners, in the order of calls. last_step: newest step with a known result.
    last_end: end of last_step in ns; None after other work of the device. loaded: path of the
    checkpoint that `load` has read. samples: `Rollouts` that replace token files, or None.
    """

    def __init__(self, *, callbacks: Sequence[Callback] = (), **options: Any):
        refuse_several("llmq.Trainer", "start `llmq train`, which does without a script")
        layers = layers_of(options)
        config = config_of(layers, packing_of_data(layers[1]))
        RULES.check(config, script=True)
        model, model_dir = model_of_run(config)
        config = with_adapter(at_commit(config, model_dir), model).validate_with(model)
        made = agreed_tokenizer(config, model_dir)
        self._open(config, model, model_dir, made, named=layers[1])
        try:
            self.load_weights()
        except BaseException:  # the caller gets no trainer to close
            self.close()
            raise
        self.callbacks += callbacks

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        model: ModelConfig,
        model_dir: Path | None,
        tokenizer_id: TokenizerId | None = None,
        world: World = World(),
    ) -> Trainer:
        """Return a trainer without weights: call `load_weights` or `load` next.

        tokenizer_id: result of `agreed_tokenizer`; None if nothing reads data. world: the processes
        of the run, which all make the same calls of the trainer.
        """
        self = cls.__new__(cls)
        self._open(config, model, model_dir, tokenizer_id, world)
        return self

    def _open(
        self,
        config: TrainConfig,
        model: ModelConfig,
        model_dir: Path | None,
        tokenizer_id: TokenizerId | None,
        world: World = World(),
        named: Collection[str] = (),
    ) -> None:
        """named: options that the caller gave. Files among `named` are checked here; the first step
        that reads token files opens documents, scores and default files."""
        model = with_tokens_of(config, model, model_dir, tokenizer_id)
        self.config, self.model, self.model_dir = config, model, model_dir
        self.run = RunId.new(config.name)
        self.tokenizer_id = tokenizer_id
        self.steps_done = self._count = 0  # enqueued steps of the run, and of this trainer object
        self._steps_of_epochs: int | None = None
        self.validated_at: int | None = None
        self.history: dict[str, Any] = {}
        self.callbacks: list[Callback] = []
        self.last_step: StepDone | None = None
        self.last_end: int | None = None
        self.loaded: Path | None = None
        self._enqueued: dict[int, partial[StepDone]] = {}  # steps without a result, by ticket
        self._has_scores = False
        self.samples: Any = None
        self._restored: TemporaryDirectory | None = None  # holds a checkpoint's tokenizer
        self.machine: Machine = choose_machine(config.device, config.gpus, world)
        self.world, self.world_size = self.machine.world, self.machine.world_size
        self.plan, planned, backend = self.world.each(lambda: plan_run(config, model, self.machine))
        self.machine.compile_ahead(self.plan.sources)
        self._check_named(named)
        self._origin = self.world.each(lambda: InitialWeights(config, model, model_dir))
        chosen = (backend, planned.attn_bwd_chunks, self.plan.usage.sizes)
        check_start(config, model, chosen, self._origin.weights, self.world)
        self.ranks = Ranks(self.machine, self.plan, planned, model, backend)
        self.shares = Shares(config, self.machine, self.plan)

    def _check_named(self, named: Collection[str]) -> None:
        """Raise LlmqError if files that the caller names are missing, damaged or without scores."""
        config, patterns = self.config, []
        if "train_file" in named:
            RULES.check(config, files=True)
            patterns += config.train_patterns
        if "eval_file" in named:
            own = config.validates and not config.splits
            patterns += [*[config.eval_pattern] * own, *config.eval_sets.values()]
        for file in open_token_files(patterns, self.model.vocab_size):
            file.close()

    @property
    def dev(self) -> Device:
        return self.ranks.first.dev

    @property
    def _step(self) -> Step:
        self.ranks.pool.check_open("step")
        return self.ranks.first.step

    @cached_property
    def train_loaders(self) -> list[DataLoader]:
        """Return loaders of training data for this process's ranks, opened at the first use."""
        return open_loaders(self.config, self.model, self.world, held_out=False)

    @cached_property
    def eval_loaders(self) -> list[DataLoader]:
        """Return loaders of validation data for this process's ranks, opened at the first use."""
        if not self.config.validates:
            return []
        return open_loaders(self.config, self.model, self.world, held_out=True)

    @property
    def train_loader(self) -> DataLoader:
        """Return rank 0's loader of training batches; all ranks are at the same position."""
        return self.train_loaders[0]

    @property
    def eval_loader(self) -> DataLoader:
        """Return rank 0's loader of validation batches. Raises ConfigError without a validation."""
        if not self.config.validates:
            raise ConfigError("--eval-file: none: there is nothing to validate on")
        return self.eval_loaders[0]

    @property
    def usage(self) -> Usage:
        """Return rank 0's memory and its stack's peak so far; after a step equal to plan.usage."""
        return Usage.of(self.dev)

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of one pass over the data; the last step may be smaller."""
        return self._steps_of(self.train_loader.batches_per_epoch)

    def _steps_of(self, batches: int) -> int:
        whole, rest = divmod(batches, self.config.grad_accumulation)
        return whole + (rest > 0 and not self.config.drop_last)

    @property
    def epoch(self) -> tuple[int, float]:
        """Return the number of the epoch, from 0, and the fraction of this epoch that was read."""
        return self.train_loader.epoch, self.train_loader.passed

    @property
    def total_steps(self) -> int:
        """Return the steps of the whole run: --steps, or the steps done plus the steps that the
        remaining --epochs take on the present number of GPUs."""
        if self.config.steps >= 0:
            return self.config.steps
        if self._steps_of_epochs is None:
            loader, more = self.train_loader, self.config.epochs - 1 - self.train_loader.epoch
            left = self._steps_of(loader.batches_left)
            steps = self.steps_done + (left + more * self.steps_per_epoch if more >= 0 else 0)
            self.config.check_total(steps)  # the count needs open token files
            self._steps_of_epochs = steps
        return self._steps_of_epochs

    def learning_rate(self, step: int) -> float:
        """Return the schedule's learning rate for a step, counted from 0."""
        return self.config.rate(step, self.total_steps)

    # -- training --------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch] | None = None) -> Result:
        """Make an optimizer step and wait for its result. The loss is the mean over all targets.

        batches: micro-batches with int32 inputs and targets (B sequences, T tokens), where -100
        masks a target, with starts for --document-mask (see Batch), and with `named` arrays that
        the loss or the model reads. W ranks and A = --grad-accumulation take W * A batches; rank r
        gets batches[i * W + r] as its i-th batch. One rank with W * A micro-steps computes the same
        update. None: batches of the training files.
        """
        done, arguments = self._next_step(batches)
        return self.result(self._noted(self.ranks.train(*arguments), done))

    def enqueue_step(
        self,
        batches: Sequence[Batch] | None = None,
        *,
        lr: float | None = None,
        limits: Limits = NO_LIMITS,
    ) -> int:
        """Enqueue a step without waiting. Returns a ticket for `result`.

        lr: learning rate; None: the schedule's. limits: loss and norm beyond which the device makes
        no update.
        """
        done, arguments = self._next_step(batches, lr, limits)
        return self._noted(self.ranks.train(*arguments), done)

    def _next_step(
        self, batches: Sequence[Batch] | None, lr: float | None = None, limits: Limits = NO_LIMITS
    ) -> tuple[partial[StepDone], tuple[Any, ...]]:
        """Take the next step, which counts as done from now on. Returns a StepDone that still lacks
        the step's result, and the arguments of `Ranks.train`."""
        self.ranks.pool.check_open(f"step {self.steps_done}")  # a closed pool must take no batches
        lr = self.learning_rate(self.steps_done) if lr is None else lr
        meshes = [dev.mesh for dev in self.ranks.devices]
        if batches is None:
            taken, size, places = self._next_batches(), len(meshes), range(len(meshes))
        else:
            size, places = meshes[0].size(*DATA), [mesh.index(*DATA) for mesh in meshes]
            taken = checked_batches(batches, self.config, self.model, size)
        of_ranks = self.shares.deal([taken[place::size] for place in places])
        step, number = self.steps_done, self._count
        self.steps_done, self._count = step + 1, number + 1
        epoch = self.epoch if batches is None else None
        done = partial(StepDone, step=step, number=number, lr=lr, epoch=epoch)
        return done, (step, lr, self.config.grad_clip, of_ranks, limits)

    def _noted(self, ticket: int, done: partial[StepDone]) -> int:
        self._enqueued[ticket] = done
        self._enqueued.pop(ticket - RESULTS, None)
        return ticket

    def tokens_of(self, ticket: int) -> tuple[int, int]:
        """Return the positions that all ranks computed in the step with this ticket, and how many
        of these positions are not padding."""
        counts = list(map(len, self.ranks.batches_of(ticket)))
        computed = self.plan.tokens * sum(counts) // (self.config.grad_accumulation * len(counts))
        return computed, computed - self.ranks.padding_of(ticket)

    def result(self, ticket: int) -> Result:
        """Return the result of the step with this ticket; the first call tells callbacks. At most
        three steps may have been enqueued after this step."""
        result = self.ranks.result(ticket)
        if (done := self._enqueued.pop(ticket, None)) is not None:
            ms = (result.end - (self.last_end or result.begin)) / 1e6
            self.last_end = result.end
            self.last_step = done(result=result, ms=ms, ticket=ticket)
            for callback in (self.shares, *self.callbacks):
                callback.on_step(self.last_step)
        return result

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of all ranks in an optimizer step."""
        return self.config.grad_accumulation * self.dev.mesh.size(*DATA)

    def _next_batches(self) -> list[Batch]:
        """Return the next step's batches of this process. Raises DataError in all processes if one
        process cannot read its batches."""
        self.score_reference()
        self.advance_epoch_if_needed()
        count = self.train_loader.step_batches(self.config.grad_accumulation)
        turns = self.train_loaders * count
        return self.world.each(lambda: [loader.next_batch() for loader in turns])

    @property
    def identity(self) -> BaseId:
        """Return the identity of the first weights with --adapter; the first call hashes files."""
        return self._origin.reference

    def score_reference(self) -> None:
        """Ensure that the reference model's scores of all tokens exist, if the loss reads scores.
        Without --scores the first weights score all files once, into --checkpoint-dir. Raises
        LlmqError for scores of another model."""
        folder = self.config.scores_folder
        if folder is None or self._has_scores or self.samples is not None:
            return
        files = open_token_files(self.config.all_patterns, self.model.vocab_size)
        if self.config.scores is None and self.steps_done == 0:
            score_files(
                self.ranks, files, folder, self.identity.record(),
                separator=self.config.document_separator, replace_others=True,
            )  # fmt: skip
        for file in files:
            scores = ScoreFile(scores_path(folder, file.path))
            scores.check(file, self.config.loss_values.get("top-k", 0))
            made_by, name = BaseId.of(scores.scored.model), scores.scored.name
            scores.close()
            if not self.config.has_reference:
                continue
            if made_by is None or made_by.sha256 != self.identity.sha256:
                raise LlmqError(
                    f"--scores: '{scores.path}' has scores of the model '{name}', whose "
                    f"weights are not those of '{self.identity.name}', with which the run begins: "
                    "score the data with that model, and with --adapter where the run has one"
                )
        self._has_scores = True

    def advance_epoch_if_needed(self) -> bool:
        """Begin the next epoch if this epoch has no step left; return True if a new epoch began."""
        if self._steps_of(self.train_loader.batches_left):
            return False
        if self.steps_per_epoch == 0:
            raise DataError(
                f"--drop-last: the {self.train_loader.batches_per_epoch} batches of an epoch are "
                f"less than a step, which takes {self.config.grad_accumulation}: use a smaller "
                "--grad-accumulation or --batch-size, or leave it out"
            )
        for loader in self.train_loaders:
            loader.advance_epoch()
        return True

    def validate(
        self, max_batches: int | None = None, stopped: Callable[[], bool] | None = None
    ) -> Result | None:
        """Return the loss on the validation files. max_batches: most batches of a rank; None: all.
        stopped: function called before every batch; True ends the validation without a result."""
        self.ranks.pool.check_open("validate")
        _ = self.eval_loader  # raises ConfigError without a validation
        self.score_reference()
        with self.averaged():
            result = mean_loss(self.ranks, self.eval_loaders, max_batches, stopped)
        self.last_end = None
        if result is not None:
            self.validated_at = self.steps_done
            self.tell_evaluation({"loss": result.loss})
        return result

    def tell_evaluation(self, metrics: dict[str, float]) -> None:
        """Tell callbacks of an evaluation after the newest step. metrics: see `Evaluation`."""
        for callback in self.callbacks:
            callback.on_evaluation(Evaluation(step=self.steps_done, metrics=metrics))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With --ema, use the averaged weights within the context, which may make no step."""
        if not self.config.ema:
            yield
            return
        self.ranks.run("averaging", lambda rank: rank.exchange_average(back=False))
        try:
            yield
        finally:
            self.ranks.run("averaging", lambda rank: rank.exchange_average(back=True))

    # -- weights and state -----------------------------------------------------------------------

    def load_weights(self) -> None:
        """Load the weights of the model directory, or random weights with --from-scratch."""
        self._origin.load(self.ranks)

    @cached_property
    def tokenizer(self) -> str | None:
        """Return the source of this run's tokenizer: "bytes", a directory, or None if unknown."""
        return tokenizer_source(self.config, self.model, self.model_dir, self.tokenizer_id)

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint of the whole state into directory/step_…; None: --checkpoint-dir."""
        directory = self.config.checkpoint_dir if directory is None else Path(directory)
        writer, files = self.ranks.write(directory, self.steps_done)
        manifest = self.manifest()
        path = self.world.on_first(lambda: writer.commit(manifest, files))
        self.last_end = None
        self.tell_checkpoint(path)
        return path

    def tell_checkpoint(self, path: Path) -> None:
        """Tell callbacks that a checkpoint is complete."""
        for callback in self.callbacks:
            callback.on_checkpoint(path)

    def manifest(self) -> Manifest:
        """Return the manifest of a checkpoint made now; all processes call this method."""
        loader = self.train_loader.state() if "train_loaders" in self.__dict__ else {}
        own = {"validated_at": self.validated_at, "history": self.history} | self.shares.state()
        state = self.ranks.extra_state() | own
        began_as = (self._origin.base, self._origin.kept)
        shared = (self.run, (self.tokenizer, self.tokenizer_id), *began_as)
        return Manifest.of(self.model, asdict(self.config), loader, state, *shared)

    def load(self, path: str | Path, *, new_data: bool = False) -> list[str]:
        """Go on from a checkpoint, or from a directory's newest one, written on any number of GPUs.
        new_data: True to keep the position in the training data. Warns of changed options that
        change results, and returns lines about other changed options. Raises LlmqError, with the
        trainer unchanged, for a damaged checkpoint, another model or other data."""
        self.ranks.pool.check_open("load")
        with self._opened(path) as reader:
            made = TokenizerId.from_record(reader.manifest.tokenizer_id)
            if made and self.tokenizer_id and not self.config.allow_other_tokenizer:
                check_same("the data", self.tokenizer_id, f"the checkpoint '{reader.path}'", made)
            self._origin.continue_source(reader)
            check_formats(reader, self._step.state(), type(self._step.optimizer.rule))
            if not new_data:  # the last check: until here nothing has changed
                state = reader.manifest.loader
                opened = self.__dict__.get("train_loaders", [])
                move_loaders(self.train_loaders if state else opened, state)
            runs = (self.config, self.world_size, reader.manifest, reader.world_size)
            changes = changed_options(*runs, new_data=new_data)
            warn(*changes.numbers)
            if self._origin.adapters is not None:  # the checkpoint lacks the base model
                self._origin.load(self.ranks)
            self.ranks.run("loading the checkpoint", lambda rank: rank.read(reader))
            self.tokenizer_id = self.tokenizer_id or made
            if self.tokenizer is None:
                self._restored = self._restored or TemporaryDirectory()
                if reader.restore_tokenizer(Path(self._restored.name)):
                    self.tokenizer = self._restored.name
            self.steps_done, self._steps_of_epochs = reader.step, None
            self.validated_at = reader.manifest.state.get("validated_at")
            self.history = reader.manifest.state.get("history", {})
            self.shares.load(reader.manifest.state)
            self.run = self.run.continuing(reader.manifest.run, reader.step)
            self.loaded = reader.path
            return changes.others

    @contextmanager
    def _opened(self, path: str | Path) -> Iterator[CheckpointReader]:
        """Open a checkpoint of this run's model or adapters. path: the checkpoint, or a directory,
        whose newest checkpoint is opened. Raises LlmqError if there is no checkpoint."""
        passed: list[str] = []
        found = checkpoint_at(Path(path), passed, self.world)
        warn(*passed)
        if found is None:
            raise LlmqError(f"'{path}' is not and does not contain a complete checkpoint")
        with self.world.each(lambda: CheckpointReader(found, self.world)) as reader:
            self._origin.check_checkpoint(reader)
            check_fixed(reader, self._step.optimizer.rule)
            reader.check(self._step.table, self._step.optimizer.trained)
            check_model(reader, self.model)
            yield reader

    def restart(self) -> None:
        """Return to the state before the first step, but keep the position in the training data."""
        self.ranks.run("starting again", lambda rank: rank.reset())
        self.load_weights()
        self.steps_done, self._steps_of_epochs = 0, None
        self.validated_at, self.history, self.loaded = None, {}, None

    def export(
        self, directory: str | Path | None = None, *, checkpoint: str | Path | None = None
    ) -> None:
        """Write the model for transformers, or adapters for peft, with the tokenizer.

        directory: None means --out-dir. checkpoint: a checkpoint of this run's model, or a
        directory of checkpoints; None: the present weights. Raises LlmqError, and keeps an older
        export, for infinite weights or NaN (without --force), a damaged checkpoint or another
        model.
        """
        directory = self.config.out_dir if directory is None else Path(directory)
        source = self.tokenizer
        tokenizer = ByteTokenizer() if source == "bytes" else source and Path(source)
        made = self.tokenizer_id

        def write(read: Callable[[Param], np.ndarray]) -> None:
            read = read if self.config.force else finite(read)
            self._origin.export(directory, read, tokenizer, made, self.run)

        if checkpoint is None:
            with self.averaged():
                self.ranks.first_reads(write)
        else:
            with self._opened(checkpoint) as reader:
                self.world.on_first(lambda: write(reader.model))
        if isinstance(tokenizer, Path) and made and made.fingerprint != ByteTokenizer.fingerprint:
            warn(*exported_otherwise(directory, tokenizer, self.config.train_patterns[0]))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        num_samples: int = 1,
        stopped: Callable[[], bool] = lambda: False,
        **how: Any,
    ) -> list[list[Completion]]:
        """Generate `num_samples` completions of each prompt with the current weights, in batches,
        in the memory of activations. Prompt and completion have at most --seq-len tokens together.

        prompts: texts, or ids. how: fields of a `Request`. Each sample gets a seed of its own, made
        from `seed` (default 0), prompt and number. Ids of `stop` end texts like the model's own end
        ids. stopped: called before each token; True raises CutShort. Raises ConfigError for too
        long a prompt, LlmqError for texts without a known tokenizer.
        """
        self.ranks.pool.check_open("generate")
        model, texts = self._generating_model, any(isinstance(p, str) for p in prompts)
        if model.num_labels:
            raise ConfigError("the model has a score head, which predicts no tokens")
        tokenizer = known_tokenizer(self.tokenizer) if texts else None
        ids = [ids_of(prompt, tokenizer, model, self.config.seq_len) for prompt in prompts]
        if tokenizer is not None:
            how["stop"] = [*how.get("stop", ()), tokenizer.eos_id]
        with self.averaged():
            made = self.ranks.generate(requests_of(model, ids, num_samples, **how), stopped)
        self.last_end = None
        return [made[i : i + num_samples] for i in range(0, len(made), num_samples)]

    @property
    def _generating_model(self) -> ModelConfig:
        """Return the model's configuration with the source model's end-of-text ids."""
        source = self._origin.source
        return self.model if source is None else self.model.ending_at(source.ends)

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the last step's gradients of the SUM of token losses, by name, for tests."""
        params = [p for slab in self._step.grads.slabs.values() for p in slab.params]
        return {p.name: self.ranks.read_param("gradients", p) for p in params}

    def weights(self) -> dict[str, np.ndarray]:
        """Return host copies of all padded master weights by name; quantized blocks have none."""
        params = self._step.weights.params()
        return {p.name: self.ranks.read_param("weights", p) for p in params}

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(error)

    def tell_end(self, error: BaseException | None = None) -> None:
        """Call the callbacks' on_end, and drop the callbacks. error: why the run ends, or None."""
        callbacks, self.callbacks = self.callbacks, []
        end = RunEnd(steps_done=self.steps_done, error=error)
        with ExitStack() as stack:
            for callback in reversed(callbacks):  # every on_end is called, even after an error
                stack.callback(callback.on_end, end)

    def close(self, error: BaseException | None = None) -> None:
        """Tell callbacks of the end, stop the threads and free the devices. error: see tell_end."""
        try:
            with ExitStack() as stack:
                stack.callback(self.ranks.close)
                self.tell_end(error)
        finally:
            if self._restored is not None:
                self._restored.cleanup()
            for name in ("train_loaders", "eval_loaders"):
                for loader in self.__dict__.get(name, []):
                    loader.close()
