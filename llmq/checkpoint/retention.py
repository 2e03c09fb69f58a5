"""Which checkpoints of a run stay, and which one a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmq.base.errors import LlmqError
from llmq.checkpoint.verdict import PROVEN, Verdict, read_verdict
from llmq.checkpoint.verify import problem_of
from llmq.runtime.processes import processes


class Kept(NamedTuple):
    """A checkpoint that is there. whole: whether it looks so."""

    path: Path
    verdict: Verdict | None
    whole: bool


def newest_usable(found: dict[int, Path], passed: list[str]) -> Path | None:
    """Of complete checkpoints by step, the newest that is whole and not known to be bad.

    passed: gets a line for each newer one. If all are bad, the newest after which a step was good,
    or just the newest. LlmqError if there are some and none is whole. All processes call it, with
    the same.
    """
    problems, bad = [], []
    for _, path in sorted(found.items(), reverse=True):
        problem = problem_of(path)
        if problem is not None:
            problems.append(problem)
            passed.append(f"passed over checkpoint '{path}': {problem}")
            continue
        verdict = processes().on_first(lambda path=path: read_verdict(path))
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


def newest_good(found: dict[int, Kept], wanted: Callable[[int], bool]) -> Path | None:
    """The newest that is known to be good, of the steps that are wanted, and whole.

    All processes call it, with the same.
    """
    for step, (path, verdict, _) in sorted(found.items(), reverse=True):
        if wanted(step) and verdict is not None and verdict.good and problem_of(path) is None:
            return path
    return None


def outdated(
    found: dict[int, Kept],
    keep_n: int,
    major: int,
    saved: int,
    *,
    spared: Collection[int] = (),
    interval: int = 0,
) -> list[int]:
    """Of a run's checkpoints by step, those that --ckpt-keep-n and --ckpt-major let go.

    Steps that are multiples of major (if positive) stay and are not counted; of the others the
    keep_n newest, where `saved` counts as the newest, also beside later ones of an abandoned run.
    Damaged ones and those known to be bad are not counted: they go when keep_n newer ones are
    there. Besides stay those of the steps `spared`, the newest good one of each level (what is
    usual may have changed by divergence), and the one that will be the next; with interval also
    the newest good one of its multiples, and all multiples of which it is not known yet: whether
    extra ones were saved in between, by a signal, decides nothing about them.
    """
    verdicts = {step: kept.verdict for step, kept in found.items()}
    good = {
        step: verdict.level
        for step, verdict in sorted(verdicts.items())
        if verdict and verdict.good
    }
    # What is older has been judged, or is of steps that nobody goes on from.
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
    """Of the steps at which a healthy run writes checkpoints, ascending up to its end, those whose
    checkpoints are there then, without majors. interval: as in outdated."""
    left: list[int] = []
    for saved in (step for step in steps if major <= 0 or step % major):
        left.append(saved)
        good = [step for step in left if step <= saved - PROVEN]
        open_ = [step for step in left if step not in good]
        kept = _maturing(good, open_) | {s for s in open_ if interval > 0 and s % interval == 0}
        left = sorted({*left[-keep_n:], *left[-2:], *kept}.intersection(left))
    return left


def forget_pages(path: Path) -> None:
    """Have the system drop what it holds in memory of a checkpoint's files, if it can: then they
    are read from the disk."""
    with suppress(OSError, AttributeError):
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
