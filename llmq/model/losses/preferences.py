"""Preference losses for pairs of answers to one prompt (`ops/loss/pairs.py`)."""

from collections.abc import Mapping
from functools import partial
from math import log
from typing import ClassVar

import numpy as np

from llmq.base.dtypes import F32, F64
from llmq.base.step_inputs import PAIRS, SCORES, TOKEN, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.loss import Loss, LossContext, Rows
from llmq.ops.loss import pairs
from llmq.options.groups.optim import OptimOptions
from llmq.ref.loss.pairs import IPO, KTO, ORPO, SIGMOID, SUMS, Documents, Form, of_pair
from llmq.runtime.lane import Lane

PARTNER = Input("partner", per=TOKEN, sidecar=PAIRS)


class Preferences(Loss):
    """DPO: the loss falls with the chosen answer's reward minus the rejected answer's reward. The
    reward of an answer is beta times its log-probability minus the reference model's
    log-probability.

    Both answers of a pair are in one row; the named input "partner" gives their positions. A pair
    does not count if one of its answers has no targets. referenced: True if the loss reads the
    reference's log-probabilities. The loss and its numbers are means over pairs: margin, chosen
    minus rejected reward; accuracy, the share of pairs with a positive margin; reward_chosen,
    reward_rejected; logp_chosen, logp_rejected."""

    name = "dpo"
    sums = SUMS
    ahead = True
    validated = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    shown = ("accuracy", "margin")
    kind: ClassVar[int] = SIGMOID
    referenced: ClassVar[bool] = True

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        shape = ctx.batch.batch_size, ctx.batch.local_seq_len
        self._weights = ctx.dev.alloc("weights", shape, F32, "Activations")
        self._sums = ctx.dev.alloc("pair sums", (3, *shape), F32, "Activations")
        self._shift: Tensor | None = None
        self.form = self._form(ctx.optim)

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        return (PARTNER, Input("scores", sidecar=SCORES)) if cls.referenced else (PARTNER,)

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        values = optim.loss_values
        by_form = (values.get("gamma", 0.0), values.get("smoothing", 0.0))
        by_mean = int(values.get("normalize", True))  # True for ORPO, which lacks this option
        return Form(cls.kind, by_mean, values["beta"], *by_form, values["sft"])

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return the loss of two answers of one token each, if all tokens are equally likely."""
        gain, logp, count = np.zeros(1), np.full(1, -log(outputs)), np.ones(1)
        answer = Documents(gain if cls.referenced else logp, logp, count)
        return float(of_pair(cls._form(optim), answer, answer).loss[0])

    def prepare(self, rows: Rows) -> None:
        """Compute the sums over each answer's tokens."""
        reference, places = self.named.get("scores"), self._places(rows)
        pairs.sums(self.dev, self._sums, rows.targets, rows.losses, reference, places)

    def weights(self, rows: Rows) -> Tensor:
        places, sums = self._places(rows), (self._sums, self._shift)
        pairs.weights(self.dev, self._weights, *sums, rows.targets, places, self.form)
        return self._weights

    def add(self, stats: Tensor, rows: Rows) -> None:
        places = self._places(rows)
        pairs.stats(self.dev, stats, self._sums, self._shift, places, self.form)

    def _places(self, rows: Rows) -> pairs.Places:
        return pairs.Places(rows.starts, self.named["partner"])

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        means = {
            f"{name}_{side}": sums[f"{name}_{side}"] / (sums[side] or float("nan"))
            for name in ("reward", "logp")
            for side in ("chosen", "rejected")
        }
        return {
            "accuracy": sums["accuracy"] / (sums["count"] or float("nan")),
            "margin": means["reward_chosen"] - means["reward_rejected"],
            **means,
        }


class Ipo(Preferences):
    """IPO: the squared difference between 1 / (2 beta) and the gain of the chosen answer minus the
    gain of the rejected answer. A gain is the log-probability minus the reference's
    log-probability."""

    name = "ipo"
    kind = IPO


class SimPo(Preferences):
    """SimPO: DPO without a reference, on the mean log-probability of an answer's tokens, with a
    margin gamma."""

    name = "simpo"
    referenced = False


class Orpo(SimPo):
    """ORPO: the loss of the odds ratio of both answers is added to the chosen answer's
    cross-entropy."""

    name = "orpo"
    kind = ORPO


class Kto(Preferences):
    """KTO: a loss for single answers, each with a label, desirable or undesirable. Desirable
    answers should gain more than a shift, and undesirable answers less. The shift, which has no
    gradient, estimates the divergence from the reference: the mean gain, at least 0, of answers to
    other prompts. The second document of each pair is such an answer. The mean runs over the
    current micro-batches of all ranks, as in TRL."""

    name = "kto"
    kind = KTO
    validated = (*Preferences.validated, "kl")

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        self._shift = ctx.dev.alloc("shift", (1,), F32, "Activations")
        self._gained = ctx.dev.alloc("gained", (ctx.dev.mesh.size(), 2), F64, "Activations")
        ctx.dev.zero(self._gained)  # ranks that skip exchanges in a rehearsal write nothing
        self._lane = Lane(ctx.dev, arrive="comm")
        self._lane.add("gained")

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return the larger of both weights, an upper bound of the loss."""
        return max(optim.loss_values["desirable"], optim.loss_values["undesirable"])

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        values = optim.loss_values
        weights = (values["desirable"], 0.0, values["undesirable"])
        return Form(cls.kind, 0, values["beta"], *weights)

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        return super().numbers(sums) | {"kl": sums["kl"] / (sums["count"] or float("nan"))}

    def prepare(self, rows: Rows) -> None:
        """Compute the sums over each answer's tokens, and the shift from the gains on all ranks."""
        super().prepare(rows)
        mesh, gained, lane = self.dev.mesh, self._gained, self._lane
        own = gained.rows(mesh.index(), mesh.index() + 1).view(2)
        pairs.gains(self.dev, own, self._sums, self._places(rows))
        if mesh.size() > 1:
            lane.forget()
            lane.follow()
            gather = partial(mesh.group().all_gather, gained.view(gained.size), own)
            lane.arrive("gained", gather)
            lane.use("gained")
        pairs.shift(self.dev, self._shift, gained)
