"""Damaged files of every kind that llmq reads: refused in one line, or read for what they are.

A file with checksums must not give another result without a word. Another result of what a user
writes is no fault: a configuration that says something else is another configuration.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmq.checkpoint.manifest import digest_of
from llmq.options import card_file
from llmq.runtime.tuning import CHOICE_BYTES, AlgorithmFile
from tests import rigs, runs
from tools.faults import mutators
from tools.faults.child import Ended, run
from tools.faults.machine import Outcome, Problems
from tools.faults.place import command, copy, fresh_place, hashed, inside, must, touched, train


@dataclass(frozen=True)
class Kind:
    """files: a pattern. read: arguments of the command that reads it. result: patterns of what that
    writes; sealed: which must not change then, and with no pattern it must say that it is damaged.
    survived: it must come to that result, whatever the damage.
    """

    name: str
    files: str
    read: list[str] | Callable[[Path], int]
    result: str = ""
    sealed: bool = False
    survived: bool = False
    mutate: Callable[[Path, random.Random], str] = mutators.mutate


def _export(name: str) -> list[str]:
    return ["export", "--checkpoint-dir", name, "--out-dir", "new"]


def _tokenize(name: str, *more: str) -> list[str]:
    return ["tokenize", name, "--out", "data/again", "--workers", "1", *more]


def _sample(name: str, *more: str) -> list[str]:
    return ["sample", name, "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu", *more]


def _tuned(root: Path) -> int:
    """Print what is taken of the file of tuned products; status 2 for less than all."""
    file = AlgorithmFile(root / "tuned.json")
    found = [file.get(f"product {i}") for i in range(4)]
    known = [bytes([i]) * CHOICE_BYTES for i in range(4)]
    if any(got not in (None, want) for got, want in zip(found, known, strict=True)):
        return 0
    print("error: some are tuned again")
    return 2


_NEWEST = "ckpt/step_00000006"
_MODEL = "new/model.safetensors"
_BEST = {"keep_best": "loss", "eval_file": "data/eval.bin", "eval_every_n_steps": 3}
_ON = train(steps=8, **_BEST, **{"continue": ""})
_DATA = train(
    steps=4,
    ckpt_interval=0,
    out_dir="new",
    checkpoint_dir="new-ckpt",
    log_file="new.json",
    train_file="data/train-0.bin",
)
_PLAN = ["plan", "--model", "tiny", "--from-scratch", "--card-file", "card.json", "--gpus", "2"]
_CHAT = _tokenize("chat.jsonl", "--tokenizer", "tok")
_SIZED = train(
    steps=2, model="named", train_file="data/named/train*.bin", out_dir="new", log_file="new.json",
    checkpoint_dir="new-ckpt", ckpt_interval=0,
)  # fmt: skip
KINDS = [
    Kind("checkpoint: tensors", f"{_NEWEST}/*.safetensors", _export(_NEWEST), _MODEL, True),
    Kind("checkpoint: manifest", f"{_NEWEST}/checkpoint.json", _export(_NEWEST), _MODEL, True),
    Kind(
        "checkpoint: manifest, signed anew", f"{_NEWEST}/checkpoint.json", _ON,
        mutate=mutators.signed(digest_of),
    ),
    Kind(
        "checkpoint: manifest of any, train", "ckpt/step_*/checkpoint.json", _ON,
        "out/model.safetensors", survived=True,
    ),
    Kind("checkpoint: verdict", f"{_NEWEST}/verdict.json", _ON),
    Kind("checkpoint: best", "ckpt/best.json", _ON),
    Kind("log", "log.json", _ON, "out/model.safetensors", True),
    Kind("token file", "data/train-0.bin", _DATA, _MODEL, True),
    Kind("token file: checksums", "data/train-0.sums", _DATA, _MODEL, True),
    Kind("token file: documents", "data/new/train*.docs", ["check", "data/new"], sealed=True),
    Kind("token file: check", "data/new/train*.bin", ["check", "data/new"], sealed=True),
    Kind("token files: tokenize.json", "data/named/tokenize.json", _SIZED),
    Kind("token files: tokenize.json, check", "data/new/tokenize.json", ["check", "data/new"]),
    Kind("model: config.json", "out/config.json", _sample("out")),
    Kind("model: others", "out/*.json", _sample("out")),
    Kind("model: tensors", "out/model.safetensors", ["check", "out"], sealed=True),
    Kind("model: tensors, sample", "out/model.safetensors", _sample("out")),
    Kind("model: config.json, train", "model/config.json", [*_DATA, "--dry-run"]),
    Kind("tokenizer", "tok/*.json", _tokenize("text.txt", "--tokenizer", "tok")),
    Kind("options: YAML", "o.yaml", ["plan", "--config", "o.yaml"]),
    Kind("options: TOML", "o.toml", ["plan", "--config", "o.toml"]),
    Kind("options: JSON", "o.json", ["plan", "--config", "o.json"]),
    Kind("text", "text.txt", _tokenize("text.txt", "--tokenizer", "tok")),
    Kind("records", "records.jsonl", _tokenize("records.jsonl", "--tokenizer", "tok")),
    Kind("records, packed", "packed.jsonl.gz", _tokenize("packed.jsonl.gz", "--tokenizer", "tok")),
    Kind("conversations", "chat.jsonl", _CHAT),
    Kind("chat template", "chat.jinja", [*_CHAT, "--chat-template", "chat.jinja"]),
    Kind("task", "task.jsonl",
         ["eval", "out", "--task", "hellaswag=task.jsonl", "--device", "cpu"]),
    Kind("task: ARC", "arc.jsonl", ["eval", "out", "--task", "arc=arc.jsonl", "--device", "cpu"]),
    Kind("card file, signed anew", "card.json", _PLAN,
         mutate=mutators.signed(lambda d: card_file._checksum(d["card"]), "checksum")),
    Kind("log, plot", "log.json", ["plot", "log.json", "--html"]),
    Kind("log, top", "log.json", ["top", "log.json", "--once"]),
    Kind("tuned products", "tuned.json", _tuned, sealed=True),
    Kind("adapter", "adapter/*", _sample("out", "--adapter", "adapter")),
]  # fmt: skip

_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n"
    "{% if message.role == 'assistant' %}{% generation %}x{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def whole_place(folder: Path) -> Path:
    """A folder with a file of each kind, once for all machines."""
    template = fresh_place(folder / "whole")
    write_inputs(template)
    write_runs(template)
    return template


def write_inputs(root: Path) -> None:
    """Write files as a user would."""
    from tests.text_data import documents, write_bpe  # pytest, tokenizers: the other machines don't

    (root / "tok").mkdir()
    write_bpe(root / "tok")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (root / "tok/tokenizer_config.json").write_text(
        json.dumps(names | {"chat_template": _TEMPLATE})
    )
    texts = documents(30)
    (root / "text.txt").write_text("\n".join(texts))
    records = "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts))
    (root / "records.jsonl").write_text(records)
    (root / "packed.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    chats = [json.dumps({"messages": talk * n, "tools": [{"name": "f"}]}) for n in (1, 2, 3)]
    (root / "chat.jsonl").write_text("\n".join(chats) + "\n")
    (root / "chat.jinja").write_text(_TEMPLATE)
    question = {"activity_label": "Running", "ctx_a": "A man runs.", "ctx_b": "He"}
    question |= {"endings": ["falls.", "flies.", "sleeps.", "wins."], "label": "3"}
    (root / "task.jsonl").write_text((json.dumps(question) + "\n") * 4)
    choices = {"text": ["ice", "steam", "sand"], "label": ["A", "B", "C"]}
    question = {"question": "What is hot?", "choices": choices, "answerKey": "B"}
    (root / "arc.jsonl").write_text((json.dumps(question) + "\n") * 4)
    (root / "card.json").write_text(json.dumps(card_file.record_of(rigs.card_file())))
    options = {k: v for k, v in runs.options(steps=9).items() if k != "overwrite"}
    (root / "o.json").write_text(json.dumps(options, indent=1))
    lines = [(name, json.dumps(value)) for name, value in options.items()]
    (root / "o.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines))
    (root / "o.toml").write_text("".join(f"{name} = {value}\n" for name, value in lines))
    tuned = AlgorithmFile(root / "tuned.json")
    for i in range(4):
        tuned.publish(f"product {i}", bytes([i]) * CHOICE_BYTES, None)


def write_runs(root: Path) -> None:
    """Write files as llmq does: a run with all its files, token files of a tokenizer, adapters."""
    tokens = ["--tokenizer", "tok", "--eval-fraction", "0.3", "--workers", "1"]
    must(root, ["tokenize", "records.jsonl", *tokens, "--out", "data/new"])
    must(root, ["tokenize", "text.txt", *tokens, "--out", "data/named"])
    config = json.loads((root / "model/config.json").read_text()) | {"vocab_size": 500}
    (root / "named").mkdir()
    (root / "named/config.json").write_text(json.dumps(config))
    shutil.copytree(root / "tok", root / "named", dirs_exist_ok=True)
    good = {"good": True, "steps": 20, "reason": "", "level": 0}
    must(root, train(**_BEST))
    (root / _NEWEST / "verdict.json").write_text(json.dumps(good))
    lora = train(
        model="out", from_scratch=None, lora_rank=2, steps=2, ckpt_interval=0, out_dir="adapter",
        save_training_state=False, checkpoint_dir="lora-ckpt", log_file="lora.json",
    )  # fmt: skip
    must(root, lora)


class Mutations:
    """Each attempt damages one file and has it read."""

    name, title, quick, full = "mutations", "Damaged files", 16, 10_000

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Make one file of each kind, and read each of them whole."""
        self.folder, self.template = folder, whole_place(folder)
        self.want: dict[str, dict[str, str]] = {}
        for kind in KINDS:
            if not list(self.template.glob(kind.files)):
                raise RuntimeError(f"there is no {kind.files}")
            root = copy(self.template, folder / "tried")
            ended = self._read(kind, root)
            if ended.status and kind.name != "tuned products":
                raise RuntimeError(f"{kind.name}: status {ended.status}: {ended.text}")
            self.want[kind.name] = hashed(root, (kind.result,)) if kind.result else {}
            shutil.rmtree(root)

    def _read(self, kind: Kind, root: Path) -> Ended:
        if callable(kind.read):
            return run(inside(root, partial(kind.read, root)))
        return run(inside(root, partial(command, *kind.read)))

    def attempt(self, rng: random.Random) -> Outcome:
        """One damaged file."""
        kind = rng.choice(KINDS)
        root = copy(self.template, self.folder / "tried")
        try:
            path = rng.choice(sorted(p for p in root.glob(kind.files) if p.is_file()))
            whole = path.read_bytes()
            what = kind.mutate(path, rng)
            regular = path.is_file() and not path.is_symlink()
            same = regular and path.read_bytes() == whole
            ended = self._read(kind, root)
            problems = ended.problems
            if ended.status == -signal.SIGKILL:
                problems.append(("hang", "it was killed: too much memory or time"))
            if kind.sealed and ended.status == 0 and not same:
                problems += self._changed(kind, root, ended)
            if kind.survived:
                problems += self._stopped(kind, root, ended)
            problems += touched(root)
        finally:
            shutil.rmtree(root)
        return Outcome(kind.name, f"{path.relative_to(root)}, {what}", problems)

    def _stopped(self, kind: Kind, root: Path, ended: Ended) -> Problems:
        if ended.status:
            return [("lost", f"it did not go on: {ended.text[-200:]}")]
        same = hashed(root, (kind.result,)) == self.want[kind.name]
        return [] if same else [("changed", "another result")]

    def _changed(self, kind: Kind, root: Path, ended: Ended) -> Problems:
        if not kind.result:
            return [("changed", f"not noticed: {ended.text[-200:]}")]
        if hashed(root, (kind.result,)) == self.want[kind.name] or "warning" in ended.text:
            return []
        return [("changed", "another result without a word")]
