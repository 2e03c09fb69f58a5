"""Runs whose numbers go wrong in six ways, under every --guard.

Faults lie at places in the data: so a rollback, which leaves data out, can help where that is why,
and a run that is stopped and goes on meets the same.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.checkpoint.finite import all_finite
from llmq.checkpoint.safetensors_file import SafetensorsFile
from llmq.checkpoint.states import checkpoint_at, read_verdict
from llmq.checkpoint.store import checkpoint_step, checkpoints_by_name
from llmq.run.trainer import Trainer
from llmq.runtime.host_device import HostDevice
from tests.runs import T, write_tokens
from tools.faults.child import Ended, run
from tools.faults.machine import Outcome, Problems
from tools.faults.place import (
    command,
    copy,
    fresh_place,
    hashed,
    inside,
    must,
    run_llmq,
    touched,
    train,
)

BEGIN, END = 40, 70  # steps: of the good part, and of the whole run
CHUNKS = 4 * END
KINDS = ("rate, for good", "rate, for a while", "one step", "gradients", "weights", "noise")
CONTINUES = 3  # of a run that somebody starts again
GUARDS = ("off", "warn", "skip", "rollback")
_RUN = {
    "learning_rate": 3e-3, "batch_size": 1, "train_file": "data/long.bin", "ckpt_interval": 5,
    "warmup": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trouble:
    """first, last: micro-batches of the data, counted from 0, with which it comes."""

    kind: str
    first: int
    last: int
    size: float
    stop_at: int | None = None

    def install(self) -> None:
        """For the rest of this process."""
        real, launch, now = Trainer.enqueue_step, HostDevice._launch, [False]

        def enqueue_step(trainer: Trainer, *args: Any, lr: float, **more: Any) -> Any:
            state = trainer.train_loader.state()
            place = state["epoch"] * CHUNKS + state["chunk_index"]
            now[0] = self.first <= place <= self.last
            if trainer.steps_done == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if now[0] and self.kind in KINDS[:3]:
                lr *= self.size
            return real(trainer, *args, lr=lr, **more)

        def spoiled(dev: HostDevice, call: Any) -> None:
            if now[0] and self.kind == "gradients" and call.kernel.entry == "global_norm_partials":
                _spoil(call.args[1].numpy(), self.size)
            launch(dev, call)
            if now[0] and self.kind == "weights" and call.kernel.entry == "adamw":
                _spoil(call.args[0].numpy(), self.size)

        Trainer.enqueue_step, HostDevice._launch = enqueue_step, spoiled


def _spoil(array: np.ndarray, value: float) -> None:
    """Change a number that each step computes; what is 0 may be padding, which nobody writes."""
    flat = array.reshape(-1)
    places = np.flatnonzero(flat)
    if flat.dtype == np.float32 and len(places):
        flat[places[len(places) // 3]] = value


class Divergence:
    """Each attempt goes on from 40 good steps into trouble."""

    name, title, quick, full = "divergence", "Divergences", 3, 200

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """The good part, which all begin with."""
        self.folder, self.template = folder, fresh_place(folder / "good")
        write_tokens(self.template / "data/long.bin", CHUNKS, seed=5)
        must(self.template, train(**_RUN, steps=BEGIN))

    def attempt(self, rng: random.Random) -> Outcome:
        """One trouble."""
        kind, guard = rng.choice(KINDS), rng.choice(GUARDS)
        first, length = rng.randrange(BEGIN, END), rng.choice((1, 2, 5, 12))
        odd = rng.choice((float("nan"), float("inf"), 1e30, -1e9, 1e5))
        trouble = {
            "rate, for good": Trouble(kind, first, CHUNKS**2, rng.choice((1e30, 1e9, 3e3))),
            "rate, for a while": Trouble(kind, first, first + length, rng.choice((3e3, 300, 1e9))),
            "one step": Trouble(kind, first, first, rng.choice((1e30, 1e6, 3e3))),
            "gradients": Trouble(kind, first, first + length - 1, odd),
            "weights": Trouble(kind, first, first, odd),
            "noise": Trouble(kind, first, first + length - 1, 0.0),
        }[kind]
        options = {"guard": guard, "ckpt_keep_n": rng.choice((1, 2)), "steps": END}
        stop = rng.randrange(BEGIN + 1, END) if rng.random() < 0.4 else None
        problems = self._try(trouble, options, stop)
        what = f"--guard {guard}, micro-batches {first} to {trouble.last}, {trouble.size:g}"
        what += "" if stop is None else f", stopped at {stop}"
        return Outcome(f"{kind}, {guard}", f"{kind}, {what}", problems)

    def _try(self, trouble: Trouble, options: dict[str, object], stop: int | None) -> Problems:
        args = train(**_RUN | options, **{"continue": ""})
        root = self._place(trouble, "whole-run")
        try:
            ended = self._run(root, trouble, args)
            problems = ended.problems + touched(root) + self._state(root, ended)
            if stop is not None:
                problems += self._again(trouble, args, stop, root, ended)
            if options["guard"] != "off":
                problems += self._goes_on(root, options)
            return problems
        finally:
            shutil.rmtree(root)

    def _goes_on(self, root: Path, options: dict[str, object]) -> Problems:
        """Without the trouble --continue comes to an end: what turns out to be spoiled is known to
        be bad the next time."""
        more = {"steps": END + 5, "guard": "warn"}
        args = train(**_RUN | options | more, **{"continue": ""})
        for _ in range(CONTINUES):
            ended = run_llmq(root, args)
            if ended.problems or not ended.status:
                return ended.problems
        return [("lost", f"it does not go on: {ended.text[-300:]}")]

    def _place(self, trouble: Trouble, name: str) -> Path:
        root = copy(self.template, self.folder / name)
        if trouble.kind == "noise":
            _write_noise(root / "data/long.bin", trouble)
        return root

    def _run(self, root: Path, trouble: Trouble, args: list[str], stop: int | None = None) -> Ended:
        stopped = Trouble(trouble.kind, trouble.first, trouble.last, trouble.size, stop)

        def tried() -> int:
            stopped.install()
            return command(*args)

        return run(inside(root, tried))

    def _state(self, root: Path, ended: Ended) -> Problems:
        """The state that must be there, however it ended."""
        problems: Problems = []
        model, before = root / "out/model.safetensors", self.template / "out/model.safetensors"
        if not _is_finite(model):
            problems.append(("lost", "the exported model has numbers that are not finite"))
        if ended.status == 2 and model.read_bytes() != before.read_bytes():
            problems.append(("lost", "an error, and another model"))
        if _newest_good(root) < _newest_good(self.template):
            problems.append(("lost", "the newest good checkpoint is gone"))
        try:
            path = checkpoint_at(root / "ckpt")
            bad = [f.name for f in path.glob("weights*.safetensors") if not _is_finite(f)]
            if bad:
                problems.append(("lost", f"--continue takes '{path.name}', which is not finite"))
            if checkpoint_step(path) < BEGIN - 20:
                problems.append(("lost", f"--continue takes '{path.name}'"))
        except LlmqError as error:
            problems.append(("lost", str(error)))
        return problems

    def _again(
        self, trouble: Trouble, args: list[str], stop: int, whole: Path, ended: Ended
    ) -> Problems:
        """The same, stopped by a signal and gone on with: the same end, bit for bit."""
        root = self._place(trouble, "in-parts")
        try:
            first = self._run(root, trouble, args, stop)
            if first.status != 128 + signal.SIGTERM:
                return [] if first.status == ended.status else [("changed", "another status")]
            second = self._run(root, trouble, args)
            names = ("out/model.safetensors",)
            if second.status != ended.status:
                return [("changed", f"status {second.status} instead of {ended.status}")]
            if hashed(root, names) != hashed(whole, names):
                return [("changed", "another model after a stop")]
            return second.problems
        finally:
            shutil.rmtree(root)


def _write_noise(path: Path, trouble: Trouble) -> None:
    """Put one token in the place of all of a stretch."""
    from llmq.data.tokens import TokenFile, TokenWriter

    file = TokenFile(path)
    tokens = file.read_tokens(0, file.num_tokens).copy()
    tokens[trouble.first * T : (trouble.last + 1) * T] = 255
    vocab = file.vocab_size
    path.unlink()
    with TokenWriter(path, vocab) as writer:
        writer.write(tokens)


def _is_finite(path: Path) -> bool:
    file = SafetensorsFile(path)
    try:
        return all(all_finite(file.read(name)) for name in file.tensors)
    finally:
        file.close()


def _newest_good(root: Path) -> int:
    found = checkpoints_by_name(root / "ckpt").items()
    return max((s for s, p in found if (v := read_verdict(p)) is not None and v.good), default=-1)
