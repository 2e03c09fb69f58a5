"""TrainConfig: every option of a training run with name, default, help and limits. The command
line, option files, the log and checkpoints are made from these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from llmq.arch.model_config import ModelConfig
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.data import DataOptions
from llmq.options.groups.memory import MemoryOptions
from llmq.options.groups.model import ModelOptions
from llmq.options.groups.optim import OptimOptions
from llmq.options.groups.parallel import ParallelOptions
from llmq.options.groups.precision import PrecisionOptions
from llmq.options.groups.rl import RlOptions
from llmq.options.groups.run import RunOptions
from llmq.options.option_types import (
    ADAPTERS_GROUP,
    POSITIONS_GROUP,
    SIZES_GROUP,
    Option,
    options_of,
)
from llmq.options.rule import Rules
from llmq.options.rules import RULES
from llmq.options.weight_storage import WeightStorage

Group = TypeVar("Group")


GROUPS = {
    "model": ModelOptions,
    "data": DataOptions,
    "batch": BatchOptions,
    "optim": OptimOptions,
    "precision": PrecisionOptions,
    "memory": MemoryOptions,
    "parallel": ParallelOptions,
    "rl": RlOptions,
    "run": RunOptions,
}
"""Classes of option groups, by their keys in option files."""


class StepOptions(NamedTuple):
    """The normalized groups of options that a training step reads."""

    model: ModelOptions
    batch: BatchOptions
    optim: OptimOptions
    precision: PrecisionOptions
    memory: MemoryOptions
    parallel: ParallelOptions


# A dataclass lists the fields of its last base first.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    RunOptions,
    RlOptions,
    ParallelOptions,
    MemoryOptions,
    PrecisionOptions,
    OptimOptions,
    BatchOptions,
    DataOptions,
    ModelOptions,
):
    """Options of one run. Build one with options_io.make_config, or directly and normalized().

    Commands, `Trainer` and the plan's searches use options of all groups here. Rooms below these
    receive `group(...)` or `for_step`.
    """

    def group(self, kind: type[Group]) -> Group:
        """Return the options of one group. kind: the group's class, such as MemoryOptions."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @property
    def for_step(self) -> StepOptions:
        """Groups of options that a training step reads."""
        return StepOptions(
            model=self.group(ModelOptions),
            batch=self.group(BatchOptions),
            optim=self.group(OptimOptions),
            precision=self.group(PrecisionOptions),
            memory=self.group(MemoryOptions),
            parallel=self.group(ParallelOptions),
        )

    @property
    def weight_storage(self) -> WeightStorage:
        """Memory and number formats of the blocks' weights."""
        return WeightStorage(self, self, self, self)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk of logits."""
        return self.micro_tokens // self.lmhead_chunks

    @property
    def scores_folder(self) -> Path | None:
        """Folder of the scores that the loss reads: --scores, or the folder that the run fills with
        scores of its first weights. None for a loss without scores."""
        if self.has_reference:
            return self.scores or self.checkpoint_dir / "reference"
        return self.scores if self.loss in ("kd", "weighted") else None

    def normalized(self, now: datetime | None = None) -> TrainConfig:
        """Return the options with implied values written out: spellings, formats, recomputation,
        %n, files. A second call changes nothing. now: start of the run in UTC, for the log's name.
        ConfigError for values of a wrong type."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, opt in OPTIONS.items():
            if values[name] is not None:
                values[name] = opt.convert(values[name])
        if values["log_file"] is None:
            start = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H_%M_%S")
            values["log_file"] = Path(f"logs/%n-{start}.json")
        for name in ("out_dir", "checkpoint_dir", "log_file"):
            values[name] = Path(str(values[name]).replace("%n", values["name"]))
        made = TrainConfig(**values)
        RULES.imply(made)
        return made

    def validate(self) -> TrainConfig:
        """Return self; ConfigError names a flag that is out of range or contradicts another."""
        for name, opt in OPTIONS.items():
            if getattr(self, name) is not None or _DEFAULTS[name] is not None:
                opt.check(getattr(self, name))
        RULES.check(self)
        return self

    def validate_with(self, model: ModelConfig) -> TrainConfig:
        """Return self after validate() and a check of the options against the model."""
        self.validate()
        RULES.check(self, model=model)
        return self

    def check_total(self, steps: int) -> None:
        """Raise ConfigError if the cooldown is longer than the run of `steps` steps."""
        RULES.check(self, total=steps)


_LAST_PANELS = (SIZES_GROUP, POSITIONS_GROUP, ADAPTERS_GROUP)


def options_with_rules(config_class: type, rules: Rules = RULES) -> dict[str, Option]:
    """Return the options by field name, in the order of --help, with help texts completed by
    rules."""
    found = options_of(config_class)
    names = sorted(found, key=lambda name: found[name].group in _LAST_PANELS)
    return {name: replace(found[name], help=rules.help(name, found[name].help)) for name in names}


OPTIONS: dict[str, Option] = options_with_rules(TrainConfig)
"""Options of TrainConfig by field name, in the order of --help."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

USUAL = (
    "model from_scratch vocab_size matmul_dtype lora_rank train_file eval_file packing batch_size "
    "seq_len grad_accumulation steps epochs eval_every_n_steps learning_rate warmup name "
    "continue_from device gpus"
).split()
"""Options of --help, which most runs use; --help-all shows all others."""

ONCE = ("download", "continue_from", "overwrite", "new_data", "force")
"""Options of a single command, which saved configurations leave out."""
