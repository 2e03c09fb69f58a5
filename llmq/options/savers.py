"""Tables of rules for values that may save memory or time, and for options that must not change a
bit."""

import math
from collections.abc import Callable
from typing import Any

from llmq.options.conditions import MOST_PARTS
from llmq.options.groups.memory import SSD_KINDS, parse_kinds
from llmq.options.rule import EXACT, SAVE, Changes, Options, Rule, each

MIN_CHUNK_ROWS = 256  # least rows of the LM head's products in advice

PLACES = tuple(f"offload_{name}" for name in ("residual", "opt_m", "opt_v", "master", "gradients"))
"""Options that put state into host memory."""

FILES = (
    {"ssd": "opt-m,opt-v"},
    {"ssd": "opt-m,opt-v,gradients", "shard_gradients": True},
    {"ssd": "opt-m,opt-v,master", "shard_weights": True},
    {"ssd": "opt-m,opt-v,master", "shard_weights": True, "persistent_quants": True}
    | {"offload_quants": True},
    {"ssd": "opt-m,opt-v,master,gradients", "shard_weights": True, "shard_gradients": True},
    {"ssd": "opt-m,opt-v,master,gradients", "shard_weights": True, "shard_gradients": True}
    | {"persistent_quants": True, "offload_quants": True},
    {"ssd": ",".join(SSD_KINDS), "shard_weights": True, "shard_gradients": True}
    | {"persistent_quants": True},
)
"""Changes that put more and more state into files."""


def _more_chunks(head: int, attention: int) -> Callable[[Options], Changes]:
    """Values with `head` times as many chunks of logits and `attention` times as many of attention,
    unless the head's products would become too small for a GPU."""

    def changes(o: Options) -> Changes:
        chunks = o.lmhead_chunks * head
        rows, rest = divmod(o.micro_tokens, chunks)
        parts, batch = o.attn_bwd_chunks * attention, o.batch_size
        too_few = head > 1 and (rows < MIN_CHUNK_ROWS or chunks > MOST_PARTS)
        if rest or too_few or (batch % parts and parts % batch):
            return {}
        return {"lmhead_chunks": chunks, "attn_bwd_chunks": parts}

    return changes


def _smaller_batch(o: Options) -> Changes:
    """Values with half the batch size and twice the accumulation; another factor if the batch size
    is odd."""
    batch = o.batch_size
    if batch == 1:
        return {}
    factor = next((n for n in range(2, math.isqrt(batch) + 1) if batch % n == 0), batch)
    fewer = batch // factor
    per_sequence, rest = divmod(o.attn_bwd_chunks, batch)
    return {
        "batch_size": fewer,
        "grad_accumulation": factor * o.grad_accumulation,
        "lmhead_chunks": math.gcd(o.lmhead_chunks, fewer * o.local_seq_len),
        # The most parts that keep each part of attention as small.
        "attn_bwd_chunks": math.gcd(o.attn_bwd_chunks, fewer) if rest else fewer * per_sequence,
    }


def _saver(use: str, sets: Changes, when: Any = None) -> Rule:
    """A rule for values to try; the first of these names the rule's option."""
    return Rule(option=next(iter(sets)), effect=SAVE, when=when, sets=sets, use=use)


def _made(use: str, name: str, sets: Callable[[Options], Changes]) -> Rule:
    """A rule for values to try, computed from the options."""
    return Rule(option=name, effect=SAVE, sets=sets, use=use)


def _files(kinds: str, *switches: str) -> Rule:
    """A rule that moves more kinds of state into files, if there is a directory for them."""

    def changes(o: Options) -> Changes:
        there = parse_kinds(f"{o.ssd},{kinds}")
        return {"ssd": there} | _set(True, *switches) if o.offload_dir and there != o.ssd else {}

    return _made("arrange", "ssd", changes)


def _set(value: Any, *names: str) -> Changes:
    return dict.fromkeys(names, value)


_FP8 = {"matmul_dtype": "e4m3", "gradient_dtype": "e4m3"}

