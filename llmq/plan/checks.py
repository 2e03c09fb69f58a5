"""Whether a machine can compute a run at all, and by which attention."""

from __future__ import annotations

import functools
from contextlib import closing

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.model.attention_choice import directions
from llmq.ops.attention import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from llmq.ops.common import MAX_COLUMNS
from llmq.ops.reduce import MAX_PARTS
from llmq.options.options import TrainConfig
from llmq.runtime import cudnn
from llmq.runtime.device import DeviceSpec
from llmq.runtime.machine import Machine
from llmq.state.placement import shards_of

CHANNEL_MULTIPLE = 8  # 16-byte vectors of BF16
FP8_CAPABILITY = 89  # Ada is the first with fp8 tensor cores


def check_machine(config: TrainConfig, model: ModelConfig, machine: Machine) -> None:
    """ConfigError for formats and sizes that the machine cannot compute."""
    capability, name = machine.spec.capability, machine.spec.name
    if machine.kind == "cuda" and config.matmul_dtype == "e4m3" and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--matmul-dtype: e4m3 needs compute capability {FP8_CAPABILITY / 10}, {name} has "
            f"{capability / 10}: {instead_of_fp8(config)}"
        )
    check_machines(config, machine)
    check_processes(config, machine)
    check_sizes(model, machine)


def instead_of_fp8(config: TrainConfig) -> str:
    """What to take on a card without fp8. 8-bit bases imply their products' format."""
    if config.is_quantized and config.base_dtype == "e4m3":
        return "use --base-dtype int8, or --matmul-dtype bf16"
    return "use int8 or bf16"


def check_machines(config: TrainConfig, machine: Machine) -> None:
    """ConfigError for machines among which nothing can be divided as it is asked for."""
    world = machine.world
    counts = world.ranks_of_machines
    if config.shard_over == "machine" and len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on '{name}'" for name, count in counts.items())
        raise ConfigError(
            f"--shard-over machine: every machine must have as many GPUs, there are {found}: give "
            "--shard-over world, or another --gpus"
        )
    shards = shards_of(config, world.size, world.num_machines)
    if config.all_to_all_reduce and shards > MAX_PARTS:
        raise ConfigError(
            f"--all-to-all-reduce: sums what {MAX_PARTS} GPUs have, and there are {shards}: leave "
            "it out" + (", or give --shard-over machine" if world.num_machines > 1 else "")
        )


def check_processes(config: TrainConfig, machine: Machine) -> None:
    """ConfigError for what GPUs of several processes cannot do together."""
    world = machine.world
    shards = shards_of(config, world.size, world.num_machines)
    if shards == world.count or machine.kind == "host":
        return
    copies = {
        "--memcpy-all-gather": config.memcpy_all_gather,
        "--memcpy-send-recv": config.memcpy_send_recv and config.all_to_all_reduce,
    }
    for flag, given in copies.items():
        if given:
            raise ConfigError(
                f"{flag}: copies reach the GPUs of one process, and there are "
                f"{len(world.counts)}: leave it out, so that NCCL does this"
            )


def check_sizes(model: ModelConfig, machine: Machine) -> None:
    """ConfigError for sizes that no device can compute, or only the CPU device."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model, name)
        if size % CHANNEL_MULTIPLE:
            raise ConfigError(
                f"the model's {name} is {size}; it must be a multiple of {CHANNEL_MULTIPLE}"
            )
    if model.hidden_size > MAX_COLUMNS:
        raise ConfigError(
            f"the model's hidden_size is {model.hidden_size}; it must be at most {MAX_COLUMNS}"
        )
    widths = [n * model.head_dim for n in (model.num_heads, model.num_kv_heads)]
    if model.arch.wide_qk_norm and (max(widths) > MAX_COLUMNS or any(n % 8 for n in widths)):
        raise ConfigError(
            f"the model has {widths[0]} query and {widths[1]} key channels; where they are "
            f"normalized together they must be multiples of 8 up to {MAX_COLUMNS}"
        )
    on_gpu = machine.kind == "cuda"
    if on_gpu and (model.head_dim % HEAD_DIM_MULTIPLE or model.head_dim > MAX_HEAD_DIM):
        raise ConfigError(
            f"the model's head_dim is {model.head_dim}; on a GPU it must be a multiple of "
            f"{HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}: use --device cpu"
        )


def _cudnn_refuses(config: TrainConfig, model: ModelConfig, spec: DeviceSpec) -> str | None:
    """Why cuDNN cannot compute the model's attention on this GPU; None if it can."""
    if config.document_mask:
        return "it knows no documents within a sequence, which --document-mask asks for"
    return cudnn.unsupported(spec.capability, parse_dtype(config.model_dtype), model.head_dim)


def installed_attention(config: TrainConfig, model: ModelConfig, spec: DeviceSpec) -> str:
    """As attention_backend on a GPU where cuDNN is taken to be installed."""
    return "native" if _cudnn_refuses(config, model, spec) is not None else config.attention


def attention_backend(config: TrainConfig, model: ModelConfig, machine: Machine) -> str:
    """What --attention means here: "native" or "cudnn" for all, or "auto", see directions.

    Where cuDNN is missing or refuses, ConfigError if it is asked for, else native and a warning.
    """
    required = config.attention == "cudnn"
    if required and machine.kind == "host":
        raise ConfigError("--attention cudnn: it needs a GPU")
    if config.attention == "native" or machine.kind == "host":
        return "native"
    reason = _cudnn_refuses(config, model, machine.spec)
    if reason is not None:
        if required:
            raise ConfigError(f"--attention cudnn: {reason}; {cudnn.NATIVE}")
        return "native"
    sizes = (config.batch_size, config.seq_len, model.num_heads, model.num_kv_heads, model.head_dim)
    try:
        with closing(cudnn.CudnnAttention(0)) as library:
            for window in model.windows:
                case = (config.attention, model.head_dim, config.seq_len, window)
                _, ways = directions(*case, machine.spec.capability)
                for parts in {1, config.attn_bwd_chunks}:  # what the plan chooses is between them
                    library.check(*sizes, parts, window, backward="cudnn" in ways)
    except LlmqError as error:
        if required:
            raise ConfigError(f"--attention cudnn: {error}") from error
        _warn_once(f"attention runs on the native kernels: {' '.join(str(error).split())}")
        return "native"
    return config.attention


@functools.cache
def _warn_once(line: str) -> None:
    warn([line])
