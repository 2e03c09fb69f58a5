"""Duration of an optimizer step: the plan device's trace, replayed at a card's rates."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import BF16
from llmq.ops.attention.attention import MAX_HEAD_DIM
from llmq.options.cards import Card
from llmq.options.options import TrainConfig
from llmq.plan.measured import More, RigLinks, exposed, half_wave, measured
from llmq.plan.plan import Generation, Plan
from llmq.plan.replay import Transfers, replay
from llmq.runtime.attention_parts import head_groups
from llmq.runtime.cost import Cost
from llmq.runtime.plan_device import Trace, Work

# Constants of cuDNN 9.19 on an H100; predictions are within 10 % of the times in
# tests/plan/test_small_grids.py.
KEY_BLOCK = 128
LAST_BLOCKS = 0.22  # mean wait of a call for its last blocks, in units (small_grids)


def small_grids(cost: Cost, num_sms: int, beside: int) -> float:
    """Slowdown of cuDNN's attention backward if its heads are divided into parts; 1 for all other
    work.

    One block computes the gradients of KEY_BLOCK keys of a head, and walks over all queries from
    these keys on. A head's blocks go from the longest to the shortest, one at a time on a
    multiprocessor. A short block follows a long one, so a multiprocessor computes two blocks in the
    time of the longest, the unit here. A call takes a whole number of units, and waits for its last
    block. In a single call for all heads the next blocks fill idle multiprocessors.

    beside: positions that each query costs in addition to the visible ones, if heads are not
    divided.
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

# From h100_ops.txt and peers.json in benchmarks/, and products tuned for an H100.
COPY_SHARE = 0.88  # share of the sheet's bandwidth in memory-bound kernels
LAUNCH = 5e-6  # seconds of a launch beside its bytes or FLOPs: filling and draining the GPU
GRAPH_LAUNCH = 2.5e-6  # LAUNCH of small kernels in a CUDA graph; not measured
# Multiprocessors with 100 KB of shared memory (GeForce, workstations): the library's tiles are half
# as large as on an H100, and at 2.5 GHz instead of 1.5 a launch fills and drains sooner. Both
# numbers follow from llm.q's published speeds (published.md).
SMALL, SMALL_TILES, SMALL_LAUNCH = (86, 89, 120, 121), 0.5, 3e-6
# Rate of both directions together, divided by the rate of one direction alone: each has 48 instead
# of 55 GB/s (h200_x4_bus.txt).
BOTH_WAYS = 1.74
# Kernels that access host memory directly reach this share of a copy's rate; key: True for kernels
# that write there (h200_bus.txt).
KERNEL_SHARE = {False: 0.94, True: 0.87}
# Exchanges over NVLink beside kernels; key: True with NCCL. LINK_SHARE: rate of the largest
# gathers, divided by the card's `link`; 8 channels of NCCL reach 89 GB/s. BESIDE_LINK: factor on
# the duration of kernels beside an exchange. Copies alone reach 363 GB/s, and `llmq rig` measured
# factors of 1.2 and 1.1 on two H200; these values fit whole ZeRO-3 steps there, whose GPUs are at
# their power limit (h200_several.md).
LINK_SHARE = {True: 0.40, False: 1.0}
BESIDE_LINK = {True: 1.40, False: 1.30}
# Exchanges through host memory; key: True with NCCL. HOST_SHARE: rate of a direction while both are
# busy, divided by the bus's one-way rate (two H200). HOST_MEMORY: bytes per second of host memory
# for all GPUs and directions together (four H200). Plain copies of four H200 reach 134 to 180 GB/s
# together; one H200 alone copies 55 GB/s in one direction (h200_x4_staged.md, h200_x4_bus.txt).
HOST_SHARE = {True: 0.43, False: 0.53}
HOST_MEMORY = {True: 185e9, False: 160e9}
FAST_ACCUMULATION = {90: 1.12}  # by capability: speedup of fp8 products that sum with fewer bits
# int8 products: their share of the peak, divided by the bf16 products' share; key: capability. They
# run on Ampere's kind of tensor cores, a part of those in Hopper and later servers. Hopper's value
# is from h100_int8.md; the other values are not measured.
INT8_SHARE = {90: 0.43, 100: 0.25}
INT8_SHARE_ELSEWHERE = 0.8
# GeForce's tensor cores sum fp8 products in half precision at twice the rate of F32. Other authors'
# kernels on Ada gain factors of 1 to 1.72; our kernel has not run on a GeForce card.
HALF_SUMS = 1.5

