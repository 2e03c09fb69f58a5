"""The learning rate at every step of short runs."""

import math

import pytest

from llmq.options.groups.optim import SCHEDULES, learning_rate


def rates(steps, **options):
    return [learning_rate(step, steps=steps, **options) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_decay_the_rate_is_constant(schedule):
    assert rates(5, base=0.5, schedule=schedule) == [0.5] * 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_from_zero(schedule):
    found = rates(10, base=1.0, warmup=4, final_fraction=0.25, schedule=schedule)
    assert found[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_linear():
    found = rates(7, base=1.0, warmup=2, final_fraction=0.5, schedule="linear")
    assert found == [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]


def test_cosine_is_symmetric_and_ends_at_its_floor():
    found = rates(9, base=1.0, warmup=2, final_fraction=0.5)
    assert found[2] == 1.0
    # Half-way between base and floor; cos(pi / 2) is 6e-17 in floating point.
    assert found[5] == pytest.approx(0.75, abs=1e-15)
    assert found[8] == 0.5
    assert found[3] == 0.5 + 0.5 * (0.5 * math.cos(math.pi / 6) + 0.5)
    assert found[3] - 0.75 == pytest.approx(0.75 - found[7], abs=1e-15)  # rounding of cos


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(("steps", "warmup", "cooldown"), [(20, 0, 0), (20, 7, 5), (4, 2, 0)])
def test_decay_has_its_floor_at_its_last_step(schedule, steps, warmup, cooldown):
    found = rates(
        steps,
        base=3e-4,
        warmup=warmup,
        cooldown=cooldown,
        final_fraction=0.1,
        schedule=schedule,
    )
    decay = found[warmup : steps - cooldown]
    # base + (floor - base) is floor but for two roundings, and the same the other way round.
    assert decay[0] == pytest.approx(3e-4, rel=1e-14)
    assert decay[-1] == pytest.approx(3e-5, rel=1e-14)
    assert decay == sorted(decay, reverse=True)


@pytest.mark.parametrize(("schedule", "start"), [("cosine", 0.5), ("linear", 0.5), ("wsd", 1.0)])
def test_cooldown_anneals_what_the_decay_ended_with(schedule, start):
    found = rates(14, base=1.0, cooldown=4, final_fraction=0.5, schedule=schedule)
    assert found[10:] == [start * (1 - math.sqrt(k / 4)) for k in range(4)]
    assert learning_rate(14, steps=14, base=1.0, cooldown=4) == 0.0


def test_wsd_ignores_the_floor():
    assert rates(4, base=2.0, final_fraction=0.0, schedule="wsd") == [2.0] * 4


def test_short_runs():
    assert rates(1, base=1.0, final_fraction=0.0) == [1.0]  # a single step learns
    assert rates(4, base=1.0, warmup=8) == [0.0, 0.125, 0.25, 0.375]
    # Warm-up is cut off by the cooldown, which starts from where it was.
    assert rates(4, base=1.0, warmup=8, cooldown=2)[2:] == [0.25, 0.25 * (1 - math.sqrt(0.5))]
    assert rates(2, base=1.0, cooldown=2) == [1.0, 1 - math.sqrt(0.5)]


def test_steps_after_the_end_keep_the_last_rate():
    assert learning_rate(50, steps=10, base=1.0, final_fraction=0.5) == 0.5
    assert learning_rate(50, steps=10, base=1.0, cooldown=3) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 3, 9])
@pytest.mark.parametrize("cooldown", [3, 4, 5, 50])
def test_a_cooldown_of_the_whole_run_or_more_never_ascends(schedule, warmup, cooldown):
    found = rates(4, base=1.0, warmup=warmup, cooldown=cooldown, schedule=schedule)
    assert all(0 <= rate <= 1 for rate in found)
    assert all(rate == 0 for rate in found if warmup and cooldown >= 4)


def test_names():
    assert learning_rate(3, steps=8, base=1.0, schedule="WSD") == 1.0
    with pytest.raises(ValueError, match=r"schedule must be one of .*'step'"):
        learning_rate(0, steps=1, base=1.0, schedule="step")
