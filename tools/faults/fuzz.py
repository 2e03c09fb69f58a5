"""Options with odd values: a command does what they say, or refuses them in one line."""

from __future__ import annotations

import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

from llmq.commands import cli
from tools.faults.child import run
from tools.faults.machine import Outcome
from tools.faults.mutations import whole_place
from tools.faults.place import command, copy, inside, touched, train

_NEW = {"out_dir": "new", "checkpoint_dir": "new-ckpt", "log_file": "new.json"}
_CPU = ["--device", "cpu"]
# Commands that neither go on for ever nor start others, with arguments that are right.
COMMANDS = {
    "train": [*train(**_NEW), "--dry-run"],
    "train, a run": train(**_NEW, steps=2),
    "train --continue": train(steps=7, **{"continue": ""}),
    "plan": ["plan", *train(**_NEW)[1:]],
    "tokenize": ["tokenize", "text.txt", "--tokenizer", "tok", "--out", "data/x", "--workers", "1"],
    "train-tokenizer": ["train-tokenizer", "text.txt", "--vocab-size", "300", "--out", "data/y"],
    "show": ["show", "data/new"],
    "check": ["check", "data/new", "ckpt"],
    "sample": ["sample", "out", "--prompt", "a", "--max-new-tokens", "2", *_CPU],
    "eval": ["eval", "out", "--task", "hellaswag=task.jsonl", *_CPU],
    "export": ["export", "--checkpoint-dir", "ckpt", "--out-dir", "new"],
    "merge": ["merge", "--model", "out", "--adapter", "adapter", "--out", "new"],
}
# A longer run is no fault, and workers start Python anew.
_LONG = {
    "steps", "epochs", "batch-size", "grad-accumulation", "seq-len", "num-layers", "hidden-size",
    "intermediate-size", "vocab-size", "gpus", "eval-num-steps", "eval-batch-size", "head-dim",
    "num-heads", "num-kv-heads", "workers", "max-new-tokens", "num-samples", "watchdog", "watch",
    "train-file", "eval-every-n-steps", "model", "restarts",
}  # fmt: skip
_PLANNED = ("train", "plan")  # they allocate nothing
TEXTS = [
    "", " ", "x", "0", "1", "-1", "2", "3", "7", "64", "1e3", "0.5", "-0.5", "nan", "inf", "-inf",
    "1e400", "10" * 20, "0x10", "1_000", "٣", "8GiB", "12.5GiB", "-1GiB", "none", "auto", "all",
    "true", "no", "out", "ckpt", "data", "data/new", "model", "tok", "text.txt", "o.yaml",
    "log.json", "nowhere", "nowhere/at/all", "/dev/null", "/dev/full", "/dev/zero", "/proc/x",
    "/proc/self/mem", "data/*", "[", "**", "~", "~nobody", "a" * 300, "é漢\u202e", "\udcff", "\t\n",
    "--", "-", "=", "a=b", "{}", "%s", "$HOME", "../beyond", "ckpt/step_00000006", "fp32", "bf16",
]  # fmt: skip
_SPELLED_SIZES = ("-", "0", "1", "3", "1000000000", "99999999999999999999")


def _options(name: str) -> list[Any]:
    """The options of a command, as its parser has them."""
    parser = cli._command("llmq").commands[name]
    return [p for p in parser.params if p.param_type_name == "option" and p.name != "help"]


def odd_arguments(kind: str, rng: random.Random) -> list[str]:
    """Arguments of a command, one to four of them odd."""
    args = list(COMMANDS[kind])
    options = _options(args[0])
    if kind not in _PLANNED:
        options = [p for p in options if not {o[2:] for o in p.opts} & _LONG]
    for _ in range(rng.choice((1, 1, 2, 3, 4)) if options else 0):
        option = rng.choice(options)
        flag = rng.choice([*option.opts, *option.secondary_opts])
        if option.is_flag:
            args.append(flag if rng.random() < 0.8 else f"{flag}={rng.choice(TEXTS)}")
            continue
        help_of = f"{option.metavar or ''}"
        values = TEXTS + help_of.split("|") * 8 if "|" in help_of else TEXTS
        value = rng.choice(values) if rng.random() < 0.8 else rng.choice(_SPELLED_SIZES)
        args += [f"{flag}={value}"] if rng.random() < 0.7 else [flag, value]
    if rng.random() < 0.1:
        args.insert(rng.randrange(1, len(args) + 1), rng.choice(TEXTS))
    if rng.random() < 0.1 and len(args) > 2:
        del args[rng.randrange(1, len(args))]
    return args


class Options:
    """Each attempt is one command line."""

    name, title, quick, full = "options", "Odd options", 24, 2_000

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Make what the commands read."""
        self.folder, self.template = folder, whole_place(folder)

    def attempt(self, rng: random.Random) -> Outcome:
        """One command line."""
        kind = rng.choice(list(COMMANDS))
        args = odd_arguments(kind, rng)
        root = copy(self.template, self.folder / "tried")
        try:
            ended = run(inside(root, partial(command, *args)))
            problems = ended.problems + touched(root)
            if ended.status == -signal.SIGKILL:
                problems.append(("hang", "it was killed: too much memory or time"))
        finally:
            shutil.rmtree(root)
        return Outcome(kind, ascii(args), problems)
