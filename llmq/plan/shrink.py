"""Search for the cheapest changes with which a configuration needs less memory."""

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
from llmq.options.savers import FILES, MIN_CHUNK_ROWS, PLACES
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.memory import Limits
from llmq.runtime.attention_parts import divisions
from llmq.runtime.cudnn import backward_scratch_bytes

MIN_ATTENTION = 256 * MIB  # workspace of attention's backward below which heads are not divided
ESTIMATE_MARGIN = MIB  # error of estimates
TROUBLE = 1e-3  # cost of any change, as a share of a step's time
NEARLY = 0.9  # least memory of device and host together varies by this factor
TRIES = 3  # choices of state in host memory that are pursued

Saver = Callable[[TrainConfig], Changes]  # returns changes; {} if they do nothing


def savers(use: str) -> tuple[Saver, ...]:
    """Return the functions for this use from the rules of options, in table order."""
    return tuple(rule.changes for rule in RULES.savers(use))


REARRANGING, STAYING, ROUNDING = savers("arrange"), savers("stay"), savers("round")
(FP8,) = (rule.sets for rule in RULES.savers("products"))


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """Return the configuration with these options and all implied values."""
    return replace(config, **changes).normalized()


class Shrinker:
    """Search for the cheapest changes that make configurations fit."""

    def __init__(self, planner: Planner, limits: Limits, fixed: frozenset[str] = frozenset()):
        """fixed: names of options that keep their values."""
        self.planner, self.limits, self.fixed = planner, limits, fixed

    def excess(self, config: TrainConfig) -> int:
        """Bytes over the limits, by an estimate; 0 if it fits."""
        need = self.planner.estimate(config)
        return self.limits.excess(need.device, need.host)

    def fits(self, config: TrainConfig) -> bool:
        """True if the config fits, by an estimate."""
        return self.excess(config) == 0

    def shrink(
        self, config: TrainConfig, savers: Sequence[Saver], start: Sequence[Changes] = ()
    ) -> list[Changes]:
        """Return changes to make in this order, none superfluous; all of them may not be enough.
        The search is greedy: the next change costs the least time for each byte over the limit.
        start: first changes to try, such as those of a similar configuration. If device and host
        memory are short, a greedy search can fill host memory, or files, with the wrong state: then
        the state in host memory is chosen first."""
        found = self._cheapest(config, savers, start)
        greedy = self.fits(having(config, found))
        if self.limits.host is None or (greedy and not config.offload_dir):
            return found
        places = [place for place, _ in self.host_choices(config)[:TRIES]]
        tried = [self.with_hosted(config, place, savers) for place in places]
        fitting = [changes for changes in tried if self.fits(having(config, changes))]
        fitting += [found] if greedy else []
        return min(fitting, key=lambda each: self._seconds(having(config, each)), default=found)

    def _seconds(self, config: TrainConfig) -> float:
        return self.planner.estimate(config).time.total

    def with_hosted(
        self, config: TrainConfig, place: Changes, savers: Sequence[Saver]
    ) -> list[Changes]:
        """Return `place`, one of the host_choices, followed by the cheapest changes beside it."""
        kept = self.fixed | {*PLACES, "offload_quants", "ssd"}
        rest = Shrinker(self.planner, self.limits, kept)
        first = [place] if place else []
        return first + rest._cheapest(having(config, first), savers, ())

    def host_choices(self, config: TrainConfig) -> list[tuple[Changes, Estimate]]:
        """Choices of state in host memory that fit with everything else as light as possible, with
        their needs; the fastest first."""
        if self.is_hopeless(config):
            return []
        found = []
        for light in self._lightest_of_all(config):
            if self.fits(light):
                names = [*PLACES, "offload_quants", "persistent_quants", "ssd"]
                names += ["shard_gradients"] if light.offload_gradients else []
                names += ["shard_weights"] if "master" in light.ssd else []
                place = {name: getattr(light, name) for name in names}
                place = {name: v for name, v in place.items() if getattr(config, name) != v}
                found.append((place, self.planner.estimate(light)))
        return sorted(found, key=lambda choice: choice[1].time.total)

    def can_fit(self, config: TrainConfig) -> bool:
        """True if host_choices is not empty."""
        if self.is_hopeless(config):
            return False
        return any(self.fits(light) for light in self._lightest_of_all(config))

    def _lightest_of_all(self, config: TrainConfig) -> list[TrainConfig]:
        """The lightest configuration for each choice of state in host memory."""
        hosted = [places for n in range(len(PLACES) + 1) for places in combinations(PLACES, n)]
        light = [self.lightest(config, places) for places in hosted]
        return [*dict.fromkeys([*light, *self._in_files(light[-1])])]

    def _in_files(self, config: TrainConfig) -> list[TrainConfig]:
        """The config with more and more state in files, if there is a directory for them."""
        changes = FILES if config.offload_dir else ()
        tried = (self.allowed(config, change) for change in changes)
        return [each for each in tried if each is not None]

    def is_hopeless(self, config: TrainConfig) -> bool:
        """True if the device, or device and host memory together, are too small for the lightest
        configuration."""
        device, host, ranks = self.limits.device, self.limits.host, self.planner.world_size
        if device is None:
            return False
        least = min(need.device * ranks + need.host for need in self._lightest_needs(config))
        both = math.inf if host is None else device * ranks + host
        return self.least_device(config) > device or both < NEARLY * least

    def least_device(self, config: TrainConfig) -> int:
        """Least bytes of device memory, by an estimate."""
        return min(need.device for need in self._lightest_needs(config))

    def _lightest_needs(self, config: TrainConfig) -> list[Estimate]:
        """Needs of the lightest configurations: with all of PLACES in host memory, with state in
        files, and with nothing in host memory, which needs least on the CPU with its single
        memory."""
        hosted, plain = (self.lightest(config, places) for places in (PLACES, ()))
        return [self.planner.estimate(c) for c in (hosted, *self._in_files(hosted), plain)]

    def lightest(self, config: TrainConfig, hosted: Collection[str]) -> TrainConfig:
        """Return the config with `hosted` in host memory and everything else with the least device
        memory, as far as options allow."""
        rest = config.local_seq_len % MIN_CHUNK_ROWS
        chunks = 1 if rest else config.local_seq_len // MIN_CHUNK_ROWS  # chunks of a sequence
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
        # Remove changes that later ones imply or make unnecessary, the most expensive first.
        enough = self.excess(having(config, found))
        for change in reversed(found[:-1]):
            rest = [c for c in found if c is not change]
            then = having(config, rest)
            if self._valid(then) and self.excess(then) <= enough:
                found = rest
        return found

    def _divide_attention(self, config: TrainConfig) -> Changes:
        """The next number of parts of attention's backward with smaller parts. Dividing sequences
        costs least: while there are enough sequences, the number grows fourfold."""
        parts, batch = config.attn_bwd_chunks, config.batch_size
        more = [n for n in self._attention_parts(config) if n > parts]
        fewer = (n for n in more if 4 * parts <= n <= batch)
        return {"attn_bwd_chunks": next(fewer, more[0])} if more else {}

    def _smallest_parts(self, config: TrainConfig) -> int:
        """The number of parts of attention's backward whose part needs the least memory."""
        numbers = (n for n in self._attention_parts(config) if n >= config.batch_size)
        return min(numbers, key=lambda n: self._attention_bytes(config, n))

    def _attention_parts(self, config: TrainConfig) -> list[int]:
        """Numbers of parts of attention's backward; heads are divided only down to MIN_ATTENTION
        bytes."""
        heads, batch = config.local_heads(self.planner.model.heads_of(0)), config.batch_size
        found = []
        for n in divisions(batch, heads.query, heads.kv):
            found.append(n)
            if n >= batch and self._attention_bytes(config, n) <= MIN_ATTENTION:
                break
        return found

    def _attention_bytes(self, config: TrainConfig, parts: int) -> int:
        """Bytes of the library's backward for one of `parts` parts, which has one sequence or
        less."""
        sizes = (config.seq_len, parts // config.batch_size)
        every = map(config.local_heads, self.planner.model.every_heads)
        return max(backward_scratch_bytes(sizes[0], *heads, sizes[1]) for heads in every)

    def _best(self, now: TrainConfig, ratios: dict[Saver, float]) -> Changes | None:
        """The next change; None if nothing helps. ratios: seconds per byte when last computed.
        Ratios only grow, because less is missing: a saver whose old ratio exceeds the current best
        is skipped."""
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
        """Seconds for each saved byte; infinite if the change saves nothing or is not allowed."""
        then = self.allowed(now, change)
        saved = 0 if then is None else self.excess(now) - self.excess(then)
        if saved <= 0:
            return math.inf
        before, after = (self._seconds(c) for c in (now, then))
        return (max(after - before, 0.0) + TROUBLE * before) / saved

    def allowed(self, now: TrainConfig, change: Changes) -> TrainConfig | None:
        """The changed configuration; None if it is invalid or changes fixed options."""
        then = self._valid(changed(now, change))
        if then is None:
            return None
        kept = all(getattr(then, name) == getattr(now, name) for name in self.fixed)
        kept &= "shard_over" not in change or self._reaches_all(then)
        return then if change and kept else None

    def _valid(self, config: TrainConfig) -> TrainConfig | None:
        """The configuration; None if options or model forbid it."""
        try:
            return config.validate_with(self.planner.model)
        except ConfigError:
            return None

    def _reaches_all(self, config: TrainConfig) -> bool:
        """True if there are several machines, and all their ranks can share a state."""
        local = config.memcpy_all_gather or config.all_to_all_reduce  # within one machine
        return self.planner.network.machines > 1 and not local


def having(config: TrainConfig, changes: Iterable[Changes]) -> TrainConfig:
    """Return the configuration after several changes."""
    return reduce(changed, changes, config)
