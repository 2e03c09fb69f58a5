"""The folder in which faults are tried: a model of a few thousand weights, data, files of others,
and commands whose results are known."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llmq
from llmq.checkpoint.store import checkpoints_by_name
from llmq.commands import cli
from llmq.data.checksums import write_checksums
from llmq.report.json_log import without_undone
from tests import runs
from tools.faults.calls import Calls, Shared, install
from tools.faults.child import Ended, run

MODEL = runs.CONFIG | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
STRANGERS = {  # names that llmq's own look like, and what another program may have put there
    "ckpt/README": "of somebody",
    "ckpt/step_00000003/notes.txt": "not of a checkpoint",
    "ckpt/step_00000005.tmp/notes.txt": "not of a checkpoint",
    "ckpt.lock": "poetry",
    "out/notes.txt": "of somebody",
    "out.tmp": "of somebody",
    "out.lock": "of somebody",
    "beyond/file": "behind a link",
    "data/.train-0.bin.tmp": "of somebody",
}
LINK = "ckpt/step_00000007.tmp"  # to beyond/
_LEFT = re.compile(r".*\.llmq-(tmp|lock|old)|step_\d{8}\.tmp")


def warm_up() -> None:
    """Do what takes time once, before processes are forked: imports, the parser of the command
    line.

    transformers is not there for any of them: it takes seconds, and has no part in what is tried.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.modules["transformers"] = None
    modules = [info.name for info in pkgutil.walk_packages(llmq.__path__, "llmq.")]
    for name in [*modules, "tokenizers", "yaml", "jinja2", "tomllib", "pynvml"]:
        if name != "llmq.__main__":
            importlib.import_module(name)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        command("plan", "--model", "tiny", "--from-scratch", "--device", "cpu")
        command("export", "--checkpoint-dir", "there is none", "--out-dir", "nor this")
        command("tokenize", "there is none", "--tokenizer", "bytes", "--out", "nor this")
        command("check", "there is none")
        command("train", "--device", "there is none")
    gc.collect()
    gc.freeze()  # so that children neither look at all this nor get copies of its pages


def command(*args: str) -> int:
    """Run `llmq` in this process."""
    return cli._run([*args])


def train(**changes: object) -> list[str]:
    """Arguments of a short run."""
    small = {"steps": 6, "grad_accumulation": 1, "eval_file": "none", "overwrite": None}
    small |= {"ckpt_interval": 2, "ckpt_keep_n": 1, "save_training_state": True}
    return ["train", *runs.flags(**small | changes)]


@dataclass(frozen=True)
class Scenario:
    """before: commands that have run. tried: the one that meets the fault. again: the one that must
    make up for it. results: patterns of the files that must be the same in the end. keeps: of files
    whose contents must be there afterwards, under whatever name. best_decides: results are others
    if the disk has refused the best checkpoint. once: a second command refuses the place of a
    complete result."""

    name: str
    before: list[list[str]]
    tried: list[str]
    again: list[str]
    results: tuple[str, ...] = ("out/model.safetensors", "out/config.json", "ckpt/*/*.safetensors")
    keeps: tuple[str, ...] = ()
    best_decides: bool = False
    once: bool = False


