"""Which options of a run have no effect beside the others, one line each."""

from __future__ import annotations

from llmq.arch.model_config import ModelConfig
from llmq.options.command_line import flag
from llmq.options.options import OPTIONS, TrainConfig
from llmq.plan.estimate import RECOMPUTE
from llmq.state.placement import (
    has_masters,
    shards_of,
    streams_weights,
    why_gradients_stay,
    why_no_mirrors,
    why_weights_stay,
)

_DEFAULTS = TrainConfig()
_NEEDING = {
    "eval_task": ("task_every", "task_limit"),
    "sample_prompt": ("sample_every", "sample_tokens"),
}


def option_warnings(config: TrainConfig) -> list[str]:
    """One line for every option that has no effect beside the others."""
    lines = _of_checkpoints(config)
    if config.guard != "rollback" and config.guard_recovery != _DEFAULTS.guard_recovery:
        given = flag("guard_recovery", config.guard_recovery)
        lines.append(f"{given} has no effect without --guard rollback")
    if config.final_lr_fraction != 1 and config.lr_schedule == "wsd":
        lines.append("--final-lr-fraction has no effect with --lr-schedule wsd")
    if config.final_lr_fraction == 1 and config.lr_schedule == "linear":
        lines.append(
            "--lr-schedule linear has no effect: with --final-lr-fraction 1 the learning rate "
            "does not change"
        )
    rounded = {config.model_dtype, config.opt_m_dtype, config.opt_v_dtype} != {"fp32"}
    drops = (config.lora_dropout or 0) > 0
    draws = config.from_scratch or (config.lora_rank > 0 and not config.splits_model) or drops
    if config.seed != _DEFAULTS.seed and not draws and not rounded:
        lines.append(
            f"--seed {config.seed} has no effect: in fp32 it decides about nothing but the "
            "weights of --from-scratch and of adapters"
        )
    if 0 <= config.steps < config.warmup + config.cooldown:
        lines.append(
            f"--warmup {config.warmup} and --cooldown {config.cooldown} do not fit into "
            f"--steps {config.steps}"
        )
    for needed, names in _NEEDING.items():
        if not getattr(config, needed):
            given = {n: getattr(config, n) for n in names}
            idle = [flag(n, v) for n, v in given.items() if v != getattr(_DEFAULTS, n)]
            lines += [f"{each} has no effect without {OPTIONS[needed].flag}" for each in idle]
    needs_documents = config.document_mask or config.packing != "concat"
    if config.document_separator is not None and not needs_documents:
        lines.append(
            f"--document-separator {config.document_separator} has no effect without "
            "--document-mask or --packing best-fit or none"
        )
    if len(config.train_file) == 1 and config.train_patterns != [*config.train_file]:
        lines.append(
            f"the weight in {flag('train_file', config.train_file)} has no effect on one file"
        )
    lines += _memory_warnings(config)
    if config.device != "cpu":
        return lines
    on_cpu = [f"{flag} has no effect with --device cpu" for flag in _idle_on_cpu(config)]
    return on_cpu + _but_on_cpu(config, lines)


def _of_checkpoints(config: TrainConfig) -> list[str]:
    lines = []
    if config.ckpt_major > 0 and config.ckpt_keep_n <= 0:
        lines.append(
            f"--ckpt-major has no effect with --ckpt-keep-n {config.ckpt_keep_n}: nothing is "
            "deleted"
        )
    writes = config.ckpt_interval > 0 or config.save_training_state
    writes |= config.ckpt_every_minutes > 0 or config.max_hours > 0
    if 0 < config.ckpt_keep_n != _DEFAULTS.ckpt_keep_n and not writes:
        lines.append(
            f"--ckpt-keep-n {config.ckpt_keep_n} has no effect without --ckpt-interval and "
            "--save-training-state: no checkpoints are written"
        )
    goes_on = config.ckpt_interval > 0 or config.ckpt_every_minutes > 0
    goes_on |= config.keep_best is not None or config.save_training_state
    if config.ckpt_background and not goes_on:
        lines.append(
            "--ckpt-background has no effect but for checkpoints that are asked for: neither "
            "--ckpt-interval nor --ckpt-every-minutes writes any"
        )
    return lines


