"""Measure decoding: tokens per second for several numbers of texts, beside the floor.

    python tools/decode_speed.py --model Qwen2.5-0.5B --texts 1,16,64 [--device cuda] [--new 256]

The model is a preset with random weights. A row is the median of --repeats runs after a run that
warms up. In a run each text has a prompt of --prompt tokens and gets --new tokens; the time
includes the pass over the prompts. `floor` is the speed, in tokens per second, of a device that
only reads memory, at the rate at which the device copies 256 MiB. Each pass reads the weights that
it multiplies, and the keys and values of all texts when half the new tokens are there. With
--kv-dtype another line gives the mean difference of log-probabilities from a run with keys and
values in the model's format, over greedy texts up to the first token that differs. With --prompts N
a last line compares the speed of the pass over prompts of N tokens, for as many texts as in the
last row, with the forward pass of training over the same tokens. --exact: a text's bits depend on
no other text, as with this flag of `llmq sample`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq import __version__
from llmq.base.dtypes import MIB, U8, parse_dtype
from llmq.model.generator import Request
from llmq.model.inference import Scorer, placed_to_read
from llmq.options.presets import preset
from llmq.run.sampling import Sampler
from llmq.runtime.device import Device, MemorySizes
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.weights import Weights

COPIED, COPIES = 256 * MIB, 5
FEW = 4  # number of texts whose log-probabilities are compared
CODES = {"nf4": 33 / 64, "mxfp4": 17 / 32, "e4m3": 1, "int8": 1}  # bytes of a value, with scales


class Dtypes(NamedTuple):
    """Formats of the model (model), of the blocks' matrices (base), and of keys and values (kv);
    None: as the model. exact: True if a text's bits depend on no other text."""

    model: str
    base: str | None
    kv: str | None
    exact: bool


class Row(NamedTuple):
    """A row of the table. texts: number of texts at a time. tokens, least, most: median, minimum
    and maximum over runs, in tokens a second. floor: tokens a second, as in the module's
    docstring."""

    texts: int
    tokens: float
    least: float
    most: float
    floor: float

    def line(self, alone: float) -> str:
        """The row in Markdown. alone: tokens a second of the first row."""
        cells = [str(self.texts), f"{self.tokens:,.0f}", f"{self.least:,.0f}-{self.most:,.0f}"]
        cells += [f"{self.tokens / alone:.1f}", f"{self.floor:,.0f}"]
        cells.append(f"{self.tokens / self.floor:.1%}")
        return f"| {' | '.join(cells)} |"


def copy_rate(machine: Machine) -> float:
    """Rate at which the device copies: bytes read plus bytes written, per second."""
    dev: Device = machine.open(MemorySizes(device=2 * COPIED))
    try:
        one, two = (dev.alloc(name, (COPIED,), U8, "Activations") for name in ("from", "to"))
        dev.zero(one)
        times = []
        for _ in range(1 + COPIES):
            dev.synchronize()
            start = time.perf_counter()
            dev.copy(two, one)
            dev.synchronize()
            times.append(time.perf_counter() - start)
        return 2 * COPIED / min(times[1:])
    finally:
        dev.close()


def bytes_read(
    sampler: Sampler, base_dtype: str | None, kv_dtype: str | None, texts: int, length: float
) -> float:
    """Bytes that the device reads in one pass over `texts` texts of `length` tokens, if no two
    texts share an expert."""
    config, weights = sampler.config, sampler.generator.weights
    item = weights.placement["embed"].work.dtype.itemsize
    matrices = sum(
        min(prod(m.shape), m.used * texts) if m.of_experts else prod(m.shape)
        for layer in range(config.num_layers)
        for m in config.matrices(layer)
    )
    states, kept = 0, 0
    for layer in range(config.num_layers):
        for spec in config.halves(layer):
            for heads, channels in spec.cached.values():
                kept += heads * (channels * item if kv_dtype is None else channels + 2)
            states += sum(int(np.prod(shape)) * 8 for shape in spec.carried.values())
    head = config.padded_outputs * config.hidden_size * item
    return matrices * CODES.get(base_dtype, item) + head + texts * (kept * length + states)


def opened(machine: Machine, model: str, dtypes: Dtypes, texts: int, positions: int) -> Sampler:
    """A sampler of the preset, with random weights."""
    config = preset(model)
    form = (positions, parse_dtype(dtypes.model), texts, dtypes.base, dtypes.kv, dtypes.exact)
    return Sampler(machine, config, lambda w: w.init(config, 0), *form)


