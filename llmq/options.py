"""TrainConfig: every option of a training run. The command line is generated from its fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llmq.config import ModelConfig
from llmq.errors import ConfigError
from llmq.option_types import (
    Option,
    option,
    options_of,
    parse_continue,
    parse_dtype_name,
    parse_size,
    parse_word,
)
from llmq.schedule import SCHEDULES

_DTYPES = ("bf16", "fp32")
_FP8 = ("e4m3", "e5m2")
_FP8_MULTIPLE = 16  # 16 bytes, in every size of an fp8 product
_SHAKESPEARE = "data/tiny-shakespeare-qwen"
_MODEL, _DATA, _OPTIMIZER = "Model", "Data and shape", "Optimizer and schedule"
_OUTPUT, _MEMORY, _MACHINE = "Checkpoints and logs", "Memory", "Machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Options of one run. Build one with options_io.make_config, or directly and normalized()."""

    model: str = option(
        _MODEL,
        ".",
        "Directory, Hugging Face repository in the local cache, or preset with --from-scratch",
    )
    from_scratch: bool = option(_MODEL, False, "Start from random weights")
    init_proj_to_zero: bool = option(
        _MODEL, False, "Start the attention-out and MLP-down matrices at zero"
    )
    model_dtype: str = option(
        _MODEL,
        "bf16",
        "Format of weights and activations",
        parse=parse_dtype_name,
        choices=_DTYPES,
    )
    master_dtype: str | None = option(
        _MODEL,
        None,
        "Format of the weights the optimizer updates; as --model-dtype if not given",
        parse=parse_dtype_name,
        choices=_DTYPES,
    )
    grad_accum_dtype: str | None = option(
        _MODEL,
        None,
        "Format in which gradients are summed; as --model-dtype if not given",
        parse=parse_dtype_name,
        choices=_DTYPES,
    )
    matmul_dtype: str | None = option(
        _MODEL,
        None,
        "Format in which the products of the blocks run; as --model-dtype if not given",
        parse=parse_dtype_name,
        choices=(*_DTYPES, "e4m3"),
    )
    gradient_dtype: str | None = option(
        _MODEL,
        None,
        "Format of output gradients in these products; as --matmul-dtype if not given",
        parse=parse_dtype_name,
        choices=(*_DTYPES, *_FP8),
    )
    seed: int = option(
        _MODEL, 42, "Seed of the initial weights and of stochastic rounding", min=0, max=2**32 - 1
    )

    train_file: str = option(
        _DATA, f"{_SHAKESPEARE}/train.bin", "Training token files, a glob pattern"
    )
    eval_file: str = option(
        _DATA, f"{_SHAKESPEARE}/eval.bin", "Validation token files, a glob pattern"
    )
    train_seed: int = option(
        _DATA, 0x83B45442, "Seed of the order of the training data", min=0, max=2**64 - 1
    )
    eval_seed: int = option(
        _DATA, 0x384B4524, "Seed of the order of the validation data", min=0, max=2**64 - 1
    )
    batch_size: int = option(_DATA, 4, "Sequences per GPU and micro-step", alias="batch", min=1)
    seq_len: int = option(
        _DATA, 1024, "Tokens per sequence, a multiple of 4", alias="seq-length", min=4
    )
    grad_accumulation: int = option(_DATA, 4, "Micro-steps per optimizer step", min=1)
    steps: int = option(
        _DATA,
        -1,
        "Optimizer steps in all, resumed ones included; -1: as many as --epochs gives",
        min=-1,
    )
    epochs: int | None = option(
        _DATA, None, "Passes over the training data, 1 if neither this nor --steps is given", min=1
    )
    eval_every_n_steps: int = option(
        _DATA, 100, "Steps between validations; 0 or less: only at the end"
    )
    eval_num_steps: int = option(
        _DATA, 100, "Batches of a periodic validation; the last one uses all data", min=1
    )

    learning_rate: float = option(_OPTIMIZER, 1e-5, "Highest learning rate", alias="lr", min=0)
    warmup: int = option(_OPTIMIZER, 0, "Steps of linear warm-up", min=0)
    cooldown: int = option(_OPTIMIZER, 0, "Steps of the final anneal to zero", min=0)
    final_lr_fraction: float = option(
        _OPTIMIZER, 1.0, "Where cosine and linear end, as a fraction of the learning rate", min=0
    )
    lr_schedule: str = option(
        _OPTIMIZER,
        "cosine",
        "Course of the learning rate between warm-up and cooldown",
        parse=parse_word,
        choices=SCHEDULES,
    )
    beta_1: float = option(_OPTIMIZER, 0.9, "AdamW: decay of the first moment", min=0)
    beta_2: float = option(_OPTIMIZER, 0.95, "AdamW: decay of the second moment", min=0)
    adam_epsilon: float = option(
        _OPTIMIZER, 1e-8, "AdamW: added to the root of the second moment", min=0
    )
    opt_m_dtype: str = option(
        _OPTIMIZER,
        "fp32",
        "AdamW: format of the first moment",
        parse=parse_dtype_name,
        choices=_DTYPES,
    )
    opt_v_dtype: str = option(
        _OPTIMIZER,
        "fp32",
        "AdamW: format of the second moment",
        parse=parse_dtype_name,
        choices=_DTYPES,
    )
    weight_decay: float = option(_OPTIMIZER, 0.1, "AdamW: decay of the matrices", min=0)
    grad_clip: float = option(
        _OPTIMIZER, 1.0, "Longest gradient norm, longer ones are scaled down; 0: off", min=0
    )
    z_loss: float = option(
        _OPTIMIZER, 0.0, "Weight of the squared log-sum-exp of the logits in the loss", min=0
    )

    name: str = option(_OUTPUT, "llmq", "Name of the run, replaces %n in the paths below")
    out_dir: Path = option(_OUTPUT, Path("output/%n"), "Directory of the final model")
    checkpoint_dir: Path = option(_OUTPUT, Path("ckpt/%n"), "Directory of checkpoints")
    ckpt_interval: int = option(_OUTPUT, 100, "Steps between checkpoints; 0 or less: none")
    ckpt_keep_n: int = option(
        _OUTPUT, -1, "Checkpoints to keep, older ones are deleted; 0 or less: all"
    )
    ckpt_major: int = option(
        _OUTPUT, -1, "Checkpoints whose step is a multiple of this are never deleted"
    )
    save_training_state: bool = option(_OUTPUT, True, "Write a checkpoint at the end too")
    continue_from: str | None = option(
        _OUTPUT,
        None,
        "Resume: the newest checkpoint, or the one of this step or path",
        flag="continue",
        parse=parse_continue,
    )
    new_data: bool = option(
        _OUTPUT, False, "With --continue: start the data anew, not where the checkpoint was"
    )
    log_file: Path | None = option(
        _OUTPUT, None, "JSON log; logs/%n-DATE.json with the time of the start if not given"
    )
    log_gpu_util: int = option(_OUTPUT, 25, "Steps between GPU records; 0: none", min=0)
    debug_log_allocations: int = option(
        _OUTPUT, -1, "Print every allocation of at least this many MiB; -1: none", min=-1
    )
    debug_time_breakdown: bool = option(_OUTPUT, False, "Print the time of each part of each step")

    recompute_swiglu: bool = option(
        _MEMORY, False, "In backward, compute the activation of the MLP again"
    )
    recompute_norm: bool = option(_MEMORY, False, "In backward, compute the norms again")
    recompute_ffn: bool = option(
        _MEMORY, False, "In backward, compute the MLP again; implies --recompute-swiglu"
    )
    recompute_qkv: bool = option(
        _MEMORY, False, "In backward, compute queries, keys and values again"
    )
    recompute_att: bool = option(
        _MEMORY, False, "In backward, compute attention again; implies --recompute-qkv"
    )
    recompute_block: bool = option(
        _MEMORY, False, "In backward, compute the whole block again; implies all of the above"
    )
    lmhead_chunks: int = option(_MEMORY, 1, "Parts in which logits are made; divides B*T", min=1)
    attn_bwd_chunks: int = option(
        _MEMORY, 1, "Parts of the backward pass of attention; divides the batch size", min=1
    )
    memory_limit: int | None = option(
        _MEMORY, None, "Use at most this much memory per device", parse=parse_size, min=1
    )

    device: str = option(
        _MACHINE,
        "auto",
        "Where to run; auto: on GPUs if there are any",
        parse=parse_word,
        choices=("auto", "cpu", "cuda"),
    )
    gpus: int = option(
        _MACHINE,
        0,
        "GPUs to use (on the CPU: threads, as if they were GPUs); 0: all GPUs, one thread",
        min=0,
    )
    use_cuda_graphs: bool = option(_MACHINE, True, "Record the GPU work once and replay it")
    attention: str = option(
        _MACHINE,
        "auto",
        "Attention kernels; auto: the faster ones that work here",
        parse=parse_word,
        choices=("auto", "cudnn", "native"),
    )
    tune: bool = option(_MACHINE, True, "Time the candidates for each matrix product at the start")

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
        if self.steps >= 0 and self.epochs is not None:
            raise ConfigError("--epochs: excludes --steps, give one of them")
        if self.init_proj_to_zero and not self.from_scratch:
            raise ConfigError("--init-proj-to-zero: needs --from-scratch")
        if self.new_data and self.continue_from is None:
            raise ConfigError("--new-data: needs --continue")
        if self.device == "cpu" and self.attention == "cudnn":
            raise ConfigError("--attention: cudnn needs a GPU, but --device is cpu")
        return self

    def _validate_matmul(self) -> None:
        """The products run in the model's format, or in fp8 with fp8 output gradients."""
        legal = ("bf16", "e4m3") if self.model_dtype == "bf16" else (self.model_dtype,)
        if self.matmul_dtype not in legal:
            raise ConfigError(
                f"--matmul-dtype: {self.matmul_dtype} does not go with --model-dtype "
                f"{self.model_dtype}, use {' or '.join(legal)}"
            )
        if self.matmul_dtype == "e4m3" and self.gradient_dtype not in _FP8:
            raise ConfigError(
                f"--gradient-dtype: must be e4m3 or e5m2 with --matmul-dtype e4m3, got "
                f"{self.gradient_dtype}"
            )
        if self.matmul_dtype != "e4m3" and self.gradient_dtype != self.matmul_dtype:
            raise ConfigError(
                f"--gradient-dtype: {self.gradient_dtype} needs --matmul-dtype e4m3, which is "
                f"{self.matmul_dtype}"
            )

    def validate_with(self, model: ModelConfig) -> TrainConfig:
        """Return self. validate(), and the options against the model they are for."""
        self.validate()
        if self.seq_len > model.max_positions:
            raise ConfigError(
                f"--seq-len: {self.seq_len} exceeds the model's {model.max_positions} positions"
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
        return lines


OPTIONS: dict[str, Option] = options_of(TrainConfig)
"""How each field of TrainConfig is set, by field name, in the order of --help."""

_IMPLICATIONS = (
    ("recompute_block", "recompute_att"),
    ("recompute_block", "recompute_ffn"),
    ("recompute_block", "recompute_norm"),
    ("recompute_att", "recompute_qkv"),
    ("recompute_ffn", "recompute_swiglu"),
)