_ON = {"continue": ""}
_LENGTHS = {"seq_len": "8:0.67,16:0.33", "ckpt_keep_n": 0}  # step 3 is taken
_RANKS = {"gpus": 3, "steps": None}  # 20 sequences
_BEST = {"keep_best": "loss", "eval_file": "data/eval.bin", "eval_every_n_steps": 2}
# The best checkpoint may be one that the disk has refused: the model is that of the last step.
_BEST |= {"ckpt_interval": 3, "export": "last"}
# Step 2 is the best, and at step 4, which is worse, the run ends.
_STOPS = {"keep_best": "loss", "eval_file": "data/eval.bin", "eval_every_n_steps": 2, "steps": 12}
_STOPS |= {"stop_after": 1, "learning_rate": 0.3, "ckpt_interval": 2}
_LORA = train(
    model="out", from_scratch=None, lora_rank=2, steps=2, ckpt_interval=0, out_dir="adapter",
    save_training_state=False, checkpoint_dir="lora-ckpt", log_file="lora.json",
)  # fmt: skip
_MERGE = ["merge", "out", "adapter", "--out", "merged"]
_GGUF = ["export", "out", "--format", "gguf", "--dtype", "fp16", "--out", "out.gguf"]
_GGUF += ["--overwrite"]
_DATA = ["data/text.txt", "--tokenizer", "bytes", "--eval-fraction", "0.3", "--workers", "1"]
_SCORE = ["score", "out", "data/train-0.bin", "--out", "scores", "--device", "cpu", "--seq-len"]
_SHARDS = [*_DATA, "--shard-tokens", "300", "--out", "data/new"]
SCENARIOS = [
    Scenario("train", [], train(), train(**_ON)),
    Scenario("train --continue", [train()], train(steps=10, **_ON), train(steps=10, **_ON)),
    Scenario(
        "train --continue 2 of two lengths",
        [train(**_LENGTHS)],
        train(**_LENGTHS | {"continue": 2}),
        train(**_LENGTHS | _ON),
        keeps=("ckpt/*/*.safetensors",),
    ),
    Scenario(
        "train --continue after an epoch",
        [train(**_RANKS, epochs=1)],
        train(**_RANKS | _ON, epochs=2),
        train(**_RANKS | _ON, epochs=2),
    ),
    Scenario(
        "train --overwrite",
        [train()],
        train(overwrite="", train_seed=5),
        train(overwrite="", train_seed=5),
        keeps=("out/model.safetensors", "ckpt/*/*.safetensors"),
    ),
    Scenario("train --keep-best", [], train(**_BEST), train(**_BEST, **_ON)),
    Scenario(
        "train --stop-after, of the best",
        [],
        train(**_STOPS),
        train(**_STOPS, **_ON),
        best_decides=True,
    ),
    Scenario(
        "train --continue PATH of two lengths",
        [train(**_LENGTHS)],
        train(**_LENGTHS | {"continue": "ckpt/step_00000002"}),
        train(**_LENGTHS | _ON),
        keeps=("ckpt/*/*.safetensors",),
    ),
    Scenario(
        "train --ckpt-background",
        [train()],
        train(steps=10, ckpt_background="", **_ON),
        train(steps=10, ckpt_background="", **_ON),
    ),
    Scenario(
        "export",
        [train(), train(steps=8, **_ON)],
        ["export", "--checkpoint-dir", "ckpt", "--out-dir", "out", "--model-dtype", "fp32"],
        ["export", "--checkpoint-dir", "ckpt", "--out-dir", "out", "--model-dtype", "fp32"],
    ),
    Scenario("export --format gguf", [train()], _GGUF, _GGUF, results=("*.gguf",)),
    Scenario(
        "merge", [train(), _LORA], _MERGE, _MERGE, results=("merged/*.safetensors",), once=True
    ),
    Scenario(
        "tokenize",
        [["tokenize", *_DATA, "--out", "data/new"]],
        ["tokenize", *_SHARDS, "--overwrite"],
        ["tokenize", *_SHARDS, "--overwrite"],
        results=("data/new/*.bin", "data/new/*.docs", "data/new/*.sums"),
    ),
    Scenario(
        "score",
        [train()],
        [*_SCORE, "16", "--document-separator", "10"],
        [*_SCORE, "16", "--document-separator", "10"],
        results=("scores/*.scores*",),
    ),
]


def fresh_place(root: Path) -> Path:
    """Make it."""
    root.mkdir(parents=True)
    runs.make_workplace(root)
    (root / "model/config.json").write_text(json.dumps(MODEL))
    for path in root.glob("data/*.bin"):
        write_checksums(path)
    (root / "data/text.txt").write_text(
        "".join(f"A line of text, number {i}.\n" for i in range(90))
    )
    for name, text in STRANGERS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / LINK).symlink_to("../beyond")
    return root


def touched(root: Path) -> list[tuple[str, str]]:
    """Files of others that are no longer what they were."""
    problems = []
    for name, text in STRANGERS.items():
        path = root / name
        if not path.is_file() or path.read_text() != text:
            problems.append(("touched", f"'{name}' is gone or changed"))
    if not (root / LINK).is_symlink():
        problems.append(("touched", f"the link '{LINK}' is gone"))
    return problems


def left_behind(root: Path) -> list[tuple[str, str]]:
    """Files of ours that a command that ended well has left."""
    ours = [path for path in root.rglob("*") if _LEFT.fullmatch(path.name)]
    names = [str(path.relative_to(root)) for path in ours]
    spared = {LINK, *(str(Path(name).parent) for name in STRANGERS)}
    return [("left", f"'{name}' stays behind") for name in names if name not in spared]


