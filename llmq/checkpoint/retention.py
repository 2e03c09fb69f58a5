"""Decide which checkpoints of a run stay, by what is known of them.

A checkpoint is good when the PROVEN steps after it were. One that a bad step followed before is bad
until as many good steps have followed that one. Without a verdict it is not known yet.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

PROVEN = 20  # steps


class Verdict(NamedTuple):
    """good: whether PROVEN steps after the checkpoint were. steps: good ones directly after it.
    reason: why it is not good. level: Guard.level of these steps; -1: it cannot become good."""

    good: bool
    steps: int
    reason: str = ""
    level: int = 0


class CheckpointInfo(NamedTuple):
    """A checkpoint that is there. whole: whether it looks so."""

    path: Path
    verdict: Verdict | None
    whole: bool


def outdated(
    found: dict[int, CheckpointInfo],
    keep_n: int,
    major: int,
    saved: int,
    *,
    spared: Collection[int] = (),
    interval: int = 0,
) -> list[int]:
    """The checkpoints of a run, by step, that --ckpt-keep-n and --ckpt-major let go.

    keep_n: 0 or less keeps all. Steps that are multiples of major (if positive) stay and are not
    counted; of the others the keep_n newest, where `saved`, which was written last, counts as the
    newest, also beside later ones of an abandoned run. Damaged ones and those known to be bad are
    not counted: they go when keep_n newer ones are there. Besides stay those of the steps `spared`,
    the newest good one of each level (what is usual may have changed by divergence), and the one
    that will be the next; with interval also the newest good one of its multiples, and all
    multiples of which it is not known yet: whether extra ones were saved in between, by a signal,
    decides nothing about them.
    """
    if keep_n <= 0:
        return []
    verdicts = {step: info.verdict for step, info in found.items()}
    good = {
        step: verdict.level
        for step, verdict in sorted(verdicts.items())
        if verdict and verdict.good
    }
    # Older ones have been judged, or are of steps that nobody goes on from.
    recent = range(saved - PROVEN + 1, saved + 1)
    open_ = [step for step, verdict in verdicts.items() if verdict is None and step in recent]
    kept = {saved, *spared}
    kept |= {max(s for s in good if good[s] == level) for level in good.values()}
    kept |= _maturing(list(good), open_)
    if interval > 0:
        multiples = [step for step in good if step % interval == 0]
        kept |= {step for step in open_ if step % interval == 0} | set(multiples[-1:])
    order = sorted(
        (step for step in found if major <= 0 or step % major),
        key=lambda step: (step == saved, step),
    )
    gone, counted = [], 0
    for step in reversed(order):
        judged_bad = verdicts[step] is not None and not verdicts[step].good
        if counted >= keep_n and step not in kept:
            gone.append(step)
        elif step == saved or (not judged_bad and found[step].whole):
            counted += 1
    return sorted(gone)


def _maturing(good: list[int], open_: list[int]) -> set[int]:
    """The newest good step, and the first after it of which it is not known yet."""
    newest = max(good, default=-1)
    return {newest, min((step for step in open_ if step > newest), default=-1)} - {-1}


def left_at_end(steps: list[int], keep_n: int, major: int, interval: int = 0) -> list[int]:
    """The steps, of those at which a healthy run writes checkpoints, ascending up to its end, whose
    checkpoints are there then, without majors. interval: as in outdated."""
    left: list[int] = []
    for saved in (step for step in steps if major <= 0 or step % major):
        left.append(saved)
        good = [step for step in left if step <= saved - PROVEN]
        open_ = [step for step in left if step not in good]
        kept = _maturing(good, open_) | {s for s in open_ if interval > 0 and s % interval == 0}
        left = sorted({*left[-keep_n:], *left[-2:], *kept}.intersection(left))
    return left


class Candidates:
    """The checkpoints of a run that may become good, and what the steps after them say of them.

    followed: step of the newest after which a step was good.
    """

    def __init__(self) -> None:
        self.followed: int | None = None
        self._paths: dict[int, Path] = {}
        self._bad: dict[int, int] = {}  # level of those that are bad so far

    def add(self, step: int, path: Path, verdict: Verdict | None = None) -> None:
        """A checkpoint that is not known to be good. verdict: what is known of it."""
        self._paths[step] = path
        self._bad.pop(step, None)
        if verdict is not None:
            self._bad[step] = verdict.level

    def drop(self, step: int) -> Path | None:
        """This one cannot become good any more; its path if it could."""
        self._bad.pop(step, None)
        return self._paths.pop(step, None)

    def lose(self, step: int) -> None:
        """This one could not be written."""
        self.drop(step)
        if self.followed == step:
            self.followed = max((at for at in self._paths if at < step), default=None)

    def after_bad(self, step: int, reason: str, level: int) -> list[tuple[Path, Verdict]]:
        """A step was bad: new verdicts. level: Guard.level."""
        new = [at for at in self._paths if at <= step and at not in self._bad]
        self._bad |= dict.fromkeys(new, level)
        reason = f"step {step} was bad: {reason}"
        return [(self._paths[at], Verdict(False, step - at, reason, level)) for at in new]

    def after_good(self, step: int, last_bad: int, level: int) -> dict[Path, Verdict | None]:
        """A step was good: what became of the checkpoints that it decides about.

        None: another level was usual when one turned bad, so its verdict stays. last_bad: the last
        bad step before.
        """
        before = [at for at in self._paths if at <= step]
        self.followed = max(before, default=self.followed)
        known = [at for at in before if step - max(at, last_bad + 1) + 1 >= PROVEN]
        good = Verdict(True, PROVEN, level=level)
        return {
            self._paths.pop(at): good if self._bad.pop(at, level) == level else None for at in known
        }
