"""Files of others that would act: each is refused or read for what it is, and steers nothing.

Each case puts something hostile where llmq reads, runs a command, and looks at what has become of
the terminal, of files elsewhere, and of what is written.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from llmq.base.errors import LlmqError, MachineError
from llmq.base.files import read_own
from llmq.checkpoint.manifest import digest_of
from llmq.data.tokenizer import EXACT_CODE, EXACT_MODULE
from llmq.data.tokens import TokenWriter
from tests import runs
from tools.faults import outputs
from tools.faults.child import Ended, run
from tools.faults.machine import Outcome, Problems
from tools.faults.mutations import whole_place
from tools.faults.place import command, copy, inside, must, touched, train

NEWEST = "ckpt/step_00000006"
STEERING = ["\x1b[2J", "\x1b]0;x\x07", "\x9b1A", "\r", "\b\b\b", "\x7f", "\u202e", "\u2066", "\x0e"]
_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_ON = train(
    steps=8, keep_best="loss", eval_file="data/eval.bin", eval_every_n_steps=3, **{"continue": ""}
)
_LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = [
    _LOOP, "{{ 'a' * 10**12 }}", "{{ (10**9)**(10**9) }}", "{{ lipsum(n=10**7) }}",
    "{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}", "{{ '\\ud800' }}",
    "".join(f"{{% for i{n} in [1] %}}" for n in range(25)) + "{% endfor %}" * 25,
    "{% if a %}" * 120 + "{% endif %}" * 120, "{{ 'a'.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ messages | tojson(indent=10**9) }}", "{{ '%9999999999d' % 1 }}",
]  # fmt: skip
_LONG = "a" * 28 + " b"  # for patterns that go back
READERS = [  # of the tokenizer and the chat template of the model `talks`
    ["sample", "talks", "--chat", "--prompt", _LONG, "--max-new-tokens", "4", "--device", "cpu"],
    ["export", "talks", "--out", "new"],
    ["export", "talks", "--format", "gguf", "--dtype", "fp16", "--out", "new.gguf"],
    ["eval", "talks", "--task", "hellaswag=task.jsonl", "--device", "cpu"],
    ["show", "data/named/train*.bin", "--tokenizer", "talks"],
    train(
        model="talks", from_scratch=None, train_file="data/named/train*.bin", steps=1, seq_len=32,
        batch_size=1, sample_prompt=_LONG, task_every=1, out_dir="new",
        checkpoint_dir="new-ckpt", log_file="new.json", allow_other_tokenizer="",
    ),
]  # fmt: skip

# A case: what was done, how the command has ended (None: nothing was run), what else is wrong.
Case = Callable[[Path, random.Random], tuple[str, Ended | None, Problems]]


def _ended(root: Path, *args: str) -> Ended:
    return run(inside(root, partial(command, *args)))


def _steers(character: str) -> bool:
    """True if a character is a command of the terminal, or turns the direction of text."""
    turns = unicodedata.bidirectional(character) in _TURNING
    return character not in "\n\t" and (unicodedata.category(character) == "Cc" or turns)


def _odd(rng: random.Random) -> str:
    return "ODD" + "".join(rng.choices(STEERING, k=rng.randrange(1, 4)))


def terminal(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Put text that steers a terminal where commands print names."""
    odd, where = _odd(rng), rng.choice(("tensor", "index", "template", "field", "option", "log"))
    tokenize = ["tokenize", "chat.jsonl", "--tokenizer", "tok", "--out", "data/again"]
    args: list[str] = ["check", "out"]
    (root / "out/llmq.json").unlink()  # whose checksums would be looked at first
    if where == "tensor":
        path = root / "out/model.safetensors"
        whole = path.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:end])
        name = rng.choice([n for n in header if n != "__metadata__"])
        header[odd] = header.pop(name)
        text = json.dumps(header, ensure_ascii=False).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    elif where == "index":
        (root / "out/model.safetensors").rename(root / "out/a.safetensors")
        index = {"weight_map": {odd: rng.choice(("a.safetensors", odd))}}
        (root / "out/model.safetensors.index.json").write_text(json.dumps(index))
    elif where == "template":
        (root / "odd.jinja").write_text(f"{{{{ raise_exception({odd!r}) }}}}")
        args = [*tokenize, "--chat-template", "odd.jinja"]
    elif where == "field":
        (root / "a.jsonl").write_text(json.dumps({odd: 1}) + "\n")
        args = ["tokenize", "a.jsonl", "--field", "b", *tokenize[2:]]
    elif where == "option":
        (root / "odd.json").write_text(json.dumps({odd: 1}))
        args = ["plan", "--config", "odd.json"]
    else:
        log = json.loads((root / "log.json").read_text())
        log[0]["run"]["name"] = odd
        lines = ",\n".join(f"  {json.dumps(record)}" for record in log)
        (root / "log.json").write_text(f"[\n{lines}\n]\n")
        args = rng.choice((["top", "log.json", "--once"], ["plot", "log.json", "--html"]))
    return f"{odd!a} in {where}", _ended(root, *args), []


