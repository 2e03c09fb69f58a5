"""A configuration back into the command line that makes it."""

import re
from itertools import chain
from typing import Any

from llmq.options.options import OPTIONS, TrainConfig


def flag(name: str, value: Any) -> str:
    """One option of TrainConfig with a value, as on the command line."""
    return " ".join(OPTIONS[name].spelled(value))


def fewest_values(config: TrainConfig) -> dict[str, Any]:
    """The values, by field, without which it would be another configuration: not defaults, what
    others imply, and a log called after the time of a start. config: normalized."""
    names = [*OPTIONS]
    if re.fullmatch(rf"logs/{re.escape(config.name)}-[-\dT_]{{19}}\.json", str(config.log_file)):
        names.remove("log_file")

    def values(chosen: dict[str, Any]) -> list[Any]:
        made = TrainConfig(**chosen, only_scores=config.only_scores).normalized()
        return [getattr(made, name) for name in names]

    wanted = [getattr(config, name) for name in names]
    defaults = TrainConfig()  # to give one of these is to give nothing
    given = {n: v for n, v in zip(names, wanted, strict=True) if v != getattr(defaults, n)}
    for name in reversed(given):
        fewer = {other: value for other, value in given.items() if other != name}
        if values(fewer) == wanted:
            given = fewer
    return given


def command_line(config: TrainConfig) -> list[str]:
    """`llmq train`, or `llmq score`, with the flags of fewest_values. config: normalized."""
    given, command = fewest_values(config), ["train"]
    if config.only_scores:  # whose --out is no option of a run
        command = ["score", str(given.pop("model")), *given.pop("train_file"), "--out=OUT"]
    flags = (OPTIONS[name].spelled(value) for name, value in given.items())
    return ["llmq", *command, *chain(*flags)]