# Grouped products of experts reach this share of a dense product's rate, the mean of
# h200_grouped.md: rows of an expert do not fill all tiles, and sums are short.
GROUPED_SHARE = 0.88

F32_RATE = 0.3e12  # FLOP/s of a multiprocessor without tensor cores; not measured
SOFTMAX = 100 / (989.4 / 132)  # CUDNN_ATTENTION: channels per bf16 TFLOP/s of a multiprocessor


class Attention(NamedTuple):
    """Speed of an attention kernel. rate: in the units of CUDNN_ATTENTION or NATIVE_ATTENTION.
    causal: extra positions a query costs at the diagonal, where scores are computed in vain, and at
    the start of its block. edge: extra positions where a window begins; None if the kernel computes
    everything that the window hides."""

    rate: float
    causal: int
    edge: int | None

    def computed(self, seq_len: int, window: float) -> float:
        """Twice the number of computed query-key pairs; other work counts as pairs of equal
        duration."""
        edge = seq_len - window if self.edge is None else self.edge  # None: hidden pairs, too
        return _seen(seq_len, window) + self.causal * seq_len + edge * (seq_len - window)


def _seen(seq_len: int, window: float) -> float:
    """Twice the number of visible query-key pairs, to which FLOPs are proportional."""
    return window * (2 * seq_len - window)


# cuDNN's kernels (deterministic backward). rate: share of the bf16 peak for an infinite head size.
# On an H100 the softmax of a score costs as much as 100 more channels; on other cards this number
# grows with a multiprocessor's bf16 peak (SOFTMAX). Edges and all numbers of our kernels are from
# h100_attention.txt.
CUDNN_ATTENTION = {
    "attention_forward": Attention(1.2, 416, 230),
    "attention_backward": Attention(0.89, 725, None),
}
# Our kernels, by largest head size; rate: FLOP/s of a SM. The rates of 64 and 128 are measured.
# Reads of shared memory limit backward of 128; larger heads need 1.2 and 1.6 times as many reads
# for a FLOP, and their rates follow from this. The rate of forward with 512 follows from its two
# barriers for every 32 keys.
NATIVE_ATTENTION = {
    "attention_forward": {
        64: Attention(1.86e12, 370, 140),
        256: Attention(2.45e12, 415, 140),
        MAX_HEAD_DIM: Attention(1.8e12, 415, 140),
    },
    "attention_backward_tiles": {
        64: Attention(3.44e12, 423, 256),
        128: Attention(2.35e12, 160, 67),
        256: Attention(2.0e12, 160, 67),
        MAX_HEAD_DIM: Attention(1.5e12, 160, 67),
    },
    # Hopper's kernel, from h100_attention_backward.txt; it skips nothing outside windows.
    "attention_gradient": {
        64: Attention(4.05e12, 129, None),
        MAX_HEAD_DIM: Attention(4.84e12, 125, None),
    },
}
# Attention is slower by the factor UNCACHED if the keys and values of one head fill more than
# CACHED bytes of the cache (key: compute capability; Hopper's cache has 50 MB in two halves) and
# the memory is slower than HIDES_MISSES, in GB/s. The numbers fit two runs on an H100, of 49,152
# and 65,536 tokens with heads of 128 (h100_rows.md), and runs of 131,072 tokens on an H200, whose
# memory is 1.4 times as fast (h200_x2_context.md).
CACHED = {90: 20e6}
UNCACHED = 1.09
HIDES_MISSES = 4000


class Delta(NamedTuple):
    """Speed of a delta-rule kernel. rate: FLOP/s of a multiprocessor with enough blocks. turn:
    least seconds from one chunk to the next; 0 if chunks do not wait for each other."""

    rate: float
    turn: float = 0.0


