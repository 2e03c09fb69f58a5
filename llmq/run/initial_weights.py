"""The first weights of a run: random weights or a model's weights, and adapters if the run has
any."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.run_id import RunId
from llmq.base.stopwatch import START
from llmq.checkpoint.base_id import BaseId, base_id, check_same_base, random_base_id
from llmq.checkpoint.bitnet import stored_as_trained
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.export_files import HubModel
from llmq.checkpoint.extra_tensors import opened_extra
from llmq.checkpoint.hf import (
    HfWeights,
    export_model,
)
from llmq.checkpoint.peft import AdapterConfig, AdapterFiles
from llmq.checkpoint.peft_export import export_adapter
from llmq.checkpoint.source_model import SourceModel
from llmq.data.identity import TokenizerId
from llmq.options.adapters import adapters_of, all_adapted
from llmq.options.option_file import flag
from llmq.options.option_types import NONE, texts_of
from llmq.options.options import OPTIONS, TrainConfig
from llmq.run.ranks import Rank, Ranks
from llmq.state.frozen import Stored
from llmq.state.params import Param, trained_slabs, weight_table
from llmq.text.tokenizer import Tokenizer
from llmq.text.tokenizer_files import first_new_id, parse_tokens


def with_adapter(config: TrainConfig, model: ModelConfig) -> TrainConfig:
    """Return the options completed by the adapters of --adapter.

    Raises ConfigError if options contradict the adapters, and LlmqError if the adapters cannot be
    read or belong to another model.
    """
    if config.adapter is None:
        return config
    with AdapterFiles(config.adapter) as files:
        adapters, saved = files.adapters(model, config.train or ()), files.config
        files.check_adapters(model, adapters)
    least = min([adapters.alpha, *(alpha for _, alpha in adapters.alphas)])
    if least <= 0:
        raise ConfigError(
            f"--adapter: '{config.adapter}' has lora_alpha {least}, and only one greater "
            "than 0 can be trained"
        )
    there: dict[str, Any] = {
        "lora_rank": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_targets": adapters.targets,
        "lora_layers": adapters.layers,
        "lora_rank_pattern": texts_of(adapters.ranks),
        "lora_alpha_pattern": texts_of(adapters.alphas),
        "lora_scaling": "rs" if adapters.rs else "standard",
        "lora_dora": adapters.dora,
        "train": adapters.train,
    }
    if not isinstance(adapters.targets, str):
        there["lora_targets"] = ",".join(adapters.targets) or NONE
    found = replace(config, **there)
    for name, value in there.items():
        given = getattr(config, name)
        if given not in (None, getattr(TrainConfig(), name), value) and not _same_adapters(
            model, replace(found, **{name: given}), found
        ):
            wrong = "it" if config.continue_from is None else "--adapter"
            raise ConfigError(
                f"{_said(name, given)}: '{config.adapter}' has {_said(name, value)}: leave "
                f"{wrong} out"
            )
    if config.lora_dropout is None:
        if not 0 <= saved.dropout < 1:
            raise ConfigError(
                f"--adapter: '{config.adapter}' has lora_dropout {saved.dropout}, and only one of "
                "at least 0 and less than 1 can be trained: give --lora-dropout"
            )
        found = replace(found, lora_dropout=saved.dropout)
    return found.normalized()


def _same_adapters(model: ModelConfig, one: TrainConfig, other: TrainConfig) -> bool:
    """Return True if two sets of options give a model the same adapters and train the same
    parts."""

    def trained(config: TrainConfig) -> tuple[Any, ...] | None:
        adapters = adapters_of(config)
        if adapters is None:
            return None
        try:
            modules = {
                part.part.module: (part.rank, part.scale)
                for _, matrix in all_adapted(model, adapters)
                for part in matrix.parts
            }
            names, table = trained_slabs(adapters), weight_table(model, 1, adapters)
        except (ConfigError, ValueError):  # the model lacks a named layer or matrix
            return None
        return modules, {(p.name, p.shape) for s in table if s.name in names for p in s.params}

    found = trained(one)
    return found is not None and found == trained(other)


def _said(name: str, value: Any) -> str:
    """Return the option with its value, or "no OPTION"."""
    return flag(name, value) or f"no {OPTIONS[name].flag}"


ADAPTED_BY = tuple("lora_rank lora_targets lora_rank_pattern lora_layers train lora_dora".split())
"""Options of adapters that must be equal in a run and its checkpoint."""


class InitialWeights:
    """The first weights of one run, whose files the constructor checks.

    weights: the weights in the model's directory; None: random weights.
    """

    @START.part("opening weights")
    def __init__(self, config: TrainConfig, model: ModelConfig, model_dir: Path | None):
        self.config, self.model, self.adapters = config, model, adapters_of(config)
        self.weights = None if config.from_scratch else HfWeights(model_dir)
        if self.weights is not None and config.add_tokens is not None:
            count = len(parse_tokens(config.add_tokens))  # checked by model_of_run
            self.weights.grow(model, first_new_id(model_dir), count)
        if self.weights is not None:
            self.weights.check(weight_table(model))
            if config.trains_mtp:
                table = weight_table(model, 1, self.adapters)
                self.weights.claim(p for slab in table for p in slab.params if p.block == MTP)
            if self.weights.coded == "bitnet" and config.matmul_dtype != "ternary":
                warn(
                    f"products rounded the weights of {config.model} in its training: without "
                    "--matmul-dtype ternary losses are others"
                )
            base, kept_by = config.base_dtype, self.weights.kept_by
            if config.is_quantized and kept_by not in (None, base):
                line = f"--base-dtype {base} rounds the codes of {config.model} anew"
                warn(f"{line}: --base-dtype {kept_by} keeps them")
        self.source = self._source()
        self._open = ExitStack()  # keeps open the files of extra tensors in another folder
        self._files: AdapterFiles | None = None
        if config.adapter is not None:
            self._files = AdapterFiles(config.adapter)
            self._files.leave_copies(model, self.adapters, self.weights)
            if self._files.base is not None:
                check_same_base(f"--adapter: '{config.adapter}'", self._files.base, self.base)
            self._warn_of_base()

    def _source(self) -> SourceModel | None:
        """Return the source model, with the files that exports copy; None with random weights.
        Warns of tensors that are not trained."""
        config = self.config
        if self.weights is None or config.only_scores:
            return None
        whole = self.weights.source_model(config.model, config.revision)
        if whole.parts:
            fate = "are left out of exports" if config.text_only else "stay as they are"
            warn(f"{whole.described} are not trained: they {fate}")
        warn(*whole.notes(self.model, text_only=config.text_only))
        return whole

    @property
    def kept(self) -> SourceModel | None:
        """Return the source model as checkpoints record it; None with adapters, which are exported
        alone."""
        return None if self.adapters is not None else self.source

    @property
    def exported(self) -> SourceModel | None:
        """Return the source model with the tensors that exports of this run need."""
        if self.source is None:
            return None
        return self.source.for_model(self.model, text_only=self.config.text_only)

    def continue_source(self, reader: CheckpointReader) -> None:
        """Use the source model of a checkpoint's run. Raises LlmqError if the source's extra
        tensors are neither in --model nor in the recorded folder."""
        before = SourceModel.of_record(reader.manifest.source)
        if before is None or self.adapters is not None:
            return
        if self.source is not None and self.source.sha256 == before.sha256:
            before = replace(before, extra=self.source.extra)
        elif before.for_model(self.model, text_only=self.config.text_only).parts:
            opened = opened_extra(before, f"checkpoint '{reader.path}'", "--model")
            before = self._open.enter_context(opened)
        self.source = before

    @property
    def base(self) -> BaseId | None:
        """Return the base model of the adapters; None without adapters."""
        return None if self.adapters is None else self.identity

    @cached_property
    def identity(self) -> BaseId:
        """Return the identity of the first weights without adapters. The first access reads all
        weights."""
        if self.weights is None:
            return random_base_id(self.config.model, self.config.seed)
        return base_id(self.config.model, self.weights, weight_table(self.model))

    @cached_property
    def reference(self) -> BaseId:
        """Return the identity of the first weights with --adapter, which are the reference model of
        preference losses."""
        if self._files is None:
            return self.identity
        own, name = self.adapters, f"{self.identity.name} with {self.config.adapter}"
        scaling = (own.rank, own.alpha, own.rs, own.ranks, own.alphas)
        digest = hashlib.sha256(f"{self.identity.sha256} {scaling}".encode())
        for slab in weight_table(self.model, 1, own):
            for param in filter(self._files.has, slab.params):
                digest.update(param.name.encode() + self._files.read(param).tobytes())
        return BaseId(name=name, sha256=digest.hexdigest())

    def _warn_of_base(self) -> None:
        """Warn if the adapters were trained with another model, or another --base-dtype."""
        before = self._files.config.base_dtype
        now = self.config.base_dtype
        if self._files.base is not None and before != (now if self.config.is_quantized else None):
            warn(
                f"--adapter: '{self.config.adapter}' was trained beside a model in "
                f"{before or 'its own format'}, this run has it with {flag('base_dtype', now)}"
            )
        warn(*self._files.unknown_base(self.config.model))

    def load(self, ranks: Ranks) -> None:
        """Load the first weights into the ranks."""
        if self.weights is None:
            self.init(ranks)
            return

        def read(param: Param) -> np.ndarray | None:
            if self._files is not None and self._files.has(param):
                return self._files.read(param)
            has = not param.of_adapter and (param.first_row is not None or self.weights.has(param))
            return self.weights.read(param) if has else None

        ranks.load(read, Stored(self.weights.elements, self.weights.codes))

    def init(self, ranks: Ranks) -> None:
        def init(rank: Rank) -> None:
            zero = self.config.init_proj_to_zero
            rank.init(self.model, self.config.seed, zero_projections=zero)

        ranks.run("initializing weights", init)

    def check_checkpoint(self, reader: CheckpointReader) -> None:
        """Raise LlmqError if a checkpoint has other adapters, or adapters of another model."""
        saved = {name: reader.manifest.options.get(name) for name in ADAPTED_BY}
        before = TrainConfig(**{n: v for n, v in saved.items() if v}).normalized()

        for name in ADAPTED_BY:
            now, then = getattr(self.config, name), getattr(before, name)
            if now != then and not _same_adapters(
                self.model, replace(before, **{name: now}), before
            ):
                raise LlmqError(
                    f"checkpoint '{reader.path}' was made with {_said(name, then)}: continue it "
                    f"so, not with {_said(name, now)}"
                )
        made_on = BaseId.of(reader.manifest.base)
        if made_on is not None:
            check_same_base(f"checkpoint '{reader.path}'", made_on, self.base)

    def export(
        self,
        directory: Path,
        read: Callable[[Param], np.ndarray],
        tokenizer: Tokenizer | Path | None,
        made: TokenizerId | None,
        run: RunId,
    ) -> None:
        """Export the model, or the adapters. read: function that returns a parameter of the run.
        tokenizer: the tokenizer to write with the model. made: identity of the data's tokenizer."""
        config = self.config
        origin = {"made": made, "run": run, "hub": HubModel.of(config)}
        if self.adapters is None:
            stored = stored_as_trained(parse_dtype(config.model_dtype), self.model, config)
            export_model(
                directory, self.model, read, stored.dtype, tokenizer, source=self.exported,
                stored=stored, **origin,
            )  # fmt: skip
            return
        origin["base"], saved = self.base, AdapterConfig.of(config)
        export_adapter(directory, self.model, self.adapters, saved, read, tokenizer, **origin)
