"""The five lines of a run before the first step, and suggested commands after the last step."""

import shlex
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.options.adapters import adapters_of
from llmq.options.options import TrainConfig
from llmq.plan.memory import room
from llmq.runtime.device import DeviceSpec
from llmq.state.params import parameter_count
from llmq.state.placement import trained_count
from llmq.text.tokenizer import TEMPLATE_FILE


def five_lines(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    *,
    data: str,
    steps: int,
    world_size: int,
    device_bytes: int,
    limit: int | None,
    host_bytes: int,
    seconds: float | None,
    error: float | None,
    ssd: str | None = None,
) -> list[str]:
    """Return the lines Data, Model, Steps, Memory and Time.

    data: the data in words. device_bytes: needed memory of each GPU, or of the CPU. limit: usable
    bytes of this memory; None: unknown. host_bytes: pinned host memory, 0 on the CPU. seconds:
    predicted duration of the run, or None. error: relative error of the prediction, or None. ssd:
    the state kept in files, in words, or None.
    """
    method = "all weights are trained"
    if adapters_of(config) is not None:
        method = (
            f"adapters of rank {config.lora_rank} on {config.base_dtype} weights, alpha "
            f"{config.lora_alpha:g}, scaling {config.lora_scale:g}"
        )
    sizes = (_short(trained_count(config, model)), _short(parameter_count(model)))
    passes = f", {config.epochs} pass{'es' * (config.epochs > 1)}" if config.epochs else ""
    readers = world_size // config.context_parallel
    per_step = config.batch_size * config.grad_accumulation * readers
    memory = room(device_bytes) + ("" if limit is None else f" of {room(limit)}")
    if host_bytes:
        memory += f", and {room(host_bytes)} of host memory"
    memory += f" on {spec.name}" + (f"; {ssd}" if ssd else "")
    return [
        f"Data:    {data}",
        f"Model:   {config.model}, {method} ({sizes[0]} of {sizes[1]} parameters)",
        f"Steps:   {steps} of {per_step} x {config.seq_len} tokens{passes}; {config.course(steps)}",
        f"Memory:  {memory}",
        f"Time:    {_time(seconds, error)}",
    ]


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _time(seconds: float | None, error: float | None) -> str:
    if seconds is None:
        return "not known of this machine before its first steps"
    minutes = max(round(seconds / 60), 1)
    said = f"about {minutes} minute{'s' * (minutes > 1)}"
    return said if error is None else f"{said} ± {100 * error:.0f} %"


def next_commands(config: TrainConfig, *, base: str) -> list[str]:
    """Return likely next commands after a run. base: --model of a run that trains adapters."""
    folder, model = config.out_dir, shlex.quote(str(config.out_dir))
    if config.head == "score":
        return [f"  llmq score {model} FILE.jsonl --out scored.jsonl"]
    has_template = (folder / TEMPLATE_FILE).is_file() or "chat_template" in _text(folder)
    how = "--chat" if has_template else '--prompt "Once"'
    other = f"llmq export {model} --format gguf --out {model}.gguf"
    if config.has_adapters:
        other = f"llmq merge {shlex.quote(base)} {model} --out {shlex.quote(f'{folder}-merged')}"
    return [f"  llmq sample {model} {how}", f"  {other}"]


def _text(folder: Path) -> str:
    """Return the text of a model's tokenizer_config.json; "" without this file."""
    try:
        return (folder / "tokenizer_config.json").read_text()
    except OSError:
        return ""
