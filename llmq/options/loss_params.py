"""Options of several named values: parameters of losses (`--loss-params`) with defaults and limits,
and learning rates of parts (`--lr-parts`)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError
from llmq.options.option_types import Option, parse_bool, parse_float, parse_int, parse_word

POLICIES = (
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
)  # losses of a model's own samples


class Param(NamedTuple):
    """One parameter of a loss. option: its parser and limits."""

    default: Any
    option: Option


def _param(name: str, default: Any, parse: Any = parse_float, **limits: Any) -> dict[str, Param]:
    opt = Option(flags=(f"loss-params: {name}",), help="", group="", parse=parse, **limits)
    return {name: Param(default, opt)}


def _pairs(beta: float, sft: float, normalize: bool | None = None) -> dict[str, Param]:
    """Parameters of losses that compare two answers."""
    found = _param("beta", beta, above=0) | _param("sft", sft, min=0)
    return found if normalize is None else found | _param("normalize", normalize, parse_bool)


def _clipped(epsilon: float, high: float) -> dict[str, Param]:
    """Parameters of losses that clip ratios of probabilities."""
    found = _param("epsilon", epsilon, min=0, max=1) | _param("epsilon-high", high, min=0)
    return found | _param("beta", 0.0, min=0)


_SMOOTHING = _param("smoothing", 0.0, min=0, below=0.5)

LOSS_PARAMS: dict[str, dict[str, Param]] = {
    "ce": {},
    "dpo": _pairs(0.1, 0.0, normalize=False) | _SMOOTHING,
    "ipo": _pairs(0.1, 0.0, normalize=True),
    "simpo": _pairs(2.0, 0.0, normalize=True) | _param("gamma", 0.5) | _SMOOTHING,
    "orpo": _pairs(0.1, 1.0),
    "reward": {},
    "kto": {
        **_param("beta", 0.1, above=0),
        **_param("desirable", 1.0, min=0),
        **_param("undesirable", 1.0, min=0),
    },
    "kd": {
        **_param("top-k", 64, parse_int, min=1, max=255),
        **_param("mixture", 0.0, min=0, max=1),
        **_param("temperature", 1.0, above=0),
        **_param("divergence", "forward", parse_word, choices=("forward", "reverse")),
    },
    "weighted": {},
    "grpo": _clipped(0.2, 0.2),
    "dr-grpo": _clipped(0.2, 0.2) | _param("length", 1024, parse_int, min=1),
    "dapo": _clipped(0.2, 0.28),
    "gspo": _clipped(3e-4, 4e-4),
    "cispo": _param("most", 5.0, above=0) | _param("beta", 0.0, min=0),
}
"""Parameters by name, for each loss of --loss, and for losses that a user's program defines
(`register` in llmq/model/losses/__init__.py)."""

OF_LOGITS = {"kd"}
"""Losses that read the logits as the head's product makes them."""


def named_values(texts: Iterable[str]) -> dict[str, str]:
    """Values by name, from the texts NAME=VALUE of parse_params."""
    return dict(text.split("=", 1) for text in texts)


def named_texts(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts NAME=VALUE in the form of parse_params."""
    return tuple(f"{name}={_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{int(value)}" if isinstance(value, float) and value.is_integer() else f"{value}"


def complete_params(loss: str, texts: Iterable[str]) -> tuple[str, ...]:
    """Return the texts of --loss-params with defaults added, in the loss's order. Unknown names
    stay at the end."""
    defaults = named_texts(
        {name: param.default for name, param in LOSS_PARAMS.get(loss, {}).items()}
    )
    return named_texts(named_values(defaults) | named_values(texts))


def loss_values(loss: str, texts: Iterable[str]) -> dict[str, Any]:
    """Return all parameters of a loss by name, from the texts of --loss-params and the defaults.

    ConfigError for a name that the loss lacks, and a value out of limits.
    """
    known, given = LOSS_PARAMS.get(loss, {}), named_values(texts)
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        names = f"has {', '.join(known)}" if known else "has no parameters"
        raise ConfigError(f"--loss-params: --loss {loss} {names}, got {unknown}")
    values = {name: param.default for name, param in known.items()}
    for name, text in given.items():
        values[name] = known[name].option.convert(text)
        known[name].option.check(values[name])
    return values


RATED_PARTS = ("embedding", "head", "vectors")
"""Parts that --lr-parts may give their own learning rate."""

_RATE = Option(flags=("lr-parts",), help="", group="", parse=parse_float, min=0)


def part_rates(texts: Iterable[str]) -> dict[str, float]:
    """Return learning rates by part, from the texts of --lr-parts. ConfigError for another part,
    and a negative rate."""
    rates = {name: _RATE.convert(text) for name, text in named_values(texts).items()}
    for name, rate in rates.items():
        if name not in RATED_PARTS:
            raise ConfigError(f"--lr-parts: expected some of {', '.join(RATED_PARTS)}, got {name}")
        _RATE.check(rate)
    return rates
