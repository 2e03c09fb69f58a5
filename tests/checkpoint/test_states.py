"""The state machine of checkpoints: transitions, and what each state is good for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmq.checkpoint import states
from llmq.checkpoint.states import (
    PROVEN,
    VERDICT,
    Checkpoint,
    Keep,
    Proving,
    State,
    Verdict,
    newest_good,
    outdated,
    read_verdict,
    write_verdict,
)
from llmq.runtime.world import World

GOOD, SUSPECT = State.GOOD, State.SUSPECT
UNPROVEN, SPOILED, DAMAGED = State.UNPROVEN, State.SPOILED, State.DAMAGED
VERDICTS = {
    GOOD: Verdict(True, PROVEN),
    SUSPECT: Verdict(False, 3, "step 3 was bad"),
    SPOILED: Verdict.spoiled("NaN"),
}


def checkpoint(state, level=0, step=0):
    verdict = VERDICTS.get(state)
    if verdict is not None and level:
        verdict = verdict._replace(level=level)
    return Checkpoint(Path(f"step_{step}"), verdict, whole=state is not DAMAGED)


def found(text):
    """Checkpoints by step of "10 good, 20 unproven": steps and states, at level N in "good@N"."""
    pairs = [item.split() for item in text.split(", ")]
    states_of = {int(step): state.split("@") for step, state in pairs}
    return {
        step: checkpoint(State(state), *map(int, level), step=step)
        for step, (state, *level) in states_of.items()
    }


# ------------------------------------------------------------------------------------------------
# Transitions


@pytest.mark.parametrize(
    ("before", "events", "after"),
    [
        (None, "+19", UNPROVEN),
        (None, "+20", GOOD),
        (None, "+5 -", SUSPECT),
        (None, "-", SUSPECT),
        (None, "+5 - +19", SUSPECT),
        (None, "+5 - +20", GOOD),
        (None, "+5 - +10 - +10", SUSPECT),
        (None, "+5 - +10 - +20", GOOD),
        (None, "+5 - level +20", SUSPECT),  # what is usual now says nothing of the weights then
        (None, "level +20", GOOD),
        (None, "+5 spoiled +20", SPOILED),
        (None, "+5 - spoiled +20", SPOILED),
        (None, "+20 spoiled", GOOD),
        (None, "+20 -", GOOD),
        (VERDICTS[SUSPECT], "+20", GOOD),  # found by a run that goes on
        (VERDICTS[SUSPECT], "level +20", SUSPECT),
    ],
)
def test_transitions(before, events, after):
    """events: what a checkpoint of step 100 sees: "+N" good steps, "-" a bad one."""
    proving, verdict = Proving(), before
    proving.add(100, before)
    step, last_bad, level = 100, -1, 0
    for event in events.split():
        if event == "level":
            level += 1
        elif event == "spoiled":
            verdict = Verdict.spoiled("NaN") if proving.drop(100) else verdict
        elif event == "-":
            verdict = proving.mark_suspect(step, "its loss", level).get(100, verdict)
            last_bad, step = step, step + 1
        for _ in range(int(event) if event[0] == "+" else 0):
            verdict = proving.mark_good(step, last_bad, level).get(100, verdict)
            step += 1
    assert Checkpoint(Path(), verdict, whole=True).state is after
    assert Checkpoint(Path(), verdict, whole=False).state is DAMAGED


@pytest.mark.parametrize("field, value", [("steps", "1e999"), ("level", "[]"), ("reason", None)])
def test_a_damaged_verdict_says_nothing(tmp_path, field, value):
    write_verdict(tmp_path, Verdict(True, 20, "none"))
    assert read_verdict(tmp_path) == Verdict(True, 20, "none")
    note = json.loads((tmp_path / VERDICT).read_text())
    del note[field]
    text = json.dumps(note)
    if value is not None:
        text = f'{text[:-1]}, "{field}": {value}}}'
    (tmp_path / VERDICT).write_text(text)
    assert read_verdict(tmp_path) is None


# ------------------------------------------------------------------------------------------------
# What a state is good for


@pytest.mark.parametrize(
    ("there", "keep", "saved", "gone"),
    [
        ("10 good, 20 good, 30 good", Keep(0), 30, []),
        ("10 good, 20 good, 30 good", Keep(-1), 30, []),
        ("10 good, 20 good, 30 good", Keep(1), 30, [10, 20]),
        ("10 good, 20 good, 30 good", Keep(2), 30, [10]),
        ("10 good, 20 good, 30 good", Keep(9), 30, []),
        ("10 good, 20 good, 30 good", Keep(1, major=20), 30, [10]),
        ("10 good, 20 good, 30 good", Keep(1, major=10), 30, []),
        ("10 good, 20 good, 30 good, 40 good", Keep(2, major=20), 40, []),  # fewer minors
        ("10 good, 20 good, 30 good", Keep(1, major=30), 30, [10]),
        ("10 good@1, 20 good@2, 30 good@2", Keep(1), 30, [20]),  # the newest of each level
        ("10 good, 20 good, 30 unproven", Keep(1), 30, [10]),
        ("10 good, 20 good, 30 suspect", Keep(1), 30, [10]),
        ("10 good, 20 good, 30 spoiled, 40 unproven", Keep(2), 40, [10]),  # 30 is not counted
        ("10 good, 20 damaged, 30 good, 40 good", Keep(1), 40, [10, 20, 30]),
        ("10 good, 20 good, 30 damaged", Keep(1), 30, [10]),  # a damaged one is no good one
        ("10 suspect, 20 suspect, 30 unproven", Keep(1), 30, [10, 20]),
        ("10 unproven, 12 unproven, 14 unproven", Keep(1), 14, [12]),  # 10 will be good first
        ("10 good, 22 unproven, 24 unproven, 26 unproven", Keep(1), 26, [24]),
        ("10 unproven, 40 unproven", Keep(1), 40, [10]),  # of a course that nobody goes on with
        ("10 good, 13 good, 20 good, 23 good", Keep(1), 23, [10, 13, 20]),
        ("10 good, 13 good, 20 good, 23 good", Keep(1, interval=10), 23, [10, 13]),
        ("13 good, 15 good, 23 good", Keep(1, interval=10, first=13), 23, [15]),
        ("20 good, 30 unproven, 33 unproven, 36 unproven", Keep(1, interval=10), 36, [33]),
        ("20 good, 26 unproven, 30 unproven, 36 unproven", Keep(1, interval=10), 36, []),
    ],
)
def test_deletion(there, keep, saved, gone):
    assert outdated(found(there), keep, saved) == gone
    assert outdated(found(there), keep, saved, spared=gone) == []


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ("10 good, 20 good", 20),
        ("10 good, 20 unproven", 20),
        ("10 good, 20 suspect", 10),
        ("10 unproven, 20 spoiled", 10),
        ("10 unproven, 20 damaged", 10),
        ("10 suspect, 20 spoiled", 10),  # after 10 was a good step
        ("10 spoiled, 20 spoiled", 20),
        ("10 damaged, 20 spoiled", 20),
    ],
)
def test_going_on(there, taken, monkeypatch):
    checkpoints = {c.path: c for c in found(there).values()}
    damaged = {path: "it is damaged" * (not c.whole) or None for path, c in checkpoints.items()}
    monkeypatch.setattr(states, "problem_of", lambda path, world: damaged[path])
    monkeypatch.setattr(states, "read_verdict", lambda path: checkpoints[path].verdict)
    passed = []
    paths = {step: c.path for step, c in found(there).items()}
    assert states._newest_usable(paths, passed, World()) == Path(f"step_{taken}")
    newer = [path.name for step, path in paths.items() if step > taken]
    assert all(f"'{name}'" in line for name, line in zip(newer[::-1], passed, strict=False))


@pytest.mark.parametrize(
    ("there", "first", "last", "taken"),
    [
        ("10 good, 20 good, 30 good", 0, 29, 20),
        ("10 good, 20 unproven", 0, 99, 10),
        ("10 good, 20 suspect", 0, 99, 10),
        ("10 good, 13 good", 0, 99, 10),  # a run that was stopped has no 13
        ("10 unproven, 20 damaged", 0, 99, None),
        ("10 good, 13 unproven, 20 unproven", 13, 99, 13),  # a stage goes back to its first step
        ("10 good, 13 suspect", 13, 99, 13),
        ("10 good, 13 spoiled", 13, 99, None),
        ("10 good, 13 good, 20 good", 13, 99, 20),
    ],
)
def test_rollback(there, first, last, taken, monkeypatch):
    monkeypatch.setattr(states, "problem_of", lambda path, world: None)
    path = newest_good(found(there), Keep(1, interval=10, first=first), last)
    assert path == (None if taken is None else Path(f"step_{taken}"))


@pytest.mark.parametrize("seed", range(30))
def test_no_good_state_is_lost(seed):
    """Whatever steps do, with one checkpoint kept: the newest good one of each level stays, and so
    does one after which a step was good, until there is a good one."""
    rng = np.random.default_rng(seed)
    every, share = int(rng.integers(1, 12)), rng.choice([0.0, 0.02, 0.2, 0.9])
    proving, there, last_bad, deleted = Proving(), {}, -1, {}
    for step in range(150):
        if step and step % every == 0 and last_bad < step - 1:
            there[step] = None
            proving.add(step)
            old = {at: Checkpoint(Path(str(at)), v, True) for at, v in there.items()}
            spared = [] if proving.followed is None else [proving.followed]
            for at in outdated(old, Keep(1), step, spared):
                deleted[at] = there.pop(at)
                proving.drop(at)
        if rng.random() < share:
            new, last_bad = proving.mark_suspect(step, "its loss", 0), step
        else:
            new = proving.mark_good(step, last_bad, 0)
        there |= {at: verdict for at, verdict in new.items() if at in there}
        good = [at for at, verdict in there.items() if verdict is not None and verdict.good]
        lost = [at for at, verdict in deleted.items() if verdict is not None and verdict.good]
        assert max(lost, default=-1) <= max(good, default=-1)
        assert proving.followed is None or proving.followed in there or good
        assert len(there) <= 4
