"""Facts and predicates for the conditions of rules (`rules.py`). A condition's third argument is a
fact beside the options: the model (`ModelConfig`), a GPU (`DeviceSpec`), its `Card`, or a class of
this file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP
from llmq.base.errors import ConfigError
from llmq.options.adapters import (
    adapted_modules,
    adapted_tables,
    adapters_of,
    all_adapted,
    divided_bias,
    has_target,
    matches,
    multiplied_sizes,
)
from llmq.options.option_types import NEW_PARTS, NONE, OF_EXPERTS, lengths_of, numbers_of
from llmq.options.rule import Options

# Tokens of one chunk of logits. Chunks this large fill a GPU in the LM head's products; a trained
# head also adds up its gradient once a chunk, so its chunks are larger. MOST_PARTS bounds the
# chunks because a plan steps through all of them, which takes minutes for more.
CHUNK_ROWS, TRAINED_CHUNK_ROWS, MOST_PARTS = 512, 16384, 512


def parts_of_logits(o: Options) -> int:
    """Default number of chunks of the logits. A frozen head has no gradient to add up, so its
    chunks are smaller."""
    from llmq.base.operand import CODES_MULTIPLE  # slow import, not for --help

    parts, trained = 1, {"embeddings", "head", *NEW_PARTS}
    frozen = o.wants_adapters and trained.isdisjoint(o.train or ())
    rows = CHUNK_ROWS if frozen else TRAINED_CHUNK_ROWS
    rows = max(rows, o.micro_tokens // MOST_PARTS)
    while o.micro_tokens % (2 * parts * CODES_MULTIPLE) == 0 and o.micro_tokens >= 2 * parts * rows:
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class Ranks:
    """Numbers of ranks and machines. on_cpu: True if the ranks run on the CPU, which --device auto
    may choose."""

    world_size: int
    machines: int = 1
    on_cpu: bool = False

    @property
    def alone(self) -> str:
        """Words of messages for ranks that share no state."""
        return "with one GPU" + (" on each machine" if self.machines > 1 else "")

    def shards(self, o: Options) -> int:
        """Number of shards in which the ranks keep the state."""
        return o.shards(self.world_size, self.machines)


@dataclass(frozen=True, slots=True)
class Length:
    """Number of ranks, steps, and steps per epoch of a run."""

    world_size: int
    steps: int
    steps_per_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Machines of a run. machines: number of ranks by machine name. ranks: number of ranks of this
    process. processes: number of processes on all machines. most_summed: most GPUs whose parts one
    kernel can sum."""

    on_gpus: bool
    machines: dict[str, int]
    ranks: int
    processes: int
    most_summed: int

    @property
    def listed(self) -> str:
        """Text that lists the machines and their ranks."""
        return ", ".join(f"{count} on '{name}'" for name, count in self.machines.items())

    @property
    def or_less_shared(self) -> str:
        """A second remedy, if too many ranks share a state; "" on one machine."""
        return ", or give --shard-over machine" if len(self.machines) > 1 else ""

    def shards(self, o: Options) -> int:
        """Number of shards in which the ranks keep the state."""
        return o.shards(sum(self.machines.values()), len(self.machines))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHere:
    """Facts of attention. on_cpu: True on the CPU. unsupported: the reason why cuDNN cannot compute
    this attention on the GPU, or None."""

    on_cpu: bool
    unsupported: str | None


# ------------------------------------------------------------------------------------------------
# Questions


def why_no_cudnn(o: Options, unsupported: str | None) -> str | None:
    """The reason why cuDNN cannot compute the attention, or None. unsupported: a reason that lies
    in GPU or model, or None."""
    if o.document_mask:
        return "it knows no documents within a sequence, which --document-mask asks for"
    return unsupported


def why_not_half(o: Options) -> str | None:
    """The reason why no fp8 products are summed in half precision, or None. Larger codes would make
    FP16 sums overflow."""
    if not o.is_fp8:
        return "needs --matmul-dtype e4m3"
    if o.fp8_fast_accumulation == "none":
        return "is for what --fp8-fast-accumulation permits, and none is"
    if o.gradient_dtype != "e4m3":
        return f"needs --gradient-dtype e4m3: {o.gradient_dtype} has larger codes"
    if o.freezes_model:
        return "does not go with adapters, codes of a base are too large"
    if o.mlp_dtype == "e4m3":
        return "does not go with --mlp-dtype e4m3: such products write no codes"
    if o.fp8_fast_accumulation == "all" and o.grad_accum_dtype != "bf16":
        return "with --fp8-fast-accumulation all needs --grad-accum-dtype bf16"
    return None