SAVERS = (
    # Values that change when and where numbers are computed and kept, but not their formats. Some
    # values do nothing alone, so pairs of values stand here.
    *(_saver("arrange", _set(True, f"recompute_{name}")) for name in ("swiglu", "norm", "ffn")),
    *(_saver("arrange", _set(True, f"recompute_{name}")) for name in ("qkv", "att", "block")),
    _saver("arrange", {"recompute_layers": "all"}),
    _made("arrange", "lmhead_chunks", _more_chunks(2, 1)),
    _made("arrange", "lmhead_chunks", _more_chunks(8, 1)),
    _made("arrange", "lmhead_chunks", _more_chunks(8, 4)),
    *(_saver("arrange", _set(True, name)) for name in PLACES[:-1]),
    _saver("arrange", _set(False, "keep_transposed")),
    _saver("arrange", _set(True, "shard_weights")),
    _saver("arrange", _set(True, "shard_weights", "offload_master")),
    _saver("arrange", _set(True, "shard_weights", "persistent_quants")),
    _saver("arrange", _set(True, "shard_weights", "persistent_quants", "offload_quants")),
    _saver("arrange", _set(False, "persistent_quants", "offload_quants")),
    _files("opt-m,opt-v"),
    _files("master"),
    _files("master", "shard_weights"),
    _files("gradients", "shard_gradients"),
    _files("master,weights", "shard_weights", "persistent_quants"),
    _saver("arrange", _set(True, "shard_gradients")),
    _saver("arrange", _set(True, "shard_gradients", "offload_gradients")),
    _saver("arrange", {"shard_over": "world"}),
    # Values that need less host memory and more device memory, except the first.
    _saver("stay", _set(False, "ckpt_background")),
    *(_saver("stay", _set(False, name)) for name in (*PLACES, "offload_quants")),
    _made("batch", "batch_size", _smaller_batch),
    # Values with the least device memory, at any cost in speed.
    _saver("lightest", {"recompute_block": True}),
    _saver("lightest", {"recompute_layers": "all"}),
    _saver("lightest", {"keep_transposed": False}),
    _saver("lightest", {"shard_over": "world"}),
    _saver("lightest", {"shard_weights": True}),
    _saver("lightest", {"shard_gradients": True}),
    _saver("lightest", {"offload_quants": False}),
    _saver("lightest", {"persistent_quants": False}),
    # Values that round more, the least harmful first.
    _saver("round", _set("bf16", "opt_m_dtype", "opt_v_dtype")),
    _made("round", "grad_accum_dtype", lambda o: {"grad_accum_dtype": o.model_dtype}),
    _made("round", "master_dtype", lambda o: {"master_dtype": o.model_dtype}),
    _saver("round", {"mlp_dtype": "e4m3"}, lambda v, o: o.fp8_recipe == "delayed"),
    _saver("round", _set("e4m3", "opt_m_dtype", "opt_v_dtype")),
    _saver("round", {"base_dtype": "nf4"}, lambda v, o: o.freezes_model),
    _saver("round", _set("bf16", "model_dtype", "grad_accum_dtype", "master_dtype")),
    # Values that take memory for speed, tried only on request.
    _saver("fast", _set(True, "persistent_quants")),
    _saver("fast", _set(True, "persistent_quants", "offload_quants")),
    _saver("fast", _set(False, "recompute_swiglu", "recompute_norm"), lambda v, o: o.has_adapters),
    # 8-bit formats that may be faster: for products, for the head beside fp8 products, for other
    # tensors.
    _saver("products", _FP8),
    _saver("head", {"head_dtype": "e4m3"}),
    _saver("others", {"mlp_dtype": "e4m3"}, lambda v, o: o.fp8_recipe != "jit"),
    _saver("others", _set("e4m3", "opt_m_dtype", "opt_v_dtype")),
    # Adapter bases that the card multiplies fast, the most precise first.
    _saver("base", {"base_dtype": "e4m3"} | _FP8, lambda v, o, card: card.fp8),
    _saver(
        "base",
        _set("int8", "base_dtype", "matmul_dtype", "gradient_dtype"),
        lambda v, o, card: not card.fp8,
    ),
    _saver("base", {"base_dtype": "nf4"}, lambda v, o, card: True),
)

# Left out: --lmhead-chunks, shared state of several ranks and --all-to-all-reduce, because they
# change the order of summation. The transport of data between ranks must not matter.
SAME_BITS = (
    *each(
        "recompute_ffn recompute_qkv recompute_att recompute_block recompute_layers "
        "attn_bwd_chunks offload_residual offload_between offload_master offload_opt_m "
        "offload_opt_v offload_gradients offload_quants persistent_quants "
        "keep_transposed use_zero_copy write_combined memcpy_all_gather memcpy_send_recv "
        "mirror_weights offload_dir ssd",
        EXACT,
        lambda v, o, ranks: True,
    ),
    *(  # options that may be on by default; None: the model decides
        Rule(option=name, effect=EXACT, when=lambda v, o, ranks: v is not None, sets={name: False})
        for name in ("recompute_swiglu", "recompute_norm")
    ),
    *each(
        "zero_level shard_weights shard_gradients", EXACT, lambda v, o, ranks: ranks.world_size == 1
    ),
    *each(
        "use_cuda_graphs",
        EXACT,
        lambda v, o, ranks: not ranks.on_cpu,
        sets={"use_cuda_graphs": False},
    ),
)
