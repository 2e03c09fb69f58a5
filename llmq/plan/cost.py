"""How long an optimizer step takes: its trace on the plan device, replayed at a card's rates.

Work on one stream runs in order. Streams run beside each other, held back by the events between
them and by what carries one transfer at a time: the bus in each direction, the link to peers, and
each GPU's share of the host's memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmq.base.dtypes import F32
from llmq.config.cards import Card
from llmq.ops.attention import MAX_HEAD_DIM
from llmq.plan.measured import exposed, half_wave, measured
from llmq.plan.plan import Plan
from llmq.plan.rig_links import RigLinks
from llmq.plan.small_grids import small_grids
from llmq.runtime.device import Event
from llmq.runtime.launch_kind import FUSED, attention_window, fused_product, launch_kind, more_work
from llmq.runtime.plan_device import Trace, Work

# Files of matrix products.
PRODUCTS = ("matmul", "matmul_int8.cu", *(f"{entry}.cu" for entry in FUSED))
PARTS = ("blocks", "head", "attention", "memory_bound", "transfers", "optimizer")

# From benchmarks/h100_ops.txt, benchmarks/peers.json and the products tuned for an H100.
COPY_SHARE = 0.88  # of the sheet's bandwidth, in kernels that are bound by it
LAUNCH = 5e-6  # seconds that a launch takes beside its bytes or FLOPs: filling and draining the GPU
# Of one direction's rate, what both have together: 75 of 55 GB/s (docs/decisions.md, offload).
BOTH_WAYS = 1.36
# Exchanges through the host, by whether NCCL makes them: of one direction's rate of the bus, what
# they reach in both at once (two H200), and bytes per second that host memory gives and takes, of
# all GPUs and directions together (four). Plain copies of four H200 pass 134 to 180 GB/s; one alone
# 55 in a direction (benchmarks/h200_x4_staged.md, h200_x4_bus.txt).
HOST_SHARE = {True: 0.43, False: 0.53}
HOST_MEMORY = {True: 185e9, False: 160e9}
FAST_ACCUMULATION = {90: 1.12}  # by capability: speed of fp8 products that may sum with fewer bits
# Of the part of the peak that bf16 products reach, what products of signed bytes do: they use the
# tensor cores as Ampere has them, which are a part of Hopper's and later servers'. Hopper's is from
# benchmarks/h100_int8.md; the others are not measured.
INT8_SHARE = {90: 0.43, 100: 0.25}
INT8_SHARE_ELSEWHERE = 0.8

F32_RATE = 0.3e12  # FLOP/s of a multiprocessor without tensor cores, not measured
SOFTMAX = 100 / (989.4 / 132)  # channels per bf16 TFLOP/s of a multiprocessor


class Attention(NamedTuple):
    """How fast a kernel of attention is.

    rate: of what it computes. causal: so many positions a query costs beside those that it sees, at
    the diagonal, where scores are computed for nothing, and at the start of its block. edge: as
    many where a window begins; None: all that the window hides is computed.
    """

    rate: float
    causal: int
    edge: int | None

    def computed(self, seq_len: int, window: float) -> float:
        """Twice the pairs of query and key that are computed, or what takes as long."""
        edge = seq_len - window if self.edge is None else self.edge  # T^2 is all
        return _seen(seq_len, window) + self.causal * seq_len + edge * (seq_len - window)


def _seen(seq_len: int, window: float) -> float:
    """Twice the pairs of query and key, as FLOPs go."""
    return window * (2 * seq_len - window)


# The library's (deterministic backward). Their rate is the part of the bf16 peak that they would
# reach with infinite head size: the softmax of a score costs as much as SOFTMAX further channels,
# on an H100. It is not done by tensor cores, of which other cards have less. Edges are from
# benchmarks/h100_attention.txt, as is all of ours.
CUDNN_ATTENTION = {
    "attention_forward": Attention(1.2, 416, 230),
    "attention_backward": Attention(0.89, 725, None),
}
# Ours, by the largest head size: FLOP/s of a multiprocessor. Others than 64 and 128 have not been
# measured.
NATIVE_ATTENTION = {
    "attention_forward": {
        64: Attention(1.86e12, 370, 140),
        MAX_HEAD_DIM: Attention(2.45e12, 415, 140),
    },
    "attention_backward_tiles": {
        64: Attention(3.44e12, 423, 256),
        MAX_HEAD_DIM: Attention(2.35e12, 160, 67),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One replayed trace, in seconds. busy: of the main stream by part. wall: until all is done."""

    busy: dict[str, float]
    wall: float


