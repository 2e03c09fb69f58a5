"""Options about several GPUs: what they share, and how they exchange it."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.options.fields import Fields
from llmq.options.option_types import option, parse_switch, switch

_RANKS = "Several GPUs"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class RankFields(Fields):
    """Fields, and those of runs on several GPUs."""

    zero_level: int = option(
        _RANKS,
        1,
        "What is divided among GPUs; 1: the optimizer, 2: also gradients, 3: also weights",
        min=0,
        max=3,
    )
    shard_over: str = option(
        _RANKS, "machine", "Divide among GPUs of a machine, or of all", choices=("machine", "world")
    )
    shard_weights: bool = switch(
        _RANKS, "Divide the blocks' weights; on one GPU: keep two blocks in work memory"
    )
    shard_gradients: bool = switch(
        _RANKS, "Divide the blocks' gradients; on one GPU: keep two blocks in work memory"
    )
    memcpy_all_gather: bool = switch(_RANKS, "Gather weights by copies instead of NCCL")
    memcpy_send_recv: bool = switch(
        _RANKS, "With --all-to-all-reduce: exchange gradients by copies instead of NCCL"
    )
    mirror_weights: bool = switch(
        _RANKS,
        "With --memcpy-all-gather: keep sharded weights in host memory too, where GPUs read them "
        "that cannot copy directly",
    )
    all_to_all_reduce: bool = switch(
        _RANKS, "Exchange gradients and sum them here, in a fixed order"
    )
    p2p: str = option(
        _RANKS,
        "auto",
        "Copies between GPUs; on: direct, off: through host memory, auto: by a test at the start",
        parse=parse_switch,
        choices=("auto", "on", "off"),
    )
    watchdog: int = option(
        _RANKS, 300, "Seconds without progress after which a run stops; 0: never", min=0
    )
    measure_scaling: bool = switch(
        _RANKS, "Time one GPU alone at the start and report how well they scale"
    )
