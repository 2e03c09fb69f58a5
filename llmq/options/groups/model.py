"""Model options: the model, its sizes and its adapters, with their rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.arch.mtp import MTP
from llmq.options.adapters import multiplied_sizes
from llmq.options.conditions import (
    adapts_experts,
    divided_modules,
    error,
    idle_pattern,
    lacking_targets,
    not_multiple,
    too_small_for_rank,
    uncoded_base,
    untrained_rows,
    wrong_for_experts,
    wrong_parts,
    wrong_tables,
)
from llmq.options.option_types import (
    ADAPTERS_GROUP,
    LORA_PARTS,
    LORA_TARGETS,
    NEW_PARTS,
    NONE,
    POSITIONS_GROUP,
    QUANTIZED,
    SIZES_GROUP,
    dtype_option,
    layer_set,
    numbers_of,
    option,
    parse_layers,
    parse_numbers,
    parse_parts,
    parse_rope,
    parse_targets,
    parse_vocab_size,
    switch,
)
from llmq.options.rule import REFUSE, Options, Rule, default, each, idle, refused


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model, its sizes and its adapters."""

    model: str = option(
        ".",
        "Directory, Hugging Face repository in the local cache, or preset with --from-scratch",
        group="Model",
    )
    download: bool = switch(
        "Fetch what of --model is not in the local cache from the Hugging Face hub"
    )
    revision: str | None = option(
        None, "Commit, branch or tag of the repository that --model names; a run keeps the commit"
    )
    from_scratch: bool = switch("Start from random weights")
    init_proj_to_zero: bool = switch("Start the attention-out and MLP-down matrices at zero")
    add_tokens: str | None = option(
        None,
        "Special tokens that the model gets behind its last ones, as its tokenizer got in `llmq "
        "tokenize`, with commas between them; their rows begin as the mean of the others",
    )
    text_only: bool = switch(
        "Leave out of exports the tensors of --model that are not trained, such as a vision tower"
    )
    vocab_size: int | str | None = option(
        None,
        "Token ids; auto: as many as the tokenizer of the training files has",
        parse=parse_vocab_size,
        group=SIZES_GROUP,
    )
    hidden_size: int | None = option(None, "Channels of the residual stream", min=1)
    intermediate_size: int | None = option(None, "Width of the MLP", min=1)
    num_experts: int | None = option(None, "Experts of each layer that has any", min=1)
    active_experts: int | None = option(
        None, "Experts that a token meets", alias="num-experts-per-tok", min=1
    )
    expert_size: int | None = option(
        None, "Width of an expert", alias="moe-intermediate-size", min=1
    )
    num_layers: int | None = option(None, "Transformer blocks", alias="num-hidden-layers", min=1)
    num_heads: int | None = option(None, "Query heads", alias="num-attention-heads", min=1)
    num_kv_heads: int | None = option(
        None, "Key and value heads", alias="num-key-value-heads", min=1
    )
    head_dim: int | None = option(None, "Channels of one head", min=1)
    tie_embeddings: bool | None = option(
        None, "Use the embedding matrix as LM head", alias="tie-word-embeddings"
    )
    max_positions: int | None = option(
        None,
        "Longest sequence in tokens",
        alias="max-position-embeddings",
        min=1,
        group=POSITIONS_GROUP,
    )
    rope_theta: float | None = option(None, "Base of the rotary frequencies")
    rope_scaling: str | None = option(
        None,
        "How rotary frequencies are stretched: yarn:4, or the fields of config.json's "
        "rope_parameters; none: not",
        parse=parse_rope,
    )
    lora_rank: int = option(
        0,
        "Train adapters of this rank and leave the model as it is; 0: no",
        min=0,
        group=ADAPTERS_GROUP,
    )
    lora_alpha: float | None = option(None, "Numerator of the adapters' scaling", above=0)
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, all (those of blocks but experts) or some of "
        f"{', '.join(LORA_TARGETS)}, or a regular expression of modules' names",
        parse=parse_targets,
    )
    lora_layers: str = option(
        "all", "Layers that get adapters, all, or numbers and ranges: 0-11,20", parse=parse_layers
    )
    lora_rank_pattern: tuple[str, ...] = option(
        (),
        "Other ranks of modules, by regular expressions of their names' ends: down_proj=32",
        parse=parse_numbers,
    )
    lora_alpha_pattern: tuple[str, ...] = option(
        (), "Other numerators of the scaling, as --lora-rank-pattern", parse=parse_numbers
    )
    lora_dora: bool = switch(
        "Train the magnitude of each adapted row of the model beside its direction (DoRA)"
    )
    lora_dropout: float | None = option(
        None, "Part of the adapters' inputs that training sets to zero", min=0, below=1
    )
    lora_scaling: str | None = option(
        None,
        "Scaling of the adapters; {rule}: alpha / rank, rs: alpha / sqrt(rank)",
        choices=("standard", "rs"),
    )
    base_dtype: str | None = dtype_option(
        None,
        "Format in which the blocks' matrices beside the adapters are kept; {rule}. e4m3: 8 bits, "
        "for fp8 products; e4m3-blocks: 8 bits in blocks of 128 x 128, as DeepSeek's files have; "
        "int8: 8 bits, for products of cards without fp8; nf4: 4 bits in blocks of 64, as QLoRA's; "
        "mxfp4: experts in 4 bits, as gpt-oss's files have, the rest in bf16; nvfp4: 4 bits in "
        "blocks of 16, as NVIDIA's files have",
        *QUANTIZED,
    )
    adapter: Path | None = option(
        None, "Directory of adapters in PEFT's format to go on from; what is not given is as there"
    )
    train: tuple[str, ...] | None = option(
        None,
        f"Parts of the model that are trained beside adapters, some of {', '.join(LORA_PARTS)}",
        parse=parse_parts,
    )
    mtp_share: float | None = option(
        None,
        "Part of each micro-batch's sequences, the first ones and at least one, that --train mtp "
        "computes; {rule}",
        above=0,
        max=1,
    )
    only_scores: bool = False
    """Not an option: True for `llmq score`, which computes losses and trains nothing."""

    @property
    def has_adapters(self) -> bool:
        """True if there are adapters beside a frozen base model, which are trained unless the
        command only asks for losses."""
        return bool(self.lora_rank) and not (self.only_scores and self.adapter is None)

    @property
    def freezes_model(self) -> bool:
        """True if the base model is frozen, because only adapters or no weights at all are
        trained."""
        return self.has_adapters or self.only_scores

    @property
    def wants_adapters(self) -> bool:
        """True if there are adapters, also where --adapter gives their rank later."""
        return self.has_adapters or self.adapter is not None

    @property
    def trains_new_rows(self) -> bool:
        """True if, beside adapters, only the embedding rows of new tokens are trained."""
        return self.has_adapters and not {*NEW_PARTS}.isdisjoint(self.train)

    @property
    def trains_mtp(self) -> bool:
        """True if, beside adapters, a head for multi-token prediction is trained."""
        return self.has_adapters and MTP in self.train

    @property
    def trains_mtp_alone(self) -> bool:
        """True if nothing but a head for multi-token prediction is trained."""
        return self.trains_mtp and self.lora_targets == NONE

    def mtp_sequences(self, batch_size: int) -> int:
        """Number of sequences, the first of a micro-batch, that train a head for multi-token
        prediction."""
        return max(int(self.mtp_share * batch_size), 1)

    def mtp_part(self, batch_size: int) -> float:
        """Share of a micro-batch's sequences that train a head for multi-token prediction."""
        return self.mtp_sequences(batch_size) / batch_size if self.trains_mtp else 0.0

    @property
    def is_quantized(self) -> bool:
        """True if the frozen base model is stored as codes of fewer bits, such as nf4."""
        return self.freezes_model and self.base_dtype in QUANTIZED

    @property
    def lora_scale(self) -> float:
        """Scaling of the adapters' product B @ A: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
        root = math.sqrt(self.lora_rank) if self.lora_scaling == "rs" else self.lora_rank
        return self.lora_alpha / root


def _adapters_default(name: str, value: Callable[[Options], Any], **more: Any) -> Rule:
    return default(name, value, lambda v, o: o.has_adapters, **more)


MODEL_RULES = (
    _adapters_default(  # the values that PEFT's users choose
        "lora_alpha", lambda o: 2.0 * o.lora_rank, help="twice --lora-rank if not given"
    ),
    _adapters_default("lora_targets", lambda o: "all", help="all if not given"),
    _adapters_default("lora_dropout", lambda o: 0.0, help="0 if not given"),
    _adapters_default("lora_scaling", lambda o: "standard", help="standard, if not given"),
    default(
        "base_dtype",
        lambda o: o.model_dtype,
        lambda v, o: o.freezes_model,
        help="as --model-dtype if not given",
    ),
    _adapters_default(
        "train",
        lambda o: ("head",) if o.head == "score" else ("new-rows",) if o.add_tokens else (),
        help="with --add-tokens new-rows, with a score head head, if not given",
    ),
    default(
        "mtp_share",
        lambda o: 1.0 if o.trains_mtp_alone else 0.25,
        lambda v, o: o.trains_mtp,
        help="0.25 if not given, 1 where nothing else is trained",
    ),
    *refused(
        "add_tokens",
        lambda v, o: v is not None and o.head == "score" and o.wants_adapters,
        "rows of new tokens are trained beside adapters for a head of tokens only",
    ),
    *idle(
        "lora_rank lora_alpha lora_targets lora_layers lora_rank_pattern lora_alpha_pattern "
        "lora_dora lora_dropout lora_scaling lora_plus train",
        lambda v, o: o.only_scores and o.adapter is None,
        "has no effect: a model without --adapter is scored without adapters",
    ),
    *idle(
        "mtp_share",
        lambda v, o: v is not None and o.adapter is None and MTP not in (o.train or ()),
        "has no effect without --train mtp",
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
    *refused(
        "lora_targets",
        lambda v, o: o.has_adapters and v == NONE and o.train != (MTP,),
        "none is for --train mtp alone",
    ),
    *refused("train", lambda v, o, model: o.has_adapters and wrong_parts(o, model), "{found}"),
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
        "adapter",
        lambda v, o: v is not None and o.from_scratch,
        "needs the model that it adapts, not --from-scratch",
    ),
    Rule(
        group=ADAPTERS_GROUP,
        effect=REFUSE,
        when=lambda v, o: not o.wants_adapters and not o.only_scores,
        text="{flag}: needs --lora-rank",
    ),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o: any(not number for _, number in numbers_of(v, float)),
        "must be greater than 0, got {value}",
    ),
    *refused(
        "lora_rank_pattern",
        lambda v, o: error(numbers_of, v, int),
        "a rank is a whole number, got {value}",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.lora_dropout,
        "has no --lora-dropout: it would take a product of the model with dropped "
        "inputs beside that with all",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.has_adapters and o.matmul_dtype != o.model_dtype,
        "its products are in the model's format: leave --matmul-dtype out",
    ),
    *refused(
        "base_dtype",
        lambda v, o: (
            o.freezes_model
            and v not in (allowed := (o.model_dtype, *QUANTIZED))
            and " or ".join(allowed)
        ),
        "{value} does not go with --model-dtype {model_dtype}, use {found}",
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
        "adapter",
        lambda v, o, model: v is not None and not o.has_adapters,
        "is not read here: give --lora-rank instead",
    ),
    *refused(
        "lora_layers",
        lambda v, o, model: o.has_adapters and error(layer_set, v, model.num_layers),
        "{found}",
    ),
    *refused(
        "lora_dora",
        lambda v, o, model: v and o.has_adapters and adapts_experts(o, model),
        "adapters of experts have no magnitudes: leave experts out of --lora-targets",
    ),
    *each("lora_targets", REFUSE, lambda v, o, model: divided_modules(o, model), "{found}"),
    *refused(
        "lora_targets",
        lambda v, o, model: lacking_targets(o, model),
        "{model.architecture} has no {found}",
    ),
    *refused("lora_targets", lambda v, o, model: wrong_tables(o, model), "{found}"),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o, model: idle_pattern(o, model, v),
        "no module with adapters is called {found}",
    ),
    *each("lora_targets", REFUSE, lambda v, o, model: wrong_for_experts(o, model), "{found}"),
    *refused(
        "lora_rank",
        lambda v, o, model: too_small_for_rank(o, model),
        "{found[rank]} is larger than the matrix of {found[module]}, {found[rows]} x "
        "{found[columns]}: {found[way]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: (
            o.is_quantized and v == "int8" and not_multiple(multiplied_sizes(model), 16)
        ),
        "int8 needs multiples of 16, but the {found[0]} is {found[1]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: o.is_quantized and v == "mxfp4" and model.experts is None,
        "mxfp4 is for experts, which {model.architecture} has not: use nf4",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: uncoded_base(o, model),
        "{value} needs matrices of multiples of {found[2]} elements: {found[0]} has {found[1]}",
    ),
)
