"""The options of a run for so many hours: size, tokens, batch, rates, formats; and what it reaches.

`llmq recipe` searches sizes, optimizers and formats for the lowest loss by a scaling law. How many
tokens the hours pay for says the fastest plan that fits, of each of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.base.files import read_json
from llmq.options.option_types import MUONS
from llmq.options.options import TrainConfig
from llmq.options.sizes import SIZES, resized
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.fit import PRODUCT, Candidate, Fit
from llmq.plan.law import Law, law_of
from llmq.plan.memory import OutOfMemory, disk_use
from llmq.plan.shrink import FP8, changed
from llmq.plan.target import PlanTarget
from llmq.state.params import parameter_count
from llmq.state.placement import place, table_of

BASE = "Qwen3-0.6B"
"""The preset whose architecture recipes have: RMSNorm of queries and keys bears high rates."""
DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48)
WIDTH = 64  # channels for each block, as in nanochat: one number says the size

START, START_OFF = 14.0, 7.0  # seconds to the first step: 8 of a small model, 21 of a large one
DISK = 1e9  # bytes per second of the last checkpoint and the model; a slow disk takes longer
RIG_ERROR = 0.05  # of steps that are predicted by a rig's own rates (docs/planning.md)
# The same where steps were tried, and seconds of the start: clocks fall while a card becomes warm.
TRIED_ERROR, TRIED_OFF = 0.02, 3.0
GUESS = 0.35e12  # of a peak in TFLOP/s: FLOP/s that a search begins with
ROUNDS = 3  # of speed by tokens a step, and tokens a step by speed
# By how much a larger micro-batch must be faster to be looked at: where sizes are compared, and for
# the best ones, whose losses are apart by no more than such a speed changes.
ROUGH, THOROUGH, CLOSE = 0.05, 0.01, 0.003
VALIDATIONS, VALIDATION_SHARE = 20, 0.02  # how many at most, and of the time at most
VALIDATION_TOKENS = 1 << 19  # of each
FORWARD = 1 / 3  # of a step's time for its tokens
WARMUP = 0.03  # of the steps
CHECKPOINT_MINUTES = 30
DELAYED = FP8 | {"fp8_recipe": "delayed"}
FP8_LOSS = 1.002  # with delayed scales after 540 steps (docs/speed.md): 0.07 and 0.21 % more

# Li et al., arXiv:2503.04715, for AdamW: N without embeddings, D in tokens.
BATCH = (0.58, 0.571)  # tokens of a step: 0.58 D^0.571
# Muon bears up to four times as many. Twice as many had the lower loss in runs that were as long,
# where they trained 18 to 30 % more tokens (benchmarks/h200/2026-11-26/h200_recipe_around).
MUON_BATCH, MUON_GAIN = 4, 1.15
RATE = (1.79, -0.713, 0.307)  # 1.79 N^-0.713 D^0.307
MOST_RATE = 0.004  # what the formula says of models smaller than its own is higher
# Muon's times 1 / sqrt(width), at most MOST_RATE: 0.02 of Keller Jordan's code is 0.1 so, as
# the rule multiplies changes by 0.2 sqrt(width). In our runs 0.004 was best at 256 and 512
# channels, with so many tokens a step; with fewer it falls as their root (docs/optimizer.md).
MUON_RATE, MUON_STEP = 0.08, 16384
# Over it the rate of all else, which AdamW trains: four times was the best with 8 and 16 million
# tokens, and no better than the same with 98 million (benchmarks/h200/2026-11-26/h200_law).
TABLES, TABLES_TOKENS, TABLES_EXPONENT = 4.0, 16e6, -0.25
# How the best rate changes with the width: AdamW's as 1 / width (Yang et al., arXiv:2203.03466);
# a change by Muon has the same singular values at any width, times 0.2 sqrt(width).
# And with the root of the tokens of a step (Malladi et al., arXiv:2205.10287).
WIDTH_EXPONENTS = {"adamw": 1.0, "muon": 0.5, "normuon": 0.5}

MOST_PASSES = 4
"""So many passes over data are worth nearly as much as new data (arXiv:2305.16264), and no recipe
makes more. Larger models learn data by heart sooner: of 55 and 91 million parameters on 24 million
tokens, the losses of 7 and of 4 passes were 0.5 and 0.15 above the law (docs/recipe.md)."""
CARRIED = 2.0  # parameters for each token, above which the passes fall as their root

CHOSEN = {"steps", "epochs", "max_hours"}
"""Options that follow from the hours, so that they cannot be given."""


def sizes_of(depth: int) -> dict[str, int]:
    """The sizes, by field, of a model of so many blocks."""
    width = WIDTH * depth
    head = 128 if width >= 1024 and width % 128 == 0 else 64
    return {
        "hidden_size": width,
        "intermediate_size": -(-8 * width // (3 * 64)) * 64,
        "num_layers": depth,
        "num_heads": width // head,
        "num_kv_heads": width // head,
        "head_dim": head,
    }


class Tried(NamedTuple):
    """Seconds of a step on this machine, and to the first one."""

    step: float
    start: float


class Rates(NamedTuple):
    """The best rate that `llmq sweep-lr` has found, at which width, with so many tokens a step.
    source: for the user. muon_share: Muon's rate over it."""

    rate: float
    width: int
    tokens_per_step: int
    optimizer: str
    source: str
    muon_share: float = 1.0

    def at(self, width: int, tokens_per_step: int) -> float:
        """The rate at another width, with other steps."""
        by_width = (self.width / width) ** WIDTH_EXPONENTS[self.optimizer]
        return self.rate * by_width * math.sqrt(tokens_per_step / self.tokens_per_step)


