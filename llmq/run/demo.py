"""`llmq demo`: tokenizes, trains, evaluates and samples in two minutes, on Python's own source
text."""

import shlex
import shutil
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

from llmq.base.console import printable
from llmq.base.errors import DataError
from llmq.base.files import disk_errors
from llmq.checkpoint.states import checkpoint_at
from llmq.data.tokens import TokenFile
from llmq.options.option_types import NEWEST
from llmq.options.options import TrainConfig
from llmq.options.options_io import config_of, layers_of, make_config
from llmq.report.plot import read_log, run_plot
from llmq.run.model_of_run import model_of_run
from llmq.run.resume import inherited_options
from llmq.run.run_paths import existing_outputs, locked_places
from llmq.run.sampling import Sampler, Sampling, open_model, prompt_ids
from llmq.run.training import run_training
from llmq.runtime.machine import choose_machine
from llmq.text.guarded import guarded_tokenizer
from llmq.text.tokenize import tokenize
from llmq.text.tokenizer import Tokenizer, streamed
from llmq.text.train_tokenizer import train_tokenizer

PROMPT = "def __init__(self"
HELD_OUT = 16_384  # approximate bytes of the held-out Python module; its validation takes seconds
NEW_TOKENS = 110  # new tokens of a sample; prompt and sample are shorter than a training sequence
STEPS = {"host": 300, "cuda": 2000}
# These sizes gave the least loss of equally long runs in docs/decisions/runs.md.
VOCAB_SIZE = 2048
SIZES = {
    "vocab-size": "auto",
    "hidden-size": 192,
    "intermediate-size": 512,
    "num-layers": 2,
    "num-heads": 3,
    "num-kv-heads": 1,
    "head-dim": 64,
}


def python_sources() -> list[str]:
    """Return the paths of the modules of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(str(path) for path in folder.glob("*.py"))
    if not files:
        raise DataError(f"'{folder}' has no Python sources: use `llmq tokenize` on your own text")
    return files


def demo_config(out: Path, device: str, kind: str, steps: int | None) -> TrainConfig:
    """Return the options of the demo's run. kind: the kind of device that `device` means, "host" or
    "cuda"."""
    steps = STEPS[kind] if steps is None else steps
    validation = {"eval-every-n-steps": 100, "eval-num-steps": 10} if steps > 100 else {}
    return make_config(
        validation
        | {
            "name": "demo",
            "model": "tiny",
            "from-scratch": True,
            **SIZES,
            "model-dtype": "fp32" if kind == "host" else "bf16",
            # File names, no patterns: `out` may contain characters that are special in patterns.
            "train-file": str(out / "data" / "train" / "train-000.bin"),
            "eval-file": str(out / "data" / "eval" / "train-000.bin"),
            "batch-size": 16,
            "seq-len": 128,
            "grad-accumulation": 1,
            "steps": steps,
            "optimizer": "muon",
            "learning-rate": 1e-2,
            "weight-decay": 0.01,
            "warmup": "5%",
            "lr-schedule": "cosine",
            "ckpt-interval": 100,
            "ckpt-keep-n": 1,
            "ckpt-final": True,  # a later demo can continue with more steps
            "checkpoint-dir": out / "ckpt",
            "out-dir": out / "model",
            "log-file": out / "log.json",
            "device": device,
            "gpus": 1,  # the text is too short for more GPUs
        }
    )


def run_demo(out: Path, device: str, steps: int | None, resume: bool = False) -> None:
    """Make a tokenizer, tokenize, train, evaluate, save, plot, and sample before and after
    training. All files go into `out`. device: "auto", "cpu" or "cuda". steps: steps of the run;
    None: STEPS. resume: True to continue the last demo, possibly with more steps; False to replace
    its results."""
    start = time.perf_counter()
    machine = choose_machine(device, 1)
    held_out = _write_data(out, resume)
    config = demo_config(out, device, machine.kind, steps)
    if resume:
        config = _continued(config, steps)
    else:
        with locked_places(config):
            _remove_last(config)
    model, _ = model_of_run(config)
    tokenizer = guarded_tokenizer(out / "data" / "tokenizer")
    positions = len(tokenizer.encode(PROMPT)) + NEW_TOKENS
    if not resume:
        with Sampler(machine, model, lambda w: w.init(model, config.seed), positions) as sampler:
            _show("Before training", sampler, tokenizer)
    run_training(config.validate_with(model), model, None, sys.argv)
    run_plot([config.log_file], out / "loss.png", overwrite=True)
    with open_model(str(config.out_dir)) as (model, read, _):
        sampler = Sampler(machine, model, lambda w: w.load(read), positions)
    with sampler:
        _show("After training", sampler, tokenizer)
    losses = [r["loss"] for r in read_log(config.log_file) if r["log"] == "eval"]
    file = TokenFile(Path(config.eval_pattern))
    nats = losses[-1] * file.num_tokens / held_out
    file.close()
    print(f"The held-out module takes {nats:.2f} nats a byte.")
    print(f"The demo took {time.perf_counter() - start:.0f} seconds. To have the model write more,")
    print("and to fine-tune a model on records of your own:")
    print(f"  llmq sample {shlex.quote(str(config.out_dir))} --prompt 'import '")
    print("  llmq finetune --help")


def _write_data(out: Path, resume: bool) -> int:
    """Train a tokenizer on the sources, and write the tokenizer and token files; `resume` keeps
    existing files. Returns the bytes of the held-out module."""
    sources = python_sources()
    held_out = min(sources, key=lambda name: abs(Path(name).stat().st_size - HELD_OUT))
    trained = [name for name in sources if name != held_out]
    data = out / "data"
    if not (resume and (data / "eval" / "train-000.bin").is_file()):
        tokenizer = data / "tokenizer"
        made = train_tokenizer(trained, vocab_size=VOCAB_SIZE, out=tokenizer, overwrite=True)
        print(made.describe())
        for name, files in (("train", trained), ("eval", [held_out])):
            text = tokenize(
                files, tokenizer=str(tokenizer), out=data / name, eval_fraction=0, overwrite=True
            )
            print(text.describe())
    return Path(held_out).stat().st_size


def _continued(config: TrainConfig, steps: int | None) -> TrainConfig:
    """Return the options with which a stopped demo continues; without a checkpoint, options of a
    new demo. steps: new number of steps, or None."""
    own = {"name": config.name, "checkpoint-dir": config.checkpoint_dir, "device": config.device}
    own |= {"continue": True} | ({} if steps is None else {"steps": steps})
    if checkpoint_at(config.checkpoint_dir) is None:
        return replace(config, continue_from=NEWEST)
    layers = layers_of(own)
    return config_of(layers, inherited_options(layers[1]))


def _remove_last(config: TrainConfig) -> None:
    """Delete the last demo's files. Files of other runs stay, and make the new run end with an
    error."""
    for found in existing_outputs(config):
        if found.owner is not None and found.owner.name == config.name:
            for path in found.paths:
                with disk_errors(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _show(title: str, sampler: Sampler, tokenizer: Tokenizer) -> None:
    choice = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.6, seed=0)
    ids = prompt_ids(tokenizer, sampler.config, PROMPT)
    requests = choice.requests(sampler.config, [ids], 1, [tokenizer.eos_id])
    with sampler.texts(requests) as (new,):
        text = printable(PROMPT + "".join(streamed(tokenizer, ids, new)))
    print(f"\n--- {title}:\n{text}\n---\n", flush=True)
