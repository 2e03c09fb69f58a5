"""Where a step's time goes on a GPU: whole steps, then every kernel of one step by itself.

    python tools/profile_step.py --model Qwen2.5-0.5B --batch-size 32 [more options of llmq train]

Prints tokens per second over --measure steps with graphs, then, from one step without graphs, per
entry point: launches, total time, share, and the achieved rate (GB/s from the declared traffic,
TFLOP/s where the launch states its FLOPs).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import numpy as np

from llmq.options_io import make_config
from llmq.presets import resolve_model
from llmq.trainer import Trainer


def parse() -> tuple[argparse.Namespace, dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=int, default=5, help="steps that are timed")
    own, rest = parser.parse_known_args()
    options = {"from-scratch": True, "device": "cuda", "steps": 1000}
    names = [a.removeprefix("--") for a in rest if a.startswith("--")]
    for name in names:
        key, _, value = name.partition("=")
        if not value:
            after = rest[rest.index(f"--{name}") + 1 :]
            value = after[0] if after and not after[0].startswith("--") else True
        options[key] = value
    return own, options


def main() -> None:
    own, options = parse()
    config = make_config(options)
    model, directory = resolve_model(config.model, config.from_scratch)
    trainer = Trainer.from_config(config.validate_with(model), model, directory)
    trainer.load_weights()
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.seq_len)
    tokens = config.grad_accumulation * shape[0] * shape[1]
    batches = [
        tuple(rng.integers(0, model.vocab_size, shape).astype(np.int32) for _ in range(2))
        for _ in range(config.grad_accumulation)
    ]
    start = time.perf_counter()
    for _ in range(3):
        result = trainer.step(batches)
    print(f"3 warm-up steps: {time.perf_counter() - start:.1f} s, {result}", flush=True)
    dev = trainer.dev
    waits = dev.sync_calls
    dev.synchronize()
    start, busy = time.perf_counter(), 0.0
    for _ in range(own.measure):
        before = time.perf_counter()
        ticket = trainer.enqueue_step(batches)
        busy += time.perf_counter() - before
    last = trainer.result(ticket)
    seconds = (time.perf_counter() - start) / own.measure
    print(f"{tokens / seconds:,.0f} tok/s, {seconds * 1e3:.1f} ms a step, Python busy "
          f"{busy / own.measure / seconds:.1%}, waits {dev.sync_calls - waits}, {last}", flush=True)  # fmt: skip
    breakdown(trainer, batches)


def breakdown(trainer: Trainer, batches: list) -> None:
    """Time every launch of one eager step with events."""
    dev, api = trainer.dev, trainer.dev._runtime
    records = []
    launch, dev._use_graphs = dev.launch, False

    def timed(kernel, grid, block, args, *, flops=0, **rest):  # noqa: ANN001, ANN202
        events = api.eventCreate(), api.eventCreate()
        api.eventRecord(events[0], dev.stream)
        launch(kernel, grid, block, args, flops=flops, **rest)
        api.eventRecord(events[1], dev.stream)
        name = kernel.entry
        if kernel.file == "matmul":
            name = f"matmul {args[4]}x{args[5]}x{args[6]}" + ("+" if args[9] else "")
        records.append((name, events, kernel.traffic(args), flops))

    trainer.step(batches)
    dev.launch = timed
    trainer.step(batches)
    del dev.launch
    dev.synchronize()
    totals = defaultdict(lambda: [0, 0.0, 0, 0])
    for name, (first, last), traffic, flops in records:
        row = totals[name]
        row[0] += 1
        row[1] += api.eventElapsedTime(first, last)
        row[2] += traffic
        row[3] += flops
    total = sum(row[1] for row in totals.values())
    print(f"{'entry':44} {'calls':>6} {'ms':>9} {'share':>6} {'GB/s':>8} {'TFLOP/s':>8}")
    for name, (count, ms, traffic, flops) in sorted(totals.items(), key=lambda i: -i[1][1]):
        print(f"{name:44} {count:6d} {ms:9.3f} {ms / total:6.1%} {traffic / ms / 1e6:8.0f} "
              f"{flops / ms / 1e9:8.0f}")  # fmt: skip
    print(f"{'all kernels':44} {len(records):6d} {total:9.3f}")


if __name__ == "__main__":
    main()
