"""Steps whose launches were timed while other streams went on, as the oldest reports have them.

A launch that was enqueued behind a kernel of another stream waited for all of that kernel, and has
it in its time. A replay, which lets it wait for the same kernel, would count that twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmq.config.card_file import CardFile
from llmq.config.options_io import make_config
from llmq.config.rig_cards import card_of_file
from llmq.plan.cost import Rates
from llmq.plan.plan import make_plan
from llmq.rig.launches import Table
from llmq.runtime.device import DeviceSpec
from llmq.runtime.launch_kind import Kind, launch_kind
from llmq.runtime.plan_device import Work
from llmq.train.model_of_run import model_of_run

IN_TURN = "in_turn"  # beside a step's launches: whether those of all streams took turns


def waits(step: Mapping[str, Any], spec: DeviceSpec) -> bool:
    """Whether launches of this record of a step may have waited for kernels of other streams.

    spec: of the GPU.
    """
    if step.get(IN_TURN):
        return False
    return any(is_beside(work) for work, _ in works_of(step, spec))


def without_waits(step: Mapping[str, Any], file: CardFile) -> Table:
    """The launches of such a record, in seconds that they take by themselves.

    file: what is known without this record. Together the launches have waited for as long as the
    kernels of other streams take; each of them for a part of that by which it took longer than
    `file` says, the same part of all.
    """
    rates = Rates(card_of_file(file))
    alone: dict[Kind, float] = {}
    times: Counter[Kind] = Counter()
    beside = 0.0
    for work, count in works_of(step, file.spec()):
        if is_beside(work):
            beside += count * rates.compute(work)
        elif work.stream == "main":
            kind = launch_kind(work.file, work.entry, work.args, work.flops, work.device_bytes)
            times[kind] += count
            alone[kind] = rates.compute(work)
    longer: dict[Kind, float] = {}
    for name, points in step["launches"].items():
        for sizes, seconds in points:
            kind = Kind(name, tuple(sizes))
            longer[kind] = max(seconds - alone.get(kind, seconds), 0.0)
    total = sum(times[kind] * seconds for kind, seconds in longer.items())
    part = min(beside / total, 1.0) if total else 0.0
    return {
        name: [[s, seconds - part * longer[Kind(name, tuple(s))]] for s, seconds in points]
        for name, points in step["launches"].items()
    }


def works_of(step: Mapping[str, Any], spec: DeviceSpec) -> Iterator[tuple[Work, int]]:
    """All that such a step enqueues, and how often; attention as it was then, the library's."""
    config = make_config(step["options"])
    model, _ = model_of_run(config)
    plan = make_plan(config, model, spec, "cudnn", 1)
    for trace, count in [*plan.micro_steps, (plan.update, 1)]:
        for item in trace:
            if isinstance(item, Work):
                yield item, count


def is_beside(work: Work) -> bool:
    """Whether it is a kernel of another stream that reads and writes no host memory."""
    return work.stream != "main" and bool(work.file) and not (work.loaded or work.stored)
