"""The states of checkpoints, and every rule that follows from a state: which checkpoints are
deleted, which one a run goes on from, goes back to, or exports.

    save -> WRITING -> UNPROVEN ---- 20 good steps ----> GOOD
                |         | a bad step                     ^
                |         v                                | 20 good steps
            disk error  SUSPECT ---------------------------'
                |         | not finite, or not read back (also from UNPROVEN)
                v         v
              (gone)    SPOILED                   any of these: DAMAGED, aside, deleted

A checkpoint being written is step_N.tmp and no checkpoint yet. All others are complete; a verdict,
which later steps bring, is a note in the checkpoint (verdict.json). docs/checkpoints.md says what
each state is good for.
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

PROVEN = 20  # good steps after a checkpoint that make it a good one
VERDICT = "verdict.json"


class State(StrEnum):
    """The state of a complete checkpoint."""

    UNPROVEN = "unproven"
    """All steps after it were good, and fewer than PROVEN."""
    SUSPECT = "suspect"
    """A bad step followed: bad until PROVEN good steps have followed that step."""
    GOOD = "good"
    """PROVEN steps after it were good."""
    SPOILED = "spoiled"
    """The weights are bad, or the disk has lost the checkpoint: no other state follows."""
    DAMAGED = "damaged"
    """A file is missing, or has another size."""


class Verdict(NamedTuple):
    """The note of later steps in a checkpoint. good: whether PROVEN steps after it were good.
    steps: good steps directly after it. reason: why it is not good. level: Guard.level of these
    steps; -1: it cannot become good."""

    good: bool
    steps: int
    reason: str = ""
    level: int = 0

    @classmethod
    def spoiled(cls, reason: str) -> Verdict:
        return cls(False, 0, reason, level=-1)


class Checkpoint(NamedTuple):
    """A checkpoint on disk. whole: whether all files are there in their sizes."""

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
    """The verdict on a complete checkpoint; None if there is none, or the note is damaged."""
    note = json_object(checkpoint / VERDICT)
    found = values_of(note, steps=int, reason=str, level=int)
    return None if found is None or "good" not in note else Verdict(note["good"] is True, *found)


def write_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Raises DiskError where the disk is full or refuses."""
    write_file(checkpoint / VERDICT, json.dumps(verdict._asdict()) + "\n")


def kept_checkpoints(directory: Path, run: RunId) -> dict[int, Checkpoint]:
    """The checkpoints of a run by step."""
    own = own_checkpoints(directory, run).items()
    return {step: Checkpoint(path, read_verdict(path), looks_whole(path)) for step, path in own}


# ------------------------------------------------------------------------------------------------
# Transitions


class Proving:
    """The checkpoints of a run whose state depends on the coming steps: UNPROVEN and SUSPECT ones,
    also while they are being written.

    followed: step of the newest checkpoint after which a step was good.
    """

    def __init__(self) -> None:
        self.followed: int | None = None
        self._open: dict[int, Verdict | None] = {}  # by step

    def add(self, step: int, verdict: Verdict | None = None) -> None:
        """A checkpoint that is not known to be good. verdict: what is known of it."""
        self._open[step] = verdict

    def drop(self, step: int) -> bool:
        """The state of this checkpoint is settled; False if it was before."""
        known = step in self._open
        self._open.pop(step, None)
        return known

    def lose(self, step: int) -> None:
        """This checkpoint could not be written."""
        self.drop(step)
        if self.followed == step:
            self.followed = max((at for at in self._open if at < step), default=None)

    def after_bad(self, step: int, reason: str, level: int) -> dict[int, Verdict]:
        """The verdicts that a bad step brings: UNPROVEN becomes SUSPECT. level: Guard.level."""
        reason = f"step {step} was bad: {reason}"
        new = {
            at: Verdict(False, step - at, reason, level)
            for at, verdict in self._open.items()
            if at <= step and verdict is None
        }
        self._open |= new
        return new

    def after_good(self, step: int, last_bad: int, level: int) -> dict[int, Verdict]:
        """The verdicts that a good step brings: UNPROVEN becomes GOOD, and so does SUSPECT, unless
        another level was usual when the bad step came. last_bad: the last bad step before."""
        before = [at for at in self._open if at <= step]
        self.followed = max(before, default=self.followed)
        settled = [at for at in before if step - max(at, last_bad + 1) + 1 >= PROVEN]
        verdicts = {at: self._open.pop(at) for at in settled}
        good = Verdict(True, PROVEN, level=level)
        return {at: good for at, old in verdicts.items() if old is None or old.level == level}


# ------------------------------------------------------------------------------------------------
# Deletion


class Keep(NamedTuple):
    """The checkpoints of a run that stay. newest: --ckpt-keep-n, 0 or less keeps all. major:
    multiples of it (if positive) stay and are not counted. interval: with --guard rollback the
    interval of checkpoints that a rollback returns to, else 0. first: first step of the stage,
    which counts as such a checkpoint."""

    newest: int
    major: int = 0
    interval: int = 0
    first: int = 0

    @classmethod
    def of(cls, config: RunOptions, first: int = 0) -> Keep:
        interval = config.ckpt_interval if config.guard == "rollback" else 0
        return cls(config.ckpt_keep_n, config.ckpt_major, interval, first)

    def minors(self, steps: Iterable[int]) -> list[int]:
        """The steps that are no multiples of major."""
        return [step for step in steps if self.major <= 0 or step % self.major]


