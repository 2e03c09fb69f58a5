"""Does a plan fit, and what to say if it does not."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmq.base.dtypes import MIB
from llmq.config.command_line import flag
from llmq.config.options import TrainConfig
from llmq.config.presets import PRESETS
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits, OutOfMemory, needed_bytes
from llmq.plan.plan import Plan
from llmq.plan.shrink import (
    MARGIN,
    REARRANGING,
    ROUNDING,
    STAYING,
    Changes,
    Saver,
    Shrinker,
    changed,
    having,
    smaller_batch,
)
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.state.params import parameter_count

T = TypeVar("T")

CAREFUL = (*REARRANGING, *STAYING, smaller_batch)
MIN_SEQ_LEN = 128  # of advice
NOTICEABLE = 0.05  # by how much rounding more must be faster to be worth a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One change of an advice.

    flags: as on the command line. device, host: bytes needed, before and after. slower: by what
    part of the time of a step.
    """

    flags: str
    device: tuple[int, int]
    host: tuple[int, int]
    slower: float


def savings(
    config: TrainConfig, planner: Planner, limits: Limits, savers: Sequence[Saver]
) -> list[Saving]:
    """What to change so that it fits, one after the other; even all of it may not be enough."""
    changes = Shrinker(planner, limits).shrink(config, savers)
    configs = [having(config, changes[:n]) for n in range(len(changes) + 1)]
    needs = [planner.estimate(c) for c in configs]
    return [
        Saving(
            flags=spelled(configs[n], change),
            device=(needs[n].device, needs[n + 1].device),
            host=(needs[n].host, needs[n + 1].host),
            slower=needs[n + 1].time.total / needs[n].time.total - 1,
        )
        for n, change in enumerate(changes)
    ]


def spelled(config: TrainConfig, changes: Changes) -> str:
    """The flags that make these changes."""
    changed = {name: v for name, v in changes.items() if getattr(config, name) != v}
    return " ".join(flag(name, value) for name, value in changed.items())


def mib(size: int) -> str:
    """Bytes that are needed, for people: rounded up, so that never less seems to be needed."""
    return f"{-(-size // MIB)} MiB"


def room(size: int) -> str:
    """Bytes that are there, for people: rounded down."""
    return f"{size // MIB} MiB"


def check_fits(config: TrainConfig, planner: Planner, plan: Plan, limits: Limits) -> None:
    """Raise OutOfMemory unless the plan, of config by planner, fits."""
    problems = shortages(plan, planner.spec, limits)
    if problems:
        told = advice(config, planner, limits.less(MARGIN))
        raise OutOfMemory(f"{'; '.join(problems)}; {told}")


def shortages(plan: Plan, spec: DeviceSpec, limits: Limits) -> list[str]:
    """What there is too little of, with what takes most of it."""
    problems = []
    device = needed_bytes(plan, spec)
    if limits.device is not None and device > limits.device:
        problems.append(
            f"out of memory: {mib(device)} are needed, {room(limits.device)} are available "
            f"(largest: {_largest(plan, ('device',))})"
        )
    if limits.host is not None and plan.host_bytes > limits.host:
        ranks, of_one = (" by all ranks", " of each") if plan.world_size > 1 else ("", "")
        problems.append(
            f"out of host memory: {mib(plan.host_bytes)} are needed{ranks}, {room(limits.host)} "
            f"are available (largest{of_one}: {_largest(plan, ('pinned', 'write_combined'))})"
        )
    return problems


def _largest(plan: Plan, places: tuple[str, ...]) -> str:
    """The largest categories, of one rank."""
    sizes: Counter[str] = Counter()
    for place in places:
        sizes.update(plan.usage.categories[place])
    return ", ".join(f"{name} {mib(size)}" for name, size in sizes.most_common(3))


def advice(config: TrainConfig, planner: Planner, limits: Limits) -> str:
    """The cheapest changes that make it fit, and faster ones that round more."""
    exact = savings(config, planner, limits, CAREFUL)
    text = f"adding these, in this order, makes it fit: {_told(exact, planner, limits)}"
    if _enough(exact, limits) and _slower(exact) < NOTICEABLE:
        return text
    coarse = savings(config, planner, limits, (*ROUNDING, *CAREFUL))
    if _enough(exact, limits):
        if _enough(coarse, limits) and _slower(coarse) < _slower(exact) - NOTICEABLE:
            flags = " ".join(saving.flags for saving in coarse)
            text += f"; faster, with coarser numbers: {flags}"
        return text
    if _enough(coarse, limits):
        told = _told(coarse, planner, limits)
        return f"adding these, in this order, makes it fit, with coarser numbers: {told}"
    if coarse:
        told = _told(coarse, planner, limits)
        return f"no options make it fit, use a smaller model or --seq-len; the best are: {told}"
    return "no options make it need less, use a smaller model or --seq-len"


