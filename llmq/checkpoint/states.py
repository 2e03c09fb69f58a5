"""The states of checkpoints, and the rules that follow: which checkpoints are deleted, and which
one a run resumes from, rolls back to, or exports.

    save -> WRITING -> UNPROVEN ---- 20 good steps ----> GOOD
                |         | a bad step                     ^
                |         v                                | 20 good steps
            disk error  SUSPECT ---------------------------'
                |         | not finite, or not read back (also from UNPROVEN)
                v         v
              (gone)    SPOILED                   any of these: DAMAGED, aside, deleted

A checkpoint being written is called step_N.tmp and does not count yet. After later steps the run
adds a verdict, a note in the checkpoint (verdict.json). docs/checkpoints.md says how each state is
used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import json_object, values_of, write_file
from llmq.base.run_id import RunId
from llmq.checkpoint.best import BestValue, recorded_best
from llmq.checkpoint.folder import is_complete, looks_whole, problem_of
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.store import (
    check_name,
    checkpoints_by_name,
    list_checkpoints,
    own_checkpoints,
)
from llmq.options.groups.run import RunOptions
from llmq.options.option_types import NEWEST
from llmq.runtime.world import World

PROVEN = 20  # number of good steps after which a checkpoint is good
VERDICT = "verdict.json"


class State(StrEnum):
    """The state of a complete checkpoint."""

    UNPROVEN = "unproven"
    """All later steps were good, but they are fewer than PROVEN."""
    SUSPECT = "suspect"
    """A bad step followed. PROVEN good steps after the bad step will make the checkpoint GOOD."""
    GOOD = "good"
    """PROVEN good steps followed."""
    SPOILED = "spoiled"
    """The weights are bad, or the disk has lost the checkpoint; this state is final."""
    DAMAGED = "damaged"
    """A file is missing, or has another size."""


class Verdict(NamedTuple):
    """The verdict of later steps on a checkpoint. good: True if PROVEN good steps followed. steps:
    number of good steps directly after the checkpoint. reason: why the verdict is not good; else
    "". level: Guard.level during these steps; -1: the checkpoint can never become good."""

    good: bool
    steps: int
    reason: str = ""
    level: int = 0

    @classmethod
    def spoiled(cls, reason: str) -> Verdict:
        return cls(False, 0, reason, level=-1)


class Checkpoint(NamedTuple):
    """A checkpoint on disk. verdict: the verdict in its note, or None. whole: True if all files
    have their recorded sizes."""

    path: Path
    verdict: Verdict | None
    whole: bool

    @property
    def state(self) -> State:
        if not self.whole:
            return State.DAMAGED
        if self.verdict is None:
            return State.UNPROVEN
        if self.verdict.good:
            return State.GOOD
        return State.SUSPECT if self.verdict.level >= 0 else State.SPOILED


def read_verdict(checkpoint: Path) -> Verdict | None:
    """Return the verdict on a complete checkpoint; None if the note is missing or damaged."""
    note = json_object(checkpoint / VERDICT)
    fields = values_of(note, steps=int, reason=str, level=int)
    return None if fields is None or "good" not in note else Verdict(note["good"] is True, *fields)


def write_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Write verdict.json into a checkpoint. DiskError if the disk is full or fails."""
    write_file(checkpoint / VERDICT, json.dumps(verdict._asdict()) + "\n")


