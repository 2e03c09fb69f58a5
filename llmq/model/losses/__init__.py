"""Losses: one file each; everything else asks them for their sums, their weights of rows, and the
numbers that reports have of them."""

from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.kd import Distillation
from llmq.model.losses.loss import Loss
from llmq.model.losses.preferences import Ipo, Kto, Orpo, Preferences, SimPo
from llmq.model.losses.score import Classes, Reward
from llmq.model.losses.weighted import MessageWeights, Weighted
from llmq.options.options import TrainConfig

LOSSES: dict[str, type[Loss]] = {
    "ce": TokenCrossEntropy,
    "dpo": Preferences,
    "ipo": Ipo,
    "simpo": SimPo,
    "orpo": Orpo,
    "kto": Kto,
    "kd": Distillation,
    "weighted": Weighted,
}

OF_SCORES: dict[str, type[Loss]] = {"ce": Classes, "reward": Reward}
"""Losses of a score head."""


def loss_class(options: TrainConfig) -> type[Loss]:
    if options.token_weights:
        return MessageWeights
    return (OF_SCORES if options.head == "score" else LOSSES)[options.loss]
