"""The checkpoints in a directory: which to go on from, whose they are, what is known of them, and
which stay.

A checkpoint is good when the PROVEN steps after it were. One that a bad step followed before is bad
until as many good steps have followed that one. Without a verdict it is not known yet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import json_object, values_of, write_file
from llmq.base.run_id import RunId
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.folder import delete, entries, is_complete, leftovers, looks_whole, problem_of
from llmq.checkpoint.manifest import MANIFEST, manifest_damage
from llmq.data.identity import TokenizerId
from llmq.options.option_types import NEWEST
from llmq.runtime.world import World

VERDICT = "verdict.json"


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by step, oldest first.

    LlmqError if one was renamed to another step: their order would not be what it seems.
    """
    found = checkpoints_by_name(directory)
    for path in found.values():
        _check_name(path)
    return found


def checkpoints_by_name(directory: Path) -> dict[int, Path]:
    """The complete checkpoints in a directory by the step in their name, in this order, and damaged
    ones with something else in the place of checkpoint.json. LlmqError if it cannot be listed."""
    found = {}
    for path in entries(directory):
        step = _named_step(path)
        if step is not None and (is_complete(path) or os.path.lexists(path / MANIFEST)):
            found.setdefault(step, path)
    return dict(sorted(found.items()))


def _named_step(path: Path) -> int | None:
    name = re.fullmatch(r"step_(\d+)(\.llmq-old|\.old)?", path.name)  # see publish_directory
    return int(name[1]) if name else None


def _recorded(path: Path) -> dict[str, Any]:
    """Step and run of a complete checkpoint; {} if it is damaged."""
    if manifest_damage(path / MANIFEST) is not None:
        return {}
    run = json_object(path / MANIFEST).get("run")
    return run if isinstance(run, dict) and type(run.get("step", 0)) is int else {}


def damaged_checkpoints(directory: Path) -> dict[Path, str]:
    """Those in a directory whose checkpoint.json is damaged, each with the reason.

    They are nobody's. LlmqError if the directory cannot be listed.
    """
    steps = (path for path in entries(directory) if _named_step(path) is not None)
    found = {path: manifest_damage(path / MANIFEST) for path in steps}
    return {path: why for path, why in found.items() if why is not None}


def checkpoint_owner(path: Path) -> RunId | None:
    """Whose checkpoint it is; None where it is damaged, or does not say so."""
    return RunId.of(_recorded(path))


def checkpoint_step(path: Path) -> int:
    """The step of a complete checkpoint, whatever it is called; 0 where it is damaged."""
    return _recorded(path).get("step", 0)


def saved_options(document: dict[str, Any]) -> dict[str, Any]:
    """The options of a checkpoint's run, by field, with the seed and the order its data really
    have; versions without --data-order had other orders for packed or weighted files alone."""
    loader = document["data-loader"]
    if "seed" not in loader:
        return document["options"]
    order = {"data_order": "shuffle" if "order" in loader else "llmq"}
    return order | document["options"] | {"train_seed": loader["seed"]}


def saved_log(path: Path) -> Path | None:
    """The path at which the run of a complete checkpoint wrote its log; None where it does not say
    so."""
    options = json_object(path / MANIFEST).get("options")
    log = options.get("log_file") if isinstance(options, dict) else None
    return Path(log) if isinstance(log, str) else None


def recorded_tokenizer(path: Path) -> TokenizerId | None:
    """The tokenizer that made the data of a complete checkpoint's run, None where it does not say
    so."""
    return TokenizerId.from_record(json_object(path / MANIFEST).get("tokenizer-id"))


def _check_name(path: Path) -> None:
    named, recorded = _named_step(path), _recorded(path).get("step")
    if None not in (named, recorded) and named != recorded:
        raise LlmqError(
            f"'{path}' holds step {recorded}, though its name says {named}: rename it to "
            f"step_{recorded:08d}, or to a name that is no step"
        )


def find_checkpoint(
    directory: Path,
    spec: str = NEWEST,
    passed: list[str] | None = None,
    world: World = World(),
) -> Path | None:
    """The checkpoint that --continue names, None if there is no complete one, as the first process
    finds it. spec: NEWEST or a step in `directory`, or a path as of checkpoint_at, as passed and
    world are."""
    if spec.isdecimal():
        return world.on_first(lambda: list_checkpoints(directory)).get(int(spec))
    if spec == NEWEST:
        return checkpoint_at(directory, passed, world)
    return checkpoint_at(Path(os.path.abspath(os.path.expanduser(spec))), passed, world)


class NoCheckpoint(ConfigError):
    """The step or the path that --continue names has no complete checkpoint."""

    def __init__(self, directory: Path, spec: str):
        there = ", ".join(map(str, checkpoints_by_name(directory))) or "none"
        where = f" of this step in '{directory}', which has {there}" if spec.isdecimal() else ""
        super().__init__(f"--continue {spec}: no complete checkpoint{where or ' there'}")


