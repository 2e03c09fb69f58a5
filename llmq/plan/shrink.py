"""Ways to need less memory, and the cheapest ones that make a configuration fit."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError
from llmq.options.options import TrainConfig
from llmq.options.rule import Changes
from llmq.options.rules import RULES
from llmq.options.savers import MIN_CHUNK_ROWS, PLACES
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.memory import Limits
from llmq.runtime.attention_parts import divisions
from llmq.runtime.cudnn import backward_scratch_bytes

MIN_ATTENTION = 256 * MIB  # of attention's backward, below which advice divides no heads
ESTIMATE_MARGIN = MIB  # by which estimates may be wrong
TROUBLE = 1e-3  # part of a step's time that any change must be worth
NEARLY = 0.9  # by what part of it the least memory is not the same wherever it is
TRIES = 3  # choices of what is in host memory that are followed up

Saver = Callable[[TrainConfig], Changes]  # what to change, nothing where that does nothing


def savers(use: str) -> tuple[Saver, ...]:
    """The changes that the rules of options have for this use, in their order."""
    return tuple(rule.changes for rule in RULES.savers(use))


REARRANGING, STAYING, ROUNDING = savers("arrange"), savers("stay"), savers("round")
(FP8,) = (rule.sets for rule in RULES.savers("products"))


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """The configuration with these options, and what they imply."""
    return replace(config, **changes).normalized()


class Shrinker:
    """Looks for the cheapest changes that make configurations fit."""

    def __init__(self, planner: Planner, limits: Limits, fixed: frozenset[str] = frozenset()):
        """fixed: names of options that keep their values."""
        self.planner, self.limits, self.fixed = planner, limits, fixed

    def excess(self, config: TrainConfig) -> int:
        """Bytes too many, by an estimate; 0: it fits."""
        need = self.planner.estimate(config)
        return self.limits.excess(need.device, need.host)

    def fits(self, config: TrainConfig) -> bool:
        """Whether it fits, by an estimate."""
        return self.excess(config) == 0

    def shrink(
        self, config: TrainConfig, savers: Sequence[Saver], start: Sequence[Changes] = ()
    ) -> list[Changes]:
        """The changes to make, one after the other, none superfluous; they may not be enough.
        Always next: what costs the least time for each byte that is still too much. start: changes
        to begin with, such as those of a similar configuration. If both memories are short, that
        can fill the host's with the wrong things: then what is to be there is chosen first."""
        found = self._cheapest(config, savers, start)
        if self.limits.host is None or self.fits(having(config, found)):
            return found
        places = [place for place, _ in self.host_choices(config)[:TRIES]]
        tried = [self.with_hosted(config, place, savers) for place in places]
        fitting = [changes for changes in tried if self.fits(having(config, changes))]
        return min(fitting, key=lambda each: self._seconds(having(config, each)), default=found)

    def _seconds(self, config: TrainConfig) -> float:
        return self.planner.estimate(config).time.total

    def with_hosted(
        self, config: TrainConfig, place: Changes, savers: Sequence[Saver]
    ) -> list[Changes]:
        """`place`, one of the host_choices, and the cheapest changes beside it."""
        kept = self.fixed | {*PLACES, "offload_quants"}
        rest = Shrinker(self.planner, self.limits, kept)
        first = [place] if place else []
        return first + rest._cheapest(having(config, first), savers, ())

    def host_choices(self, config: TrainConfig) -> list[tuple[Changes, Estimate]]:
        """The choices of what is in host memory with which all fits, if the rest is as light as can
        be, and what is needed then; the fastest first."""
        if self.is_hopeless(config):
            return []
        found = []
        for light in self._lightest_of_all(config):
            if self.fits(light):
                names = [*PLACES, "offload_quants", "persistent_quants"]
                names += ["shard_gradients"] if light.offload_gradients else []
                place = {name: getattr(light, name) for name in names}
                place = {name: v for name, v in place.items() if getattr(config, name) != v}
                found.append((place, self.planner.estimate(light)))
        return sorted(found, key=lambda choice: choice[1].time.total)

    def can_fit(self, config: TrainConfig) -> bool:
        """Whether host_choices has any."""
        if self.is_hopeless(config):
            return False
        return any(self.fits(light) for light in self._lightest_of_all(config))

    def _lightest_of_all(self, config: TrainConfig) -> list[TrainConfig]:
        """With each choice of what is in host memory."""
        hosted = [places for n in range(len(PLACES) + 1) for places in combinations(PLACES, n)]
        return [*dict.fromkeys(self.lightest(config, places) for places in hosted)]

    def is_hopeless(self, config: TrainConfig) -> bool:
        """Whether the device is too small for what must be there, or both memories together are."""
        device, host, ranks = self.limits.device, self.limits.host, self.planner.world_size
        if device is None:
            return False
        least = min(need.device * ranks + need.host for need in self._lightest_needs(config))
        both = math.inf if host is None else device * ranks + host
        return self.least_device(config) > device or both < NEARLY * least

    def least_device(self, config: TrainConfig) -> int:
        """Bytes of the device with which it can do, at the least, by an estimate."""
        return min(need.device for need in self._lightest_needs(config))

    def _lightest_needs(self, config: TrainConfig) -> list[Estimate]:
        """With all of PLACES in host memory, and with none: on the CPU, where all memory is one,
        that is less."""
        return [self.planner.estimate(self.lightest(config, places)) for places in (PLACES, ())]

    def lightest(self, config: TrainConfig, hosted: Collection[str]) -> TrainConfig:
        """With these of PLACES in host memory, and what else leaves least on the device; as far as
        it is allowed."""
        rest = config.local_seq_len % MIN_CHUNK_ROWS
        chunks = 1 if rest else config.local_seq_len // MIN_CHUNK_ROWS  # of a sequence
        changes = [saver(config) for saver in savers("lightest")]
        changes += [{name: name in hosted} for name in PLACES]
        changes.append({"attn_bwd_chunks": self._smallest_parts(config)})
        changes.append({"lmhead_chunks": config.batch_size * chunks})
        for change in changes:
            config = self.allowed(config, change) or config
        return config

    def _cheapest(
        self, config: TrainConfig, savers: Sequence[Saver], start: Sequence[Changes]
    ) -> list[Changes]:
        found: list[Changes] = []
        for change in start:
            if self.allowed(having(config, found), change) is not None:
                found.append(change)
        ratios = dict.fromkeys((*savers, self._divide_attention), 0.0)
        while self.excess(now := having(config, found)):
            best = self._best(now, ratios)
            if best is None:
                break
            found.append(best)
        # Changes that later ones imply or make unnecessary go, the dearest first.
        enough = self.excess(having(config, found))
        for change in reversed(found[:-1]):
            rest = [c for c in found if c is not change]
            if self.excess(having(config, rest)) <= enough:
                found = rest
        return found

    def _divide_attention(self, config: TrainConfig) -> Changes:
        """The next larger number of parts of attention's backward that makes these smaller; of
        sequences, which cost least, 4 times as many, if these are not too many."""
        parts, batch = config.attn_bwd_chunks, config.batch_size
        more = [n for n in self._attention_parts(config) if n > parts]
        fewer = (n for n in more if 4 * parts <= n <= batch)
        return {"attn_bwd_chunks": next(fewer, more[0])} if more else {}

    def _smallest_parts(self, config: TrainConfig) -> int:
        """So many parts of attention's backward that one needs least."""
        numbers = (n for n in self._attention_parts(config) if n >= config.batch_size)
        return min(numbers, key=lambda n: self._attention_bytes(config, n))

    def _attention_parts(self, config: TrainConfig) -> list[int]:
        """Numbers of parts of attention's backward, the heads of a sequence no further divided than
        down to MIN_ATTENTION."""
        model, batch = self.planner.model, config.batch_size
        found = []
        for n in divisions(batch, model.num_heads, model.num_kv_heads):
            found.append(n)
            if n >= batch and self._attention_bytes(config, n) <= MIN_ATTENTION:
                break
        return found

    def _attention_bytes(self, config: TrainConfig, parts: int) -> int:
        """The bytes that the library's backward takes for one of so many parts of a sequence or
        less."""
        sizes = (config.local_seq_len, parts // config.batch_size)
        every = self.planner.model.every_heads
        return max(backward_scratch_bytes(sizes[0], *heads, sizes[1]) for heads in every)

    def _best(self, now: TrainConfig, ratios: dict[Saver, float]) -> Changes | None:
        """The next change, None if nothing helps. ratios: seconds a byte when last looked at. They
        only grow, as less is missing: what was worse before than the best is now, is not looked at
        again."""
        best, lowest = None, math.inf
        for saver in sorted(ratios, key=ratios.__getitem__):
            if ratios[saver] > lowest:
                break
            change = saver(now)
            ratios[saver] = self._ratio(now, change)
            if ratios[saver] < lowest:
                best, lowest = change, ratios[saver]
        return best

    def _ratio(self, now: TrainConfig, change: Changes) -> float:
        """Seconds for each byte less; infinite where there are none, or it is not allowed."""
        then = self.allowed(now, change)
        saved = 0 if then is None else self.excess(now) - self.excess(then)
        if saved <= 0:
            return math.inf
        before, after = (self._seconds(c) for c in (now, then))
        return (max(after - before, 0.0) + TROUBLE * before) / saved

    def allowed(self, now: TrainConfig, change: Changes) -> TrainConfig | None:
        """The changed configuration, None if it is not valid or changes what is fixed."""
        try:
            then = changed(now, change).validate_with(self.planner.model)
        except ConfigError:
            return None
        kept = all(getattr(then, name) == getattr(now, name) for name in self.fixed)
        kept &= "shard_over" not in change or self._reaches_all(then)
        return then if change and kept else None

    def _reaches_all(self, config: TrainConfig) -> bool:
        """Whether there are several machines, and the ranks of all of them can share a state."""
        local = config.memcpy_all_gather or config.all_to_all_reduce  # copies, and at most 8 ranks
        return self.planner.network.machines > 1 and not local


def having(config: TrainConfig, changes: Iterable[Changes]) -> TrainConfig:
    """The configuration after several changes."""
    return reduce(changed, changes, config)
