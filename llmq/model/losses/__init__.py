"""Losses: one file each; everything else asks them for their sums, their weights of rows, and the
numbers that reports have of them."""

from importlib import import_module
from pkgutil import iter_modules

from llmq.model.losses.loss import Loss
from llmq.model.losses.score import Classes, Reward
from llmq.model.losses.weighted import MessageWeights
from llmq.options.groups.optim import OptimOptions


def _named_losses() -> dict[str, type[Loss]]:
    """The losses of all files here that declare a name of --loss, by this name."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    classes = [each for module in modules for each in vars(module).values()]
    named = [each for each in classes if isinstance(each, type) and "name" in vars(each)]
    return {each.name: each for each in named if issubclass(each, Loss)}


LOSSES: dict[str, type[Loss]] = _named_losses()
"""Losses of an LM head by name."""

OF_SCORES: dict[str, type[Loss]] = {"ce": Classes, "reward": Reward}
"""Losses of a score head."""


def loss_class(optim: OptimOptions) -> type[Loss]:
    if optim.token_weights:
        return MessageWeights
    return (OF_SCORES if optim.head == "score" else LOSSES)[optim.loss]
