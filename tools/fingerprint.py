#!/usr/bin/env python3
"""Record the numbers, files and bytes of many runs, which a refactoring must not change.

    PYTHONPATH=OLD_CHECKOUT tools/fingerprint.py --out old.json
    PYTHONPATH=NEW_CHECKOUT tools/fingerprint.py --out new.json
    tools/fingerprint.py --compare old.json new.json --allow 'command help *'

tools/fingerprint_runs.py lists the runs: small ones of `llmq.Trainer` on the CPU device, calls of
`python -m llmq`, and plans for several cards. Nothing else of the package is imported, so the same
script runs on both sides of a change that moves modules. llmq comes from PYTHONPATH, or is the
installed one. Results of different processors differ in their last bits: compare two commits on the
same machine. --compare exits with status 1 if anything differs, if a record lacks a run that the
other record has, or if a run failed. --only REGEX records only the runs whose names match.

--gpu records other runs, on a Hopper GPU in sizes that suit its fused products, each run with and
without fused products (LLMQ_FUSED). --gpu --device cpu tries the same on the CPU, in small models.
A record exits with status 1 if a run failed.
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
import subprocess
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
from fingerprint_compare import compare
from fingerprint_runs import (
    CARD,
    CARDS,
    CHATML,
    COMMANDS,
    GOLDEN,
    GPU_MODELS,
    GPU_RUNS,
    MODELS,
    PLANS,
    RUNS,
    VOCAB,
    WORDS,
    WORKPLACE,
    B,
    T,
)
from safetensors.numpy import load_file, save_file

STEPS = 3  # steps of a run, and of its second trainer (after ->)
SLOWEST = 5  # number of slowest runs to name at the end
OWN_SIZES = (  # sizes that only new models can have
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_positions rope_theta tie_embeddings"
).split()
DRAWINGS = (".svg", ".png", ".html")
WORDS_ONLY = re.compile(r"[^A-Za-z]+")
# Allow root, more processes than cores, and a machine without a network.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",  # the same for Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "^tcp",
}
# Names of fields that hold planned sizes.
SIZES = re.compile(r"\b(memory|sizes)\.|_bytes$|stack\.\d+\.bytes$|log\.\d+\.stats\.")


# ------------------------------------------------------------------------------------------------
# Runs of a trainer


def options_of(words: list[str]) -> dict[str, Any]:
    """Return options of a trainer from the words of a run."""
    options: dict[str, Any] = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if name == "train_file":
            value = tuple(value.split(","))
        options |= WORDS.get(word, {name: value if has_value else True})
    return options


def sha256(*parts: bytes) -> str:
    """The hash of all parts in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def tensors_hash(tensors: dict[str, np.ndarray]) -> str:
    """The hash of names, shapes, dtypes and values, in the given order."""
    heads = (f"{name} {x.shape} {x.dtype}" for name, x in tensors.items())
    values = (np.ascontiguousarray(x).tobytes() for x in tensors.values())
    return sha256(
        *(part for head, x in zip(heads, values, strict=True) for part in (head.encode(), x))
    )


def masked_batches(count: int, config: Any) -> list[tuple[np.ndarray, ...]]:
    """Return micro-batches of random tokens with some masked targets; with --document-mask, of
    documents."""
    rng, batches = np.random.default_rng(7), []
    shape = rows, T = config.batch_size, config.seq_len
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (rows, T + 1)).astype(np.int32)
        targets = np.where(rng.random(shape) < 0.2, -100, tokens[:, 1:]).astype(np.int32)
        batch = np.ascontiguousarray(tokens[:, :-1]), targets
        if config.document_mask:
            starts = np.where(rng.random(shape) < 0.1, np.arange(T), 0)
            batch = *batch, np.maximum.accumulate(starts, axis=1).astype(np.int32)
        batches.append(batch)
    return batches


def measured(result: Any) -> dict[str, Any]:
    """The fields of a step's or evaluation's result, without times and some other numbers."""
    left_out = ("communication", "waits", "begin", "end", "validated", "shown")
    found = dataclasses.asdict(result)
    found |= found.pop("numbers", {})  # fields in older versions
    return {k: v for k, v in found.items() if k not in left_out}


def trained(trainer: Any) -> dict[str, Any]:
    """Run steps and an evaluation; return their results and the trainer's plan."""
    usage = trainer.plan.usage
    steps = [measured(trainer.step(masked_batches(trainer.micro_batches, trainer.config)))]
    steps += [measured(trainer.step()) for _ in range(STEPS - 1)]
    sizes = usage.sizes
    return {
        "steps": steps,
        "validation": measured(trainer.validate(2)),
        "weights": tensors_hash(trainer.weights()),
        "gradients": tensors_hash(trainer.gradients()),
        "memory": usage.categories,
        "stack": [{"name": name, "bytes": size} for name, size in usage.stack],
        # Older versions have a dataclass.
        "sizes": dict(sizes) if isinstance(sizes, dict) else dataclasses.asdict(sizes),
        "used": trainer.usage == usage,
        "counts": {k: getattr(trainer.plan, k) for k in ("tokens", "flops", "traffic", "launches")},
    }


