"""Optimizer options: the loss, the update rule and the learning rate, with their rules."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.options.conditions import draws, error, rounds
from llmq.options.loss_params import (
    LOSS_PARAMS,
    OF_LOGITS,
    POLICIES,
    complete_params,
    loss_values,
    part_rates,
)
from llmq.options.option_types import (
    ADAPTERS_GROUP,
    LOSS_GROUP,
    MUONS,
    PREFERENCES,
    REFERENCED,
    dtype_option,
    option,
    parse_params,
    parse_steps,
)
from llmq.options.rule import IMPLY, REFUSE, Options, Rule, default, each, idle, refused, without

_LEAST_EPSILON = 2.0**-126  # AdamW's; the smallest normal F32, which no GPU flushes to 0

_TRAINED_BY = {
    "embedding": ("embeddings",),
    "head": ("head",),
    "vectors": ("norms", "biases", "adapted-biases"),
}
"""Words of --train by part of --lr-parts: beside adapters a part needs one of these words."""

SCHEDULES = ("cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """Options of the loss, the update rule and the learning rate."""

    optimizer: str = option(
        "adamw",
        "Update rule; muon: for the matrices of blocks, and AdamW for all else; normuon: Muon with "
        "changes divided by the root of a mean square of each row; galore: AdamW, for the matrices "
        "of blocks of gradients projected to few directions",
        choices=("adamw", *MUONS, "galore"),
        group="Optimizer and schedule",
    )
    learning_rate: float | None = option(None, "Highest learning rate", alias="lr", min=0)
    lr_parts: tuple[str, ...] = option(
        (),
        "Rates of parts beside the matrices of blocks, PART=RATE with commas between several, as "
        "--learning-rate if not given; embedding: the token table and learned positions, head: an "
        "LM head of its own, or a score head, vectors: norms, biases and other vectors, experts' "
        "routers and short convolutions",
        parse=parse_params,
    )
    warmup: float = option(
        0, "Steps of linear warm-up, or a part of the run as 5%", min=0, parse=parse_steps
    )
    cooldown: float | None = option(
        None,
        "Steps of the final anneal to zero, or a part of the run as 20%",
        min=0,
        parse=parse_steps,
    )
    final_lr_fraction: float | None = option(
        None, "Where cosine and linear end, as a fraction of the learning rate", min=0
    )
    lr_schedule: str | None = option(
        None,
        "Course of the learning rate between --warmup and --cooldown; cosine, linear: down to "
        "--final-lr-fraction, wsd: constant",
        choices=SCHEDULES,
    )
    beta_1: float = option(0.9, "AdamW: decay of the first moment", min=0, below=1)
    beta_2: float = option(0.95, "AdamW: decay of the second moment", min=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW: added to the root of the second moment; more than 0")
    opt_m_dtype: str = dtype_option(
        "fp32",
        "Format of AdamW's and GaLore's first moment, and of Muon's momentum; e4m3: with a scale "
        "per 128 elements",
        "e4m3",
    )
    opt_v_dtype: str = dtype_option(
        "fp32",
        "AdamW, GaLore: format of the second moment; e4m3: with a scale per 128 elements",
        "e4m3",
    )
    weight_decay: float = option(0.1, "Decay of the matrices", min=0)
    muon_lr: float | None = option(
        None, "Muon: its highest learning rate, which takes the course of AdamW's; {rule}", min=0
    )
    galore_rank: int = option(
        128, "GaLore: directions of each matrix; a multiple of 8", min=8, max=4096
    )
    galore_period: int = option(
        200, "GaLore: steps from one choice of the directions to the next", min=1
    )
    galore_scale: float = option(
        0.25, "GaLore: factor of the changes of projected matrices", above=0
    )
    layers_per_step: int | None = option(
        None,
        "Train so many blocks in each step, drawn by --seed, with the embedding, the LM head and "
        "the vectors; gradients and moments of other blocks take no memory; all if not given",
        min=1,
    )
    layers_period: int = option(
        20, "Steps that train the same blocks; moments then begin at zero", min=1
    )
    ema: float = option(
        0.0,
        "Decay per step of a moving average of the weights, which is evaluated, sampled and "
        "exported in their place; 0: none",
        min=0,
        below=1,
    )
    grad_clip: float = option(
        1.0, "Longest gradient norm, longer ones are scaled down; 0: off", min=0
    )
    z_loss: float = option(
        0.0,
        "Weight of half the squared log-sum-exp of the logits in the loss, as in llm.q",
        min=0,
        max=1e3,
    )
    router_aux_loss: float | None = option(
        None,
        "Weight of the load-balancing loss of experts' routers; if not given, that of the model's "
        "config.json with --from-scratch, else 0",
        min=0,
        max=1e3,
    )
    router_z_loss: float = option(
        0.0,
        "Weight of the mean squared log-sum-exp of routers' logits in the loss",
        min=0,
        max=1e3,
    )
    lora_plus: float = option(
        1.0, "Learning rate of the adapters' B over that of A", above=0, group=ADAPTERS_GROUP
    )
    seed: int = option(
        42,
        "Seed of the initial weights and of stochastic rounding",
        min=0,
        max=2**32 - 1,
        group="Optimizer and schedule",
    )
    loss: str = option(
        "ce",
        "What is minimized; ce: cross-entropy of tokens, or of a score head's classes; dpo, ipo, "
        "simpo, orpo: losses of pairs of answers, of which one is to be preferred; reward: that "
        "of a score head; kto: of answers with labels; weighted: cross-entropy of tokens, each "
        "times its score; kd: the divergence from a teacher; grpo, dr-grpo, dapo, gspo, cispo: "
        "samples of the model, by their advantages",
        choices=LOSS_PARAMS,
        group=LOSS_GROUP,
    )
    num_labels: int | None = option(
        None,
        "Classes of a score head, which stands behind the last token of each document in the place "
        "of the LM head",
        min=1,
    )
    scores: Path | None = option(
        None,
        "Directory of `llmq score`, with what the reference model thinks of each token; dpo, ipo, "
        "kto, and losses with beta=..., score the data by the first weights if not given; of "
        "weighted each token's weight, of kd a teacher's --top-k",
    )
    loss_params: tuple[str, ...] = option(
        (),
        "Parameters of --loss, NAME=VALUE with commas between several; dpo: beta=0.1, smoothing=0 "
        "(part of the pairs taken for labelled wrong), normalize=false (answers compared by means "
        "over tokens, not sums), sft=0 (weight of the chosen answer's mean cross-entropy); ipo: "
        "beta=0.1, normalize=true, sft=0; simpo: beta=2, gamma=0.5 (margin), smoothing=0, "
        "normalize=true, sft=0; orpo: beta=0.1, sft=1; kto: beta=0.1, desirable=1, undesirable=1 "
        "(weights); kd: top-k=64 (probabilities of the teacher per token), mixture=0 (part of the "
        "data's own tokens), temperature=1, divergence=forward or reverse; grpo, dapo, gspo: "
        "epsilon=0.2, of gspo 0.0003, and epsilon-high=0.2, of dapo 0.28, of gspo 0.0004 (ratios "
        "of probabilities from 1 - epsilon to 1 + epsilon-high), beta=0 (weight of the divergence "
        "from the reference); dr-grpo: those of grpo, length=1024 (divisor of each sample's sum); "
        "cispo: most=5 (largest ratio), beta=0",
        parse=parse_params,
    )
    keep_reference: bool = option(
        False,
        "Keep the weights that the run begins with, in fp32, as the reference of samples; `llmq "
        "rl` does where --loss-params has a beta",
    )
    token_weights: bool = False
    """Not an option: True if the token files have weights, which the loss uses."""

    @property
    def pairs(self) -> str | None:
        """Unit of the loss: "answers" (pairs), "labels" (labelled answers), or None (tokens)."""
        return "answers" if self.loss in PREFERENCES else "labels" if self.loss == "kto" else None

    @property
    def head(self) -> str:
        """Head of the model: "score" for classes and rewards, else "lm"."""
        return "score" if self.loss == "reward" or self.num_labels is not None else "lm"

    @property
    def loss_values(self) -> dict[str, Any]:
        """Parameters of the loss by name, such as "beta" and "top-k"."""
        return loss_values(self.loss, self.loss_params)

    @property
    def has_reference(self) -> bool:
        """True if the loss reads log-probabilities of a reference model."""
        return self.loss in REFERENCED or (self.loss in POLICIES and self.loss_values["beta"] > 0)

    def warmup_of(self, steps: int) -> int:
        """Steps of warm-up of a run with this number of steps."""
        return _count(self.warmup, steps)

    def cooldown_of(self, steps: int) -> int:
        """Steps of the cooldown of a run with this number of steps."""
        return _count(self.cooldown, steps)

    def course(self, steps: int) -> str:
        """Words for the learning rates of a run with this number of steps, such as "1e-5, 20 steps
        of warm-up, cosine to 0"."""
        warmup, cooldown = self.warmup_of(steps), self.cooldown_of(steps)
        fraction = 1 if self.lr_schedule == "wsd" else self.final_lr_fraction
        floor = _short(self.learning_rate * fraction)
        words = [_short(self.learning_rate)]
        if self.optimizer in MUONS and self.muon_lr != self.learning_rate:
            words[0] += f" (Muon {_short(self.muon_lr)})"
        words += [f"{_steps(warmup)} of warm-up"] if warmup else []
        words += ["constant" if fraction == 1 else f"{self.lr_schedule} to {floor}"]
        words += [f"{_steps(cooldown)} of cooldown to 0"] if cooldown else []
        return ", ".join(words)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of `step`, counted from 0, in a run of `steps` steps."""
        return learning_rate(
            step,
            steps=steps,
            base=self.learning_rate,
            warmup=self.warmup_of(steps),
            cooldown=self.cooldown_of(steps),
            final_fraction=self.final_lr_fraction,
            schedule=self.lr_schedule,
        )

    def rate_factor(self, slab: str) -> float:
        """Factor of the learning rate of a slab that AdamW updates, relative to the run's."""
        if slab == "lora_b":
            return self.lora_plus
        rates = part_rates(self.lr_parts)
        own = {"embed": rates.get("embedding"), "head": rates.get("head")}
        own |= dict.fromkeys(("vectors", "norms", "biases"), rates.get("vectors"))
        rate = own.get(slab)
        return 1.0 if rate is None else rate / self.learning_rate