class Network(NamedTuple):
    """What joins machines of as many GPUs each. rate: bytes per second that one of them sends, and
    receives at the same time."""

    machines: int = 1
    rate: float = math.inf


ONE_MACHINE = Network()


class Rates:
    """What a card takes for each piece of work."""

    def __init__(
        self,
        card: Card,
        gpus: int = 1,
        *,
        nccl: bool = False,
        peer_access: bool = True,
        visible_share: float = 1.0,
        network: Network = ONE_MACHINE,
    ):
        """gpus: how many of this card share the host's memory. nccl: whether it exchanges.

        peer_access: whether GPUs may reach each other's memory. visible_share: what documents leave
        of the causal pairs of query and key. What is measured of the card counts, else its sheet.
        """
        card = card if peer_access else replace(card, link=0.0)
        self.card, self._visible, self._network = card, visible_share, network
        bf16, fp8 = card.sustained
        self._products = {"matmul": 1e12 * bf16 * card.bf16, "matmul_fp8": 1e12 * fp8 * card.fp8}
        int8 = bf16 * INT8_SHARE.get(card.capability, INT8_SHARE_ELSEWHERE)
        self._products["matmul_int8"] = 1e12 * int8 * card.int8
        if card.fp8 == 0:  # which the CPU is taken for, and that has fp8 products
            self._products["matmul_fp8"] = self._products["matmul"]
        self._memory = COPY_SHARE * 1e9 * card.bandwidth
        self._bus, self._link = 1e9 * card.bus, 1e9 * card.link
        self._host = HOST_MEMORY[nccl] / gpus
        self._staged = HOST_SHARE[nccl] * self._bus
        self._transfers: dict[tuple, tuple[dict[str, float], float]] = {}
        self._launches = self._links = None
        self._slowest = 1.0  # of one GPU's speed, where all of them work
        if card.measured is not None:
            self._launches = measured(card.measured)
            self._slowest = card.measured.slowest if gpus > 1 else 1.0
            how = {"nccl": nccl, "peer_access": peer_access, "at_once": card.link == math.inf}
            self._links = RigLinks(card.measured, gpus, **how)

    @property
    def slowdown(self) -> float:
        """How many times as long kernels take while GPUs exchange data beside them."""
        return 1.0 if self._links is None else self._links.slowdown

    def compute(self, work: Work) -> float:
        """Seconds that one piece of work takes on the GPU itself."""
        if self._launches is not None:
            seconds = self._as_measured(work)
            if seconds is not None:
                return seconds / self._slowest
        memory = work.device_bytes / self._memory
        if work.file in PRODUCTS and work.flops:
            more = more_work(work.entry, work.args, work.device_bytes)
            memory -= more.nbytes / self._memory
            return LAUNCH + self._product(work, memory) + exposed(more) / self._memory
        if work.file.startswith("attention") and work.flops:
            return LAUNCH + max(self._attention(work), memory)
        return LAUNCH + memory

    def _as_measured(self, work: Work) -> float | None:
        """None where nothing like it was measured."""
        kind = launch_kind(work.file, work.entry, work.args, work.flops, work.device_bytes)
        if not (work.file.startswith("attention") and work.flops):
            more = more_work(work.entry, work.args, work.device_bytes)
            return self._launches.seconds(kind, work.flops, work.device_bytes, more)
        x = work.args[0]
        if x.dtype == F32:
            return None
        found = self._launches.nearest(kind)
        if found is None:
            return None
        sizes, seconds = found
        kernel = (work.file, work.entry)
        ratio = self._attention_of(*kernel, *kind.sizes, self._visible)
        ratio *= self._small_grids(work)
        return seconds * ratio / self._attention_of(*kernel, *sizes)

    def transfers(self, work: Work) -> tuple[dict[str, float], float]:
        """Seconds on the bus towards the card, on the bus away from it, on the link, of host memory
        and on the network, by name and without those that it does not need; and seconds of a bus
        that is busy both ways.
        """
        sizes = (work.loaded, work.stored, work.received, work.shared, work.sent, work.network)
        key = (work.entry, *sizes) if work.received else sizes
        if key not in self._transfers:  # pieces of transfers are all alike
            carried = None if self._links is None else self._links.carried(work)
            carriers, both_ways = carried or self._carried(*sizes[:5])
            if work.network:
                carriers |= {"network": work.network / self._network.rate}
            self._transfers[key] = carriers, both_ways
        return self._transfers[key]

    def _carried(
        self, loaded: int, stored: int, received: int, shared: int, sent: int
    ) -> tuple[dict[str, float], float]:
        if self._link:
            link = (received + shared) / self._link
            staged_in = staged_out = 0
        else:
            link, loaded = 0.0, loaded + shared
            staged_in, staged_out = received, sent
        load = loaded / self._bus + staged_in / self._staged
        store = stored / self._bus + staged_out / self._staged
        host = 0.0
        if self._host < BOTH_WAYS * self._bus:
            host = (loaded + stored + staged_in + staged_out) / self._host
        carriers = {"load": load, "store": store, "link": link, "host": host}
        both_ways = (loaded + stored) / self._bus / BOTH_WAYS
        both_ways += max(staged_in, staged_out) / self._staged
        return {name: seconds for name, seconds in carriers.items() if seconds}, both_ways

    def _product(self, work: Work, memory: float) -> float:
        if work.entry in FUSED:
            entry, (a, _), (*_, depth), fast = fused_product(work.entry, work.args)
        else:
            out, a = work.args[:2]
            entry, depth = work.entry, work.flops // (2 * out.size)
            fast = bool(work.args[-1])  # whether it may accumulate fast
        rate = self._products[entry]
        if entry == "matmul_fp8" and fast:
            rate *= FAST_ACCUMULATION.get(self.card.capability, 1)
        if a.dtype == F32:
            rate = F32_RATE * self.card.num_sms
        last_wave = half_wave(depth, self.card.num_sms) / rate
        return max(work.flops / rate, memory) + last_wave

    def _attention(self, work: Work) -> float:
        x = work.args[0]  # (B, T, heads, head_dim)
        if x.dtype == F32:
            return work.flops / (F32_RATE * self.card.num_sms)
        window = attention_window(work.file, work.entry, work.args)
        sizes = (work.flops, x.shape[1], x.shape[3], window)
        seconds = self._attention_of(work.file, work.entry, *sizes, self._visible)
        return seconds * self._small_grids(work)

    def _small_grids(self, work: Work) -> float:
        beside = CUDNN_ATTENTION["attention_backward"].causal
        return small_grids(work, self.card.num_sms, beside)

    def _attention_of(
        self,
        file: str,
        entry: str,
        flops: int,
        seq_len: int,
        head_dim: int,
        window: int,
        visible: float = 1.0,
    ) -> float:
        """Of a kernel in BF16, by its sizes; flops: of what the window leaves."""
        narrow = window
        if file == "attention":
            kernel = CUDNN_ATTENTION[entry]
            softmax = SOFTMAX * self.card.bf16 / self.card.num_sms
            rate = kernel.rate * 1e12 * self.card.bf16 / (1 + softmax / head_dim)
        else:
            sizes = NATIVE_ATTENTION[entry]
            kernel = next(sizes[size] for size in sizes if head_dim <= size)
            rate = min(kernel.rate * self.card.num_sms, self._products["matmul"])
            # Documents take as long as a window that hides as much.
            narrow = min(window, seq_len * (1 - math.sqrt(1 - visible)))
        return flops / _seen(seq_len, window) * kernel.computed(seq_len, narrow) / rate


