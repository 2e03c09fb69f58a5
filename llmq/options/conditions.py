"""Facts and questions of rules' conditions (`rules.py`), which have a fact beside the options as
their third argument: the model (`ModelConfig`), a GPU (`DeviceSpec`), its `Card`, or one of those
here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq.arch.model_config import ModelConfig
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
from llmq.options.option_types import NEW_PARTS, OF_EXPERTS, lengths_of, numbers_of
from llmq.options.rule import Options

# Tokens whose logits are made at a time: rows with which products of the LM head still fill a GPU,
# and with which adding its gradient up once more for each part is little beside them. A plan goes
# through all parts: more than MOST_PARTS nobody needs, and to refuse those takes it minutes.
CHUNK_ROWS, TRAINED_CHUNK_ROWS, MOST_PARTS = 512, 16384, 512


def parts_of_logits(o: Options) -> int:
    """The number of parts in which logits are made if nobody says.

    A head that is not trained has no gradient to add up.
    """
    from llmq.base.operand import CODES_MULTIPLE  # here: --help does not wait for NumPy

    parts, trained = 1, {"embeddings", "head", *NEW_PARTS}
    frozen = o.wants_adapters and trained.isdisjoint(o.train or ())
    rows = CHUNK_ROWS if frozen else TRAINED_CHUNK_ROWS
    rows = max(rows, o.micro_tokens // MOST_PARTS)
    while o.micro_tokens % (2 * parts * CODES_MULTIPLE) == 0 and o.micro_tokens >= 2 * parts * rows:
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks there are, on how many machines, and whether they run on the CPU, which
    --device auto may have chosen."""

    world_size: int
    machines: int = 1
    on_cpu: bool = False

    @property
    def alone(self) -> str:
        """How messages call ranks that share nothing."""
        return "with one GPU" + (" on each machine" if self.machines > 1 else "")

    def shards(self, o: Options) -> int:
        """In how many parts they keep the state."""
        return o.shards(self.world_size, self.machines)


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is, and with how many ranks."""

    world_size: int
    steps: int
    steps_per_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The machines of a run: ranks of each, by name. ranks: of this process; processes: of all
    machines. most_summed: GPUs whose parts one kernel can sum."""

    on_gpus: bool
    machines: dict[str, int]
    ranks: int
    processes: int
    most_summed: int

    @property
    def listed(self) -> str:
        """The machines and their ranks."""
        return ", ".join(f"{count} on '{name}'" for name, count in self.machines.items())

    @property
    def or_less_shared(self) -> str:
        """The other advice where too many ranks share a state."""
        return ", or give --shard-over machine" if len(self.machines) > 1 else ""

    def shards(self, o: Options) -> int:
        """In how many parts the ranks keep the state."""
        return o.shards(sum(self.machines.values()), len(self.machines))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHere:
    """Whether it runs on the CPU, and why cuDNN cannot compute it on the GPU, if so."""

    on_cpu: bool
    unsupported: str | None


# ------------------------------------------------------------------------------------------------
# Questions


def why_no_cudnn(o: Options, unsupported: str | None) -> str | None:
    """Why cuDNN cannot compute the attention. unsupported: why it cannot for the GPU and model."""
    if o.document_mask:
        return "it knows no documents within a sequence, which --document-mask asks for"
    return unsupported


def why_not_half(o: Options) -> str | None:
    """Why no fp8 products are summed in half precision, which holds few of larger codes."""
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
    """The advice for a card without fp8. 8-bit bases imply their products' format."""
    if o.is_quantized and o.base_dtype == "e4m3":
        return "use --base-dtype int8, or --matmul-dtype bf16"
    return "use int8 or bf16"


def error(function: Callable[..., Any], *args: Any) -> str | None:
    """The error that the function raises for its arguments, as text."""
    try:
        function(*args)
    except (ConfigError, ValueError) as problem:
        return str(problem)
    return None


def draws(o: Options) -> bool:
    """Whether --seed decides about more than rounding."""
    return o.from_scratch or o.has_adapters or (o.lora_dropout or 0) > 0


def rounds(o: Options) -> bool:
    """Whether an update rounds at random."""
    return {o.model_dtype, o.opt_m_dtype, o.opt_v_dtype} != {"fp32"}


def writes(o: Options) -> bool:
    """Whether there are checkpoints that nobody asks for while the run goes."""
    return o.ckpt_interval > 0 or o.save_training_state or o.ckpt_every_minutes > 0


