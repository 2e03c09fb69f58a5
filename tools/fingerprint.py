#!/usr/bin/env python3
"""What a refactoring must leave as it is, byte for byte: the numbers, files and bytes of many runs.

    PYTHONPATH=OLD_CHECKOUT tools/fingerprint.py --out old.json
    PYTHONPATH=NEW_CHECKOUT tools/fingerprint.py --out new.json
    tools/fingerprint.py --compare old.json new.json

tools/fingerprint_runs.py lists the runs: small ones of `llmq.Trainer` on the CPU device, and calls
of `python -m llmq`. Nothing else of the package is imported, so the same script runs on both sides
of a change that moves modules. llmq comes from PYTHONPATH, or is the installed one. Results of
different processors differ in their last bits: compare two commits on the same machine. --compare
exits with status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is loaded: sums in one order
os.environ["COLUMNS"] = "100"  # the width of --help

import numpy as np
from fingerprint_runs import COMMANDS, MODELS, PLANS, RUNS, TOKENIZE, VOCAB, WORDS, B, T
from safetensors.numpy import load_file, save_file

STEPS = 3  # of a run, and of its part after ->
MISSING = "nothing"
# Fields that are planned sizes.
SIZES = re.compile(r"\b(memory|sizes)\.|_bytes$|stack\.\d+\.bytes$|log\.\d+\.stats\.")


# ------------------------------------------------------------------------------------------------
# Runs of a trainer


def options_of(words: list[str]) -> dict[str, Any]:
    """Options of a trainer from the words of a run."""
    options: dict[str, Any] = {}
    for word in words:
        name, has_value, value = word.partition("=")
        options |= WORDS.get(word, {name: value if has_value else True})
    return options


def sha256(*parts: bytes) -> str:
    """Of all parts, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def tensors_hash(tensors: dict[str, np.ndarray]) -> str:
    """Of names, shapes, dtypes and values, in the order given."""
    heads = (f"{name} {x.shape} {x.dtype}" for name, x in tensors.items())
    values = (np.ascontiguousarray(x).tobytes() for x in tensors.values())
    return sha256(
        *(part for head, x in zip(heads, values, strict=True) for part in (head.encode(), x))
    )


