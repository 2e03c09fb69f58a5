"""TrainConfig: the options of one run, with what they imply and what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llmq.config import ModelConfig
from llmq.errors import ConfigError
from llmq.option_fields import FP8_DTYPES, Fields
from llmq.option_types import Option, layer_set, options_of

_FP8_MULTIPLE = 16  # 16 bytes, in every size of an fp8 product
_DEFAULTS = Fields()
_LEAST_EPSILON = 2.0**-126  # of AdamW: the smallest F32 that every GPU tells from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Fields):
    """Options of one run. Build one with options_io.make_config, or directly and normalized()."""

    def normalized(self, now: datetime | None = None) -> TrainConfig:
        """With what is implied written out: spellings, formats, recomputation, %n, the log file.

        now: the start of the run for the name of the log file, in UTC. Applying it again changes
        nothing. Raises ConfigError where a value has the wrong type.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, opt in OPTIONS.items():
            if values[name] is not None:
                values[name] = opt.convert(values[name])
        values["master_dtype"] = values["master_dtype"] or values["model_dtype"]
        values["grad_accum_dtype"] = values["grad_accum_dtype"] or values["model_dtype"]
        values["matmul_dtype"] = values["matmul_dtype"] or values["model_dtype"]
        values["gradient_dtype"] = values["gradient_dtype"] or values["matmul_dtype"]
        values["head_dtype"] = values["head_dtype"] or values["model_dtype"]
        values["shard_gradients"] = values["shard_gradients"] or values["zero_level"] >= 2
        values["shard_weights"] = values["shard_weights"] or values["zero_level"] == 3
        if values["steps"] < 0 and values["epochs"] is None:
            values["epochs"] = 1
        for implying, implied in _IMPLICATIONS:
            values[implied] = values[implied] or values[implying]
        if values["log_file"] is None:
            start = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H_%M")
            values["log_file"] = Path(f"logs/%n-{start}.json")
        for name in ("out_dir", "checkpoint_dir", "log_file"):
            values[name] = Path(str(values[name]).replace("%n", values["name"]))
        return TrainConfig(**values)

    def validate(self) -> TrainConfig:
        """Return self; ConfigError names a flag that is out of range or contradicts another."""
        for name, opt in OPTIONS.items():
            if getattr(self, name) is not None:
                opt.check(getattr(self, name))
        for flag, beta in (("--beta-1", self.beta_1), ("--beta-2", self.beta_2)):
            if beta >= 1:
                raise ConfigError(f"{flag}: must be less than 1, got {beta}")
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
        if self.batch_size % self.attn_bwd_chunks:
            raise ConfigError(
                f"--attn-bwd-chunks: {self.attn_bwd_chunks} does not divide "
                f"--batch-size {self.batch_size}"
            )
        for flag, dtype in (
            ("--master-dtype", self.master_dtype),
            ("--grad-accum-dtype", self.grad_accum_dtype),
        ):
            if self.model_dtype == "fp32" and dtype == "bf16":
                raise ConfigError(f"{flag}: bf16 is too coarse for --model-dtype fp32, use fp32")
        self._validate_matmul()
        self._validate_memory()
        if self.steps >= 0 and self.epochs is not None:
            raise ConfigError("--epochs: excludes --steps, give one of them")
        if self.steps >= 0:
            self.check_total(self.steps)
        if self.init_proj_to_zero and not self.from_scratch:
            raise ConfigError("--init-proj-to-zero: needs --from-scratch")
        if self.new_data and self.continue_from is None:
            raise ConfigError("--new-data: needs --continue")
        if self.device == "cpu" and self.attention == "cudnn":
            raise ConfigError("--attention: cudnn needs a GPU, but --device is cpu")
        return self

    def check_total(self, steps: int) -> None:
        """ConfigError if the cooldown is longer than the whole run, of so many steps."""
        if self.cooldown > steps:
            raise ConfigError(
                f"--cooldown: {self.cooldown} steps are more than the {steps} of the whole run: "
                "use fewer, or train for longer"
            )

    def _validate_matmul(self) -> None:
        """The products run in the model's format, or in fp8 with fp8 output gradients."""
        legal = ("bf16", "e4m3") if self.model_dtype == "bf16" else (self.model_dtype,)
        if self.matmul_dtype not in legal:
            raise ConfigError(
                f"--matmul-dtype: {self.matmul_dtype} does not go with --model-dtype "
                f"{self.model_dtype}, use {' or '.join(legal)}"
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

    def _validate_memory(self) -> None:
        """Options that cannot do anything without another one."""
        fp8 = self.matmul_dtype == "e4m3"
        for flag, given, needs, has in (
            ("--persistent-quants", self.persistent_quants, "--matmul-dtype e4m3", fp8),
            ("--persistent-quants", self.persistent_quants, "--shard-weights", self.shard_weights),
            (
                "--offload-quants",
                self.offload_quants,
                "--persistent-quants",
                self.persistent_quants,
            ),
            (
                "--offload-gradients",
                self.offload_gradients,
                "--shard-gradients or --zero-level 2",
                self.shard_gradients,
            ),
        ):
            if given and not has:
                raise ConfigError(f"{flag}: needs {needs}")

    def validate_with(self, model: ModelConfig) -> TrainConfig:
        """Return self. validate(), and the options against the model they are for."""
        self.validate()
        if self.seq_len > model.max_positions:
            raise ConfigError(
                f"--seq-len: {self.seq_len} exceeds the model's {model.max_positions} positions"
            )
        try:
            layer_set(self.recompute_layers, model.num_layers)
        except ValueError as error:
            raise ConfigError(f"--recompute-layers: {error}") from None
        chunk = self.batch_size * self.seq_len // self.lmhead_chunks
        if self.head_dtype == "e4m3" and chunk % _FP8_MULTIPLE:
            raise ConfigError(
                f"--head-dtype: e4m3 needs multiples of {_FP8_MULTIPLE}, but --lmhead-chunks "
                f"{self.lmhead_chunks} leaves {chunk} tokens for a chunk"
            )
        if self.matmul_dtype == "e4m3":
            sizes = {
                "tokens of a micro-step": self.batch_size * self.seq_len,
                "hidden_size": model.hidden_size,
                "intermediate_size": model.intermediate_size,
                "width of the query heads": model.num_heads * model.head_dim,
                "width of queries, keys and values": model.qkv_channels,
            }
            for name, size in sizes.items():
                if size % _FP8_MULTIPLE:
                    raise ConfigError(
                        f"--matmul-dtype: e4m3 needs multiples of {_FP8_MULTIPLE}, but the {name} "
                        f"is {size}"
                    )
        return self

    def warnings(self) -> list[str]:
        """One line for every option that has no effect beside the others."""
        lines = []
        if self.ckpt_major > 0 and self.ckpt_keep_n <= 0:
            lines.append("--ckpt-major has no effect without --ckpt-keep-n: nothing is deleted")
        if self.final_lr_fraction != 1 and self.lr_schedule == "wsd":
            lines.append("--final-lr-fraction has no effect with --lr-schedule wsd")
        if 0 <= self.steps < self.warmup + self.cooldown:
            lines.append(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} do not fit into "
                f"--steps {self.steps}"
            )
        on_cpu = [f"{flag} has no effect with --device cpu" for flag in self._idle_on_cpu()]
        return on_cpu + self._but_on_cpu(lines + self._memory_warnings())

    def _idle_on_cpu(self) -> list[str]:
        """Options that are about GPUs, with their values; [] unless --device is cpu."""
        idle = {
            "--no-tune": not self.tune,
            "--no-use-cuda-graphs": not self.use_cuda_graphs,
            f"--attention {self.attention}": self.attention != "auto",
            f"--fp8-fast-accumulation {self.fp8_fast_accumulation}": (
                self.fp8_fast_accumulation != _DEFAULTS.fp8_fast_accumulation
            ),
            "--write-combined": self.write_combined,
            "--memcpy-all-gather": self.memcpy_all_gather,
            "--memcpy-send-recv": self.memcpy_send_recv,
            f"--p2p {self.p2p}": self.p2p != "auto",
            f"--log-gpu-util {self.log_gpu_util}": self.log_gpu_util
            not in (0, _DEFAULTS.log_gpu_util),
        }
        return [flag for flag, given in idle.items() if given and self.device == "cpu"]

    def _but_on_cpu(self, lines: list[str]) -> list[str]:
        """The lines about other options than those that have no effect on the CPU at all."""
        told = {flag.split()[0] for flag in self._idle_on_cpu()}
        return [line for line in lines if line.split()[0] not in told]

    def _memory_warnings(self) -> list[str]:
        optimizer = self.offload_master or self.offload_opt_m or self.offload_opt_v
        offload = optimizer or self.offload_gradients or self.offload_quants
        separate = (
            self.matmul_dtype == "e4m3"
            or self.shard_weights
            or self.master_dtype != self.model_dtype
        )
        recomputes = any(
            getattr(self, name)
            for name in OPTIONS
            if name.startswith("recompute_") and name != "recompute_layers"
        )
        idle = (
            ("--zero-level 0", "is the same as 1", self.zero_level == 0),
            (
                "--offload-master",
                "has no effect: the optimizer updates the weights that the products read; it has "
                "one with --shard-weights or --matmul-dtype e4m3",
                self.offload_master and not separate,
            ),
            (
                "--use-zero-copy",
                "has no effect without --offload-master, -opt-m, -opt-v or -gradients",
                self.use_zero_copy and not (optimizer or self.offload_gradients),
            ),
            (
                "--write-combined",
                "has no effect without an --offload option beside --offload-residual",
                self.write_combined and not offload,
            ),
            (
                "--memcpy-send-recv",
                "has no effect without --all-to-all-reduce",
                self.memcpy_send_recv and not self.all_to_all_reduce,
            ),
            (
                "--recompute-layers",
                "has no effect without a --recompute option",
                self.recompute_layers != "all" and not recomputes,
            ),
            (
                "--debug-log-abs-max",
                "has no effect without --matmul-dtype e4m3",
                self.debug_log_abs_max > 0 and self.matmul_dtype != "e4m3",
            ),
            (
                "--no-keep-transposed",
                "has no effect without --matmul-dtype e4m3",
                not self.keep_transposed and self.matmul_dtype != "e4m3",
            ),
            (
                "--fp8-fast-accumulation",
                "has no effect without --matmul-dtype e4m3",
                self.fp8_fast_accumulation != _DEFAULTS.fp8_fast_accumulation
                and self.matmul_dtype != "e4m3",
            ),
        )
        return [f"{flag} {problem}" for flag, problem, applies in idle if applies]

    def rank_warnings(self, world_size: int) -> list[str]:
        """One line for every option that has no effect with this number of ranks."""
        lines = []
        if world_size == 1:
            idle = {
                "--memcpy-all-gather": self.memcpy_all_gather,
                "--memcpy-send-recv": self.memcpy_send_recv,
                "--all-to-all-reduce": self.all_to_all_reduce,
                "--measure-scaling": self.measure_scaling,
                f"--p2p {self.p2p}": self.p2p != "auto",
            }
            lines = [f"{flag} has no effect with one GPU" for flag, given in idle.items() if given]
            lines += self._one_rank_sharding_warnings()
        streams = self.shard_weights and (world_size > 1 or self._why_weights_stay() is None)
        if self.matmul_dtype == "e4m3" and streams and not self.keep_transposed:
            lines.append("--no-keep-transposed has no effect with --shard-weights: it is implied")
        return self._but_on_cpu(lines)

    def _why_weights_stay(self) -> str | None:
        """Why --shard-weights does nothing with one rank; None where it does something."""
        if self.matmul_dtype == "e4m3":
            resident = self.persistent_quants and not self.offload_quants
            return "with --persistent-quants and without --offload-quants" if resident else None
        if self.master_dtype != self.model_dtype:
            return f"with --master-dtype {self.master_dtype}"
        return None if self.offload_master else "without --offload-master"

    def _one_rank_sharding_warnings(self) -> list[str]:
        """What --zero-level implies counts as one option, which may do something in part."""
        weights = self._why_weights_stay()
        gradients = None if self.offload_gradients else "without --offload-gradients"
        level, idle = self.zero_level, {}
        if self.shard_weights and level < 3:
            idle["--shard-weights"] = weights
        if self.shard_gradients and level < 2:
            idle["--shard-gradients"] = gradients
        if level == 2:
            idle["--zero-level 2"] = gradients
        if level == 3:
            idle["--zero-level 3"] = gradients and weights and f"{gradients} and {weights}"
        return [f"{flag} has no effect with one GPU {why}" for flag, why in idle.items() if why]


OPTIONS: dict[str, Option] = options_of(TrainConfig)
"""How each field of TrainConfig is set, by field name, in the order of --help."""

_IMPLICATIONS = (
    ("recompute_block", "recompute_att"),
    ("recompute_block", "recompute_ffn"),
    ("recompute_block", "recompute_norm"),
    ("recompute_att", "recompute_qkv"),
    ("recompute_ffn", "recompute_swiglu"),
)
