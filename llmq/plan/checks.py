"""Checks that a machine can compute a run, the choice of attention kernels, and the plan of a run
that starts."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

from llmq.arch.delta import DeltaNet
from llmq.arch.latent import LATENT_SIZES
from llmq.arch.mamba import Mamba
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, LlmqError, warn_once
from llmq.base.stopwatch import START
from llmq.model.halves.attention import directions
from llmq.ops.attention.attention import MAX_HEAD_DIM
from llmq.ops.attention.paged import MAX_LATENT_DIM
from llmq.ops.common import CAPABILITY, GENERIC_FP8, MAX_COLUMNS
from llmq.ops.delta import delta_rule, gated_norm, ssd
from llmq.ops.pointwise.reduce import MAX_PARTS
from llmq.options.cards import card_here, cards_here, together
from llmq.options.conditions import AttentionHere, Here, why_no_cudnn
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.advice import check_fits
from llmq.plan.cost import Network
from llmq.plan.estimate import Planner
from llmq.plan.memory import memory_limit
from llmq.plan.plan import Plan
from llmq.runtime import cudnn
from llmq.runtime.device import DeviceSpec
from llmq.runtime.machine import PLAN_SPEC, Machine

VECTOR = 8  # BF16 elements in 16 bytes
CONV_MULTIPLE = 4  # BF16 columns that a thread of short_conv loads


def check_machine(config: TrainConfig, model: ModelConfig, machine: Machine) -> None:
    """Raise ConfigError for formats and sizes that the machine cannot compute."""
    check_options(config, machine)
    check_sizes(model, machine)
    spec = machine.spec
    if machine.kind != "cuda" or spec == PLAN_SPEC or not config.is_fp8:
        return
    if model.experts is not None and spec.capability not in (CAPABILITY, *GENERIC_FP8):
        raise ConfigError(
            f"--matmul-dtype: there is no e4m3 product for experts on {spec.name}: use bf16"
        )
    if config.fp8_accumulate == "fp16" and spec.capability not in GENERIC_FP8:
        raise ConfigError(
            f"--fp8-accumulate: fp16 needs compute capability 8.9 or 12, {spec.name} has "
            f"{spec.version}"
        )


def check_options(config: TrainConfig, machine: Machine) -> None:
    """Raise ConfigError for options that the machine cannot compute."""
    world = machine.world
    here = Here(
        on_gpus=machine.kind == "cuda",
        machines=world.ranks_of_machines,
        ranks=world.count,
        processes=len(world.counts),
        most_summed=MAX_PARTS,
    )
    if here.on_gpus:
        RULES.check(config, gpu=machine.spec)
    RULES.check(config, here=here)


class _Limit(NamedTuple):
    """A model size that GPU kernels cut into vectors and tiles."""

    name: str
    size: int
    multiple: int
    most: int | None = None


def check_sizes(model: ModelConfig, machine: Machine) -> None:
    """Raise ConfigError for sizes that only the CPU device can compute."""
    for name, size, multiple, most in _limits(model) if machine.kind == "cuda" else ():
        if size % multiple or (most is not None and size > most):
            allowed = [f"a multiple of {multiple}"] if multiple > 1 else []
            allowed += [] if most is None else [f"at most {most}"]
            raise ConfigError(
                f"the model's {name} is {size}; on a GPU it must be {' and '.join(allowed)}: use "
                "--device cpu"
            )


def _limits(model: ModelConfig) -> Iterator[_Limit]:
    """Yield the limits of all GPUs' kernels. A size has its name in config.json, if it stands
    there."""
    yield _Limit("hidden_size", model.hidden_size, VECTOR, MAX_COLUMNS)
    if model.experts is None or model.experts.layers is not None:
        yield _Limit("intermediate_size", model.intermediate_size, VECTOR)
    if model.experts is not None:
        yield _Limit("width of an expert", model.expert_size, VECTOR)
        yield _Limit("width of the shared expert", model.experts.shared_size or 0, VECTOR)
    vectors = (model.qk_norm and not model.arch.wide_qk_norm) or model.arch.gated_attention
    multiple = VECTOR if vectors or model.arch.sinks else 1
    for heads in model.every_heads:
        yield _Limit("head_dim", heads.channels, multiple, MAX_HEAD_DIM)
    if model.arch.wide_qk_norm:
        for name, heads in (("query", model.num_heads), ("key", model.num_kv_heads)):
            yield _Limit(f"width of its {name} heads", heads * model.head_dim, VECTOR, MAX_COLUMNS)
    if (latent := model.latent) is not None:
        for field, name in LATENT_SIZES.items():
            largest = MAX_LATENT_DIM - latent.rotary if field == "rank" else None
            yield _Limit(name, getattr(latent, field) or 0, VECTOR, largest)
    yield from _mixer_limits(model)


def _mixer_limits(model: ModelConfig) -> Iterator[_Limit]:
    """Yield the limits of the kernels for delta nets and state spaces."""
    net = model.mixers
    if isinstance(net, Mamba):
        yield _Limit("mamba_d_state", net.key_dim, ssd.MULTIPLE, ssd.MAX_KEY)
        yield _Limit("mamba_d_head", net.value_dim, ssd.MULTIPLE, ssd.MAX_VALUE)
        yield _Limit("mamba_n_heads", net.value_heads, CONV_MULTIPLE)
        group = net.values // net.key_heads
        yield _Limit("channels of a group of its state spaces", group, *gated_norm.limits(group))
    elif isinstance(net, DeltaNet):
        for name, dim in (("key", net.key_dim), ("value", net.value_dim)):
            yield _Limit(f"linear_{name}_head_dim", dim, delta_rule.MULTIPLE, delta_rule.MAX_HEAD)
        yield _Limit("number of columns beside its delta nets", 2 * net.value_heads, CONV_MULTIPLE)


def _unsupported(config: TrainConfig, model: ModelConfig, spec: DeviceSpec) -> str | None:
    """The reason why cuDNN cannot compute the model's attention on this GPU; None if it can."""
    if model.attention_softcap is not None:
        return "it has no soft cap of scores, as this model"
    dtype = parse_dtype(config.model_dtype)
    sizes = (heads.channels for heads in model.every_heads)
    reasons = (cudnn.unsupported(spec.capability, dtype, size) for size in sizes)
    return next((reason for reason in reasons if reason is not None), None)


