"""The rules of all options: what they imply, what is refused, and what has no effect, and why.

One table, in the order in which errors and warnings are looked for; `training_rules.py` and
`savers.py` have parts of it. A condition (`rule.py`) gets the option's value `v`, the options `o`,
and the fact that the rule is about (`conditions.py`).
"""

from collections.abc import Iterator

from llmq.options.conditions import (
    CHUNK_ROWS,
    TRAINED_CHUNK_ROWS,
    decodes,
    draws,
    error,
    instead_of_fp8,
    measured_before_end,
    offloads_optimizer,
    parts_of_logits,
    rounds,
    uncoded_product,
    undivided,
    untrained_rows,
    why_no_cudnn,
    why_no_mirrors,
    why_not_half,
    writes,
    wrong_lengths,
    wrong_parts,
)
from llmq.options.option_types import (
    FP8_DTYPES,
    SIZES_GROUP,
    SPLIT,
    layer_set,
    lengths_of,
    split_weights,
)
from llmq.options.rule import (
    IMPLY,
    REFUSE,
    Options,
    Rule,
    Rules,
    default,
    each,
    idle,
    refused,
    switches,
    without,
)
from llmq.options.savers import SAME_BITS, SAVERS
from llmq.options.training_rules import (
    ADAPTER_DEFAULTS,
    ADAPTERS_REFUSED,
    ADAPTERS_REFUSED_WITH_MODEL,
    LOSS_RULES,
    OPTIMIZER_RULES,
)

SHAKESPEARE = "data/tiny-shakespeare-qwen"
FP8_BASES = ("e4m3", "nf4")  # whose weights can be multiplied as fp8 codes
FP8_CAPABILITY = 89  # Ada is the first with fp8 tensor cores

_INT8_TERMS = (2**31 - 1) // 127**2 // 16 * 16  # of a sum of codes' products, which has 32 bits
_INT8_WIDTH = 65536  # of a row that is quantized
_AS_MODEL = "as --model-dtype if not given"


def _formats(name: str, *codes: str) -> Iterator[Rule]:
    """Formats that the option may have: the model's, beside bf16 also these."""

    def others(v: str, o: Options) -> str | None:
        allowed = (o.model_dtype, *(codes if o.model_dtype == "bf16" else ()))
        return None if v in allowed else f"{o.model_dtype}, use {' or '.join(allowed)}"

    return refused(name, others, "{value} does not go with --model-dtype {found}")


