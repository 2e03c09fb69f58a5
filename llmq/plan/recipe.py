"""Recipes: size, tokens, batch, learning rates and formats of a run of given hours, and the
promised loss.

`llmq recipe` searches sizes, optimizers and formats for the lowest loss by a scaling law. The
number of tokens for each choice follows from its fastest plan that fits.
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
"""Preset whose architecture recipes use: its RMSNorm of queries and keys allows high learning
rates."""
DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48)
WIDTH = 64  # channels for each block, as in nanochat: the depth sets the size

START, START_OFF = 14.0, 7.0  # seconds to the first step: 8 (small model) to 21 (large)
DISK = 1e9  # bytes per second of checkpoints; slow disks take longer
RIG_ERROR = 0.05  # error of steps predicted by a rig's own rates (docs/planning.md)
# After a trial: relative error of a step's time (clocks fall while a card warms up), and error of
# the start in seconds.
TRIED_ERROR, TRIED_OFF = 0.02, 3.0
GUESS = 0.35e12  # first guess of a step's FLOP/s, per TFLOP/s of the bf16 peak
ROUNDS = 3  # iterations between speed and tokens per step
# A larger micro-batch is tried only if it promises this relative speedup: ROUGH while sizes are
# compared, THOROUGH for the best sizes. CLOSE: relative difference of losses that such a speedup
# can change.
ROUGH, THOROUGH, CLOSE = 0.05, 0.01, 0.003
VALIDATIONS, VALIDATION_SHARE = 20, 0.02  # most validations, and most share of the time
VALIDATION_TOKENS = 1 << 19  # tokens of each validation
FORWARD = 1 / 3  # time of a forward pass divided by the time of a step, per token
WARMUP = 0.03  # share of the steps
CHECKPOINT_MINUTES = 30
DELAYED = FP8 | {"fp8_recipe": "delayed"}
FP8_LOSS = 1.002  # factor on the loss: 0.07 and 0.21 % more after 540 steps (docs/speed.md)

# Li et al., arXiv:2503.04715, for AdamW: N in parameters without embeddings, D in tokens.
BATCH = (0.58, 0.571)  # tokens per step: 0.58 D^0.571
# Muon tolerates up to four times as many tokens per step. Twice as many gave a lower loss in runs
# of equal time, which trained 18 to 30 % more tokens
# (benchmarks/h200/2026-11-26/h200_recipe_around).
MUON_BATCH, MUON_GAIN = 4, 1.15
RATE = (1.79, -0.713, 0.307)  # 1.79 N^-0.713 D^0.307
MOST_RATE = 0.004  # the formula gives more below its smallest models
# Muon's rate is MUON_RATE / sqrt(width), at most MOST_RATE. Keller Jordan's 0.02 corresponds to
# 0.1, because our rule multiplies changes by 0.2 sqrt(width). In our runs 0.004 was best at 256 and
# 512 channels with MUON_STEP tokens per step; with fewer tokens per step the best rate falls as
# their root (docs/optimizer.md).
MUON_RATE, MUON_STEP = 0.08, 16384
# Ratio of AdamW's rate, for all other parameters, to Muon's: a ratio of four was best in runs of 8
# and 16 million tokens, and no better than a ratio of one with 98 million
# (benchmarks/h200/2026-11-26/h200_law).
TABLES, TABLES_TOKENS, TABLES_EXPONENT = 4.0, 16e6, -0.25
# Exponents of 1 / width in the best rate: 1 for AdamW (Yang et al., arXiv:2203.03466) and all rules
# not named here; a change by Muon has the same singular values at any width, times 0.2 sqrt(width).
# The rate also grows with the root of the tokens per step (Malladi et al., arXiv:2205.10287).
WIDTH_EXPONENTS = {"muon": 0.5, "normuon": 0.5}

MOST_PASSES = 4
"""Most passes over the data in a recipe: this many are worth nearly as much as new data
(arXiv:2305.16264). Larger models memorize data sooner: of 55 and 91 million parameters on 24
million tokens, the losses of 7 and of 4 passes were 0.5 and 0.15 above the law (docs/recipe.md)."""
CARRIED = 2.0  # parameters per token above which fewer passes are permitted: as 1 / root

CHOSEN = {"steps", "epochs", "max_hours"}
"""Options that follow from the hours and cannot be given."""


def sizes_of(depth: int) -> dict[str, int]:
    """Return the sizes, by field, of a model of `depth` blocks."""
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
    """Measured seconds of a step on this machine, and seconds from the start to the first step."""

    step: float
    start: float


class Rates(NamedTuple):
    """The best rate by `llmq sweep-lr`, with its width and tokens per step. source: origin of the
    rate, as the user reads it. muon_share: Muon's rate divided by `rate`."""

    rate: float
    width: int
    tokens_per_step: int
    optimizer: str
    source: str
    muon_share: float = 1.0

    def at(self, width: int, tokens_per_step: int) -> float:
        """Return the rate at another width, with other tokens per step."""
        by_width = (self.width / width) ** WIDTH_EXPONENTS.get(self.optimizer, 1.0)
        return self.rate * by_width * math.sqrt(tokens_per_step / self.tokens_per_step)