def _count(given: float, steps: int) -> int:
    """Number of steps. given: a number of steps, or, below 1, a share of all `steps`."""
    return int(given) if given >= 1 else round(given * steps)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _short(number: float) -> str:
    """Text of a learning rate without zeros in front of the exponent: 1e-5, not 1e-05."""
    return re.sub(r"e([+-])0+", r"e\1", f"{number:g}")


def learning_rate(
    step: int,
    *,
    steps: int,
    base: float,
    warmup: int = 0,
    cooldown: int = 0,
    final_fraction: float = 1.0,
    schedule: str = "cosine",
) -> float:
    """Learning rate of one step out of range(steps), in the units of base.

    Three phases, with E = steps - cooldown, or 0 where the cooldown is longer than the run:
        step < warmup   rises by base / warmup per step; step 0 has 0
        step < E        cosine or linear: from base down to the floor, base * final_fraction, which
                        step E - 1 has exactly (a phase of a single step stays at base); wsd: base
        step >= E       the rate of step E without cooldown, times 1 - sqrt((step - E) / cooldown)

    schedule is one of SCHEDULES in any case, else ValueError.
    """
    shape = schedule.lower()
    if shape not in SCHEDULES:
        raise ValueError(f"learning_rate: schedule must be one of {SCHEDULES}, got {schedule!r}")
    end = max(steps - cooldown, 0)
    anneal = 1.0
    if cooldown and step > end:
        anneal -= math.sqrt(min((step - end) / cooldown, 1.0))
    step = min(step, end)

    if step < warmup:
        return anneal * base * step / warmup
    floor = base * final_fraction
    last = end - 1 - warmup
    position = min((step - warmup) / last, 1.0) if last > 0 else 0.0
    if shape == "cosine":
        return anneal * (floor + (base - floor) * (0.5 * math.cos(math.pi * position) + 0.5))
    if shape == "linear":
        return anneal * (base + (floor - base) * position)
    return anneal * base


