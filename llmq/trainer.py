"""llmq.Trainer: a model, its data and its optimizer, driven step by step from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint import CheckpointReader, CheckpointWriter, Manifest
from llmq.checkpoint_store import find_checkpoint
from llmq.config import ModelConfig
from llmq.dtypes import parse_dtype
from llmq.errors import ConfigError, LlmqError
from llmq.hf import HfWeights, export_model
from llmq.loader import DataLoader
from llmq.machine import Machine, choose_machine
from llmq.ops.attention import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from llmq.options import TrainConfig
from llmq.options_io import make_config
from llmq.params import Param
from llmq.plan import Plan, Usage, check_fits, make_plan, memory_limit, step_options
from llmq.presets import resolve_model
from llmq.runtime.tensor import Tensor
from llmq.schedule import learning_rate
from llmq.step import Batch, Result, Step
from llmq.tokenizer import ByteTokenizer, HfTokenizer

FP8_CAPABILITY = 89  # Ada is the first with fp8 tensor cores
CHANNEL_MULTIPLE = 8  # 16-byte vectors of BF16


class Trainer:
    """One training run.

        with Trainer(model="tiny", from_scratch=True, train_file="data/train*.bin") as trainer:
            for _ in range(100):
                print(trainer.step().loss)
            trainer.export("output/model")

    Keyword arguments are the options of `llmq train`, with underscores. Options, files and memory
    that do not work raise LlmqError before anything is allocated.

    config, model: TrainConfig and ModelConfig. plan: what was counted before allocating.
    steps_done: optimizer steps since the beginning of the run, resumed ones included.
    """

    def __init__(self, **options: Any):
        config = make_config(options)
        model, model_dir = resolve_model(config.model, config.from_scratch)
        self._open(config.validate_with(model), model, model_dir)
        self.load_weights()

    @classmethod
    def from_config(
        cls, config: TrainConfig, model: ModelConfig, model_dir: Path | None
    ) -> Trainer:
        """A trainer with checked options, without weights: call `load_weights` or `load` next."""
        self = cls.__new__(cls)
        self._open(config, model, model_dir)
        return self

    def _open(self, config: TrainConfig, model: ModelConfig, model_dir: Path | None) -> None:
        self.config, self.model, self.model_dir = config, model, model_dir
        self.steps_done = 0
        self.machine: Machine = choose_machine(config.device, config.gpus)
        check_gpu(config, model, self.machine)
        backend = attention_backend(config, model, self.machine)
        options = step_options(config, backend)
        self.plan: Plan = make_plan(config, model, self.machine.spec, backend)
        limit = memory_limit(config, self.machine)
        check_fits(config, model, self.machine.spec, backend, self.plan, limit)
        self._hf = None if config.from_scratch else HfWeights(model_dir)
        self.dev = self.machine.open(
            self.plan.usage.sizes, graphs=config.use_cuda_graphs, tune=config.tune
        )
        self._step = Step(self.dev, model, options)
        if self._hf is not None:
            self._hf.check(self._step.table)

    @cached_property
    def train_loader(self) -> DataLoader:
        """Training batches; opened, and every file checked, at first use."""
        return self._loader(self.config.train_file, self.config.train_seed)

    @cached_property
    def eval_loader(self) -> DataLoader:
        """Validation batches; opened, and every file checked, at first use."""
        return self._loader(self.config.eval_file, self.config.eval_seed)

    def _loader(self, pattern: str, seed: int) -> DataLoader:
        return DataLoader(
            pattern,
            seq_len=self.config.seq_len,
            micro_batch=self.config.batch_size,
            seed=seed,
            vocab_size=self.model.vocab_size,
        )

    @property
    def usage(self) -> Usage:
        """Memory in use and the stack's peak so far; equal to plan.usage after a step."""
        return Usage.of(self.dev)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the training data."""
        return self.train_loader.batches_per_epoch // self.config.grad_accumulation

    @cached_property
    def total_steps(self) -> int:
        """Steps of the whole run: --steps, or as many as --epochs gives."""
        if self.config.steps >= 0:
            return self.config.steps
        return self.steps_per_epoch * self.config.epochs

    def learning_rate(self, step: int) -> float:
        """The schedule's value for a step, counted from 0."""
        config = self.config
        return learning_rate(
            step,
            steps=self.total_steps,
            base=config.learning_rate,
            warmup=config.warmup,
            cooldown=config.cooldown,
            final_fraction=config.final_lr_fraction,
            schedule=config.lr_schedule,
        )

    # -- training --------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch] | None = None) -> Result:
        """One optimizer step; waits for its result.

        batches: micro-batches of int32 inputs and targets (B, T), targets -100 where masked; None
        takes --grad-accumulation of them from the training files. The loss is the mean over all
        target tokens of the step.
        """
        return self.result(self.enqueue_step(batches))

    def enqueue_step(self, batches: Sequence[Batch] | None = None) -> int:
        """Like `step`, without waiting: the returned ticket is for `result`."""
        taken = self._next_batches() if batches is None else self._checked(batches)
        lr = self.learning_rate(self.steps_done)
        ticket = self._step.train(self.steps_done, lr, self.config.grad_clip, taken)
        self.steps_done += 1
        return ticket

    def result(self, ticket: int) -> Result:
        """What the step with this ticket measured; at most three steps may follow it."""
        return self._step.result(ticket)

    def _next_batches(self) -> Iterator[Batch]:
        self.advance_epoch_if_needed()
        return (self.train_loader.next_batch() for _ in range(self.config.grad_accumulation))

    def advance_epoch_if_needed(self) -> bool:
        """Begin the next epoch if this one has less than a step left; returns whether it did."""
        loader, count = self.train_loader, self.config.grad_accumulation
        if loader.batches_per_epoch < count:
            raise ConfigError(
                f"--grad-accumulation: {count} micro-batches are more than the "
                f"{loader.batches_per_epoch} of an epoch: use fewer, or more data"
            )
        if loader.has_next(count):
            return False
        loader.advance_epoch()
        return True

    def _checked(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        shape, count = (self.config.batch_size, self.config.seq_len), self.config.grad_accumulation
        if len(batches) != count:
            raise ValueError(f"step: grad_accumulation is {count}, got {len(batches)} batches")
        for inputs, targets in batches:
            for name, array in (("inputs", inputs), ("targets", targets)):
                if array.shape != shape or array.dtype != np.int32:
                    raise ValueError(
                        f"step: {name} must be int32 {shape}, got {array.dtype} {array.shape}"
                    )
            highest = max(int(inputs.max()), int(targets.max()))
            if inputs.min() < 0 or highest >= self.model.vocab_size:
                raise ValueError(f"step: token ids must be in 0..{self.model.vocab_size - 1}")
        return batches

    def validate(self, max_batches: int | None = None) -> Result:
        """The loss on the validation files, from their start; None: on all of them."""
        self.eval_loader.reset()
        count = self.eval_loader.batches_per_epoch
        count = count if max_batches is None else min(count, max_batches)
        return self._step.evaluate(self.eval_loader.next_batch() for _ in range(count))

    # -- weights and state -----------------------------------------------------------------------

    def load_weights(self) -> None:
        """Random weights with --from-scratch, else those of the model directory."""
        if self._hf is None:
            zero = self.config.init_proj_to_zero
            self._step.weights.init(self.model, self.config.seed, zero_projections=zero)
        else:
            self._step.weights.load(self._hf.read)

    @property
    def tokenizer(self) -> str | None:
        """Where this run's tokenizer is: "bytes", a directory, or None if there is no trace of it.

        A model directory has its own; `llmq tokenize` leaves a copy beside the token files.
        """
        beside = Path(self.config.train_file).expanduser().parent / "tokenizer"
        for folder in (self.model_dir, beside):
            if folder is not None and any((folder / f).is_file() for f in HfTokenizer.FILES):
                return str(folder.resolve())
        return "bytes" if self.model.vocab_size == ByteTokenizer.vocab_size else None

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint of everything into directory/step_…; None: --checkpoint-dir."""
        directory = self.config.checkpoint_dir if directory is None else Path(directory)
        writer = CheckpointWriter(directory, self.steps_done)
        entries = []
        for group, slabs in self._groups().items():
            views = {p: s.views(slabs[s.name])[p.key] for s in self._step.table for p in s.params}
            dtype = next(iter(slabs.values())).dtype
            ranges = [(param, 0, param.size) for param in views]

            def read(param: Param, start: int, stop: int, views: dict = views) -> np.ndarray:
                flat = views[param].view(param.size)
                return self.dev.download(flat.rows(start, stop))

            entries.append(writer.write(group, dtype, ranges, read))
        loaded = "train_loader" in self.__dict__
        manifest = Manifest(
            model=self.model,
            loader=self.train_loader.state() if loaded else {},
            state={"steps_done": self.steps_done},
            options={name: _plain(value) for name, value in asdict(self.config).items()},
            tokenizer=self.tokenizer,
        )
        return writer.commit(manifest, entries)

    def load(self, path: str | Path, *, new_data: bool = False) -> None:
        """Go on from a checkpoint, or the newest one in a directory.

        new_data: leave the training data where it is instead of going to where it was.
        LlmqError if it is damaged, of another model, or (without new_data) of other data.
        """
        found = find_checkpoint(Path(path), str(path))
        if found is None:
            raise LlmqError(f"'{path}' is not and does not contain a complete checkpoint")
        with CheckpointReader(found) as reader:
            reader.check(self._step.table)
            if reader.manifest.loader and not new_data:
                self.train_loader.set_state(reader.manifest.loader)
            for group, slabs in self._groups().items():
                self._load_group(reader, group, slabs)
            self._step.weights.refresh()
            self.steps_done = reader.manifest.state["steps_done"]

    def _load_group(self, reader: CheckpointReader, group: str, slabs: dict[str, Tensor]) -> None:
        for slab in self._step.table:
            self.dev.zero(slabs[slab.name])
            views = slab.views(slabs[slab.name])
            for param in slab.params:
                values = reader.read(group, param).reshape(param.shape)
                target = views[param.key]
                self.dev.upload(target, values.astype(target.dtype.numpy, copy=False))

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: group -> slabs."""
        optimizer = self._step.optimizer
        return {
            "weights": self._step.weights.master,
            "adam.m": optimizer.m,
            "adam.v": optimizer.v,
        }

    def export(self, directory: str | Path | None = None) -> None:
        """Write the model as transformers loads it, with its tokenizer; None: --out-dir."""
        directory = self.config.out_dir if directory is None else Path(directory)
        source = self.tokenizer
        tokenizer = ByteTokenizer() if source == "bytes" else source and Path(source)
        dtype = parse_dtype(self.config.model_dtype)
        export_model(directory, self.model, self._step.weights.read, dtype, tokenizer)

    def gradients(self) -> dict[str, np.ndarray]:
        """The last step's gradients of the SUM of token losses, by parameter name, for tests."""
        grads = self._step.grads.slabs
        return {
            p.name: self.dev.download(s.views(grads[s.name])[p.key])
            for s in self._step.table
            for p in s.params
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Host copies of all master weights by parameter name, padding included."""
        weights = self._step.weights
        return {p.name: weights.read(p) for s in self._step.table for p in s.params}

    def close(self) -> None:
        """Stop the data threads and free the device."""
        for name in ("train_loader", "eval_loader"):
            if name in self.__dict__:
                self.__dict__[name].close()
        self.dev.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_gpu(config: TrainConfig, model: ModelConfig, machine: Machine) -> None:
    """ConfigError for what the CPU device can do and this GPU cannot."""
    if machine.kind != "cuda":
        return
    capability, name = machine.spec.capability, machine.spec.name
    if config.matmul_dtype == "e4m3" and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--matmul-dtype: e4m3 needs compute capability {FP8_CAPABILITY / 10}, {name} has "
            f"{capability / 10}: use bf16"
        )
    if model.head_dim % HEAD_DIM_MULTIPLE or model.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"the model's head size is {model.head_dim}; on a GPU it must be a multiple of "
            f"{HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}: use --device cpu"
        )
    for name, size in (("hidden", model.hidden_size), ("intermediate", model.intermediate_size)):
        if size % CHANNEL_MULTIPLE:
            raise ConfigError(
                f"the model's {name} size is {size}; on a GPU it must be a multiple of "
                f"{CHANNEL_MULTIPLE}: use --device cpu"
            )


def attention_backend(config: TrainConfig, model: ModelConfig, machine: Machine) -> str:
    """ "native" or "cudnn": what --attention means here. ConfigError if cudnn cannot be had."""
    if config.attention == "native" or (config.attention == "auto" and machine.kind == "host"):
        return "native"
    reason: str | None = "it needs a GPU"
    if machine.kind == "cuda":
        from llmq.runtime.cudnn import CudnnAttention

        try:
            library = CudnnAttention(0)
        except LlmqError as error:
            reason = str(error)
        else:
            dtype = parse_dtype(config.model_dtype)
            reason = library.supported(machine.spec.capability, dtype, model.head_dim)
            library.close()
    if reason is not None and config.attention == "cudnn":
        raise ConfigError(f"--attention cudnn: {reason}")
    return "native" if reason else "cudnn"


def _plain(value: Any) -> Any:
    """A value that JSON knows."""
    return str(value) if isinstance(value, Path) else value
