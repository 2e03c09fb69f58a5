"""Parallel options: devices and the division of a run among them, with their rules."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.base.shares import EQUAL, parse_share
from llmq.options.conditions import exchanges_always, undivided, why_no_cudnn
from llmq.options.option_types import option, parse_switch, switch
from llmq.options.rule import REFUSE, each, idle, refused, switches


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Options of devices, and of the division of a run among devices."""

    device: str = option(
        "auto",
        "Where to run; auto: on GPUs if there are any",
        choices=("auto", "cpu", "cuda"),
        group="Machine",
    )
    gpus: int = option(
        0,
        "GPUs to use (on the CPU: threads, as if they were GPUs); 0: all GPUs, one thread",
        min=0,
        max=64,
    )
    use_cuda_graphs: bool = option(True, "Record the GPU work once and replay it")
    attention: str = option(
        "auto",
        "Attention kernels; auto: the faster ones that work here",
        choices=("auto", "cudnn", "native"),
    )
    tune: bool = option(True, "Time candidates for products and attention at the start")
    zero_level: int = option(
        1,
        "What is divided among GPUs; 1: the optimizer, 2: also gradients, 3: also weights",
        min=0,
        max=3,
        group="Several GPUs",
    )
    shard_over: str = option(
        "machine", "Divide among GPUs of a machine, or of all", choices=("machine", "world")
    )
    shard_weights: bool = switch(
        "Divide the blocks' weights; on one GPU: keep two blocks in work memory"
    )
    shard_gradients: bool = switch(
        "Divide the blocks' gradients; on one GPU: keep two blocks in work memory"
    )
    share: str = option(
        EQUAL,
        "Micro-batches of a step by GPU; auto: by measured rates, or numbers such as 3:2",
        parse=parse_share,
    )
    memcpy_all_gather: bool = switch("Gather weights by copies instead of NCCL")
    memcpy_send_recv: bool = switch("Exchange gradients by copies instead of NCCL")
    mirror_weights: bool = switch(
        "Keep sharded weights in host memory too, where GPUs read them that cannot copy directly"
    )
    all_to_all_reduce: bool = switch("Exchange gradients and sum them here, in a fixed order")
    p2p: str = option(
        "auto",
        "Copies between GPUs; on: direct, off: through host memory, auto: by a test at the start",
        parse=parse_switch,
        choices=("auto", "on", "off"),
    )
    watchdog: int = option(300, "Seconds without progress after which a run stops; 0: never", min=0)

    def shards(self, world_size: int, machines: int = 1) -> int:
        """Number of shards of the state: all ranks, or the ranks of one machine. machines: number
        of machines, which share the ranks equally."""
        return world_size if self.shard_over == "world" else world_size // machines

    @property
    def shares(self) -> list[float] | None:
        """The numbers of --share; None if there are none."""
        return [float(text) for text in self.share.split(":")] if ":" in self.share else None


_GPUS_ONLY = (
    "tune use_cuda_graphs attention fp8_fast_accumulation write_combined memcpy_all_gather "
    "memcpy_send_recv mirror_weights p2p"
)


