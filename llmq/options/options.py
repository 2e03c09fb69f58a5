"""TrainConfig: every option of a training run, its name, default, help and limits, from which the
command line, files of options, the log and checkpoints are made."""

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
    "run": RunOptions,
}
"""The classes of the groups, by the names that files of options may have them under."""


class StepOptions(NamedTuple):
    """The groups of options that a training step reads; normalized."""

    model: ModelOptions
    batch: BatchOptions
    optim: OptimOptions
    precision: PrecisionOptions
    memory: MemoryOptions
    parallel: ParallelOptions


# A dataclass takes the fields of its last base first.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    RunOptions,
    ParallelOptions,
    MemoryOptions,
    PrecisionOptions,
    OptimOptions,
    BatchOptions,
    DataOptions,
    ModelOptions,
):
    """Options of one run. Build one with options_io.make_config, or directly and normalized().

    Commands, `Trainer` and the plan's searches read and change options of any group here. The rooms
    below them receive `group(...)` or `for_step`.
    """

    def group(self, kind: type[Group]) -> Group:
        """The options of one group alone. kind: its class, such as MemoryOptions."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @property
    def for_step(self) -> StepOptions:
        """The groups of options that a training step reads."""
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
        """Tokens whose logits are made at a time."""
        return self.micro_tokens // self.lmhead_chunks

    @property
    def scores_folder(self) -> Path | None:
        """Folder of the scores that the loss reads, or None: that of --scores, or the folder that
        the run fills from its first weights."""
        if self.has_reference:
            return self.scores or self.checkpoint_dir / "reference"
        return self.scores if self.loss in ("kd", "weighted") else None

    def normalized(self, now: datetime | None = None) -> TrainConfig:
        """With what is implied written out: spellings, formats, recomputation, %n, files; once more
        changes nothing. now: the start of the run for the log's name, in UTC. ConfigError for
        values of a wrong type."""
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
        """Return self. validate(), and the options against the model they are for."""
        self.validate()
        RULES.check(self, model=model)
        return self

    def check_total(self, steps: int) -> None:
        """ConfigError if the cooldown is longer than the whole run, of so many steps."""
        RULES.check(self, total=steps)


_LAST_PANELS = (SIZES_GROUP, POSITIONS_GROUP, ADAPTERS_GROUP)


def options_with_rules(config_class: type, rules: Rules = RULES) -> dict[str, Option]:
    """How each field is set, by field name, in the order of --help, with what rules add to that."""
    found = options_of(config_class)
    names = sorted(found, key=lambda name: found[name].group in _LAST_PANELS)
    return {name: replace(found[name], help=rules.help(name, found[name].help)) for name in names}


OPTIONS: dict[str, Option] = options_with_rules(TrainConfig)
"""How each field of TrainConfig is set, by field name, in the order of --help."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

USUAL = (
    "model from_scratch vocab_size matmul_dtype lora_rank train_file eval_file packing batch_size "
    "seq_len grad_accumulation steps epochs eval_every_n_steps learning_rate warmup name "
    "continue_from device gpus"
).split()
"""Options that most runs are told with, which --help shows; the others are in --help-all."""

ONCE = ("download", "continue_from", "overwrite", "new_data", "force")
"""Options of one command, not of the run: the next command begins without them."""