def checkpoint_at(
    path: Path, passed: list[str] | None = None, world: World = World()
) -> Path | None:
    """A complete checkpoint, whatever its directory is called, or the newest in a directory that is
    whole and not known to be bad; passed gets a line for each newer one. If all are bad, the newest
    after which a step was good, or just the newest. LlmqError for the name of another step, or if
    none is whole. All processes of the world call this function."""
    path = Path(os.path.expanduser(path))
    if world.on_first(lambda: is_complete(path)):
        world.on_first(lambda: _check_name(path))
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


# ------------------------------------------------------------------------------------------------
# Verdicts: notes that are written into a checkpoint later, and appear all at once. They are no part
# of what its checksums cover.


def read_verdict(checkpoint: Path) -> Verdict | None:
    """The verdict on a complete checkpoint; None if it is not known yet, or the note cannot be
    read."""
    note = json_object(checkpoint / VERDICT)
    found = values_of(note, steps=int, reason=str, level=int)
    return None if found is None or "good" not in note else Verdict(note["good"] is True, *found)


def write_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Raises LlmqError where the disk is full or refuses."""
    write_file(checkpoint / VERDICT, json.dumps(verdict._asdict()) + "\n")


# ------------------------------------------------------------------------------------------------
# Models


# The parts of a model that change nothing in what its weights compute.
_NO_CONSTANTS = {"architecture", "max_positions", "initializer_range", "bos_token_id"}
_NO_CONSTANTS |= {"eos_token_id", "other_eos_token_ids", "pad_token_id", "new_tokens"}


def check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """LlmqError if the checkpoint's weights would compute something else in this model."""
    now = asdict(model)
    changes = [
        f"{name} was {value}, now it is {now[name]}"
        for name, value in asdict(reader.manifest.model).items()
        if name not in _NO_CONSTANTS and value != now[name]
    ]
    if changes:
        raise LlmqError(
            f"checkpoint '{reader.path}' is of another model: {', '.join(changes)}; to change a "
            "model, edit the config.json that `llmq export` writes, and train from there"
        )


# ------------------------------------------------------------------------------------------------
# Those of one run


def delete_old(directory: Path, run: RunId, steps: Collection[int]) -> list[Path]:
    """Delete a run's checkpoints of these steps, and what interrupted saves left behind, so no save
    may be under way; returns the deleted directories. Those of other runs, renamed ones and links
    stay; what cannot be deleted is warned of."""
    own = own_checkpoints(directory, run) if steps else {}
    return delete([*leftovers(directory), *(own[step] for step in steps if step in own)])


def kept_checkpoints(directory: Path, run: RunId) -> dict[int, CheckpointInfo]:
    own = own_checkpoints(directory, run).items()
    return {step: CheckpointInfo(path, read_verdict(path), looks_whole(path)) for step, path in own}


def own_checkpoints(directory: Path, run: RunId) -> dict[int, Path]:
    """By step those of this run that were not renamed, whole or not."""
    found = checkpoints_by_name(directory).items()
    return {step: path for step, path in found if _may_go(path, step, run)}


def _may_go(path: Path, step: int, run: RunId) -> bool:
    """Whether it is a checkpoint of this run that was not renamed, and no link to one."""
    if path.is_symlink() or manifest_damage(path / MANIFEST) is not None:
        return False
    recorded = _recorded(path)
    return run.owns(RunId.of(recorded)) and recorded.get("step") in (step, None)


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
    first: int = 0,
) -> list[int]:
    """The checkpoints of a run, by step, that --ckpt-keep-n and --ckpt-major let go.

    keep_n: 0 or less keeps all. Multiples of major (if positive) stay and are not counted; of the
    others the keep_n newest, where `saved`, written last, counts as the newest. Damaged and bad
    ones are not counted: they go when keep_n newer ones are there. Besides stay the steps `spared`,
    the newest good one of each level, and the one that will be the next; with interval also the
    newest good one of its multiples, where the step `first` of a stage counts, and all multiples
    that are not known yet: extra saves decide nothing about them.
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
        multiples = [step for step in good if step == first or step % interval == 0]
        kept |= {step for step in open_ if step == first or step % interval == 0}
        kept |= set(multiples[-1:])
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
        """A step was good: what became of the checkpoints that it decides about; None: another
        level was usual when one turned bad, so its verdict stays. last_bad: the last bad step
        before."""
        before = [at for at in self._paths if at <= step]
        self.followed = max(before, default=self.followed)
        known = [at for at in before if step - max(at, last_bad + 1) + 1 >= PROVEN]
        good = Verdict(True, PROVEN, level=level)
        return {
            self._paths.pop(at): good if self._bad.pop(at, level) == level else None for at in known
        }