def hashed(root: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 by name."""
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found
    }


def losses(root: Path) -> dict[int, float]:
    """By step, of the log."""
    log = root / "log.json"
    if not log.is_file():
        return {}
    return {r["step"]: r["loss"] for r in json.loads(log.read_text()) if r["log"] == "step"}


def measured(root: Path) -> dict[str, Any]:
    """The best checkpoint's note without its run, and the evaluations that count in the log."""
    note, log = root / "ckpt/best.json", root / "log.json"
    best = json.loads(note.read_text()) if note.is_file() else {}
    records = without_undone(json.loads(log.read_text())) if log.is_file() else []
    found = [(r["step"], r["loss"]) for r in records if r["log"] == "eval"]
    return {"best": best | {"run": None}, "evaluations": found}


@dataclass
class Prepared:
    """A scenario with its folder before the command, and what must be there afterwards.

    committed: step of the newest checkpoint before. seconds, calls: what the command takes, and how
    many times it changes a file.
    """

    scenario: Scenario
    template: Path
    want: dict[str, str] = field(default_factory=dict)
    want_losses: dict[int, float] = field(default_factory=dict)
    want_measured: dict[str, Any] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    committed: int = -1
    seconds: float = 0.0
    calls: int = 0

    def compare(self, root: Path, *, log: bool = True, best: bool = True) -> list[tuple[str, str]]:
        """Differences to a run without a fault. log: compares the losses in the log, too. best:
        compares the best checkpoint and evaluations, too.

        Only the newest checkpoint is compared: which older ones stay follows from which could be
        written, and from when the last clean-up was.
        """
        if self.scenario.best_decides and not best:
            return []
        found, problems = hashed(root, self.scenario.results), []
        newest = max((n.split("/")[1] for n in self.want if n.startswith("ckpt/")), default="")
        names = sorted(self.want.keys() | found.keys())
        names = [n for n in names if not n.startswith("ckpt/") or newest in n]
        for name in names:
            if self.want.get(name) != found.get(name):
                what = "is missing" if name not in found else "is another"
                problems.append(("changed", f"'{name}' {what}"))
        if log and self.want_losses and losses(root) != self.want_losses:
            problems.append(("changed", "the log has other losses"))
        if log and best and self.want_losses and measured(root) != self.want_measured:
            problems.append(("changed", "the best or the log's evaluations are others"))
        there = set(hashed(root, ("**/*.safetensors",)).values()) if self.kept else set()
        problems += [("lost", "a file that was moved aside is gone")] * bool(self.kept - there)
        return problems


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory where that is possible: what is lost with the power is decided elsewhere."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="llmq-faults-", dir=memory) as folder:
        yield Path(folder)


def inside(root: Path, function: Callable[[], int]) -> Callable[[], int]:
    """The function, called in a folder."""

    def call() -> int:
        os.chdir(root)
        return function()

    return call


def run_llmq(root: Path, args: list[str]) -> Ended:
    """A command in a folder, undisturbed."""
    return run(inside(root, lambda: command(*args)))


def must(root: Path, args: list[str]) -> None:
    """The same, which cannot fail."""
    _must(run_llmq(root, args), args)


def _must(ended: Ended, args: list[str]) -> None:
    if ended.status:
        raise RuntimeError(f"llmq {' '.join(args)}: status {ended.status}\n{ended.text}")


@functools.cache
def prepared_in(folder: Path) -> list[Prepared]:
    """All scenarios, once for all machines."""
    return [prepare(scenario, folder) for scenario in SCENARIOS]


def prepare(scenario: Scenario, folder: Path) -> Prepared:
    """Run what comes before, and once the command itself."""
    template = fresh_place(folder / scenario.name.replace(" ", "_"))
    for args in scenario.before:
        must(template, args)
    prepared = Prepared(scenario, template)
    prepared.kept = set(hashed(template, scenario.keeps).values())
    steps = checkpoints_by_name(template / "ckpt")
    prepared.committed = -1 if scenario.keeps else max(steps, default=-1)
    done, shared = copy(template, folder / "done"), Shared()

    def counted() -> int:
        install(Calls(done, shared))
        return command(*scenario.tried)

    start = time.monotonic()
    _must(run(inside(done, counted)), scenario.tried)
    prepared.seconds, prepared.calls = time.monotonic() - start, shared[0]
    prepared.want, prepared.want_losses = hashed(done, scenario.results), losses(done)
    prepared.want_measured = measured(done)
    shutil.rmtree(done)
    return prepared


def copy(template: Path, to: Path) -> Path:
    """A folder to be spoiled."""
    return Path(shutil.copytree(template, to, symlinks=True))
