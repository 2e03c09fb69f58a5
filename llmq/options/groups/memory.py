"""Memory options: recomputation and state in host memory, with their rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.options.conditions import (
    CHUNK_ROWS,
    TRAINED_CHUNK_ROWS,
    decodes,
    error,
    offloads_optimizer,
    parts_of_logits,
    undivided,
)
from llmq.options.option_types import (
    layer_set,
    option,
    parse_layers,
    parse_repeated,
    parse_size,
    switch,
)
from llmq.options.rule import IMPLY, Rule, default, idle, refused, switches, without

SSD_KINDS = {
    "opt-m": "offload_opt_m",
    "opt-v": "offload_opt_v",
    "master": "offload_master",
    "weights": "offload_quants",
    "gradients": "offload_gradients",
}
"""Kinds of state for --ssd, the cheapest to move first, and the options that offload them."""


def parse_kinds(value: Any) -> str:
    """Parse a list of SSD_KINDS. Return the kinds in the order of SSD_KINDS, separated by commas.
    ValueError otherwise."""
    texts = value if isinstance(value, list | tuple) else str(value).split(",")
    words = {str(text).strip().lower() for text in texts} - {""}
    if unknown := words - SSD_KINDS.keys():
        raise ValueError(f"expected some of {','.join(SSD_KINDS)}, got {', '.join(unknown)}")
    return ",".join(kind for kind in SSD_KINDS if kind in words)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of recomputation, and of state in host memory."""

    recompute_swiglu: bool | None = option(
        None,
        "In backward, compute the activation of the MLP again",
        group="Memory",
    )
    recompute_norm: bool | None = option(None, "In backward, compute the norms again")
    recompute_ffn: bool = switch("In backward, compute the MLP again")
    recompute_qkv: bool = switch("In backward, compute queries, keys and values again")
    recompute_att: bool = switch("In backward, compute attention again")
    recompute_block: bool = switch("In backward, compute the whole block again")
    recompute_layers: str = option(
        "all", "Layers that recompute, such as 0-11,20; all: every layer", parse=parse_layers
    )
    lmhead_chunks: int | None = option(None, "Parts in which logits are made; divides B*T", min=1)
    attn_bwd_chunks: int = option(
        1,
        "Parts of the backward pass of attention, or fewer that take no more memory; divides the "
        "batch size, or is a multiple of it: then cuDNN divides heads, too",
        min=1,
    )
    offload_residual: bool = switch(
        "Keep the blocks' inputs in host memory until backward needs them"
    )
    offload_between: bool = switch("The same for the residual stream between the halves of blocks")
    offload_master: bool = switch(
        "Keep the weights that the optimizer updates, and the average of --ema, in host memory"
    )
    offload_opt_m: bool = switch("Keep AdamW's first moment, and Muon's momentum, in host memory")
    offload_opt_v: bool = switch("Keep AdamW's second moment in host memory")
    offload_gradients: bool = switch("Keep the blocks' gradients in host memory")
    offload_quants: bool = switch("Keep the persistent fp8 weights in host memory")
    persistent_quants: bool = switch("Keep them in fp8 too, made once per step")
    keep_transposed: bool = option(
        True, "Keep the fp8 weights transposed too; off: make them so in every backward"
    )
    use_zero_copy: bool = switch("Let the optimizer work in host memory directly, without copies")
    write_combined: bool = switch(
        "Take host memory that is faster for the GPU and slow for the CPU"
    )
    offload_dir: tuple[str, ...] = option(
        (),
        "Directory on an SSD for the scratch files of --ssd; several share the traffic",
        parse=parse_repeated,
    )
    ssd: str = option("", f"What to keep there: some of {','.join(SSD_KINDS)}", parse=parse_kinds)
    memory_limit: int | None = option(
        None, "Use at most this much memory per device, such as 8GiB", parse=parse_size, min=1024
    )

    @property
    def on_ssd(self) -> tuple[str, ...]:
        """The options whose tensors lie in files."""
        return tuple(SSD_KINDS[kind] for kind in self.ssd.split(",") if kind)

    @property
    def recomputes(self) -> bool:
        """True if backward recomputes any activation."""
        names = ("swiglu", "norm", "ffn", "qkv", "att", "block")
        return any(getattr(self, f"recompute_{name}") for name in names)