def _enough(found: list[Saving], limits: Limits) -> bool:
    return bool(found) and not limits.excess(found[-1].device[1], found[-1].host[1])


def _slower(found: list[Saving]) -> float:
    """By what part of its time a step becomes slower through all of these."""
    factor = 1.0
    for saving in found:
        factor *= 1 + saving.slower
    return factor - 1


def _told(found: list[Saving], planner: Planner, limits: Limits) -> str:
    """Each change with what it saves of what there is too little of, and what it costs."""
    if not found:
        return ""
    device = limits.device is not None and found[0].device[0] > limits.device
    entries = []
    for saving in found:
        before, after = saving.device if device else saving.host
        text = f"{saving.flags} saves {room(before - after)} -> {mib(after)}"
        if planner.spec != HOST_SPEC and saving.slower >= 0.001:
            text += f" ({saving.slower:.1%} slower)"
        entries.append(text)
    return "; ".join(entries)


def refusal(config: TrainConfig, planner: Planner, limits: Limits, fixed: frozenset[str]) -> str:
    """Where a search found nothing: what is missing at the least, and what would help.

    config: with the smallest micro-batch. fixed: options that keep their values.
    """
    shrinker = Shrinker(planner, limits, fixed)
    boundless = Shrinker(planner, Limits(device=limits.device), fixed)
    changes = _with_least_host_memory(config, boundless) or boundless.shrink(config, REARRANGING)
    least = having(config, changes)
    flags = [flag("batch_size", config.batch_size)]
    flags += [spelled(config, change) for change in changes]
    missing = "; ".join(shortages(planner.plan(least), planner.spec, limits))
    if not missing:  # the search goes by estimates, which may be a bit too high
        flags.insert(1, flag("grad_accumulation", config.grad_accumulation))
        return f"nothing was found, but without --fit or --auto this fits: {' '.join(flags)}"
    ways = [_with_coarser_numbers(config, shrinker, changes)]
    if boundless.excess(least):
        ways.append(_with_shorter_sequences(config, shrinker, changes))
    else:
        ways.append(f"{mib(planner.estimate(least).host + 2 * MARGIN)} of host memory")
    ways.append(_with_a_smaller_model(config, shrinker, changes))
    useful = ", or ".join(way for way in ways if way)
    help_ = f"what would help: {useful}" if useful else "use a smaller model"
    return f"nothing fits: with {' '.join(flags)} it is {missing}; {help_}"


def _with_least_host_memory(config: TrainConfig, boundless: Shrinker) -> list[Changes] | None:
    """What to change so that it fits into the device; None: nothing does that."""
    places = boundless.host_choices(config)
    if not places:
        return None
    place, _ = min(places, key=lambda choice: choice[1].host)
    return boundless.with_hosted(config, place, REARRANGING)


def _with_coarser_numbers(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> str | None:
    then = having(config, shrinker.shrink(config, (*ROUNDING, *REARRANGING), start))
    if shrinker.excess(then):
        return None
    coarser = {name for saver in ROUNDING for name in saver(config)}
    return spelled(config, {name: getattr(then, name) for name in sorted(coarser)})


def _with_shorter_sequences(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> str | None:
    def fits(seq_len: int) -> bool:
        then = changed(config, {"seq_len": seq_len})
        return shrinker.fits(having(then, shrinker.shrink(then, REARRANGING, start)))

    lengths, seq_len = [], config.seq_len // 2
    while seq_len >= MIN_SEQ_LEN and seq_len % 4 == 0:
        lengths.append(seq_len)
        seq_len //= 2
    longest = _last_that_fits(lengths[::-1], fits)
    return longest and flag("seq_len", longest)


def _with_a_smaller_model(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> str | None:
    """The largest preset of the same kind that fits."""
    own = shrinker.planner.model

    def fits(name: str) -> bool:
        other = Shrinker(shrinker.planner.of(PRESETS[name]), shrinker.limits, shrinker.fixed)
        return other.fits(having(config, other.shrink(config, (*REARRANGING, *STAYING), start)))

    sizes = {
        name: parameter_count(model)
        for name, model in PRESETS.items()
        if (model.architecture, model.vocab_size) == (own.architecture, own.vocab_size)
    }
    smaller = [name for name in sizes if sizes[name] < parameter_count(own)]
    largest = _last_that_fits(sorted(smaller, key=sizes.__getitem__), fits)
    return largest and flag("model", largest)


def _last_that_fits(choices: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """The last one of a sequence whose first ones fit; each try takes a good part of a second."""
    count = bisect_left(choices, True, key=lambda choice: not fits(choice))
    return choices[count - 1] if count else None
