#!/usr/bin/env python3
"""Texts beside transformers: tokens per second of both on one device, from one command.

    PYTHONPATH=. tools/generate_beside.py --model Qwen2.5-0.5B --texts 1,16,64 [--new 256]

transformers makes a model of the preset with random weights, in a process of its own, and saves it;
llmq then reads the same safetensors. Both continue the same prompts of random ids by the likeliest
tokens, and no text ends before --new tokens. transformers has a static cache, and torch.compile of
its forward with CUDA graphs (mode reduce-overhead); --compile none leaves that out, as the CPU
needs. A number is the median of --repeats runs behind --warm-ups, from the first pass over a
prompt to the last token. `equal` is the part of texts whose first token is the same: random weights
in bf16 have near ties.
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
    """The work of both sides. document: config.json. texts: numbers of texts at a time. dtype: of
    --model-dtype. compiled: of transformers' side, a mode of torch.compile, or "none"."""

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
        """Ids (count, prompt)."""
        rng = np.random.default_rng(count)
        return rng.integers(0, self.document["vocab_size"], (count, self.prompt))


class Found(NamedTuple):
    """Tokens a second of so many texts, and the first new id of each."""

    speed: float
    first: list[int]


def timed(job: Job, count: int, generate: Callable[[], list[int]]) -> Found:
    """generate: one run, to its end; returns the first new ids."""
    seconds = []
    for _ in range(job.warm_ups + job.repeats):
        start = time.perf_counter()
        first = generate()
        seconds.append(time.perf_counter() - start)
    return Found(count * job.new / statistics.median(seconds[job.warm_ups :]), first)


def transformers_side(job: Job) -> tuple[str, list[Found]]:
    """The versions, and what transformers does; saves the model."""
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
        how["disable_compile"] = True  # what it would compile by itself is compiled here
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
    """A side in a process of its own, which then leaves the device."""
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
    """Print a table."""
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