def code(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Export a model whose tokenizer has code and links of others beside it."""
    theirs = root / "ckpt-tok"
    shutil.copytree(root / "tok", theirs)
    linked = rng.choice(
        ("tokenizer.model", "chat_template.jinja", "added_tokens.json", "merges.txt")
    )
    (theirs / linked).unlink(missing_ok=True)
    (theirs / linked).symlink_to(rng.choice(("../beyond/file", str(root / "beyond/file"))))
    (theirs / EXACT_MODULE).write_text(rng.choice(("import os\n", EXACT_CODE + "import os\n")))
    (theirs / "modeling_x.py").write_text("import os\n")
    config = json.loads((theirs / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_exact.ExactTokenizer"]}
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    args = ["tokenize", "text.txt", "--tokenizer", "ckpt-tok", "--out", "data/again"]
    ended = _ended(root, *args)
    problems = []
    for path in (root / "data/again").rglob("*"):
        if path.is_file() and b"behind a link" in path.read_bytes():
            problems.append(("acted", f"'{path.name}' has what a link led to"))
        if path.suffix == ".py" and path.read_text() != EXACT_CODE:
            problems.append(("acted", f"'{path.name}' is code of others"))
    return f"code, and {linked} as a link", ended, problems


def places(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Continue from a checkpoint from elsewhere, whose options name places."""
    shutil.copytree(root / NEWEST, root / "theirs/step_00000006")
    names = ("out_dir", "checkpoint_dir", "log_file", "tensorboard")
    chosen = {name: f"taken/{name}" for name in rng.sample(names, rng.randrange(1, 5))}
    _signed(root / "theirs/step_00000006/checkpoint.json", lambda d: d["options"].update(chosen))
    ended = _ended(root, "train", "--continue=theirs/step_00000006", "--steps=7", "--overwrite")
    left = [str(p) for p in (root / "taken").rglob("*")]
    problems = [("acted", f"it was written to {left[0]}")] if left else []
    return f"places {sorted(chosen)}", ended, problems


def _signed(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document | {"sha256": digest_of(document)}))