# Measured with heads of 128 and one or four sequences of 4,096 tokens: sm90 kernels on an H200, the
# other kernels on an H100 (h100_delta_kernels.md). Plans assume the same rates for other cards and
# sizes.
DELTA_RULE = {
    "delta_rule_prepare": Delta(1.0e12),
    "delta_rule_scan": Delta(1.35e12, 3.6e-6),
    "delta_rule_states": Delta(0.78e12, 2.4e-6),
    "delta_rule_scan_backward": Delta(1.08e12, 3.8e-6),
    "delta_rule_gradients": Delta(1.35e12),
    "delta_rule_scan_sm90": Delta(2.97e12, 1.05e-6),
    "delta_rule_states_sm90": Delta(1.29e12, 0.92e-6),
    "delta_rule_scan_backward_sm90": Delta(2.0e12, 1.22e-6),
    # Not measured: plans assume the rates of the delta rule's kernels, whose tiles and products
    # these kernels share.
    "ssd_prepare": Delta(1.0e12),
    "ssd_scan": Delta(1.35e12, 2.9e-6),
    "ssd_states": Delta(0.78e12, 1.6e-6),
    "ssd_scan_backward": Delta(1.08e12, 2.9e-6),
    "ssd_gradients": Delta(1.35e12),
}
CHUNK = 64  # tokens of a chunk of the delta rule


class Network(NamedTuple):
    """Network between machines with equally many GPUs. rate: bytes per second that each machine
    sends and, at the same time, receives."""

    machines: int = 1
    rate: float = math.inf


ONE_MACHINE = Network()


