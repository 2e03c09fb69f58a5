"""The states that a loss of power may leave: of what a command did up to some call, see disk.py."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmq.base.errors import LlmqError
from llmq.checkpoint.check import run_check
from llmq.checkpoint.folder import problem_of
from llmq.checkpoint.states import checkpoint_at
from llmq.checkpoint.store import checkpoint_step, checkpoints_by_name
from llmq.report.json_log import JsonLog
from tools.faults.calls import Call, Calls, Shared, install
from tools.faults.child import run
from tools.faults.disk import Disk
from tools.faults.machine import Outcome, Problems
from tools.faults.place import (
    Prepared,
    command,
    copy,
    hashed,
    inside,
    prepared_in,
    run_llmq,
    touched,
)

MENDED = 20  # of so many states one is gone on from
_COMMIT = re.compile(r"(step_\d{8})\.tmp")


class PowerLoss:
    """States of the disk after a loss of power."""

    name, title, quick, full = "power", "Loss of power", 40, 5_000

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Record what the commands do, and what their checkpoints hold."""
        self.folder = folder
        self.ready = [(each, _recorded(each, folder)) for each in prepared_in(folder)]

    def attempt(self, rng: random.Random) -> Outcome:
        """One state."""
        prepared, recorded = rng.choice(self.ready)
        count = rng.randint(1, len(recorded.calls))
        root = self.folder / "tried"
        disk = Disk(prepared.template)
        disk.root = str(root.resolve())
        for call in recorded.calls[:count]:
            disk.do(call)
        disk.lose_power(rng, root)
        name = prepared.scenario.name
        try:
            problems = _look(root, prepared, recorded, count)
            if rng.randrange(MENDED) == 0:
                problems += _mend(root, prepared)
        finally:
            shutil.rmtree(root)
        return Outcome(name, f"{name}, after call {count} of {len(recorded.calls)}", problems)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """calls: of a command. safe: (number of calls after which it must stay, step) of checkpoints.
    true: what each checkpoint held that ever had its name."""

    calls: list[Call]
    safe: list[tuple[int, int]]
    true: list[dict[str, str]]


def _recorded(prepared: Prepared, folder: Path) -> _Recorded:
    root, made = copy(prepared.template, folder / "tried"), folder / "calls.pickle"

    def tried() -> int:
        calls: list[Call] = []
        true = [_shards(path) for path in root.glob("ckpt/step_????????") if path.is_dir()]

        def record(call: Call) -> None:
            calls.append(call)
            if call.kind == "rename" and _COMMIT.fullmatch(Path(call.path).name):
                true.append(_shards(Path(call.to)))

        install(Calls(root, Shared(), record=record))
        status = command(*prepared.scenario.tried)
        made.write_bytes(pickle.dumps((calls, true)))
        return status

    run(inside(root, tried))
    calls, true = pickle.loads(made.read_bytes())
    shutil.rmtree(root)
    safe = []
    for index, call in enumerate(calls):
        found = call.kind == "rename" and _COMMIT.fullmatch(Path(call.path).name)
        if found and Path(call.to).name == found[1]:
            folder_of = str(Path(call.to).parent)
            synced = (
                at
                for at, later in enumerate(calls[index:], index)
                if later.kind == "fsync" and later.path == folder_of
            )
            safe.append((next(synced) + 1, int(found[1][5:])))
    return _Recorded(calls, safe, true)


def _shards(checkpoint: Path) -> dict[str, str]:
    return hashed(checkpoint, ("*.safetensors",))


def _look(root: Path, prepared: Prepared, recorded: _Recorded, count: int) -> Problems:
    problems = touched(root)
    steps = [step for at, step in recorded.safe if at <= count]
    committed = max([prepared.committed, *steps])
    try:
        path = checkpoint_at(root / "ckpt")
        step = -1 if path is None else checkpoint_step(path)
        if step < committed:
            problems.append(("lost", f"step {step} instead of {committed}"))
    except LlmqError as error:
        if committed >= 0:
            problems.append(("lost", str(error)))
    if count == len(recorded.calls):
        problems += prepared.compare(root, log=False)
    for path in checkpoints_by_name(root / "ckpt").values():
        if problem_of(path) is None and _shards(path) not in recorded.true:
            problems.append(("changed", f"'{path.name}' passes for whole and is not"))
    return problems + _models(root, prepared) + _log(root)


def _models(root: Path, prepared: Prepared) -> Problems:
    """Whether a mixture of two models passes for one."""
    model = root / "out"
    if not (model / "llmq.json").exists() or not (model / "model.safetensors").exists():
        return []
    name = "out/model.safetensors"
    known = {prepared.want.get(name), hashed(prepared.template, (name,)).get(name)}
    if hashed(root, (name,))[name] in known or not _passes(model):
        return []
    return [("changed", "a model that is neither the old nor the new one passes for whole")]


def _log(root: Path) -> Problems:
    """Whether the log can be gone on with, or is refused in a line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            JsonLog(root / "log.json", append=True).close()
    except LlmqError:
        return []
    try:
        json.loads((root / "log.json").read_text())
    except ValueError as error:
        return [("changed", f"the log passes for whole and is not: {error}")]
    return []


def _passes(model: Path) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_check([str(model)])
    except LlmqError:
        return False
    return True


def _mend(root: Path, prepared: Prepared) -> Problems:
    """Whether the next command makes of it what it should be."""
    ended = run_llmq(root, prepared.scenario.again)
    if ended.problems:
        return ended.problems
    if ended.status and not (prepared.scenario.once and "already" in ended.text):
        return [("lost", f"the next command says {ended.text[-300:]}")]
    return prepared.compare(root, log=False) + touched(root)