def special(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Name what is no file in a manifest, with as many bytes as it seems to have."""
    path, kind = root / NEWEST / "extra.json", rng.choice(("pipe", "socket", "device", "full"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)
            made.bind(path.name)
            os.chdir(here)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/dev/full")
    entry = {"name": path.name, "group": "weights", "rank": 0, "bytes": 0, "sha256": "0" * 64}
    _signed(root / NEWEST / "checkpoint.json", lambda d: d["files"].append(entry))
    args = rng.choice(
        (
            ["check", "ckpt"],
            ["export", "--checkpoint-dir", NEWEST, "--out-dir", "new"],
            _ON,
        )
    )
    return f"{kind}, {args[0]}", _ended(root, *args), []


def pipes(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Put a pipe, which nobody writes to, beside a token file."""
    suffix = rng.choice(("docs", "sums", "scores"))
    path = root / f"data/train-0.{suffix}"
    new = {"out_dir": "new", "checkpoint_dir": "new-ckpt", "log_file": "new.json"}
    args = [*train(train_file="data/train-0.bin", **new), "--packing", "best-fit"]
    if suffix == "scores":
        path = root / "scores/data-train-0.scores"
        path.parent.mkdir()
        args = [*args, "--loss", "weighted", "--scores", "scores", "--document-separator", "10"]
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return suffix, _ended(root, *args), []


def names(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Put odd names and hashes into a manifest, or odd files into a cached model's index."""
    odd = rng.choice(("\0", "a\0b", "\ud800", "", ".", "..", "x" * 5000, "\n", "/etc/passwd", 3))
    if rng.random() < 0.6:
        field = rng.choice(("name", "sha256", "group"))

        def change(document: dict) -> None:
            rng.choice(document["files"])[field] = odd

        _signed(root / NEWEST / "checkpoint.json", change)
        args = ["export", "--checkpoint-dir", NEWEST, "--out-dir", "new"]
        if rng.random() < 0.5:
            args = _ON
        return f"{field} is {ascii(odd)[:20]}", _ended(root, *args), []
    snapshot = root / "hub/models--a--b/snapshots/0123"
    shutil.copytree(root / "model", snapshot)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": odd}}))
    args = train(model="a/b", from_scratch=None, steps=1, out_dir="new")

    def call() -> int:
        os.environ["HF_HUB_CACHE"] = str(root / "hub")
        return command(*args)

    return f"an index names {ascii(odd)[:20]}", run(inside(root, call)), []


def bounds(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Give programs that never end, records and files that are too large."""
    args = ["tokenize", "chat.jsonl", "--tokenizer", "tok", "--out", "data/again"]
    args += ["--record-seconds", "1"]
    kind = rng.choice(
        ("template", "template", "pattern", "normalizer", "record", "bomb", "options")
    )
    reader = rng.choice((None, *READERS)) if kind in ("template", "pattern", "normalizer") else None
    if kind == "template":
        number = rng.randrange(len(TEMPLATES))
        if reader is None:
            (root / "odd.jinja").write_text(TEMPLATES[number])
            args += ["--chat-template", "odd.jinja"]
        else:
            (root / "talks/chat_template.jinja").write_text(TEMPLATES[number])
            args = reader
        kind = f"template {number}, {args[0]}"
    elif kind in ("pattern", "normalizer"):
        path = root / ("tok" if reader is None else "talks") / "tokenizer.json"
        document = json.loads(path.read_text())
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200}
        if kind == "pattern":
            regex = rng.choice((r"(a+)+$", r"(a|aa)+$", r"(.*)*\d", r"(\w+\s?)*!"))
            document["pre_tokenizer"] = split | {"pattern": {"Regex": regex}}
        else:
            document["normalizer"] = {"type": "Sequence", "normalizers": [more] * 6}
        path.write_text(json.dumps(document))
        (root / "a.jsonl").write_text(json.dumps({"text": "a" * 60 + " b" * 60}) + "\n")
        args[1] = "a.jsonl"
        if reader is not None:
            args = reader
        kind = f"{kind}, {args[0]}"
    elif kind == "record":
        size = rng.choice((10_000, 100_000, 3_000_000))
        (root / "a.jsonl").write_text(json.dumps({"text": "a b " * (size // 4)}) + "\n")
        args[1] = "a.jsonl"
        args += ["--max-record", rng.choice(("100", "9000", "1MiB"))]
    elif kind == "bomb":
        name = rng.choice(("bomb.txt.gz", "bomb.jsonl.gz", "bomb.json.gz"))
        start = b"[" if ".json." in name else b""
        (root / name).write_bytes(gzip.compress(start + bytes([rng.choice(b"\0 a")]) * (80 << 20)))
        args[1] = name
    else:
        (root / "o.yaml").write_text("model: '" + "x" * (20 << 20) + "'")
        args = ["plan", "--config", "o.yaml"]
    return kind, _ended(root, *args), []


def hang(root: Path, rng: random.Random) -> tuple[str, None, Problems]:
    """Let a process under MPI, or a rank in one process, go on no more."""
    if importlib.util.find_spec("mpi4py") is None:
        return "there is no MPI here", None, []
    from tests import mpi  # pytest, which the other machines do without

    fault = {"process": rng.randrange(2), "step": rng.randrange(1, 4), "what": "hang"}
    here = os.getcwd()
    os.chdir(root)
    try:
        given = {"gpus": 2, "steps": 10**6, "batch_size": 1, "watchdog": 2}
        process = mpi.start(2, mpi.case(fault, **given | {"grad_accumulation": 1}))
        _, err = process.communicate(timeout=60)
    finally:
        os.chdir(here)
    problems = []
    if process.returncode != MachineError.STATUS:
        problems.append(("traceback", f"status {process.returncode}: {err[-300:]}"))
    return f"{fault}", None, problems


def cache(root: Path, rng: random.Random) -> tuple[str, None, Problems]:
    """Read files of other users from folders of all kinds of modes."""
    folder = root / "cache"
    folder.mkdir()
    path = folder / "a.cubin"
    path.write_bytes(b"code")
    mode, owner = rng.choice((0o700, 0o755, 0o775, 0o777, 0o1777)), rng.choice((os.geteuid(), 4711))
    folder.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, owner, -1)
    owner = path.stat().st_uid
    refused = False
    try:
        read_own(path)
    except LlmqError:
        refused = True
    should = owner not in (0, os.geteuid()) and bool(mode & 0o022)
    what = f"mode {mode:o}, owner {owner}"
    return what, None, [] if refused == should else [("acted", f"refused: {refused}")]


def data(root: Path, rng: random.Random) -> tuple[str, Ended | None, Problems]:
    """Give a model without heads, or a file without tokens."""
    kind = rng.choice(("heads", "tokens"))
    if kind == "heads":
        path = root / "model/config.json"
        name = rng.choice(("num_attention_heads", "num_key_value_heads"))
        value = rng.choice((0, -1, 10_000_000, 2**40))
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        ended = _ended(root, *train(**{"dry-run": ""}))
        problems = [] if ended.status else [("changed", "it was taken")]
        return f"{name} {value}", ended, problems
    count = rng.randrange(2)
    with TokenWriter(root / "data/none.bin", 512) as writer:
        writer.write(np.zeros(count, np.int32))
    ended = _ended(root, *train(train_file="data/none.bin"))
    masked = "masked" in ended.text
    return f"{count} tokens", ended, [("changed", "a wrong reason")] if masked else []


def full(root: Path, rng: random.Random) -> tuple[str, Ended, Problems]:
    """Let every checkpoint from some step on fail: it is said loudly, or ends the run."""
    required, first = rng.choice((0, 0, 1, 2, 3)), rng.randrange(1, 4)
    args = train(steps=8, ckpt_interval=1, ckpt_required=required, eval_file="none",
                 checkpoint_dir="new-ckpt", out_dir="new", log_file="new.json",
                 save_training_state=None)  # fmt: skip

    def call() -> int:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            step = name.partition("new-ckpt/step_")[2][:8]
            if step and int(step) >= first:
                raise OSError(28, "No space left on device")
            real(descriptor)

        os.fsync = fsync
        return command(*args)

    ended = run(inside(root, call))
    problems = []
    if required and ended.status != 2:
        problems.append(("changed", f"status {ended.status} with --ckpt-required {required}"))
    if not required and ended.text.count("ALARM: ") != 8 - first - 1:
        problems.append(("changed", f"{ended.text.count('ALARM: ')} alarms"))
    return f"no room from step {first} on, --ckpt-required {required}", ended, problems


def revision(root: Path, rng: random.Random) -> tuple[str, Ended | None, Problems]:
    """Let a repository of the hub move on while it is fetched: all is of one commit, or refused."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return "there is no huggingface_hub here", None, []
    from tests.hub import serving

    shutil.copytree(root / "out", root / "hubs/a/b")
    (root / "hubs/a/b/llmq.json").unlink()
    moves = rng.randrange(1, 9)
    args = train(model="a/b", from_scratch=None, download="", steps=1, out_dir="new",
                 checkpoint_dir="new-ckpt", log_file="new.json")  # fmt: skip
    with serving(root / "hubs") as (hub, address):
        real, count = hub.answer, itertools.count(1)

        def answer(request: object) -> None:
            if next(count) == moves:
                hub.sha = "f" * 40
            real(request)

        hub.answer = answer

        def call() -> int:
            more = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(root / "hub")}
            os.environ.update(more | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
            for name in ("CI", "HF_HUB_OFFLINE"):
                os.environ.pop(name, None)
            return command(*args)

        ended = run(inside(root, call))
    snapshots = [path.name for path in (root / "hub/models--a--b/snapshots").glob("*")]
    problems = []
    if ended.status == 0:
        kept = json.loads((root / "new/llmq.json").read_text())["hub"]["revision"]
        here = root / "hub/models--a--b/snapshots" / kept
        if not all((here / name).is_file() for name in ("config.json", "model.safetensors")):
            problems.append(("changed", f"it says {kept}, and there are {snapshots}"))
    elif "has just changed" not in ended.text:
        problems.append(("lost", f"it was not fetched: {ended.text[-300:]}"))
    return f"it moves on at request {moves}", ended, problems


def lost_terminal(root: Path, rng: random.Random) -> tuple[str, None, Problems]:
    """Close the terminal of a command with workers at some time."""
    (root / "long.jsonl").write_text('{"text": "some words of a text"}\n' * 200_000)
    args = ["tokenize", "long.jsonl", "--tokenizer", "tok", "--out", "data/long", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmq", *args], cwd=root, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(runs.__file__).parents[1])},
    )  # fmt: skip
    seconds = rng.uniform(1.5, 6)
    try:
        _, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGHUP)
        _, err = process.communicate(timeout=60)
    said = "Traceback" in err or process.returncode not in (0, 129, -1)
    problems = [("traceback", f"status {process.returncode}: {err[-300:]}")] if said else []
    return f"SIGHUP after {seconds:.1f} s", None, problems


# Names, cases, and how often each is taken.
CASES: list[tuple[str, Case, int]] = [
    ("text that steers a terminal", terminal, 20),
    ("code and links", code, 8),
    ("places of a checkpoint", places, 8),
    ("what is no file", special, 8),
    ("pipes beside token files", pipes, 4),
    ("names and hashes", names, 10),
    ("programs and sizes without end", bounds, 24),
    ("output without room", outputs.no_room, 8),
    ("two to one place", outputs.together, 8),
    ("a log that is replaced", outputs.replaced_log, 4),
    ("cache", cache, 8),
    ("orders and sizes", data, 16),
    ("a disk that stays full", full, 8),
    ("a revision that moves on", revision, 2),
    ("a lost terminal", lost_terminal, 1),
    ("a hang under MPI", hang, 1),
]


class Foreign:
    """Each attempt is one hostile thing."""

    name, title, quick, full = "foreign", "Files of others", 8, 1_000

    def prepare(self, folder: Path, rng: random.Random) -> None:
        """Make what the commands read."""
        self.folder, self.template = folder, whole_place(folder)
        for args in READERS + outputs.PRINTING:
            root = copy(self.template, folder / "tried")
            must(root, args)
            shutil.rmtree(root)

    def attempt(self, rng: random.Random) -> Outcome:
        """One of them."""
        (case,) = rng.choices(CASES, [weight for *_, weight in CASES])
        root = copy(self.template, self.folder / "tried")
        try:
            what, ended, problems = case[1](root, rng)
            if ended is not None:
                problems += ended.problems
                steering = {c for c in ended.text if _steers(c)}
                if steering:
                    problems.append(("acted", f"it prints {sorted(steering)!a}"))
                if ended.status == -signal.SIGKILL:
                    problems.append(("hang", "it was killed: too much memory or time"))
            problems += touched(root)
        finally:
            shutil.rmtree(root)
        return Outcome(case[0], what, problems)
