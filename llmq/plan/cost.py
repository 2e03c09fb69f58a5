"""How long an optimizer step takes: its trace on the plan device, replayed at a card's rates."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmq.ops.attention.attention import MAX_HEAD_DIM
from llmq.options.cards import Card
from llmq.plan.measured import More, RigLinks, exposed, half_wave, measured
from llmq.plan.plan import Plan
from llmq.plan.replay import Transfers, replay
from llmq.runtime.attention_parts import head_groups
from llmq.runtime.cost import Cost
from llmq.runtime.plan_device import Work

# Constants of cuDNN 9.19 on an H100; what they give is within 10 % of what
# tests/plan/test_small_grids.py has.
KEY_BLOCK = 128
LAST_BLOCKS = 0.22  # units that a call waits for its last ones, in the mean


def small_grids(cost: Cost, num_sms: int, beside: int) -> float:
    """How many times as long the library's backward of attention takes where its heads are in
    parts; 1 for all else.

    A block of its kernel computes the gradients of KEY_BLOCK keys of a head, and walks over all
    queries from there on; the blocks of a head go from the longest to the shortest. Every
    multiprocessor has one at a time. A short one follows a long one, so that a multiprocessor
    computes two of them in the time of the longest, which is the unit here: a call takes a whole
    number of units, and waits for the last of its blocks. In one call for all heads the next ones
    fill what one leaves idle.

    beside: so many positions a query costs beside those that it sees, undivided.
    """
    if cost.heads is None or cost.heads.parts == 1:
        return 1.0
    batch, num_heads, num_kv_heads, parts = cost.heads
    seq_len = cost.kind.sizes[1]
    head = batch * seq_len / (2 * KEY_BLOCK * num_sms)  # units of work in a head
    groups = head_groups(num_heads, num_kv_heads, parts)
    divided = sum(math.ceil(head * group.count) + LAST_BLOCKS for group in groups)
    return max(divided / (head * num_heads * (1 + beside / seq_len)), 1.0)


PARTS = ("blocks", "head", "attention", "memory_bound", "transfers", "optimizer")

# From h100_ops.txt and peers.json in benchmarks/, and from the products tuned for an H100.
COPY_SHARE = 0.88  # of the sheet's bandwidth, in kernels that are bound by it
LAUNCH = 5e-6  # seconds that a launch takes beside its bytes or FLOPs: filling and draining the GPU
# On multiprocessors with 100 KB of shared memory (GeForce, workstations): the library's tiles are
# half as large as on an H100, and at 2.5 GHz instead of 1.5 a card is filled and drained sooner.
# Both follow from llm.q's published speeds (published.md).
SMALL, SMALL_TILES, SMALL_LAUNCH = (86, 89, 120, 121), 0.5, 3e-6
# Both directions together have so many times one direction's rate: 48 of 55 GB/s each
# (h200_x4_bus.txt).
BOTH_WAYS = 1.74
# Kernels that work in host memory themselves reach so much of a copy's rate, by whether they write
# there (h200_bus.txt).
KERNEL_SHARE = {False: 0.94, True: 0.87}
# Exchanges through the host, by whether NCCL makes them: of one direction's rate of the bus, what
# they reach in both at once (two H200), and bytes per second that host memory gives and takes, of
# all GPUs and directions together (four). Plain copies of four H200 pass 134 to 180 GB/s; one alone
# 55 in a direction (h200_x4_staged.md, h200_x4_bus.txt).
HOST_SHARE = {True: 0.43, False: 0.53}
HOST_MEMORY = {True: 185e9, False: 160e9}
FAST_ACCUMULATION = {90: 1.12}  # by capability: speed of fp8 products that may sum with fewer bits
# Products of signed bytes reach this part of the share of the peak that bf16 products reach: they
# use the tensor cores as Ampere has them, which are a part of Hopper's and later servers'. Hopper's
# is from h100_int8.md; the others are not measured.
INT8_SHARE = {90: 0.43, 100: 0.25}
INT8_SHARE_ELSEWHERE = 0.8
# GeForce's tensor cores add products of fp8 codes in half precision at twice the rate of F32.
# Kernels of others on Ada are 1 to 1.72 times as fast; ours has run on none.
HALF_SUMS = 1.5

# Products of rows that are sorted by expert reach this part of a dense one's rate, the mean of
# h200_grouped.md: an expert's rows do not fill all tiles, and its sums are short.
GROUPED_SHARE = 0.88

F32_RATE = 0.3e12  # FLOP/s of a multiprocessor without tensor cores, not measured
SOFTMAX = 100 / (989.4 / 132)  # channels per bf16 TFLOP/s of a multiprocessor


class Attention(NamedTuple):
    """How fast a kernel of attention is. rate: of what it computes. causal: so many positions a
    query costs beside those that it sees, at the diagonal, where scores are computed for nothing,
    and at the start of its block. edge: as many where a window begins; None: all that the window
    hides is computed."""

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
# h100_attention.txt, as is all of ours.
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
    # On Hopper, from h100_attention_backward.txt; it has no windows.
    "attention_gradient": {
        64: Attention(4.05e12, 129, None),
        MAX_HEAD_DIM: Attention(4.84e12, 125, None),
    },
}


class Delta(NamedTuple):
    """How fast a kernel of the delta rule is. rate: FLOP/s of a multiprocessor that has enough
    blocks. turn: seconds that a chunk takes from the one before, at least; 0 where chunks do not
    wait for each other."""

    rate: float
    turn: float = 0.0


# They are those of heads of 128, of one sequence of 4,096 tokens and of four: of scans with sm90 on
# an H200, of the others on an H100 (h100_delta_kernels.md). Other cards and sizes are taken to be
# as fast.
DELTA_RULE = {
    "delta_rule_prepare": Delta(1.0e12),
    "delta_rule_scan": Delta(1.35e12, 3.6e-6),
    "delta_rule_states": Delta(0.78e12, 2.4e-6),
    "delta_rule_scan_backward": Delta(1.08e12, 3.8e-6),
    "delta_rule_gradients": Delta(1.35e12),
    "delta_rule_scan_sm90": Delta(2.97e12, 1.05e-6),
    "delta_rule_states_sm90": Delta(1.29e12, 0.92e-6),
    "delta_rule_scan_backward_sm90": Delta(2.0e12, 1.22e-6),
}
CHUNK = 64  # tokens


class Network(NamedTuple):
    """The network that joins machines of as many GPUs each. rate: bytes per second that one of them
    sends, and receives at the same time."""

    machines: int = 1
    rate: float = math.inf


ONE_MACHINE = Network()


class Rates:
    """The times that a card takes for each piece of work."""

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
        of the causal pairs of query and key. Measurements of the card count, else its sheet."""
        card = card if peer_access else replace(card, link=0.0)
        self.card, self._visible, self._network = card, visible_share, network
        bf16, fp8 = card.sustained
        self._products = {"matmul": 1e12 * bf16 * card.bf16, "matmul_fp8": 1e12 * fp8 * card.fp8}
        int8 = bf16 * INT8_SHARE.get(card.capability, INT8_SHARE_ELSEWHERE)
        self._products["matmul_int8"] = 1e12 * int8 * card.int8
        self._products["f32"] = F32_RATE * card.num_sms
        half = HALF_SUMS if card.sums_slowly else 1.0
        self._products["matmul_fp8_half"] = half * self._products["matmul_fp8"]
        if card.fp8 == 0:  # which the CPU is taken for, and that has fp8 products
            self._products["matmul_fp8"] = self._products["matmul"]
        self._memory = COPY_SHARE * 1e9 * card.bandwidth
        small = card.capability in SMALL
        self._launch, self._tiles = (SMALL_LAUNCH, SMALL_TILES) if small else (LAUNCH, 1.0)
        self._bus, self._link = 1e9 * card.bus, 1e9 * card.link
        self._host = HOST_MEMORY[nccl] / gpus
        self._staged = HOST_SHARE[nccl] * self._bus
        self._transfers: dict[tuple, Transfers] = {}
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
        cost, memory = work.cost, work.device_bytes / self._memory
        if not cost.rate:
            return self._launch + memory
        if cost.part == "attention":
            return self._launch + max(self._attention(cost), memory)
        more = More.of(cost, work.device_bytes)
        memory -= more.nbytes / self._memory
        return self._launch + self._product(cost, memory) + exposed(more) / self._memory

    def _as_measured(self, work: Work) -> float | None:
        """None where nothing like it was measured."""
        cost, kind = work.cost, work.kind
        if not (cost.part == "attention" and cost.rate):
            more = More.of(cost, work.device_bytes)
            return self._launches.seconds(kind, cost.flops, work.device_bytes, more)
        if cost.rate == "f32":
            return None
        found = self._launches.nearest(kind)
        if found is None:
            return None
        sizes, seconds = found
        ratio = self._attention_of(cost.rate, *kind.sizes, self._visible)
        ratio *= self._small_grids(cost)
        return seconds * ratio / self._attention_of(cost.rate, *sizes)

    @property
    def both_ways(self) -> tuple[float, float]:
        """How many times as long a transfer to the card, and one from it, takes while the bus
        carries another one the other way."""
        known = None if self._links is None else self._links.both_ways
        return known or (2 / BOTH_WAYS, 2 / BOTH_WAYS)

    @property
    def beside_exchanges(self) -> tuple[float, float]:
        """The same, while GPUs exchange data through the host; HOST_SHARE is of runs that load
        beside that."""
        return (1.0, 1.0) if self._links is None else self._links.beside_exchanges

    def transfers(self, work: Work) -> Transfers:
        """How long each carrier is busy with a piece of work."""
        sizes = (work.loaded, work.stored, work.received, work.shared, work.sent, work.network)
        kernel = bool(work.file)
        key = (work.entry, *sizes) if work.received else (kernel, *sizes)
        if key not in self._transfers:  # pieces of transfers are all alike
            carried = None if self._links is None else self._links.carried(work)
            share = KERNEL_SHARE[bool(work.stored)] if kernel else 1.0
            found = carried or self._carried(*sizes[:5], share)
            if work.network:
                found.carriers["network"] = work.network / self._network.rate
            self._transfers[key] = found
        return self._transfers[key]

    def _carried(
        self, loaded: int, stored: int, received: int, shared: int, sent: int, share: float
    ) -> Transfers:
        if self._link:
            link = (received + shared) / self._link
            staged_in = staged_out = 0
        else:
            link, loaded = 0.0, loaded + shared
            staged_in, staged_out = received, sent
        load, store = (size / (share * self._bus) for size in (loaded, stored))
        host = 0.0
        if self._host < BOTH_WAYS * self._bus:
            host = (loaded + stored + staged_in + staged_out) / self._host
        exchange = (staged_in / self._staged, staged_out / self._staged)
        return Transfers.of(load, store, exchange, link=link, host=host)

    def _product(self, cost: Cost, memory: float) -> float:
        rate = self._products[cost.rate]
        if cost.rate == "matmul_fp8" and cost.fast:
            rate *= FAST_ACCUMULATION.get(self.card.capability, 1)
        if cost.kind.name.endswith("/grouped"):
            rate *= GROUPED_SHARE
        depth = cost.kind.sizes[2]
        last_wave = self._tiles * half_wave(depth, self.card.num_sms) / rate
        return max(cost.flops / rate, memory) + last_wave

    def _attention(self, cost: Cost) -> float:
        if cost.rate == "f32":
            return cost.flops / self._products["f32"]
        seconds = self._attention_of(cost.rate, *cost.kind.sizes, self._visible)
        return seconds * self._small_grids(cost)

    def _small_grids(self, cost: Cost) -> float:
        beside = CUDNN_ATTENTION["attention_backward"].causal
        return small_grids(cost, self.card.num_sms, beside)

    def _attention_of(
        self,
        way: str,
        flops: int,
        seq_len: int,
        head_dim: int,
        window: int,
        visible: float = 1.0,
    ) -> float:
        """Seconds of a kernel in BF16, by the sizes of its cost; way: the rate of that. flops: of
        what the window leaves."""
        narrow = window
        entry, _, where = way.partition("/")
        if where == "delta":
            delta = DELTA_RULE[entry]
            rate = min(delta.rate * self.card.num_sms, self._products["matmul"])
            return max(flops / rate, math.ceil(seq_len / CHUNK) * delta.turn)
        if where == "library" and entry in CUDNN_ATTENTION:
            kernel = CUDNN_ATTENTION[entry]
            softmax = SOFTMAX * self.card.bf16 / self.card.num_sms
            rate = kernel.rate * 1e12 * self.card.bf16 / (1 + softmax / head_dim)
        else:
            sizes = NATIVE_ATTENTION[entry]
            kernel = sizes[min((s for s in sizes if head_dim <= s), default=max(sizes))]
            rate = min(kernel.rate * self.card.num_sms, self._products["matmul"])
            # Documents take as long as a window that hides as much.
            narrow = min(window, seq_len * (1 - math.sqrt(1 - visible)))
        return flops / _seen(seq_len, window) * kernel.computed(seq_len, narrow) / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, by part. parts: "blocks" and "head", matrix
    products; "attention"; "memory_bound", kernels that memory limits; "transfers", how long
    micro-steps wait for other streams, or for host memory; "optimizer", all that follows the
    micro-steps."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def step_time(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> StepTime:
    """The time of a step. All streams meet between micro-steps, and before the update.
    visible_share: as Rates has it."""
    return _step_time(plan, _rates(plan, card, visible_share, network))