def _untrained(o: Options) -> str | None:
    """Line about the first rate of --lr-parts whose part is not trained beside adapters; None if
    there is none."""
    for text in o.lr_parts if o.wants_adapters else ():
        names = _TRAINED_BY.get(text.partition("=")[0], ())
        if names and not {*names} & {*(o.train or ())}:
            return f"{text} has no effect beside adapters without --train={names[0]}"
    return None


def _differ(model: Any) -> bool:
    """True if the model's blocks have matrices of different shapes."""
    layers = range(model.num_layers)
    return len({tuple(m.shape for m in model.matrices(layer)) for layer in layers}) > 1


OPTIM_RULES = (
    default(
        "learning_rate",
        lambda o: 2e-4 if o.wants_adapters else 1e-5,
        help="1e-5 if not given, with adapters 2e-4",
    ),
    # A named schedule decays; llm.q's constant rate is a cosine that ends at the rate itself.
    default(
        "cooldown",
        lambda o: 0.2 if o.lr_schedule == "wsd" else 0,
        help="0 if not given, with --lr-schedule wsd 20%",
    ),
    default(
        "final_lr_fraction",
        lambda o: 0.0 if o.lr_schedule in ("cosine", "linear") else 1.0,
        help="0 if only --lr-schedule is given, 1 if neither is",
    ),
    default(
        "lr_schedule",
        lambda o: "cosine",
        help="if neither this nor --final-lr-fraction is given the rate is constant",
    ),
    default(
        "muon_lr",
        lambda o: o.learning_rate,
        lambda v, o: o.optimizer in MUONS,
        help="as --learning-rate if not given",
    ),
    *refused(
        "optimizer",
        lambda v, o: v in MUONS and o.wants_adapters,
        "{value} is for the matrices of blocks, which stay as they are beside adapters",
    ),
    *refused(
        "optimizer",
        lambda v, o: v == "galore" and o.wants_adapters,
        "{value} is for the matrices of blocks, which stay as they are beside adapters",
    ),
    *refused(
        "layers_per_step",
        lambda v, o: v and o.wants_adapters,
        "is for the blocks of the model, which stay as they are beside adapters",
    ),
    *refused(
        "layers_per_step",
        lambda v, o: v and (o.ema or o.keep_reference),
        "other blocks have no average (--ema) and no reference (--keep-reference)",
    ),
    *refused(
        "layers_per_step",
        lambda v, o: v and o.own_master,
        "other blocks have no master weights: use --master-dtype {model_dtype}",
    ),
    *refused(
        "layers_per_step",
        lambda v, o: v and o.ckpt_background,
        "moments change their memory: leave --ckpt-background out",
    ),
    *refused(
        "layers_per_step",
        lambda v, o, model: v and v > model.num_layers,
        "{value} blocks are more than the model's {model.num_layers}",
    ),
    *refused(
        "layers_per_step",
        lambda v, o, model: v and _differ(model),
        "blocks of this model differ, so that one does not fit into the memory of another",
    ),
    *idle(
        "layers_per_step",
        lambda v, o, model: v == model.num_layers,
        "{given} has no effect but that moments begin at zero every {layers_period} steps: the "
        "model has no more blocks",
    ),
    *without("layers_period", lambda o: o.layers_per_step, "--layers-per-step"),
    *refused("galore_rank", lambda v, o: v % 8, "{value} is no multiple of 8"),
    *refused(
        "offload_opt_m offload_opt_v",
        lambda v, o: v and o.optimizer == "galore",
        "moments of projected gradients stay on the device: leave it out with --optimizer galore",
    ),
    *refused(
        "muon_lr lr_parts",
        lambda v, o: v not in (None, ()) and o.learning_rate == 0,
        "takes the course of --learning-rate, which must be more than 0",
    ),
    *refused(
        "adam_epsilon",
        lambda v, o: v < _LEAST_EPSILON,
        "must be greater than 0 (in F32, at least 1.2e-38), else the update of a "
        "weight without gradients is 0 / 0, got {value}",
    ),
    *refused(
        "cooldown",
        lambda v, o: 0 <= o.steps < o.cooldown_of(o.steps),
        "{value} steps are more than the {steps} of the whole run: use fewer, or train for longer",
    ),
    *refused(
        "cooldown",
        lambda v, o, total: o.cooldown_of(total) > total,
        "{value} steps are more than the {total} of the whole run: use fewer, or train for longer",
    ),
    *each("lr_parts", REFUSE, lambda v, o: error(part_rates, v), "{found}"),
    *idle("lr_parts", lambda v, o: _untrained(o), "--lr-parts {found}"),
    *idle(
        "lr_parts",
        lambda v, o, model: model.tied_embeddings and part_rates(v).get("head"),
        "--lr-parts head={found:g} has no effect: this model's LM head is its token table, give "
        "embedding",
    ),
    *idle(
        "final_lr_fraction",
        lambda v, o: v != 1 and o.lr_schedule == "wsd",
        "--final-lr-fraction has no effect with --lr-schedule wsd, whose --cooldown ends at 0",
    ),
    *idle(
        "muon_lr",
        lambda v, o: o.optimizer not in MUONS,
        "has no effect without --optimizer muon",
    ),
    *without(
        "galore_rank galore_period galore_scale",
        lambda o: o.optimizer == "galore",
        "--optimizer galore",
    ),
    *idle(
        "lr_schedule",
        lambda v, o: v == "linear" and o.final_lr_fraction == 1,
        "--lr-schedule linear has no effect: with --final-lr-fraction 1 the learning rate does not "
        "change",
    ),
    *idle(
        "lr_schedule",
        lambda v, o: v == "wsd" and o.cooldown == 0,
        "--lr-schedule wsd has no effect: with --cooldown 0 the learning rate does not change",
    ),
    default(
        "num_labels",
        lambda o: 1,
        lambda v, o: o.loss == "reward",
        help="with --loss reward one score",
    ),
    *refused(
        "num_labels",
        lambda v, o: v is not None and o.loss not in ("ce", "reward"),
        "does not go with --loss {loss}: a score head learns classes (--loss ce) or pairs "
        "(--loss reward)",
    ),
    *refused(
        "z_loss",
        lambda v, o: o.head == "score" and v > 0,
        "is for logits of tokens, and a score head has none",
    ),
    *refused(
        "num_labels",
        lambda v, o: v is not None and (v > 1) != (o.loss == "ce") and o.head == "score",
        "{value} with --loss {loss}: a reward is one number, and classes are at least 2",
    ),
    Rule(
        option="loss_params",
        effect=IMPLY,
        when=lambda v, o: o.loss in LOSS_PARAMS,
        sets=lambda o: {"loss_params": complete_params(o.loss, o.loss_params)},
    ),
    *each("loss_params", REFUSE, lambda v, o: error(loss_values, o.loss, v), "{found}"),
    *refused(
        "z_loss",
        lambda v, o: (o.loss != "ce" or o.token_weights) and v > 0,
        "would be weighted as tokens are, of which --loss {loss} makes some less likely",
    ),
    # This holds for token files: a caller's own batches have scores and masks.
    *each(
        "scores",
        REFUSE,
        lambda v, o, files: v is None and o.loss == "weighted",
        "--loss weighted: needs --scores, a directory of files with a weight for each token",
    ),
    *each(
        "scores",
        REFUSE,
        lambda v, o, files: v is None and o.loss == "kd",
        "--loss kd: needs --scores of a teacher, which `llmq score` makes of the "
        "{loss_values[top-k]} most likely tokens",
    ),
    *each(
        "document_mask",
        REFUSE,
        lambda v, o, files: not v and o.loss in ("kd", "weighted", *POLICIES),
        "--loss {loss}: documents are scored one by one: give --packing best-fit, or "
        "--document-mask",
    ),
    *each(
        "loss",
        REFUSE,
        lambda v, o, model: v in OF_LOGITS and model.logit_softcap is not None,
        "--loss {value}: is computed from logits without a soft cap, and this model has one",
    ),
    *refused(
        "loss_params",
        lambda v, o, model: o.loss == "kd" and o.loss_values["top-k"] > model.vocab_size,
        "top-k={loss_values[top-k]} is more than the vocabulary of {model.vocab_size}",
    ),
    *idle(
        "keep_reference",
        lambda v, o: v and not (o.loss in POLICIES and o.has_reference),
        "has no effect without a loss of samples with beta=...",
    ),
    *idle(
        "scores",
        lambda v, o: o.scores_folder is None,
        "has no effect with --loss {loss}, which reads none",
    ),
    *refused(
        "router_aux_loss router_z_loss",
        lambda v, o: v and o.pairs,
        "is added to losses of tokens, and --loss {loss} compares answers: leave it out",
    ),
    *refused(
        "router_aux_loss router_z_loss",
        lambda v, o: v and o.loss in ("grpo", "dr-grpo", "gspo"),
        "is added to losses of tokens, and --loss {loss} is a mean over samples: use --loss dapo, "
        "or leave it out",
    ),
    *idle(
        "router_aux_loss router_z_loss",
        lambda v, o, model: v and model.experts is None,
        "has no effect, this model has no experts",
    ),
    *idle(
        "seed",
        lambda v, o: not draws(o) and not rounds(o),
        "--seed {value} has no effect: in fp32 it decides about nothing but the weights of "
        "--from-scratch and of adapters",
    ),
    *idle(
        "warmup",
        lambda v, o, length: (
            v >= length.steps > 0
            and not 0 <= o.steps < o.warmup_of(o.steps) + o.cooldown_of(o.steps)
        ),
        "--warmup {value} is not shorter than the run, which has {length.steps} steps: it ends "
        "before the learning rate is what --learning-rate says",
    ),
)
