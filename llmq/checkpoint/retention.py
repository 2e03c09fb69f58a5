"""Which checkpoints of a run stay, and which one a run goes on from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from llmq.base.errors import LlmqError
from llmq.checkpoint.checkpoint import read_back
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.verdict import PROVEN, VERDICT, read_verdict


def problem_of(path: Path) -> str | None:
    """Why a checkpoint cannot be read, None if it is whole: all files, with their checksums.

    What was found holds as long as its files have the same sizes and times.
    """
    try:
        files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.iterdir()]
    except OSError as error:
        return f"cannot read '{path}': {error.strerror}"
    return _problem_of(path, tuple(sorted(file for file in files if file[0] != VERDICT)))


@functools.lru_cache(maxsize=64)
def _problem_of(path: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    try:
        read_back(path)
    except LlmqError as error:
        return str(error)
    return None


def looks_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there in their sizes; reads none but its manifest."""
    try:
        files = read_manifest(path / MANIFEST)["files"]
        return all((path / file["name"]).stat().st_size == file["bytes"] for file in files)
    except (LlmqError, OSError, LookupError, TypeError):
        return False


def newest_usable(found: dict[int, Path], passed: list[str]) -> Path | None:
    """Of complete checkpoints by step, the newest that is whole and not known to be bad.

    passed: gets a line for each newer one. If all are bad, the newest after which a step was good,
    or just the newest. LlmqError if there are some and none is whole.
    """
    problems, bad = [], []
    for _, path in sorted(found.items(), reverse=True):
        problem = problem_of(path)
        if problem is not None:
            problems.append(problem)
            passed.append(f"passed over checkpoint '{path}': {problem}")
            continue
        verdict = read_verdict(path)
        if verdict is None or verdict.good:
            return path
        bad.append((path, verdict))
        passed.append(f"passed over checkpoint '{path}': {verdict.reason}")
    if not found:
        return None
    if not bad:
        raise LlmqError(f"none of the {len(found)} checkpoints is whole; the newest: {problems[0]}")
    path = next((path for path, verdict in bad if verdict.steps > 0), bad[0][0])
    why = "the newest after which a step was good" if read_verdict(path).steps else "the newest"
    passed.append(f"all checkpoints are known to be bad: taking '{path}', {why}")
    return path


def newest_good(found: dict[int, Path], wanted: Callable[[int], bool]) -> Path | None:
    """The newest that is known to be good, of the steps that are wanted, and whole."""
    for step, path in sorted(found.items(), reverse=True):
        verdict = read_verdict(path)
        if wanted(step) and verdict is not None and verdict.good and problem_of(path) is None:
            return path
    return None


def outdated(
    found: dict[int, Path],
    keep_n: int,
    major: int,
    saved: int,
    *,
    spared: Collection[int] = (),
    interval: int = 0,
) -> list[Path]:
    """Of a run's checkpoints by step, what --ckpt-keep-n and --ckpt-major let go.

    Steps that are multiples of major (if positive) stay and are not counted; of the others the
    keep_n newest, where `saved` counts as the newest, also beside later ones of an abandoned run.
    Damaged ones and those known to be bad are not counted: they go when keep_n newer ones are
    there. Besides stay those of the steps `spared`, the newest good one of each level (what is
    usual may have changed by divergence), and the one that will be the next; with interval also
    the two among its multiples.
    """
    verdicts = {step: read_verdict(path) for step, path in found.items()}
    good = {step: verdict.level for step, verdict in verdicts.items() if verdict and verdict.good}
    # What is older has been judged, or is of steps that nobody goes on from.
    recent = range(saved - PROVEN + 1, saved + 1)
    open_ = [step for step, verdict in verdicts.items() if verdict is None and step in recent]
    kept = {saved, *spared}
    kept |= {max(s for s in good if good[s] == level) for level in good.values()}
    kept |= _maturing(list(good), open_)
    if interval > 0:
        kept |= _maturing(*([s for s in steps if s % interval == 0] for steps in (good, open_)))
    order = sorted(
        (step for step in found if major <= 0 or step % major),
        key=lambda step: (step == saved, step),
    )
    gone, counted = [], 0
    for step in reversed(order):
        judged_bad = verdicts[step] is not None and not verdicts[step].good
        if counted >= keep_n and step not in kept:
            gone.append(step)
        elif step == saved or (not judged_bad and looks_whole(found[step])):
            counted += 1
    return [found[step] for step in sorted(gone)]


def _maturing(good: list[int], open_: list[int]) -> set[int]:
    """The newest good step, and the first after it of which it is not known yet."""
    newest = max(good, default=-1)
    return {newest, min((step for step in open_ if step > newest), default=-1)} - {-1}


def left_at_end(steps: list[int], keep_n: int, major: int) -> list[int]:
    """Of the steps at which a healthy run writes checkpoints, ascending up to its end, those whose
    checkpoints are there then, without majors."""
    left: list[int] = []
    for saved in (step for step in steps if major <= 0 or step % major):
        left.append(saved)
        good = [step for step in left if step <= saved - PROVEN]
        kept = _maturing(good, [step for step in left if step not in good])
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