def files_of(folder: Path) -> dict[str, Any]:
    """Hashes of the files below a folder; for a checkpoint.json its machine-independent content."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name == "checkpoint.json":
            found[name] = json.loads(portable(path.read_text()))
            del found[name]["sha256"]  # this hash covers paths in the file
        elif path.suffix == ".json" and not name.startswith("timed/"):
            found[name] = sha256(portable(path.read_text()).encode())
        elif path.suffix in DRAWINGS or name.startswith("timed/"):
            found[name] = "with times in it"
        else:
            found[name] = sha256(path.read_bytes())
    return found


def portable(text: str) -> str:
    """Text without temporary folders, dates, times, speeds, progress and run ids."""
    text = text.replace(str(Path.cwd()), "RUN").replace(str(Path.cwd().parent), "ROOT")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d[:_]\d\d[:_]\d\d(\.\d+)?", "DATE", text)
    text = re.sub(r"\b[0-9a-f]{12}\b(?=[\")])", "ID", text)
    text = re.sub(
        r"time: +\d+ +m?s|tps +\S+|done in \d+ m?s|took \d+ seconds|written in \S+ s", "TIME", text
    )
    text = re.sub(r"^ *validation: +\d+%\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"Memory: \d+ MiB / \d+ MiB|Free: +\d+.*", "MEMORY", text)
    return text


def train(run: str) -> dict[str, Any]:
    """The fingerprint of a line of RUNS."""
    from llmq import Trainer

    first, _, second = run.partition(" -> ")
    model, *words = first.split()
    has_weights = "base" in words
    fused = [word for word in words if word.startswith("fused=")]
    words = [word for word in words if word != "base" and word not in fused]
    for word in fused:
        os.environ["LLMQ_FUSED"] = word.removeprefix("fused=")
    options = {
        "model": f"../{'bases' if has_weights else 'models'}/{model}",
        "from_scratch": not has_weights,
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
    found: dict[str, Any] = {"kinds": kinds_of(options)} if fused else {}
    with Trainer(**options) as trainer:
        found["run"] = trained(trainer)
        saved = trainer.save("first")
        trainer.export("out")
    found["files"] = files_of(Path())
    # The second trainer resumes from the checkpoint, or starts from the exported model.
    if second:
        options |= options_of(second.split())
    elif "lora_rank" in options:
        options = {k: v for k, v in options.items() if not k.startswith("lora") and k != "train"}
        options |= {"adapter": "out"}
    else:
        source = in_two_files(Path("out")) if "fp32" in words else "out"
        options = {k: v for k, v in options.items() if k not in OWN_SIZES}
        options |= {"model": source, "from_scratch": False, "init_proj_to_zero": False}
    with Trainer(**options) as trainer:
        if second:
            trainer.load(saved)
        found["next"] = trained(trainer)
        found["next"]["files"] = files_of(trainer.save("second"))
    return found


def kinds_of(options: dict[str, Any], card: str = "") -> list[dict[str, Any]]:
    """The launches by kind that `llmq plan` reports for a step with these options. card: value of
    --card; "": no --card."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        word = {True: f"--{flag}", False: f"--no-{flag}"}
        words.append(word[value] if isinstance(value, bool) else f"--{flag}={value}")
    words += [f"--card={card}"] * bool(card)
    shown = command(f"plan --json {shlex.join(words)}")
    if shown["status"]:
        raise RuntimeError(shown["err"])
    return json.loads(shown["out"])["kinds"]


def on_a_gpu(line: str, fused: bool, device: str) -> dict[str, Any]:
    """The fingerprint of a line of GPU_RUNS: losses, norms, weights and launches.

    fused: True uses llmq's fused products where the rules choose them. The rules choose none on the
    CPU, so there True uses all possible fused products, in a small model.
    """
    from llmq import Trainer

    model, *words = line.split()
    on_cpu = device == "cpu"
    how = ("all" if on_cpu else None) if fused else "none"
    if how is not None:
        os.environ["LLMQ_FUSED"] = how
    large, small = GPU_MODELS[model]
    sizes = {"batch_size": B, "seq_len": T} if on_cpu else {"batch_size": 4, "seq_len": 1024}
    options = {
        "model": f"../models/{small if on_cpu else large}",
        "from_scratch": True,
        "device": device,
        "gpus": 1,
        "grad_accumulation": 2,
        "steps": 10,
        "learning_rate": 1e-3,
        "train_file": "../data/train*.bin",
        "eval_file": "none",
        "tune": False,
    }
    options |= sizes | options_of(words)
    kinds = kinds_of(options, "" if on_cpu else CARD)
    with Trainer(**options) as trainer:
        batches = masked_batches(trainer.micro_batches, trainer.config)
        steps = [measured(trainer.step(batches)) for _ in range(STEPS)]
        weights, gradients = tensors_hash(trainer.weights()), tensors_hash(trainer.gradients())
    return {"steps": steps, "weights": weights, "gradients": gradients, "kinds": kinds}