def read_rates(file: Path) -> Rates:
    """Read the result of `llmq sweep-lr`. Raises ConfigError."""
    try:
        found = read_json(file)
        names = ("rate", "width", "tokens_per_step", "optimizer")
        share = float(found.get("muon_share", 1.0))
        return Rates(*(found[name] for name in names), source=f"'{file}'", muon_share=share)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--rates: '{file}' is not of llmq sweep-lr ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The request for a recipe. train_tokens, eval_tokens: tokens in the files; train_tokens None
    without files. pace: measured time of a step divided by its predicted time; None without a
    trial. start: seconds to the first step. start_off: error of `start` in seconds."""

    hours: float
    rates: Rates | None = None
    train_tokens: int | None = None
    eval_tokens: int = 0
    pace: float | None = None
    start: float = START
    start_off: float = START_OFF

    @property
    def unique(self) -> float:
        """Tokens before the data repeat."""
        return math.inf if self.train_tokens is None else self.train_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run and its prediction. base: the run's options before the search for the fastest fit.
    seconds: seconds of each activity. loss: nats per token by the law. step_error: relative error
    of a step's time; start_off: error of the start in seconds. unique: as in Wanted. notes: reasons
    of options, by field."""

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
        """Passes over the data; 0 without files."""
        return self.tokens / self.unique

    @property
    def is_all_data(self) -> bool:
        """True if one more step would exceed the passes that the data allow."""
        return self.tokens + self.need.tokens > most_tokens(self.unique, self.parameters)

    @property
    def has_ground(self) -> bool:
        """True if the law says something about this run: a loss above that of a uniform guess is no
        loss of a trained model."""
        return self.loss < math.log(self.model.vocab_size)

    @property
    def time(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds.values())

    @property
    def time_error(self) -> float:
        """Relative error of the time."""
        steady = self.time - self.seconds["start"] - self.seconds["saving"]
        parts = (self.step_error * steady, self.start_off, self.seconds["saving"])
        return math.hypot(*parts) / self.time

    @property
    def joules(self) -> float | None:
        """Energy of the GPUs at their power limit, in J; None if the limit is unknown."""
        return self.where.card.joules(self.time, self.where.world_size)


def most_tokens(unique: float, parameters: float) -> float:
    """Tokens of all passes over `unique` tokens that a model of this size tolerates."""
    return MOST_PASSES * unique * min(math.sqrt(CARRIED * unique / parameters), 1.0)


def batch_tokens(tokens: float) -> float:
    """Tokens per step, for a run of `tokens` tokens."""
    factor, exponent = BATCH
    return factor * tokens**exponent


def _nearest_power(number: float) -> int:
    """The nearest power of two, by logarithm."""
    return 2 ** max(round(math.log2(number)), 0)