def instead_of_fp8(o: Options) -> str:
    """Advice for a card without fp8. Quantized bases imply the format of products."""
    if o.is_quantized and o.base_dtype == "e4m3":
        return "use --base-dtype int8, or --matmul-dtype bf16"
    return "use int8 or bf16"


def error(function: Callable[..., Any], *args: Any) -> str | None:
    """The text of the error that the function raises for its arguments; None if it raises none."""
    try:
        function(*args)
    except (ConfigError, ValueError) as problem:
        return str(problem)
    return None


def draws(o: Options) -> bool:
    """True if --seed decides about more than rounding."""
    return o.from_scratch or o.has_adapters or (o.lora_dropout or 0) > 0


def rounds(o: Options) -> bool:
    """True if an update rounds stochastically."""
    return {o.model_dtype, o.opt_m_dtype, o.opt_v_dtype} != {"fp32"}


def writes(o: Options) -> bool:
    """True if the run writes checkpoints on its own, not only on request."""
    return o.ckpt_interval > 0 or o.save_training_state or o.ckpt_every_minutes > 0


def measured_before_end(o: Options, length: Length) -> int:
    """Number of evaluations of --keep-best's metric before the evaluation at the end."""
    last, of_tasks = length.steps - 1, (o.task_every,)
    of_losses = (o.eval_every_n_steps, length.steps_per_epoch)
    periods = of_losses if o.keep_best.endswith("loss") else of_tasks
    periods = [period for period in periods if period > 0]
    count = sum(last // period for period in periods) + o.eval_at_start
    return count - (last // math.lcm(*periods) if len(periods) == 2 else 0)


def offloads_optimizer(o: Options) -> bool:
    """True if an update reads or writes host memory."""
    return o.offload_master or o.offload_opt_m or o.offload_opt_v


def decodes(o: Options) -> bool:
    """True if work weights are decoded at each use, from a base in another format."""
    return o.is_quantized and o.base_dtype != o.matmul_dtype


def undivided(o: Options, ranks: Ranks, *parts: str) -> str | None:
    """The reason why sharding these parts of the blocks ("weights", "gradients") does nothing, or
    None."""
    storage, shards = o.weight_storage, ranks.shards(o)
    why = {"weights": storage.why_weights_stay, "gradients": storage.why_gradients_stay}
    reasons = [why[part](shards) for part in parts]
    alone = f"{ranks.alone} " if shards == 1 else ""
    return alone + " and ".join(reasons) if all(reasons) else None


def exchanges_always(o: Options) -> str | None:
    """The option by which ranks exchange data in every micro-step; None if ranks exchange data only
    in the first and last micro-step of a step."""
    if o.shard_weights:
        return "--shard-weights"
    if o.shard_gradients and o.weight_storage.why_gradients_stay(2) is None:
        return "--shard-gradients"
    if o.context_parallel > 1:
        return "--context-parallel"
    return "--loss kto" if o.loss == "kto" else None


def not_multiple(sizes: dict[str, int], multiple: int) -> tuple[str, int, int] | None:
    """The first size that is not a multiple of `multiple`, as (name, size, multiple); None if all
    sizes are."""
    return next(((n, size, multiple) for n, size in sizes.items() if size % multiple), None)


def uncoded_product(o: Options, model: ModelConfig) -> tuple[str, int, int] | None:
    """The first size that products of 8-bit codes cannot have, in the form of not_multiple."""
    from llmq.base.operand import CODES_MULTIPLE  # slow import, not for --help

    if o.matmul_dtype not in ("e4m3", "int8", "ternary"):
        return None
    return not_multiple(multiplied_sizes(model), CODES_MULTIPLE)


def uncoded_base(o: Options, model: ModelConfig) -> tuple[str, int, int] | None:
    """The first matrix that --base-dtype cannot divide into blocks, in the form of not_multiple."""
    multiples = {"e4m3": 16, "e4m3-blocks": 16, "nf4": 64, "mxfp4": 32, "nvfp4": 16}  # elements
    multiple = multiples.get(o.base_dtype)
    if multiple is None or not o.freezes_model:
        return None
    width, head = model.hidden_size, model.head_dim
    sizes = {
        "queries": width * model.num_heads * head,
        "keys": width * model.num_kv_heads * head,
        "the MLP": width * model.intermediate_size,
    }
    for matrix in (m for layer in range(model.num_layers) for m in model.matrices(layer)):
        sizes |= {part.module: part.rows * matrix.shape[-1] for part in matrix.parts}
        if o.base_dtype == "e4m3-blocks":
            sizes |= {f"a row of {part.module}": matrix.shape[-1] for part in matrix.parts}
    return not_multiple(sizes, multiple)


def lacking_targets(o: Options, model: ModelConfig) -> str:
    """Names in --lora-targets that the model lacks, separated by commas."""
    if not o.has_adapters or o.lora_targets in ("all", NONE):
        return ""
    targets = adapters_of(o).targets
    if isinstance(targets, str):
        return "" if adapted_modules(model, adapters_of(o)) else f"modules that match {targets!r}"
    return ", ".join(name for name in targets if not has_target(model, name))


def idle_pattern(o: Options, model: ModelConfig, texts: tuple[str, ...]) -> str | None:
    """The first pattern of ranks or alphas that matches no adapted module; None if all match."""
    modules = adapted_modules(model, adapters_of(o)) if o.has_adapters else ()
    patterns = (pattern for pattern, _ in numbers_of(texts, float))
    return next((p for p in patterns if not any(matches(p, m) for m in modules)), None)


def wrong_for_experts(o: Options, model: ModelConfig) -> str | None:
    """The error if adapters of experts are impossible, else None."""
    has = o.has_adapters and model.experts is not None
    if has and {*OF_EXPERTS} <= {*adapters_of(o).targets}:
        return f"--lora-targets: {' and '.join(OF_EXPERTS)} are the same matrices: name one"
    every = all_adapted(model, adapters_of(o)) if has else ()
    for matrix in (matrix for _, matrix in every if matrix.groups > 1):
        rows = sum(part.stop - part.start for part in matrix.parts)
        if rows < matrix.shape[0] or len({(p.rank, p.scale) for p in matrix.parts}) > 1:
            name = matrix.parts[0].part.module
            return f"--lora-targets: experts of a layer have adapters alike, or none, as {name}"
        if matrix.rank % 8:
            return f"--lora-rank: adapters of experts need a multiple of 8, got {matrix.rank}"
        if o.lora_dropout:
            return "--lora-dropout: adapters of experts have none, as in PEFT: use 0"
    return None


def wrong_tables(o: Options, model: ModelConfig) -> str | None:
    """The problem with adapters of the embedding or the LM head, else None."""
    tables = adapted_tables(model, adapters_of(o)) if o.has_adapters else {}
    whole = {"embed": ("embeddings", *NEW_PARTS), "head": ("head", "new-rows")}
    if model.tied_embeddings:
        whole = dict.fromkeys(whole, ("embeddings", *NEW_PARTS))
    for block in tables:
        name = "embedding" if block == "embed" else block
        if found := [part for part in whole[block] if part in o.train]:
            return f"{name} has no adapters beside --train={found[0]}, which trains it: name one"
        if o.lora_dora:
            return f"{name} has no magnitudes: leave it out, or --lora-dora"
        if block == "head" and o.head_dtype != o.model_dtype:
            return f"head needs its products in {o.model_dtype}: leave --head-dtype out"
    return None


def divided_modules(o: Options, model: ModelConfig) -> str | None:
    """The error if --lora-targets names only a part of a module, else None."""
    if not o.has_adapters:
        return None
    return error(lambda: [*all_adapted(model, adapters_of(o))])


def too_small_for_rank(o: Options, model: ModelConfig) -> dict[str, Any] | None:
    """Facts about the first matrix that is smaller than its adapters' rank; None if no matrix
    is."""
    if not o.has_adapters:
        return None
    for _, matrix in all_adapted(model, adapters_of(o)):
        for part, start, stop, rank, _ in matrix.parts:
            rows, columns = stop - start, matrix.shape[1]
            least = min(rows, columns)
            if rank > least:
                way = f"use at most {least}, or leave it out of --lora-targets"
                if o.adapter is not None:
                    way = f"`llmq merge` '{o.adapter}', and begin with new adapters"
                found = {"module": part.module.rpartition(".")[2], "rank": rank, "way": way}
                return found | {"rows": rows, "columns": columns}
    return None


def wrong_lengths(o: Options) -> str | None:
    """The problem with several sequence lengths, else None."""
    lengths = [length for length, _ in lengths_of(o.seq_stages)]
    if o.steps < 1:
        return "lengths have parts of the steps: give --steps"
    if o.seq_len not in lengths:
        return f"{o.seq_len} is none of {o.seq_stages}, which the run has"
    least, tokens = 4 * o.context_parallel, o.batch_size * o.seq_len
    wrong = next((n for n in lengths if n < least or n % least or tokens % n), None)
    return wrong and (
        f"{wrong} is no multiple of {least} that divides the {tokens} tokens of a micro-step "
        f"(--batch-size {o.batch_size} of {o.seq_len})"
    )


def why_undivided(o: Options, model: ModelConfig) -> str | None:
    """The reason why GPUs cannot divide sequences of this model, or None."""
    parts, name = o.context_parallel, model.architecture
    if model.positions not in ("rope", "none"):
        return f"{name} has a learned weight for each position"
    if o.trains_mtp:
        return "--train mtp reads the next token, which another GPU may have"
    for half in (half for layer in range(model.num_layers) for half in model.halves(layer)):
        if half.kind in ("short_conv", "latent_attention"):
            return f"{name} has layers of {half.kind}"
        if half.kind in ("delta", "mamba"):
            values = model.mixers.value_heads
            if values < parts:
                return f"each GPU needs a state of its own, and layers of {name} have {values}"
        if half.kind != "attention":
            continue
        if half.sizes["wide_qk_norm"]:
            return f"{name} has norms over all heads of a token"
        query = half.sizes["heads"].query
        if query < parts:
            return f"each GPU needs a query head of its own, and layers of {name} have {query}"
    return None


def adapts_experts(o: Options, model: ModelConfig) -> bool:
    return any(matrix.groups > 1 for _, matrix in all_adapted(model, adapters_of(o)))


def wrong_parts(o: Options, model: ModelConfig) -> str | None:
    """The problem with --train beside adapters, else None: parts that are missing or named
    twice."""
    named = {*o.train}
    if MTP in named and (wrong := _wrong_for_mtp(o, model)):
        return wrong
    if "head" in named and model.tied_embeddings:
        return "the head is the embedding in this model: name embeddings"
    new = [part for part in NEW_PARTS if part in named]
    if new and model.new_tokens is None:
        return f"{new[0]} are those of --add-tokens, which is not given"
    if new and named & {"embeddings", "head"}:
        return f"embeddings and head have the new rows: leave {new[0]} out, or train these alone"
    if len(new) > 1:
        return "new-rows are those of the embedding too: leave new-embeddings out"
    if {"biases", "adapted-biases"} <= named:
        return "biases are all biases: leave adapted-biases out, or biases"
    matrices = (m for layer in range(model.num_layers) for m in model.matrices(layer))
    norms = model.norm == "layernorm" and "biases" in named
    if named & {"biases", "adapted-biases"} and not norms and not any(m.bias for m in matrices):
        return f"{model.architecture} has no biases"
    if named & {"biases", "adapted-biases"} and any(
        matrix.fused for _, matrix in all_adapted(model, adapters_of(o))
    ):
        return "PEFT has no biases beside adapters of fused experts: leave them out"
    some = divided_bias(model, adapters_of(o)) if "adapted-biases" in named else None
    return some and f"adapted-biases: {some}"


def _wrong_for_mtp(o: Options, model: ModelConfig) -> str | None:
    """The problem with a head for multi-token prediction, else None."""
    if model.arch.mtp is None:
        return f"no MTP head of {model.architecture} can be trained"
    if o.loss != "ce" or o.head == "score":
        return "an MTP head learns with --loss ce alone"
    if o.lora_targets == NONE and o.matmul_dtype != o.model_dtype:
        return f"an MTP head alone has products in {o.model_dtype}: give --matmul-dtype so"
    if o.head_dtype != o.model_dtype:
        return f"an MTP head shares the LM head, in {o.model_dtype}: leave --head-dtype out"
    return None


def untrained_rows(o: Options, model: ModelConfig) -> str | None:
    """The value of --train that also trains the rows of new tokens beside adapters; None if these
    rows are trained already."""
    if o.trains_new_rows:
        return None
    needed = ["embeddings", *([] if model.tied_embeddings else ["head"])]
    lacking = [part for part in needed if part not in o.train]
    if lacking == needed:
        lacking = ["new-rows"]
    return ",".join([*o.train, *lacking]) if lacking else None
