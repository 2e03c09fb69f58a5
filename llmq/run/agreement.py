"""Checks, before a run's first step, that all processes of the run agree."""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmq import __version__
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors
from llmq.checkpoint.hf import HfWeights
from llmq.data.loader import DataLoader
from llmq.options.options import OPTIONS, TrainConfig
from llmq.runtime.world import World

_OWN = ("gpus",)  # options that may differ between processes
_ENDS = 1 << 16  # number of bytes that are compared at each end of a token file


def check_start(
    config: TrainConfig, model: ModelConfig, plan: Any, weights: HfWeights | None, world: World
) -> None:
    """Raise ConfigError for the first version, option, model field or plan that differs between
    processes.

    plan: choices of a rank's plan, such as memory sizes. weights: files of the model's first
    weights.
    """
    if not world.several:
        return
    found: dict[str, Any] = {
        "the version of llmq": __version__,
        "the version of Python": platform.python_version(),
        "the version of NumPy": np.__version__,
    }
    for name, opt in OPTIONS.items():
        if name not in _OWN:
            found[opt.flag] = str(getattr(config, name))
    found |= {f"the model's {name}": str(value) for name, value in asdict(model).items()}
    if weights is not None:
        files = sorted(weights.directory.glob("*.safetensors"))
        found |= {f"the weights '{path.name}'": _ends(path) for path in files}
    found["the plan of a step"] = hashlib.sha256(repr(plan).encode()).hexdigest()[:16]
    compare(found, ConfigError, world)


def check_token_files(loaders: Sequence[DataLoader], world: World) -> None:
    """Raise DataError for the first token file that differs between processes.

    The check compares name, size, and the bytes at both ends, which include the header.
    """
    if not world.several:
        return
    paths = {file.path for loader in loaders for file in loader.files}
    found = {f"token file '{path.name}'": _ends(path) for path in sorted(paths)}
    compare({"the token files' names": " ".join(found)} | found, DataError, world)


def _ends(path: Path) -> str:
    with disk_errors(path), open(path, "rb") as file:
        size = path.stat().st_size
        digest = hashlib.sha256(file.read(_ENDS))
        file.seek(max(size - _ENDS, 0))
        digest.update(file.read())
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def compare(found: dict[str, Any], error: type[Exception], world: World) -> None:
    """Raise `error`, in all processes, for the first value that differs between processes. found:
    values of this process, by name."""
    everyone = world.gather(found)

    def differing() -> None:
        for name in everyone[0]:
            for index, other in enumerate(everyone):
                if other.get(name) != everyone[0][name]:
                    raise error(_sentence(world, name, index, everyone))

    world.each(differing)


def _sentence(world: World, name: str, index: int, everyone: list[dict[str, Any]]) -> str:
    found = [f"{_short(everyone[i].get(name))} in {world.process_name(i)}" for i in (0, index)]
    names = [*everyone[0]]
    behind = names[names.index(name) + 1 :]
    others = [n for n in behind if everyone[index].get(n) != everyone[0][n] and n[:2] == "--"]
    also = f"; so must {', '.join(others)}, from which it may follow" if others else ""
    return f"{name} must be the same in all processes: {', '.join(found)}{also}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 100 else text[:100] + "…"