def read_rates(file: Path) -> Rates:
    """The result of `llmq sweep-lr`. Raises ConfigError."""
    try:
        found = read_json(file)
        names = ("rate", "width", "tokens_per_step", "optimizer")
        share = float(found.get("muon_share", 1.0))
        return Rates(*(found[name] for name in names), source=f"'{file}'", muon_share=share)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--rates: '{file}' is not of llmq sweep-lr ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wish for a recipe. train_tokens, eval_tokens: that the files have, None without files.
    pace: the time of a step that was tried, over the predicted one; None: none was tried. start,
    start_off: seconds to the first step, and how far off."""

    hours: float
    rates: Rates | None = None
    train_tokens: int | None = None
    eval_tokens: int = 0
    pace: float | None = None
    start: float = START
    start_off: float = START_OFF

    @property
    def unique(self) -> float:
        """Tokens that are there before they are repeated."""
        return math.inf if self.train_tokens is None else self.train_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run, and what is predicted of it. base: its options before a search for what fits, and is
    fastest. seconds: by what they go into. loss: in nats a token by the law. step_error: the part
    by which a step's time may be off, start_off: seconds of the start. unique: as Wanted has it.
    notes: reasons of options, by field."""

    config: TrainConfig
    base: TrainConfig
    model: ModelConfig
    where: PlanTarget
    need: Estimate
    law: Law
    seconds: dict[str, float]
    loss: float
    step_error: float
    start_off: float
    unique: float = math.inf
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return parameter_count(self.model)

    @property
    def tokens(self) -> int:
        return self.config.steps * self.need.tokens

    @property
    def passes(self) -> float:
        """Over the data; 0: there are no files."""
        return self.tokens / self.unique

    @property
    def is_all_data(self) -> bool:
        """Whether another step would be more passes than data bear."""
        return self.tokens + self.need.tokens > most_tokens(self.unique, self.parameters)

    @property
    def has_ground(self) -> bool:
        """Whether the law says anything of it: what is above the loss of a guess is no loss of a
        trained model."""
        return self.loss < math.log(self.model.vocab_size)

    @property
    def time(self) -> float:
        """Seconds of everything."""
        return sum(self.seconds.values())

    @property
    def time_error(self) -> float:
        """The part of the time by which it may be off."""
        steady = self.time - self.seconds["start"] - self.seconds["saving"]
        parts = (self.step_error * steady, self.start_off, self.seconds["saving"])
        return math.hypot(*parts) / self.time

    @property
    def joules(self) -> float | None:
        """Energy of the GPUs at their power limit; None where that is not known."""
        watts = self.where.card.power
        return None if watts is None else watts * self.time * self.where.world_size


def most_tokens(unique: float, parameters: float) -> float:
    """The tokens of all passes over so many that a model of so many parameters bears."""
    return MOST_PASSES * unique * min(math.sqrt(CARRIED * unique / parameters), 1.0)


