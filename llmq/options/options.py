"""TrainConfig: the options of one run, with what they imply and what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.base.layers import layer_set
from llmq.base.schedule import learning_rate
from llmq.options.adapters import (
    AdapterFields,
    check_adapters,
    check_adapters_with,
    implied_products,
    implied_values,
    multiplied_sizes,
)
from llmq.options.fields import FP8_DTYPES, SHAKESPEARE
from llmq.options.option_types import NONE, SPLIT, Option, named_pattern, options_of
from llmq.options.sizes import check_from_scratch
from llmq.options.train_files import split_weights

_CODES_MULTIPLE = 16  # 16 bytes, in every size of a product of 8-bit codes
_INT8_TERMS = (2**31 - 1) // 127**2  # of a sum of products of two codes, which has 32 bits
_INT8_WIDTH = 65536  # of a row that is quantized
FP8_BASES = ("e4m3", "nf4")  # whose weights can be multiplied as fp8 codes
_LEAST_EPSILON = 2.0**-126  # of AdamW: the smallest F32 that every GPU tells from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(AdapterFields):
    """Options of one run. Build one with options_io.make_config, or directly and normalized()."""

    def normalized(self, now: datetime | None = None) -> TrainConfig:
        """With what is implied written out: spellings, formats, recomputation, %n, files.

        now: the start of the run for the name of the log file, in UTC. Applying it again changes
        nothing. Raises ConfigError where a value has the wrong type.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, opt in OPTIONS.items():
            if values[name] is not None:
                values[name] = opt.convert(values[name])
        adapts = values["lora_rank"] or values["adapter"] is not None
        summed = "fp32" if adapts else values["model_dtype"]  # adapters are small
        for name in ("master_dtype", "grad_accum_dtype"):
            values[name] = values[name] or summed
        values |= implied_values(values)
        values["matmul_dtype"] = values["matmul_dtype"] or implied_products(values)
        for name in ("head_dtype", "mlp_dtype"):
            values[name] = values[name] or values["model_dtype"]
        values["gradient_dtype"] = values["gradient_dtype"] or values["matmul_dtype"]
        if values["steps"] < 0 and values["epochs"] is None:
            values["epochs"] = 1
        for implied, implying, least in _IMPLICATIONS:
            values[implied] = values[implied] or values[implying] >= least
        if values["eval_file"] is None:  # the default one is of the default training data
            default = values["train_file"] == (f"{SHAKESPEARE}/train.bin",)
            values["eval_file"] = f"{SHAKESPEARE}/eval.bin" if default else SPLIT
        if values["document_mask"] is None:
            values["document_mask"] = values["packing"] != "concat"
        if values["log_file"] is None:
            start = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H_%M_%S")
            values["log_file"] = Path(f"logs/%n-{start}.json")
        for name in ("out_dir", "checkpoint_dir", "log_file"):
            values[name] = Path(str(values[name]).replace("%n", values["name"]))
        return TrainConfig(**values)

    def validate(self) -> TrainConfig:
        """Return self; ConfigError names a flag that is out of range or contradicts another."""
        for name, opt in OPTIONS.items():
            if getattr(self, name) is not None or _DEFAULTS[name] is not None:
                opt.check(getattr(self, name))
        for flag, beta in (("--beta-1", self.beta_1), ("--beta-2", self.beta_2)):
            if beta >= 1:
                raise ConfigError(f"{flag}: must be less than 1, got {beta}")
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(
                f"--eval-fraction: must be more than 0 and less than 1, got {self.eval_fraction}"
            )
        if self.adam_epsilon < _LEAST_EPSILON:
            raise ConfigError(
                "--adam-epsilon: must be greater than 0 (in F32, at least 1.2e-38), else the "
                f"update of a weight without gradients is 0 / 0, got {self.adam_epsilon}"
            )
        if self.seq_len % 4:
            raise ConfigError(f"--seq-len: must be a multiple of 4, got {self.seq_len}")
        tokens = self.batch_size * self.seq_len
        if tokens % self.lmhead_chunks:
            raise ConfigError(
                f"--lmhead-chunks: {self.lmhead_chunks} does not divide the {tokens} tokens of a "
                "micro-step (--batch-size times --seq-len)"
            )
        if tokens // self.lmhead_chunks % 4:
            raise ConfigError(
                f"--lmhead-chunks: {self.lmhead_chunks} leaves {tokens // self.lmhead_chunks} of "
                f"{tokens} tokens for a chunk, which must be a multiple of 4"
            )
        if self.batch_size % self.attn_bwd_chunks and self.attn_bwd_chunks % self.batch_size:
            raise ConfigError(
                f"--attn-bwd-chunks: {self.attn_bwd_chunks} does not divide "
                f"--batch-size {self.batch_size}, and is no multiple of it"
            )
        for name in ("master_dtype", "grad_accum_dtype"):
            if self.model_dtype == "fp32" and getattr(self, name) == "bf16":
                flag = OPTIONS[name].flag
                raise ConfigError(f"{flag}: bf16 is too coarse for --model-dtype fp32, use fp32")
        split_weights(self.train_file)
        self._validate_matmul()
        self._validate_mlp()
        self._validate_memory()
        if self.steps >= 0 and self.epochs is not None:
            raise ConfigError("--epochs: excludes --steps, give one of them")
        if self.steps >= 0:
            self.check_total(self.steps)
        if self.init_proj_to_zero and not self.from_scratch:
            raise ConfigError("--init-proj-to-zero: needs --from-scratch")
        check_from_scratch(self)
        self._validate_checkpoints()
        check_adapters(self)
        if self.measure_scaling and self.debug_time_breakdown:
            raise ConfigError(
                "--measure-scaling: not with --debug-time-breakdown, with which steps take longer"
            )
        if self.device == "cpu" and self.attention == "cudnn":
            raise ConfigError("--attention: cudnn needs a GPU, but --device is cpu")
        return self

    @property
    def splits(self) -> bool:
        """Whether the validation data are a part of the training files."""
        return self.eval_pattern == SPLIT

    @property
    def eval_pattern(self) -> str:
        """What --eval-file says without a name; NONE where all its patterns have one."""
        return self._eval_patterns.get("", NONE)

    @property
    def eval_sets(self) -> dict[str, str]:
        """Named patterns of validation files beside it."""
        return {name: pattern for name, pattern in self._eval_patterns.items() if name}

    @property
    def _eval_patterns(self) -> dict[str, str]:
        given = self.eval_file if isinstance(self.eval_file, tuple) else (self.eval_file,)
        return dict(map(named_pattern, given))

    @property
    def validates(self) -> bool:
        """Whether there are validation files without a name."""
        return self.eval_pattern != NONE

    @property
    def train_patterns(self) -> list[str]:
        """The glob patterns of --train-file, without weights."""
        return split_weights(self.train_file)[0]

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """The weights of these patterns; None if they have none, or there is only one."""
        return split_weights(self.train_file)[1]

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run of so many."""
        return learning_rate(
            step,
            steps=steps,
            base=self.learning_rate,
            warmup=self.warmup,
            cooldown=self.cooldown,
            final_fraction=self.final_lr_fraction,
            schedule=self.lr_schedule,
        )

    def check_total(self, steps: int) -> None:
        """ConfigError if the cooldown is longer than the whole run, of so many steps."""
        if self.cooldown > steps:
            raise ConfigError(
                f"--cooldown: {self.cooldown} steps are more than the {steps} of the whole run: "
                "use fewer, or train for longer"
            )

    def _validate_matmul(self) -> None:
        """The products run in the model's format, or in 8 bits with output gradients in 8 bits."""
        if self.lora_rank and self.matmul_dtype == "e4m3" and self.base_dtype not in FP8_BASES:
            raise ConfigError(
                "--matmul-dtype: e4m3 needs --base-dtype e4m3 or nf4 beside adapters: no weight "
                "changes, so that one in a wider format would be memory for nothing"
            )
        legal = ("bf16", "e4m3", "int8") if self.model_dtype == "bf16" else (self.model_dtype,)
        if self.matmul_dtype not in legal:
            raise ConfigError(
                f"--matmul-dtype: {self.matmul_dtype} does not go with --model-dtype "
                f"{self.model_dtype}, use {' or '.join(legal)}"
            )
        for name in ("matmul_dtype", "gradient_dtype"):
            if getattr(self, name) == "int8" and self.gradient_dtype != self.matmul_dtype:
                raise ConfigError(
                    "--gradient-dtype: must be int8 with --matmul-dtype int8, and with that only, "
                    f"got {self.gradient_dtype} with {self.matmul_dtype}"
                )
        if self.matmul_dtype == "e4m3" and self.gradient_dtype not in FP8_DTYPES:
            raise ConfigError(
                f"--gradient-dtype: must be e4m3 or e5m2 with --matmul-dtype e4m3, got "
                f"{self.gradient_dtype}"
            )
        if self.matmul_dtype != "e4m3" and self.gradient_dtype != self.matmul_dtype:
            raise ConfigError(
                f"--gradient-dtype: {self.gradient_dtype} needs --matmul-dtype e4m3, which is "
                f"{self.matmul_dtype}"
            )
        if self.matmul_dtype != "e4m3" and self.head_dtype != self.model_dtype:
            raise ConfigError(
                f"--head-dtype: {self.head_dtype} does not go with --matmul-dtype "
                f"{self.matmul_dtype} and --model-dtype {self.model_dtype}"
            )
        if self.head_dtype not in (self.model_dtype, "e4m3"):
            raise ConfigError(
                f"--head-dtype: {self.head_dtype} does not go with --model-dtype "
                f"{self.model_dtype}, use {self.model_dtype} or e4m3"
            )
        if self.fp8_recipe == "delayed" and self.matmul_dtype != "e4m3":
            raise ConfigError("--fp8-recipe: delayed needs --matmul-dtype e4m3")

    def _validate_mlp(self) -> None:
        """Products write codes only with a scale that is known before them."""
        if self.mlp_dtype not in (self.model_dtype, "e4m3"):
            raise ConfigError(
                f"--mlp-dtype: {self.mlp_dtype} does not go with --model-dtype "
                f"{self.model_dtype}, use {self.model_dtype} or e4m3"
            )
        if self.mlp_dtype != "e4m3":
            return
        if self.lora_rank:
            raise ConfigError(
                "--mlp-dtype: e4m3 does not go with adapters, which add to what products write"
            )
        if self.matmul_dtype != "e4m3" or self.fp8_recipe != "delayed":
            raise ConfigError(
                "--mlp-dtype: e4m3 needs --matmul-dtype e4m3 and --fp8-recipe delayed: only fp8 "
                "products write codes, and only with a scale that they know beforehand"
            )

    def _validate_checkpoints(self) -> None:
        """What needs a checkpoint to go on from."""
        if self.guard == "rollback" and self.ckpt_interval <= 0:
            raise ConfigError(
                "--guard: rollback needs --ckpt-interval above 0, to have checkpoints to go back to"
            )
        if self.new_data and self.continue_from is None:
            raise ConfigError("--new-data: needs --continue")

    def _validate_memory(self) -> None:
        """Options that cannot do anything without another one."""
        for name in ("persistent_quants", "offload_quants"):
            if self.lora_rank and getattr(self, name):
                raise ConfigError(
                    f"{OPTIONS[name].flag}: beside adapters the model is kept as --base-dtype "
                    "says; --shard-weights --offload-master keeps it in host memory"
                )
        for name, needs, has in (
            ("persistent_quants", "--matmul-dtype e4m3", self.matmul_dtype == "e4m3"),
            ("persistent_quants", "--shard-weights", self.shard_weights),
            ("offload_quants", "--persistent-quants", self.persistent_quants),
            ("offload_gradients", "--shard-gradients or --zero-level 2", self.shard_gradients),
        ):
            if getattr(self, name) and not has:
                raise ConfigError(f"{OPTIONS[name].flag}: needs {needs}")

    def validate_with(self, model: ModelConfig) -> TrainConfig:
        """Return self. validate(), and the options against the model they are for."""
        self.validate()
        if self.seq_len > model.max_positions:
            raise ConfigError(
                f"--seq-len: {self.seq_len} exceeds the model's {model.max_positions} positions"
            )
        if self.attn_bwd_chunks > self.batch_size * model.num_heads:
            raise ConfigError(
                f"--attn-bwd-chunks: {self.attn_bwd_chunks} is more than --batch-size "
                f"{self.batch_size} times the model's {model.num_heads} query heads"
            )
        try:
            layer_set(self.recompute_layers, model.num_layers)
        except ValueError as error:
            raise ConfigError(f"--recompute-layers: {error}") from None
        chunk = self.batch_size * self.seq_len // self.lmhead_chunks
        if self.head_dtype == "e4m3" and chunk % _CODES_MULTIPLE:
            raise ConfigError(
                f"--head-dtype: e4m3 needs multiples of {_CODES_MULTIPLE}, but --lmhead-chunks "
                f"{self.lmhead_chunks} leaves {chunk} tokens for a chunk"
            )
        check_adapters_with(self, model)
        if self.mlp_dtype == "e4m3" and not model.gated:
            raise ConfigError(
                "--mlp-dtype: e4m3 is for MLPs with a gate (SwiGLU, GeGLU), and this model's has "
                "none"
            )
        if self.matmul_dtype in ("e4m3", "int8"):
            self._check_sizes_of_codes(model)
        return self

    def _check_sizes_of_codes(self, model: ModelConfig) -> None:
        tokens = self.batch_size * self.seq_len
        sizes = {"tokens of a micro-step": tokens, **multiplied_sizes(model)}
        dtype = self.matmul_dtype
        for name, size in sizes.items():
            if size % _CODES_MULTIPLE:
                raise ConfigError(
                    f"--matmul-dtype: {dtype} needs multiples of {_CODES_MULTIPLE}, but the {name} "
                    f"is {size}"
                )
        if dtype != "int8":
            return
        if tokens > _INT8_TERMS:
            raise ConfigError(
                f"--matmul-dtype: int8 sums over at most {_INT8_TERMS} tokens of a micro-step, but "
                f"there are {tokens}: use a smaller --batch-size"
            )
        width = model.intermediate_size * (2 if model.gated else 1)
        if width > _INT8_WIDTH:
            raise ConfigError(
                f"--matmul-dtype: int8 takes matrices of at most {_INT8_WIDTH} rows, but the MLP's "
                f"first has {width}"
            )


OPTIONS: dict[str, Option] = options_of(TrainConfig)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
"""How each field of TrainConfig is set, by field name, in the order of --help."""

ONCE = ("download", "continue_from", "overwrite", "new_data", "force")
"""Options of one command, not of the run: the next command begins without them."""

# What is on where another option is, or has at least this value.
_IMPLICATIONS = (
    ("recompute_att", "recompute_block", True),
    ("recompute_ffn", "recompute_block", True),
    ("recompute_norm", "recompute_block", True),
    ("recompute_qkv", "recompute_att", True),
    ("recompute_swiglu", "recompute_ffn", True),
    ("shard_gradients", "zero_level", 2),
    ("shard_weights", "zero_level", 3),
)


def implied_by(name: str, config: TrainConfig) -> str | None:
    """The flag that switches this option on in a normalized configuration, if one does.

    The one at the beginning, where another one follows from it.
    """
    for implied, implying, least in _IMPLICATIONS:
        value = getattr(config, implying)
        if implied == name and value >= least:
            option = OPTIONS[implying]
            own = option.flag if value is True else f"{option.flag} {value}"
            return implied_by(implying, config) or own
    return None