def _rates(plan: Plan, card: Card, visible_share: float, network: Network) -> Rates:
    gpus = plan.world_size // network.machines
    how = {"nccl": plan.nccl, "peer_access": plan.peer_access, "visible_share": visible_share}
    return Rates(card, gpus, network=network, **how)


class KindCost(NamedTuple):
    """The launches of one kind (`llmq.runtime.cost`) in an optimizer step of one rank. nbytes: read
    and written of the GPU's own memory, and moved to or from other memories. seconds: predicted, as
    if each launch ran alone; None where no card is known."""

    launches: int = 0
    flops: int = 0
    nbytes: int = 0
    seconds: float | None = None


def cost_by_kind(
    plan: Plan, card: Card | None, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> dict[str, KindCost]:
    """The cost of a step's launches, copies, fills and exchanges, by name of kind in order.
    Arguments are as step_time's."""
    rates = None if card is None else _rates(plan, card, visible_share, network)
    found: dict[str, KindCost] = {}
    for trace, count in (*plan.micro_steps, (plan.update, 1)):
        for work in (item for item in trace if isinstance(item, Work)):
            launches, flops, nbytes, seconds = found.get(work.kind.name, KindCost())
            moved = work.loaded + work.stored + work.received + work.shared
            if rates is not None:
                carriers = rates.transfers(work).carriers.values() if moved else ()
                seconds = (seconds or 0.0) + count * max(rates.compute(work), *carriers, 0.0)
            nbytes += count * (work.device_bytes + moved)
            flops += count * work.cost.flops
            found[work.kind.name] = KindCost(launches + count, flops, nbytes, seconds)
    return dict(sorted(found.items()))


def exposed_seconds(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> float:
    """The time by which a step is longer because GPUs and machines exchange data."""
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
