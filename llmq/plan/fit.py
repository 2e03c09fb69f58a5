"""The fastest configurations that fit into given memory: `llmq plan --fit`, `llmq train --auto`.

Beside adapters it also looks for the format that the model is kept in.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from llmq.options.options import TrainConfig
from llmq.options.rule import Changes
from llmq.options.rules import RULES
from llmq.options.savers import PLACES
from llmq.plan.advice import NOTICEABLE, refusal
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.memory import Limits
from llmq.plan.shrink import ESTIMATE_MARGIN, REARRANGING, Shrinker, having, savers
from llmq.runtime.device import HOST_SPEC

SHOWN = 5  # configurations
WORTH_SHOWING = 0.75  # of the speed of the fastest
LADDER = 1.4  # a micro-batch that is tried and the next larger one differ at least by this factor
# A larger micro-batch is no faster, and to plan one of a million short sequences takes minutes.
MOST_TOKENS = 1 << 18
PRODUCT = frozenset({"batch_size", "grad_accumulation"})  # only their product is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that fits, and what it needs and takes by its exact plan."""

    config: TrainConfig
    need: Estimate


class Fit:
    """The search for one model, one kind of machine, and a number of tokens per step."""

    def __init__(self, base: TrainConfig, planner: Planner, limits: Limits, fixed: frozenset[str]):
        """base: options as given. fixed: names of those that keep their values."""
        if planner.spec != HOST_SPEC:  # the default is what a machine has, not what was planned for
            base = replace(base, gpus=planner.gpus)
        self.base, self.planner, self.limits = base, planner, limits
        self.fixed = fixed - PRODUCT
        self.shrinker = Shrinker(planner, limits.less(ESTIMATE_MARGIN), self.fixed)
        self._found: dict[int, Candidate | None] = {}  # by micro-batch
        self._changes: dict[int, list[Changes]] = {}

    def search(self) -> list[Candidate]:
        """Search as `found` does. Raises OutOfMemory if nothing fits."""
        found = self.found()
        if not found:
            raise refusal(self.ladder()[0], self.planner, self.limits, self.fixed)
        return found

    def is_hopeless(self) -> bool:
        """Whether it is quickly seen that nothing fits."""
        return self.shrinker.is_hopeless(self.ladder()[0])

    def can_fit(self) -> bool:
        """Whether something fits, by estimates of the lightest that there is; takes longer."""
        return self.shrinker.can_fit(self.ladder()[0])

    def found(self) -> list[Candidate]:
        """Candidates that fit, the fastest first, at most SHOWN of them. Larger micro-batches are
        faster until they have to save too much: from the middle, uphill."""
        ladder = self.ladder()
        ladder = ladder[: bisect_left(ladder, True, key=lambda config: not self._may_fit(config))]
        place, best = -1, len(ladder) // 2
        if ladder and self._speed(ladder[best]) == self._speed(ladder[0]) == 0:
            ladder = []  # what does not even fit with the smallest one, fits with none
        while ladder and best != place:
            place = best
            near = range(max(place - 1, 0), min(place + 2, len(ladder)))
            best = max(near, key=lambda n: self._speed(ladder[n]))
        # Smaller ones can be faster only if they would be without having to save anything.
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
        """The best of the candidates alone, which takes less time: from the micro-batch that is
        fastest without having to save anything uphill, as long as a larger one could gain more than
        this part, and gains anything. None: nothing fits."""

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
        """The changes, beside the micro-batch, that made a found one fit."""
        return self._changes[candidate.config.batch_size]

    def ladder(self) -> list[TrainConfig]:
        """The configuration with each micro-batch that is tried, the smallest first."""
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
        """Whether it fits into the device, if as much as possible saves memory there."""
        # It often fits as it is, which is seen sooner than with the logits in hundreds of parts.
        if not self.limits.excess(self.planner.estimate(config).device, 0):
            return True
        return not self.limits.excess(self.shrinker.least_device(config), 0)

    def _speed(self, config: TrainConfig) -> float:
        """Tokens per second with what it has to save; 0 if it does not fit."""
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
        """The same micro-batch with nothing in host memory, if that is another way to fit."""
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
        """With what makes it faster, as far as there is room."""
        for saver in savers("fast"):
            then = self.shrinker.allowed(config, saver(config))
            if then is not None and self.shrinker.fits(then):
                speeds = [self.planner.estimate(c).speed for c in (config, then)]
                config = then if speeds[1] > speeds[0] else config
        return config

    def _candidate(self, config: TrainConfig) -> Candidate | None:
        """With recomputation in as few layers as will do; None if it does not fit."""
        for choice in (self._fewer_layers(config), config):
            rough = self.planner.estimate(choice)
            if self.limits.excess(rough.device, rough.host) > 2 * ESTIMATE_MARGIN:
                continue  # hopeless, and an exact plan takes fifty times as long
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
    """The value of --recompute-layers for so many layers."""
    return "0" if layers == 1 else f"0-{layers - 1}"


def fits_of(fit: Fit) -> list[Fit]:
    """The same search with each --base-dtype that the card computes fast with, the finest first.
    Only itself where nothing is kept in another format, or this was given."""
    if not fit.base.has_adapters or "base_dtype" in fit.fixed or fit.planner.spec == HOST_SPEC:
        return [fit]
    changes = [rule.changes(fit.base, fit.planner.card) for rule in RULES.savers("base")]
    tried = (fit.shrinker.allowed(fit.base, change) for change in changes)
    others = [config for config in tried if config is not None]
    return [fit, *(Fit(config, fit.planner, fit.limits, fit.fixed) for config in others)]


def search_bases(fit: Fit) -> tuple[Fit, list[Candidate]]:
    """Candidates that fit, the best first, at most SHOWN of them, and the search that found the
    best. A coarser format of the model comes before a finer one only if it is noticeably faster.
    Each other search gives one. Raises OutOfMemory if nothing fits."""
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