def published_rate(parameters: float, tokens: float) -> float:
    """Learning rate by the published formula. parameters: their number without embeddings."""
    factor, of_size, of_tokens = RATE
    return min(factor * parameters**of_size * tokens**of_tokens, MOST_RATE)


class Search:
    """The search for one machine and one request."""

    def __init__(
        self,
        config: TrainConfig,
        model: ModelConfig,
        fixed: frozenset[str],
        where: Callable[[TrainConfig, ModelConfig], PlanTarget],
        wanted: Wanted,
    ):
        """config, model: as the user gave them; fixed: names of options that keep their values.
        where: function that gives the machine for a run."""
        self.config, self.model, self.fixed = config, model, fixed
        self.where, self.wanted = where, wanted
        self.tried: list[Recipe] = []
        self._flops = 0.0  # FLOP/s of the last plan, the first guess for the next plan
        self._planners: dict[tuple[ModelConfig, str], Planner] = {}
        chosen = {"model", *SIZES} - {"vocab_size", "tie_embeddings"} & fixed
        self.shapes = [{}] if chosen & fixed else [sizes_of(depth) for depth in DEPTHS]

    def best(self) -> Recipe:
        """Return the recipe with the lowest loss. Raises OutOfMemory or ConfigError if there is
        none."""
        change = {"optimizer": self._optimizer()}
        plain = self._climb(change, None)
        if plain is None:
            raise OutOfMemory("no model fits with these options, and trains in these hours", [])
        best, place = plain
        if not {*DELAYED} & self.fixed and best.where.card.fp8:
            faster = self._climb(change | DELAYED, place)
            best = best if faster is None else min(best, faster[0], key=lambda recipe: recipe.loss)
        return best

    def refined(self) -> Recipe:
        """Return the best tried recipe, after a thorough search for the fastest micro-batch of all
        recipes close enough to win."""
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
        """The fastest division of a rank's `number` sequences. worth: as in Fit.fastest."""
        base = replace(config, batch_size=number, grad_accumulation=1)
        key = model, where.backend
        planner = self._planners.setdefault(key, where.planner(model))
        return Fit(base, planner, where.limits, self.fixed).fastest(worth)

    def tried_at(self, recipe: Recipe, tried: Tried) -> Recipe:
        """Return the recipe with the number of steps that measured times allow. ConfigError if that
        number is 0."""
        self.wanted = replace(
            self.wanted,
            pace=tried.step / recipe.need.time.total,
            start=tried.start,
            start_off=TRIED_OFF,
        )
        timed = self._of(recipe.config, recipe.base, recipe.model, recipe.where, recipe.need)
        if timed is None:
            raise ConfigError("--hours: are too few for one step, which was timed")
        return timed

    def _optimizer(self) -> str:
        if "optimizer" in self.fixed:
            return self.config.optimizer
        if self.wanted.rates is not None:
            return self.wanted.rates.optimizer
        return "adamw" if self.where(self.config, self.model).world_size > 1 else "muon"

    def _climb(self, change: dict[str, Any], start: int | None) -> tuple[Recipe, int] | None:
        """The recipe of the best size with these options, and its index in `shapes`; None if no
        size fits. The search moves from size to size as long as the loss falls. start: first
        index."""
        known: dict[int, Recipe | None] = {}

        def loss(place: int) -> float:
            if place not in known:
                known[place] = self._made(self.shapes[place] | change)
                self.tried += [] if known[place] is None else [known[place]]
            return math.inf if known[place] is None else known[place].loss

        place, best = None, self._guess() if start is None else start
        while best > 0 and math.isinf(loss(best)):  # too large for memory or hours
            best -= 1
        while place != best:
            place = best
            near = range(max(place - 1, 0), min(place + 2, len(self.shapes)))
            best = min(near, key=lambda n: (loss(n), n != place))
        return None if known[best] is None else (known[best], best)

    def _guess(self) -> int:
        """Index of the first size to try: the hours suffice for 20 tokens per parameter."""
        if len(self.shapes) == 1:
            return 0
        where = self.where(self.config, self.model)
        flops = GUESS * where.card.bf16 * where.world_size * 3600 * self.wanted.hours
        counts = [parameter_count(resized(self.model, shape)) for shape in self.shapes]
        return min(range(len(counts)), key=lambda n: abs(math.log(flops / (120 * counts[n] ** 2))))

    def _made(self, change: dict[str, Any]) -> Recipe | None:
        """The recipe with these fields; None if its run does not fit into memory or hours."""
        shape = {name: value for name, value in change.items() if name in SIZES}
        model = resized(self.model, shape)
        try:
            config = changed(self.config, change).validate_with(model)
        except ConfigError:
            if self.tried:  # given options fit other shapes, not this one
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
        """Sequences of a rank in a step: a power of two, or as given."""
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
        """The recipe for a config that fits; None if the hours are too few for one step. base: as
        in Recipe."""
        config, seconds = self._timed(config, model, where, need)
        if config.steps < 1:
            return None
        wanted = self.wanted
        law = law_of(config.optimizer)
        parameters, tokens = parameter_count(model), config.steps * need.tokens
        loss = law.loss(parameters, tokens, wanted.unique)
        rates, of_rate = self._rates(config, model, tokens, need.tokens)
        chosen = {
            **rates,
            "warmup": max(round(WARMUP * config.steps), 1),
            "lr_schedule": "linear",
            "final_lr_fraction": 0.0,
        }
        chosen = {name: value for name, value in chosen.items() if name not in self.fixed}
        recipe = Recipe(
            config=changed(config, chosen),
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
            notes={"learning_rate": of_rate} if "learning_rate" in chosen else {},
        )
        hours = round(wanted.hours * (1 + 2 * recipe.time_error) + 0.01, 2)
        return replace(recipe, config=replace(recipe.config, max_hours=hours))

    def _timed(
        self, config: TrainConfig, model: ModelConfig, where: PlanTarget, need: Estimate
    ) -> tuple[TrainConfig, dict[str, float]]:
        """The config with as many steps as time allows beside validations and checkpoints, and the
        seconds of each activity."""
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
        chosen: dict[str, Any] = {"steps": steps, "epochs": None}
        chosen |= {"eval_every_n_steps": -(-steps // (often + 1)) if often else 0}
        chosen |= {"eval_num_steps": batches, "ckpt_interval": 0}
        chosen |= {"ckpt_every_minutes": float(CHECKPOINT_MINUTES if saves else 0)}
        chosen = {name: v for name, v in chosen.items() if name not in self.fixed or name in CHOSEN}
        seconds = {"start": wanted.start, "steps": steps * step}
        seconds |= {"validation": often * validation + last}
        seconds |= {"saving": saving + saves * disk.checkpoint / DISK}
        return replace(config, **chosen), seconds

    def _step_error(self, where: PlanTarget) -> float:
        """Relative error of a step's time on this machine."""
        if self.wanted.pace is not None:
            return TRIED_ERROR
        error = where.card.error_of(where.world_size)
        return RIG_ERROR if error is None else error

    def _rates(
        self, config: TrainConfig, model: ModelConfig, tokens: int, step: int
    ) -> tuple[dict[str, float], str]:
        """Learning rates by field, and their reason. tokens: tokens of the run; step: tokens per
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
            more = min(step / least, MUON_BATCH)  # ratio to the paper's tokens per step
            rate *= math.sqrt(min(least / MUON_STEP, 1.0) * more)
            over = TABLES * max(tokens / TABLES_TOKENS, 1.0) ** TABLES_EXPONENT
            rates = {"learning_rate": rate * max(over, 1.0), "muon_lr": rate}
            return {name: round_rate(each) for name, each in rates.items()}, why
        inner = parameter_count(model) - model.vocab_size * model.hidden_size
        why = "By the published law of arXiv:2503.04715; `llmq sweep-lr` measures it"
        return {"learning_rate": round_rate(published_rate(inner, tokens))}, why


def round_rate(rate: float) -> float:
    """The rate with three significant digits; more would be false precision."""
    return float(f"{rate:.3g}")