def batch_tokens(tokens: float) -> float:
    """Tokens of a step, for a run of so many."""
    factor, exponent = BATCH
    return factor * tokens**exponent


def _nearest_power(number: float) -> int:
    """The power of two that is nearest, by its logarithm."""
    return 2 ** max(round(math.log2(number)), 0)


def published_rate(parameters: float, tokens: float) -> float:
    """The learning rate. parameters: without embeddings."""
    factor, of_size, of_tokens = RATE
    return min(factor * parameters**of_size * tokens**of_tokens, MOST_RATE)


class Search:
    """The search for one machine and what is wanted."""

    def __init__(
        self,
        config: TrainConfig,
        model: ModelConfig,
        fixed: frozenset[str],
        where: Callable[[TrainConfig, ModelConfig], PlanTarget],
        wanted: Wanted,
    ):
        """config, model: as given; fixed: names of options that keep their values. where: the
        machine, for a run."""
        self.config, self.model, self.fixed = config, model, fixed
        self.where, self.wanted = where, wanted
        self.tried: list[Recipe] = []
        self._flops = 0.0  # a second, of the last plan: the next one begins with as many
        self._planners: dict[tuple[ModelConfig, str], Planner] = {}
        chosen = {"model", *SIZES} - {"vocab_size", "tie_embeddings"} & fixed
        self.shapes = [{}] if chosen & fixed else [sizes_of(depth) for depth in DEPTHS]

    def best(self) -> Recipe:
        """The recipe with the lowest loss. Raises OutOfMemory or ConfigError if there is none."""
        change = {"optimizer": self._optimizer()}
        plain = self._climb(change, None)
        if plain is None:
            raise OutOfMemory("no model fits with these options, and trains in these hours", [])
        best, place = plain
        if not {*DELAYED} & self.fixed and best.where.card.fp8:
            faster = self._climb(change | DELAYED, place)
            best = best if faster is None else min(best, faster[0], key=lambda made: made.loss)
        return best

    def refined(self) -> Recipe:
        """The best of those that were tried, after a thorough search for the fastest micro-batch of
        all that may be the best by that."""
        close = (1 + CLOSE) * min(recipe.loss for recipe in self.tried)
        for number, recipe in enumerate(self.tried):
            if recipe.loss > close:
                continue
            base, model, where = recipe.base, recipe.model, recipe.where
            sequences = recipe.config.batch_size * recipe.config.grad_accumulation
            found = self._fastest(base, where, model, sequences, THOROUGH)
            if found is not None and found.need.speed > recipe.need.speed:
                self.tried[number] = self._of(found.config, base, model, where, found.need)
        return min(self.tried, key=lambda recipe: recipe.loss)

    def _fastest(
        self, config: TrainConfig, where: PlanTarget, model: ModelConfig, number: int, worth: float
    ) -> Candidate | None:
        """The fastest division of a rank's so many sequences. worth: as Fit.fastest has it."""
        base = replace(config, batch_size=number, grad_accumulation=1)
        key = model, where.backend
        planner = self._planners.setdefault(key, where.planner(model))
        return Fit(base, planner, where.limits, self.fixed).fastest(worth)

    def tried_at(self, recipe: Recipe, tried: Tried) -> Recipe:
        """The same model and step, with as many steps as there is time for by what was tried."""
        self.wanted = replace(
            self.wanted,
            pace=tried.step / recipe.need.time.total,
            start=tried.start,
            start_off=TRIED_OFF,
        )
        made = self._of(recipe.config, recipe.base, recipe.model, recipe.where, recipe.need)
        if made is None:
            raise ConfigError("--hours: are too few for one step, which was timed")
        return made

    def _optimizer(self) -> str:
        if "optimizer" in self.fixed:
            return self.config.optimizer
        if self.wanted.rates is not None:
            return self.wanted.rates.optimizer
        return "adamw" if self.where(self.config, self.model).world_size > 1 else "muon"

    def _climb(self, change: dict[str, Any], start: int | None) -> tuple[Recipe, int] | None:
        """The best size with these options, and its place among shapes: from size to size as long
        as the loss falls. start: where to begin."""
        known: dict[int, Recipe | None] = {}

        def loss(place: int) -> float:
            if place not in known:
                known[place] = self._made(self.shapes[place] | change)
                self.tried += [] if known[place] is None else [known[place]]
            return math.inf if known[place] is None else known[place].loss

        place, best = None, self._guess() if start is None else start
        while best > 0 and math.isinf(loss(best)):  # too large for the memory or for the hours
            best -= 1
        while place != best:
            place = best
            near = range(max(place - 1, 0), min(place + 2, len(self.shapes)))
            best = min(near, key=lambda n: (loss(n), n != place))
        return None if known[best] is None else (known[best], best)

    def _guess(self) -> int:
        """The size to begin with: 20 tokens for each parameter."""
        if len(self.shapes) == 1:
            return 0
        where = self.where(self.config, self.model)
        flops = GUESS * where.card.bf16 * where.world_size * 3600 * self.wanted.hours
        counts = [parameter_count(resized(self.model, shape)) for shape in self.shapes]
        return min(range(len(counts)), key=lambda n: abs(math.log(flops / (120 * counts[n] ** 2))))

    def _made(self, change: dict[str, Any]) -> Recipe | None:
        """The recipe with these fields; None if they do not fit, or not into the hours."""
        shape = {name: value for name, value in change.items() if name in SIZES}
        model = resized(self.model, shape)
        try:
            config = changed(self.config, change).validate_with(model)
        except ConfigError:
            if self.tried:  # options that are given go with others that were tried, not with these
                return None
            raise
        where = self.where(config, model)
        flops = self._flops or GUESS * where.card.bf16 * where.world_size
        count, before = parameter_count(model), 0
        seconds = 3600 * self.wanted.hours - self.wanted.start
        most = most_tokens(self.wanted.unique, count)

        with_sequences = partial(self._fastest, config, where, model, worth=ROUGH)
        tokens = min(flops / (6 * count) * max(seconds, 1.0), most)
        for _ in range(ROUNDS):
            sequences = self._sequences(config, tokens, where.world_size)
            if sequences == before:
                break
            found, before = with_sequences(sequences), sequences
            if found is None:
                return None
            tokens = min(found.need.speed * max(seconds, 1.0), most)
        bound = MUON_BATCH * batch_tokens(tokens) / (config.seq_len * where.world_size)
        bound = 0 if config.optimizer not in MUONS or PRODUCT & self.fixed else bound
        while 2 * sequences <= bound and found.config.grad_accumulation == 1:
            sequences *= 2
            larger = with_sequences(sequences)
            if larger is None or larger.need.speed < MUON_GAIN * found.need.speed:
                break
            found = larger
        self._flops = 6 * count * found.need.speed
        return self._of(found.config, config, model, where, found.need)

    def _sequences(self, config: TrainConfig, tokens: float, ranks: int) -> int:
        """Sequences of a rank and step: a power of two, or as given."""
        if PRODUCT & self.fixed:
            return config.batch_size * config.grad_accumulation
        return _nearest_power(batch_tokens(tokens) / (config.seq_len * ranks))

    def _of(
        self,
        config: TrainConfig,
        base: TrainConfig,
        model: ModelConfig,
        where: PlanTarget,
        need: Estimate,
    ) -> Recipe | None:
        """The recipe of options that fit; None if the hours are too few for a step. base: as Recipe
        has it."""
        config, seconds = self._timed(config, model, where, need)
        if config.steps < 1:
            return None
        wanted = self.wanted
        law = law_of(config.optimizer)
        parameters, tokens = parameter_count(model), config.steps * need.tokens
        loss = law.loss(parameters, tokens, wanted.unique)
        rates, of_rate = self._rates(config, model, tokens, need.tokens)
        own = {
            **rates,
            "warmup": max(round(WARMUP * config.steps), 1),
            "lr_schedule": "linear",
            "final_lr_fraction": 0.0,
        }
        own = {name: value for name, value in own.items() if name not in self.fixed}
        made = Recipe(
            config=changed(config, own),
            base=base,
            model=model,
            where=where,
            need=need,
            law=law,
            seconds=seconds,
            loss=loss * (FP8_LOSS if config.is_fp8 else 1),
            step_error=self._step_error(where),
            start_off=wanted.start_off,
            unique=wanted.unique,
            notes={"learning_rate": of_rate} if "learning_rate" in own else {},
        )
        hours = round(wanted.hours * (1 + 2 * made.time_error) + 0.01, 2)
        return replace(made, config=replace(made.config, max_hours=hours))

    def _timed(
        self, config: TrainConfig, model: ModelConfig, where: PlanTarget, need: Estimate
    ) -> tuple[TrainConfig, dict[str, float]]:
        """The config with as many steps as there is time for, with validations and checkpoints;
        and the seconds of each."""
        wanted = self.wanted
        step = need.time.total * (wanted.pace or 1.0)
        speed = need.tokens / step
        shards = config.shards(where.world_size, where.network.machines)
        disk = disk_use(
            config, model, place(config.for_step, table_of(config, model, shards), shards)
        )
        one = need.tokens // config.grad_accumulation
        batches = max(VALIDATION_TOKENS // one, 1)
        validation = FORWARD * min(batches * one, wanted.eval_tokens) / speed
        last = FORWARD * wanted.eval_tokens / speed + validation * config.eval_at_start
        saving = (disk.checkpoint + disk.model) / DISK
        left = 3600 * wanted.hours - wanted.start - last - saving
        often = int(min(VALIDATION_SHARE * left / max(validation, step), VALIDATIONS))
        often = often if validation else 0
        saves = int(left // (60 * CHECKPOINT_MINUTES))
        left -= often * validation + saves * disk.checkpoint / DISK
        most = max(most_tokens(wanted.unique, parameter_count(model)) / need.tokens, 1)
        steps = max(int(min(left / step, most)), 0)
        own: dict[str, Any] = {"steps": steps, "epochs": None}
        own |= {"eval_every_n_steps": -(-steps // (often + 1)) if often else 0}
        own |= {"eval_num_steps": batches, "ckpt_interval": 0}
        own |= {"ckpt_every_minutes": float(CHECKPOINT_MINUTES if saves else 0)}
        own = {name: v for name, v in own.items() if name not in self.fixed or name in CHOSEN}
        seconds = {"start": wanted.start, "steps": steps * step}
        seconds |= {"validation": often * validation + last}
        seconds |= {"saving": saving + saves * disk.checkpoint / DISK}
        return replace(config, **own), seconds

    def _step_error(self, where: PlanTarget) -> float:
        """The part of a step's time by which it may be off on this machine."""
        if self.wanted.pace is not None:
            return TRIED_ERROR
        error = where.card.error_of(where.world_size)
        return RIG_ERROR if error is None else error

    def _rates(
        self, config: TrainConfig, model: ModelConfig, tokens: int, step: int
    ) -> tuple[dict[str, float], str]:
        """The learning rates, by field, and the reason of them. tokens: of the run; step: of a
        step."""
        rates, muon = self.wanted.rates, config.optimizer in MUONS
        if rates is not None and rates.optimizer == config.optimizer:
            why = (
                f"The best of {rates.source} at {rates.width} channels, by width and tokens a step"
            )
            rate = rates.at(model.hidden_size, step)
            own = {"muon_lr": round_rate(rate * rates.muon_share)} if muon else {}
            return {"learning_rate": round_rate(rate)} | own, why
        if muon:
            why = "What was best in our runs, by width and tokens; `llmq sweep-lr` measures it"
            rate = min(MUON_RATE / math.sqrt(model.hidden_size), MOST_RATE)
            least = min(step, _nearest_power(batch_tokens(tokens)))
            more = min(step / least, MUON_BATCH)  # tokens a step than the paper has
            rate *= math.sqrt(min(least / MUON_STEP, 1.0) * more)
            over = TABLES * max(tokens / TABLES_TOKENS, 1.0) ** TABLES_EXPONENT
            rates = {"learning_rate": rate * max(over, 1.0), "muon_lr": rate}
            return {name: round_rate(each) for name, each in rates.items()}, why
        inner = parameter_count(model) - model.vocab_size * model.hidden_size
        why = "By the published law of arXiv:2503.04715; `llmq sweep-lr` measures it"
        return {"learning_rate": round_rate(published_rate(inner, tokens))}, why


def round_rate(rate: float) -> float:
    """Three digits: more is nothing that is known."""
    return float(f"{rate:.3g}")