MEMORY_RULES = (
    Rule(
        option="ssd",
        effect=IMPLY,
        sets=lambda o: dict.fromkeys(o.on_ssd, True),
        help="implies --offload-opt-m, -opt-v, -master, -quants and -gradients",
    ),
    switches(
        "recompute_block",
        "recompute_att",
        "recompute_ffn",
        "recompute_norm",
        help="implies all of the above",
    ),
    switches("recompute_att", "recompute_qkv", help="implies --recompute-qkv"),
    switches("recompute_ffn", "recompute_swiglu", help="implies --recompute-swiglu"),
    # With adapters, only gradients of adapters read the outputs of the activation and of norms.
    # Beside 16-bit products their recomputation costs little. Without adapters the model's MLP
    # decides about recompute_swiglu if fp8 scales are delayed.
    *(
        default(
            name,
            lambda o: o.wants_adapters and o.matmul_dtype == o.model_dtype,
            when,
            help=f"if not given on with adapters, unless products are of 8 bits{more}",
        )
        for name, when, more in (
            (
                "recompute_swiglu",
                lambda v, o: o.wants_adapters or not (o.is_fp8 and o.fp8_recipe == "delayed"),
                ", and with --fp8-recipe delayed where the MLP has a gate and no experts",
            ),
            ("recompute_norm", None, ""),
        )
    ),
    default(
        "lmhead_chunks",
        parts_of_logits,
        help=f"if not given as many as leave {TRAINED_CHUNK_ROWS} tokens of each, with adapters "
        f"{CHUNK_ROWS}",
    ),
    *refused("ssd", lambda v, o: v and not o.offload_dir, "needs --offload-dir"),
    *refused(
        "ssd",
        lambda v, o: "weights" in v and not o.persistent_quants and not o.freezes_model,
        "weights are the codes of --persistent-quants; other blocks are gathered from the master",
    ),
    *refused(
        "ssd",
        lambda v, o: o.freezes_model and [k for k in ("master", "weights") if k in v],
        "beside adapters the model itself stays in memory: leave out {found[0]}",
    ),
    *refused(
        "ssd",
        lambda v, o: "master" in v and o.shard_weights and o.weight_storage.gathered is None,
        "fp8 codes would be made from files at each use: add --persistent-quants",
    ),
    *refused(
        "ssd",
        lambda v, o: (
            "master" in v and ((o.ema and "--ema") or (o.keep_reference and "--keep-reference"))
        ),
        "masters that {found} copies stay in memory: leave out master",
    ),
    *refused(
        "ssd",
        lambda v, o: v and o.layers_per_step,
        "--layers-per-step keeps the state of few blocks, which stays in memory",
    ),
    *refused(
        "ssd",
        lambda v, o: ("master" in v or "weights" in v) and o.memcpy_all_gather,
        "GPUs cannot copy from each other's files: leave out --memcpy-all-gather",
    ),
    *without("offload_dir", lambda o: o.ssd, "--ssd, unless options are searched for"),
    *refused(
        "lmhead_chunks",
        lambda v, o: o.micro_tokens % v,
        "{value} does not divide the {micro_tokens} tokens of a micro-step "
        "(--batch-size times --seq-len)",
    ),
    *refused(
        "lmhead_chunks",
        lambda v, o: o.chunk_tokens % 4,
        "{value} leaves {chunk_tokens} of {micro_tokens} tokens for a chunk, "
        "which must be a multiple of 4",
    ),
    *refused(
        "attn_bwd_chunks",
        lambda v, o: o.batch_size % v and v % o.batch_size,
        "{value} does not divide --batch-size {batch_size}, and is no multiple of it",
    ),
    *refused(
        "persistent_quants offload_quants",
        lambda v, o: v and o.freezes_model,
        "beside adapters the model is kept as --base-dtype says; --shard-weights "
        "--offload-master keeps it in host memory",
    ),
    *refused("persistent_quants", lambda v, o: v and not o.is_fp8, "needs --matmul-dtype e4m3"),
    *refused(
        "persistent_quants",
        lambda v, o: v and not o.shard_weights,
        "needs --shard-weights",
        help="With sharded weights:",
    ),
    *refused(
        "offload_quants", lambda v, o: v and not o.persistent_quants, "needs --persistent-quants"
    ),
    *refused(
        "offload_gradients",
        lambda v, o: v and not o.shard_gradients,
        "needs --shard-gradients or --zero-level 2",
        help="needs sharded gradients",
    ),
    *refused(
        "attn_bwd_chunks",
        lambda v, o, model: v > o.batch_size * o.local_heads(model.heads_of(0)).query,
        "{value} is more than --batch-size {batch_size} times the model's "
        "{model.num_heads} query heads, by --context-parallel {context_parallel}",
    ),
    *refused(
        "recompute_layers", lambda v, o, model: error(layer_set, v, model.num_layers), "{found}"
    ),
    *idle(
        "attn_bwd_chunks",
        lambda v, o: v > o.batch_size and (o.attention == "native" or o.device == "cpu"),
        "{given} is the same as {batch_size}: native attention divides no heads",
    ),
    *idle(
        "offload_master",
        lambda v, o: not o.weight_storage.has_masters(shards=1) and not o.ema,
        "--offload-master has no effect: the optimizer updates the weights that the products read; "
        "it has one with --shard-weights, --matmul-dtype e4m3 or --ema",
    ),
    *idle(
        "use_zero_copy",
        lambda v, o: not (offloads_optimizer(o) or o.offload_gradients),
        "--use-zero-copy has no effect without --offload-master, -opt-m, -opt-v or -gradients",
    ),
    *idle(
        "write_combined",
        lambda v, o: not (offloads_optimizer(o) or o.offload_gradients or o.offload_quants),
        "--write-combined has no effect without an --offload option beside --offload-residual "
        "and --offload-between",
    ),
    *idle(
        "offload_between",
        lambda v, o: o.recompute_block and o.recompute_layers == "all",
        "--offload-between has no effect with --recompute-block, which keeps no such stream",
    ),
    *without("recompute_layers", lambda o: o.recomputes, "a --recompute option"),
    *idle(
        "keep_transposed",
        lambda v, o: (
            not o.weight_storage.has_transposed
            and ("int8" if o.is_quantized and o.base_dtype == "int8" else "e4m3")
        ),
        "--no-keep-transposed has no effect without --matmul-dtype {found}",
    ),
    *idle(
        "recompute_norm",
        lambda v, o, model: not (o.recompute_block or o.has_adapters) and not model.arch.pre_norm,
        "--recompute-norm has no effect: this model keeps no norm's output",
    ),
    *idle(
        "offload_gradients",
        lambda v, o, ranks: ranks.shards(o) > 1 and undivided(o, ranks, "gradients"),
        "{shown} has no effect {found}",
    ),
    *idle(
        "keep_transposed",
        lambda v, o, ranks: (
            o.weight_storage.has_transposed
            and (
                (o.weight_storage.streams(ranks.shards(o)) and "--shard-weights")
                or (decodes(o) and f"--base-dtype {o.base_dtype}")
            )
        ),
        "--no-keep-transposed has no effect with {found}: it is implied",
    ),
)