def in_two_files(model: Path) -> str:
    """Copy an exported F32 model, with its weights split into two files and an index; return the
    folder."""
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
    """Run `python -m llmq` with these arguments in this process; return status and output."""
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


def in_two_processes(line: str) -> dict[str, Any]:
    """Run the command as two processes under mpirun."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    given = [beside, "-n", "2", sys.executable, "-m", "llmq", *shlex.split(line)]
    how = {"capture_output": True, "text": True, "env": os.environ | MPI, "timeout": 120}
    done = subprocess.run(given, **how, check=False)
    out, err = portable(done.stdout), portable(done.stderr)
    return {"status": done.returncode, "out": out, "err": err}


def commands(lines: list[str]) -> dict[str, Any]:
    """The fingerprint of an entry of COMMANDS: console output, log and files."""
    found: dict[str, Any] = {}
    for line in lines:
        first, _, rest = line.partition(" ")
        shown = in_two_processes(rest) if first == "mpirun" else command(line)
        if first == "bench":  # the output of bench has speeds
            shown |= {name: WORDS_ONLY.sub(" ", shown[name]) for name in ("out", "err")}
        found[f"{len(found)} {line.split()[0]}"] = shown | {"out": shown["out"].splitlines()}
    log = Path("log.json")
    if log.exists():
        found["log"] = [_record(record) for record in json.loads(portable(log.read_text()))]
        log.unlink()
    return found | {"files": files_of(Path())}


def _record(record: dict[str, Any]) -> dict[str, Any]:
    """A log record without times and without the machine's free memory."""
    gone = {"time", "duration_ms", "communication"}
    kept = {name: value for name, value in record.items() if name not in gone}
    if record["log"] == "allocator":
        kept["stats"] = [row for row in record["stats"] if row["name"] != "Free"]
    return kept


def plan(line: str) -> dict[str, Any]:
    """The fingerprint of a line of PLANS."""
    shown = command(f"plan --model={line} --from-scratch --card=h100 --device=cuda --json")
    return shown | {"out": json.loads(shown["out"])}


def golden(line: str) -> dict[str, Any]:
    """The fingerprint of a line of GOLDEN: its plan on each of CARDS."""
    found = {}
    for card in CARDS:
        where = f"--from-scratch --num-layers=4 --card='{card}' --device=cuda"
        gpus = "" if "--gpus" in line else " --gpus=1"
        shown = command(f"plan --model={line} {where}{gpus} --json")
        found[card] = shown | {"out": shown["out"] and json.loads(shown["out"])}
    return found


# ------------------------------------------------------------------------------------------------
# All fingerprints, and the comparison of two records

RUNNERS = {
    **{f"train {line}": (train, line) for line in RUNS},
    **{f"command {name}": (commands, lines) for name, lines in COMMANDS.items()},
    **{f"plan {line}": (plan, line) for line in PLANS},
    **{f"cards {line}": (golden, line) for line in GOLDEN},
}
"""By the name of a run: what makes its fingerprint, and from what."""
GPU_RUNNERS = {
    f"gpu {line} {'fused' if fused else 'apart'}": (on_a_gpu, (line, fused))
    for line in GPU_RUNS
    for fused in (True, False)
}


def fingerprint(name: str, root: Path, device: str) -> tuple[dict[str, Any], float]:
    """Return the fingerprint of one run, made in a new folder below root, and its seconds; an error
    is a fingerprint too."""
    runner, what = (RUNNERS | GPU_RUNNERS)[name]
    os.environ.pop("LLMQ_FUSED", None)  # the run before may have set this
    folder = Path(tempfile.mkdtemp(dir=root))
    os.chdir(folder)
    warnings, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stderr(warnings):
            found = runner(*what, device) if name in GPU_RUNNERS else runner(what)
        found |= {"warnings": portable(warnings.getvalue()).splitlines()}
    except Exception as error:
        found = {"error": portable(f"{type(error).__name__}: {error}")}
    os.chdir(root)
    shutil.rmtree(folder)
    return found, time.perf_counter() - start