def kept_checkpoints(directory: Path, run: RunId) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by step."""
    own = own_checkpoints(directory, run).items()
    return {step: Checkpoint(path, read_verdict(path), looks_whole(path)) for step, path in own}


# ------------------------------------------------------------------------------------------------
# Transitions


class Proving:
    """The checkpoints of a run whose state depends on coming steps: UNPROVEN and SUSPECT
    checkpoints, and checkpoints that are still being written.

    followed: step of the newest checkpoint that a good step followed; None without one.
    """

    def __init__(self) -> None:
        self.followed: int | None = None
        self._open: dict[int, Verdict | None] = {}  # by step

    def add(self, step: int, verdict: Verdict | None = None) -> None:
        """Add a checkpoint that is not GOOD yet. verdict: the verdict in its note; None for
        UNPROVEN."""
        self._open[step] = verdict

    def drop(self, step: int) -> bool:
        """Remove a checkpoint, because its state is settled. Return False if the checkpoint was not
        listed."""
        known = step in self._open
        self._open.pop(step, None)
        return known

    def lose(self, step: int) -> None:
        """Remove a checkpoint that could not be written."""
        self.drop(step)
        if self.followed == step:
            self.followed = max((saved for saved in self._open if saved < step), default=None)

    def mark_suspect(self, step: int, reason: str, level: int) -> dict[int, Verdict]:
        """Apply a bad step: UNPROVEN checkpoints become SUSPECT. Return the new verdicts by step of
        the checkpoint. reason: why the step was bad. level: Guard.level of the bad step."""
        reason = f"step {step} was bad: {reason}"
        new = {
            saved: Verdict(False, step - saved, reason, level)
            for saved, verdict in self._open.items()
            if saved <= step and verdict is None
        }
        self._open |= new
        return new

    def mark_good(self, step: int, last_bad: int, level: int) -> dict[int, Verdict]:
        """Apply a good step: checkpoints with PROVEN good steps become GOOD, SUSPECT checkpoints
        only if `level` is the level of their bad step. Return the new verdicts by step of the
        checkpoint. last_bad: the last bad step before `step`. level: Guard.level of the good
        step."""
        before = [saved for saved in self._open if saved <= step]
        self.followed = max(before, default=self.followed)
        settled = [saved for saved in before if step - max(saved, last_bad + 1) + 1 >= PROVEN]
        verdicts = {saved: self._open.pop(saved) for saved in settled}
        good = Verdict(True, PROVEN, level=level)
        return {saved: good for saved, old in verdicts.items() if old is None or old.level == level}


# ------------------------------------------------------------------------------------------------
# Deletion


class Keep(NamedTuple):
    """The rule for the checkpoints of a run that stay.

    newest: value of --ckpt-keep-n; 0 or less keeps all. major: if positive, checkpoints whose steps
    are multiples of `major` stay and are not counted. interval: with --guard rollback, the interval
    of the checkpoints to which a rollback returns, else 0. first: first step of the stage, to which
    rollbacks return, too.
    """

    newest: int
    major: int = 0
    interval: int = 0
    first: int = 0

    @classmethod
    def of(cls, config: RunOptions, first: int = 0) -> Keep:
        interval = config.ckpt_interval if config.guard == "rollback" else 0
        return cls(config.ckpt_keep_n, config.ckpt_major, interval, first)

    def minors(self, steps: Iterable[int]) -> list[int]:
        """Return those steps that are not multiples of `major`."""
        return [step for step in steps if self.major <= 0 or step % self.major]


def outdated(
    checkpoints: Mapping[int, Checkpoint], keep: Keep, saved: int, spared: Collection[int] = ()
) -> list[int]:
    """Return the steps of the checkpoints that may be deleted, ascending.

    The newest checkpoints stay, keep.newest in number; `saved`, the step written last, counts as
    the newest. SUSPECT, SPOILED and DAMAGED checkpoints do not count: each goes when keep.newest
    newer checkpoints are there. Also stay: the steps `spared`, the newest GOOD checkpoint of each
    level, and the UNPROVEN checkpoint that will be GOOD next. With keep.interval, of the
    checkpoints to which a rollback returns, the newest GOOD one and all UNPROVEN ones stay as well,
    however many other saves there are.
    """
    if keep.newest <= 0:
        return []
    states = {step: checkpoint.state for step, checkpoint in sorted(checkpoints.items())}
    good = [step for step, state in states.items() if state is State.GOOD]
    # Older checkpoints have a verdict, or belong to steps from which no run continues.
    recent = range(saved - PROVEN + 1, saved + 1)
    unproven = [s for s, state in states.items() if state is State.UNPROVEN and s in recent]
    stay = {saved, *spared, *_maturing(good, unproven)}
    stay |= set({checkpoints[step].verdict.level: step for step in good}.values())  # newest of each
    if keep.interval > 0:
        returned_to = [s for s in states if s == keep.first or s % keep.interval == 0]
        stay |= {step for step in unproven if step in returned_to}
        stay |= {*[step for step in good if step in returned_to][-1:]}
    gone, counted = [], 0
    for step in sorted(keep.minors(states), key=lambda step: (step == saved, step), reverse=True):
        if counted >= keep.newest and step not in stay:
            gone.append(step)
        elif step == saved or states[step] in (State.UNPROVEN, State.GOOD):
            counted += 1
    return sorted(gone)


def _maturing(good: list[int], unproven: list[int]) -> set[int]:
    """Return the newest good step, and the first unproven step after the newest good one."""
    newest = max(good, default=-1)
    return {newest, min((step for step in unproven if step > newest), default=-1)} - {-1}


def left_at_end(steps: list[int], keep: Keep) -> list[int]:
    """Return the steps whose checkpoints are left at the end of a run without bad steps. Multiples
    of keep.major are left out.

    steps: all steps at which the run saves, ascending.
    """
    left: dict[int, Checkpoint] = {}
    for saved in keep.minors(steps):
        followed = max(left, default=saved)
        left[saved] = Checkpoint(Path(), None, whole=True)
        for step in [step for step in left if step <= saved - PROVEN]:
            left[step] = Checkpoint(Path(), Verdict(True, PROVEN), whole=True)
        for step in outdated(left, keep, saved, [followed]):
            del left[step]
    return list(left)


# ------------------------------------------------------------------------------------------------
# Resuming


class NoCheckpoint(ConfigError):
    """The step or the path that --continue names has no complete checkpoint."""

    def __init__(self, directory: Path, spec: str):
        there = ", ".join(map(str, checkpoints_by_name(directory))) or "none"
        where = f" of this step in '{directory}', which has {there}" if spec.isdecimal() else ""
        super().__init__(f"--continue {spec}: no complete checkpoint{where or ' there'}")


def find_checkpoint(
    directory: Path,
    wanted: str = NEWEST,
    passed: list[str] | None = None,
    world: World = World(),
) -> Path | None:
    """Return the checkpoint that --continue names; None if there is no complete one. wanted:
    NEWEST, a step in `directory`, or a path. passed, world: see checkpoint_at."""
    if wanted.isdecimal():
        return world.on_first(lambda: list_checkpoints(directory)).get(int(wanted))
    if wanted == NEWEST:
        return checkpoint_at(directory, passed, world)
    return checkpoint_at(Path(os.path.abspath(os.path.expanduser(wanted))), passed, world)


def checkpoint_at(
    path: Path, passed: list[str] | None = None, world: World = World()
) -> Path | None:
    """Return the checkpoint at a path; for a directory of checkpoints, the one from which a run
    resumes; None for a directory without checkpoints.

    In a directory the choice is the newest whole checkpoint that is UNPROVEN or GOOD; else the
    newest whole one that a good step followed; else the newest whole one. passed: list that gets a
    line for each checkpoint passed over. LlmqError if the step in a checkpoint's name is wrong, or
    if no checkpoint is whole. All processes of the world call this function.
    """
    path = Path(os.path.expanduser(path))
    if world.on_first(lambda: is_complete(path)):
        world.on_first(lambda: check_name(path))
        return path
    checkpoints = world.on_first(lambda: list_checkpoints(path))
    return _newest_usable(checkpoints, [] if passed is None else passed, world)


def _newest_usable(checkpoints: dict[int, Path], passed: list[str], world: World) -> Path | None:
    """Choose a checkpoint as checkpoint_at does. checkpoints: paths by step, the same in all
    processes."""
    problems, bad = [], []
    for _, path in sorted(checkpoints.items(), reverse=True):
        problem = problem_of(path, world)
        if problem is not None:
            problems.append(problem)
            passed.append(f"passed over checkpoint '{path}': {problem}")
            continue
        verdict = world.on_first(lambda path=path: read_verdict(path))
        if verdict is None or verdict.good:
            return path
        bad.append((path, verdict))
        passed.append(f"passed over checkpoint '{path}': {verdict.reason}")
    if not checkpoints:
        return None
    if not bad:
        raise LlmqError(
            f"none of the {len(checkpoints)} checkpoints is whole; the newest: {problems[0]}"
        )
    path, verdict = next((pair for pair in bad if pair[1].steps > 0), bad[0])
    why = "the newest after which a step was good" if verdict.steps else "the newest"
    passed.append(f"all checkpoints are known to be bad: taking '{path}', {why}")
    return path


def newest_good(
    checkpoints: Mapping[int, Checkpoint], keep: Keep, last: int, world: World = World()
) -> Path | None:
    """Return the newest whole checkpoint, of the stage and up to step `last`, to which a rollback
    can return; None without one.

    A checkpoint counts if its step is a multiple of keep.interval and its state is GOOD; extra
    saves do not count, because an uninterrupted run lacks them. The first checkpoint of a later
    stage counts unless it is SPOILED or DAMAGED. All processes of the world call this function.
    """
    for step, checkpoint in sorted(checkpoints.items(), reverse=True):
        state = checkpoint.state
        if step == keep.first > 0:
            fits = state in (State.UNPROVEN, State.SUSPECT, State.GOOD)
        else:
            fits = state is State.GOOD and step % keep.interval == 0
        if fits and keep.first <= step <= last and problem_of(checkpoint.path, world) is None:
            return checkpoint.path
    return None


def exported_best(newest: Path) -> tuple[Path, BestValue] | None:
    """Return path and value of the best checkpoint if the run exports it; None if the run exports
    its last checkpoint or has no best. newest: a checkpoint of the run, in the folder of all its
    checkpoints."""
    document = read_manifest(newest / MANIFEST)
    if document["options"].get("export") == "last":
        return None
    there = own_checkpoints(newest.parent, RunId.of(document["run"]))
    best = recorded_best(document, newest.parent, there)
    return None if best is None else (there[best.step], best)