def requests_of(model: str, texts: int, prompt: int, new: int) -> list[Request]:
    rng, size = np.random.default_rng(0), preset(model).vocab_size
    ids = [rng.integers(0, size, prompt).tolist() for _ in range(texts)]
    return [Request(each, new, seed=i) for i, each in enumerate(ids)]


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` runs of `work`, after a run that warms up."""
    found = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def prompts_beside_forward(
    machine: Machine, model: str, dtypes: Dtypes, texts: int, length: int, repeats: int
) -> tuple[float, float]:
    """Tokens a second of the pass over the prompts of `texts` texts, with one new token each, and
    of the forward pass with losses over the same tokens."""
    requests, config = requests_of(model, texts, length, 1), preset(model)
    with opened(machine, model, dtypes, texts, length + 1) as sampler:
        generate = partial(deque, maxlen=0)
        prompts = seconds_of(lambda: generate(sampler.generator.stream(requests)), repeats)
    dtype, table, plan = parse_dtype(dtypes.model), weight_table(config), PlanDevice(machine.spec)
    placement = placed_to_read(config, table, dtype, dtypes.base)
    how = {"base_dtype": dtypes.base}
    Scorer(plan, config, Weights(plan, table, placement), **how).rehearse(texts, length)
    dev, ids = machine.open(plan.sizes()), np.array([r.prompt for r in requests], np.int32)
    try:
        weights = Weights(dev, table, placement)
        weights.init(config, 0)
        scorer = Scorer(dev, config, weights, **how)
        forward = seconds_of(lambda: scorer.score(ids, [ids]), repeats)
    finally:
        dev.close()
    return texts * length / prompts, texts * length / forward


def measure(
    machine: Machine,
    model: str,
    dtypes: Dtypes,
    texts: int,
    prompt: int,
    new: int,
    repeats: int,
) -> tuple[float, list[float]]:
    """The bytes that a pass reads on average, and tokens a second of each run."""
    requests = requests_of(model, texts, prompt, new)
    with opened(machine, model, dtypes, texts, prompt + new) as sampler:
        found = []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            count = sum(1 for _ in sampler.generator.stream(requests))
            found.append(count / (time.perf_counter() - start))
        return bytes_read(sampler, dtypes.base, dtypes.kv, texts, prompt + new / 2), found[1:]


def difference(machine: Machine, model: str, dtypes: Dtypes, prompt: int, new: int) -> float:
    """Mean absolute difference between log-probabilities with and without kv_dtype, over the equal
    first tokens of greedy texts."""
    requests = [r._replace(temperature=0) for r in requests_of(model, FEW, prompt, new)]
    found = []
    for each in (dtypes, dtypes._replace(kv=None)):
        with opened(machine, model, each, FEW, prompt + new) as sampler:
            found.append([made for _, made in sorted(sampler.generator.run(requests))])
    both = []
    for one, other in zip(*found, strict=True):
        equal = np.cumprod(np.equal(one.ids, other.ids)).astype(bool)
        both += np.abs(one.logprobs - other.logprobs)[equal].tolist()
    return statistics.mean(both)


def main(
    model: Annotated[str, typer.Option(help="A preset.")] = "tiny",
    texts: Annotated[str, typer.Option(help="At a time, one row for each number.")] = "1,16",
    device: str = "auto",
    model_dtype: str = "bf16",
    base_dtype: Annotated[str | None, typer.Option(help="Of the blocks' matrices.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of keys and values.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="As of llmq sample.")] = False,
    prompt: int = 16,
    new: int = 128,
    repeats: int = 5,
    prompts: Annotated[int, typer.Option(help="Tokens of prompts that are timed.")] = 0,
) -> None:
    """Measure decoding and print a table."""
    machine = choose_machine(device, 1)
    rate, rows = copy_rate(machine), []
    dtypes = Dtypes(model_dtype, base_dtype, kv_dtype, exact)
    for count in map(int, texts.split(",")):
        read, found = measure(machine, model, dtypes, count, prompt, new, repeats)
        speeds = (statistics.median(found), min(found), max(found))
        rows.append(Row(count, *speeds, count * rate / read))
    kept = base_dtype or model_dtype
    what = f"{model}, matrices in {kept}, {prompt} + {new} tokens"
    if kv_dtype is not None:
        what += f", keys and values in {kv_dtype}"
    what += ", exact" * exact
    print(f"llmq {__version__}, {machine.spec.name}, {what}")
    print(f"copies {rate / 1e9:.1f} GB/s\n")
    print("| texts | tokens/s | runs | x the first row | floor | of the floor |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.line(rows[0].tokens))
    if kv_dtype is not None:
        far = difference(machine, model, dtypes, prompt, new)
        print(f"\nmean |difference| of log-probabilities with {kv_dtype}: {far:.2g}")
    if prompts:
        sizes = (rows[-1].texts, prompts, repeats)
        one, other = prompts_beside_forward(machine, model, dtypes, *sizes)
        ratio = f"{one / other:.2f} x forward's {other:,.0f}"
        print(f"\nprompts of {prompts}: {one:,.0f} tokens/s, {ratio}")


if __name__ == "__main__":
    typer.run(main)