class Rates:
    """Durations of pieces of work on one card."""

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
        """gpus: GPUs that share the host's memory. nccl: True if GPUs exchange data through NCCL.
        peer_access: True if GPUs may access each other's memory. visible_share: share of causal
        query-key pairs that document masks leave. Measured rates replace the card's data sheet."""
        card = card if peer_access else replace(card, link=0.0)
        self.card, self._visible, self._network = card, visible_share, network
        bf16, fp8 = card.sustained
        self._products = {"matmul": 1e12 * bf16 * card.bf16, "matmul_fp8": 1e12 * fp8 * card.fp8}
        int8 = bf16 * INT8_SHARE.get(card.capability, INT8_SHARE_ELSEWHERE)
        self._products["matmul_int8"] = 1e12 * int8 * card.int8
        self._products["f32"] = F32_RATE * card.num_sms
        half = HALF_SUMS if card.sums_slowly else 1.0
        self._products["matmul_fp8_half"] = half * self._products["matmul_fp8"]
        if card.fp8 == 0:  # the card that stands for the CPU, too: the CPU has fp8 products
            self._products["matmul_fp8"] = self._products["matmul"]
        self.memory = COPY_SHARE * 1e9 * card.bandwidth
        small = card.capability in SMALL
        self._launch, self._tiles = (SMALL_LAUNCH, SMALL_TILES) if small else (LAUNCH, 1.0)
        self._bus, self._link = 1e9 * card.bus, 1e9 * card.link * LINK_SHARE[nccl]
        self._host = HOST_MEMORY[nccl] / gpus
        self._disk = [1e9 * rate / gpus for rate in card.disk]
        self._staged = HOST_SHARE[nccl] * self._bus
        over_link = gpus > 1 and 0 < card.link < math.inf
        self._beside = BESIDE_LINK[nccl] if over_link else 1.0
        self._transfers: dict[tuple, Transfers] = {}
        self._launches = self._links = None
        self._slowest = 1.0  # slowest GPU's speed while all GPUs work, relative to one alone
        if card.measured is not None:
            self._launches = measured(card.measured)
            self._slowest = card.measured.slowest if gpus > 1 else 1.0
            self._links = RigLinks(
                card.measured,
                gpus,
                nccl=nccl,
                peer_access=peer_access,
                at_once=card.link == math.inf,
            )

    @property
    def slowdown(self) -> float:
        """Factor on the time of kernels beside exchanges."""
        measured_factor = None if self._links is None else self._links.slowdown
        return self._beside if measured_factor is None else measured_factor

    def compute(self, work: Work) -> float:
        """Seconds of a piece of work on the GPU itself, without transfers."""
        if self._launches is not None:
            seconds = self._as_measured(work)
            if seconds is not None:
                return seconds / self._slowest
        cost, memory = work.cost, work.device_bytes / self.memory
        if not cost.rate:
            return self._launch + memory
        if cost.part == "attention":
            return self._launch + max(self._attention(cost), memory)
        more = More.of(cost, work.device_bytes)
        memory -= more.nbytes / self.memory
        return self._launch + self._product(cost, memory) + exposed(more) / self.memory

    def _as_measured(self, work: Work) -> float | None:
        """Measured seconds of a piece of work; None if nothing similar was measured."""
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
        """Factors on the duration of a transfer to the card, and of a transfer from the card, while
        the bus carries data in the other direction."""
        measured_ratios = None if self._links is None else self._links.both_ways
        return measured_ratios or (2 / BOTH_WAYS, 2 / BOTH_WAYS)

    @property
    def beside_exchanges(self) -> tuple[float, float]:
        """The factors of both_ways while GPUs exchange data through the host. Without measurements
        both are 1, because the runs behind HOST_SHARE loaded data, too."""
        return (1.0, 1.0) if self._links is None else self._links.beside_exchanges

    def transfers(self, work: Work) -> Transfers:
        """Seconds that each carrier is busy with a piece of work."""
        sizes = (work.loaded, work.stored, work.received, work.shared, work.sent, work.network)
        sizes += (work.read, work.written)
        kernel = bool(work.file)
        key = (work.entry, *sizes) if work.received else (kernel, *sizes)
        if key not in self._transfers:  # most pieces of transfers are alike
            carried = None if self._links is None else self._links.carried(work)
            share = KERNEL_SHARE[bool(work.stored)] if kernel else 1.0
            found = carried or self._carried(*sizes[:5], share)
            if work.network:
                found.carriers["network"] = work.network / self._network.rate
            if work.read or work.written:
                seconds = (n / rate for n, rate in zip(sizes[-2:], self._disk, strict=True))
                found.carriers["disk"] = sum(seconds)
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
        """Seconds of a BF16 attention or delta-rule kernel. way: `rate` of its Cost. flops: FLOPs
        of the query-key pairs that the window leaves. visible: visible_share of Rates."""
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
            # Documents cost as much as a window that hides as many pairs.
            narrow = min(window, seq_len * (1 - math.sqrt(1 - visible)))
        keys = 2 * BF16.itemsize * head_dim * narrow  # bytes of visible keys and values
        cached = CACHED.get(self.card.capability, math.inf)
        if keys > cached and self.card.bandwidth < HIDES_MISSES:
            rate /= UNCACHED
        return flops / _seen(seq_len, window) * kernel.computed(seq_len, narrow) / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, by part. parts: "blocks" and "head", matrix
    products; "attention"; "memory_bound", kernels limited by memory; "transfers", waits of
    micro-steps for other streams or host memory; "optimizer", all work after the micro-steps."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def step_time(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> StepTime:
    """Return the time of a step. All streams meet between micro-steps, and before the update.
    visible_share: as in Rates."""
    return _step_time(plan, rates_of(plan, card, visible_share, network))