def replay(trace: Trace, rates: Rates) -> Phase:
    """Run a trace from an idle machine until all of its streams are done.

    That both directions share the bus is taken into account for the whole, not at each moment. A
    kernel beside those of the main stream takes from them what it needs itself.
    """
    streams: defaultdict[str, float] = defaultdict(float)
    carriers: defaultdict[str, float] = defaultdict(float)
    recorded: dict[Event, float] = {}
    busy: defaultdict[str, float] = defaultdict(float)
    exchanges, kernels = _Beside(rates.slowdown), _Beside(2.0)
    bus = 0.0
    for item in trace:
        stream = item.stream
        if not isinstance(item, Work):
            if item.wait:
                streams[stream] = max(streams[stream], recorded.get(item.event, 0.0))
            else:
                recorded[item.event] = streams[stream]
            continue
        start, seconds = streams[stream], rates.compute(item)
        if stream == "main":
            seconds += exchanges.delay(start, seconds) + kernels.delay(start, seconds)
        lasts = seconds
        # Most move nothing, and it takes time.
        if item.loaded or item.stored or item.received or item.shared or item.network:
            transfers, both_ways = rates.transfers(item)
            bus += both_ways
            for name in transfers:
                start = max(start, carriers[name])
            for name, duration in transfers.items():
                carriers[name] = start + duration
                lasts = max(lasts, duration)
            if item.received:
                exchanges.note(start, start + lasts)
        if stream != "main" and item.file:
            kernels.note(start, start + seconds)
        streams[stream] = start + lasts
        if stream == "main":
            busy[_part(item)] += seconds
    return Phase(busy=dict(busy), wall=max(bus, *streams.values(), 0.0))


