"""Search for the fastest configurations that fit into memory (`llmq plan --fit`, `llmq train
--auto`), and for the largest preset that fits (`llmq plan --largest`).

With adapters the search also chooses the format of the frozen model.
"""

from __future__ import annotations

import json as json_module
import shlex
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError
from llmq.base.shares import AUTO, EQUAL
from llmq.options.conditions import exchanges_always
from llmq.options.option_file import command_line
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.presets import PRESETS, released
from llmq.options.rule import Changes
from llmq.options.rules import RULES
from llmq.options.savers import PLACES
from llmq.options.sizes import SIZES
from llmq.plan.advice import NOTICEABLE, refusal, spelled
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.memory import DiskUse, Limits, OutOfMemory, disk_use, mib, room
from llmq.plan.shrink import ESTIMATE_MARGIN, FP8, REARRANGING, Shrinker, having, savers
from llmq.plan.target import MachineOptions, PlanTarget, target, target_here
from llmq.report.tables import labelled
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import parameter_count
from llmq.state.placement import place, table_of

SHOWN = 5  # configurations shown
WORTH_SHOWING = 0.75  # least speed shown, relative to the fastest
LADDER = 1.4  # least factor between micro-batches that are tried
# Most tokens of a micro-batch: larger ones are no faster, and planning a million short sequences
# takes minutes.
MOST_TOKENS = 1 << 18
PRODUCT = frozenset({"batch_size", "grad_accumulation"})  # the search keeps only their product


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that fits, with its needs by the exact plan."""

    config: TrainConfig
    need: Estimate


class Fit:
    """The search for one model, one kind of machine, and a number of tokens per step."""

    def __init__(self, base: TrainConfig, planner: Planner, limits: Limits, fixed: frozenset[str]):
        """base: options as given. fixed: names of options that keep their values."""
        if planner.spec != HOST_SPEC:  # the default is the number of this machine's GPUs
            base = replace(base, gpus=planner.gpus)
        if planner.cards and "share" not in fixed and not exchanges_always(base):
            base = replace(base, share=AUTO)
        self.base, self.planner, self.limits = base, planner, limits
        self.fixed = fixed - PRODUCT
        self.shrinker = Shrinker(planner, limits.less(ESTIMATE_MARGIN), self.fixed)
        self._found: dict[int, Candidate | None] = {}  # by micro-batch size
        self._changes: dict[int, list[Changes]] = {}

    def search(self) -> list[Candidate]:
        """Return the candidates of `found`. Raises OutOfMemory if nothing fits."""
        found = self.found()
        if not found and self.base.share == AUTO and "share" not in self.fixed:
            plain = replace(self.base, share=EQUAL)  # equal shares may divide more state
            return Fit(plain, self.planner, self.limits, self.fixed | {"share"}).search()
        if not found:
            raise refusal(self.ladder()[0], self.planner, self.limits, self.fixed)
        return found

    def is_hopeless(self) -> bool:
        """True if a quick check shows that nothing fits."""
        return self.shrinker.is_hopeless(self.ladder()[0])

    def can_fit(self) -> bool:
        """True if the lightest configurations fit, by estimates; slower than is_hopeless."""
        return self.shrinker.can_fit(self.ladder()[0])

    def found(self) -> list[Candidate]:
        """Return at most SHOWN candidates that fit, the fastest first. Larger micro-batches are
        faster until their savings of memory cost too much time, so the search climbs from the
        middle."""
        ladder = self.ladder()
        ladder = ladder[: bisect_left(ladder, True, key=lambda config: not self._may_fit(config))]
        place, best = -1, len(ladder) // 2
        if ladder and self._speed(ladder[best]) == self._speed(ladder[0]) == 0:
            ladder = []  # if neither the smallest nor this one fits, none does
        while ladder and best != place:
            place = best
            near = range(max(place - 1, 0), min(place + 2, len(ladder)))
            best = max(near, key=lambda n: self._speed(ladder[n]))
        # Smaller micro-batches can win only if they are faster before any saving.
        for config in reversed(ladder[:place]):
            if self.planner.estimate(config).speed > self._speed(ladder[place]):
                self._speed(config)
        found = [candidate for candidate in self._found.values() if candidate is not None]
        if not found:
            return []
        fastest = max(found, key=_by_speed)
        found += self._without_host_memory(fastest.config)
        found.sort(key=_by_speed, reverse=True)
        return [c for c in found if _by_speed(c) >= WORTH_SHOWING * _by_speed(fastest)][:SHOWN]

    def fastest(self, worth: float) -> Candidate | None:
        """Return only the best candidate, in less time; None if nothing fits. The climb starts at
        the micro-batch that is fastest without savings, and ends where a larger micro-batch could
        be faster by at most the share `worth`, or is not faster."""

        def most(config: TrainConfig) -> float:
            return self.planner.estimate(config).speed

        ladder = self.ladder()
        fitting = sorted(filter(self.shrinker.fits, ladder), key=most, reverse=True)
        best = next(filter(self._speed, fitting), None)
        if best is None:
            return next(iter(self.found()), None)
        for larger in ladder[ladder.index(best) + 1 :]:
            if most(larger) <= (1 + worth) * self._speed(best) or not self._may_fit(larger):
                break
            if self._speed(larger) <= self._speed(best):
                break
            best = larger
        return self._found[best.batch_size]

    def changes_of(self, candidate: Candidate) -> list[Changes]:
        """Return the changes, beside the micro-batch, that made a candidate fit."""
        return self._changes[candidate.config.batch_size]

    def ladder(self) -> list[TrainConfig]:
        """Return the configuration with each micro-batch to try, the smallest first."""
        sequences = self.base.batch_size * self.base.grad_accumulation
        enough = max(MOST_TOKENS // self.base.local_seq_len, self.base.batch_size)
        ladder: list[TrainConfig] = []
        for batch in (n for n in range(1, min(sequences, enough) + 1) if sequences % n == 0):
            if ladder and batch < LADDER * ladder[-1].batch_size:
                continue
            change = {"batch_size": batch, "grad_accumulation": sequences // batch}
            config = self.shrinker.allowed(self.base, change)
            if config is not None:
                ladder.append(config)
        return ladder

    def _may_fit(self, config: TrainConfig) -> bool:
        """True if the config fits the device with all savings of device memory."""
        # The config often fits unchanged, and this estimate is quicker than one with hundreds of
        # chunks of logits.
        if not self.limits.excess(self.planner.estimate(config).device, 0):
            return True
        return not self.limits.excess(self.shrinker.least_device(config), 0)

    def _speed(self, config: TrainConfig) -> float:
        """Tokens per second of the config with the savings that it needs; 0 if it does not fit."""
        batch = config.batch_size
        if batch not in self._found:
            near = min(self._changes, key=lambda known: abs(known - batch), default=None)
            start = () if near is None else self._changes[near]
            changes = self.shrinker.shrink(config, REARRANGING, start)
            self._changes[batch] = changes
            self._found[batch] = self._candidate(self.faster(having(config, changes)))
        candidate = self._found[batch]
        return 0.0 if candidate is None else candidate.need.speed

    def _without_host_memory(self, config: TrainConfig) -> list[Candidate]:
        """A candidate with the same micro-batch and no state in host memory; [] if the config has
        none there anyway, or does not fit without."""
        if not any(getattr(config, name) for name in PLACES):
            return []
        batch = {name: getattr(config, name) for name in PRODUCT}
        plain = self.shrinker.allowed(self.base, batch | dict.fromkeys(PLACES, False))
        if plain is None:
            return []
        shrinker = Shrinker(self.planner, self.shrinker.limits, self.fixed | set(PLACES))
        candidate = self._candidate(having(plain, shrinker.shrink(plain, REARRANGING)))
        return [] if candidate is None else [candidate]

    def faster(self, config: TrainConfig) -> TrainConfig:
        """Return the config with options that make it faster, as far as memory allows."""
        for saver in savers("fast"):
            then = self.shrinker.allowed(config, saver(config))
            if then is not None and self.shrinker.fits(then):
                speeds = [self.planner.estimate(c).speed for c in (config, then)]
                config = then if speeds[1] > speeds[0] else config
        return config

    def _candidate(self, config: TrainConfig) -> Candidate | None:
        """The config as a candidate, with recomputation in the fewest layers; None if it does not
        fit."""
        for choice in (self._fewer_layers(config), config):
            rough = self.planner.estimate(choice)
            if self.limits.excess(rough.device, rough.host) > 2 * ESTIMATE_MARGIN:
                continue  # hopeless; an exact plan takes fifty times as long
            need = self.planner.exact(choice)
            if not self.limits.excess(need.device, need.host):
                return Candidate(config=choice, need=need)
        return None

    def _fewer_layers(self, config: TrainConfig) -> TrainConfig:
        if (
            not config.recomputes
            or "recompute_layers" in self.fixed
            or config.recompute_layers != "all"
        ):
            return config
        few, enough = 0, self.planner.model.num_layers
        while enough - few > 1:
            layers = (few + enough) // 2
            if not self.shrinker.fits(replace(config, recompute_layers=_first(layers))):
                few = layers
            else:
                enough = layers
        if enough == self.planner.model.num_layers:
            return config
        return replace(config, recompute_layers=_first(enough))


def _by_speed(candidate: Candidate) -> float:
    return candidate.need.speed


def _first(layers: int) -> str:
    """Value of --recompute-layers for the first `layers` layers."""
    return "0" if layers == 1 else f"0-{layers - 1}"


def fits_of(fit: Fit) -> list[Fit]:
    """Return a search for each --base-dtype that the card multiplies fast, the most precise first.
    Return only `fit` without adapters, or if the format was given."""
    if not fit.base.has_adapters or "base_dtype" in fit.fixed or fit.planner.spec == HOST_SPEC:
        return [fit]
    changes = [rule.changes(fit.base, fit.planner.card) for rule in RULES.savers("base")]
    tried = (fit.shrinker.allowed(fit.base, change) for change in changes)
    others = [config for config in tried if config is not None]
    return [fit, *(Fit(config, fit.planner, fit.limits, fit.fixed) for config in others)]


def search_bases(fit: Fit) -> tuple[Fit, list[Candidate]]:
    """Return the search that found the fastest candidate, and at most SHOWN candidates that fit,
    the fastest first. A coarser base format wins only if noticeably faster. Each other search adds
    one candidate. Raises OutOfMemory if nothing fits."""
    fits = fits_of(fit)
    if len(fits) == 1:
        return fit, fit.search()
    found = [(each, each.found()) for each in fits if not each.is_hopeless()]
    found = [(each, candidates) for each, candidates in found if candidates]
    if not found:
        raise refusal(fits[-1].ladder()[0], fit.planner, fit.limits, fits[-1].fixed)

    def worth(place: int) -> float:
        coarseness = fits.index(found[place][0])
        return found[place][1][0].need.speed / (1 + NOTICEABLE) ** coarseness

    best, *others = sorted(range(len(found)), key=worth, reverse=True)
    ways = [found[place][1][0] for place in others]
    candidates = found[best][1][: SHOWN - len(ways)]
    return found[best][0], [candidates[0], *ways, *candidates[1:]]


# ------------------------------------------------------------------------------------------------
# Coarser numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitGain:
    """Number formats that would be faster: flags, and estimated tokens per second."""

    flags: str
    speed: float


def eight_bit_gain(fit: Fit, best: Candidate) -> list[EightBitGain]:
    """Return the formats that make a step noticeably faster: fp8 products, an fp8 LM head beside
    these, MLPs that keep codes, 8-bit moments. best: the fastest candidate of `fit`. Formats are
    tried even if the user gave other formats."""
    base = fit.base
    fp8 = {} if base.is_fp8 or base.matmul_dtype == "ternary" else FP8
    alone = _Tried(fit, best, {}, fit.changes_of(best))
    products = _Tried(fit, best, fp8, ()) if fp8 else alone
    found = [products.gain] if products.gains_over(alone) else []
    if products.speed:
        (head,) = savers("head")
        beside = _Tried(fit, best, fp8 | head(base), products.changes)
        found += [beside.gain] if beside.gains_over(products) else []
    others = [change for saver in savers("others") if (change := saver(base))]
    tried = [_Tried(fit, best, change, alone.changes) for change in others]
    return found + [each.gain for each in tried if each.gains_over(alone)]


class _Tried:
    """A trial of number formats, with all other options rearranged to fit. gain: the result, as the
    user sees it. speed: tokens per second; 0 if the card lacks the format, other options forbid it,
    or nothing fits. changes: the rearrangement."""

    def __init__(self, fit: Fit, best: Candidate, change: Changes, start: Sequence[Changes]):
        """start: changes to try first, found for similar formats."""
        self._differs = any(getattr(fit.base, name) != value for name, value in change.items())
        self._fit, self.changes = fit, list(start)
        self._shrinker = Shrinker(fit.planner, fit.shrinker.limits, fit.fixed - set(change))
        self.speed = best.need.speed
        if self._differs:
            computes = "matmul_dtype" not in change or fit.planner.card.fp8 > 0
            self.speed = self._searched(best, change) if computes else 0.0
        self.gain = EightBitGain(flags=spelled(fit.base, change), speed=self.speed)

    def gains_over(self, other: _Tried) -> bool:
        """True if the formats differ from the given ones and are noticeably faster than the other
        trial."""
        return self._differs and self.speed > (1 + NOTICEABLE) * other.speed

    def _searched(self, best: Candidate, change: Changes) -> float:
        """Tokens per second with the best candidate's micro-batch and options rearranged to fit."""
        size = best.config.batch_size
        given = next(each for each in self._fit.ladder() if each.batch_size == size)
        config = self._shrinker.allowed(given, change)
        if config is None:
            return 0.0
        self.changes = self._shrinker.shrink(config, REARRANGING, self.changes)
        then = having(config, self.changes)
        if not self._shrinker.fits(then):
            return 0.0
        return self._fit.planner.estimate(self._fit.faster(then)).speed


