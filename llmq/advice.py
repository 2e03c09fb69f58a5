"""Does a plan fit, and what to say if it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.cards import Card, card_of
from llmq.command_line import flag
from llmq.config import ModelConfig
from llmq.estimate import Planner
from llmq.machine import MIB
from llmq.options import TrainConfig
from llmq.params import parameter_count
from llmq.plan import OutOfMemory, Plan, needed_bytes
from llmq.presets import PRESETS
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.shrink import (
    REARRANGING,
    ROUNDING,
    STAYING,
    Changes,
    Limits,
    Saver,
    Shrinker,
    changed,
    having,
    smaller_batch,
)

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
    """Bytes, for people."""
    return f"{size // MIB} MiB"


def check_fits(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str,
    plan: Plan,
    limits: Limits,
    card: Card | None = None,
) -> None:
    """Raise OutOfMemory unless the plan fits. card: by whose speed to advise, if not spec's."""
    problems = shortages(plan, spec, limits)
    if problems:
        planner = Planner(model, spec, backend, card or card_of(spec), plan.world_size)
        raise OutOfMemory(f"{'; '.join(problems)}; {advice(config, planner, limits)}")


def shortages(plan: Plan, spec: DeviceSpec, limits: Limits) -> list[str]:
    """What there is too little of, with what takes most of it."""
    problems = []
    device = needed_bytes(plan.usage, spec)
    if limits.device is not None and device > limits.device:
        problems.append(
            f"out of memory: {mib(device)} are needed, {mib(limits.device)} are available "
            f"(largest: {_largest(plan, ('device',))})"
        )
    if limits.host is not None and plan.host_bytes > limits.host:
        ranks, of_one = (" by all ranks", " of each") if plan.world_size > 1 else ("", "")
        problems.append(
            f"out of host memory: {mib(plan.host_bytes)} are needed{ranks}, {mib(limits.host)} are "
            f"available (largest{of_one}: {_largest(plan, ('pinned', 'write_combined'))})"
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
        text = f"{saving.flags} saves {mib(before - after)} -> {mib(after)}"
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
    changes = boundless.shrink(config, REARRANGING)
    least = having(config, changes)
    flags = [flag("batch_size", config.batch_size)]
    flags += [spelled(config, change) for change in changes]
    missing = "; ".join(shortages(planner.plan(least), planner.spec, limits))
    ways = [_with_coarser_numbers(config, shrinker, changes)]
    if boundless.excess(least):
        ways.append(_with_shorter_sequences(config, shrinker, changes))
    else:
        ways.append(f"{mib(planner.estimate(least).host)} of host memory")
    ways.append(_with_a_smaller_model(config, shrinker))
    useful = ", or ".join(way for way in ways if way)
    help_ = f"what would help: {useful}" if useful else "use a smaller model"
    return f"nothing fits: with {' '.join(flags)} it is {missing}; {help_}"


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
    seq_len = config.seq_len // 2
    while seq_len >= MIN_SEQ_LEN and seq_len % 4 == 0:
        then = changed(config, {"seq_len": seq_len})
        if not shrinker.excess(having(then, shrinker.shrink(then, REARRANGING, start))):
            return flag("seq_len", seq_len)
        seq_len //= 2
    return None


def _with_a_smaller_model(config: TrainConfig, shrinker: Shrinker) -> str | None:
    """The largest preset of the same kind that fits."""
    own, planner = shrinker.planner.model, shrinker.planner
    smaller = {
        name: model
        for name, model in PRESETS.items()
        if (model.architecture, model.vocab_size) == (own.architecture, own.vocab_size)
        and parameter_count(model) < parameter_count(own)
    }
    for name in sorted(smaller, key=lambda name: -parameter_count(smaller[name])):
        args = (smaller[name], planner.spec, planner.backend, planner.card, planner.world_size)
        other = Shrinker(Planner(*args), shrinker.limits, shrinker.fixed)
        if not other.excess(having(config, other.shrink(config, REARRANGING))):
            return flag("model", name)
    return None