class _Beside:
    """When something takes memory's rate and multiprocessors from the kernels of the main stream:
    exchanges of GPUs, or other kernels."""

    def __init__(self, slowdown: float):
        """slowdown: how many times as long kernels take beside it."""
        self._more = slowdown - 1
        self._going_on: list[tuple[float, float]] = []

    def note(self, start: float, end: float) -> None:
        """One that was enqueued."""
        if self._more:
            self._going_on.append((start, end))

    def delay(self, start: float, seconds: float) -> float:
        """How much later a kernel ends that takes so long without them; ask in order of time."""
        self._going_on = [(s, e) for s, e in self._going_on if e > start]
        overlap = sum(max(min(e, start + seconds) - max(s, start), 0) for s, e in self._going_on)
        return self._more * min(overlap, seconds)


def _part(work: Work) -> str:
    if work.file in PRODUCTS:
        return "head" if work.part == "head" else "blocks"
    return "attention" if work.file.startswith("attention") else "memory_bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, by part.

    parts: "blocks" and "head", matrix products; "attention"; "memory_bound", kernels that memory
    limits; "transfers", how long micro-steps wait for other streams, or for host memory;
    "optimizer", all that follows the micro-steps.
    """

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def step_time(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> StepTime:
    """The time of a step. All streams meet between micro-steps, and before the update.

    visible_share: as Rates has it.
    """
    gpus = plan.world_size // network.machines
    how = {"nccl": plan.nccl, "peer_access": plan.peer_access, "visible_share": visible_share}
    return _step_time(plan, Rates(card, gpus, network=network, **how))


def exposed_seconds(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> float:
    """Of a step, how much longer it takes because GPUs and machines exchange data."""
    gpus = plan.world_size // network.machines
    how = {"nccl": plan.nccl, "visible_share": visible_share}
    at_once = _step_time(plan, Rates(replace(card, link=math.inf), gpus, **how))
    return step_time(plan, card, visible_share, network).total - at_once.total


def _step_time(plan: Plan, rates: Rates) -> StepTime:
    parts = dict.fromkeys(PARTS, 0.0)
    for trace, count in plan.micro_steps:
        phase = replay(trace, rates)
        for name, seconds in phase.busy.items():
            parts[name] += count * seconds
        parts["transfers"] += count * max(phase.wall - sum(phase.busy.values()), 0.0)
    parts["optimizer"] = replay(plan.update, rates).wall
    return StepTime(parts=parts)