def measured_before_end(o: Options, length: Length) -> int:
    """Evaluations of the metric of --keep-best before the one at the end."""
    last, of_tasks = length.steps - 1, (o.task_every,)
    of_losses = (o.eval_every_n_steps, length.steps_per_epoch)
    periods = of_losses if o.keep_best.endswith("loss") else of_tasks
    periods = [period for period in periods if period > 0]
    count = sum(last // period for period in periods) + o.eval_at_start
    return count - (last // math.lcm(*periods) if len(periods) == 2 else 0)


def offloads_optimizer(o: Options) -> bool:
    """Whether an update reads or writes host memory."""
    return o.offload_master or o.offload_opt_m or o.offload_opt_v


def decodes(o: Options) -> bool:
    """Whether work weights are made from a base of another format at each use."""
    return o.is_quantized and o.base_dtype != o.matmul_dtype


def undivided(o: Options, ranks: Ranks, *parts: str) -> str | None:
    """Why to divide the blocks' "weights" or "gradients" does nothing for any of these parts."""
    storage, shards = o.weight_storage, ranks.shards(o)
    why = {"weights": storage.why_weights_stay, "gradients": storage.why_gradients_stay}
    reasons = [why[part](shards) for part in parts]
    alone = f"{ranks.alone} " if shards == 1 else ""
    return alone + " and ".join(reasons) if all(reasons) else None


def not_multiple(sizes: dict[str, int], multiple: int) -> tuple[str, int, int] | None:
    """The first size that is no multiple: its name, itself, and of what."""
    return next(((n, size, multiple) for n, size in sizes.items() if size % multiple), None)


def uncoded_product(o: Options, model: ModelConfig) -> tuple[str, int, int] | None:
    """The first size that a product of 8-bit codes cannot have."""
    from llmq.base.operand import CODES_MULTIPLE  # as above

    if o.matmul_dtype not in ("e4m3", "int8"):
        return None
    return not_multiple(multiplied_sizes(model), CODES_MULTIPLE)


def uncoded_base(o: Options, model: ModelConfig) -> tuple[str, int, int] | None:
    """The first matrix that --base-dtype cannot make blocks of, as not_multiple."""
    multiple = {"e4m3": 16, "nf4": 64, "mxfp4": 32}.get(o.base_dtype)  # elements
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
    return not_multiple(sizes, multiple)


def lacking_targets(o: Options, model: ModelConfig) -> str:
    """Those of --lora-targets, if they are named, that the model has not."""
    if not o.has_adapters or o.lora_targets == "all":
        return ""
    targets = adapters_of(o).targets
    if isinstance(targets, str):
        return "" if adapted_modules(model, adapters_of(o)) else f"modules that match {targets!r}"
    return ", ".join(name for name in targets if not has_target(model, name))


def idle_pattern(o: Options, model: ModelConfig, texts: tuple[str, ...]) -> str | None:
    """The first pattern of ranks or alphas that no module with adapters matches."""
    modules = adapted_modules(model, adapters_of(o)) if o.has_adapters else ()
    patterns = (pattern for pattern, _ in numbers_of(texts, float))
    return next((p for p in patterns if not any(matches(p, m) for m in modules)), None)


def wrong_for_experts(o: Options, model: ModelConfig) -> str | None:
    """The error where experts would get adapters that they cannot have."""
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
    """The problem with adapters of the embedding or the LM head."""
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
    """The error where a part of a module is named, and another one is not."""
    if not o.has_adapters:
        return None
    return error(lambda: [*all_adapted(model, adapters_of(o))])


def too_small_for_rank(o: Options, model: ModelConfig) -> dict[str, Any] | None:
    """The first matrix whose adapters would be larger than itself."""
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
    """The problem with several lengths of sequences."""
    lengths = [length for length, _ in lengths_of(o.seq_stages)]
    if o.steps < 1:
        return "lengths have parts of the steps: give --steps"
    if o.seq_len not in lengths:
        return f"{o.seq_len} is none of {o.seq_stages}, which the run has"
    wrong = next((n for n in lengths if n < 4 or n % 4 or o.micro_tokens % n), None)
    return wrong and (
        f"{wrong} is no multiple of 4 that divides the {o.micro_tokens} tokens of a micro-step "
        f"(--batch-size {o.batch_size} of {o.seq_len})"
    )


def adapts_experts(o: Options, model: ModelConfig) -> bool:
    return any(matrix.groups > 1 for _, matrix in all_adapted(model, adapters_of(o)))


def wrong_parts(o: Options, model: ModelConfig) -> str | None:
    """The problem with --train beside adapters: parts that are not there, or named twice."""
    named = {*o.train}
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


def untrained_rows(o: Options, model: ModelConfig) -> str | None:
    """The value of --train with which the rows of new tokens are trained beside adapters, None if
    they are."""
    if o.trains_new_rows:
        return None
    needed = ["embeddings", *([] if model.tied_embeddings else ["head"])]
    lacking = [part for part in needed if part not in o.train]
    if lacking == needed:
        lacking = ["new-rows"]
    return ",".join([*o.train, *lacking]) if lacking else None
