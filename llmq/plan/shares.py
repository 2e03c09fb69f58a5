"""Time of a step whose ranks have shares of the micro-batches (--share), perhaps on unequal
cards."""

from collections.abc import Sequence

import numpy as np

from llmq.base.shares import AUTO, apportion
from llmq.options.cards import Card
from llmq.options.options import TrainConfig
from llmq.plan.cost import PARTS, Rates, StepTime, micro_step_parts, rates_of
from llmq.plan.plan import Plan
from llmq.plan.replay import replay

ROWS = 4  # rows of `card_times`


def card_times(plan: Plan, rates: Rates) -> np.ndarray:
    """Seconds F64 (ROWS, PARTS) on a card. The rows: a step's first micro-step, a middle one, the
    last one, and the update. A step of two micro-steps has no middle one; the first one's times
    stand for it. Parts that the plan lacks take no time."""
    times = np.zeros((ROWS, len(PARTS)))
    traces = [trace for trace, _ in plan.micro_steps]
    if traces:
        between = traces[1] if len(traces) > 2 else traces[0]
        for row, trace in zip(times, (traces[0], between, traces[-1]), strict=False):
            row[:] = micro_step_parts(trace, rates)
    times[-1, PARTS.index("optimizer")] = replay(plan.update, rates).wall
    return times


def times_of(plan: Plan, cards: Sequence[Card], visible_share: float = 1.0) -> np.ndarray:
    """Seconds F64 (cards, ROWS, PARTS): `card_times` of each card. cards: each rank's card."""
    found = {card: card_times(plan, rates_of(plan, card, visible_share)) for card in {*cards}}
    return np.array([found[card] for card in cards])


def speeds(times: np.ndarray) -> list[float]:
    """Micro-batches per second of each rank. times: the result of `times_of`."""
    return (1 / times[:, 1].sum(axis=1)).tolist()


def shares_of(config: TrainConfig, times: np.ndarray) -> list[int]:
    """Each rank's number of micro-batches in a step. times: the result of `times_of`."""
    rates = speeds(times) if config.share == AUTO else config.shares or [1.0] * len(times)
    return apportion(config.grad_accumulation * len(times), rates)


def shared_time(config: TrainConfig, times: np.ndarray) -> StepTime:
    """Time of a step: the time of the rank whose micro-batches take longest, and of the slowest
    update. times: the result of `times_of`."""
    micro_steps = []
    for (first, between, last, _), share in zip(times, shares_of(config, times), strict=True):
        micro_steps.append(last if share == 1 else first + (share - 2) * between + last)
    parts = max(micro_steps, key=np.sum) + max(times[:, -1], key=np.sum)
    return StepTime(parts=dict(zip(PARTS, parts.tolist(), strict=True)))