def idle_with_model(config: TrainConfig, model: ModelConfig) -> list[str]:
    """One line for every option that has no effect on this model, else it may have one."""
    if config.recompute_norm and not config.recompute_block and not model.arch.pre_norm:
        return ["--recompute-norm has no effect: this model keeps no norm's output"]
    return []


def _idle_on_cpu(config: TrainConfig) -> list[str]:
    """Options that are about GPUs, with their values."""
    idle = {
        "--no-tune": not config.tune,
        "--no-use-cuda-graphs": not config.use_cuda_graphs,
        f"--attention {config.attention}": config.attention != "auto",
        f"--fp8-fast-accumulation {config.fp8_fast_accumulation}": (
            config.fp8_fast_accumulation != _DEFAULTS.fp8_fast_accumulation
        ),
        "--write-combined": config.write_combined,
        "--memcpy-all-gather": config.memcpy_all_gather,
        "--memcpy-send-recv": config.memcpy_send_recv,
        "--mirror-weights": config.mirror_weights,
        f"--p2p {config.p2p}": config.p2p != "auto",
    }
    return [flag for flag, given in idle.items() if given]


def _but_on_cpu(config: TrainConfig, lines: list[str]) -> list[str]:
    """The lines about other options than those that have no effect on the CPU at all."""
    told = {flag.split()[0] for flag in _idle_on_cpu(config)}
    return [line for line in lines if line.split()[0] not in told]


def _memory_warnings(config: TrainConfig) -> list[str]:
    optimizer = config.offload_master or config.offload_opt_m or config.offload_opt_v
    offload = optimizer or config.offload_gradients or config.offload_quants
    recomputes = any(getattr(config, name) for name in RECOMPUTE)
    undivided = config.attention == "native" or config.device == "cpu"
    idle = (
        (
            flag("attn_bwd_chunks", config.attn_bwd_chunks),
            f"is the same as {config.batch_size}: native attention divides no heads",
            undivided and config.attn_bwd_chunks > config.batch_size,
        ),
        ("--zero-level 0", "is the same as 1", config.zero_level == 0),
        (
            "--offload-master",
            "has no effect: the optimizer updates the weights that the products read; it has "
            "one with --shard-weights or --matmul-dtype e4m3",
            config.offload_master and not has_masters(config, shards=1),
        ),
        (
            "--use-zero-copy",
            "has no effect without --offload-master, -opt-m, -opt-v or -gradients",
            config.use_zero_copy and not (optimizer or config.offload_gradients),
        ),
        (
            "--write-combined",
            "has no effect without an --offload option beside --offload-residual",
            config.write_combined and not offload,
        ),
        (
            "--memcpy-send-recv",
            "has no effect without --all-to-all-reduce",
            config.memcpy_send_recv and not config.all_to_all_reduce,
        ),
        (
            "--mirror-weights",
            f"has no effect {why_no_mirrors(config)}",
            config.mirror_weights and why_no_mirrors(config) is not None,
        ),
        (
            "--recompute-layers",
            "has no effect without a --recompute option",
            config.recompute_layers != "all" and not recomputes,
        ),
    )
    lines = [f"{given} {problem}" for given, problem, applies in idle if applies]
    return lines + _fp8_warnings(config)


def _has_transposed(config: TrainConfig) -> bool:
    """Whether there are codes of weights in two layouts."""
    return config.matmul_dtype == "e4m3" or (
        config.matmul_dtype == "int8" and config.base_dtype == "int8"
    )


def _fp8_warnings(config: TrainConfig) -> list[str]:
    if config.matmul_dtype == "e4m3":
        return []
    idle = {
        "--debug-log-abs-max": config.debug_log_abs_max > 0,
        "--no-keep-transposed": not config.keep_transposed and not _has_transposed(config),
        "--fp8-fast-accumulation": config.fp8_fast_accumulation != _DEFAULTS.fp8_fast_accumulation,
    }
    codes = "int8" if config.is_quantized and config.base_dtype == "int8" else "e4m3"
    reasons = {"--no-keep-transposed": codes}
    reason = "has no effect without --matmul-dtype"
    return [f"{flag} {reason} {reasons.get(flag, 'e4m3')}" for flag, given in idle.items() if given]