def outdated(
    found: Mapping[int, Checkpoint], keep: Keep, saved: int, spared: Collection[int] = ()
) -> list[int]:
    """The steps of checkpoints that may be deleted.

    The keep.newest newest stay, where `saved`, written last, counts as the newest; SUSPECT, SPOILED
    and DAMAGED ones are not counted: they go when so many newer ones are there. Besides stay the
    steps `spared`, the newest GOOD one of each level, and the one that will be the next; for
    rollbacks also the newest GOOD one of the interval, and all of the interval that are not known
    yet: extra saves decide nothing about them.
    """
    if keep.newest <= 0:
        return []
    states = {step: checkpoint.state for step, checkpoint in sorted(found.items())}
    good = [step for step, state in states.items() if state is State.GOOD]
    # Older ones have been judged, or are of steps that nobody goes on from.
    recent = range(saved - PROVEN + 1, saved + 1)
    unproven = [s for s, state in states.items() if state is State.UNPROVEN and s in recent]
    stay = {saved, *spared, *_maturing(good, unproven)}
    stay |= set({found[step].verdict.level: step for step in good}.values())  # newest of each
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
    """The newest good step, and the first after it of which it is not known yet."""
    newest = max(good, default=-1)
    return {newest, min((step for step in unproven if step > newest), default=-1)} - {-1}


def left_at_end(steps: list[int], keep: Keep) -> list[int]:
    """The steps, of those at which a healthy run writes checkpoints, ascending up to its end, whose
    checkpoints are there then, without majors."""
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
# Going on


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
    """The checkpoint that --continue names, None if there is no complete one. wanted: NEWEST or a
    step in `directory`, or a path as of checkpoint_at. passed, world: as of checkpoint_at."""
    if wanted.isdecimal():
        return world.on_first(lambda: list_checkpoints(directory)).get(int(wanted))
    if wanted == NEWEST:
        return checkpoint_at(directory, passed, world)
    return checkpoint_at(Path(os.path.abspath(os.path.expanduser(wanted))), passed, world)


def checkpoint_at(
    path: Path, passed: list[str] | None = None, world: World = World()
) -> Path | None:
    """A complete checkpoint, whatever its directory is called, or of a directory the newest
    UNPROVEN or GOOD one that is whole; passed gets a line for each newer one. Without one, the
    newest SUSPECT or SPOILED one after which a step was good, or just the newest. LlmqError for the
    name of another step, or if none is whole. All processes of the world call this function."""
    path = Path(os.path.expanduser(path))
    if world.on_first(lambda: is_complete(path)):
        world.on_first(lambda: check_name(path))
        return path
    found = world.on_first(lambda: list_checkpoints(path))
    return _newest_usable(found, [] if passed is None else passed, world)


def _newest_usable(found: dict[int, Path], passed: list[str], world: World) -> Path | None:
    """Choose as checkpoint_at does, of checkpoints by step, which all processes know alike."""
    problems, bad = [], []
    for _, path in sorted(found.items(), reverse=True):
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
    if not found:
        return None
    if not bad:
        raise LlmqError(f"none of the {len(found)} checkpoints is whole; the newest: {problems[0]}")
    path, verdict = next((pair for pair in bad if pair[1].steps > 0), bad[0])
    why = "the newest after which a step was good" if verdict.steps else "the newest"
    passed.append(f"all checkpoints are known to be bad: taking '{path}', {why}")
    return path


def newest_good(
    found: Mapping[int, Checkpoint], keep: Keep, last: int, world: World = World()
) -> Path | None:
    """The newest whole checkpoint of the stage up to step `last` that a rollback returns to; None
    without one.

    Checkpoints of multiples of keep.interval, which a run that was stopped and went on has, too,
    count if GOOD; the first one of a later stage unless SPOILED. All processes of the world call
    this function.
    """
    for step, checkpoint in sorted(found.items(), reverse=True):
        state = checkpoint.state
        if step == keep.first > 0:
            fits = state in (State.UNPROVEN, State.SUSPECT, State.GOOD)
        else:
            fits = state is State.GOOD and step % keep.interval == 0
        if fits and keep.first <= step <= last and problem_of(checkpoint.path, world) is None:
            return checkpoint.path
    return None


def exported_best(newest: Path) -> tuple[Path, BestValue] | None:
    """The best checkpoint and its value, which a run exports; None if the run exports its last
    checkpoint, or knows no best. newest: a checkpoint of the run; its parent folder has the
    others."""
    document = read_manifest(newest / MANIFEST)
    if document["options"].get("export") == "last":
        return None
    there = own_checkpoints(newest.parent, RunId.of(document["run"]))
    best = recorded_best(document, newest.parent, there)
    return None if best is None else (there[best.step], best)
