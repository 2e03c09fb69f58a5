#!/usr/bin/env python3
"""Compare decoding by llmq and by transformers: tokens per second of both on one device.

    PYTHONPATH=. tools/generate_beside.py --model Qwen2.5-0.5B --texts 1,16,64 [--new 256]

A process of its own makes transformers' model of the preset with random weights, and saves the
model; llmq then reads the same safetensors. Both continue the same prompts of random ids by the
likeliest tokens, and every text gets --new tokens. transformers uses a static cache, and its
forward is compiled by torch.compile with CUDA graphs (mode reduce-overhead); --compile none leaves
the compilation out, which the CPU needs. A speed is the median of --repeats runs after --warm-ups
runs, and includes the pass over the prompts. `equal` is the fraction of texts whose first new token
is the same on both sides: random weights in bf16 have near ties.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq import __version__
from llmq.base.dtypes import parse_dtype
from llmq.checkpoint.hf import HfWeights
from llmq.model.generator import Request
from llmq.options.presets import preset, resolve_model
from llmq.run.sampling import Sampler
from llmq.runtime.machine import choose_machine


class Job(NamedTuple):
    """The work of both sides. document: content of config.json. folder: the model's folder. texts:
    numbers of texts at a time, one for each row. prompt, new: tokens of a prompt, and new tokens of
    a text. dtype: "bf16" or "fp32". compiled: mode of torch.compile for transformers, or "none"."""

    document: dict[str, Any]
    folder: str
    texts: list[int]
    prompt: int
    new: int
    warm_ups: int
    repeats: int
    dtype: str
    device: str
    compiled: str

    def prompts(self, count: int) -> np.ndarray:
        """Random token ids of `count` prompts, int64 (count, prompt)."""
        rng = np.random.default_rng(count)
        return rng.integers(0, self.document["vocab_size"], (count, self.prompt))


class Found(NamedTuple):
    """Result of one number of texts. speed: new tokens a second. first: first new id of each
    text."""

    speed: float
    first: list[int]


def timed(job: Job, count: int, generate: Callable[[], list[int]]) -> Found:
    """Time runs of `generate`, which continues `count` texts and returns their first new ids."""
    seconds = []
    for _ in range(job.warm_ups + job.repeats):
        start = time.perf_counter()
        first = generate()
        seconds.append(time.perf_counter() - start)
    return Found(count * job.new / statistics.median(seconds[job.warm_ups :]), first)


def transformers_side(job: Job) -> tuple[str, list[Found]]:
    """Save the model, and time transformers; return its version and a result for each number of
    texts."""
    import torch
    import transformers

    torch.manual_seed(0)
    document = dict(job.document)
    config = transformers.AutoConfig.for_model(document.pop("model_type"), **document)
    dtype = torch.bfloat16 if job.dtype == "bf16" else torch.float32
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.save_pretrained(job.folder)
    how: dict[str, Any] = {"do_sample": False, "cache_implementation": "static"}
    how |= {"max_new_tokens": job.new, "min_new_tokens": job.new, "pad_token_id": 0}
    if hasattr(model.generation_config, "disable_compile"):
        how["disable_compile"] = True  # torch.compile below replaces transformers' own
    if job.compiled != "none":
        model.forward = torch.compile(model.forward, mode=job.compiled, fullgraph=True)

    def run(ids: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert made.shape[1] == job.prompt + job.new
        return made[:, job.prompt].tolist()

    found = []
    for count in job.texts:
        ids = torch.from_numpy(job.prompts(count)).to(job.device)
        found.append(timed(job, count, lambda ids=ids: run(ids)))
    return f"transformers {transformers.__version__}, torch {torch.__version__}", found


def llmq_side(job: Job) -> list[Found]:
    config, folder = resolve_model(job.folder, from_scratch=False)
    machine, found = choose_machine(job.device, 1), []
    with HfWeights(folder) as weights:
        for count in job.texts:
            form = (job.prompt + job.new, parse_dtype(job.dtype), count)
            requests = [Request(ids, job.new, temperature=0) for ids in job.prompts(count).tolist()]

            def run(sampler: Sampler, requests: list[Request] = requests) -> list[int]:
                made = sorted(sampler.generator.run(requests))
                assert all(len(each.ids) == job.new for _, each in made)
                return [each.ids[0] for _, each in made]

            with Sampler(machine, config, lambda w: w.load(weights.read), *form) as sampler:
                found.append(timed(job, count, lambda sampler=sampler: run(sampler)))
    return found


def apart(side: Callable[[Job], Any], job: Job) -> Any:
    """Run a side in a process of its own, whose end frees the device's memory; return the side's
    result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(side, job).result()


def main(
    model: Annotated[str, typer.Option(help="A preset.")] = "tiny",
    texts: Annotated[str, typer.Option(help="At a time, one row for each number.")] = "1,16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    model_dtype: str = "bf16",
    compiled: Annotated[
        str, typer.Option("--compile", help="Mode of torch.compile, or none.")
    ] = "reduce-overhead",
    prompt: int = 16,
    new: int = 128,
    warm_ups: int = 2,
    repeats: int = 3,
) -> None:
    """Measure both sides and print a table."""
    counts = [int(count) for count in texts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        sizes = (prompt, new, warm_ups, repeats)
        job = Job(preset(model).to_hf(), folder, counts, *sizes, model_dtype, device, compiled)
        versions, theirs = apart(transformers_side, job)
        ours = llmq_side(job)
    name = choose_machine(device, 1).spec.name
    print(f"{versions}, llmq {__version__}, {name}")
    print(f"{model}, {model_dtype}, {prompt} + {new} tokens, torch.compile {compiled}\n")
    print("| texts | llmq, tokens/s | transformers | x | equal |")
    print("| --- | --- | --- | --- | --- |")
    for count, one, other in zip(counts, ours, theirs, strict=True):
        equal = np.mean(np.equal(one.first, other.first))
        ratio = one.speed / other.speed
        print(f"| {count} | {one.speed:,.0f} | {other.speed:,.0f} | {ratio:.2f} | {equal:.0%} |")


if __name__ == "__main__":
    typer.run(main)
