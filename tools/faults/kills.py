"""Processes that die, and calls of the system that fail, at any call that changes a file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from llmq.base.errors import LlmqError
from llmq.checkpoint.states import checkpoint_at
from llmq.checkpoint.store import checkpoint_step
from tools.faults.calls import ERRNOS, Calls, Fault, Shared, install
from tools.faults.child import Ended, run
from tools.faults.machine import Outcome, Problems
from tools.faults.place import (
    Prepared,
    command,
    copy,
    inside,
    left_behind,
    prepared_in,
    run_llmq,
    touched,
)


class _AtCalls:
    """A fault at a call of a scenario, what it has left, and whether the same command mends it."""

    def __init__(self) -> None:
        self.shared = Shared()

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Run all scenarios."""
        self.folder, self.ready = folder, prepared_in(folder)

    def _run(
        self, root: Path, args: list[str], fault: Fault | None, after: float | None = None
    ) -> Ended:
        self.shared.reset()

        def tried() -> int:
            install(Calls(root, self.shared, fault))
            return command(*args)

        return run(inside(root, tried), after)

    def tried(
        self,
        fault: Fault | None,
        chosen: Prepared,
        after: float | None = None,
        look: Callable[[Path, Ended], Problems] | None = None,
    ) -> Problems:
        """The problems after a fault. look: at what an error has left."""
        root = copy(chosen.template, self.folder / "tried")
        try:
            ended = self._run(root, chosen.scenario.tried, fault, after)
            problems = ended.problems + touched(root) + (look(root, ended) if look else [])
            committed = max(chosen.committed, self.shared[1] - 1)
            problems += _lost(root, committed)
            again = run_llmq(root, chosen.scenario.again)
            problems += again.problems
            if again.status and not (chosen.scenario.once and "already" in again.text):
                problems.append(("lost", f"the next command says {again.text[-300:]}"))
            else:
                best = "no checkpoint of step" not in ended.text
                problems += chosen.compare(root, best=best) + touched(root) + left_behind(root)
            return problems
        finally:
            shutil.rmtree(root)


def _lost(root: Path, committed: int) -> Problems:
    """Whether the newest usable checkpoint is older than the newest that was complete."""
    if committed < 0:
        return []
    try:
        found = checkpoint_at(root / "ckpt")
    except LlmqError as error:
        return [("lost", str(error))]
    step = -1 if found is None else checkpoint_step(found)
    return [] if step >= committed else [("lost", f"step {step} instead of {committed}")]


class Kills(_AtCalls):
    """Three of four die at a call, the others at any moment."""

    name, title, quick, full = "kills", "Kills", 6, 1_000

    def attempt(self, rng: random.Random) -> Outcome:
        """One death."""
        chosen = rng.choice(self.ready)
        at, how = rng.randrange(chosen.calls), rng.choice(("before", "after", "torn"))
        if rng.random() < 0.25:
            what, fault, after = "at a random moment", None, rng.uniform(0, chosen.seconds)
        else:
            what, fault, after = f"{how} call {at} of {chosen.calls}", Fault(at, how), None
        problems = self.tried(fault, chosen, after)
        return Outcome(chosen.scenario.name, f"{chosen.scenario.name}, {what}", problems)


class WriteErrors(_AtCalls):
    """One call fails, or all from one on for a while."""

    name, title, quick, full = "errors", "Write errors", 6, 1_000

    def attempt(self, rng: random.Random) -> Outcome:
        """One error, or several in a row."""
        chosen = rng.choice(self.ready)
        number, times = rng.choice(ERRNOS), rng.choice((1, 1, 1, 3, 30, 1 << 40))
        fault = Fault(rng.randrange(chosen.calls), rng.choice(("before", "torn")), number, times)

        def look(root: Path, ended: Ended) -> Problems:
            """Status 0 says that the result is there."""
            names = [name for name in chosen.want if name.startswith(("out/", "data/"))]
            if ended.status != 0:
                return []
            best = "no checkpoint of step" not in ended.text
            wrong = chosen.compare(root, log=False, best=best)
            wrong = [p for p in wrong if any(f"'{name}'" in p[1] for name in names)]
            return [(category, f"status 0, but {text}") for category, text in wrong]

        problems = self.tried(fault, chosen, look=look)
        what = f"{fault.how} call {fault.at} of {chosen.calls}, errno {number}, {times} times"
        return Outcome(chosen.scenario.name, f"{chosen.scenario.name}, {what}", problems)