def masked_batches(count: int, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Micro-batches of random tokens, some targets masked."""
    rng, batches = np.random.default_rng(7), []
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (rows, T + 1)).astype(np.int32)
        targets = np.where(rng.random((rows, T)) < 0.2, -100, tokens[:, 1:]).astype(np.int32)
        batches.append((np.ascontiguousarray(tokens[:, :-1]), targets))
    return batches


def measured(result: Any) -> dict[str, Any]:
    """The fields of a result but its time."""
    times = ("communication", "waits", "begin", "end")
    return {k: v for k, v in dataclasses.asdict(result).items() if k not in times}


def trained(trainer: Any) -> dict[str, Any]:
    """Steps and a validation of a trainer: what they measure, and the plan that they go by."""
    usage = trainer.plan.usage
    steps = [
        measured(trainer.step(masked_batches(trainer.micro_batches, trainer.config.batch_size)))
    ]
    steps += [measured(trainer.step()) for _ in range(STEPS - 1)]
    return {
        "steps": steps,
        "validation": measured(trainer.validate(2)),
        "weights": tensors_hash(trainer.weights()),
        "gradients": tensors_hash(trainer.gradients()),
        "memory": usage.categories,
        "stack": [{"name": name, "bytes": size} for name, size in usage.stack],
        "sizes": dataclasses.asdict(usage.sizes),
        "used": trainer.usage == usage,
        "counts": {k: getattr(trainer.plan, k) for k in ("tokens", "flops", "traffic", "launches")},
    }


def files_of(folder: Path) -> dict[str, Any]:
    """Hashes of the files below a folder; of a checkpoint.json what every machine has alike."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name == "checkpoint.json":
            found[name] = json.loads(portable(path.read_text()))
            del found[name]["sha256"]  # which is of the paths in it, too
        elif path.suffix == ".json":
            found[name] = sha256(portable(path.read_text()).encode())
        else:
            found[name] = sha256(path.read_bytes())
    return found


def portable(text: str) -> str:
    """Without the temporary folder, dates, times, speeds, progress and ids of runs."""
    text = text.replace(str(Path.cwd()), "RUN").replace(str(Path.cwd().parent), "ROOT")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d[:_]\d\d[:_]\d\d(\.\d+)?", "DATE", text)
    text = re.sub(r"\b[0-9a-f]{12}\b(?=[\")])", "ID", text)
    text = re.sub(r"time: +\d+ +m?s|tps +\S+|done in \d+ m?s|took \d+ seconds", "TIME", text)
    text = re.sub(r"^ *validation: +\d+%\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"Memory: \d+ MiB / \d+ MiB|Free: +\d+.*", "MEMORY", text)
    return text


def train(run: str) -> dict[str, Any]:
    """The fingerprint of a line of RUNS."""
    from llmq import Trainer

    first, _, second = run.partition(" -> ")
    model, *words = first.split()
    options = {
        "model": f"../models/{model}",
        "from_scratch": True,
        "device": "cpu",
        "gpus": 1,
        "batch_size": B,
        "seq_len": T,
        "grad_accumulation": 2,
        "steps": 10,
        "learning_rate": 1e-2,
        "train_file": "../data/train*.bin",
        "eval_file": "../data/eval*.bin",
        "log_file": "log.json",
        "tune": False,
    } | options_of(words)
    found: dict[str, Any] = {}
    with Trainer(**options) as trainer:
        found["run"] = trained(trainer)
        saved = trainer.save("first")
        trainer.export("out")
    found["files"] = files_of(Path())
    # The second trainer goes on from the checkpoint, or begins from the model that was exported.
    if second:
        options |= options_of(second.split())
    else:
        source = in_two_files(Path("out")) if "fp32" in words else "out"
        options |= {"model": source, "from_scratch": False, "init_proj_to_zero": False}
    with Trainer(**options) as trainer:
        if second:
            trainer.load(saved)
        found["next"] = trained(trainer)
        found["next"]["files"] = files_of(trainer.save("second"))
    return found


def in_two_files(model: Path) -> str:
    """A copy of an exported F32 model with its weights in two files and an index."""
    folder, weights = Path("parts"), load_file(model / "model.safetensors")
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    names: dict[str, str] = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        tensors = {name: weights[name] for name in sorted(weights)[part::2]}
        save_file(tensors, folder / file, {"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


# ------------------------------------------------------------------------------------------------
# Command lines


def command(line: str) -> dict[str, Any]:
    """Run `python -m llmq` with these arguments, in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv, status = ["llmq", *shlex.split(line)], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("llmq", run_name="__main__")
    except SystemExit as stop:
        status = stop.code or 0
    finally:
        sys.argv = argv
    return {"status": status, "out": portable(out.getvalue()), "err": portable(err.getvalue())}


def commands(lines: list[str]) -> dict[str, Any]:
    """The fingerprint of an entry of COMMANDS: consoles, log and files."""
    found: dict[str, Any] = {}
    for line in lines:
        shown = command(line)
        found[f"{len(found)} {line.split()[0]}"] = shown | {"out": shown["out"].splitlines()}
    log = Path("log.json")
    if log.exists():
        found["log"] = [_record(record) for record in json.loads(portable(log.read_text()))]
        log.unlink()
    return found | {"files": files_of(Path())}


def _record(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a log without times and without what is free of the machine's memory."""
    gone = {"time", "duration_ms", "communication"}
    kept = {name: value for name, value in record.items() if name not in gone}
    if record["log"] == "allocator":
        kept["stats"] = [row for row in record["stats"] if row["name"] != "Free"]
    return kept


def plan(line: str) -> dict[str, Any]:
    """The fingerprint of a line of PLANS."""
    shown = command(f"plan --model={line} --from-scratch --card=h100 --device=cuda --json")
    return shown | {"out": json.loads(shown["out"])}


# ------------------------------------------------------------------------------------------------
# All of them, and two of them compared

RUNNERS = {
    **{f"train {line}": (train, line) for line in RUNS},
    **{f"command {name}": (commands, lines) for name, lines in COMMANDS.items()},
    **{f"plan {line}": (plan, line) for line in PLANS},
}
"""By the name of a run: what makes its fingerprint, and from what."""


def fingerprint(name: str, root: Path) -> dict[str, Any]:
    """Of one run, in a new folder in root; an error is a fingerprint too."""
    runner, what = RUNNERS[name]
    folder = Path(tempfile.mkdtemp(dir=root))
    os.chdir(folder)
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stderr(warnings):
            found = runner(what)
        return found | {"warnings": portable(warnings.getvalue()).splitlines()}
    except Exception as error:
        return {"error": portable(f"{type(error).__name__}: {error}")}


def make_workplace(root: Path) -> None:
    """models/*/config.json, a text and its token files data/*.bin."""
    for name, (architecture, fields) in MODELS.items():
        (root / "models" / name).mkdir(parents=True)
        content = {"architectures": [architecture]} | fields
        (root / "models" / name / "config.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 9))).decode() for _ in range(99)]
    with open(root / "text.jsonl", "w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": " ".join(rng.choice(words, 16))}) + "\n")
    os.utime(root / "text.jsonl", (0, 0))  # which `llmq tokenize` notes
    os.chdir(root)
    made = command(TOKENIZE.replace("../", "") + " --out=data")
    if made["status"]:
        sys.exit(made["err"])


def fingerprints(names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of these runs, in processes of their own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, spawn) as pool:
        root = Path(folder).resolve()
        pool.submit(make_workplace, root).result()
        yield from zip(names, pool.map(fingerprint, names, [root] * len(names)), strict=True)


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts in a fingerprint, by the keys that lead to them."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from fields(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print each difference, planned bytes that got fewer apart; returns how many there are."""
    others, fewer = [], []
    for run in sorted(old.keys() | new.keys()):
        a, b = (dict(fields(side.get(run, {}))) for side in (old, new))
        for field in dict.fromkeys([*a, *b]):
            x, y = (side.get(field, MISSING) for side in (a, b))
            if repr(x) != repr(y):  # NaN is itself
                sizes = SIZES.search(field) and isinstance(x, int) and isinstance(y, int)
                smaller = sizes and y < x
                (fewer if smaller else others).append(f"{run}: {field}: {x!r} -> {y!r}")
    for title, lines in (("Different", others), ("Fewer planned bytes", fewer)):
        if lines:
            print(f"{title} ({len(lines)}):", *lines, sep="\n  ")
    if not others and not fewer:
        print(f"{len(new)} runs are identical")
    return len(others) + len(fewer)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the fingerprints here")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name contains it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two results")
    given = parser.parse_args()
    if given.compare:
        sys.exit(compare(*(json.loads(path.read_text()) for path in given.compare)) > 0)
    names = [name for name in RUNNERS if given.only in name]
    if given.out is None or not names:
        parser.error("--out is missing" if names else f"no run is called {given.only!r}")
    start, found = time.perf_counter(), {}
    for name, result in fingerprints(names, given.jobs):
        found[name] = result
        if "error" in result:
            print(f"{name}: {result['error']}", file=sys.stderr)
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    package = Path(importlib.util.find_spec("llmq").origin).parent
    print(f"{given.out}: {len(found)} runs of {package} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