def make_workplace(root: Path, bases: list[str]) -> None:
    """Write models/*/config.json, bases/* with weights, texts, tasks and token files of three
    kinds."""
    for name, (architecture, fields) in MODELS.items():
        (root / "models" / name).mkdir(parents=True)
        content = {"architectures": [architecture]} | fields
        (root / "models" / name / "config.json").write_text(json.dumps(content))
    os.chdir(root)
    for name, records in texts_of(np.random.default_rng(0)).items():
        lines = (json.dumps(record) + "\n" for record in records)
        Path(f"{name}.jsonl").write_text("".join(lines))
        os.utime(f"{name}.jsonl", (0, 0))  # `llmq tokenize` records this time
    Path("chatml.jinja").write_text(CHATML)
    for line in WORKPLACE:
        made = command(line)
        if made["status"]:
            sys.exit(made["err"])
    for name in bases:
        write_base(root / "bases" / name, f"models/{name}")


def texts_of(rng: np.random.Generator) -> dict[str, list[dict[str, Any]]]:
    """Records of texts, short texts, conversations and questions, by file name."""
    words = [bytes(rng.integers(97, 123, rng.integers(1, 9))).decode() for _ in range(99)]

    def say(count: int) -> str:
        return " ".join(rng.choice(words, count))

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": say(rng.integers(1, 4))}

    return {
        "text": [{"text": say(16)} for _ in range(300)],
        "short": [{"text": say(rng.integers(1, 5))} for _ in range(900)],
        "chat": [{"messages": [turn("user"), turn("assistant")]} for _ in range(200)],
        "piqa": [
            {"goal": say(1), "sol1": say(1), "sol2": say(1), "label": i % 2} for i in range(12)
        ],
    }


def write_base(folder: Path, model: str) -> None:
    """Write a model with fp32 weights, after a few training steps."""
    from llmq import Trainer

    options = {"model": model, "from_scratch": True, "device": "cpu", "gpus": 1, "tune": False}
    options |= {"model_dtype": "fp32", "seq_len": T, "batch_size": B, "learning_rate": 1e-2}
    files = {"train_file": "data/train*.bin", "eval_file": "none", "steps": STEPS}
    with Trainer(**options, **files) as trainer:
        for _ in range(STEPS):
            trainer.step()
        trainer.export(folder)


def bases_of(names: list[str]) -> list[str]:
    """Return the models whose weights these runs need."""
    needed = {name.split()[1] for name in names if name.startswith("train ") and " base " in name}
    for name in names:
        needed |= set(re.findall(r"\.\./bases/([\w-]+)", str(RUNNERS.get(name))))
    return sorted(needed)


def fingerprints(
    names: list[str], jobs: int, device: str
) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield name, fingerprint and seconds of these runs, each in its own process. device: device of
    GPU_RUNS."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, spawn) as pool:
        root, count = Path(folder).resolve(), len(names)
        pool.submit(make_workplace, root, bases_of(names)).result()
        found = pool.map(fingerprint, names, [root] * count, [device] * count)
        for name, (result, seconds) in zip(names, found, strict=True):
            yield name, result, seconds


def record(names: list[str], out: Path, jobs: int, device: str) -> int:
    """Write the fingerprints of these runs; return the number of failed runs."""
    start, found, took = time.perf_counter(), {}, {}
    for name, result, seconds in fingerprints(names, jobs, device):
        found[name], took[name] = result, seconds
        if "error" in result:
            print(f"{name}: {result['error']}", file=sys.stderr)
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    package = Path(importlib.util.find_spec("llmq").origin).parent
    print(f"{out}: {len(found)} runs of {package} in {time.perf_counter() - start:.0f} s")
    longest = sorted(took, key=took.get, reverse=True)[:SLOWEST]
    print("longest:", *(f"{took[name]:.1f} s {name}" for name in longest), sep="\n  ")
    return sum("error" in result for result in found.values())


def main() -> None:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the fingerprints here")
    parser.add_argument("--only", default="", metavar="REGEX", help="runs in whose name it is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--gpu", action="store_true", help="runs of a GPU, with --device")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of --gpu")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two results")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="a run that may differ, * and ?",
    )
    given = parser.parse_args()
    if given.compare:
        both = (json.loads(path.read_text()) for path in given.compare)
        sys.exit(compare(*both, given.allow) > 0)
    runs = GPU_RUNNERS if given.gpu else RUNNERS
    names = [name for name in runs if re.search(given.only, name)]
    if given.out is None or not names:
        parser.error("--out is missing" if names else f"no run is called {given.only!r}")
    jobs = 1 if given.gpu else given.jobs
    sys.exit(record(names, given.out, jobs, given.device) > 0)


if __name__ == "__main__":
    main()
