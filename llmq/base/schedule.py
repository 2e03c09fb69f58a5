"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "wsd")


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
        step >= E       what step E would have otherwise, times 1 - sqrt((step - E) / cooldown)

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