# ------------------------------------------------------------------------------------------------
# Lines for people


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Candidates, the fastest first, and number formats that would be faster."""

    candidates: list[Candidate]
    gains: list[EightBitGain]
    disk: DiskUse

    @classmethod
    def of(cls, fit: Fit, where: PlanTarget) -> SearchResult:
        """Run the search. A CPU's speed is unknown, so formats are not compared there. Raises
        OutOfMemory if nothing fits."""
        (fit, candidates), model = search_bases(fit), fit.planner.model
        config = candidates[0].config
        shards = config.shards(where.world_size, where.network.machines)
        placement = place(config.for_step, table_of(config, model, shards), shards)
        return cls(
            candidates=candidates,
            gains=[] if where.card is None else eight_bit_gain(fit, candidates[0]),
            disk=disk_use(config, model, placement),
        )


def fit_report(found: SearchResult, where: PlanTarget, shown: int = SHOWN) -> list[str]:
    """Lines for people: the fastest first, each with its command. shown: number of candidates."""
    card, host = where.card, where.limits.host
    facts = {
        "Device": f"{where.spec.name}, {room(where.limits.device)}",
        # The CPU has a single memory, and its speed is unknown.
        "Host memory": card and ("not limited" if host is None else room(host)),
        "Left free": f"{room(where.reserve)} (--reserve)" if where.reserve else None,
        "Tokens per step": f"{found.candidates[0].need.tokens:,}, as given",
        **found.disk.facts(),
        "Speed": card and f"of {card.name}, {card.source}{card.plus_minus(where.world_size)}",
    }
    lines = ["[Fit]", *labelled(facts, 17)]
    for number, candidate in enumerate(found.candidates[:shown], start=1):
        need, config = candidate.need, candidate.config
        words = [f"{config.batch_size} x {config.grad_accumulation} sequences", mib(need.device)]
        if card is not None:
            energy = where.predicted(config, need.tokens, need.time)["tokens_per_joule"]
            speed = f"{need.speed:,.0f} tokens/s" + (f", {energy:,.1f} tokens/J" if energy else "")
            words = [speed, *words, f"{mib(need.host)} of host memory"]
        command = shlex.join(command_line(config))
        lines += ["", f"{number}. {', '.join(words)}", f"   {command}"]
    if found.gains:
        ways = [f"{way.speed:,.0f} tokens/s with {way.flags}" for way in found.gains]
        lines += ["", f"Faster, with coarser numbers: about {', '.join(ways)}"]
    return lines


def fit_record(found: SearchResult, where: PlanTarget) -> dict[str, Any]:
    """The result for programs; sizes in bytes."""
    return {
        "device": where.spec.name,
        "limit_bytes": where.limits.device,
        "host_limit_bytes": where.limits.host,
        "reserve_bytes": where.reserve,
        "card": where.card and where.card.name,
        "source": where.card and where.card.source,
        "found": [
            {
                "command": command_line(candidate.config),
                "needed_bytes": candidate.need.device,
                "host_bytes": candidate.need.host,
                "predicted": where.card
                and where.predicted(candidate.config, candidate.need.tokens, candidate.need.time),
            }
            for candidate in found.candidates
        ],
        "coarser": [
            {"flags": way.flags.split(), "tokens_per_second": way.speed} for way in found.gains
        ],
    } | found.disk.record()


def run_fit(fit: Fit, where: PlanTarget, *, json: bool) -> TrainConfig:
    """Print the result of `llmq plan --fit`; return the fastest. OutOfMemory if nothing fits."""
    if where.limits.device is None:
        raise ConfigError("--fit: how much memory is there? Give --gpu-memory or --card")
    found = SearchResult.of(fit, where)
    _print(found, where, json)
    return found.candidates[0].config


def _print(
    found: SearchResult,
    where: PlanTarget,
    json: bool,
    first: Sequence[str] = (),
    **fields: Any,
) -> None:
    """Print JSON with these fields, or lines for people after the `first` lines."""
    if json:
        print(json_module.dumps(fields | fit_record(found, where), indent=2))
    else:
        print("\n".join([*first, *fit_report(found, where)]))


def choose(
    config: TrainConfig, model: ModelConfig, given: frozenset[str], reserve: int | None = None
) -> TrainConfig:
    """Return the fastest configuration that fits into this machine (`llmq train --auto`). given:
    options that keep their values. reserve: as in target_here. Raises OutOfMemory if none fits."""
    where = target_here(config, model, reserve)
    found = SearchResult.of(Fit(config, where.planner(model), where.limits, given), where)
    print("\n".join(fit_report(found, where, shown=1)))
    print()
    return found.candidates[0].config


# ------------------------------------------------------------------------------------------------
# The largest model


ALONE = 1024 * MIB  # host memory of a run whose state is all on the card
NEWS_SECONDS = 5.0  # seconds between lines of progress
_TOYS = "tiny"  # first word of the names of test presets


def run_largest(
    config: TrainConfig, fixed: frozenset[str], asked: MachineOptions, *, json: bool = False
) -> TrainConfig:
    """Print the largest preset that fits, with its fit as `--fit` shows it (`llmq plan --largest`);
    return its config. fixed: given options. Raises OutOfMemory if none fits, and ConfigError if
    options choose the model."""
    for name in ("model", *SIZES):
        if name in fixed:
            raise ConfigError(f"--largest: chooses the model, leave out {OPTIONS[name].flag}")
    for name, fit, where in _fits_by_size(config, asked, fixed):
        try:
            found = SearchResult.of(fit, where)
        except OutOfMemory:  # the estimate was too low
            continue
        parameters = parameter_count(fit.planner.model)
        said = f"The largest model that fits is {name}, with {parameters:,} parameters."
        _print(found, where, json, [said, ""], model=name, parameters=parameters)
        return found.candidates[0].config
    raise OutOfMemory("no preset fits with these options", [])


def _fits_by_size(
    config: TrainConfig,
    asked: MachineOptions,
    fixed: frozenset[str],
    presets: Iterable[str] | None = None,
) -> Iterator[tuple[str, Fit, PlanTarget]]:
    """Yield name, search and target of presets that may fit, the most parameters first. presets:
    names to try; None: all presets. If host memory has no limit, a run may use ALONE bytes of it.
    Presets that contradict the options are left out."""
    real = [name for name in presets or PRESETS if not name.startswith(_TOYS)]
    last_line = time.monotonic()
    for name in sorted(real, key=lambda name: parameter_count(PRESETS[name]), reverse=True):
        if time.monotonic() - last_line >= NEWS_SECONDS:
            print(f"Searching, now {name} …", file=sys.stderr, flush=True)
            last_line = time.monotonic()
        trial, model = replace(config, model=name), PRESETS[name]
        if config.has_adapters:  # adapters need trained weights
            repository, model = released(name)
            trial = replace(trial, model=repository, download=True, from_scratch=False)
        try:
            trial.validate_with(model)
        except ConfigError:
            continue
        where = target(config, model, asked, search=True)
        if where.limits.device is None:
            raise ConfigError("--largest: of how much memory? Give --gpu-memory or --card")
        host = ALONE if where.limits.host is None else where.limits.host
        where = replace(where, limits=Limits(device=where.limits.device, host=host))
        fit = Fit(trial, where.planner(model), where.limits, fixed)
        if any(each.can_fit() for each in reversed(fits_of(fit))):
            yield name, fit, where
