"""Fit of a plan into memory, and advice if it does not fit."""

import shlex
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llmq.base.tensor import host_tiers
from llmq.options.option_file import command_line, flag
from llmq.options.options import TrainConfig
from llmq.options.presets import PRESETS
from llmq.options.rule import Changes
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits, OutOfMemory, mib, needed_bytes, room
from llmq.plan.plan import Plan
from llmq.plan.shrink import (
    ESTIMATE_MARGIN,
    FP8,
    REARRANGING,
    ROUNDING,
    STAYING,
    Shrinker,
    changed,
    having,
    savers,
)
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.state.params import parameter_count

T = TypeVar("T")

CAREFUL = (*REARRANGING, *STAYING, *savers("batch"))
MIN_SEQ_LEN = 128  # shortest sequence in advice
NOTICEABLE = 0.05  # least relative speedup for which advice names coarser formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One change in a piece of advice. flags: as on the command line. device, host: needed bytes
    before and after. slower: relative increase of a step's time."""

    flags: str
    device: tuple[int, int]
    host: tuple[int, int]
    slower: float


def savings(config: TrainConfig, planner: Planner, changes: Sequence[Changes]) -> list[Saving]:
    """Return the saving and cost of each change, applied one after the other."""
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
    """The command-line flags of these changes, without flags that other flags imply."""
    changed = {name: v for name, v in changes.items() if getattr(config, name) != v}
    if changed.get("gradient_dtype") == changed.get("matmul_dtype"):
        changed.pop("gradient_dtype", None)
    return " ".join(flag(name, value) for name, value in changed.items())


def check_fits(config: TrainConfig, planner: Planner, plan: Plan, limits: Limits) -> None:
    """Raise OutOfMemory with advice unless the plan of `config` fits."""
    problems = shortages(plan, planner.spec, limits)
    if problems:
        raise OutOfMemory(
            "; ".join(problems), advice(config, planner, limits.less(ESTIMATE_MARGIN))
        )


def whole_command(config: TrainConfig, planner: Planner) -> str:
    """`llmq train` with all options of `config` and the planned number of GPUs."""
    if planner.spec != HOST_SPEC:  # the default is the number of a machine's GPUs
        config = replace(config, gpus=planner.gpus)
    return f"  {shlex.join(command_line(config))}"


def shortages(plan: Plan, spec: DeviceSpec, limits: Limits) -> list[str]:
    """Messages on memories that are too small, with the largest categories."""
    problems = []
    device = needed_bytes(plan, spec)
    if limits.device is not None and device > limits.device:
        problems.append(
            f"out of memory: {mib(device)} are needed, {room(limits.device)} are available "
            f"(largest: {_largest(plan, ['device'])})"
        )
    if limits.host is not None and plan.host_bytes > limits.host:
        ranks, of_one = (" by all ranks", " of each") if plan.world_size > 1 else ("", "")
        problems.append(
            f"out of host memory: {mib(plan.host_bytes)} are needed{ranks}, {room(limits.host)} "
            f"are available (largest{of_one}: {_largest(plan, host_tiers())})"
        )
    return problems


def _largest(plan: Plan, places: Iterable[str]) -> str:
    """Text with the three largest categories of one rank's memory in `places`."""
    sizes: Counter[str] = Counter()
    for place in places:
        sizes.update(plan.usage.categories[place])
    return ", ".join(f"{name} {mib(size)}" for name, size in sizes.most_common(3))


def advice(config: TrainConfig, planner: Planner, limits: Limits) -> list[str]:
    """Return lines with the cheapest changes that make the run fit, as a list and as one command. A
    last line names faster changes that round more, if there are any."""
    exact = Shrinker(planner, limits).shrink(config, CAREFUL)
    found = savings(config, planner, exact)
    fits = _enough(found, limits)
    title = "adding these, in this order, makes it fit:"
    coarse, others = [], found
    if not fits or _slower(found) >= NOTICEABLE:
        coarse = Shrinker(planner, limits).shrink(config, (*ROUNDING, *CAREFUL))
        others = savings(config, planner, coarse)
    faster = _enough(others, limits) and _slower(others) < _slower(found) - NOTICEABLE
    lines = []
    if fits and faster:
        flags = " ".join(saving.flags for saving in others)
        lines = [f"faster, with coarser numbers: {flags}"]
    if not fits:
        exact, found = coarse, others
        title = "adding these, in this order, makes it fit, with coarser numbers:"
        if not found:
            return ["no options make it need less, use a smaller model or --seq-len"]
        if not _enough(found, limits):
            problem = "no options make it fit, use a smaller model or --seq-len; the best are:"
            return [problem, *_saving_lines(found, planner, limits)]
    command = whole_command(having(config, exact), planner)
    return [
        title,
        *_saving_lines(found, planner, limits),
        "all of them in one command:",
        command,
        *lines,
    ]


def _enough(found: list[Saving], limits: Limits) -> bool:
    return bool(found) and not limits.excess(found[-1].device[1], found[-1].host[1])


def _slower(found: list[Saving]) -> float:
    """Relative increase of a step's time by all of these changes."""
    factor = 1.0
    for saving in found:
        factor *= 1 + saving.slower
    return factor - 1