def installed_attention(config: TrainConfig, model: ModelConfig, spec: DeviceSpec) -> str:
    """Return the choice of attention_backend for a GPU with cuDNN installed."""
    reason = why_no_cudnn(config, _unsupported(config, model, spec))
    return config.attention if reason is None else "native"


def attention_backend(config: TrainConfig, model: ModelConfig, machine: Machine) -> str:
    """Return the backend for --attention on this machine: "native" or "cudnn" for both directions,
    or "auto" (see `directions`). If cuDNN is missing or refuses the sizes, --attention cudnn raises
    ConfigError, and otherwise a warning says that the result is "native"."""
    on_cpu = machine.kind == "host"
    unsupported = None if on_cpu else _unsupported(config, model, machine.spec)
    RULES.check(config, attention=AttentionHere(on_cpu=on_cpu, unsupported=unsupported))
    if config.attention == "native" or on_cpu or why_no_cudnn(config, unsupported) is not None:
        return "native"
    layers = range(model.num_layers)
    heads_of = {layer: config.local_heads(model.heads_of(layer)) for layer in layers}
    cases = {(heads_of[layer], model.window_of(layer)) for layer in layers}
    try:
        with ExitStack() as undo:
            library = undo.enter_context(closing(cudnn.CudnnAttention.of(0)))
            for heads, window in cases:
                sizes = (config.batch_size, config.seq_len, *heads)
                case = (config.attention, heads.channels, config.seq_len, window)
                _, ways = directions(*case, machine.spec.capability)
                for parts in {1, config.attn_bwd_chunks}:  # the plan chooses a number between these
                    library.check(
                        *sizes,
                        chunks=parts,
                        window=window,
                        scale=model.attention_scale,
                        backward="cudnn" in ways,
                    )
            undo.pop_all()
            library.keep()
    except LlmqError as error:
        if config.attention == "cudnn":
            raise ConfigError(f"--attention cudnn: {error}") from error
        warn_once(f"attention runs on the native kernels: {' '.join(str(error).split())}")
        return "native"
    return config.attention


def planner_of(model: ModelConfig, machine: Machine, backend: str) -> Planner:
    """Return the planner of a machine's devices. backend: the result of `attention_backend`."""
    world, on_gpus = machine.world, machine.kind == "cuda"
    cards = cards_here(machine.specs) if on_gpus and not world.several else ()
    card = together(cards) if cards else card_here(machine.spec, world.size, cuda=on_gpus)
    network = Network(world.num_machines)
    return Planner(
        model,
        machine.spec,
        backend,
        card,
        world.size,
        network=network,
        gpus=world.ranks_here,
        cards=cards,
    )


class RunPlan(NamedTuple):
    """A plan, its options, and its attention backend."""

    plan: Plan
    config: TrainConfig
    backend: str


@START.part("planning")
def plan_run(config: TrainConfig, model: ModelConfig, machine: Machine) -> RunPlan:
    """Return the plan of a run. Raises ConfigError if the machine cannot compute it, OutOfMemory if
    it does not fit."""
    planner, run = plan_unchecked(config, model, machine)
    check_fits(config, planner, run.plan, memory_limit(config, machine))
    return run


def plan_unchecked(
    config: TrainConfig, model: ModelConfig, machine: Machine
) -> tuple[Planner, RunPlan]:
    """Return the planner and the plan of a run, whether the plan fits or not. Raises ConfigError as
    plan_run does."""
    check_machine(config, model, machine)
    backend = attention_backend(config, model, machine)
    planner = planner_of(model, machine, backend)
    planned = planner.with_fewest_parts(config)
    return planner, RunPlan(planner.plan(planned), planned, backend)