def rank_warnings(
    config: TrainConfig, world_size: int, machines: int = 1, *, on_cpu: bool = False
) -> list[str]:
    """One line for every option that has no effect with this number of ranks on so many machines,
    or (on_cpu) on the CPU, which --device auto may have chosen."""
    lines, shards = [], shards_of(config, world_size, machines)
    if machines == 1 and config.shard_over != _DEFAULTS.shard_over:
        lines.append(f"{flag('shard_over', config.shard_over)} has no effect with one machine")
    if shards == 1:
        idle = {
            "--memcpy-all-gather": config.memcpy_all_gather,
            "--memcpy-send-recv": config.memcpy_send_recv,
            "--mirror-weights": config.mirror_weights,
            "--all-to-all-reduce": config.all_to_all_reduce,
            "--measure-scaling": config.measure_scaling and world_size == 1,
            f"--p2p {config.p2p}": config.p2p != "auto" and world_size == 1,
        }
        why = "has no effect with one GPU" + (" on each machine" if machines > 1 else "")
        lines += [f"{flag} {why}" for flag, given in idle.items() if given]
        lines += _one_rank_sharding_warnings(config, why)
    elif config.lora_rank:
        lines += _sharded_gradients_warnings(config, shards)
    streams = streams_weights(config, shards)
    decodes = config.is_quantized and config.base_dtype != config.matmul_dtype
    if _has_transposed(config) and (streams or decodes) and not config.keep_transposed:
        why = "--shard-weights" if streams else f"--base-dtype {config.base_dtype}"
        lines.append(f"--no-keep-transposed has no effect with {why}: it is implied")
    if on_cpu or config.device == "cpu":
        lines = _but_on_cpu(config, lines)
    if on_cpu and config.device != "cpu":
        lines += [f"{flag} has no effect on the CPU" for flag in _idle_on_cpu(config)]
    return lines


def run_warnings(
    config: TrainConfig,
    world_size: int,
    steps: int,
    steps_per_epoch: int,
    *,
    machines: int = 1,
    on_cpu: bool = False,
) -> list[str]:
    """rank_warnings, and one line for every option that has no effect on a run so long."""
    lines = rank_warnings(config, world_size, machines, on_cpu=on_cpu)
    if world_size == 1 and config.watchdog != _DEFAULTS.watchdog:
        lines.append(f"--watchdog {config.watchdog} has no effect with one GPU")
    if not config.splits and config.eval_fraction != _DEFAULTS.eval_fraction:
        given = flag("eval_fraction", config.eval_fraction)
        lines.append(f"{given} has no effect with {flag('eval_file', config.eval_pattern)}")
    if not config.validates and not config.eval_sets:
        names = ("eval_every_n_steps", "eval_num_steps", "eval_seed")
        given = {n: getattr(config, n) for n in names}
        idle = [flag(n, v) for n, v in given.items() if v > 0 and v != getattr(_DEFAULTS, n)]
        return lines + [f"{each} has no effect without --eval-file" for each in idle]
    validates = 0 < config.eval_every_n_steps < steps or steps > steps_per_epoch
    if not validates and config.eval_num_steps != _DEFAULTS.eval_num_steps:
        lines.append(
            f"--eval-num-steps {config.eval_num_steps} has no effect: the only validation is the "
            "final one, of all sequences"
        )
    return lines


def _sharded_gradients_warnings(config: TrainConfig, shards: int) -> list[str]:
    """Of several shards, where gradients are not divided."""
    why = why_gradients_stay(config, shards)
    given = {
        "--shard-gradients": config.shard_gradients and config.zero_level < 2,
        "--zero-level 2": config.zero_level == 2,
        "--offload-gradients": config.offload_gradients,
    }
    return [f"{flag} has no effect {why}" for flag, applies in given.items() if applies]


def _one_rank_sharding_warnings(config: TrainConfig, idle_why: str) -> list[str]:
    """What --zero-level implies counts as one option, which may do something in part."""
    weights = why_weights_stay(config, shards=1)
    gradients = why_gradients_stay(config, shards=1)
    level, idle = config.zero_level, {}
    if config.shard_weights and level < 3:
        idle["--shard-weights"] = weights
    if config.shard_gradients and level < 2:
        idle["--shard-gradients"] = gradients
    if level == 2:
        idle["--zero-level 2"] = gradients
    if level == 3:
        idle["--zero-level 3"] = gradients and weights and f"{weights} and {gradients}"
    return [f"{flag} {idle_why} {why}" for flag, why in idle.items() if why]
