"""Losses, one per file: each declares inputs, statistics, weights of tokens, and reported
numbers."""

from importlib import import_module
from pkgutil import iter_modules

from llmq.base.errors import ConfigError
from llmq.model.losses.arrays import ArrayLoss
from llmq.model.losses.loss import Loss
from llmq.model.losses.score import Classes, Reward
from llmq.model.losses.weighted import MessageWeights
from llmq.options.groups.optim import OptimOptions
from llmq.options.loss_params import LOSS_PARAMS, OF_LOGITS


def _named_losses() -> dict[str, type[Loss]]:
    """Return the losses of this folder that declare a name of --loss, by this name."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    classes = [each for module in modules for each in vars(module).values()]
    named = [each for each in classes if isinstance(each, type) and "name" in vars(each)]
    return {each.name: each for each in named if issubclass(each, Loss)}


LOSSES: dict[str, type[Loss]] = _named_losses()
"""Losses of models with an LM head, by name."""

OF_SCORES: dict[str, type[Loss]] = {"ce": Classes, "reward": Reward}
"""Losses of models with a score head, by name."""


_OWN = frozenset(LOSS_PARAMS)


def register(loss: type[ArrayLoss]) -> str:
    """Add a user's class to the losses of --loss, replacing an earlier class of the same name, and
    return the name. Raise ConfigError if the class is not an ArrayLoss, or has the name of a
    built-in loss."""
    if not issubclass(loss, ArrayLoss) or "name" not in vars(loss):
        raise ConfigError(
            f"--loss: {loss.__name__} is no loss: give a subclass of llmq.ArrayLoss with a name"
        )
    if loss.name in _OWN:
        raise ConfigError(f"--loss: {loss.__name__} has the name of another loss: {loss.name!r}")
    LOSSES[loss.name], LOSS_PARAMS[loss.name] = loss, {}
    if loss.overrides("of_logits"):
        OF_LOGITS.add(loss.name)
    return loss.name


def loss_class(optim: OptimOptions) -> type[Loss]:
    if optim.token_weights:
        return MessageWeights
    return (OF_SCORES if optim.head == "score" else LOSSES)[optim.loss]