def _saving_lines(found: list[Saving], planner: Planner, limits: Limits) -> list[str]:
    """Lines with each change, the bytes that it saves of the memory that is too small, and its cost
    in time."""
    device = limits.device is not None and found[0].device[0] > limits.device
    width = max(len(saving.flags) for saving in found)
    entries = []
    for saving in found:
        before, after = saving.device if device else saving.host
        text = f"  {saving.flags:{width}} saves {room(before - after)} -> {mib(after)}"
        if planner.spec != HOST_SPEC and saving.slower >= 0.001:
            text += f" ({saving.slower:.1%} slower)"
        entries.append(text)
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A remedy for a run that does not fit. config: the run's options with the remedy; None if no
    command shows the remedy."""

    text: str
    config: TrainConfig | None = None


def refusal(
    config: TrainConfig, planner: Planner, limits: Limits, fixed: frozenset[str]
) -> OutOfMemory:
    """Return the error for a search that found nothing: the least shortage, and remedies. config:
    the run with the smallest micro-batch. fixed: names of options that keep their values."""
    shrinker = Shrinker(planner, limits, fixed)
    boundless = Shrinker(planner, Limits(device=limits.device), fixed)
    changes = _with_least_host_memory(config, boundless) or boundless.shrink(config, REARRANGING)
    least = having(config, changes)
    flags = [flag("batch_size", config.batch_size)]
    flags += [spelled(config, change) for change in changes]
    missing = "; ".join(shortages(planner.plan(least), planner.spec, limits))
    if not missing:  # estimates of the search may be slightly too high
        problem = "nothing was found, but without --fit or --auto this fits:"
        return OutOfMemory(problem, [whole_command(least, planner)])
    ways = [_with_coarser_numbers(config, shrinker, changes), _with_fp8(config, shrinker, changes)]
    if boundless.excess(least):
        ways.append(_with_shorter_sequences(config, shrinker, changes))
    else:
        enough = mib(planner.estimate(least).host + 2 * ESTIMATE_MARGIN)
        ways.append(Way(text=f"{enough} of host memory"))
    ways.append(_with_a_smaller_model(config, shrinker, changes))
    useful = [way for way in ways if way]
    lines = ["what would help:", *(f"  {way.text}" for way in useful)] if useful else []
    runs = [way.config for way in useful if way.config is not None]
    if runs:
        lines += ["the first of these options in one command:", whole_command(runs[0], planner)]
    problem = f"nothing fits: with {' '.join(flags)} it is {missing}"
    return OutOfMemory(problem, lines or ["use a smaller model"])


def _with_least_host_memory(config: TrainConfig, boundless: Shrinker) -> list[Changes] | None:
    """Return the changes with which the run fits the device and needs the least host memory; None
    if no changes make the run fit."""
    places = boundless.host_choices(config)
    if not places:
        return None
    place, _ = min(places, key=lambda choice: choice[1].host)
    return boundless.with_hosted(config, place, REARRANGING)


def _with_coarser_numbers(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> Way | None:
    then = having(config, shrinker.shrink(config, (*ROUNDING, *REARRANGING), start))
    if shrinker.excess(then):
        return None
    coarser = {name for saver in ROUNDING for name in saver(config)}
    flags = spelled(config, {name: getattr(then, name) for name in sorted(coarser)})
    return Way(text=flags, config=then)


def _with_fp8(config: TrainConfig, shrinker: Shrinker, start: list[Changes]) -> Way | None:
    """fp8 products as a remedy: operands take less memory, above all host memory. None on a card
    without fp8, and if the run still does not fit."""
    of_formats = Shrinker(shrinker.planner, shrinker.limits, shrinker.fixed - set(FP8))
    then = of_formats.allowed(config, FP8) if shrinker.planner.card.fp8 else None
    if then is None or config.matmul_dtype == then.matmul_dtype:
        return None
    then = having(then, of_formats.shrink(then, REARRANGING, start))
    return None if of_formats.excess(then) else Way(text=spelled(config, FP8), config=then)


def _with_shorter_sequences(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> Way | None:
    def shrunk(seq_len: int) -> TrainConfig:
        then = changed(config, {"seq_len": seq_len})
        return having(then, shrinker.shrink(then, REARRANGING, start))

    lengths, seq_len = [], config.seq_len // 2
    while seq_len >= MIN_SEQ_LEN and seq_len % 4 == 0:
        lengths.append(seq_len)
        seq_len //= 2
    longest = _last_that_fits(lengths[::-1], lambda n: shrinker.fits(shrunk(n)))
    return longest and Way(text=flag("seq_len", longest), config=shrunk(longest))


def _with_a_smaller_model(
    config: TrainConfig, shrinker: Shrinker, start: list[Changes]
) -> Way | None:
    """The largest preset of the same architecture that fits, as a remedy. The weights need not
    exist, because a plan reads none."""
    planned = shrinker.planner.model

    def fits(name: str) -> bool:
        other = Shrinker(shrinker.planner.of(PRESETS[name]), shrinker.limits, shrinker.fixed)
        return other.fits(having(config, other.shrink(config, (*REARRANGING, *STAYING), start)))

    sizes = {
        name: parameter_count(model)
        for name, model in PRESETS.items()
        if (model.architecture, model.vocab_size) == (planned.architecture, planned.vocab_size)
    }
    smaller = [name for name in sizes if sizes[name] < parameter_count(planned)]
    largest = _last_that_fits(sorted(smaller, key=sizes.__getitem__), fits)
    return largest and Way(text=flag("model", largest))


def _last_that_fits(choices: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """Return the last choice that fits; None if no choice fits. All fitting choices must come
    first: the search bisects, because each try takes a good part of a second."""
    count = bisect_left(choices, True, key=lambda choice: not fits(choice))
    return choices[count - 1] if count else None