def rates_of(
    plan: Plan, card: Card, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> Rates:
    """Return the rates of `card` in this plan; arguments as in step_time."""
    gpus = plan.world_size // network.machines
    return Rates(
        card,
        gpus,
        nccl=plan.nccl,
        peer_access=plan.peer_access,
        visible_share=visible_share,
        network=network,
    )


# Bytes of 4-bit codes that one multiprocessor decodes per second, by the largest number of rows of
# the product. Fitted to a 7B model on one H200 (benchmarks/h200/2026-11-30/h200_decode.md has 1 and
# 64 rows); no other card was measured.
FOUR_BITS = ((8, 10e9), (16, 7.8e9), (math.inf, 3.8e9))


class RolloutTime(NamedTuple):
    """Predicted seconds of a rollout and its updates. sample: seconds to generate all samples.
    score: seconds of the reference model; 0 without one. train: seconds of all updates."""

    sample: float
    score: float
    train: float

    @property
    def total(self) -> float:
        """Seconds without the reward function, which is not known."""
        return sum(self)


def rollout_time(
    plan: Plan, generation: Generation, config: TrainConfig, card: Card
) -> RolloutTime:
    """Return the time of a rollout. Each sample has --max-new-tokens tokens behind the longest
    prompt that --seq-len allows, so each sample fills a sequence. A decoding pass reads all keys
    and values at the card's bandwidth. Each launch takes GRAPH_LAUNCH, and reads its weights at
    this bandwidth or decodes them, whichever takes longer."""
    rates, new = rates_of(plan, card, 1.0, ONE_MACHINE), config.max_new_tokens
    prompts = -(-config.prompts_per_step // plan.world_size)
    texts, prompt = prompts * config.num_samples, config.seq_len - new
    at_once, passes = min(texts, generation.texts(config.seq_len)), generation.passes
    decode = min(size for kind, size in passes if kind == "decode" and size >= at_once)
    read = at_once * generation.token_bytes * (prompt + new / 2)
    one = _decoding(passes["decode", decode], rates) + read / rates.memory
    prefill = max(size for kind, size in passes if kind == "prefill")
    pieces = -(-prompt // min(generation.sizes["piece"], config.seq_len))
    sample = -(-texts // at_once) * new * one
    sample += prompts * pieces * replay(passes["prefill", prefill], rates).wall
    batches = min(-(-texts // config.batch_size), config.grad_accumulation)
    score = batches * replay(plan.evaluation, rates).wall if config.has_reference else 0.0
    step = step_time(plan, card)
    update = step.parts["optimizer"]
    train = update + (step.total - update) * batches / config.grad_accumulation
    return RolloutTime(sample, score, config.updates * train)


def _decoding(trace: Trace, rates: Rates) -> float:
    """Seconds of a pass over the last token of each text, without the reads of keys and values."""
    works = [item for item in trace if isinstance(item, Work)]
    seconds, carried = GRAPH_LAUNCH * len(works), Counter()
    for work in works:
        seconds += max(work.device_bytes / rates.memory, _decoded(work) / rates.card.num_sms)
        carried.update(rates.transfers(work).carriers)
    return max(seconds, *carried.values(), 0.0)


def _decoded(work: Work) -> float:
    """Seconds in which one multiprocessor decodes the 4-bit codes of a product of few rows; 0 for
    other work."""
    if work.kind.name.partition("/")[0] not in ("skinny_nf4", "skinny_mxfp4"):
        return 0.0
    rows = work.cost.flops / (2 * work.device_bytes * 64 / 33)  # of each matrix, on average
    return work.device_bytes / next(rate for most, rate in FOUR_BITS if rows <= most)


class KindCost(NamedTuple):
    """Launches of one kind (`llmq.runtime.cost`) in an optimizer step of one rank. nbytes: read and
    written in GPU memory, and moved to or from other memories. seconds: predicted for launches that
    run alone; None without a card."""

    launches: int = 0
    flops: int = 0
    nbytes: int = 0
    seconds: float | None = None


def cost_by_kind(
    plan: Plan, card: Card | None, visible_share: float = 1.0, network: Network = ONE_MACHINE
) -> dict[str, KindCost]:
    """Return the cost of a step's launches, copies, fills and exchanges, sorted by name of kind.
    card: None leaves out seconds; other arguments as of step_time."""
    rates = None if card is None else rates_of(plan, card, visible_share, network)
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
    """Seconds that exchanges between GPUs and machines add to a step."""
    gpus = plan.world_size // network.machines
    at_once = Rates(replace(card, link=math.inf), gpus, nccl=plan.nccl, visible_share=visible_share)
    seconds = step_time(plan, card, visible_share, network).total
    return seconds - _step_time(plan, at_once).total


def _step_time(plan: Plan, rates: Rates) -> StepTime:
    seconds = sum(count * micro_step_parts(trace, rates) for trace, count in plan.micro_steps)
    seconds = dict(zip(PARTS, np.broadcast_to(seconds, len(PARTS)).tolist(), strict=True))
    return StepTime(parts=seconds | {"optimizer": replay(plan.update, rates).wall})


def micro_step_parts(trace: Trace, rates: Rates) -> np.ndarray:
    """Seconds of a micro-step, F64 (PARTS,); 0 for the optimizer."""
    phase = replay(trace, rates)
    waits = max(phase.wall - sum(phase.busy.values()), 0.0)
    return np.array([(phase.busy | {"transfers": waits}).get(name, 0.0) for name in PARTS])