IMPLIED = (
    # The longest is planned; `stages_of` has the others.
    Rule(
        option="seq_len",
        effect=IMPLY,
        when=lambda v, o: isinstance(v, str),
        sets=lambda o: {"seq_stages": o.seq_len, "seq_len": max(lengths_of(str(o.seq_len)))[0]},
    ),
    default(
        "master_dtype",
        lambda o: "fp32" if o.wants_adapters else o.model_dtype,  # adapters are small
        help=f"{_AS_MODEL}, with adapters fp32",
    ),
    default(
        "grad_accum_dtype",
        lambda o: "fp32" if o.wants_adapters else o.model_dtype,
        help=f"{_AS_MODEL}, with adapters fp32",
    ),
    *ADAPTER_DEFAULTS,
    # 8-bit codes of adapters' bases are multiplied as they are.
    default(
        "matmul_dtype",
        lambda o: o.base_dtype,
        lambda v, o: (
            (o.wants_adapters or o.only_scores)
            and o.model_dtype == "bf16"
            and o.base_dtype in ("e4m3", "int8")
            and not o.lora_dora
        ),
    ),
    default("matmul_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default("head_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default("mlp_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default("gradient_dtype", lambda o: o.matmul_dtype, help="as --matmul-dtype if not given"),
    default(
        "epochs",
        lambda o: 1,
        lambda v, o: o.steps < 0,
        help="1 if neither this nor --steps is given",
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
    # Adapters alone read these in backward. Beside products of 16 bits it costs nearly nothing.
    # Without adapters the activation is left to the model where delayed scales are.
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
    switches("zero_level", "shard_gradients", when=lambda v, o: v >= 2),
    switches("zero_level", "shard_weights", when=lambda v, o: v >= 3),
    # The default validation files are of the default training data.
    default(
        "eval_file",
        lambda o: f"{SHAKESPEARE}/eval*.bin",
        lambda v, o: o.train_file == (f"{SHAKESPEARE}/train*.bin",),
        help="if not given: eval*.bin beside the default --train-file, split with others",
    ),
    default("eval_file", lambda o: SPLIT),
    default(
        "document_mask",
        lambda o: o.packing != "concat",
        help="on if not given with --packing best-fit and none",
    ),
    default(
        "keep_best",
        lambda o: "loss",
        lambda v, o: o.stop_after > 0,
        help="loss if not given with --stop-after",
    ),
    default(
        "export",
        lambda o: "last" if o.keep_best is None else "best",
        help="if not given the best with --keep-best",
    ),
)

REFUSED = (
    *refused(
        "export",
        lambda v, o: v == "best" and o.keep_best is None,
        "best is known with --keep-best METRIC alone: give a metric, or --export last",
    ),
    *refused(
        "text_only",
        lambda v, o: v and o.from_scratch,
        "a new model has no other parts: leave it out",
    ),
    *refused(
        "text_only",
        lambda v, o: v and o.has_adapters,
        "adapters are exported alone: give it to `llmq merge`",
    ),
    *refused(
        "add_tokens",
        lambda v, o: v is not None and o.from_scratch,
        "a new model has rows for all of its tokenizer: use --vocab-size auto",
    ),
    *refused(
        "add_tokens",
        lambda v, o, model: v is not None and o.has_adapters and untrained_rows(o, model),
        "nothing trains the new rows beside adapters: give --train={found}",
    ),
    *refused("train", lambda v, o, model: o.has_adapters and wrong_parts(o, model), "{found}"),
    *refused(
        "head_dtype",
        lambda v, o, model: (
            o.trains_new_rows
            and v != o.model_dtype
            and (model.tied_embeddings or "new-rows" in o.train)
        ),
        "{value} has no gradient of new rows alone: leave it out, or give --train=embeddings,head",
    ),
    *refused("seq_len", lambda v, o: v % 4, "must be a multiple of 4, got {value}"),
    *each("seq_stages", REFUSE, lambda v, o: v and wrong_lengths(o), "--seq-len: {found}"),
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
        "master_dtype grad_accum_dtype",
        lambda v, o: o.model_dtype == "fp32" and v == "bf16",
        "bf16 is too coarse for --model-dtype fp32, use fp32",
    ),
    *each("train_file", REFUSE, lambda v, o: error(split_weights, v), "{found}"),
    *refused(
        "data_order",
        lambda v, o: v == "llmq" and o.packing != "concat",
        "llmq orders windows of files, and --packing {packing} makes sequences of documents: use "
        "shuffle",
    ),
    *refused(
        "data_order",
        lambda v, o: v == "llmq" and o.train_weights is not None,
        "llmq takes file after file, and --train-file has weights, by which files take turns: use "
        "shuffle",
    ),
    *refused(
        "router_aux_loss router_z_loss",
        lambda v, o: v and o.pairs,
        "is added to losses of tokens, and --loss {loss} compares answers: leave it out",
    ),
    # The products run in the model's format, or in 8 bits with output gradients in 8 bits.
    *refused(
        "matmul_dtype",
        lambda v, o: o.freezes_model and v == "e4m3" and o.base_dtype not in FP8_BASES,
        "e4m3 needs --base-dtype e4m3 or nf4 beside adapters: no weight changes, "
        "so that one in a wider format would be memory for nothing",
    ),
    *_formats("matmul_dtype", "e4m3", "int8"),
    *refused(
        "gradient_dtype",
        lambda v, o: v != o.matmul_dtype and "int8" in (v, o.matmul_dtype),
        "must be int8 with --matmul-dtype int8, and with that only, got {value} "
        "with {matmul_dtype}",
    ),
    *refused(
        "gradient_dtype",
        lambda v, o: o.is_fp8 and v not in FP8_DTYPES,
        "must be e4m3 or e5m2 with --matmul-dtype e4m3, got {value}",
    ),
    *refused(
        "gradient_dtype",
        lambda v, o: not o.is_fp8 and v != o.matmul_dtype,
        "{value} needs --matmul-dtype e4m3, which is {matmul_dtype}",
    ),
    *refused(
        "head_dtype",
        lambda v, o: not o.is_fp8 and v != o.model_dtype,
        "{value} does not go with --matmul-dtype {matmul_dtype} and --model-dtype {model_dtype}",
    ),
    *_formats("head_dtype", "e4m3"),
    *refused("fp8_accumulate", lambda v, o: v == "fp16" and why_not_half(o), "fp16 {found}"),
    *refused(
        "fp8_recipe",
        lambda v, o: v == "delayed" and not o.is_fp8,
        "delayed needs --matmul-dtype e4m3",
    ),
    # Products write codes only with a scale that is known before them.
    *_formats("mlp_dtype", "e4m3"),
    *refused(
        "mlp_dtype",
        lambda v, o: v == "e4m3" and o.freezes_model,
        "e4m3 does not go with adapters, which add to what products write",
    ),
    *refused(
        "mlp_dtype",
        lambda v, o: v == "e4m3" and not (o.is_fp8 and o.fp8_recipe == "delayed"),
        "e4m3 needs --matmul-dtype e4m3 and --fp8-recipe delayed: only fp8 products "
        "write codes, and only with a scale that they know beforehand",
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
        "epochs", lambda v, o: v is not None and o.steps >= 0, "excludes --steps, give one of them"
    ),
    *refused("init_proj_to_zero", lambda v, o: v and not o.from_scratch, "needs --from-scratch"),
    Rule(
        group=SIZES_GROUP,
        effect=REFUSE,
        when=lambda v, o: v is not None and not o.from_scratch,
        text="{flag}: needs --from-scratch: the weights of --model have their own sizes",
    ),
    *refused(
        "rope_theta rope_scaling",
        lambda v, o: v is not None and o.wants_adapters and not o.from_scratch,
        "files of adapters cannot say it: change config.json of --model",
    ),
    *refused(
        "guard",
        lambda v, o: v == "rollback" and o.ckpt_interval <= 0,
        "rollback needs --ckpt-interval above 0, to have checkpoints to go back to",
    ),
    *refused(
        "new_data",
        lambda v, o: v and o.continue_from is None,
        "needs --continue",
        help="With --continue:",
    ),
    *ADAPTERS_REFUSED,
    *refused(
        "attention",
        lambda v, o: v == "cudnn" and o.device == "cpu",
        "cudnn needs a GPU, but --device is cpu",
    ),
)

REFUSED_WITH_MODEL = (
    *refused(
        "seq_len",
        lambda v, o, model: v > model.longest,
        "{value} exceeds the model's {model.longest} positions: --max-positions and "
        "--rope-scaling give it others",
    ),
    *refused(
        "max_positions",
        lambda v, o, model: v is not None and not o.from_scratch and model.positions != "rope",
        "the learned positions of --model have their own number",
    ),
    *refused(
        "max_positions",
        lambda v, o, model: (
            v is not None
            and o.wants_adapters
            and not o.from_scratch
            and model.rope_scaling is not None
            and model.rope_scaling.kind in ("dynamic", "longrope")
        ),
        "the model's frequencies depend on it, and files of adapters cannot say "
        "it: change config.json of --model",
    ),
    *refused(
        "attn_bwd_chunks",
        lambda v, o, model: v > o.batch_size * model.num_heads,
        "{value} is more than --batch-size {batch_size} times the model's "
        "{model.num_heads} query heads",
    ),
    *refused(
        "recompute_layers", lambda v, o, model: error(layer_set, v, model.num_layers), "{found}"
    ),
    *ADAPTERS_REFUSED_WITH_MODEL,
    *refused(
        "mlp_dtype",
        lambda v, o, model: v == "e4m3" and not model.gated,
        "e4m3 is for MLPs with a gate (SwiGLU, GeGLU), and this model's has none",
    ),
    *refused(
        "mlp_dtype",
        lambda v, o, model: v == "e4m3" and model.experts is not None,
        "products of experts write no codes: use {model_dtype}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: v == "int8" and model.experts is not None,
        "there is no {value} product for experts: use {model_dtype}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: uncoded_product(o, model),
        "{value} needs multiples of {found[2]}, but the {found[0]} is {found[1]}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: v == "int8" and o.micro_tokens > _INT8_TERMS,
        f"int8 sums over at most {_INT8_TERMS} tokens of a micro-step, but there "
        "are {micro_tokens}: use a smaller --batch-size",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: (
            v == "int8"
            and (width := model.intermediate_size * (1 + model.gated)) > _INT8_WIDTH
            and width
        ),
        f"int8 takes matrices of at most {_INT8_WIDTH} rows, but the MLP's first has {{found}}",
    ),
)

REFUSED_HERE = (
    *refused(
        "matmul_dtype",
        lambda v, o, gpu: v == "e4m3" and gpu.capability < FP8_CAPABILITY and instead_of_fp8(o),
        "e4m3 needs compute capability 8.9, {gpu.name} has {gpu.version}: {found}",
    ),
    *each(
        "shard_over",
        REFUSE,
        lambda v, o, here: v == "machine" and len({*here.machines.values()}) > 1 and here.listed,
        "--shard-over machine: every machine must have as many GPUs, there are {found}: give "
        "--shard-over world, or another --gpus",
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
    *refused(
        "continue_from",
        lambda v, o, script: v is not None,
        "has no effect here, call load() of the trainer instead",
    ),
    *each(
        "seq_stages",
        REFUSE,
        lambda v, o, script: v,
        "--seq-len: has several lengths in `llmq train` alone: make a trainer for each",
    ),
    *refused(
        "ckpt_background", lambda v, o, script: v, "has no effect here, where save() writes at once"
    ),
    *refused(
        "keep_best stop_after eval_at_start",
        lambda v, o, script: v,
        "has no effect here: call validate() and save(), and export() with that checkpoint",
    ),
    *refused(
        "continue_from",
        lambda v, o, verification: v is not None,
        "a verification starts with the model's weights: leave it out",
    ),
)

_GPUS_ONLY = (
    "tune use_cuda_graphs attention fp8_fast_accumulation write_combined memcpy_all_gather "
    "memcpy_send_recv mirror_weights p2p"
)

IDLE_ALONE = (
    *idle(
        _GPUS_ONLY,
        lambda v, o: o.device == "cpu",
        "{shown} has no effect with --device cpu",
        last_word=True,
    ),
    *idle(
        "router_aux_loss router_z_loss",
        lambda v, o, model: v and model.experts is None,
        "has no effect, this model has no experts",
    ),
    *idle(
        "ckpt_major",
        lambda v, o: v > 0 and o.ckpt_keep_n <= 0,
        "--ckpt-major has no effect with --ckpt-keep-n {ckpt_keep_n}: nothing is deleted",
        last_word=True,
    ),
    *idle(
        "ckpt_keep_n",
        lambda v, o: v > 0 and not (writes(o) or o.max_hours > 0),
        "--ckpt-keep-n {value} has no effect without --ckpt-interval and --save-training-state: no "
        "checkpoints are written",
    ),
    *without("ckpt_required ckpt_major", writes, "--ckpt-interval and --save-training-state"),
    *idle(
        "ckpt_background",
        lambda v, o: not (writes(o) or o.keep_best is not None),
        "--ckpt-background has no effect but for checkpoints that are asked for: neither "
        "--ckpt-interval nor --ckpt-every-minutes writes any",
    ),
    *idle(
        "seed",
        lambda v, o: not draws(o) and not rounds(o),
        "--seed {value} has no effect: in fp32 it decides about nothing but the weights of "
        "--from-scratch and of adapters",
    ),
    *without(
        "task_every", lambda o: o.eval_task or o.sample_prompt, "--eval-task or --sample-prompt"
    ),
    *without(
        "eval_at_start",
        lambda o: o.validates or o.eval_sets or o.eval_task,
        "--eval-file or --eval-task",
    ),
    *idle(
        "long",
        lambda v, o: o.packing == "concat",
        "--long {value} has no effect with --packing concat, whose windows cut whatever they meet",
    ),
    *idle(
        "document_separator",
        lambda v, o: not o.document_mask and o.packing == "concat",
        "--document-separator {value} has no effect without --document-mask or --packing best-fit "
        "or none",
    ),
    *idle(
        "train_file",
        lambda v, o: len(v) == 1 and o.train_patterns != [*v],
        "the weight in {given} has no effect on one file",
    ),
    *idle(
        "attn_bwd_chunks",
        lambda v, o: v > o.batch_size and (o.attention == "native" or o.device == "cpu"),
        "{given} is the same as {batch_size}: native attention divides no heads",
    ),
    *idle("zero_level", lambda v, o: v == 0, "--zero-level 0 is the same as 1"),
    *idle(
        "offload_master",
        lambda v, o: not o.has_masters(shards=1) and not o.ema,
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
        "memcpy_send_recv",
        lambda v, o: not o.all_to_all_reduce,
        "--memcpy-send-recv has no effect without --all-to-all-reduce",
        help="With --all-to-all-reduce:",
    ),
    *idle(
        "mirror_weights",
        lambda v, o: why_no_mirrors(o),
        "--mirror-weights has no effect {found}",
        help="With --memcpy-all-gather:",
    ),
    *idle(
        "offload_between",
        lambda v, o: o.recompute_block and o.recompute_layers == "all",
        "--offload-between has no effect with --recompute-block, which keeps no such stream",
    ),
    *without("recompute_layers", lambda o: o.recomputes, "a --recompute option"),
    *without("debug_log_abs_max fp8_fast_accumulation", lambda o: o.is_fp8, "--matmul-dtype e4m3"),
    *idle(
        "keep_transposed",
        lambda v, o: (
            not o.has_transposed
            and ("int8" if o.is_quantized and o.base_dtype == "int8" else "e4m3")
        ),
        "--no-keep-transposed has no effect without --matmul-dtype {found}",
    ),
)

IDLE_WITH_MODEL = (
    *idle(
        "recompute_norm",
        lambda v, o, model: not (o.recompute_block or o.has_adapters) and not model.arch.pre_norm,
        "--recompute-norm has no effect: this model keeps no norm's output",
    ),
)

IDLE_WITH_RANKS = (
    *idle("shard_over", lambda v, o, ranks: ranks.machines == 1, "has no effect with one machine"),
    *idle(
        "memcpy_all_gather memcpy_send_recv mirror_weights all_to_all_reduce",
        lambda v, o, ranks: ranks.shards(o) == 1,
        "{shown} has no effect {ranks.alone}",
    ),
    *idle(
        "p2p",
        lambda v, o, ranks: ranks.world_size == 1,
        "{shown} has no effect {ranks.alone}",
    ),
    # The options that --zero-level implies count as one, which may do something in part.
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
    *idle(
        "offload_gradients",
        lambda v, o, ranks: ranks.shards(o) > 1 and undivided(o, ranks, "gradients"),
        "{shown} has no effect {found}",
    ),
    *idle(
        "keep_transposed",
        lambda v, o, ranks: (
            o.has_transposed
            and (
                (o.streams_weights(ranks.shards(o)) and "--shard-weights")
                or (decodes(o) and f"--base-dtype {o.base_dtype}")
            )
        ),
        "--no-keep-transposed has no effect with {found}: it is implied",
    ),
    # With --device cpu it is said already.
    *idle(_GPUS_ONLY, lambda v, o, ranks: o.device == "cpu", "", last_word=True),
    *idle(
        _GPUS_ONLY,
        lambda v, o, ranks: ranks.on_cpu and o.device != "cpu",
        "{shown} has no effect on the CPU",
        last_word=True,
    ),
)

IDLE_IN_RUNS = (
    *idle(
        "warmup",
        lambda v, o, length: (
            v >= length.steps > 0
            and not 0 <= o.steps < o.warmup_of(o.steps) + o.cooldown_of(o.steps)
        ),
        "--warmup {value} is not shorter than the run, which has {length.steps} steps: it ends "
        "before the learning rate is what --learning-rate says",
    ),
    *idle(
        "watchdog",
        lambda v, o, length: length.world_size == 1,
        "--watchdog {value} has no effect with one GPU",
    ),
    *idle(
        "eval_every_n_steps eval_num_steps eval_seed",
        lambda v, o, length: v > 0 and not (o.validates or o.eval_sets),
        "has no effect without --eval-file",
    ),
    *idle(
        "eval_num_steps",
        lambda v, o, length: (
            (o.validates or o.eval_sets)
            and not 0 < o.eval_every_n_steps < length.steps
            and length.steps <= length.steps_per_epoch
        ),
        "--eval-num-steps {value} has no effect: the only validation is the final one, of all "
        "sequences",
    ),
    *idle(
        "stop_after",
        lambda v, o, length: v > 0 and v >= measured_before_end(o, length),
        "has no effect: the run measures {keep_best} too few times before its end",
    ),
    # A run measures these, and a verification does not.
    *idle(
        "debug_log_abs_max debug_log_allocations debug_time_breakdown",
        lambda v, o, measuring: True,
        "without effect on a verification",
    ),
    *idle(
        "steps",
        lambda v, o, verification: True,
        "has no effect on a verification, which takes --verify-steps {verification}",
    ),
    *idle(
        "epochs",
        lambda v, o, verification: v != 1,
        "has no effect on a verification, which takes --verify-steps {verification}",
    ),
)

RULES = Rules(
    (
        *IMPLIED,
        *OPTIMIZER_RULES,
        *LOSS_RULES,
        *REFUSED,
        *REFUSED_WITH_MODEL,
        *REFUSED_HERE,
        *IDLE_ALONE,
        *IDLE_WITH_MODEL,
        *IDLE_WITH_RANKS,
        *IDLE_IN_RUNS,
        *SAVERS,
        *SAME_BITS,
    )
)
"""The rules of all options."""