PARALLEL_RULES = (
    switches("zero_level", "shard_gradients", when=lambda v, o: v >= 2),
    switches("zero_level", "shard_weights", when=lambda v, o: v >= 3),
    *refused(
        "attention",
        lambda v, o: v == "cudnn" and o.device == "cpu",
        "cudnn needs a GPU, but --device is cpu",
    ),
    *each(
        "shard_over",
        REFUSE,
        lambda v, o, here: v == "machine" and len({*here.machines.values()}) > 1 and here.listed,
        "--shard-over machine: every machine must have as many GPUs, there are {found}: give "
        "--shard-over world, or another --gpus",
    ),
    *refused(
        "share",
        lambda v, o: v != EQUAL and exchanges_always(o),
        "with {found} GPUs exchange data in every micro-step, at the pace of the slowest: leave "
        "{flag} out, or that",
    ),
    *refused(
        "share",
        lambda v, o, here: v != EQUAL and here.processes > 1 and here.processes,
        "the GPUs of one process share a step, and there are {found} processes: leave it out",
    ),
    *refused(
        "share",
        lambda v, o, here: (
            o.shares and len(o.shares) != here.ranks and f"{len(o.shares)} of {here.ranks}"
        ),
        "{value} gives {found} GPUs a share: give each GPU a number",
    ),
    *refused(
        "all_to_all_reduce",
        lambda v, o, here: v and (shards := here.shards(o)) > here.most_summed and shards,
        "sums what {here.most_summed} GPUs have, and there are {found}: "
        "leave it out{here.or_less_shared}",
    ),
    *refused(
        "memcpy_all_gather memcpy_send_recv",
        lambda v, o, here: (
            v
            and here.on_gpus
            and here.shards(o) != here.ranks
            and (o.memcpy_all_gather or o.all_to_all_reduce)
        ),
        "copies reach the GPUs of one process, and there are {here.processes}: leave it "
        "out, so that NCCL does this",
    ),
    *each(
        "attention",
        REFUSE,
        lambda v, o, attention: v == "cudnn" and attention.on_cpu,
        "--attention cudnn: it needs a GPU",
    ),
    *each(
        "attention",
        REFUSE,
        lambda v, o, attention: v == "cudnn" and why_no_cudnn(o, attention.unsupported),
        "--attention cudnn: {found}; use --attention native",
    ),
    *idle(
        _GPUS_ONLY,
        lambda v, o: o.device == "cpu",
        "{shown} has no effect with --device cpu",
        last_word=True,
    ),
    *idle("zero_level", lambda v, o: v == 0, "--zero-level 0 is the same as 1"),
    *idle(
        "memcpy_send_recv",
        lambda v, o: not o.all_to_all_reduce and o.context_parallel == 1,
        "--memcpy-send-recv has no effect without --all-to-all-reduce or --context-parallel",
        help="With --all-to-all-reduce or --context-parallel:",
    ),
    *idle(
        "mirror_weights",
        lambda v, o: o.weight_storage.why_no_mirrors(),
        "--mirror-weights has no effect {found}",
        help="With --memcpy-all-gather:",
    ),
    *idle("shard_over", lambda v, o, ranks: ranks.machines == 1, "has no effect with one machine"),
    *idle(
        "memcpy_all_gather memcpy_send_recv mirror_weights all_to_all_reduce",
        lambda v, o, ranks: ranks.shards(o) == 1,
        "{shown} has no effect {ranks.alone}",
    ),
    *idle(
        "share",
        lambda v, o: o.grad_accumulation == 1,
        "{shown} has no effect with --grad-accumulation 1: use smaller micro-batches, and more",
    ),
    *idle(
        "p2p share",
        lambda v, o, ranks: ranks.world_size == 1,
        "{shown} has no effect {ranks.alone}",
    ),
    # Options implied by --zero-level count as one option, which may have part of its effect.
    *idle(
        "shard_weights",
        lambda v, o, ranks: o.zero_level < 3 and undivided(o, ranks, "weights"),
        "{shown} has no effect {found}",
    ),
    *idle(
        "shard_gradients",
        lambda v, o, ranks: o.zero_level < 2 and undivided(o, ranks, "gradients"),
        "{shown} has no effect {found}",
    ),
    *idle(
        "zero_level",
        lambda v, o, ranks: v >= 2 and undivided(o, ranks, *["weights"][v < 3 :], "gradients"),
        "{shown} has no effect {found}",
    ),
    # Another rule warns with --device cpu.
    *idle(_GPUS_ONLY, lambda v, o, ranks: o.device == "cpu", "", last_word=True),
    *idle(
        _GPUS_ONLY,
        lambda v, o, ranks: ranks.on_cpu and o.device != "cpu",
        "{shown} has no effect on the CPU",
        last_word=True,
    ),
    *idle(
        "watchdog",
        lambda v, o, length: length.world_size == 1,
        "--watchdog {value} has no effect with one GPU",
    ),
)
